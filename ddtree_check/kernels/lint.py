"""What verify kernels take for granted and do not check, found by name before a call.

None of these raises in SGLang's kernels: the outputs are wrong, or another request's state is, without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..tree.formats import NONE, from_links
from .forms import Call, CommitCall, ConvCall

RULES = {
    "short-rows": "a tree of budget drafted nodes needs budget + 1 rows and steps: the root is one",
    "wide-index": "indices must lie within what they point into",
    "aliased-slot": "two requests must not share a slot",
    "aliased-row": "two requests must not share a row of the buffer",
    "overlapping-buffer": "the states of two nodes must not share memory",
    "live-padding-slot": "a padding request must have slot -1, not that of a request which is not in the batch",
    "root-parent": "only row 0 may have parent -1",
    "late-parent": "a parent must stand before its child in row order",
    "parents-without-buffer": "parents are reloaded from the buffer of states: without one the rows run as a chain",
    "half-links": "next_token, next_sibling and parents come together or not at all",
    "descending-siblings": "siblings must be linked in ascending order",
    "broken-links": "next_token and next_sibling must form one tree, parents before children",
}


@dataclass(frozen=True)
class Problem:
    """One broken convention. `request` and `node` are None where it is none of theirs."""

    name: str
    request: int | None
    node: int | None
    detail: str

    def __str__(self) -> str:
        where = [
            f"{word} {value}" for word, value in (("request", self.request), ("node", self.node)) if value is not None
        ]
        return f"{self.name}: {' '.join(where)}{': ' if where else ''}{self.detail}; {RULES[self.name]}"


def lint(
    call: Call, *, nodes: Sequence[int] | None = None, live: Collection[int] = (), padding: Collection[int] = ()
) -> list[Problem]:
    """Return every broken convention of a call; it is not made.

    nodes: how many rows of each request are nodes (default: all); `budget + 1`. live: slots that belong to requests
    which are not in this batch. padding: requests that are padding, beside those with slot -1.
    """
    requests = len(call.slots)
    steps = call.x.shape[1] if hasattr(call, "x") else call.q.shape[1] if hasattr(call, "q") else None
    counts = list(nodes) if nodes is not None else [steps] * requests
    problems = list(_places(call, set(padding), set(live)))
    if steps is not None:
        problems += _rows(call, counts, steps)
        problems += _links(call, counts) if isinstance(call, ConvCall) else _parents(call, counts, steps)
    if isinstance(call, CommitCall):
        wide = [
            (request, int(node)) for request, node in enumerate(call.nodes) if not -1 <= node < call.buffer.shape[1]
        ]
        problems += [
            Problem("wide-index", request, None, f"accepted node {node}, expected -1 or 0..{call.buffer.shape[1] - 1}")
            for request, node in wide
        ]
    return problems


def _places(call: Call, padding: set[int], live: set[int]) -> Iterator[Problem]:
    for name, index, size, rule in (
        ("slot", call.slots, len(call.pool), "aliased-slot"),
        ("row", call.rows, 0 if call.buffer is None else len(call.buffer), "aliased-row"),
    ):
        if call.buffer is None and name == "row":
            continue
        owner: dict[int, int] = {}
        for request, place in enumerate(index.tolist()):
            if request in padding and place in live:
                yield Problem("live-padding-slot", request, None, f"{name} {place} belongs to a request that waits")
            if place == -1 and (name == "row" or request in padding or int(call.rows[request]) == -1):
                continue  # a padding request
            if not 0 <= place < size:
                yield Problem("wide-index", request, None, f"{name} {place}, expected 0..{size - 1}")
            elif place in owner:
                yield Problem(rule, request, None, f"{name} {place} is request {owner[place]}'s too")
            elif name == "slot" and place in live and request not in padding:
                yield Problem(rule, request, None, f"slot {place} belongs to a request that waits")
            owner.setdefault(place, request)
    if call.buffer is not None and _overlaps(call.buffer):
        stride = call.buffer.stride()
        yield Problem("overlapping-buffer", None, None, f"buffer {list(call.buffer.shape)} has strides {list(stride)}")


def _overlaps(buffer: torch.Tensor) -> bool:
    """Return whether some dimension's stride is less than what the dimensions inside it span."""
    reach = 1
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def _rows(call: Call, counts: Sequence[int], steps: int) -> Iterator[Problem]:
    for request, count in enumerate(counts):
        if count > steps:
            yield Problem("short-rows", request, None, f"{count} nodes in {steps} rows")
        elif call.buffer is not None and count > call.buffer.shape[1]:
            yield Problem("short-rows", request, None, f"{count} nodes, a buffer of {call.buffer.shape[1]} steps")


def _parents(call: Call, counts: Sequence[int], steps: int) -> Iterator[Problem]:
    if call.parents is None:
        return
    if call.buffer is None:
        yield Problem("parents-without-buffer", None, None, "parents are given, the buffer is None")
    for request, (row, count) in enumerate(zip(call.parents.tolist(), counts, strict=True)):
        for node, parent in enumerate(row[: min(count, steps)]):
            if node and parent == NONE:
                yield Problem("root-parent", request, node, "parent -1")
            elif node and not 0 <= parent < steps:
                yield Problem("wide-index", request, node, f"parent {parent}, expected 0..{node - 1}")
            elif node and parent >= node:
                yield Problem("late-parent", request, node, f"parent {parent}, expected 0..{node - 1}")


def _links(call: ConvCall, counts: Sequence[int]) -> Iterator[Problem]:
    given = [name for name in ("next_token", "next_sibling", "parents") if getattr(call, name) is not None]
    if given and len(given) < 3:
        yield Problem("half-links", None, None, f"only {' and '.join(given)}")
    if len(given) < 3:
        return
    for request, count in enumerate(counts):
        child, sibling = (np.asarray(getattr(call, name)[request].tolist()) for name in ("next_token", "next_sibling"))
        rows = len(child)
        falling = [node for node, target in enumerate(sibling[:count]) if NONE < target <= node]
        for node in falling:
            yield Problem("descending-siblings", request, node, f"its next sibling is node {sibling[node]}")
        if falling or count < 1 or count > rows:
            continue
        try:
            from_links(child, sibling, range(rows), count)  # any tokens that differ
        except ValueError as error:
            yield Problem("broken-links", request, None, str(error))
