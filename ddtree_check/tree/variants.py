"""Trees in which something changes that must not matter: tokens off a path, the rows of a path, the order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from ..base.errors import Unsupported
from .draft_tree import DraftTree


def retoken(tree: DraftTree, kept: Iterable[int], vocab_size: int, rng: random.Random) -> DraftTree:
    """Return the tree with another token at every node but the root and those of `kept`.

    A new token differs from every token that the node and its siblings have in `tree`, so that any subset of the new
    tokens makes a tree too. Raises Unsupported for a vocabulary that is too small for that.
    """
    tokens, kept = list(tree.tokens), {0, *kept}
    for parent, children in enumerate(tree.children):
        used = {tree.tokens[child] for child in children}
        changed = [child for child in children if child not in kept]
        if len(used) + len(changed) > vocab_size:
            raise Unsupported(
                f"retoken: node {parent} has {len(children)} children, expected a vocabulary of at least "
                f"{len(used) + len(changed)}, got {vocab_size}"
            )
        for child in changed:
            while (token := rng.randrange(vocab_size)) in used:
                pass
            used.add(token)
            tokens[child] = token
    return DraftTree(tuple(tokens), tree.parents)


def only(tree: DraftTree, changed: DraftTree, nodes: Iterable[int]) -> DraftTree:
    """Return `tree` with the tokens of `changed`, a `retoken` of it, at `nodes` alone."""
    tokens = list(tree.tokens)
    for node in nodes:
        tokens[node] = changed.tokens[node]
    return DraftTree(tuple(tokens), tree.parents)


def front_chain(tree: DraftTree, path: Sequence[int]) -> DraftTree:
    """Return a chain as wide as the tree: the tokens of `path`, then those of all other nodes in their order."""
    on = set(path)
    order = [*path, *(node for node in range(len(tree)) if node not in on)]
    return DraftTree.chain([tree.tokens[node] for node in order])


def other_order(tree: DraftTree, rng: random.Random) -> tuple[DraftTree, tuple[int, ...]]:
    """Return the tree in a random flat order, parents first, and the old index of each new node."""
    order, ready = [], [0]
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        ready.extend(tree.children[order[-1]])
    return tree.reordered(order)


def varied(tree: DraftTree, number: int, vocab_size: int, rng: random.Random, paths: int = 4) -> DraftTree:
    """Return one of the trees that show together, bit for bit, whether passes over `tree` are right.

    Number 0 is the tree. Then come, for each of its deepest leaf paths: the tree with other tokens off the path, and
    the path as a chain in front, twice, with other tokens behind it. After the last one they start again.
    """
    leaves = sorted(tree.leaves, key=lambda leaf: -tree.depth[leaf])[:paths]
    place = number % (1 + 3 * len(leaves))
    if not place:
        return tree
    path = tree.path(leaves[(place - 1) // 3])
    if (place - 1) % 3 == 0:
        return retoken(tree, path, vocab_size, rng)
    return retoken(front_chain(tree, path), range(len(path)), vocab_size, rng)
