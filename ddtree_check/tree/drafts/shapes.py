"""Make trees of a named shape: chain, k-ary, comb, star, random."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..draft_tree import COMMITTED, DraftTree
from ..token_ids import at_least
from .best_first import LARGEST, ORDERS

SHAPES = ("chain", "kary", "comb", "star", "random")


def shape(
    name: str,
    nodes: int,
    *,
    vocab: int,
    seed: int,
    order: str = "heap",
    branching: int = 2,
    root: int | None = None,
    exclude: Iterable[int] = (),
) -> DraftTree:
    """Return a tree of a known shape: `nodes` drafted nodes, the root is extra.

    name: 'chain'; 'kary' (every node has `branching` children until the nodes run out); 'comb' (a spine, and beside
    each next spine node one leaf); 'star' (all under the root); 'random' (each node under an earlier one, drawn).
    order: 'breadth', 'depth', or 'heap', a drawn order as best-first would give: parents first, siblings interleaved,
    and unlike 'breadth' and 'depth' wherever the shape allows a third order.
    Tokens are drawn from range(vocab) without `exclude` and `root`: all distinct if there are enough, else distinct
    among siblings. The same arguments give the same tree.

    Raises ValueError for an unknown name or order, numbers below 1, or too few tokens for the widest node.
    """
    nodes, branching = at_least(1, "shape: nodes", nodes), at_least(1, "shape: branching", branching)
    vocab = at_least(1, "shape: vocab", vocab)
    if nodes > LARGEST:
        raise ValueError(f"shape: nodes {nodes!r:.40}, expected at most {LARGEST}")
    if order not in ORDERS:
        raise ValueError(f"shape: order {order!r}, expected one of {', '.join(ORDERS)}")
    rng = np.random.default_rng(at_least(0, "shape: seed", seed))
    drafted = range(1, nodes + 1)
    if name == "chain":
        parents = [node - 1 for node in drafted]
    elif name == "kary":
        parents = [(node - 1) // branching for node in drafted]
    elif name == "comb":  # odd nodes are the spine, node + 1 is the leaf beside it
        parents = [max(0, (node - 1) // 2 * 2 - 1) for node in drafted]
    elif name == "star":
        parents = [0 for _ in drafted]
    elif name == "random":
        parents = [int(rng.integers(node)) for node in drafted]
    else:
        raise ValueError(f"shape: name {name!r}, expected one of {', '.join(SHAPES)}")

    bare = DraftTree((root, *drafted), (COMMITTED, *parents))  # numbered, until the tokens are dealt
    free = np.ones(vocab, dtype=bool)
    free[[token for token in (*exclude, *(() if root is None else (root,))) if 0 <= token < vocab]] = False
    pool = rng.permutation(np.flatnonzero(free))
    widest = max(map(len, bare.children))
    if len(pool) < widest:
        raise ValueError(f"shape: {len(pool)} tokens to draw from, expected {widest} or more, one for each sibling")
    tokens: list[int | None] = [root] * len(bare)
    # siblings stand together here, so that dealing in turn keeps them distinct
    for turn, node in enumerate(child for siblings in bare.children for child in siblings):
        tokens[node] = int(pool[turn % len(pool)])
    tree = DraftTree(tuple(tokens), bare.parents)
    return _heap_order(tree, rng) if order == "heap" else tree.reordered(order)[0]


def _heap_order(tree: DraftTree, rng: np.random.Generator) -> DraftTree:
    """Return `tree` in the order of drawn path costs; drawn again while that is breadth or depth first."""
    one_order = tree.is_chain or max(tree.depth) == 1
    for _ in range(1 if one_order else 64):
        costs = [0.0]
        for parent, step in zip(tree.parents[1:], rng.exponential(size=len(tree) - 1), strict=True):
            costs.append(costs[parent] + float(step))
        drawn = tree.reordered(np.argsort(costs, kind="stable").tolist())[0]
        if all(drawn != drawn.reordered(order)[0] for order in ("breadth", "depth")):
            break
    return drawn
