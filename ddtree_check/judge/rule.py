"""When a difference is beyond noise: factors, bounds and shares, each with its calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from .differences import Differences

EXACT = ("float32", "float64")


@dataclass(frozen=True)
class Rule:
    """When a difference is beyond noise. Calibration: docs/verdict.md.

    factor, ulps   a node is beyond noise iff error > factor * control + ulps * ulp, per node
    near_rows      a contaminated node at most this many rows after a skip edge is expected to move
    near_share     the share of those that must, by dtype; below it the run is `insensitive`
    bounds         autoregressive decoding against a full forward pass: largest max_abs / std of a row in float32 and
                   float64, largest median rms / std otherwise (a few rows may be amplified, all of them may not)
    rounding       a multi-token pass over a chain may differ by this share of a row's std whatever its controls say:
                   they can be exactly 0, where a full forward pass happens to run the very kernels of a decode step
    across         where ar is another engine's: any right run may differ from it by this share of a row's std
    pooled         in bf16 and float16 a tree pass is systematically above noise iff its errors are more than so many
                   times its controls, in the geometric mean over the nodes and prompts of a run
    pooled_prompts from so many prompts on; the mean of fewer varies more and gets more room
    pooled_least   fewer cannot tell: of two, one prompt whose nodes are all moved by a near tie would be beyond
    """

    factor: float = 4.0
    ulps: float = 4.0
    near_rows: int = 2
    near_share: dict[str, float] = field(
        default_factory=lambda: {"float64": 1.0, "float32": 1.0, "bfloat16": 0.95, "float16": 0.95}
    )
    bounds: dict[str, float] = field(
        default_factory=lambda: {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.25, "float16": 0.25}
    )
    rounding: dict[str, float] = field(
        default_factory=lambda: {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}
    )

    across: dict[str, float] = field(
        default_factory=lambda: {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
    )
    pooled: float = 1.4
    pooled_prompts: int = 8
    pooled_least: int = 3

    def floor(self, controls: Sequence[np.ndarray], ulp: np.ndarray) -> np.ndarray:
        """Largest error [n] that `controls` (each [n], runs equal by construction) explain."""
        largest = np.max(np.stack(controls), axis=0) if controls else np.zeros_like(ulp)
        return self.factor * largest + self.ulps * ulp

    def chain_floor(self, controls: Sequence[np.ndarray], found: Differences, dtype: str) -> np.ndarray:
        """The floor [n] of a chain against full forward passes, which are not of its width: the largest of any node."""
        pooled = [np.full(len(found), np.max(control)) for control in controls]
        return np.maximum(self.floor(pooled, found.ulp), self.rounding[dtype] * found.std)

    def to_json(self) -> dict:
        return asdict(self)
