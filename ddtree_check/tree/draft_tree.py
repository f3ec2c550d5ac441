"""The draft tree: which tokens are verified, and which node each of them continues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

COMMITTED = -1  # the parent of the root: everything before the tree


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens in flat order (the order in which an engine computes them), parents before children.

    tokens[i] is node i's token id; node 0 is the root, the last committed token, and may be None in a tree that has
    not met its prompt yet (`with_root` fills it in). parents[i] is the node that node i continues, `parents[0] == -1`.
    A parent has at most one child with a given token. n: how many nodes there are.

    Raises ValueError naming the node, the value and what was expected.
    """

    tokens: tuple[int | None, ...]
    parents: tuple[int, ...]
    n: int = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "tokens", tuple(_whole(self.tokens, "token", none_at=0)))
        object.__setattr__(self, "parents", tuple(_whole(self.parents, "parent")))
        object.__setattr__(self, "n", len(self.tokens))
        if len(self.tokens) != len(self.parents):
            raise ValueError(
                f"tree: {len(self.tokens)} tokens and {len(self.parents)} parents; expected one parent per token"
            )
        if not self.tokens:
            raise ValueError("tree: no nodes; expected at least the root")
        if self.parents[0] != COMMITTED:
            raise ValueError(f"tree: node 0 has parent {self.parents[0]}, expected -1; node 0 is the root")
        first: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if token is not None and token < 0:
                raise ValueError(f"tree: node {node} has token {token}, expected a token id >= 0")
            if node == 0:
                continue
            if parent == COMMITTED:
                raise ValueError(f"tree: node {node} has parent -1, expected 0..{node - 1}; only node 0 is a root")
            if not 0 <= parent < node:
                raise ValueError(
                    f"tree: node {node} has parent {parent}, expected 0..{node - 1}; list parents before children"
                )
            twin = first.setdefault((parent, token), node)
            if twin != node:
                raise ValueError(
                    f"tree: nodes {twin} and {node} are both token {token} under parent {parent}; "
                    "expected at most one child per token"
                )

    def __len__(self) -> int:
        return self.n

    @classmethod
    def chain(cls, tokens: Sequence[int | None]) -> DraftTree:
        """Return a tree in which every node continues the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Return the edges to the root, per node."""
        return tuple(depths(self.parents))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Return the child nodes of each node, ascending."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node, kids in enumerate(self.children) if not kids)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Return the nodes of each depth, ascending: a parent is always in an earlier level."""
        levels: list[list[int]] = [[] for _ in range(max(self.depth) + 1)]
        for node, depth in enumerate(self.depth):
            levels[depth].append(node)
        return tuple(map(tuple, levels))

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        if not 0 <= node < len(self):
            raise ValueError(f"tree: path of node {node}, expected 0..{len(self) - 1}")
        path = [node]
        while self.parents[path[-1]] != COMMITTED:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int | None, ...]:
        return tuple(self.tokens[step] for step in self.path(node))

    @cached_property
    def ancestor_mask(self) -> np.ndarray:
        """Return bool [n, n], read-only: `mask[i, j]` is true when j is i or an ancestor of i."""
        return ancestors(self.parents)

    @cached_property
    def leaked(self) -> tuple[int, ...]:
        """Return the foreign tokens that node i absorbs when states run in flat order: i - depth(i)."""
        return tuple(node - depth for node, depth in enumerate(self.depth))

    @cached_property
    def clean(self) -> tuple[int, ...]:
        """Return the nodes that a flat run leaves alone: everything before them is their own path."""
        return tuple(node for node, leaked in enumerate(self.leaked) if leaked == 0)

    @property
    def is_chain(self) -> bool:
        return len(self.clean) == len(self)

    def with_root(self, token: int) -> DraftTree:
        """Return the same tree behind another last committed token."""
        return DraftTree((token, *self.tokens[1:]), self.parents)

    def reordered(self, order: str | Sequence[int]) -> tuple[DraftTree, tuple[int, ...]]:
        """Return the same tree in another flat order, and the old index of each new node.

        order: 'breadth', 'depth' (first child first) or a permutation that keeps parents before children.
        """
        if order == "breadth":
            order = [node for level in self.levels for node in level]
        elif order == "depth":
            order, stack = [], [0]
            while stack:
                order.append(stack.pop())
                stack.extend(reversed(self.children[order[-1]]))
        elif isinstance(order, str):
            raise ValueError(f"tree: order {order!r}, expected 'breadth', 'depth' or a permutation")
        order = tuple(order)
        if sorted(order) != list(range(len(self))):
            raise ValueError(f"tree: order {order[:8]}..., expected each of 0..{len(self) - 1} once")
        new = {old: position for position, old in enumerate(order)} | {COMMITTED: COMMITTED}
        return DraftTree(
            tuple(self.tokens[old] for old in order), tuple(new[self.parents[old]] for old in order)
        ), order

    def to_json(self) -> dict:
        return {"tokens": list(self.tokens), "parents": list(self.parents)}

    @classmethod
    def from_json(cls, data: object) -> DraftTree:
        """Read {"tokens": [...], "parents": [...]}; tokens[0] may be null."""
        if not isinstance(data, dict) or not {"tokens", "parents"} <= data.keys():
            raise ValueError(f"tree: got {_short(data)}, expected an object with 'tokens' and 'parents'")
        if not isinstance(data["tokens"], list) or not isinstance(data["parents"], list):
            raise ValueError("tree: 'tokens' and 'parents' must be lists of integers")
        return cls(tuple(data["tokens"]), tuple(data["parents"]))


def depths(parents: Sequence[int]) -> list[int]:
    """Return the edges from each node to the end of its parent links (any negative parent)."""
    edges: list[int] = []
    for parent in parents:
        edges.append(edges[parent] + 1 if parent >= 0 else 0)
    return edges


@lru_cache(maxsize=8)
def ancestors(parents: tuple[int, ...]) -> np.ndarray:
    """Return bool [n, n], read-only: j is i or is reached from i through `parents` (each below its node, or negative).

    The last few are kept, since every layer of a pass asks for the same one.
    """
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    mask.setflags(write=False)
    return mask


def merge(trees: Sequence[DraftTree]) -> tuple[DraftTree, list[tuple[int, ...]]]:
    """Return one tree that holds every path of `trees` once, and for each tree the place of its nodes in it.

    The roots must carry the same token. Lets a reference be decoded once for several draft budgets.
    """
    roots = {tree.tokens[0] for tree in trees}
    if len(roots) != 1:
        raise ValueError(f"merge: root tokens {sorted(map(str, roots))}, expected one and the same")
    tokens: list[int | None] = [trees[0].tokens[0]]
    parents = [COMMITTED]
    known: dict[tuple[int, int], int] = {}
    places = []
    for tree in trees:
        place = [0]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            key = (place[parent], token)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(place[parent])
            place.append(known[key])
        places.append(tuple(place))
    return DraftTree(tuple(tokens), tuple(parents)), places


def _whole(values: Iterable, what: str, none_at: int | None = None):
    for node, value in enumerate(values):
        if value is None and node == none_at:
            yield None
        elif isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ValueError(f"tree: node {node} has {what} {_short(value)}, expected an integer")
        else:
            yield int(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
