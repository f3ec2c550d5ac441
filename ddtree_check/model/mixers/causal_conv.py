"""The depthwise causal convolution in front of most recurrences, for one token and for a whole tree."""

from __future__ import annotations

import numpy as np
import torch

from ..wiring import BLANK


def step(window, x, weight, bias):
    """Return one token of a depthwise causal convolution.

        y_t = sum_s weight_s x_{t - w + 1 + s} + bias,   s = 0 ... w - 1

    window [w - 1, d], the last inputs, oldest first; x [d]; weight [d, w]; bias [d].
    Returns the new window and y [d]. Computes in the dtype it is given.
    """
    inputs = torch.cat([window, x[None]])
    return inputs[1:], (inputs * weight.T).sum(0) + bias


def tree_form(committed, rows, weight, bias, windows: np.ndarray) -> torch.Tensor:
    """Return all nodes at once: gather each node's window along its own path, then one weighted sum.

    committed [..., d, c] the last committed inputs, c >= w - 1, or fewer where fewer were committed (zeros before);
    rows [..., d, n] the nodes' inputs; weight [d, w]; bias [d] or None; windows [n, w] as in `Plan.windows`,
    or [b, n, w], one a request, where committed and rows are [b, d, ...].
    Returns [..., d, n] in the dtype of `rows`. bf16 and float16 are summed in float32 and rounded once at the end, as
    the library's own convolution is: without it a tree pass would be many times noisier than a chain.
    """
    inputs = gather(committed, rows, windows)
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = (inputs.to(wide) * weight.to(wide)[:, None, :]).sum(-1)
    if bias is not None:
        total = total + bias.to(wide)[:, None]
    return total.to(rows.dtype)


def gather(committed, rows, windows: np.ndarray) -> torch.Tensor:
    """Return the inputs under each window: [..., d, n, w]."""
    kept = committed.shape[-1]
    # Column 0 is zeros: BLANK slots, and slots before the first committed input.
    table = torch.cat([torch.zeros_like(rows[..., :1]), committed.to(rows.dtype), rows], dim=-1)
    index = np.where(windows >= 0, 1 + kept + windows, np.where(windows == BLANK, 0, np.maximum(1 + kept + windows, 0)))
    index = torch.from_numpy(index).to(rows.device)
    if index.ndim == 2:
        return table[..., index]
    requests, channels = table.shape[:2]
    flat = index.reshape(requests, 1, -1).expand(-1, channels, -1)
    return table.gather(-1, flat).reshape(requests, channels, *index.shape[1:])
