"""The Mamba recurrence (selective state spaces, arXiv 2312.00752), for one token and for a whole tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import Folded, fold


def step(state, x, dt, a, b, c, d):
    """Return one token of the selective scan; every channel and state entry decays on its own.

        S_t = exp(dt_t a) * S_{t-1} + (dt_t * x_t) b_t^T      (* and exp by entry, dt_t a: dt_t by channel)
        y_t = S_t c_t + d * x_t

    state, a [p, s], a < 0; x, dt, d [p], dt > 0 (after softplus); b, c [s]. Returns the new state and y_t [p].
    Computes in the dtype it is given. Source: Mamba, arXiv 2312.00752, algorithm 2.
    """
    state = (dt[:, None] * a).exp() * state + torch.outer(dt * x, b)
    return state, state @ c + d * x


def tree_form(initial, x, dt, a, b, c, d, sources: Sequence[int]) -> Folded:
    """Compute all nodes of a wiring: one pass over the rows for what each decays and writes, then the fold by level.

    There is no cheap matrix form: the decay between two nodes differs by channel and by state entry, so the matrix of
    Mamba-2 would be one [n, n] matrix for each of the p * s entries. The fold costs one multiply-add an entry and node,
    and as many steps as the wiring is deep.

    Only the multiply-add runs by levels, whose sizes differ between wirings; it is exact to the rounding of each entry.
    All else runs over all n rows at once, so nodes that read the same rows under two wirings agree bit for bit.

    initial [p, s]; x, dt [n, p]; a [p, s]; b, c [n, s]; d [p]; sources as in `Plan.state`. Computes in the dtype it is
    given, except that a narrower `c` rounds the states before they are read, as the library does.
    """
    kept = (dt[..., None] * a).exp()
    written = (dt[..., None] * b[:, None, :]) * x[..., None]
    states, _ = fold(_advance, initial, (kept, written), sources)
    read = states.to(c.dtype) @ c[..., None]
    return Folded(read[..., 0] + d * x, states)


def _advance(state, kept, written):
    state = kept * state + written
    return state, state.new_zeros(len(state))  # the output is read from all states at once
