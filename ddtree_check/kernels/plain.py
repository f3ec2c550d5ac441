"""Every kernel in the call form, row by row in plain torch: what an author's kernel should do, and a first run of the
checker without a GPU (`ddtree-check kernels plain`). Computes in float32; written apart from `reference`."""

from __future__ import annotations

import torch

from .forms import EPSILON, Call, CommitCall, ConvCall, DeltaCall, Mamba2Call


def _requests(call: Call) -> list[tuple[int, int, int]]:
    """Return (request, slot, row) of those that are no padding."""
    places = zip(call.slots.tolist(), call.rows.tolist(), strict=True)
    return [(request, slot, row) for request, (slot, row) in enumerate(places) if slot >= 0]


def conv(call: ConvCall) -> torch.Tensor:
    out = torch.zeros_like(call.x)
    rows, kept = call.x.shape[1], call.weight.shape[1] - 1
    for request, slot, row in _requests(call):
        parents = [node - 1 for node in range(rows)]
        if call.next_token is not None:
            parents = parents_of(call.next_token[request].tolist(), call.next_sibling[request].tolist())
            call.parents[request] = torch.tensor(parents).clamp(min=0).to(call.parents)
        windows: list[torch.Tensor] = []
        for node, parent in enumerate(parents):
            before = call.pool[slot] if parent < 0 else windows[parent]
            window = torch.cat([before, call.x[request, node][:, None]], 1)
            windows.append(window[:, 1:])
            y = (window.float() * call.weight.float()).sum(1) + (0 if call.bias is None else call.bias.float())
            out[request, node] = torch.nn.functional.silu(y) if call.silu else y
            call.buffer[row, node] = window[:, window.shape[1] - kept :]
    return out


def parents_of(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Return the parent of every row; -1 for row 0, 0 for rows that no link reaches."""
    parents = [-1] + [0] * (len(next_token) - 1)
    for node, (child, sibling) in enumerate(zip(next_token, next_sibling, strict=True)):
        if child >= 0:
            parents[child] = node
        if sibling >= 0:
            parents[sibling] = parents[node]
    return parents


def gdn(call: DeltaCall) -> torch.Tensor:
    out = torch.zeros_like(call.v)
    repeats = call.v.shape[2] // call.q.shape[2]
    q, k = (x.float() for x in (call.q, call.k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    gate = call.a.float() + call.dt_bias
    rate = call.A_log.exp()[:, None] if call.per_channel else call.A_log.exp()
    if call.lower_bound is None:
        decay = (-rate * torch.nn.functional.softplus(gate)).exp()
    else:
        decay = (call.lower_bound * torch.sigmoid(rate * gate)).exp()
    decay = decay[:, :, :, None, :] if call.per_channel else decay[..., None, None]
    beta = torch.sigmoid(call.b.float())[..., None]
    for request, node, state, put in _states(call, call.q.shape[1]):
        key = k[request, node][:, None, :]
        state = state * decay[request, node]
        update = beta[request, node] * (call.v[request, node].float() - (state * key).sum(-1))
        state = state + update[..., None] * key
        put(state)
        out[request, node] = (state * q[request, node][:, None, :]).sum(-1) * call.scale
    return out


kda = gdn


def mamba2(call: Mamba2Call) -> torch.Tensor:
    out = torch.zeros_like(call.x)
    repeats = call.x.shape[2] // call.B.shape[2]
    b, c = (x.float().repeat_interleave(repeats, 2)[:, :, :, None, :] for x in (call.B, call.C))
    step = torch.nn.functional.softplus(call.dt.float() + call.dt_bias)
    decay = (step * call.A).exp()[..., None, None]
    for request, node, state, put in _states(call, call.x.shape[1]):
        x = call.x[request, node].float()
        state = state * decay[request, node] + (step[request, node][:, None] * x)[..., None] * b[request, node]
        put(state)
        out[request, node] = (state * c[request, node]).sum(-1) + call.D[:, None] * x
    return out


def _states(call: DeltaCall | Mamba2Call, rows: int):
    """Yield (request, node, the state it starts from, where to put its own), node by node."""
    for request, slot, row in _requests(call):
        last = call.pool[slot].float()
        for node in range(rows):
            if node and call.parents is not None:
                last = call.buffer[row, call.parents[request, node]].float()

            def put(state, row=row, node=node):
                nonlocal last
                last = state
                call.buffer[row, node] = state

            yield request, node, last, put


def commit(call: CommitCall) -> None:
    for request, slot, row in _requests(call):
        if (node := int(call.nodes[request])) >= 0:
            call.pool[slot] = call.buffer[row, node]
