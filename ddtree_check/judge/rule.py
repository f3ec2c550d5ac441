"""When a difference is beyond noise: factors, bounds and shares, each with its calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..base.options import check_options, group, option, options

if TYPE_CHECKING:
    from .differences import Differences  # which imports torch

EXACT = ("float32", "float64")
DTYPES = ("float64", "float32", "bfloat16", "float16")
SHARES = "DTYPE=SHARE,..."


def _by_dtype(double: float, single: float, half: float) -> Callable[[], dict[str, float]]:
    return lambda: dict(zip(DTYPES, (double, single, half, half), strict=True))


@group("Rule of the verdict", later=True)
class Rule:
    """When a difference is beyond noise. Calibration: docs/verdict.md.

    factor, ulps   a node is beyond noise iff error > factor * control + ulps * ulp, per node
    near_rows, near_share   of the contaminated nodes so near after a skip edge this share must move, or the run is
                   `insensitive`
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

    factor: float = option(4.0, "How many times its control's error a node's may be.", "NUMBER", least=0)
    ulps: float = option(4.0, "And how many spacings of its logits more.", "NUMBER", least=0)
    near_rows: int = option(2, "Rows after a skip edge where a leak must move a node.", "N", least=0)
    near_share: dict[str, float] = option(
        _by_dtype(1.0, 1.0, 0.95), "Share of them that must move, or the run is insensitive.", SHARES, choices=DTYPES
    )
    bounds: dict[str, float] = option(
        _by_dtype(1e-9, 1e-4, 0.25), "What ar may differ by from a full forward pass.", SHARES, choices=DTYPES
    )
    rounding: dict[str, float] = option(
        _by_dtype(1e-9, 1e-4, 0.1), "What a chain may differ by, whatever its controls say.", SHARES, choices=DTYPES
    )
    across: dict[str, float] = option(
        _by_dtype(1e-3, 1e-3, 0.1), "What a run may differ by from another engine's ar.", SHARES, choices=DTYPES
    )
    pooled: float = option(1.4, "bf16, fp16: mean error of a tree pass by its controls' that fails.", "NUMBER", least=0)
    pooled_prompts: int = option(8, "Prompts from which on that holds as it is.", "N", least=1)
    pooled_least: int = option(3, "Prompts below which it says nothing.", "N", least=1)

    def __post_init__(self):
        check_options(self)
        for each in options(Rule):  # a dtype that is not named keeps its default
            if each.choices:
                object.__setattr__(self, each.name, each.default | getattr(self, each.name))

    def floor(self, controls: Sequence[np.ndarray], ulp: np.ndarray) -> np.ndarray:
        """Largest error [n] that `controls` (each [n], runs equal by construction) explain."""
        largest = np.max(np.stack(controls), axis=0) if controls else np.zeros_like(ulp)
        return self.factor * largest + self.ulps * ulp

    def chain_floor(self, controls: Sequence[np.ndarray], found: Differences, dtype: str) -> np.ndarray:
        """The floor [n] of a chain against full forward passes, which are not of its width: the largest of any node."""
        pooled = [np.full(len(found), np.max(control)) for control in controls]
        return np.maximum(self.floor(pooled, found.ulp), self.rounding[dtype] * found.std)
