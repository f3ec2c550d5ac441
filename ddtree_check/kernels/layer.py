"""A layer as an engine runs it: conv, delta rule, commit of one accepted path, then one decoded token.

A wrong commit shows in no verify output, and an unforked layer is right as long as the accepted path is the first rows:
so accept a side branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..tree.draft_tree import DraftTree
from . import reference
from .cases import SIZES, Case
from .check import Finding
from .forms import Call, CommitCall, ConvCall, DeltaCall


@dataclass(frozen=True)
class Layer:
    """The three kernels; `delta` is gdn or kda, by `kind`."""

    conv: Callable[[ConvCall], torch.Tensor]
    delta: Callable[[DeltaCall], torch.Tensor]
    commit: Callable[[CommitCall], None]
    kind: str = "gdn"


def check_layer(
    layer: Layer,
    trees: Sequence[DraftTree],
    accept: Sequence[int],
    *,
    forked: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
    name: str = "layer",
) -> list[Finding]:
    """Verify `trees`, commit node accept[i] of request i, decode one token; judge the path's rows and the token.

    accept: 0, the root, or further: who verified has accepted the root. (A conv kernel may have overwritten its slot,
    so that a commit of nothing would leave a wrong window.)

    The delta rule takes its q, k and v from the conv kernel's outputs and its parents from what that kernel wrote. Each
    kernel is judged by what it was given: conv from its inputs, the delta rule from the conv kernel's outputs.
    """
    size, steps = SIZES["small"], max(map(len, trees))
    size = size.but(channels=2 * size.key_heads * size.key + size.heads * size.value)
    roots = [DraftTree((0,), (-1,)) for _ in trees]
    options = {"dtype": dtype, "state_dtype": dtype, "size": size}

    def calls(trees: Sequence[DraftTree], steps: int, forked: bool, seed: int) -> tuple[ConvCall, DeltaCall]:
        made = [
            Case("layer", kind, "layer", tuple(trees), steps, forked, seed=seed, **options)
            for kind in ("conv", layer.kind)
        ]
        return tuple(case.call(device) for case in made)

    conv, delta = calls(trees, steps, forked, 1)
    raw = conv.clone(), delta.clone()
    mixed = layer.conv(conv)
    delta = replace(delta, **_split(mixed, delta), parents=conv.parents if forked else None)
    verified = replace(raw[1], **_split(mixed.clone(), delta))
    out = layer.delta(delta)
    nodes = torch.tensor(accept, dtype=torch.int64, device=device)
    for call in (conv, delta):
        layer.commit(CommitCall(pool=call.pool, slots=call.slots, buffer=call.buffer, rows=call.rows, nodes=nodes))

    next_conv, next_delta = calls(roots, 1, False, 2)
    weights = {"weight": conv.weight, "bias": conv.bias, "pool": conv.pool, "slots": conv.slots}
    next_conv = replace(next_conv, **weights)
    inputs = next_conv.x.clone()
    decoded = layer.conv(next_conv)
    gates = {"A_log": delta.A_log, "dt_bias": delta.dt_bias, "pool": delta.pool, "slots": delta.slots}
    next_delta = replace(next_delta, **gates, **_split(decoded, next_delta))
    last = layer.delta(next_delta)

    findings = []
    for request, tree in enumerate(trees):
        path = list(tree.path(accept[request]))
        chain = range(-1, len(path))
        for part, call, after, got, token in (
            ("conv", raw[0], replace(raw[0], x=inputs), mixed, decoded),
            ("delta", verified, next_delta, out, last),
        ):
            right = reference.expected(_along(call, after, request, path), 0, chain)
            rows = torch.cat([got[request, path], token[request]])
            error = (rows.double().cpu() - right.output).abs().nan_to_num(nan=math.inf)
            share = (error / right.output_bound).flatten(1)
            for row in torch.nonzero(~(share.amax(1) <= 1)).flatten().tolist():
                place = int(share[row].argmax())
                worst, bound = (float(x[row].flatten()[place]) for x in (error, right.output_bound))
                what = "output of the path" if row < len(path) else "decoded token"
                node = path[row] if row < len(path) else None
                channel = f"channel {place}"
                origin = "rounding of float32 operations along the path"
                findings.append(Finding(part, name, what, request, node, channel, worst, bound, origin))
    return findings


def _split(mixed: torch.Tensor, call: DeltaCall) -> dict[str, torch.Tensor]:
    """Return q, k, v from the channels of the convolution."""
    keys, values = call.q.shape[2] * call.q.shape[3], call.v.shape[2] * call.v.shape[3]
    parts = mixed.split((keys, keys, values), -1)
    return {n: x.reshape(*x.shape[:2], *getattr(call, n).shape[2:]) for n, x in zip("qkv", parts, strict=True)}


def _along(call: Call, after: Call, request: int, path: Sequence[int]) -> Call:
    """Return one request: the rows of a path, and behind them the decoded token; from the state before."""
    rows = ("x",) if isinstance(call, ConvCall) else ("q", "k", "v", "a", "b")
    joined = {
        name: torch.cat([getattr(call, name)[request, path], getattr(after, name)[request]])[None] for name in rows
    }
    if isinstance(call, ConvCall):
        joined |= {"next_token": None, "next_sibling": None}
    return replace(call, **joined, slots=call.slots[request : request + 1], rows=call.rows[:1], parents=None)
