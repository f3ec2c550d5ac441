"""`mamba2_chunk_scan` and `mamba2_selective_state_update` of the Mamba-2 families."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....model.mixers import mamba2
from .swap import Swap


def rows(
    swap: Swap, hidden_states, dt, A, B, C, chunk_size=None, D=None, dt_bias=None, initial_states=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, **_,
):  # fmt: skip
    """Scan hidden_states [1, n, h, p]; dt [1, n, h]; A, D, dt_bias [h]; B, C [1, n, g, s]; initial_states [1, h, p, s].

    The time step is rounded to its own dtype, the rest is float32 or wider, and so is the output [1, n, h, p]: as in
    the original, whose limits on the time step the decode step does not know.
    """
    dt = _time_step(dt, dt_bias, dt_softplus).clamp(min=dt_limit[0], max=dt_limit[1])
    scan = _scan(swap, initial_states, hidden_states, dt, A, B, C, D)
    output = scan.output.transpose(1, 2).contiguous()  # callers view it
    return (output, swap.final_state(scan, initial_states)) if return_final_states else output


def one(swap: Swap, state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **_):
    """Step state [1, h, p, s], moved on in place as the original does; hidden_states, dt [1, h, p]; A [h, p, s]; B, C
    [1, g, s]; D and dt_bias [h, p]: each head's scalars, repeated. Returns [1, h, p]. Rounds like `rows`."""
    dt = _time_step(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
    skip = None if D is None else D[:, 0]
    scan = _scan(swap, state, hidden_states[:, None], dt[:, None], A[:, 0, 0], B[:, None], C[:, None], skip)
    state.copy_(swap.final_state(scan, state))
    output = scan.output[:, :, 0].to(hidden_states.dtype)
    return output if z is None else output * F.silu(z)


def _time_step(dt, bias, softplus):
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _scan(swap, initial, x, dt, a, b, c, d):
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.shape[2]
    b, c = (group.to(wide).repeat_interleave(heads // group.shape[2], dim=2).transpose(1, 2) for group in (b, c))
    d = torch.zeros_like(a) if d is None else d
    x, dt = x.to(wide).transpose(1, 2), dt.to(wide).transpose(1, 2)
    return mamba2.tree_form(initial.to(wide), x, dt, a.to(wide), b, c, d.to(wide), swap.plan.state)
