"""Recurrences, one file each: `step` is the formula, `tree_form` its closed form over a tree, `fold` runs any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..tree import depths
from ..wiring import BLANK


def fold(step: Callable, initial: torch.Tensor, inputs: Sequence[torch.Tensor], sources: Sequence[int]):
    """Runs `step` over the nodes of a wiring, level by level: state_i, out_i = step(state of sources[i], inputs_i).

    initial [*s]: the state that negative sources mean (BLANK means zeros). inputs: tensors [n, ...], one row a node.
    sources[i] < i. `step` takes one node's state and inputs; it is vectorised over the nodes of a level.
    Returns (states [n, *s], outputs [n, ...]) in the dtype that `step` computes in. The reference for every closed form.
    """
    levels: dict[int, list[int]] = {}
    for node, depth in enumerate(depths(sources)):
        levels.setdefault(depth, []).append(node)
    states, outputs = [None] * len(sources), [None] * len(sources)
    blank = torch.zeros_like(initial)
    for nodes in levels.values():
        before = torch.stack([_read(states, sources[node], initial, blank) for node in nodes])
        after, out = torch.vmap(step)(before, *(x[nodes] for x in inputs))
        for node, state, row in zip(nodes, after, out, strict=True):
            states[node], outputs[node] = state, row
    return torch.stack(states), torch.stack(outputs)


def _read(states, source, initial, blank):
    if source == BLANK:
        return blank
    return states[source] if source >= 0 else initial
