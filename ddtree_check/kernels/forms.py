"""What a kernel is called with: one object a kind, torch tensors on one device.

A kernel is `kernel(call) -> output`. It reads the fields, writes into the buffers, and returns the outputs of all rows.

Sizes: b requests, t rows of each (row 0 is the root; rows behind a request's last node are padding), w conv width,
d conv channels, h heads, k / v key and value width, p / n Mamba-2 head and state width, g groups. Indices are int32
[b] or int64 [b, t]. Common fields:

    pool     [slots, ...]        committed states; `slots[i]` is request i's, -1 for a padding request
    buffer   [rows, steps, ...]  the state after every node, to be written; `rows[i]` is request i's, steps >= t. It
                                 comes filled with NaN: what is read before it was written shows
    parents  [b, t] or None      row each row continues, row 0's is not looked at; None: each row continues the one
                                 before it
A request's slot and row belong to it alone. What belongs to no request of the call must stay as it is, and so must the
pool of the state kernels: a commit moves states into it. (A conv kernel may overwrite its own slots; the commit repairs
them.) Padding requests change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

EPSILON = 1e-6  # of the norms of q and k


@dataclass(frozen=True, eq=False)
class Call:
    """Fields of every kind; `clone` copies all tensors, so that a call can be made twice."""

    pool: torch.Tensor
    slots: torch.Tensor
    buffer: torch.Tensor | None
    rows: torch.Tensor

    def clone(self) -> Call:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.clone() for name, x in values.items() if isinstance(x, torch.Tensor)})


@dataclass(frozen=True, eq=False)
class ConvCall(Call):
    """Depthwise causal convolution along each node's path, with SiLU behind it if `silu`.

        y_t = sum_s weight_s x_{t - w + 1 + s} + bias

    x [b, t, d]; weight [d, w]; bias [d]; pool [slots, d, w - 1], oldest first; buffer [rows, steps, d, w - 1]: the last
    w - 1 inputs along the path, the node's own last. next_token, next_sibling int64 [b, t]: first child and next
    sibling, ascending, -1 for none; both None: rows in order. parents int64 [b, t] is an *output* then: row 0's is not
    looked at, a padding row's neither. Returns y [b, t, d] in the dtype of x.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool
    next_token: torch.Tensor | None
    next_sibling: torch.Tensor | None
    parents: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class DeltaCall(Call):
    """Gated delta rule (gdn) or Kimi Delta Attention (kda: a decay for each key channel), from raw gates.

        log_decay = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias))
        beta = sigmoid(b);  q, k over sqrt(sum of squares + 1e-6), q times scale
        S_t = a_t S_{t-1} + k_t (beta_t (v_t - k_t^T a_t S_{t-1}))^T;  o_t = S_t^T q_t

    q, k [b, t, hk, k]; v [b, t, hv, v], head i of v goes with head i * hk // hv of q and k; a [b, t, hv] (gdn) or
    [b, t, hv, k] (kda); b [b, t, hv]; A_log float32 [hv]; dt_bias float32 [hv] or [hv, k]. pool [slots, hv, v, k],
    buffer [rows, steps, hv, v, k] (a kernel that keeps [k, v] takes `.mT` views). Returns o [b, t, hv, v] in q's dtype.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    scale: float
    lower_bound: float | None
    parents: torch.Tensor | None

    @property
    def per_channel(self) -> bool:
        """Return True for kda."""
        return self.a.ndim == 4


@dataclass(frozen=True, eq=False)
class Mamba2Call(Call):
    """Mamba-2's selective state update, one step a node.

        dt' = softplus(dt + dt_bias);  S_t = exp(dt' A) S_{t-1} + dt' x_t B_t^T;  y_t = S_t C_t + D x_t

    x [b, t, h, p]; dt [b, t, h]; A (negative), D, dt_bias float32 [h]; B, C [b, t, g, n], head i goes with group
    i * g // h. pool [slots, h, p, n]; buffer [rows, steps, h, p, n]. Returns y [b, t, h, p] in the dtype of x.
    """

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor
    parents: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class CommitCall(Call):
    """pool[slots[i]] = buffer[rows[i], nodes[i]] for every request i. Returns nothing.

    nodes int64 [b]: the last accepted *node*, not the number of accepted tokens; -1: nothing was verified, the slot
    stays as it is. The buffer stays as it is.
    """

    nodes: torch.Tensor


FORMS = {"conv": ConvCall, "gdn": DeltaCall, "kda": DeltaCall, "mamba2": Mamba2Call, "commit": CommitCall}
