"""Two runs of the same nodes ─► their differences, node by node over the full vocabulary, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

CHUNK = 1 << 19  # logits widened at a time: two rows of a 248,320-token vocabulary


@dataclass(frozen=True, eq=False)
class Differences:
    """Per node, float64 or int64 numpy [n]. `max_abs` decides a node; the other figures say how it differs.

    max_abs, rms   of the centred logit difference (a shift of a whole row changes no probability)
    kl             KL(reference || run) in nats;  tv  total variation
    argmax, run_argmax   of both, the lowest id on equal logits;  margin  the reference's first minus second logit
    ar_rank        how many tokens the run puts before the reference's argmax
    ulp            spacing of the runs' dtype at the largest |logit| of either row
    std            standard deviation of the reference row
    Anything computed from a NaN or an inf is NaN.
    """

    max_abs: np.ndarray
    rms: np.ndarray
    kl: np.ndarray
    tv: np.ndarray
    argmax: np.ndarray
    run_argmax: np.ndarray
    margin: np.ndarray
    ar_rank: np.ndarray
    ulp: np.ndarray
    std: np.ndarray

    def __len__(self) -> int:
        return len(self.max_abs)

    def __getitem__(self, nodes: Sequence[int]) -> Differences:
        return Differences(**{field.name: getattr(self, field.name)[nodes] for field in fields(self)})

    @property
    def changed(self) -> np.ndarray:
        """bool [n]: the argmax differs."""
        return self.argmax != self.run_argmax


def measure(reference: torch.Tensor, run: torch.Tensor) -> Differences:
    """Differences of two logit arrays [n, vocabulary] in one floating dtype, on one device.

    Computes in float32 or wider, a few rows at a time: memory does not grow with the number of nodes or runs.
    Raises ValueError if the shapes or dtypes differ: broadcasting would hide a missing node.
    """
    if reference.shape != run.shape or reference.dtype != run.dtype or reference.ndim != 2:
        raise ValueError(
            f"compare: reference {tuple(reference.shape)} {reference.dtype}, run {tuple(run.shape)} {run.dtype}; "
            "expected [nodes, vocabulary] twice, of one dtype"
        )
    rows = max(1, CHUNK // reference.shape[-1])
    parts = [_measure(reference[at : at + rows], run[at : at + rows]) for at in range(0, len(reference), rows)]
    return join(parts)


def join(parts: Sequence[Differences]) -> Differences:
    """One after another."""
    names = [field.name for field in fields(Differences)]
    return Differences(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _measure(reference: torch.Tensor, run: torch.Tensor) -> Differences:
    wide = torch.promote_types(reference.dtype, torch.float32)
    a, b = reference.to(wide), run.to(wide)
    largest = torch.maximum(a.abs().amax(-1), b.abs().amax(-1))
    finite = largest.isfinite()
    top = a.topk(min(2, a.shape[-1]), dim=-1).values
    argmax, run_argmax = a.argmax(-1), b.argmax(-1)
    wanted = b.gather(-1, argmax[:, None])
    difference = (b - b.mean(-1, keepdim=True)) - (a - a.mean(-1, keepdim=True))
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    p = log_p.exp()
    found = {
        "max_abs": difference.abs().amax(-1),
        "rms": difference.square().mean(-1).sqrt(),
        "kl": (p * (log_p - log_q)).sum(-1).clamp_min(0),  # rounding can leave a tiny negative sum
        "tv": (p - log_q.exp()).abs().sum(-1) / 2,
        "margin": top[:, 0] - top[:, -1],
        "ulp": ulp(largest, reference.dtype),
        "std": a.std(-1),
    }
    found = {key: torch.where(finite, value.double(), torch.nan).cpu().numpy() for key, value in found.items()}
    return Differences(
        argmax=argmax.cpu().numpy(),
        run_argmax=run_argmax.cpu().numpy(),
        ar_rank=(b > wanted).sum(-1).cpu().numpy(),
        **found,
    )


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at |value|, in the dtype of `value`."""
    exponent = torch.frexp(value.double())[1].double() - 1
    return torch.finfo(dtype).eps * torch.exp2(exponent)
