"""Kernels with one thing wrong, made from right ones, and which nodes must then be wrong.

A fault changes what a kernel is given or what it leaves; it knows nothing of how kernels are judged.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ddtree_check.kernels.cases import FAMILIES, Case
from ddtree_check.model.wiring import FORKED, UNFORKED, Conv, Layer, State, contaminated

STATES = ("gdn", "kda", "mamba2")
CHAIN, TREE = FAMILIES["chain"](6, 1), FAMILIES["best-first"](9, 1)
OTHER = FAMILIES["binary"](9, 1)


def case(kind: str, *trees, **options) -> Case:
    dtype = options.get("dtype", "float32")
    options = {"state_dtype": dtype if kind == "conv" else "float32", "seed": 3, **options}
    return Case(f"{kind}/fault", kind, "fault", trees, max(map(len, trees)), **options)


def leaks(kind: str, tree, width: int = 4) -> set[int]:
    """Nodes that rows in order get wrong, by the data-flow law."""
    layer = Layer(kind, ((Conv(width) if kind == "conv" else State(kind),),))
    return set(contaminated(UNFORKED.plan(tree), [layer]))


def ignored_parents(kernel):
    def run(call):
        links = ("parents", "next_token", "next_sibling") if hasattr(call, "next_token") else ("parents",)
        return kernel(replace(call, **dict.fromkeys(links)))

    return run


def descending_siblings(kernel):
    """Links with the last sibling first, as another tree builder would write them."""

    def run(call):
        child, sibling = torch.full_like(call.next_token, -1), torch.full_like(call.next_sibling, -1)
        for request in range(len(child)):
            for node, first in enumerate(call.next_token[request].tolist()):
                family = []
                while first >= 0:
                    family.append(first)
                    first = int(call.next_sibling[request, first])
                if family:
                    child[request, node] = family[-1]
                for late, early in zip(family[:0:-1], family[-2::-1], strict=True):
                    sibling[request, late] = early
        return kernel(replace(call, next_token=child, next_sibling=sibling))

    return run


def descending_law(tree, width: int = 4) -> set[int]:
    """Wrong nodes if parents are handed out row by row while a later sibling comes first: 0 until then."""
    known, wrong = [0] * len(tree), set()
    right = FORKED.plan(tree).windows(width)
    for node in range(len(tree)):
        if tree.children[node]:
            known[tree.children[node][-1]] = node
        if node:
            family = tree.children[tree.parents[node]]
            place = family.index(node)
            if place:
                known[family[place - 1]] = known[node]
        row, seen = node, []
        for _ in range(width):
            seen.append(row)
            row = known[row] if row > 0 else row - 1
        if seen[::-1] != right[node].tolist():
            wrong.add(node)
    return wrong


def window_by_row(kernel):
    """Right outputs; windows kept as slices of the rows in order."""

    def run(call):
        before = call.pool.clone()
        out = kernel(call)
        kept = before.shape[-1]
        for request, (slot, row) in enumerate(zip(call.slots.tolist(), call.rows.tolist(), strict=True)):
            line = torch.cat([before[slot], call.x[request].T], 1)
            for node in range(call.x.shape[1]):
                call.buffer[row, node] = line[:, node + 1 : node + 1 + kept]
        return out

    return run


def rounded_states(kernel):
    """States kept in bf16 on the way, whatever the buffer claims."""

    def run(call):
        narrow = call.buffer.bfloat16()
        out = kernel(replace(call, buffer=narrow))
        call.buffer.copy_(narrow)
        return out

    return run


def parent_at(node: int, parent: int):
    """A wrong parent at one node of request 0; negative or behind the rows too."""

    def fault(kernel):
        def run(call):
            parents = call.parents.clone()
            parents[0, node] = parent
            return kernel(replace(call, parents=parents))

        return run

    return fault


def swapped(name: str):
    """slots or rows of requests 0 and 1 mixed up."""

    def fault(kernel):
        def run(call):
            places = getattr(call, name).clone()
            places[:2] = places[:2].flip(0)
            return kernel(replace(call, **{name: places}))

        return run

    return fault


def stale_parents(kernel):
    """Replays every call with the parents of the first one, as a captured graph would."""
    seen = []

    def run(call):
        seen.append(call.parents.clone())
        return kernel(replace(call, parents=seen[0]))

    return run


def dropped_start(kernel):
    """Starts from zeros instead of the committed state."""
    return lambda call: kernel(replace(call, pool=torch.zeros_like(call.pool)))


def live_padding(kernel):
    """The padding request runs in a slot and a row that belong to nobody in the batch."""

    def run(call):
        places = {}
        for name, store in (("slots", call.pool), ("rows", call.buffer)):
            index = getattr(call, name).clone()
            index[-1] = next(place for place in range(len(store)) if place not in index.tolist())
            places[name] = index
        return kernel(replace(call, **places))

    return run


def afterwards(change):
    """A right kernel, and then `change(call, out)`."""

    def fault(kernel):
        def run(call):
            out = kernel(call)
            change(call, out)
            return out

        return run

    return fault


def by_length(trees):
    """Commits row accepted_len instead of the accepted node."""

    def fault(kernel):
        def run(call):
            nodes = [
                tree.depth[node] if node >= 0 else -1 for tree, node in zip(trees, call.nodes.tolist(), strict=True)
            ]
            return kernel(replace(call, nodes=torch.tensor(nodes)))

        return run

    return fault
