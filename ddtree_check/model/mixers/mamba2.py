"""The Mamba-2 recurrence (structured state space duality, arXiv 2405.21060), for one token and for a whole tree."""

from __future__ import annotations

import torch

from . import decay


def step(state, x, dt, a, b, c, d):
    """Return one token of one Mamba-2 head.

        S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T
        y_t = S_t c_t + d x_t

    state [p, s]; x [p]; b, c [s]; dt > 0 (after softplus and limits), a < 0 and d are scalars.
    Returns the new state and y_t [p]. Computes in the dtype it is given. Source: arXiv 2405.21060, sections 2 and 7.
    """
    state = (dt * a).exp() * state + torch.outer(dt * x, b)
    return state, state @ c + d * x


def tree_form(initial, x, dt, a, b, c, d, sources) -> decay.Scan:
    """Compute all nodes of a wiring at once: masked attention, the decay along the tree in place of the causal mask.

    Unrolled along i's sources, with D_ij the decay after j up to i and G_i the decay since the initial state S_0,

        y_i = G_i S_0 c_i + sum_{j up to i} D_ij (c_i . b_j) dt_j x_j + d x_i

    A row's arithmetic depends on the rows it reads and on the shapes alone, so nodes that read the same rows under two
    wirings agree bit for bit.

    initial [..., p, s]; x [..., n, p]; dt [..., n]; b, c [..., n, s]; a, d [...]; sources as in `decay.along`.
    Computes in the dtype it is given. Source: the quadratic form of state space duality, arXiv 2405.21060.
    """
    _, between, from_start = decay.along(dt * a[..., None], sources)
    written = dt[..., None] * x
    output = from_start[..., None] * (c @ initial.transpose(-1, -2)) + (between * (c @ b.transpose(-1, -2))) @ written
    return decay.Scan(output + d[..., None, None] * x, from_start, between, written, b, initial)
