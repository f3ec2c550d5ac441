"""Judge what must not matter: tokens off a node's path, and the rows that its path stands in, change no bit of its row.

Influence: a pass keeps the tokens of some paths and changes all others; a kept row that moves reads a foreign token.
Relocation: a node's row equals, in bits, the row of its path run as a chain in front, at least once in a few draws.
Both compare passes of one shape, so they need no reference, no floor and no tolerance. This module runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

import numpy as np

from ..base.words import counted
from ..tree.draft_tree import DraftTree

CHANCE = 1e-9  # a verdict is wrong at most this often, where rows move or differ for no fault of their own
HOW = ("off", "leaves", "all")
CERTIFIED, MOVED, OPEN = "certified", "moved", "open"


# Which passes cover which nodes


def foreign(tree: DraftTree, *, after: bool = True) -> np.ndarray:
    """Return bool [n, n]: row i must not read node j, which is neither node i nor one of its ancestors.

    after: count the descendants of node i too, which only a pass that is not causal can read.
    """
    pairs = ~tree.ancestor_mask
    return pairs if after else pairs & ~tree.ancestor_mask.T


def keeps(
    tree: DraftTree, wanted: np.ndarray, rng: random.Random, limit: int | None = None
) -> tuple[list[frozenset[int]], np.ndarray]:
    """Return sets of nodes to keep in a pass each while all others change, and which pairs [n, n] they separate.

    A set is closed under parents, and separates node i from node j if it holds i and not j. A greedy choice: where
    branches are to be separated, their number grows with the logarithm of the leaves. limit: at most so many sets.
    """
    paths, left, separated = tree.ancestor_mask, wanted.copy(), np.zeros_like(wanted)
    sets: list[frozenset[int]] = []
    while left.any() and (limit is None or len(sets) < limit):
        nodes, strangers = np.nonzero(left)
        picks = [rng.randrange(len(nodes)) for _ in range(TRIES)]
        candidates = [paths[nodes[pick]] for pick in picks] + [~paths[:, strangers[pick]] for pick in picks]
        candidates += [make(tree, rng) for make in (_some_paths, _pruned) for _ in range(2 * TRIES)]
        best = max(candidates, key=lambda kept: int(left[kept][:, ~kept].sum()))
        for pairs, value in ((left, False), (separated, True)):
            pairs[np.ix_(best, ~best)] = value
        sets.append(frozenset(np.flatnonzero(best).tolist()))
    return sets, separated


TRIES = 32  # sets of each form that a greedy step chooses from


def _some_paths(tree: DraftTree, rng: random.Random) -> np.ndarray:
    """Return bool [n]: the paths to a random share of the nodes."""
    share = rng.choice((0.1, 0.25, 0.5))
    return tree.ancestor_mask[[0, *(node for node in range(len(tree)) if rng.random() < share)]].any(0)


def _pruned(tree: DraftTree, rng: random.Random) -> np.ndarray:
    """Return bool [n]: what is left of the tree when a random share of its edges is cut."""
    share, kept = rng.choice((0.05, 0.2, 0.4)), np.zeros(len(tree), dtype=bool)
    for node, parent in enumerate(tree.parents):
        kept[node] = node == 0 or (kept[parent] and rng.random() >= share)
    return kept


# What passes showed


@dataclass(frozen=True)
class Change:
    """One influence pass: the nodes whose tokens were `kept`, and those of them whose rows `moved` in bits."""

    kept: frozenset[int]
    moved: frozenset[int]


@dataclass(frozen=True)
class Edge:
    """A foreign node that a moved node reads. None: it was not narrowed down.

    more: the node moves without this one too.  layer, kind  where it enters first, if the engine can be watched.
    """

    source: int | None
    more: bool = False
    layer: int | None = None
    kind: str | None = None

    def __str__(self) -> str:
        what = "reads foreign nodes" if self.source is None else f"reads node {self.source}"
        return what + (" and others" if self.more else "") + entry(self.layer, self.kind)


def entry(layer: int | None, kind: str | None) -> str:
    """Return where a row moves first, as the end of a sentence."""
    return "" if layer is None else ", already in its input" if layer < 0 else f", first in layer {layer} ({kind})"


@dataclass(frozen=True)
class Tally:
    """So many of so many rows did something."""

    count: int = 0
    of: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.of + other.of)

    def __str__(self) -> str:
        return f"{self.count} of {self.of}"


def differ(row: int | None, other: int | None) -> bool:
    """Return whether two rows differ in bits; a row with a NaN equals nothing."""
    return row is None or row != other


def chance(rows: Tally, null: Tally) -> float:
    """Return how likely `rows` do something at least so often, if they do it as often as those of `null`.

    Fisher's exact test: the size of the null counts, so that a small one never excludes chance by itself.
    """
    doing, every = rows.count + null.count, rows.of + null.of
    ways = sum(comb(doing, k) * comb(every - doing, rows.of - k) for k in range(rows.count, min(doing, rows.of) + 1))
    return ways / comb(every, rows.of) if every else 1.0


def law(changes: Sequence[Change], reach: np.ndarray) -> Law:
    """Hold the passes of a wiring against `wiring.reached` [n, n]: which rows had to move, and which did."""
    expected, moved, outside = set(), set(), set()
    for change in changes:
        changed = np.ones(len(reach), dtype=bool)
        changed[list(change.kept)] = False
        must = {node for node in change.kept if reach[node, changed].any()}
        expected |= must
        moved |= change.moved & must
        outside |= change.moved - must
    return Law(frozenset(expected), frozenset(moved), frozenset(outside))


@dataclass(frozen=True)
class Law:
    """The control under influence: nodes that had to move, those that did, and those that moved with no reason to."""

    expected: frozenset[int]
    moved: frozenset[int]
    outside: frozenset[int]

    @property
    def missed(self) -> frozenset[int]:
        return self.expected - self.moved

    @property
    def kept(self) -> bool:
        """Whether the control moved exactly at the law's nodes."""
        return not self.outside and not self.missed

    def __str__(self) -> str:
        text = f"{counted(len(self.moved), 'node')} moved, the law says {len(self.expected)}"
        for what, nodes in (("outside", self.outside), ("missed", self.missed)):
            text += f"; {what} {sorted(nodes)[:8]}" if nodes else ""
        return text


# What it came to


@dataclass(frozen=True)
class Claim:
    """Whether an engine keeps bits where it must for a check to say anything, the figure, and why not."""

    figure: Tally
    reason: str | None = None

    @property
    def claimed(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "claimed" if self.claimed else f"not claimed: {self.reason}"


@dataclass(frozen=True)
class Node:
    """One node. value: `certified`, `moved` (a defect, whatever its size) or `open` (the floor decides).

    equal   draws in which its row was that of its path as a chain;  moved  draws in which it moved under influence
    elsewhere   draws in which its row was the chain's where its path stood in another order
    others  draws in which the rows of other nodes in its place were their chains'
    reads   what it reads, if that was looked for;  through  a moved ancestor, by which it moves too
    """

    value: str
    equal: Tally = Tally()
    moved: Tally = Tally()
    elsewhere: Tally = Tally()
    others: Tally = Tally()
    reads: tuple[Edge, ...] = ()
    through: int | None = None
    layer: int | None = None
    kind: str | None = None

    def to_json(self) -> dict:
        figures = {name: _tally(getattr(self, name)) for name in ("equal", "moved", "elsewhere", "others")}
        reads = [vars(edge) for edge in self.reads]
        return {"value": self.value, **figures, "reads": reads, "through": self.through, "layer": self.layer}

    def text(self, node: int) -> str:
        """Return the evidence as a sentence."""
        if self.value == CERTIFIED:
            return f"node {node} is certified"
        if self.reads:
            return f"node {node} " + "; ".join(map(str, self.reads))
        if self.through is not None:
            return f"node {node} moves with node {self.through}"
        if self.value == MOVED and self.moved.count:
            return f"node {node} moves with foreign tokens in {self.moved} draws"
        never = f"node {node} equals its path as a chain in {self.equal} draws"
        if self.elsewhere.of:
            never += f", in {self.elsewhere} where it stands elsewhere"
        if self.others.of:
            never += f", and other nodes in its row in {self.others}"
        return never + entry(self.layer, self.kind)


@dataclass(frozen=True)
class Exact:
    """What the exact checks of one tree came to.

    influence, relocation   whether each was claimed;  pairs  node and foreign node that a pass separated, of all
    law     the control against the leak law, None if it was not run
    others  further findings, a sentence each: what ran before, orders, requests, commits
    passes  by check;  seconds  that they took
    """

    nodes: tuple[Node, ...]
    influence: Claim
    relocation: Claim
    pairs: Tally
    law: Law | None = None
    others: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def of(self, value: str) -> tuple[int, ...]:
        """Return the nodes of this value."""
        return tuple(node for node, evidence in enumerate(self.nodes) if evidence.value == value)

    @property
    def verdict(self) -> str:
        """`fail`: a node moved, or something else that must not matter did. `pass`: influence is claimed and every
        node is certified. `open`: neither, and a reference must decide."""
        if self.of(MOVED) or self.others:
            return "fail"
        return "pass" if self.influence.claimed and not self.of(OPEN) else "open"

    @classmethod
    def refused(cls, nodes: int, reason: str) -> Exact:
        """Return what a tree came to on which the checks could not run."""
        return cls((Node(OPEN),) * nodes, Claim(Tally(), reason), Claim(Tally(), reason), Tally())

    @property
    def evidence(self) -> list[str]:
        """Return a sentence for each node where a fault enters, those that are told most of first."""
        origins = [node for node in self.of(MOVED) if self.nodes[node].through is None]
        return [self.nodes[node].text(node) for node in sorted(origins, key=lambda node: not self.nodes[node].reads)]

    @property
    def reason(self) -> str:
        """Return the verdict's reason, one sentence."""
        if moved := self.of(MOVED):
            return f"{counted(len(moved), 'node')} off in bits: {self.evidence[0]}"
        if self.others:
            return self.others[0]
        if not self.influence.claimed:
            return str(self.influence)
        if left := self.of(OPEN):
            return (
                f"{len(left)} of {counted(len(self.nodes), 'node')} not certified: {self.nodes[left[0]].text(left[0])}"
            )
        return f"{counted(len(self.nodes), 'node')} certified"

    def to_json(self) -> dict:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            **{value: len(self.of(value)) for value in (CERTIFIED, MOVED, OPEN)},
            "influence": {"claimed": self.influence.claimed, "reason": self.influence.reason, **_tally(self.pairs)},
            "relocation": {
                "claimed": self.relocation.claimed, "reason": self.relocation.reason, **_tally(self.relocation.figure),
            },
            "law": self.law and {
                name: sorted(getattr(self.law, name)) for name in ("expected", "outside", "missed")
            },
            "evidence": self.evidence,
            "others": list(self.others),
            "skipped": self.skipped,
            "passes": self.passes,
        }  # fmt: skip


def summary(cases: Sequence[Exact], left: str = "held by the floor alone") -> dict | None:
    """Return what the cases of a run came to, for its record; None if there are none. left: what open nodes are."""
    if not cases:
        return None
    verdicts = [exact.verdict for exact in cases]
    counts = {value: sum(len(exact.of(value)) for exact in cases) for value in (CERTIFIED, MOVED, OPEN)}
    reasons = [exact.influence.reason for exact in cases if not exact.influence.claimed]
    figures = {
        "verdict": min(verdicts, key=("fail", "open", "pass").index),
        **counts,
        "nodes": sum(counts.values()),
        "cases": len(cases),
        "claimed": len(cases) - len(reasons),
        "unclaimed": next(iter(reasons), None),
        "pairs": _tally(sum((exact.pairs for exact in cases), Tally())),
        "passes": sum(sum(exact.passes.values()) for exact in cases),
    }
    return figures | {"text": _text(figures, [exact.law for exact in cases if exact.law], left)}


def _text(figures: dict, laws: Sequence[Law], left: str) -> str:
    """Return a summary as a line for every view."""
    pairs, many = figures["pairs"], figures["cases"]
    parts = [f"{figures[CERTIFIED]} of {counted(figures['nodes'], 'node')} certified, {figures[MOVED]} off in bits"]
    if figures[OPEN]:
        parts.append(f"{figures[OPEN]} {left}")
    if figures["claimed"]:
        parts.append(f"foreign tokens were changed at {pairs['count']} of {pairs['of']} pairs of nodes")
    if unclaimed := many - figures["claimed"]:
        parts.append(f"no claim in {unclaimed} of {counted(many, 'case')}: {figures['unclaimed']}")
    if laws:
        moved, expected = (sum(len(getattr(law, name)) for law in laws) for name in ("moved", "expected"))
        outside = sum(len(law.outside) for law in laws)
        parts.append(f"the control moved {moved} of the law's {expected} nodes and {outside} others")
    return "; ".join([*parts, f"further passes: {figures['passes']}"])


def _tally(tally: Tally) -> dict[str, int]:
    return {"count": tally.count, "of": tally.of}
