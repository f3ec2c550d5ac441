"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): the delta rule with a decay per key channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...tree.draft_tree import ancestors
from ..wiring import BLANK

_BLOCK = 2**22  # numbers in the decay table that is held at a time: [..., channels of a block, n, n]


def step(state, q, k, v, log_decay, beta):
    """Return one token of Kimi Delta Attention.

        S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T,   a_t = exp(log_decay)
        o_t = S_t^T q_t

    state [k, v]; q, k [k], already scaled and normalised by the caller; v [v]; log_decay [k] <= 0; beta is a scalar.
    Returns the new state and o_t [v]. Computes in the dtype it is given. Source: Kimi Linear, arXiv 2510.26692.
    """
    state = log_decay.exp()[:, None] * state
    state = state + torch.outer(k, beta * (v - k @ state))
    return state, q @ state


@dataclass(frozen=True, eq=False)
class TreeScan:
    """The outputs [..., n, v] of a tree pass, and all that any node's state follows from.

    from_start [..., n, k]: decay since the initial state; log_decay, keys [..., n, k]; updates [..., n, v]: what each
    node wrote; reach [n, n]: which rows a node's state holds; initial [..., k, v].
    """

    output: torch.Tensor
    from_start: torch.Tensor
    log_decay: torch.Tensor
    keys: torch.Tensor
    updates: torch.Tensor
    reach: torch.Tensor
    initial: torch.Tensor

    def state(self, node: int) -> torch.Tensor:
        """Return the state after `node`, [..., k, v]."""
        path = self.reach[node][:, None]
        strict = self.reach - torch.eye(len(self.reach), dtype=self.reach.dtype, device=self.reach.device)
        between = (strict.T @ (path * self.log_decay)).exp() * path
        return self.from_start[..., node, :, None] * self.initial + (between * self.keys).mT @ self.updates


def tree_form(initial, q, k, v, log_decay, beta, sources: Sequence[int]) -> TreeScan:
    """Compute all nodes of a wiring at once: the delta rule's UT system on ancestors, with a decay per channel.

    Unrolled along i's sources, with D_ij the decays [k] after j up to i and G_i those since the initial state S_0,

        u_i = b_i (v_i - S_0^T (G_i * k_i) - sum_{j strictly before i} (k_i . D_ij * k_j) u_j)
        o_i = S_0^T (G_i * q_i) + sum_{j up to i} (q_i . D_ij * k_j) u_j

    Chunked kernels split D_ij into exp(g_i) exp(-g_j), which overflows where a channel decays fast. Here the log decays
    between j and i are summed, so no factor exceeds 1; the table of them is made for a block of channels at a time.
    A row's arithmetic depends on the rows it reads and on the shapes alone.

    initial [..., k, v]; q, k, log_decay [..., n, k]; v [..., n, v]; beta [..., n]; sources as in `Plan.state`.
    Computes in the dtype it is given. Sources: arXiv 2510.26692, and the UT transform of arXiv 2406.06484.
    """
    n, channels = k.shape[-2:]
    reach = torch.tensor(ancestors(tuple(sources)), device=k.device, dtype=k.dtype)
    strict = reach - torch.eye(n, dtype=k.dtype, device=k.device)
    from_start = (reach @ log_decay).exp()
    if BLANK in sources:
        blank = torch.tensor([source == BLANK for source in sources], dtype=k.dtype, device=k.device)
        from_start = from_start * (1 - reach @ blank)[:, None]
    of_keys, of_queries = k.new_zeros(*k.shape[:-1], n), k.new_zeros(*k.shape[:-1], n)
    size = max(1, _BLOCK // max(1, n * n * (k[..., 0, 0].numel())))
    for first in range(0, channels, size):
        g, left, right = (x[..., first : first + size].mT for x in (log_decay, k, q))  # [..., block, n]
        between = ((reach * g[..., None, :]) @ strict).exp() * reach * left[..., None, :]
        of_keys = of_keys + (left[..., None] * between).sum(-3)
        of_queries = of_queries + (right[..., None] * between).sum(-3)
    wanted = beta[..., None] * (v - (from_start * k) @ initial)
    system = beta[..., None] * of_keys * strict
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (from_start * q) @ initial + of_queries @ updates
    return TreeScan(output, from_start, log_decay, k, updates, reach, initial)
