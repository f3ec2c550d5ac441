"""Qwen4-exp's per-layer embedding: features of the last few tokens, then a convolution with gaps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....model.mixers import causal_conv
from .swap import Swap

_CONV, _TOKENS = 1, 2  # the library's numbers of the two windows beside the delta rule's


def embed(swap: Swap, module, input_ids, past_key_values):
    """Run `Qwen4ExpTextNGramEmbedding.forward`: input_ids [1, n]. Returns [1, n, d].

    Every node becomes a short text of its own: the last tokens on its path, embedded by the original without a cache.
    """
    layer = past_key_values.layers[module.layer_idx]
    committed, rows = layer.conv_states[_TOKENS][:, None], input_ids[:, None]
    swap.keep_inputs(rows[:, 0], _TOKENS)
    texts = causal_conv.gather(committed, rows, swap.plan.windows(module.ngram_size))[0, 0]
    if swap.record is None:
        layer.conv_states[_TOKENS].copy_(texts[-1:, 1:])
    return swap.originals["Qwen4ExpTextNGramEmbedding.forward"](module, texts, None)[:, -1][None]


def dilated_conv(swap: Swap, module, hidden_states, past_key_values):
    """Run `Qwen4ExpTextPLELayer._short_conv`: hidden_states [1, n, d]. Returns [1, n, d]."""
    layer = past_key_values.layers[module.layer_idx]
    rows, weight, gap = hidden_states.transpose(1, 2), module.conv1d.weight[:, 0], module.conv1d.dilation[0]
    swap.keep_inputs(rows, _CONV)
    windows = swap.plan.windows(module.short_conv_state_len + 1)
    mixed = causal_conv.tree_form(layer.conv_states[_CONV], rows, weight, None, windows[:, ::gap])
    if swap.record is None:
        layer.conv_states[_CONV].copy_(
            torch.cat([layer.conv_states[_CONV], rows], -1)[..., -module.short_conv_state_len :]
        )
    return F.silu(mixed).transpose(1, 2)
