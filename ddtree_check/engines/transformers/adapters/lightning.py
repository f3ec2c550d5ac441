"""`MiniMaxLightningAttention.forward`: the layer has its recurrence inline, so that the whole layer is stood in for."""

from __future__ import annotations

import torch

from ....model.mixers import lightning
from .swap import Swap


def layer(swap: Swap, module, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **_):
    """Run a layer: hidden_states [1, n, hidden]. Returns its output and a state [1, h, k, v], as the original.

    The original keeps its state in the dtype of the model and rounds it at every token. Below float32 that is part of
    the answer, and the tree is folded token by token in the same dtype; from float32 on the closed form is used.
    """
    _, n, _ = hidden_states.shape
    qkv = module.act_fn(module.qkv_proj(hidden_states)).reshape(1, n, module.num_attention_heads, -1)
    q, k, v = (x.transpose(1, 2) for x in qkv.split(module.head_dim, dim=-1))
    initial = past_key_values.get_linear_cache(module.layer_idx)
    narrow = initial.dtype.itemsize < torch.float32.itemsize
    scan = (lightning.folded if narrow else lightning.tree_form)(
        initial, q, k, v, -module.slope_rate[:, 0, 0].to(initial.dtype), swap.plan.state
    )
    past_key_values.set_linear_cache(module.layer_idx, swap.final_state(scan, initial))
    output = module.norm(scan.output.transpose(1, 2).reshape(1, n, -1))
    output = torch.sigmoid(module.output_gate(hidden_states)) * output
    return module.out_proj(output), initial
