"""Which node every channel of a tree pass reads from, and what follows from it: the leak law.

The modes and every fault are Wirings. A Wiring names one rule per channel; `plan(tree)` turns the rules into indices,
and `contaminated` follows them layer by layer to the set of nodes that cannot come out right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from ..tree.draft_tree import DraftTree

BLANK = -(2**31)  # a state or window slot that is read as zeros: what a dropped state looks like


RULES: dict[str, dict[str, Callable[[DraftTree], object]]] = {
    "state": {"tree": lambda tree: tree.parents, "flat": lambda tree: tuple(range(-1, tree.n - 1))},
    "conv": {"tree": lambda tree: tree.parents, "flat": lambda tree: tuple(range(-1, tree.n - 1))},
    "mask": {
        "tree": lambda tree: tree.ancestor_mask,
        "flat": lambda tree: np.tril(np.ones((tree.n, tree.n), dtype=bool)),
    },
    "positions": {"tree": lambda tree: tree.depth, "flat": lambda tree: tuple(range(tree.n))},
    "commit": {"tree": lambda tree: tuple(range(tree.n)), "flat": lambda tree: tree.depth},
}


@dataclass(frozen=True)
class Wiring:
    """One rule per channel: 'tree' (right), 'flat' (row order), or a function DraftTree -> indices (a fault).

    state, conv   the node each node's recurrent state or convolution window continues, as in `DraftTree.parents`;
                  a negative link is the committed state, BLANK is zeros
    mask          bool [n, n], which rows each row attends to
    positions     rows from the end of the committed text, per node
    commit        the node whose state is stored when a path that ends in node i is accepted

    Raises ValueError for an unknown channel rule.
    """

    name: str
    state: str | Callable = "tree"
    conv: str | Callable = "tree"
    mask: str | Callable = "tree"
    positions: str | Callable = "tree"
    commit: str | Callable = "tree"

    def __post_init__(self):
        for channel, rules in RULES.items():
            rule = getattr(self, channel)
            if not callable(rule) and rule not in rules:
                raise ValueError(f"wiring: {channel}={rule!r}, expected one of {', '.join(rules)}")

    @classmethod
    def parse(cls, text: str) -> Wiring:
        """Read 'state=flat,conv=flat'; channels not named keep the tree's rule."""
        channels = {}
        for part in text.split(","):
            channel, equals, rule = (piece.strip() for piece in part.partition("="))
            if not equals or channel not in RULES:
                raise ValueError(
                    f"wiring: got {part.strip()!r}, expected CHANNEL=RULE with CHANNEL in {', '.join(RULES)}"
                )
            channels[channel] = rule
        return cls(text, **channels)

    def plan(self, tree: DraftTree) -> Plan:
        resolved = {}
        for channel, rules in RULES.items():
            rule = getattr(self, channel)
            resolved[channel] = (rule if callable(rule) else rules[rule])(tree)
        return Plan(tree=tree, **resolved)


FORKED = Wiring("tree_forked")
UNFORKED = Wiring("tree_unforked", state="flat", conv="flat")  # the defect we look for, kept as a negative control


def wirings(control: Wiring = UNFORKED) -> dict[str, Wiring | None]:
    """Return the wiring of each pass over a tree, by mode or control; None is the engine's own pass.

    linear and chain run along root-to-leaf paths, the others over the tree's rows. control: what tree_unforked reads.
    """
    return {"linear": None, "chain": FORKED, "tree_forked": FORKED, "tree_unforked": control, "own": None}


def with_edge(tree: DraftTree, channel: str, node: int, source: int):
    """Return what each node of the right wiring reads in a channel, but for one, which reads `source`; of the mask, but
    for one bit."""
    right = getattr(FORKED.plan(tree), channel)
    if channel != "mask":
        return (*right[:node], source, *right[node + 1 :])
    wrong = right.copy()
    wrong[node, source] = not right[node, source]
    return wrong


@dataclass(frozen=True, eq=False)
class Plan:
    """A Wiring on one tree: what every node reads. Links are checked: a row may only read earlier rows.

    windows(width): int [n, width], read-only: the rows under a causal convolution at each node, oldest first, the node
    last. -m is the m-th last committed input (-1 the last); BLANK is zeros.
    """

    tree: DraftTree
    state: tuple[int, ...]
    conv: tuple[int, ...]
    mask: np.ndarray
    positions: tuple[int, ...]
    commit: tuple[int, ...]

    def __post_init__(self):
        for channel in ("state", "conv"):
            links = tuple(map(int, getattr(self, channel)))
            object.__setattr__(self, channel, links)
            for node, source in enumerate(links):
                if source >= node:
                    raise ValueError(
                        f"wiring: {channel} of node {node} reads node {source}, expected an earlier row or -1"
                    )
        object.__setattr__(self, "windows", partial(_windows, self.conv))

    @cached_property
    def skip_rows(self) -> frozenset[int]:
        """Return the nodes that read something else than their own parent, in any channel."""
        right = FORKED.plan(self.tree)
        return frozenset(
            node
            for node in range(self.tree.n)
            if self.state[node] != right.state[node]
            or self.conv[node] != right.conv[node]
            or self.positions[node] != right.positions[node]
            or not np.array_equal(self.mask[node], right.mask[node])
        )

    @cached_property
    def rows_since_skip(self) -> tuple[int | None, ...]:
        """Return, per node, the path steps up to the last node that read wrong; None if there is none on its path."""
        steps: list[int | None] = []
        for node, parent in enumerate(self.tree.parents):
            before = steps[parent] if node else None
            steps.append(0 if node in self.skip_rows else None if before is None else before + 1)
        return tuple(steps)


@lru_cache(maxsize=64)
def _windows(conv: tuple[int, ...], width: int) -> np.ndarray:
    """Return `Plan.windows`, kept for the layers of a pass and for chains of one length."""
    windows = np.empty((len(conv), width), dtype=np.int64)
    for node in range(len(conv)):
        row = node
        for slot in range(width - 1, -1, -1):
            windows[node, slot] = row
            row = conv[row] if row >= 0 else (row - 1 if row != BLANK else BLANK)
    windows.setflags(write=False)
    return windows


@dataclass(frozen=True, eq=False)
class Plans:
    """The plans of several requests in one pass, on trees of as many rows each. `tree` is the first's, for its size."""

    requests: tuple[Plan, ...]

    @property
    def tree(self) -> DraftTree:
        return self.requests[0].tree

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        return tuple(plan.state for plan in self.requests)

    def windows(self, width: int) -> np.ndarray:
        """Return int [b, n, width], as `Plan.windows`."""
        return np.stack([plan.windows(width) for plan in self.requests])


class Conv(NamedTuple):
    """A causal convolution over `width` inputs."""

    width: int


class State(NamedTuple):
    """A recurrent state; `kind` names the mixer."""

    kind: str


class Attention(NamedTuple):
    """Attention; `window` in positions, None for all of them; `positional` is false without a position embedding."""

    window: int | None = None
    positional: bool = True


class Layer(NamedTuple):
    """What one layer reads across rows: parallel branches, each a sequence of Conv, State, Attention."""

    kind: str
    branches: tuple[tuple[Conv | State | Attention, ...], ...]


def reads(layers: Sequence[Layer], *kinds: type) -> bool:
    """Return whether any layer reads across rows in one of these ways, such as `Conv, State`: the recurrent ones."""
    return any(isinstance(op, kinds) for layer in layers for branch in layer.branches for op in branch)


def contaminated(plan: Plan, layers: Sequence[Layer]) -> frozenset[int]:
    """Return the nodes whose output must differ from the right one, in exact arithmetic and barring coincidences.

    A data flow over the layers. Per branch, start from the nodes whose input is dirty; then
      conv       dirty if a row under its window is not the right one, or is dirty
      state      dirty if it continues another node than its parent, or a dirty one, or its input is dirty
      attention  dirty if it sees other rows than its ancestors, or a dirty one, or one at a wrong position
    and the branches add up. For flat states or windows it reduces to the leak law: node i is clean iff depth(i) == i.
    """
    right = FORKED.plan(plan.tree)
    dirty = np.zeros(plan.tree.n, dtype=bool)
    wrong_position = np.array(plan.positions) != np.array(right.positions)
    for layer in layers:
        reached = dirty.copy()
        for branch in layer.branches:
            local = dirty.copy()
            for op in branch:
                local = _spread(op, local, plan, right, wrong_position)
            reached |= local
        dirty = reached
    return frozenset(np.flatnonzero(dirty).tolist())


def _spread(op: Conv | State | Attention, dirty: np.ndarray, plan: Plan, right: Plan, wrong_position: np.ndarray):
    match op:
        case Conv(width):
            read = plan.windows(width)
            stale = dirty[np.maximum(read, 0)] & (read >= 0)
            return (read != right.windows(width)).any(1) | stale.any(1)
        case State():
            state = dirty.copy()
            for node, source in enumerate(plan.state):
                state[node] |= source != right.state[node] or (source >= 0 and state[source])
            return state
        case Attention(window, positional):
            view, should = plan.mask, right.mask
            if window is not None:
                view, should = (mask & _within(p.positions, window) for mask, p in ((view, plan), (should, right)))
            out = (view != should).any(1) | (view & dirty).any(1) | dirty
            if positional:
                out |= (view & wrong_position).any(1) | wrong_position
            return out
    raise TypeError(f"contaminated: {op!r} is none of Conv, State, Attention")


def _within(positions: Sequence[int], window: int) -> np.ndarray:
    position = np.array(positions)
    return position[:, None] - position[None, :] < window


def reached(plan: Plan, layers: Sequence[Layer]) -> np.ndarray:
    """Return bool [n, n]: the token of node j reaches the output of node i, in exact arithmetic.

    A data flow as `contaminated`, of tokens: what a channel lacks, or a wrong position, brings no token along.
    """
    tokens = np.eye(plan.tree.n, dtype=bool)
    for layer in layers:
        out = tokens.copy()
        for branch in layer.branches:
            local = tokens
            for op in branch:
                local = _gathered(op, local, plan)
            out |= local
        tokens = out
    return tokens


def _gathered(op: Conv | State | Attention, tokens: np.ndarray, plan: Plan) -> np.ndarray:
    match op:
        case Conv(width):
            read = plan.windows(width)
            return (tokens[np.maximum(read, 0)] & (read >= 0)[:, :, None]).any(1)
        case State():
            state = tokens.copy()
            for node, source in enumerate(plan.state):
                if source >= 0:
                    state[node] |= state[source]
            return state
        case Attention(window):
            view = plan.mask if window is None else plan.mask & _within(plan.positions, window)
            return tokens | (view[:, :, None] & tokens).any(1)
    raise TypeError(f"reached: {op!r} is none of Conv, State, Attention")
