"""Engines: they compute logits for a tree and keep its states. They hold no tolerance, no verdict and no printing."""

from .contract import BaseEngine, Batches, Engine, Watched

__all__ = ["BaseEngine", "Batches", "Engine", "Watched"]
