"""How much of one node's contribution is left at another: what every scalar-decay recurrence shares on a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...tree.draft_tree import ancestors
from ..wiring import BLANK


class Decay(NamedTuple):
    """strict [..., n, n]: 1 where j lies strictly before i along i's sources, else 0; between [..., n, n]: the decay
    after j up to i, zero where nothing flows; from_start [..., n]: the decay since the initial state, zero behind a
    BLANK."""

    strict: torch.Tensor
    between: torch.Tensor
    from_start: torch.Tensor


@dataclass(frozen=True, eq=False)
class Scan:
    """What a tree pass leaves behind: the outputs, and all that any node's state follows from.

    output [..., n, *]; from_start [..., n] and between [..., n, n] as in `Decay`; left [..., n, a] and right
    [..., n, b]: the factors of what each node wrote; initial [..., a, b].
    """

    output: torch.Tensor
    from_start: torch.Tensor
    between: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    initial: torch.Tensor

    def state(self, node: int) -> torch.Tensor:
        """Return the state after `node`, [..., a, b]: S_i = G_i S_0 + sum_{j up to i} D_ij left_j right_j^T."""
        weighted = self.between[..., node, :, None] * self.left
        return self.from_start[..., node, None, None] * self.initial + weighted.transpose(-1, -2) @ self.right


def along(log_decay: torch.Tensor, sources: Sequence[int] | Sequence[Sequence[int]]) -> Decay:
    """Return the decays of a wiring. log_decay [..., n] <= 0; sources as in `Plan.state`, or one such a request: then
    log_decay is [b, ..., n] and so are the results. Computes in the dtype it is given.

    Log decays that lie between two nodes are summed; differences of running sums would cancel when decay is fast.
    A row depends on the rows it reads and on the shapes alone, so nodes that read the same rows under two wirings agree
    bit for bit.
    """
    dtype, device = log_decay.dtype, log_decay.device
    links = np.array(sources)
    rows = ancestors(tuple(sources)) if links.ndim == 1 else np.stack([ancestors(tuple(links)) for links in sources])
    reach = torch.tensor(rows, device=device, dtype=dtype)
    if links.ndim == 2:  # [b, 1 ..., n, n]
        reach = reach.reshape(len(links), *[1] * (log_decay.ndim - 2), *reach.shape[1:])
    strict = reach - torch.eye(links.shape[-1], dtype=dtype, device=device)
    between = ((reach * log_decay[..., None, :]) @ strict).exp() * reach
    from_start = (reach @ log_decay[..., None])[..., 0].exp()
    if (links == BLANK).any():
        blank = torch.from_numpy(links == BLANK).to(device, dtype).reshape(*reach.shape[:-1], 1)
        from_start = from_start * (1 - (reach @ blank)[..., 0])
    return Decay(strict, between, from_start)
