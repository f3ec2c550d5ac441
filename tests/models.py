"""Small models and drawn trees that several test files share."""

from __future__ import annotations

import functools

import numpy as np
import torch
from transformers import AutoConfig

from ddtree_check.engines.transformers.engine import TransformersEngine
from ddtree_check.engines.transformers.loading import build_random
from ddtree_check.model.small_shapes import SHAPES, VOCAB
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
PLAIN = ("llama", "qwen3")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_engine(family: str, dtype: str = "float32", mixers: str = "library", seed: int = 0, **changes):
    config = AutoConfig.for_model(family, **(SHAPES[family] | changes))
    model = build_random(config, dtype=DTYPES[dtype], device=torch.device("cpu"), seed=seed)
    return TransformersEngine(model, mixers=mixers, provenance={"name": f"tiny {family}", "weights": "random"})


engine = functools.cache(make_engine)  # shared: a test that changes its engine makes its own


def tree(name: str = "random", nodes: int = 16, *, order: str = "heap", seed: int = 0, root: int = 5) -> DraftTree:
    return shape(name, nodes, vocab=VOCAB, seed=seed, order=order, root=root)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def nan_at_the_root(logits: torch.Tensor, tree: DraftTree, wiring) -> torch.Tensor:
    """For `Faulty(engine, logits=...)`."""
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[1:]])


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest |difference| of each row; inf where there is a NaN."""
    return torch.nan_to_num((a.double() - b.double()).abs(), nan=torch.inf).amax(-1)
