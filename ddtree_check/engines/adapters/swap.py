"""What every adapter of one pass shares."""

from __future__ import annotations

from typing import Any

import torch

from ...wiring import Plan


class Swap:
    """One pass under a plan. `layer` is the decoder layer that runs now; `record` keeps what a commit needs, or is None
    in a pass that moves the cache on by itself (a decode step through our mixers)."""

    def __init__(self, plan: Plan, record: Any | None):
        self.plan, self.record, self.layer = plan, record, -1

    def enter(self, layer: int) -> None:
        self.layer = layer

    def keep_inputs(self, rows: torch.Tensor) -> None:
        """The inputs [1, d, n] of one convolution of this layer, in the order of its calls."""
        if self.record is not None:
            self.record.inputs.setdefault(self.layer, []).append(rows)

    def final_state(self, scan, initial: torch.Tensor) -> torch.Tensor:
        """What the cache may hold after the pass. A tree has no last state, and a commit takes its node's own: the
        cache is left as it was. `scan.state(node)` must give the state after a node, in the form of the cache."""
        if self.record is None:
            return scan.state(len(self.plan.tree) - 1)
        self.record.scans[self.layer] = scan
        return initial
