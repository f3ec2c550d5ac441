"""What a pass of the transformers engine leaves behind, and what its rows attend to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from ...model.wiring import Plan
from ...tree.draft_tree import DraftTree


@dataclass(frozen=True, eq=False)
class Prefix:
    """A cache after `length` tokens, and the logits [vocabulary] of the last one. `features` [rows, d] are those of the
    tokens that this pass ran, where they are read."""

    cache: DynamicCache
    length: int
    logits: torch.Tensor
    features: torch.Tensor | None = None


@dataclass(eq=False)
class Verified:
    """One pass over a tree: logits [n, vocabulary] and what a commit needs. `plan` is None for the library's pass."""

    prefix: Prefix
    tree: DraftTree
    plan: Plan | None
    cache: DynamicCache
    logits: torch.Tensor | None = None
    scans: dict[int, Any] = field(default_factory=dict)  # layer -> what gives a node's recurrent state
    inputs: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # layer -> convolution -> inputs [1, d, n]
    ends: bool = True  # the library's pass ended with the tree's last row, whose state the cache then holds
    features: torch.Tensor | None = None  # [n, d], where they are read


def visible(plan: Plan, kept: int, window: int | None) -> np.ndarray:
    """Return bool [n, kept + n]: what the plan's rows attend to behind `kept` committed tokens, cut to a window."""
    n = plan.tree.n
    view = np.ones((n, kept + n), dtype=bool)
    view[:, kept:] = plan.mask
    if window is not None:
        position = np.array(plan.positions)
        view &= position[:, None] - np.concatenate([np.arange(-kept, 0), position]) < window
    return view
