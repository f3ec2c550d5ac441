"""Two runs of the same nodes ─► their differences, node by node over the full vocabulary, in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from ..trace.model import TopLogits

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
    Anything computed from a NaN or an inf is NaN, but tokens whose logit is -inf in both rows are left out.
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


def measure_any(reference: torch.Tensor | TopLogits, run: torch.Tensor | TopLogits, dtype: torch.dtype) -> Differences:
    """As `measure`, for rows of which either side may hold the top k only, of any two floating dtypes and devices.

    dtype: the dtype that was computed in, whose ulp is meant. With a top k, max_abs and rms are over the ids that both
    hold. Both rows are shifted by their log-sum-exp where it is known, else by the mean of what both hold. An id that
    one side's top k leaves out is at most its smallest there, so max_abs is at least what that leaves. Without whole
    rows kl and tv are NaN: they cannot be said. std is over the reference's logits that there are.
    """
    if isinstance(reference, torch.Tensor) and isinstance(run, torch.Tensor):
        run = run.to(reference.device)
        if reference.dtype != run.dtype:
            wide = torch.promote_types(torch.promote_types(reference.dtype, run.dtype), torch.float32)
            reference, run = reference.to(wide), run.to(wide)
        return measure(reference, run, dtype)
    sizes = [len(rows.values if isinstance(rows, TopLogits) else rows) for rows in (reference, run)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"compare: reference of {sizes[0]} rows, run of {sizes[1]}; expected as many")
    parts = [_measure_top(_Known.of(reference, row), _Known.of(run, row), dtype) for row in range(sizes[0])]
    return Differences(**{field.name: np.array([part[field.name] for part in parts]) for field in fields(Differences)})


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of one row: float64 logits by token id, ascending; `whole` if that is the vocabulary."""

    ids: np.ndarray
    values: np.ndarray
    lse: float | None
    whole: bool

    @classmethod
    def of(cls, rows: torch.Tensor | TopLogits, row: int) -> _Known:
        if isinstance(rows, torch.Tensor):
            values = rows[row].double().cpu()
            return cls(np.arange(len(values)), values.numpy(), float(values.logsumexp(-1)), True)
        ids = rows.ids[row].cpu().numpy()
        order = np.argsort(ids)
        lse = None if rows.lse is None else float(rows.lse[row])
        return cls(ids[order], rows.values[row].double().cpu().numpy()[order], lse, False)

    def left_out(self, other: _Known, shift: float) -> float:
        """How far an id that `other` leaves out must at least be off, both after `shift`; 0 if it leaves none out."""
        if other.whole:
            return 0.0
        own = self.values[~np.isin(self.ids, other.ids, assume_unique=True)]
        return float(own.max() - shift - other.values.min()) if len(own) else 0.0


def _measure_top(reference: _Known, run: _Known, dtype: torch.dtype) -> dict[str, float | int]:
    _, mine, theirs = np.intersect1d(run.ids, reference.ids, assume_unique=True, return_indices=True)
    difference = run.values[mine] - reference.values[theirs]
    if run.lse is not None and reference.lse is not None:
        shift = run.lse - reference.lse
    else:
        shift = float(difference.mean()) if len(difference) else 0.0
    largest = max(
        float(np.abs(difference - shift).max(initial=0.0)),
        run.left_out(reference, shift),
        reference.left_out(run, -shift),
    )
    peak = max(np.abs(run.values).max(), np.abs(reference.values).max())
    finite = bool(np.isfinite(peak) and np.isfinite(shift))
    ordered = np.sort(reference.values)
    argmax = int(reference.ids[np.argmax(reference.values)])
    held = run.values[run.ids == argmax]
    found = {
        "max_abs": largest,
        "rms": float(np.sqrt(np.mean(np.square(difference - shift)))) if len(difference) else largest,
        "margin": float(ordered[-1] - ordered[-2]),
        "ulp": float(ulp(torch.tensor(peak, dtype=torch.float64), dtype)) if finite else np.nan,
        "std": float(np.std(ordered, ddof=1)),
    }
    return {
        **{name: value if finite else np.nan for name, value in found.items()},
        "kl": np.nan,
        "tv": np.nan,
        "argmax": argmax,
        "run_argmax": int(run.ids[np.argmax(run.values)]),
        "ar_rank": int((run.values > held[0]).sum()) if len(held) else len(run.values),
    }


def measure(reference: torch.Tensor, run: torch.Tensor, dtype: torch.dtype | None = None) -> Differences:
    """Differences of two logit arrays [n, vocabulary] in one floating dtype, on one device.

    dtype: the one that was computed in, if the logits were widened since; its ulp is meant.
    Computes in float32 or wider, a few rows at a time: memory does not grow with the number of nodes or runs.
    Raises ValueError if the shapes or dtypes differ: broadcasting would hide a missing node.
    """
    if reference.shape != run.shape or reference.dtype != run.dtype or reference.ndim != 2:
        raise ValueError(
            f"compare: reference {tuple(reference.shape)} {reference.dtype}, run {tuple(run.shape)} {run.dtype}; "
            "expected [nodes, vocabulary] twice, of one dtype"
        )
    rows = max(1, CHUNK // reference.shape[-1])
    dtype = dtype or reference.dtype
    parts = [_measure(reference[at : at + rows], run[at : at + rows], dtype) for at in range(0, len(reference), rows)]
    return join(parts)


def join(parts: Sequence[Differences]) -> Differences:
    """One after another."""
    names = [field.name for field in fields(Differences)]
    return Differences(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _measure(reference: torch.Tensor, run: torch.Tensor, dtype: torch.dtype) -> Differences:
    wide = torch.promote_types(reference.dtype, torch.float32)
    a, b = reference.to(wide), run.to(wide)
    if ((a.amin(-1) == -torch.inf) & (b.amin(-1) == -torch.inf)).any():  # no array is made where there is no such row
        return _measure_present(a, b, (a == -torch.inf) & (b == -torch.inf), dtype)
    return _measure_rows(a, b, dtype)


def _measure_rows(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Differences:
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
        "ulp": ulp(largest, dtype),
        "std": a.std(-1) if a.shape[-1] > 1 else torch.zeros_like(largest),
    }
    found = {key: torch.where(finite, value.double(), torch.nan).cpu().numpy() for key, value in found.items()}
    return Differences(
        argmax=argmax.cpu().numpy(),
        run_argmax=run_argmax.cpu().numpy(),
        ar_rank=(b > wanted).sum(-1).cpu().numpy(),
        **found,
    )


def _measure_present(a: torch.Tensor, b: torch.Tensor, absent: torch.Tensor, dtype: torch.dtype) -> Differences:
    """Tokens that both rows leave out (-inf: padding of a vocabulary, a grammar) are left out of what is measured.
    A row without any other token stays as it is, and is NaN."""
    parts = []
    for x, y, gone in zip(a, b, absent, strict=True):
        there = torch.nonzero(gone if gone.all() else ~gone).flatten()
        part = _measure_rows(x[None, there], y[None, there], dtype)
        places = {name: there[getattr(part, name)].cpu().numpy() for name in ("argmax", "run_argmax")}
        parts.append(replace(part, **places))
    return join(parts)


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at |value|, in the dtype of `value`."""
    exponent = torch.frexp(value.double())[1].double() - 1
    return torch.finfo(dtype).eps * torch.exp2(exponent)


def digests(rows: torch.Tensor) -> list[int | None]:
    """Return a 64-bit digest of each row of floats [n, d], made on its device; None for a row with a NaN.

    Rows of other bits have other digests, but for a chance of 2**-48: a sum of 16 bits each with random odd weights.
    """
    words = rows.shape[-1] * rows.element_size() // 2
    weights, many = _weights(words, str(rows.device)), max(1, CHUNK // max(1, words))
    found: list[int | None] = []
    for at in range(0, len(rows), many):
        part = rows[at : at + many]
        sums = (part.view(torch.int16).to(torch.int64) * weights).sum(-1)
        lost = part.isnan().any(-1).tolist()
        found += [None if gone else value for value, gone in zip(sums.tolist(), lost, strict=True)]
    return found


@functools.lru_cache(maxsize=8)
def _weights(size: int, device: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (size,), generator=draw) * 2 + 1).to(device)
