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
    """Links [D] of one tree, D = `rows` or the number of nodes. Raises ValueError for fewer rows than nodes."""
    rows = _rows(tree, rows)
    next_token, next_sibling = np.full((2, rows), NONE, dtype=np.int64)
    for node, children in enumerate(tree.children):
        if children:
            next_token[node] = children[0]
            next_sibling[list(children[:-1])] = children[1:]
    return Links(np.arange(rows, dtype=np.int64), next_token, next_sibling)


def to_batch_links(trees: Sequence[DraftTree], rows: int | None = None) -> Links:
    """Links [b, D] of b trees, D = `rows` or the nodes of the largest. Raises ValueError for no trees, too few rows."""
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
    """The tree behind next_token and next_sibling, integers [D], and tokens [D]; the first `count` rows are nodes.

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


def from_batch_links(links: Links, tokens, counts: Sequence[int] | None = None) -> list[DraftTree]:
    """The trees behind links [b, D] and tokens [b, D]. Raises ValueError naming the request as well."""
    index = _integers("retrieve_index", links.retrieve_index)
    if index.ndim != 2 or len(tokens) != len(index) or (counts is not None and len(counts) != len(index)):
        raise ValueError(
            f"links: retrieve_index {list(index.shape)} with tokens for {len(tokens)} requests; "
            "expected [requests, rows], tokens and a count for each"
        )
    wrong = np.argwhere(index != np.arange(index.size).reshape(index.shape))
    if len(wrong):
        request, row = wrong[0]
        raise ValueError(
            f"links: request {request} node {row} has retrieve_index {index[request, row]}, "
            f"expected {request * index.shape[1] + row}"
        )
    trees = []
    for request in range(len(index)):
        try:
            trees.append(
                from_links(
                    links.next_token[request],
                    links.next_sibling[request],
                    tokens[request],
                    None if counts is None else counts[request],
                )
            )
        except ValueError as error:
            raise ValueError(f"request {request}: {error}") from None
    return trees


# --- ancestor masks ---------------------------------------------------------------------------------------------------


def to_mask(tree: DraftTree, prefix: int = 0, rows: int | None = None) -> np.ndarray:
    """bool [D, prefix + D], true where a row may look: the whole prefix, its ancestors, itself. prefix 0 gives D x D.

    D = `rows` or the number of nodes; a padding row sees what a child of the root would.
    """
    rows = _rows(tree, rows)
    block = np.eye(rows, dtype=bool)
    block[:, 0] = True
    block[: len(tree), : len(tree)] = tree.ancestor_mask
    return np.hstack([np.ones((rows, _prefix(prefix)), dtype=bool), block])


def from_mask(mask, tokens: Sequence[int | None], prefix: int = 0, count: int | None = None) -> DraftTree:
    """The tree behind a mask, bool [D, prefix + D], and tokens [D]; the first `count` rows are nodes.

    A row's parent is the highest earlier row it sees. Raises ValueError naming the row: it misses itself or the prefix,
    sees a later row or none before it, or sees other rows than its parent does.
    """
    mask, tokens, prefix = np.asarray(mask), tuple(tokens), _prefix(prefix)
    if mask.dtype != bool or mask.shape != (len(tokens), prefix + len(tokens)):
        raise ValueError(
            f"mask: {mask.dtype} {list(mask.shape)}, expected bool {[len(tokens), prefix + len(tokens)]} for "
            f"{len(tokens)} tokens behind a prefix of {prefix}"
        )
    count = _count("mask", count, len(tokens))
    block, parents = mask[:, prefix:], [COMMITTED]
    for row in range(count):
        seen = np.flatnonzero(block[row])
        unseen = np.flatnonzero(~mask[row, :prefix])
        if len(unseen):
            raise ValueError(f"mask: row {row} does not see prefix column {unseen[0]}, expected the whole prefix")
        if not block[row, row]:
            raise ValueError(f"mask: row {row} does not see itself")
        if seen[-1] > row:
            raise ValueError(f"mask: row {row} sees row {seen[-1]}, expected no later row")
        if row == 0:
            continue
        if len(seen) == 1:
            raise ValueError(f"mask: row {row} sees no earlier row, expected its parent; only row 0 is a root")
        parent = int(seen[-2])
        odd = np.flatnonzero(block[row, :row] != block[parent, :row])
        if len(odd):
            verb = "sees" if block[row, odd[0]] else "does not see"
            raise ValueError(
                f"mask: row {row} {verb} row {odd[0]}, unlike its parent, row {parent}; expected nested ancestors"
            )
        parents.append(parent)
    return DraftTree(tokens[:count], tuple(parents))


# --- DDTree traces ----------------------------------------------------------------------------------------------------


def to_trace(tree: DraftTree, path: Sequence[int]) -> dict:
    """One verified round as DDTree's tools write it; lists of integers only.

    accepted_indices: the accepted `path`, from the root on. node_token_ids, node_depths [B]: the drafted nodes, the
    root left out, its children at depth 1. parents [B + 1]: with the root. root_token: the root's token or None.
    Raises ValueError if `path` is no path from the root.
    """
    return {
        "accepted_indices": list(_accepted(tree, path)),
        "node_token_ids": list(tree.tokens[1:]),
        "node_depths": list(tree.depth[1:]),
        "parents": list(tree.parents),
        "root_token": tree.tokens[0],
    }


def from_trace(trace: dict) -> tuple[DraftTree, tuple[int, ...]]:
    """The tree and the accepted path of one trace; root_token may be missing. Raises ValueError naming the node."""
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
    """`path`, checked: the root, then each time a child."""
    if odd := [node for node in path if not isinstance(node, int | np.integer) or isinstance(node, bool)]:
        raise ValueError(f"trace: accepted path holds {odd[0]!r:.40}, expected nodes")
    if not path or path[0] != 0:
        raise ValueError(f"trace: accepted path {list(path)!r:.60}, expected one that begins with node 0, the root")
    for before, node in pairwise(path):
        if node not in tree.children[before]:
            raise ValueError(f"trace: accepted node {node!r:.40} after node {before}, expected a child of it")
    return tree.path(int(path[-1]))


# --- path sets --------------------------------------------------------------------------------------------------------


def to_paths(tree: DraftTree) -> list[tuple[int | None, ...]]:
    """The tokens of every root-to-leaf path, the root's included, leaves in depth-first order (as llama.cpp sequences).

    The flat order is lost: `from_paths(to_paths(tree))` is the tree in depth-first order.
    """
    depth_first, _ = tree.reordered("depth")
    return [depth_first.path_tokens(leaf) for leaf in depth_first.leaves]


def from_paths(paths: Sequence[Sequence[int | None]]) -> DraftTree:
    """The tree that holds each path once, nodes in order of first appearance; all paths begin with the root's token.

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
    """Whether a JSON value has the keys of a tree in one of the forms that `tree_from_json` reads."""
    return isinstance(data, dict) and (
        "paths" in data or "node_token_ids" in data or {"tokens", "parents"} <= data.keys()
    )


def tree_from_json(data: object) -> DraftTree:
    """A tree as {"tokens", "parents"}, as one round of a DDTree trace, or as {"paths": [[...], ...]}.

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


def _prefix(prefix: int) -> int:
    if prefix < 0:
        raise ValueError(f"mask: prefix {prefix}, expected 0 or more")
    return prefix


def _integers(what: str, values) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise ValueError(f"links: {what} is {array.dtype} {list(array.shape)}, expected integers")
    return array
