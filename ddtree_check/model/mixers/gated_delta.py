"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), for one token and for a whole tree."""

from __future__ import annotations

import torch

from . import decay


def step(state, q, k, v, log_decay, beta):
    """Return one token of the gated delta rule.

        S_t = a_t S_{t-1} + k_t (b_t (v_t - k_t^T a_t S_{t-1}))^T,   a_t = exp(log_decay)
        o_t = S_t^T q_t

    state [k, v]; q, k [k], already scaled and normalised by the caller; v [v]; log_decay <= 0 and beta are scalars.
    Returns the new state and o_t [v]. Computes in the dtype it is given. Source: Gated DeltaNet, arXiv 2412.06464.
    """
    state = log_decay.exp() * state
    state = state + torch.outer(k, beta * (v - k @ state))
    return state, q @ state


def tree_form(initial, q, k, v, log_decay, beta, sources) -> decay.Scan:
    """Compute all nodes of a wiring at once: the delta rule's UT system on the ancestor relation, not on row order.

    Unrolled along i's sources, with D_ij the decay after j up to i and G_i the decay since the initial state S_0,

        u_i = b_i (v_i - G_i S_0^T k_i - sum_{j strictly before i} D_ij (k_i . k_j) u_j)
        o_i = G_i S_0^T q_i + sum_{j up to i} D_ij (q_i . k_j) u_j

    which is one unit lower triangular system for u. A row's arithmetic depends on the rows it reads and on the shapes
    alone, so nodes that read the same rows under two wirings agree bit for bit.

    initial [..., k, v]; q, k [..., n, k]; v [..., n, v]; log_decay, beta [..., n]; sources as in `decay.along`.
    Computes in the dtype it is given. Source: DeltaNet's UT transform, arXiv 2406.06484, and arXiv 2412.06464.
    """
    strict, between, from_start = decay.along(log_decay, sources)
    system = beta[..., None] * between * (k @ k.transpose(-1, -2)) * strict
    wanted = beta[..., None] * (v - from_start[..., None] * (k @ initial))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = from_start[..., None] * (q @ initial) + (between * (q @ k.transpose(-1, -2))) @ updates
    return decay.Scan(output, from_start, between, k, updates, initial)
