"""The delta rules: `torch_*_gated_delta_rule` of Gated DeltaNet, `*_kimi_delta_attention` of Kimi Linear."""

from __future__ import annotations

from functools import partial

import torch

from ....model.mixers import gated_delta, kda
from .swap import Swap


def _rows(
    tree_form, normed, swap: Swap, query, key, value, g, beta, *, initial_state, use_qk_l2norm_in_kernel=False, **_
):
    """Run a delta rule: query, key [1, n, h, k], value [1, n, h, v], g [1, n, h] (kda [1, n, h, k]), beta [1, n, h].

    initial_state [1, h, k, v]. normed: x and its squared length to x of length 1, rounded as the original does.
    Computes in float32 or wider. Returns the outputs [1, n, h, v] in the dtype of `query`, and a state.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v, log_decay, gain = (x.transpose(1, 2).to(wide) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (normed(x, (x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    scan = tree_form(initial_state.to(wide), q, k, v, log_decay, gain, swap.plan.state)
    return scan.output.transpose(1, 2).to(query.dtype), swap.final_state(scan, initial_state)


rows = partial(_rows, gated_delta.tree_form, lambda x, square: x * torch.rsqrt(square))
kda_rows = partial(_rows, kda.tree_form, lambda x, square: x / torch.sqrt(square))
