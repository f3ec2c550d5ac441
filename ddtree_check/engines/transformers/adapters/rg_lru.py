"""RecurrentGemma's recurrent block, whose convolution and states are inline, and the scan inside it."""

from __future__ import annotations

from ....model.mixers import causal_conv, rg_lru
from .swap import Swap


def block(swap: Swap, module, input_states, position_ids, attention_mask=None, **_):
    """Run `RecurrentGemmaRecurrentBlock.forward`: input_states [1, n, hidden]. Returns its output and None.

    The original's multi-token pass pads the convolution with zeros, whatever came before; here it goes on from the
    committed window. Products and sum are rounded as in the original's one-token step.
    """
    gate = module.act_fn(module.linear_y(input_states))
    rows = module.linear_x(input_states).transpose(1, 2)
    committed, weight = module.conv1d_state, module.conv_1d.weight[:, 0]
    swap.keep_inputs(rows)
    window = causal_conv.gather(committed, rows, swap.plan.windows(weight.shape[-1]))
    mixed = (window * weight[:, None]).sum(-1) + module.conv_1d.bias[:, None]
    if swap.record is None:
        module.conv1d_state = window[:, :, -1, 1:].contiguous()
    mixed = module.rg_lru(mixed.transpose(1, 2), position_ids)
    return module.linear_out(mixed * gate), None


def rows(swap: Swap, module, hidden_states, recurrent_gate, reset, recurrent_states, **_):
    """Run `RecurrentGemmaRglru._rnn_scan`: hidden_states, recurrent_gate [1, n, d]; recurrent_states [1, d].

    The state is float32 or wider, as the original's; a node's output is its state, rounded.
    """
    x, decay = (item.to(recurrent_states.dtype) for item in (hidden_states, recurrent_gate * ~reset))
    scan = rg_lru.tree_form(recurrent_states, x, decay, swap.plan.state)
    return scan.output.to(hidden_states.dtype), swap.final_state(scan, recurrent_states)
