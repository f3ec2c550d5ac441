"""Which drafted tokens a target accepts, and how two acceptances differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..base.errors import UsageError
from .draft_tree import DraftTree
from .paths import first_branch

PATTERNS = ("zero", "full", "first", "branch", "every")
PATTERN = f"{', '.join(PATTERNS)} or a path of nodes such as 0-2-5"


@dataclass(frozen=True)
class Accepted:
    """path: nodes the target agrees with, from the root (node 0) on; bonus: the target's own next token after them."""

    path: tuple[int, ...]
    bonus: int

    @property
    def accepted(self) -> int:
        """Return how many drafted tokens are accepted; the root and the bonus token do not count."""
        return len(self.path) - 1


def greedy_walk(tree: DraftTree, argmax) -> Accepted:
    """Descend from the root while a child carries the target's next token; the first without a child is the bonus.

    argmax [n]: integers, the target's next token at each node of the tree. Raises ValueError for any other array.
    """
    argmax = np.asarray(argmax)
    if argmax.shape != (len(tree),) or argmax.dtype.kind not in "iu":
        raise ValueError(
            f"walk: argmax {argmax.dtype} {list(argmax.shape)}, expected integers [{len(tree)}], one for each node"
        )
    return descend(tree, lambda node: int(argmax[node]))


def descend(tree: DraftTree, choose: Callable[[int], int]) -> Accepted:
    """Return as `greedy_walk`, by whatever token `choose` gives at a node; it is asked along the path only."""
    path = [0]
    while True:
        token = choose(path[-1])
        child = next((node for node in tree.children[path[-1]] if tree.tokens[node] == token), None)
        if child is None:
            return Accepted(tuple(path), token)
        path.append(child)


def compare_walks(tree: DraftTree, reference: Accepted, other: Accepted, tie_nodes: Iterable[int] = ()) -> dict:
    """Return what `other` accepted, set against the reference, on the same tree.

    tie_nodes: nodes whose argmax changed within noise. Returns path, accepted and bonus of `other`; wrong_accept and
    wrong_reject, the node ids that only `other` or only the reference accepted; wrong_bonus, the same path with another
    bonus token; by_tie, whether the walks part at a tie. Raises ValueError if either path is no root path of the tree.
    """
    for who, walk in (("reference", reference), ("other", other)):
        if not walk.path or not 0 <= walk.path[-1] < len(tree) or tree.path(walk.path[-1]) != walk.path:
            raise ValueError(f"walk: {who} path {walk.path}, expected nodes from the root on, each a child of the last")
    shared = [node for node, theirs in zip(reference.path, other.path, strict=False) if node == theirs]
    return {
        "path": list(other.path),
        "accepted": other.accepted,
        "bonus": other.bonus,
        "wrong_accept": list(other.path[len(shared) :]),
        "wrong_reject": list(reference.path[len(shared) :]),
        "wrong_bonus": reference.path == other.path and reference.bonus != other.bonus,
        "by_tie": reference != other and shared[-1] in set(tie_nodes),
    }


# Paths that are committed by force


def accept_nodes(tree: DraftTree, patterns: Sequence[str]) -> dict[int, str]:
    """Return the nodes that end the accepted paths, each with the first pattern that names it.

    zero    the root alone;  first   the root's first child;  full   the leaf at the end of the first branch
    branch  the deepest node of a path that leaves the first branch;  every   all nodes
    PATH    node ids from the root on, such as 0-2-5, or the last of them
    A pattern that the tree has no node for names none. Raises UsageError for anything else.
    """
    spine = first_branch(tree)
    aside = [node for node in range(len(tree)) if node not in spine]
    named = {
        "zero": [0],
        "first": spine[1:2],
        "full": spine[-1:],
        "branch": [max(aside, key=lambda node: (tree.depth[node], -node))] if aside else [],
        "every": range(len(tree)),
    }
    nodes: dict[int, str] = {}
    for pattern in patterns:
        for node in named.get(pattern) or ([] if pattern in named else [_path_end(tree, pattern)]):
            nodes.setdefault(node, pattern)
    return nodes


def is_pattern(pattern: str) -> bool:
    """Return whether a tree can have nodes that the pattern names."""
    return pattern in PATTERNS or all(part.isdecimal() for part in pattern.split("-"))


def _path_end(tree: DraftTree, pattern: str) -> int:
    if not is_pattern(pattern):
        raise UsageError(f"accept: got {pattern!r}, expected {PATTERN}")
    path = tuple(map(int, pattern.split("-")))
    if path[-1] >= len(tree):
        raise UsageError(f"accept: node {path[-1]} of {pattern!r}, expected 0..{len(tree) - 1}")
    right = tree.path(path[-1])
    if len(path) > 1 and path != right:
        raise UsageError(f"accept: got {pattern!r}, expected the path {'-'.join(map(str, right))}")
    return path[-1]
