"""`causal_conv1d_fn` and `causal_conv1d_update`: the depthwise convolution of every family that shares these names."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN

from ....model.mixers import causal_conv
from .swap import Swap


def rows(swap: Swap, hidden_states, weight, bias=None, activation=None, **_):
    """Run all rows: hidden_states [1, d, c + n], the c committed inputs, then the rows. Returns [1, d, n]."""
    n = swap.plan.tree.n
    return _convolve(swap, hidden_states[..., :-n], hidden_states[..., -n:], weight, bias, activation)


def one(swap: Swap, hidden_states, conv_state, weight, bias=None, activation=None):
    """Run one row: hidden_states [1, d, 1]; conv_state [1, d, c] is moved on in place. Returns [1, d, 1]."""
    out = _convolve(swap, conv_state, hidden_states, weight, bias, activation)
    conv_state.copy_(torch.cat([conv_state, hidden_states], -1)[..., -conv_state.shape[-1] :])
    return out


def _convolve(swap, committed, rows, weight, bias, activation):
    swap.keep_inputs(rows)
    # In the dtype of the weights, which some models keep in float32; rounded before the activation: as the original.
    before, inputs = committed.to(weight.dtype), rows.to(weight.dtype)
    out = causal_conv.tree_form(before, inputs, weight, bias, swap.plan.windows(weight.shape[-1]))
    return (out if activation is None else ACT2FN[activation](out)).to(rows.dtype)
