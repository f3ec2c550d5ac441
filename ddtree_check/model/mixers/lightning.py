"""Lightning attention (arXiv 2401.04658, MiniMax-01 arXiv 2501.08313): linear attention with a fixed decay per head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import Folded, decay, fold


def step(state, q, k, v, log_decay):
    """Return one token of lightning attention.

        S_t = a S_{t-1} + k_t v_t^T,   a = exp(log_decay)
        o_t = S_t^T q_t

    state [k, v]; q, k [k]; v [v]; log_decay <= 0 is a scalar, the same for every token.
    Returns the new state and o_t [v]. Computes in the dtype it is given.
    Sources: Lightning Attention-2, arXiv 2401.04658; MiniMax-01, arXiv 2501.08313.
    """
    state = log_decay.exp() * state + torch.outer(k, v)
    return state, q @ state


def tree_form(initial, q, k, v, log_decay, sources: Sequence[int]) -> decay.Scan:
    """Compute all nodes of a wiring at once: linear attention whose mask is the decay along the ancestor relation.

        o_i = G_i S_0^T q_i + sum_{j up to i} D_ij (q_i . k_j) v_j,   D_ij = a^(steps from j to i)

    initial [..., k, v]; q, k [..., n, k]; v [..., n, v]; log_decay [...], one a head; sources as in `Plan.state`.
    A row's arithmetic depends on the rows it reads and on the shapes alone. Computes in the dtype it is given.
    """
    _, between, from_start = decay.along(log_decay[..., None].expand(*log_decay.shape, len(sources)), sources)
    output = from_start[..., None] * (q @ initial) + (between * (q @ k.mT)) @ v
    return decay.Scan(output, from_start, between, k, v, initial)


def folded(initial, q, k, v, log_decay, sources: Sequence[int]) -> Folded:
    """Compute `tree_form` token by token: every state is rounded to the dtype given, as a chain rounds it."""

    def heads(state, q, k, v):
        state = log_decay.exp()[:, None, None] * state + k[..., None] @ v[..., None, :]
        return state, (q[..., None, :] @ state)[..., 0, :]

    states, output = fold(heads, initial, [x.movedim(-2, 0) for x in (q, k, v)], sources)
    return Folded(output.movedim(0, -2), states)
