"""How much of one node's contribution is left at another: what every scalar-decay recurrence shares on a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..tree import ancestors
from ..wiring import BLANK


class Decay(NamedTuple):
    """strict [n, n]: 1 where j lies strictly before i along i's sources, else 0; between [..., n, n]: the decay after j
    up to i, zero where nothing flows; from_start [..., n]: the decay since the initial state, zero behind a BLANK."""

    strict: torch.Tensor
    between: torch.Tensor
    from_start: torch.Tensor


def along(log_decay: torch.Tensor, sources: Sequence[int]) -> Decay:
    """The decays of a wiring. log_decay [..., n] <= 0; sources as in `Plan.state`. Computes in the dtype it is given.

    Log decays that lie between two nodes are summed; differences of running sums would cancel when decay is fast.
    A row depends on the rows it reads and on the shapes alone, so nodes that read the same rows under two wirings agree
    bit for bit.
    """
    dtype, device = log_decay.dtype, log_decay.device
    reach = torch.from_numpy(ancestors(sources).copy()).to(device, dtype)
    strict = reach - torch.eye(len(sources), dtype=dtype, device=device)
    between = ((reach * log_decay[..., None, :]) @ strict).exp() * reach
    from_start = (reach @ log_decay[..., None])[..., 0].exp()
    if BLANK in sources:
        blank = torch.tensor([source == BLANK for source in sources], dtype=dtype, device=device)
        from_start = from_start * (1 - (reach @ blank))
    return Decay(strict, between, from_start)
