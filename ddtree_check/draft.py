"""Where draft trees come from: marginals and a budget (best-first), published and drawn shapes, recorded drafts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import named
from .files import json_lines
from .formats import is_tree, tree_from_json
from .tree import COMMITTED, DraftTree

SHAPES = ("chain", "kary", "comb", "star", "random")
ORDERS = ("heap", "breadth", "depth")
LARGEST = 1 << 16  # nodes of a tree that is drafted or drawn
ROUNDING = 1e-4  # a float32 log-softmax may end this far above 0; more is no log probability
LOWEST = float(np.finfo(np.float32).min)
SURPRISED = 3.0  # standard deviations beyond which a draft is wrong about itself: once in 700 runs by chance
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


# --- from marginals ---------------------------------------------------------------------------------------------------


def best_first(log_probs, budget: int, root: int | None = None, candidates: int | None = None) -> DraftTree:
    """DDTree's builder: the `budget` most probable prefixes under a draft that is independent per depth.

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
    budget = _at_least(1, "best_first: budget", budget)
    keep = budget if candidates is None else min(budget, _at_least(1, "best_first: candidates", candidates))
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
    """A published static tree (a name of PUBLISHED) filled from the marginals: a node of rank r at depth d carries the
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
    """How many nodes of `tree` the draft itself expects to be accepted: the sum of the probabilities of their paths.

    log_probs [L, V] in nats, from which the tree was made, at least as deep as it is.
    """
    table = np.asarray(log_probs, dtype=np.float64)
    weight = [0.0]
    for node in range(1, len(tree)):
        weight.append(weight[tree.parents[node]] + table[tree.depth[node] - 1, tree.tokens[node]])
    return float(np.exp(weight[1:]).sum())


def surprise(log_probs, tokens: Sequence[int]) -> tuple[float, float]:
    """How much less probable than it expects a draft finds the tokens that followed, in nats, and the variance of that.

        sum over depths of (-log p_d(token) - entropy of p_d),  variance of log p_d under p_d

    log_probs [L, V] in nats; tokens: those behind the root, at most L of them. A draft that is right about itself gets
    0 on average, also where the tokens end at the first one that was not drafted.
    """
    excess = variance = 0.0
    for row, token in zip(np.asarray(log_probs, dtype=np.float64), tokens, strict=False):
        shown = row[row > -np.inf]
        share = np.exp(shown)
        mean = float((share * shown).sum())
        excess += mean - float(max(row[token], LOWEST))
        variance += float((share * shown**2).sum()) - mean**2
    return excess, variance


def drafter_says(surprised: float, accepted: float, ngram: float | None) -> str | None:
    """What a drafter's acceptance says where the verify passed, so that none was lost there; None for nothing.

    surprised: `surprise` over all rounds, in standard deviations; accepted: nodes a round by plain decoding, and ngram:
    those of an n-gram draft in the same places. A drafter that is surprised by more than SURPRISED reads something
    wrong, or was not made for such text.
    """
    if surprised > SURPRISED:
        return f"low acceptance is drafter-side (what followed surprises the drafter by {surprised:.1f} sigma)"
    if ngram is not None and accepted < ngram:
        return "an n-gram draft would do better in the same places"
    return None


def _top(row: np.ndarray, keep: int) -> list[tuple[int, float]]:
    """The `keep` most probable (token, log prob) of `row` [V], the lower id first among equals, without -inf."""
    keep = min(keep, len(row))
    threshold = np.partition(row, len(row) - keep)[len(row) - keep]
    ids = np.flatnonzero((row >= threshold) & (row > -np.inf))
    ids = ids[np.argsort(-row[ids], kind="stable")][:keep]
    return list(zip(ids.tolist(), row[ids].tolist(), strict=True))


def ngram_marginals(
    context: Sequence[int], length: int, vocab: int, *, order: int = 3, smoothing: float = 1.0
) -> np.ndarray:
    """Log probabilities float32 [length, vocab] of a draft that only looks things up in the context itself.

    Depth d: take the longest suffix of `context`, at most `order` tokens, that also ends somewhere at least d tokens
    before the end; count what came d tokens after each such place; add `smoothing` tokens' worth of the context's own
    token frequencies. Computed in float64. `context` ends with the root's token; a token it lacks has -inf.

    Raises ValueError for an empty context, ids outside the vocabulary, a length or order below 1, smoothing of 0.
    """
    length, vocab = _at_least(1, "ngram: length", length), _at_least(1, "ngram: vocab", vocab)
    order = _at_least(1, "ngram: order", order)
    context = np.array(token_ids("ngram: context", context, vocab))
    if not 0 < smoothing < np.inf:
        raise ValueError(f"ngram: smoothing {smoothing}, expected a finite number above 0")
    unigram = np.bincount(context, minlength=vocab) / len(context)
    # ends[n - 1]: where an earlier copy of the last n tokens ends
    ends = [np.flatnonzero(context[:-1] == context[-1])]
    for back in range(1, min(order, len(context) - 1)):
        last = ends[-1]
        ends.append(last[(last >= back) & (context[last - back] == context[-1 - back])])
    rows = []
    for ahead in range(1, length + 1):
        usable = ([end + ahead for end in places if end + ahead < len(context)] for places in reversed(ends))
        followers = context[next(filter(None, usable), [])]
        counts = np.bincount(followers, minlength=vocab) + smoothing * unigram
        rows.append(counts / (len(followers) + smoothing))
    with np.errstate(divide="ignore"):
        return np.log(np.stack(rows)).astype(np.float32)


def self_marginals(logits, acceptance: float, seed: int, sureness: float | None = None) -> np.ndarray:
    """Log probabilities float32 [L, V] of a draft that knows the target and errs at a chosen rate.

    logits [L, V], finite, read as float32: the target's own along its greedy continuation. With a `sureness`, one
    temperature for all depths makes the first choices' probabilities average it (kept within 0.05 ... 0.95), so that
    flat and peaked targets give trees of alike shapes.

    Each depth, with probability 1 - acceptance, swaps the target's first choice (of equal logits the lower id) with its
    choice of a rank drawn from 2..8. The chosen token leads its row strictly, equals are lowered by one float32 step:
    the chance that the draft's first choice is the target's is exactly `acceptance`. A higher acceptance under one seed
    only adds hits.

    Raises ValueError for logits of another shape or not finite, fewer than 2 tokens, an acceptance outside [0, 1].
    """
    table = _table("self_marginals: logits", logits)
    depths, vocab = table.shape
    if vocab < 2 or not np.isfinite(table).all():
        raise ValueError(f"self_marginals: logits {list(table.shape)}, expected 2 tokens or more, all finite")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"self_marginals: acceptance {acceptance}, expected 0..1")
    rng = np.random.default_rng(_at_least(0, "self_marginals: seed", seed))
    miss = rng.random(depths) >= acceptance
    ranks = rng.integers(1, min(8, vocab), size=depths)

    shifted = table.astype(np.float64) - table.max(axis=1, keepdims=True)
    if sureness is not None:
        shifted *= _sharpness(shifted, min(max(sureness, 0.05), 0.95))
    rows = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    for row, values, missed, rank in zip(rows, table, miss, ranks, strict=True):
        choices = [token for token, _ in _top(values, 8)]
        first, other = choices[0], choices[rank]
        leader = first
        if missed:
            row[[first, other]] = row[[other, first]]
            leader = other
        equal = row >= row[leader]
        equal[leader] = False
        row[equal] = np.nextafter(row[leader], np.float32(-np.inf))
    return rows


def _sharpness(shifted: np.ndarray, sureness: float) -> float:
    """The factor (1 / temperature) at which the first choices of `shifted`, rows with maximum 0, average `sureness`."""

    def missed(exponent: float) -> float:
        return float(np.mean(1 / np.exp(shifted * 10**exponent).sum(axis=1))) - sureness

    # Every look at all of a large vocabulary costs: the values rounded to 1/64 and counted give a start, which a few
    # secants make exact; 50 halvings where they do not.
    steps = np.minimum(np.rint(shifted * -64), 1 << 16).astype(np.int64)
    counts = [np.bincount(row) for row in steps]
    coarse = [(np.flatnonzero(count) / -64, count[count > 0]) for count in counts]

    def roughly(exponent: float) -> float:
        return float(np.mean([1 / (count * np.exp(x * 10**exponent)).sum() for x, count in coarse])) - sureness

    start = _rising_root(roughly)
    before, found = (start, missed(start)), (start + 1e-5, missed(start + 1e-5))
    for _ in range(6):
        if abs(found[1]) < 1e-14:
            return 10 ** found[0]
        if found[1] == before[1]:
            break
        after = found[0] - found[1] * (found[0] - before[0]) / (found[1] - before[1])
        if not abs(after - start) < 0.1:
            break
        before, found = found, (after, missed(after))
    return 10 ** _rising_root(missed) if abs(found[1]) > 1e-12 else 10 ** found[0]


def _rising_root(value: Callable[[float], float]) -> float:
    """Where a rising function of a decimal exponent turns from negative; an end of -8 ... 8 if it does nowhere between
    (ties at the top, or rows of two tokens)."""
    low, high = -8.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < 0 else (low, middle)
    return high


# --- shapes -----------------------------------------------------------------------------------------------------------


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
    """A tree of a known shape: `nodes` drafted nodes, the root is extra.

    name: 'chain'; 'kary' (every node has `branching` children until the nodes run out); 'comb' (a spine, and beside
    each next spine node one leaf); 'star' (all under the root); 'random' (each node under an earlier one, drawn).
    order: 'breadth', 'depth', or 'heap', a drawn order as best-first would give: parents first, siblings interleaved,
    and unlike 'breadth' and 'depth' wherever the shape allows a third order.
    Tokens are drawn from range(vocab) without `exclude` and `root`: all distinct if there are enough, else distinct
    among siblings. The same arguments give the same tree.

    Raises ValueError for an unknown name or order, numbers below 1, or too few tokens for the widest node.
    """
    nodes, branching = _at_least(1, "shape: nodes", nodes), _at_least(1, "shape: branching", branching)
    if nodes > LARGEST:
        raise ValueError(f"shape: nodes {nodes!r:.40}, expected at most {LARGEST}")
    vocab = _at_least(1, "shape: vocab", vocab)
    if order not in ORDERS:
        raise ValueError(f"shape: order {order!r}, expected one of {', '.join(ORDERS)}")
    rng = np.random.default_rng(_at_least(0, "shape: seed", seed))
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
    """`tree` in the order of drawn path costs; drawn again while that is breadth or depth first."""
    one_order = tree.is_chain or max(tree.depth) == 1
    for _ in range(1 if one_order else 64):
        costs = [0.0]
        for parent, step in zip(tree.parents[1:], rng.exponential(size=len(tree) - 1), strict=True):
            costs.append(costs[parent] + float(step))
        drawn = tree.reordered(np.argsort(costs, kind="stable").tolist())[0]
        if all(drawn != drawn.reordered(order)[0] for order in ("breadth", "depth")):
            break
    return drawn


# --- recorded drafts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marginals:
    """A recorded draft distribution: per depth the kept token ids and their log probabilities; all others are -inf."""

    ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        if not self.ids or len(self.ids) != len(self.log_probs):
            raise ValueError(
                f"marginals: {len(self.ids)} depths of ids and {len(self.log_probs)} of log_probs; "
                "expected as many of both, and at least one"
            )
        for depth, (ids, values) in enumerate(zip(self.ids, self.log_probs, strict=True), start=1):
            token_ids(f"marginals: depth {depth}", ids)
            if len(set(ids)) != len(ids) or len(ids) != len(values):
                raise ValueError(
                    f"marginals: depth {depth} has {len(ids)} ids ({len(set(ids))} distinct) and {len(values)} "
                    "log_probs; expected distinct ids, one log prob each"
                )
            for token, value in zip(ids, values, strict=True):
                number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
                if not number or not LOWEST <= value <= ROUNDING:
                    raise ValueError(
                        f"marginals: depth {depth} token {token} has log prob {value!r:.40}, expected a float32 <= 0"
                    )

    def dense(self, vocab: int) -> np.ndarray:
        """Log probabilities float32 [L, vocab]. Raises ValueError naming an id outside the vocabulary."""
        table = np.full((len(self.ids), _at_least(1, "marginals: vocab", vocab)), -np.inf, dtype=np.float32)
        for depth, (ids, values) in enumerate(zip(self.ids, self.log_probs, strict=True)):
            table[depth, token_ids(f"marginals: depth {depth + 1}", ids, vocab)] = values
        return table

    @classmethod
    def from_json(cls, data: object) -> Marginals:
        """Reads {"ids": [[...] per depth], "log_probs": [[...] per depth]}."""
        columns = [data.get(key) for key in ("ids", "log_probs")] if isinstance(data, dict) else [None]
        if not all(isinstance(column, list) and all(isinstance(row, list) for row in column) for column in columns):
            raise ValueError(f"marginals: got {data!r:.60}, expected 'ids' and 'log_probs', a list per depth each")
        return cls(*(tuple(map(tuple, column)) for column in columns))


Recorded = DraftTree | Marginals | tuple[DraftTree, ...]  # one tree, what to make trees of, or a tree for each round


def load_recorded(path: str | Path) -> list[Recorded]:
    """Recorded drafts from JSON lines, each {"tree": {"tokens", "parents"}}, {"marginals": {"ids", "log_probs"}} or
    {"trees": [{"tokens", "parents"}, ...]}, a tree for each round; or a round of a DDTree trace, or {"paths": ...}.

    Raises ValueError naming the file and the line.
    """
    found: list[Recorded] = []
    for line, data in json_lines(path):
        with named(f"{path}:{line}"):
            found.append(recorded_from_json(data))
    return found


def recorded_from_json(data: object) -> Recorded:
    """One recorded draft; a tree in any form of `formats.tree_from_json`. Raises ValueError for any other object."""
    if is_tree(data):  # a round as other tools write it
        return tree_from_json(data)
    kinds = [kind for kind in ("tree", "marginals", "trees") if isinstance(data, dict) and kind in data]
    if len(kinds) != 1:
        raise ValueError(f"got {data!r:.60}, expected an object with 'tree', 'marginals' or 'trees'")
    value = data[kinds[0]]
    if kinds == ["trees"]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"trees: got {value!r:.60}, expected a list of trees, one for each round")
        return tuple(map(tree_from_json, value))
    return (tree_from_json if kinds == ["tree"] else Marginals.from_json)(value)


def recorded_to_json(draft: Recorded) -> dict:
    """The inverse of `recorded_from_json`."""
    if isinstance(draft, Marginals):
        columns = {"ids": draft.ids, "log_probs": draft.log_probs}
        return {"marginals": {name: [list(row) for row in rows] for name, rows in columns.items()}}
    if isinstance(draft, DraftTree):
        return {"tree": draft.to_json()}
    return {"trees": [tree.to_json() for tree in draft]}


def recorded_tree(draft: DraftTree | Marginals, vocab: int, budget: int, root: int | None = None) -> DraftTree:
    """The tree of one recorded draft, at most `budget` drafted nodes.

    Marginals are expanded best-first. A recorded tree keeps its first `budget` nodes (a tree at every cut, since
    parents come first) and its own root token unless `root` is given.

    Raises ValueError for a budget below 1 and for a node's token outside the vocabulary.
    """
    if isinstance(draft, Marginals):
        return best_first(draft.dense(vocab), budget, root)
    rows = _at_least(1, "recorded: budget", budget) + 1
    tree = DraftTree(draft.tokens[:rows], draft.parents[:rows])
    tree = tree if root is None else tree.with_root(root)
    for node, token in enumerate(tree.tokens):
        if token is not None and token >= vocab:
            raise ValueError(f"recorded: node {node} has token {token}, expected 0..{vocab - 1}")
    return tree


# --- shared checks ----------------------------------------------------------------------------------------------------


def token_ids(what: str, values: Iterable, vocab: int | None = None) -> tuple[int, ...]:
    """`values` as a tuple of token ids, not empty, 0 or above and below `vocab` if given. Raises ValueError."""
    found = tuple(values)
    if not found:
        raise ValueError(f"{what}: no tokens, expected at least one")
    for place, value in enumerate(found):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < 0 or (vocab is not None and value >= vocab):
            expected = "a token id >= 0" if vocab is None else f"a token id in 0..{vocab - 1}"
            raise ValueError(f"{what}: token {place} is {value!r:.40}, expected {expected}")
    return tuple(map(int, found))


def _at_least(low: int, what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{what} {value!r:.40}, expected an integer >= {low}")
    return int(value)


def _table(what: str, values) -> np.ndarray:
    """`values` as float32 [L, V], neither empty nor with NaN or +inf."""
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
