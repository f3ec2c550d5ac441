"""Judge what recorded passes of one prompt and width show of each other, bit for bit; nothing is run.

Two passes over one tree with other tokens off a path are an influence pair; a pass whose first rows are a path holds
the chain that relocation compares with. Chains whose tails differ earn the claim. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..tree.draft_tree import DraftTree
from .exact import CERTIFIED, MOVED, OPEN, Change, Claim, Exact, Law, Node, Tally, differ, foreign, law

NULL = 8  # rows of chains that kept their bits, before a row of a tree that did not is a defect
TREE, CONTROL = "tree_forked", "tree_unforked"


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """One pass. nodes: the node in each row, -1 for padding; digests: of each row, None for one with a NaN."""

    mode: str
    tree: DraftTree
    nodes: tuple[int, ...]
    digests: tuple[int | None, ...]

    @cached_property
    def places(self) -> dict[int, int]:
        """Return the row of each node."""
        return {node: place for place, node in enumerate(self.nodes) if node >= 0}

    @cached_property
    def paths(self) -> dict[int, tuple[int, ...]]:
        """Return the tokens from the root to each node that has a row."""
        return {node: self.tree.path_tokens(node) for node in self.places}

    @cached_property
    def front(self) -> dict[tuple[int, ...], int | None]:
        """Return the digests of the rows that no foreign row precedes, by the tokens of their paths.

        A pass of mode `chain` runs a path in front, whichever of its rows are stored.
        """
        rows = {}
        for place, node in enumerate(self.nodes):
            if self.mode != "chain" and (node < 0 or self.tree.path(node) != self.nodes[: place + 1]):
                break
            if node >= 0:
                rows[self.paths[node]] = self.digests[place]
        return rows

    @property
    def whole(self) -> bool:
        """Whether it is a tree pass with a row for every node."""
        return self.mode == TREE and len(self.places) == len(self.tree)

    def digest(self, node: int) -> int | None:
        return self.digests[self.places[node]]


def compare(own: RecordedPass, others: Sequence[RecordedPass], reach: np.ndarray | None = None) -> Exact | None:
    """Return what the passes of one prompt and width say of a tree pass, or None if none of them says anything.

    own: the tree pass, a row for every node. reach: `wiring.reached` of the control on this tree, for `law`.
    """
    n, trees = len(own.tree), [other for other in others if other.mode == own.mode and other is not own]
    changes, strays = _changes(own, trees)
    null = _null(others)
    equal = [Tally()] * n
    for other in others:
        alone = other.mode == "chain" or other.tree.is_chain
        for node, tokens in own.paths.items() if other is not own else ():
            if tokens in other.front and (alone or own.places[node] != own.tree.depth[node]):
                equal[node] += Tally(int(not differ(own.digest(node), other.front[tokens])), 1)
    if not changes and not any(tally.of for tally in equal):
        return None
    reason = _unclaimed(changes, strays, null, n)
    moved = frozenset().union(*(change.moved for change in changes))
    pairs = np.zeros((n, n), dtype=bool)
    for change in changes:
        kept = np.isin(np.arange(n), list(change.kept))
        pairs |= np.outer(kept, ~kept)
    return Exact(
        nodes=tuple(_node(node, own, moved, equal, reason) for node in range(n)),
        influence=Claim(null, reason),
        relocation=Claim(sum(equal, Tally())),
        pairs=Tally(int((pairs & foreign(own.tree)).sum()), int(foreign(own.tree).sum())),
        law=None if reason or reach is None else _control(own, others, reach),
    )


def _changes(own: RecordedPass, trees: Sequence[RecordedPass]) -> tuple[list[Change], int]:
    """Return influence pairs, and how many rows differ between passes over the same tokens."""
    changes, strays = [], 0
    for other in trees:
        if other.tree.parents != own.tree.parents or other.nodes != own.nodes:
            continue
        kept = frozenset(node for node, tokens in own.paths.items() if other.paths[node] == tokens)
        moved = frozenset(node for node in kept if differ(own.digest(node), other.digest(node)))
        if len(kept) == len(own.tree):
            strays = max(strays, len(moved))
        elif kept:
            changes.append(Change(kept, moved))
    return changes, strays


def _null(passes: Sequence[RecordedPass]) -> Tally:
    """Return how many rows of chains differ between passes in which only the tokens behind them do."""
    chains = {one.tree: one for one in passes if one.mode == TREE and one.tree.is_chain}
    rows: dict[tuple[int, ...], list[int | None]] = {}
    for chain in chains.values():
        for tokens, digest in chain.front.items():
            rows.setdefault(tokens, []).append(digest)
    alike = [(first, other) for first, *rest in rows.values() for other in rest]
    return Tally(sum(differ(*pair) for pair in alike), len(alike))


def _unclaimed(changes: Sequence[Change], strays: int, null: Tally, n: int) -> str | None:
    if not changes:
        return "the trace holds no second pass over this tree with other tokens off a path"
    if strays:
        return f"{strays} of {n} rows differ where a pass is made twice"
    if null.count:
        return f"{null} rows of chains move where only tokens behind them change"
    if null.of < NULL:
        return f"{null.of} rows of chains were recorded twice with other tokens behind them, expected at least {NULL}"
    return None


def _node(node: int, own: RecordedPass, moved: frozenset[int], equal: Sequence[Tally], reason: str | None) -> Node:
    if node in moved and reason is None:
        through = next((above for above in reversed(own.tree.path(node)[:-1]) if above in moved), None)
        return Node(MOVED, equal[node], Tally(1, 1), through=through)
    return Node(CERTIFIED if equal[node].count and node not in moved else OPEN, equal[node])


def _control(own: RecordedPass, others: Sequence[RecordedPass], reach: np.ndarray) -> Law | None:
    """Return what pairs of the control's passes show, or None if the trace holds none."""
    controls = [other for other in others if other.mode == CONTROL]
    mine = next((other for other in controls if other.tree == own.tree), None)
    changes = [] if mine is None else _changes(mine, controls)[0]
    return law(changes, reach) if changes else None
