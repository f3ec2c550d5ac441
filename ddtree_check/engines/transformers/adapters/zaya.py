"""ZAYA's compressed convolutional attention: projections in front of attention, with a window and a delayed value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....model.mixers import causal_conv
from ....model.wiring import BLANK
from .swap import Swap


@dataclass(frozen=True, eq=False)
class Delayed:
    """rows [1, n, d]: what each node hands to the next; it is the whole state."""

    rows: torch.Tensor

    def state(self, node: int) -> torch.Tensor:
        return self.rows[:, node]


def project(swap: Swap, module, hidden_states, past_key_values, conv_mask=None):
    """Run `ZayaCCAProjection.forward`: hidden_states [1, n, hidden]. Returns queries, keys and values [1, n, h, d].

    The original's convolutions run on each node's own window; the half of the values that comes from the token before
    is read from the node that the plan names.
    """
    layer = past_key_values.layers[module.layer_idx]
    shape, groups = (*hidden_states.shape[:-1], -1, module.head_dim), module.num_key_value_groups
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    rest = (queries.view(shape) + keys.view(shape).repeat_interleave(groups, dim=2)) * 0.5
    shared = rest.view(*hidden_states.shape[:-1], -1, groups, module.head_dim).mean(dim=-2)

    rows = torch.cat([queries, keys], dim=-1).transpose(1, 2)
    swap.keep_inputs(rows)
    windows = causal_conv.gather(layer.conv_states[0], rows, swap.plan.windows(module.conv_kernel_size + 1))
    mixed = module.conv_qk_grouped(module.conv_qk_depthwise(windows[0].transpose(0, 1)))[None, ..., 0]
    query = mixed[..., : queries.shape[-1]].reshape(shape) + rest
    key = mixed[..., queries.shape[-1] :].reshape(shape) + shared

    current, delayed = module.v_proj_current(hidden_states), module.v_proj_delayed(hidden_states)
    before = layer.recurrent_states[0][:, None]
    table = torch.cat([delayed, before, torch.zeros_like(before)], dim=1)
    n = delayed.shape[1]
    sources = [source if source >= 0 else n + (source == BLANK) for source in swap.plan.state]
    value = torch.cat([current, table[:, sources]], dim=-1).view(shape)

    if swap.record is None:
        layer.conv_states[0].copy_(windows[:, :, -1, 1:])
    layer.recurrent_states[0].copy_(swap.final_state(Delayed(delayed), layer.recurrent_states[0]))
    return query, key, value
