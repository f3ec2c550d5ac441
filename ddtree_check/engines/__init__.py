"""Engines: they compute logits for a tree and keep its states. They hold no tolerance, no verdict and no printing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import UsageError
from ..tree import DraftTree
from ..wiring import Layer, Wiring

ENGINES = {  # looked up by name, imported on first use
    "transformers": "ddtree_check.engines.transformers:TransformersEngine",
}


class Engine(Protocol):
    """What `check` needs of an engine. Logits are tensors [nodes, vocabulary] in the model's dtype, on any device.

    Prefix and Verified are opaque and never modified by what follows: any number of passes may start from one Prefix.
    """

    vocab_size: int
    max_length: int | None  # positions the model was made for; None if it does not say
    layers: tuple[Layer, ...]  # what each layer reads across rows
    exact_control: bool  # clean nodes of two wirings agree bit for bit

    def describe(self) -> dict[str, Any]:
        """Versions, device, dtype, kernels, flags: all that can change a number."""

    def supports(self, wiring: Wiring | None) -> str | None:
        """None, or the reason why a pass under this wiring cannot be made."""

    def prefill(self, tokens: Sequence[int]) -> Any:
        """The Prefix after `tokens` (at least one); its `logits` [vocabulary] are those of the last token."""

    def step(self, prefix: Any, token: int) -> tuple[Any, Any]:
        """One plain decode step: the logits [vocabulary] after `token`, and the Prefix that then stands."""

    def decode(self, prefix: Any, tree: DraftTree, *, batched: bool = False) -> Any:
        """Logits at every node by plain steps along its path; each node once, alone, or level by level if `batched`."""

    def verify(self, prefix: Any, tree: DraftTree, wiring: Wiring | None) -> Any:
        """One pass over all rows: a Verified with `logits`. None is the engine's own multi-token pass, no fork."""

    def commit(self, verified: Any, node: int) -> Any:
        """The Prefix after the path to `node`, stored the way the engine and the wiring store it."""

    def contents(self, prefix: Any) -> tuple[int, list[dict[str, Any]]]:
        """How many tokens a Prefix stands after, and what each layer carries, as tensors by channel: `keys` and
        `values` [rows, d] and `conv` (`conv.1` ... for more) [inputs, d], the oldest row first; `recurrent` [...]."""

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> Any:
        """Full forward passes without a cache: the last `keep` rows' logits [paths, keep, vocabulary] of each path."""


def load_engine(name: str, *args, **settings) -> Engine:
    """An engine by name. Raises UsageError for an unknown name or a missing package."""
    if name not in ENGINES:
        raise UsageError(f"engine: got {name!r}, expected one of {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute).load(*args, **settings)
