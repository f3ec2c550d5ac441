"""Recurrences, one file each: `step` is the formula, `tree_form` its closed form over a tree, `fold` runs any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...tree.draft_tree import depths
from ..wiring import BLANK


def fold(step: Callable, initial: torch.Tensor, inputs: Sequence[torch.Tensor], sources: Sequence[int]):
    """Run `step` over the nodes of a wiring, level by level: state_i, out_i = step(state of sources[i], inputs_i).

    initial [*s]: the state that negative sources mean (BLANK means zeros). inputs: tensors [n, ...], one row a node.
    sources[i] < i. `step` takes the states and inputs of a whole level, with its nodes in front.
    Returns (states [n, *s], outputs [n, ...]) in the dtype that `step` computes in.
    """
    levels: dict[int, list[int]] = {}
    for node, depth in enumerate(depths(sources)):
        levels.setdefault(depth, []).append(node)
    table, outputs = torch.stack([torch.zeros_like(initial), initial]), None  # what BLANK and -1 read, then the nodes
    for nodes in levels.values():
        rows = torch.tensor(nodes, device=initial.device)
        before = [0 if sources[node] == BLANK else max(sources[node], -1) + 2 for node in nodes]
        after, out = step(table[torch.tensor(before, device=initial.device)], *(x[rows] for x in inputs))
        if outputs is None:
            table = torch.cat([table.to(after.dtype), after.new_empty(len(sources), *after.shape[1:])])
            outputs = out.new_empty(len(sources), *out.shape[1:])
        table[rows + 2], outputs[rows] = after, out
    return table[2:], outputs


@dataclass(frozen=True, eq=False)
class Folded:
    """What a fold over a tree leaves behind: output [..., n, *] and the state after every node, states [n, ...]."""

    output: torch.Tensor
    states: torch.Tensor

    def state(self, node: int) -> torch.Tensor:
        """Return the state after `node`."""
        return self.states[node]
