"""Functions that choose what attention sees, or how far away it is, by row number: here by the path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .swap import Swap


def along_paths(swap: Swap, module, hidden_states, q_resid, attention_mask, past_key_values):
    """Run `Glm5NextTextIndexer.forward`: the keys each row attends to, as row numbers [1, n, topk], -1 for none.

    The original pools every few *rows* behind the start of the text. Here it is run once a node, on the text that the
    plan's mask lets the node see, and its answer is put back into rows.
    """
    original, rows = swap.originals["Glm5NextTextIndexer.forward"], swap.plan.mask
    indices = []
    for node in range(len(rows)):
        row = slice(node, node + 1)
        text = _Text(past_key_values, rows[node, : node + 1])
        chosen = original(module, hidden_states[:, row], q_resid[:, row], attention_mask[:, row], text).long()
        indices.append(torch.where(chosen >= 0, text.rows[chosen.clamp(min=0)], -1).to(torch.int32))
    return torch.cat(indices, dim=1)


@dataclass(eq=False)
class _Text:
    """What the indexer asks of a cache, for one node: only the rows it may see are there."""

    cache: object
    seen: np.ndarray
    rows: torch.Tensor | None = None

    def update_indexer(self, packed: torch.Tensor, layer: int) -> torch.Tensor:
        packed = self.cache.update_indexer(packed, layer)
        before = packed.shape[1] - len(self.seen)
        picked = np.concatenate([np.arange(before), before + np.flatnonzero(self.seen)])
        self.rows = torch.from_numpy(picked).to(packed.device)
        return packed[:, self.rows]

    @property
    def layers(self):
        return _Everywhere(self)

    @property
    def keys(self):
        return self.rows[None, None, :, None]

    def get_seq_length(self) -> int:
        return len(self.rows)


class _Everywhere:
    def __init__(self, item):
        self.item = item

    def __getitem__(self, _):
        return self.item


def relative_logits(swap: Swap, module, relative_states, query_positions, key_positions):
    """Run `InklingRelativeLogits.forward` with the rows of the tree where the plan says they stand."""
    n = swap.plan.tree.n
    position = query_positions[0] + torch.tensor(swap.plan.positions, device=query_positions.device)
    keys = torch.cat([key_positions[:-n], position])
    return swap.originals["InklingRelativeLogits.forward"](module, relative_states, position, keys)
