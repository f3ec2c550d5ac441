"""`mamba_selective_scan` and `mamba_selective_state_update` of the Mamba families."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....model.mixers import Folded, mamba1
from .swap import Swap


class Heads:
    """The scans of one layer, one a Mamba head: the library calls once for each."""

    def __init__(self):
        self.scans = []

    def state(self, node: int) -> torch.Tensor:
        """Return the state after `node`, [1, h, p, s]."""
        return torch.stack([scan.state(node) for scan in self.scans])[None]


class Single:
    """The scan of a layer without heads; adds the batch of the cache."""

    def __init__(self, scan: Folded):
        self.scan = scan

    def state(self, node: int) -> torch.Tensor:
        """Return the state after `node`, [1, p, s]."""
        return self.scan.state(node)[None]


def rows(
    swap: Swap, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False, **_,
):  # fmt: skip
    """Scan hidden_states, dt, z [1, p, n]; A [p, s]; B, C [1, s, n]; D, delta_bias [p]. Returns [1, p, n], a state.

    The original knows no initial state and starts from zeros, whatever the cache holds: a fault of the library's
    multi-token pass. Here the scan starts from the committed state.
    """
    initial, head = _committed(swap)
    columns = (x.transpose(1, 2) for x in (hidden_states, dt, B, C))
    scan, out = _scan(swap, initial, *columns, A, D, delta_bias, delta_softplus)
    _record(swap, scan, head)
    out = out.transpose(1, 2)
    if z is not None:
        out = out * F.silu(z)
    return (out, initial[None]) if return_last_state else out


def one(swap: Swap, state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **_):
    """Step state [1, p, s], moved on in place as the original does; hidden_states, dt, z [1, p]; B, C [1, s]."""
    scan, out = _scan(swap, state[0], *(x[:, None] for x in (hidden_states, dt, B, C)), A, D, dt_bias, dt_softplus)
    if swap.record is None:
        state.copy_(scan.state(0)[None])
    else:
        _record(swap, scan, _committed(swap)[1])
    out = out[:, 0]
    if z is not None:
        out = out * F.silu(z)
    return out.to(hidden_states.dtype)


def _scan(swap, initial, x, dt, b, c, a, d, bias, softplus):
    """Scan x, dt [1, n, p]; b, c [1, n, s]. Rounds where the original does: the time step, and the states when read.
    Returns the scan and its output with the direct term, [1, n, p]."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    wide = torch.promote_types(x.dtype, torch.float32)
    d = torch.zeros_like(x[0, 0]) if d is None else d
    x, dt, b, c = x[0], dt[0].to(wide), b[0].to(wide), c[0]
    scan = mamba1.tree_form(initial.to(wide), x.to(wide), dt, a.to(wide), b, c, d, swap.plan.state)
    return scan, scan.output[None]


def _committed(swap):
    """Return the committed state [p, s] that the coming scan starts from, and its head, None without heads."""
    state = swap.committed()[0]
    if state.dim() == 2:
        return state, None
    heads = swap.record.scans.get(swap.layer)
    head = len(heads.scans) if heads is not None else 0
    return state[head], head


def _record(swap, scan, head):
    if head is None:
        swap.record.scans[swap.layer] = Single(scan)
    else:
        swap.record.scans.setdefault(swap.layer, Heads()).scans.append(scan)
