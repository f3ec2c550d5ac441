"""Exact checks of a kernel: what must not matter moves no bit of a row, however small its bound would call that.

Influence: the rows off a path, rows behind the tree, other requests and foreign slots change; the path's rows keep
their bits. Relocation: a node's row equals its path's row as a chain in front. A commit copies, and is held in bits by
`check` itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..judge.exact import Claim, Tally
from ..tree.draft_tree import DraftTree
from ..tree.paths import leaf_paths
from .cases import Case
from .forms import Call

PATHS = 4  # of a case
DRAWS = 4  # of numbers, for nodes that do not equal their chain
ROWS = {  # kind -> fields [b, t, ...] that hold a row's inputs
    "conv": ("x",),
    "gdn": ("q", "k", "v", "a", "b"),
    "kda": ("q", "k", "v", "a", "b"),
    "mamba2": ("x", "dt", "B", "C"),
}
LINKS = ("next_token", "next_sibling", "parents")
SOURCES = ("rows of other nodes", "rows behind the tree", "other requests", "slots of no request")


@dataclass(frozen=True)
class Bits:
    """What the exact checks of one case came to.

    influence   whether it was claimed: chains keep their bits while what stands behind them changes
    certified   nodes that equal their path as a chain, of those on the paths that were run
    moved       (request, node, what moves it) of each row that moves with what it must not read
    """

    influence: Claim
    certified: Tally
    moved: tuple[tuple[int, int, str], ...] = ()


def exact(kernel: Callable[[Call], torch.Tensor], case: Case, device: str = "cpu") -> Bits | None:
    """Return what the exact checks say of a kernel on a case, None for a commit or rows in order.

    Makes up to 3 calls a path, 2 for its null, and 2 more for each draw of a node that does not equal its chain.
    """
    if case.kind not in ROWS or not case.forked:
        return None
    paths = _paths(case)
    base, null, moved = _run(kernel, case.call(device), case), Tally(), {}
    for request, path in paths:
        chain = _front(case, request, path, device)
        changed = _foreign(case, chain, request, range(len(path)), SOURCES[:1])
        sides = [_run(kernel, call, case) for call in (chain, changed)]
        pairs = [_equal(*sides, request, row, row) for row in range(len(path))]
        null += Tally(len(pairs) - sum(pairs), len(pairs))
    for request, path in paths:
        rows = _run(kernel, _foreign(case, case.call(device), request, path, SOURCES), case)
        for node in (node for node in path if not _equal(base, rows, request, node, node)):
            moved.setdefault((request, node), path)
    reason = f"{null} rows of chains move where only what stands behind them changes" if null.count else None
    sources = SOURCES[3:] if reason else SOURCES  # where rows share a number, a slot of no request still moves nothing
    named = [
        (request, node, _source(kernel, case, base, request, node, path, device, sources))
        for (request, node), path in sorted(moved.items())
    ]
    return Bits(Claim(null, reason), _certified(kernel, case, paths, base, device), tuple(x for x in named if x[2]))


def _paths(case: Case) -> list[tuple[int, tuple[int, ...]]]:
    """Return (request, path) of the deepest leaves, of every request in turn, up to PATHS."""
    of_each = [
        [(request, path.nodes) for path in sorted(leaf_paths(tree), key=lambda path: -len(path.nodes))]
        for request, tree in enumerate(case.trees)
    ]
    return [pair for turn in itertools.zip_longest(*of_each) for pair in turn if pair][:PATHS]


def _run(kernel: Callable, call: Call, case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each request the outputs [t, ...] and the states or windows [steps, ...] that a call leaves."""
    out = kernel(call)
    return [(out[request], call.buffer[int(call.rows[request])]) for request in range(len(case.trees))]


def _equal(mine: Sequence, other: Sequence, request: int, row: int, place: int) -> bool:
    """Return whether a row has the same output and state in two calls, bit for bit; NaN equals nothing."""
    return all(torch.equal(a[row], b[place]) for a, b in zip(mine[request], other[request], strict=True))


def _front(case: Case, request: int, path: Sequence[int], device: str) -> Call:
    """Return the case's call with one request's tree as a chain: the rows of `path`, then those of all other nodes."""
    tree = case.trees[request]
    order = [*path, *(node for node in range(len(tree)) if node not in path)]
    chain = DraftTree.chain(range(len(tree)))
    trees = (*case.trees[:request], chain, *case.trees[request + 1 :])
    call = replace(case, trees=trees).call(device)
    for name in ROWS[case.kind]:
        rows = getattr(call, name)
        rows[request, : len(tree)] = rows[request, order]
    return call


def _foreign(case: Case, call: Call, request: int, kept: Iterable[int], sources: Sequence[str]) -> Call:
    """Return the call with other numbers wherever rows `kept` of a request must not read, or at some such sources."""
    other, n = replace(case, seed=case.seed + 1009).call(call.pool.device), len(case.trees[request])
    same = set(kept)
    rows = {
        SOURCES[0]: [(request, node) for node in range(n) if node not in same],
        SOURCES[1]: [(request, row) for row in range(n, case.steps)],
        SOURCES[2]: [(stranger, ...) for stranger in range(case.requests) if stranger != request],
    }
    call = call.clone()
    for place in (place for source in sources for place in rows.get(source, ())):
        for name in ROWS[case.kind]:
            getattr(call, name)[place] = getattr(other, name)[place]
    slots = call.slots.tolist()
    for slot in range(len(call.pool)):
        if slot not in slots and SOURCES[3] in sources:
            call.pool[slot] = torch.nan
        elif slot in slots and slot != slots[request] and SOURCES[2] in sources:
            call.pool[slot] = other.pool[slot]
    return call


def _source(kernel, case: Case, base, request: int, node: int, path, device: str, sources: Sequence[str]) -> str:
    """Return what moves a row, looked for one by one; empty where none of `sources` does."""
    for source in sources:
        rows = _run(kernel, _foreign(case, case.call(device), request, path, (source,)), case)
        if not _equal(base, rows, request, node, node):
            return source
    return "several of them together" if sources == SOURCES else ""


def _certified(kernel, case: Case, paths, base, device: str) -> Tally:
    left = {(request, node) for request, path in paths for node in path}
    count = len(left)
    for draw in range(DRAWS):
        drawn = replace(case, seed=case.seed + 2003 * draw)
        rows = base if not draw else _run(kernel, drawn.call(device), case)
        for request, path in paths:
            if not left.isdisjoint((request, node) for node in path):
                chain = _run(kernel, _front(drawn, request, path, device), case)
                left -= {(request, node) for row, node in enumerate(path) if _equal(rows, chain, request, node, row)}
        if not left:
            break
    return Tally(count - len(left), count)
