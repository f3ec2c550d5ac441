"""Build the best-first tree of a draft's marginals, and the published static trees."""

from __future__ import annotations

import heapq

import numpy as np

from ..draft_tree import COMMITTED, DraftTree
from ..token_ids import at_least

ORDERS = ("heap", "breadth", "depth")
LARGEST = 1 << 16  # nodes of a tree that is drafted or drawn
ROUNDING = 1e-4  # a float32 log-softmax may end this far above 0; more is no log probability
LOWEST = float(np.finfo(np.float32).min)
# Static trees that others published, a word a node: the ranks of the choices along its path, the best choice 0. In
# breadth-first order, as their verify passes run them.
PUBLISHED = {
    # EAGLE's static tree: 25 nodes, depth 5 (arXiv 2401.15077)
    "eagle": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    # Medusa's choices for its 7B model: 63 nodes, depth 4 (arXiv 2401.10774)
    "medusa": (
        "0 1 2 3 4 5 6 7 8 9 "
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
        "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001"
    ),
    # Token Recycling's tree: 80 nodes, depth 6 (arXiv 2408.08696)
    "token-recycling": (
        "0 1 2 3 4 5 6 7 "
        "00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70 "
        "000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500 "
        "0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000 "
        "00000 00001 00002 00010 00020 00100 01000 10000 000000 000001 000100"
    ),
}


def best_first(log_probs, budget: int, root: int | None = None, candidates: int | None = None) -> DraftTree:
    """Build DDTree's tree: the `budget` most probable prefixes under a draft that is independent per depth.

        weight(t_1 .. t_d) = log_probs[0, t_1] + ... + log_probs[d - 1, t_d]

    log_probs [L, V] in nats; row d - 1 serves every node of depth d. It is read as float32, weights are float64 sums
    from left to right. Each depth offers its K = min(budget, V) most probable tokens, or `candidates` if that is fewer;
    of equal ones the lower id first; -inf is never offered. Nodes stand in order of (-weight, ranks along the path),
    behind the root. Returns up to budget + 1 nodes, fewer when the candidates run out.

    Raises ValueError for NaN, values above 0, an empty or not two-dimensional array, a budget or candidates below 1.
    """
    table = _table("best_first: log_probs", log_probs)
    above = np.argwhere(table > ROUNDING)
    if len(above):
        row, token = above[0]
        raise ValueError(f"best_first: log_probs[{row}, {token}] is {table[row, token]}, expected at most 0")
    budget = at_least(1, "best_first: budget", budget)
    keep = budget if candidates is None else min(budget, at_least(1, "best_first: candidates", candidates))
    offers = [_top(np.minimum(row, 0), keep) for row in table]

    tokens, parents = [root], [COMMITTED]
    # One entry a frontier node: (-weight, ranks along the path, parent, parent's weight). Ranks are unique, so the heap
    # never looks further; the children and the next sibling of a node stand behind it, so pops come out sorted.
    frontier: list[tuple[float, tuple[int, ...], int, float]] = []

    def offer(ranks: tuple[int, ...], parent: int, base: float):
        if len(ranks) <= len(offers) and ranks[-1] < len(offers[len(ranks) - 1]):
            weight = base + offers[len(ranks) - 1][ranks[-1]][1]
            heapq.heappush(frontier, (-weight, ranks, parent, base))

    offer((0,), 0, 0.0)
    while frontier and len(tokens) <= budget:
        cost, ranks, parent, base = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(offers[len(ranks) - 1][ranks[-1]][0])
        parents.append(parent)
        offer((*ranks[:-1], ranks[-1] + 1), parent, base)
        offer((*ranks, 0), node, -cost)
    return DraftTree(tuple(tokens), tuple(parents))


def published_tree(log_probs, name: str, root: int | None = None) -> DraftTree:
    """Fill a published static tree (a name of PUBLISHED) from the marginals: a node of rank r at depth d carries the
    r-th most probable token of row d - 1, of equal ones the lower id first.

    log_probs [L, V] as in `best_first`. Nodes deeper than L, or of a rank that is not offered, are left out with what
    hangs below them. Raises ValueError for an unknown name and for marginals that `best_first` refuses.
    """
    if name not in PUBLISHED:
        raise ValueError(f"tree: name {name!r}, expected one of {', '.join(PUBLISHED)}")
    offers = [_top(np.minimum(row, 0), 10) for row in _table("published_tree: log_probs", log_probs)]
    tokens, parents, place = [root], [COMMITTED], {"": 0}
    for word in PUBLISHED[name].split():
        depth, rank = len(word), int(word[-1])
        if word[:-1] in place and depth <= len(offers) and rank < len(offers[depth - 1]):
            place[word] = len(tokens)
            tokens.append(offers[depth - 1][rank][0])
            parents.append(place[word[:-1]])
    return DraftTree(tuple(tokens), tuple(parents))


def expected_accepts(log_probs, tree: DraftTree) -> float:
    """Return how many nodes of `tree` the draft expects to be accepted: the sum of their paths' probabilities.

    log_probs [L, V] in nats, from which the tree was made, at least as deep as it is.
    """
    table = np.asarray(log_probs, dtype=np.float64)
    weight = [0.0]
    for node in range(1, len(tree)):
        weight.append(weight[tree.parents[node]] + table[tree.depth[node] - 1, tree.tokens[node]])
    return float(np.exp(weight[1:]).sum())


def _top(row: np.ndarray, keep: int) -> list[tuple[int, float]]:
    """Return the `keep` most probable (token, log prob) of `row` [V], the lower id first among equals, without -inf."""
    keep = min(keep, len(row))
    threshold = np.partition(row, len(row) - keep)[len(row) - keep]
    ids = np.flatnonzero((row >= threshold) & (row > -np.inf))
    ids = ids[np.argsort(-row[ids], kind="stable")][:keep]
    return list(zip(ids.tolist(), row[ids].tolist(), strict=True))


def _table(what: str, values) -> np.ndarray:
    """Return `values` as float32 [L, V], neither empty nor with NaN or +inf."""
    try:
        with np.errstate(over="ignore"):
            table = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: not an array of numbers, expected [depths, vocabulary]") from None
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"{what}: shape {list(table.shape)}, expected [depths, vocabulary], both at least 1")
    bad = np.argwhere(np.isnan(table) | np.isposinf(table))
    if len(bad):
        row, token = bad[0]
        raise ValueError(f"{what}[{row}, {token}] is {table[row, token]}, expected a number or -inf")
    return table
