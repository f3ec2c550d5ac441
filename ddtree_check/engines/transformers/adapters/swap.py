"""What every adapter of one pass shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ....base.errors import Unsupported
from ....model.wiring import Plan


class Swap:
    """One pass under a plan. `layer` is the decoder layer that runs now; `record` keeps what a commit needs, or is None
    in a pass that moves the cache on by itself (a decode step through our mixers). `originals` are the functions that
    were swapped, by name."""

    def __init__(
        self, plan: Plan, record: Any | None, caches: Any = None, originals: Mapping[str, Callable] | None = None
    ):
        self.plan, self.record, self.caches, self.originals, self.layer = plan, record, caches, originals or {}, -1

    def enter(self, layer: int) -> None:
        self.layer = layer

    def keep_inputs(self, rows: torch.Tensor, number: int | None = None) -> None:
        """Keep the inputs [1, d, n] of one convolution of this layer; without a number, the next in order."""
        if self.record is not None:
            inputs = self.record.inputs.setdefault(self.layer, {})
            inputs[next(i for i in range(len(inputs) + 1) if i not in inputs) if number is None else number] = rows

    def committed(self) -> torch.Tensor:
        """Return the layer's recurrent state before the pass, for functions that are not handed it."""
        return self.caches.state(self.record.prefix.cache, self.layer)

    def final_state(self, scan, initial: torch.Tensor) -> torch.Tensor:
        """Return what the cache may hold after the pass. A tree has no last state, a commit takes its node's own: the
        cache is left as it was. `scan.state(node)` must give the state after a node, in the form of the cache."""
        if self.record is None:
            return scan.state(self.plan.tree.n - 1)
        self.record.scans[self.layer] = scan
        return initial


def training_only(swap: Swap, *_, **__):
    """Refuse a fused function that the library calls in training, without a cache that could be forked."""
    raise Unsupported(f"layer {swap.layer}: the model took its fused training path, which keeps no state to fork")
