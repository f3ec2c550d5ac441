"""`chunk_kimi_delta_attention` and `recurrent_kimi_delta_attention` of Kimi Linear and GLM-5-Next."""

from __future__ import annotations

import torch

from ....model.mixers import kda
from .swap import Swap


def rows(swap: Swap, query, key, value, g, beta, *, initial_state, use_qk_l2norm_in_kernel=False, **_):
    """query, key, g [1, n, h, k], value [1, n, h, v], beta [1, n, h]; initial_state [1, h, k, v].

    Computes in float32 or wider, as the original. Returns outputs [1, n, h, v] in the dtype of `query`, and a state.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, log_decay, gain = (x.transpose(1, 2).to(wide) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    scan = kda.tree_form(initial_state.to(wide), q, k, v, log_decay, gain, swap.plan.state)
    return scan.output.transpose(1, 2).to(query.dtype), swap.final_state(scan, initial_state)
