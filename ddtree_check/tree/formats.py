"""The forms that engines keep draft trees in: links, masks, traces, path sets; from a DraftTree and back.

Rows are the engine's, nodes are the tree's: row i is node i, and rows from `count` on are padding. A padding row's
parent is row 0 by convention; it carries no token that counts. Arrays are numpy, links int64, masks bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .draft_tree import COMMITTED, DraftTree

NONE = -1  # the end of a link


# --- SGLang / EAGLE links ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Links:
    """A tree as child and sibling links: int64, [D] for one tree or [b, D] for a batch of b.

    retrieve_index: a row's place in the flattened batch, b * D + i. next_token: the lowest child, next_sibling: the
    next higher child of the same parent; -1 where there is none. Padding rows are not linked at all, so that no walk
    reaches them; a kernel that starts its parents at 0 then finds 0 for them.
    """

    retrieve_index: np.ndarray
    next_token: np.ndarray
    next_sibling: np.ndarray


def to_links(tree: DraftTree, rows: int | None = None) -> Links:
    """Return links [D] of one tree, D = `rows` or the number of nodes. Raises ValueError for fewer rows than nodes."""
    rows = _rows(tree, rows)
    next_token, next_sibling = np.full((2, rows), NONE, dtype=np.int64)
    for node, children in enumerate(tree.children):
        if children:
            next_token[node] = children[0]
            next_sibling[list(children[:-1])] = children[1:]
    return Links(np.arange(rows, dtype=np.int64), next_token, next_sibling)


def to_batch_links(trees: Sequence[DraftTree], rows: int | None = None) -> Links:
    """Return links [b, D] of b trees, D = `rows` or the largest's nodes. Raises ValueError for too few rows."""
    if not trees:
        raise ValueError("links: no trees, expected at least one")
    rows = max(map(len, trees)) if rows is None else rows
    each = [to_links(tree, rows) for tree in trees]
    return Links(
        np.arange(len(trees) * rows, dtype=np.int64).reshape(len(trees), rows),
        np.stack([links.next_token for links in each]),
        np.stack([links.next_sibling for links in each]),
    )


def from_links(next_token, next_sibling, tokens: Sequence[int | None], count: int | None = None) -> DraftTree:
    """Return the tree of next_token and next_sibling, integers [D], and tokens [D]; `count` rows are nodes.

    Padding rows may be unlinked or stand at the end of the root's children; they are dropped. Raises ValueError naming
    the node: a link that leads nowhere, does not ascend (a descending sibling list, a cycle) or reaches padding from
    below the root; a node with two parents, or with none.
    """
    next_token, next_sibling = _integers("next_token", next_token), _integers("next_sibling", next_sibling)
    tokens = tuple(tokens)
    if not next_token.shape == next_sibling.shape == (len(tokens),):
        raise ValueError(
            f"links: next_token {list(next_token.shape)}, next_sibling {list(next_sibling.shape)} and {len(tokens)} "
            "tokens; expected one of each for every row"
        )
    count = _count("links", count, len(tokens))
    if next_sibling[0] != NONE:
        raise ValueError(f"links: node 0 has next_sibling {next_sibling[0]}, expected -1; the root has no siblings")
    for name, links in (("next_token", next_token), ("next_sibling", next_sibling)):
        for node, target in enumerate(links[:count].tolist()):
            if target != NONE and not node < target < len(tokens):
                raise ValueError(f"links: node {node} has {name} {target}, expected -1 or a later row of {len(tokens)}")
    parents: list[int | None] = [COMMITTED] + [None] * (count - 1)
    for node in range(count):
        if parents[node] is None:  # links ascend, so none that follows can still reach it
            raise ValueError(f"links: node {node} is not linked, expected a link that leads to it")
        for name, target, parent in (
            ("next_token", int(next_token[node]), node),
            ("next_sibling", int(next_sibling[node]), parents[node]),
        ):
            if target == NONE or (target >= count and parent == 0):
                continue
            if target >= count:
                raise ValueError(f"links: node {node} has {name} {target}, a padding row; expected it below the root")
            if parents[target] is not None:
                raise ValueError(f"links: node {target} has two parents, {parents[target]} and {parent}; expected one")
            parents[target] = parent
    return DraftTree(tokens[:count], tuple(parents))


# --- DDTree traces ----------------------------------------------------------------------------------------------------


def from_trace(trace: dict) -> tuple[DraftTree, tuple[int, ...]]:
    """Return the tree and the accepted path of one trace; root_token may be missing. Raises ValueError."""
    keys = ("accepted_indices", "node_token_ids", "node_depths", "parents")
    missing = [key for key in keys if not isinstance(trace, dict) or not isinstance(trace.get(key), (list, tuple))]
    if missing:
        raise ValueError(f"trace: no list {missing[0]!r}, expected lists {', '.join(keys)}")
    accepted, drafted, depth, parents = (trace[key] for key in keys)
    tree = DraftTree((trace.get("root_token"), *drafted), tuple(parents))
    if len(depth) != len(drafted):
        raise ValueError(f"trace: {len(depth)} node_depths and {len(drafted)} node_token_ids, expected as many of both")
    for node, (got, expected) in enumerate(zip(depth, tree.depth[1:], strict=True), start=1):
        if got != expected:
            raise ValueError(f"trace: node {node} has depth {got!r:.40}, expected {expected} by its parents")
    return tree, _accepted(tree, accepted)


def _accepted(tree: DraftTree, path: Sequence[int]) -> tuple[int, ...]:
    """Return `path`, checked: the root, then each time a child."""
    if odd := [node for node in path if not isinstance(node, int | np.integer) or isinstance(node, bool)]:
        raise ValueError(f"trace: accepted path holds {odd[0]!r:.40}, expected nodes")
    if not path or path[0] != 0:
        raise ValueError(f"trace: accepted path {list(path)!r:.60}, expected one that begins with node 0, the root")
    for before, node in pairwise(path):
        if node not in tree.children[before]:
            raise ValueError(f"trace: accepted node {node!r:.40} after node {before}, expected a child of it")
    return tree.path(int(path[-1]))


# --- path sets --------------------------------------------------------------------------------------------------------


def from_paths(paths: Sequence[Sequence[int | None]]) -> DraftTree:
    """Return the tree that holds each path once, nodes in order of appearance; paths begin with the root's token.

    Raises ValueError naming the path that is empty, has another root, or lies within another path.
    """
    if not paths or not all(paths):
        raise ValueError(f"paths: {len(paths)} paths, expected at least one and none of them empty")
    for number, path in enumerate(paths):
        if odd := [token for token in path if token is not None and not isinstance(token, int | np.integer)]:
            raise ValueError(f"paths: path {number} holds {odd[0]!r:.40}, expected token ids")
    tokens, parents = [paths[0][0]], [COMMITTED]
    known: dict[tuple[int, int | None], int] = {}
    ends: list[int] = []
    for number, path in enumerate(paths):
        if path[0] != tokens[0]:
            raise ValueError(f"paths: path {number} begins with {path[0]!r:.40}, expected the root's {tokens[0]!r:.40}")
        node = 0
        for token in path[1:]:
            parent, node = node, known.setdefault((node, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
        ends.append(node)
    tree = DraftTree(tuple(tokens), tuple(parents))
    for number, end in enumerate(ends):
        if tree.children[end] or end in ends[:number]:
            raise ValueError(f"paths: path {number} lies within another path, expected one path for each leaf")
    return tree


# --- any of them ------------------------------------------------------------------------------------------------------


def is_tree(data: object) -> bool:
    """Return whether a JSON value has the keys of a tree in one of the forms that `tree_from_json` reads."""
    return isinstance(data, dict) and (
        "paths" in data or "node_token_ids" in data or {"tokens", "parents"} <= data.keys()
    )


def tree_from_json(data: object) -> DraftTree:
    """Return a tree as {"tokens", "parents"}, as one round of a DDTree trace, or as {"paths": [[...], ...]}.

    Raises ValueError naming the node, the path, or the keys that are missing.
    """
    if isinstance(data, dict) and "node_token_ids" in data:
        return from_trace({"accepted_indices": [0], **data})[0]
    if isinstance(data, dict) and "paths" in data:
        paths = data["paths"]
        if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
            raise ValueError(f"paths: {paths!r:.60}, expected a list of lists of token ids")
        return from_paths(paths)
    return DraftTree.from_json(data)


# --- shared checks ----------------------------------------------------------------------------------------------------


def _rows(tree: DraftTree, rows: int | None) -> int:
    if rows is None:
        return len(tree)
    if rows < len(tree):
        raise ValueError(f"formats: {rows} rows for {len(tree)} nodes, expected at least one row a node")
    return rows


def _count(what: str, count: int | None, rows: int) -> int:
    if count is None:
        count = rows
    if not 1 <= count <= rows:
        raise ValueError(f"{what}: count {count} of {rows} rows, expected 1..{rows}")
    return int(count)


def _integers(what: str, values) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise ValueError(f"links: {what} is {array.dtype} {list(array.shape)}, expected integers")
    return array
