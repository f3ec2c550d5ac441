"""Trees in the forms that other tools write: what the readers of the package must take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddtree_check.tree.draft_tree import DraftTree


def to_mask(tree: DraftTree, prefix: int = 0, rows: int | None = None) -> np.ndarray:
    """Return bool [D, prefix + D], true where a row may look: the whole prefix, its ancestors, itself.

    D = `rows` or the number of nodes; a padding row sees what a child of the root would.
    """
    rows = rows or tree.n
    block = np.eye(rows, dtype=bool)
    block[:, 0] = True
    block[: tree.n, : tree.n] = tree.ancestor_mask
    return np.hstack([np.ones((rows, prefix), dtype=bool), block])


def to_trace(tree: DraftTree, path: Sequence[int]) -> dict:
    """Return one verified round as DDTree's tools write it; lists of integers only.

    accepted_indices: the accepted `path`, from the root on. node_token_ids, node_depths [B]: the drafted nodes, the
    root left out, its children at depth 1. parents [B + 1]: with the root. root_token: the root's token or None.
    """
    return {
        "accepted_indices": list(path),
        "node_token_ids": list(tree.tokens[1:]),
        "node_depths": list(tree.depth[1:]),
        "parents": list(tree.parents),
        "root_token": tree.tokens[0],
    }


def to_paths(tree: DraftTree) -> list[tuple[int | None, ...]]:
    """Return the tokens of every root-to-leaf path, the root's included, leaves in depth-first order.

    The flat order is lost: `from_paths(to_paths(tree))` is the tree in depth-first order.
    """
    depth_first, _ = tree.reordered("depth")
    return [depth_first.path_tokens(leaf) for leaf in depth_first.leaves]
