"""Root-to-leaf paths of a tree, and paths as padded chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .draft_tree import DraftTree


@dataclass(frozen=True)
class Path:
    """A root-to-leaf path: `nodes` in order, and `owned`, its positions that no earlier leaf path holds."""

    nodes: tuple[int, ...]
    owned: tuple[int, ...]


def leaf_paths(tree: DraftTree, limit: int | None = None) -> list[Path]:
    """Return root-to-leaf paths in flat order of their leaves; with a limit, the sample that covers most nodes."""
    paths = [tree.path(leaf) for leaf in tree.leaves]
    if limit is not None and limit < len(paths):
        left, chosen, covered = list(paths), [], set()
        for _ in range(limit):
            best = max(left, key=lambda path: (len(set(path) - covered), -path[-1]))
            left.remove(best)
            chosen.append(best)
            covered |= set(best)
        paths = sorted(chosen, key=lambda path: path[-1])
    owned: set[int] = set()
    result = []
    for path in paths:
        result.append(Path(path, tuple(place for place, node in enumerate(path) if node not in owned)))
        owned |= set(path)
    return result


def padded_chain(tree: DraftTree, path: Sequence[int], rows: int = 0) -> DraftTree:
    """Return the path as a chain of at least `rows` rows: its own tokens, then its last token again, which rows before
    cannot reach."""
    tokens = [tree.tokens[node] for node in path]
    return DraftTree.chain(tokens + tokens[-1:] * (rows - len(tokens)))


def first_branch(tree: DraftTree) -> tuple[int, ...]:
    """Return the path of first children, from the root to a leaf."""
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    return tuple(path)


def leaves_first_branch(tree: DraftTree, path: Sequence[int]) -> bool:
    """Return whether a path from the root on takes another child than the first."""
    return any(node != tree.children[tree.parents[node]][0] for node in path[1:])
