"""The real-gated linear recurrent unit of Griffin and RecurrentGemma (arXiv 2402.19427)."""

from __future__ import annotations

from collections.abc import Sequence

from . import Folded, fold


def step(state, x, decay):
    """Return one token of the recurrence.

        h_t = a_t * h_{t-1} + x_t,   x_t = sqrt(1 - a_t^2) * (i_t * u_t),   o_t = h_t

    Every product is per channel; the gates a_t, i_t and the normalised input x_t are the caller's.
    state, x, decay [d]. Returns the new state and o_t, the same vector. Computes in the dtype it is given.
    Source: Griffin, arXiv 2402.19427, section 2.4.
    """
    state = decay * state + x
    return state, state


def tree_form(initial, x, decay, sources: Sequence[int]) -> Folded:
    """Return all nodes of a wiring, level by level: as many vectorised steps as the tree is deep.

    The closed form, o_i = G_i h_0 + sum_j D_ij x_j, needs an [n, n] table of decays for each channel, because channels
    share none: n times the work of the fold, and no matrix product to make up for it. So the fold is used, in the
    arithmetic of `step`.

    initial [..., d]; x, decay [..., n, d]; sources as in `Plan.state`. Computes in the dtype it is given.
    """
    states, output = fold(step, initial, (x.movedim(-2, 0), decay.movedim(-2, 0)), sources)
    return Folded(output.movedim(0, -2), states)
