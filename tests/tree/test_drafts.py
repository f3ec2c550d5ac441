"""Builders against brute force, drawn shapes, and the sources of marginals."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.best_first import ORDERS, best_first
from ddtree_check.tree.drafts.marginals import ngram_marginals, self_marginals
from ddtree_check.tree.drafts.recorded import Marginals, load_recorded, recorded_tree
from ddtree_check.tree.drafts.shapes import SHAPES, shape

INF = float("inf")


# --- best first -------------------------------------------------------------------------------------------------------


def ranked(row, keep):
    """(token, log prob) of one depth, by probability, then by id."""
    row = [(float(np.float32(value)), token) for token, value in enumerate(row)]
    return [(token, value) for value, token in sorted(row, key=lambda pair: (-pair[0], pair[1]))[:keep] if value > -INF]


def brute_force(log_probs, budget, candidates=None):
    """[(weight, path of tokens)] of the `budget` best prefixes: all of them are listed, then sorted."""
    rows = [ranked(row, min(budget, candidates or budget)) for row in log_probs]
    found = []
    for depth in range(1, len(rows) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in rows[:depth])):
            steps = [row[rank] for row, rank in zip(rows, ranks, strict=False)]
            weight = 0.0
            for _, value in steps:
                weight += value
            found.append((-weight, ranks, tuple(token for token, _ in steps)))
    return [(-cost, path) for cost, _, path in sorted(found)[:budget]]


def built(tree, log_probs):
    """[(weight, path of tokens)] of a tree's nodes in flat order."""
    found = []
    for node in range(1, len(tree)):
        path, weight = tree.path_tokens(node)[1:], 0.0
        for depth, token in enumerate(path):
            weight += float(np.float32(log_probs[depth][token]))
        found.append((weight, path))
    return found


DRAWN = st.floats(-9, 0, width=32)
TIED = st.sampled_from([0.0, -0.5, -1.0, -1.5, -INF])


@st.composite
def tables(draw):
    depths, vocab = draw(st.sampled_from([(1, 1), (1, 9), (2, 1), (2, 4), (3, 3), (3, 5), (4, 3), (6, 2)]))
    values = draw(st.sampled_from([DRAWN, TIED]))
    return np.array(draw(st.lists(values, min_size=depths * vocab, max_size=depths * vocab))).reshape(depths, vocab)


@settings(max_examples=150)
@given(tables(), st.integers(1, 200) | st.just(1024))
@example(np.zeros((4, 3)), 1024)
@example(np.zeros((3, 5)), 40)
@example(np.full((2, 3), -INF), 3)
@example(np.array([[0.0, -0.0, -0.0], [-1.0, -1.0, -0.5]]), 9)
def test_best_first_picks_the_most_probable_prefixes(log_probs, budget):
    tree = best_first(log_probs, budget)
    nodes = built(tree, log_probs)
    assert nodes == brute_force(log_probs, budget)
    weights = [weight for weight, _ in nodes]
    assert weights == sorted(weights, reverse=True)


@settings(max_examples=40)
@given(tables(), st.integers(1, 40), st.integers(1, 4))
def test_best_first_with_fewer_candidates(log_probs, budget, candidates):
    tree = best_first(log_probs, budget, candidates=candidates)
    assert built(tree, log_probs) == brute_force(log_probs, budget, candidates)


@settings(max_examples=40)
@given(tables(), st.integers(1, 40), st.integers(1, 40))
def test_a_smaller_budget_is_a_shorter_list(log_probs, small, more):
    """K = min(budget, V) cuts nothing off: a node of rank r stands behind its r better siblings."""
    small_tree, large_tree = best_first(log_probs, small), best_first(log_probs, small + more)
    assert large_tree.parents[: len(small_tree)] == small_tree.parents
    assert large_tree.tokens[: len(small_tree)] == small_tree.tokens


def rebuilt(log_probs, budget, *, ties="low", cost="path", keep=None, children=True):
    """best_first again, by a search of all open nodes each time; an argument that differs is a fault."""
    sign = 1 if ties == "low" else -1
    orders = [
        sorted(range(len(row)), key=lambda t, row=row: (-row[t], sign * t))[: keep or budget] for row in log_probs
    ]
    tokens, parents, weights, frontier = [None], [-1], [0.0], {((0,), 0)}

    def key(entry):
        ranks, parent = entry
        value = log_probs[len(ranks) - 1][orders[len(ranks) - 1][ranks[-1]]]
        return -(value + (weights[parent] if cost == "path" else 0.0)), ranks

    while frontier and len(tokens) <= budget:
        entry = min(frontier, key=key)
        frontier.remove(entry)
        ranks, parent = entry
        weights.append(weights[parent] + log_probs[len(ranks) - 1][orders[len(ranks) - 1][ranks[-1]]])
        tokens.append(orders[len(ranks) - 1][ranks[-1]])
        parents.append(parent)
        if ranks[-1] + 1 < len(orders[len(ranks) - 1]):
            frontier.add(((*ranks[:-1], ranks[-1] + 1), parent))
        if children and len(ranks) < len(log_probs):
            frontier.add(((*ranks, 0), len(tokens) - 1))
    return DraftTree(tuple(tokens), tuple(parents))


PLAIN = np.log(np.array([[0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.15, 0.05], [0.85, 0.05, 0.05, 0.05]], dtype=np.float32))
FAULTS = [
    pytest.param({}, True, id="none"),
    pytest.param({"ties": "high"}, False, id="tie-to-the-higher-id"),
    pytest.param({"cost": "last"}, False, id="last-step-instead-of-path"),
    pytest.param({"keep": 1}, False, id="one-candidate"),
    pytest.param({"children": False}, False, id="no-children"),
]


@pytest.mark.parametrize(("fault", "same"), FAULTS)
def test_a_faulty_builder_is_seen(fault, same):
    assert (built(rebuilt(PLAIN, 16, **fault), PLAIN) == brute_force(PLAIN, 16)) == same
    assert built(best_first(PLAIN, 16), PLAIN) == brute_force(PLAIN, 16)


def test_best_first_on_paper():
    """0.6 / 0.4, then 0.9 / 0.1: a (.6), aa (.54), b (.4), ba (.36), ab (.06), bb (.04)."""
    tree = best_first(np.log([[0.4, 0.6], [0.9, 0.1]]), 6, root=7)
    assert tree == DraftTree((7, 1, 0, 0, 0, 1, 1), (-1, 0, 1, 0, 3, 1, 3))
    assert best_first(np.log([[0.4, 0.6], [0.9, 0.1]]), 1).tokens == (None, 1)


def test_log_probs_are_read_as_float32():
    """Two float64 values that float32 cannot tell apart are a tie, so the lower id goes first."""
    log_probs = [[-1.0 - 1e-12, -1.0]]
    assert best_first(log_probs, 2).tokens == (None, 0, 1)
    assert best_first(np.array(log_probs) - [[1e-6, 0]], 2).tokens == (None, 1, 0)


def test_rounding_above_zero_is_zero():
    assert best_first([[0.0, 1e-7]], 2) == best_first([[0.0, 0.0]], 2) != best_first([[-1e-7, 0.0]], 2)


def test_a_large_tree_takes_milliseconds():
    logits = np.random.default_rng(5).normal(size=(15, 1024)) * 2
    log_probs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        tree = best_first(log_probs, 1024, candidates=64)
        seconds.append(time.perf_counter() - start)
    assert len(tree) == 1025
    assert min(seconds) < 0.05, f"best of 5: {min(seconds):.4f} s"  # 3 ms when measured alone


REFUSED = [
    pytest.param([[-1.0, float("nan")]], {}, r"log_probs\[0, 1\] is nan", id="nan"),
    pytest.param([[-1.0], [INF]], {}, r"log_probs\[1, 0\] is inf", id="inf"),
    pytest.param([[-1.0, 0.5]], {}, r"log_probs\[0, 1\] is 0.5, expected at most 0", id="logits"),
    pytest.param([-1.0], {}, r"shape \[1\], expected \[depths, vocabulary\]", id="one-dimension"),
    pytest.param(np.zeros((0, 3)), {}, r"shape \[0, 3\]", id="no-depth"),
    pytest.param(np.zeros((3, 0)), {}, r"shape \[3, 0\]", id="no-vocabulary"),
    pytest.param([[-1.0], [-1.0, -2.0]], {}, "not an array of numbers", id="ragged"),
    pytest.param([["a"]], {}, "not an array of numbers", id="text"),
    pytest.param([[-1.0]], {"budget": 0}, "budget 0, expected an integer >= 1", id="budget-0"),
    pytest.param([[-1.0]], {"budget": -3}, "budget -3", id="budget-negative"),
    pytest.param([[-1.0]], {"budget": 2.0}, r"budget 2\.0", id="budget-float"),
    pytest.param([[-1.0]], {"budget": True}, "budget True", id="budget-bool"),
    pytest.param([[-1.0]], {"candidates": 0}, "candidates 0", id="no-candidates"),
    pytest.param([[-1.0]], {"root": -1}, "node 0 has token -1", id="root"),
]


@pytest.mark.parametrize(("log_probs", "more", "message"), REFUSED)
def test_best_first_refuses(log_probs, more, message):
    with pytest.raises(ValueError, match=message) as caught:
        best_first(log_probs, **{"budget": 4, **more})
    assert "\n" not in str(caught.value)


# --- shapes -----------------------------------------------------------------------------------------------------------


SHAPES_ON_PAPER = [
    pytest.param("chain", {}, (-1, 0, 1, 2, 3, 4, 5), id="chain"),
    pytest.param("star", {}, (-1, 0, 0, 0, 0, 0, 0), id="star"),
    pytest.param("comb", {}, (-1, 0, 0, 1, 1, 3, 3), id="comb"),
    pytest.param("kary", {}, (-1, 0, 0, 1, 1, 2, 2), id="binary"),
    pytest.param("kary", {"branching": 3}, (-1, 0, 0, 0, 1, 1, 1), id="ternary"),
    pytest.param("kary", {"branching": 1}, (-1, 0, 1, 2, 3, 4, 5), id="unary"),
]


@pytest.mark.parametrize(("name", "more", "parents"), SHAPES_ON_PAPER)
def test_shape_in_breadth_order(name, more, parents):
    assert shape(name, 6, vocab=50, seed=0, order="breadth", **more).parents == parents


@pytest.mark.parametrize("name", SHAPES)
@given(st.integers(1, 60), st.integers(0, 20), st.sampled_from(ORDERS), st.integers(1, 4))
@settings(max_examples=25)
def test_shape(name, nodes, seed, order, branching):
    more = {"seed": seed, "order": order, "branching": branching, "root": 5, "exclude": (6, 7)}
    tree = shape(name, nodes, vocab=100, **more)
    assert len(tree) == nodes + 1 and tree.tokens[0] == 5
    assert len(set(tree.tokens)) == len(tree) and not {6, 7} & set(tree.tokens)
    assert tree == shape(name, nodes, vocab=100, **more)
    if order != "heap":
        assert tree.reordered(order)[0] == tree
    widths = sorted(map(len, tree.children))
    if name == "chain":
        assert tree.is_chain
    if name == "star":
        assert max(tree.depth) == 1
    if name == "kary":
        assert widths[-1] <= branching and sum(0 < width < branching for width in widths) <= 1
    if name == "comb":
        spine = [node for node in range(len(tree)) if tree.children[node]]
        assert all(widths_of <= 2 for widths_of in widths) and len({tree.depth[node] for node in spine}) == len(spine)
        assert sum(width == 1 for width in widths) <= 1


def test_heap_order_is_a_third_order():
    equal = []
    for name, nodes, seed in itertools.product(("kary", "comb", "random"), (8, 64), range(12)):
        tree = shape(name, nodes, vocab=1000, seed=seed)
        breadth, depth = (shape(name, nodes, vocab=1000, seed=seed, order=order) for order in ("breadth", "depth"))
        if tree in (tree.reordered("breadth")[0], tree.reordered("depth")[0]) or breadth == depth:
            equal.append((name, nodes, seed))
    assert equal == []


def paths(tree):
    return {tree.path_tokens(node) for node in range(len(tree))}


def test_order_changes_nothing_but_the_order():
    drawn = [shape("random", 40, vocab=99, seed=3, order=order) for order in ORDERS]
    assert paths(drawn[0]) == paths(drawn[1]) == paths(drawn[2])
    assert paths(drawn[0]) != paths(shape("random", 40, vocab=99, seed=4))


@pytest.mark.parametrize("name", ["kary", "comb", "random", "chain"])
def test_few_tokens_keep_siblings_distinct(name):
    tree = shape(name, 60, vocab=20, seed=1)  # DraftTree refuses equal siblings
    assert len(set(tree.tokens[1:])) == 20


SHAPES_REFUSED = [
    pytest.param("fan", {}, "name 'fan', expected one of chain, kary", id="name"),
    pytest.param("chain", {"order": "best"}, "order 'best', expected one of heap", id="order"),
    pytest.param("chain", {"nodes": 0}, "nodes 0, expected an integer >= 1", id="no-nodes"),
    pytest.param("kary", {"branching": 0}, "branching 0", id="branching"),
    pytest.param("chain", {"seed": -1}, "seed -1", id="seed"),
    pytest.param("star", {"vocab": 5}, "5 tokens to draw from, expected 6 or more", id="star-too-wide"),
    pytest.param("star", {"vocab": 6, "root": 3}, "5 tokens to draw from", id="root-is-taken"),
    pytest.param("chain", {"vocab": 2, "exclude": (0, 1)}, "0 tokens to draw from", id="all-excluded"),
]


@pytest.mark.parametrize(("name", "more", "message"), SHAPES_REFUSED)
def test_shape_refuses(name, more, message):
    with pytest.raises(ValueError, match=message):
        shape(name, **{"nodes": 6, "vocab": 9, "seed": 0, **more})


# --- marginals --------------------------------------------------------------------------------------------------------


def test_ngram_on_paper():
    """The last two tokens, 1 2, also stand at 0 and at 3; the last three nowhere else."""
    context = [1, 2, 3, 1, 2, 4, 5, 1, 2]
    unigram = np.array([0, 3, 3, 1, 1, 1, 0, 0]) / 9
    found = np.exp(ngram_marginals(context, 9, 8, smoothing=0.5))
    followers = [{3: 1, 4: 1}, {1: 1, 5: 1}, {2: 1, 1: 1}, {4: 1, 2: 1}, {5: 1}, {1: 1}, {2: 1}, {}, {}]
    for ahead, counts in enumerate(followers):
        expected = 0.5 * unigram
        for token, count in counts.items():
            expected[token] += count
        np.testing.assert_allclose(found[ahead], expected / expected.sum(), rtol=1e-6, err_msg=f"depth {ahead + 1}")


def test_ngram_prefers_the_longest_suffix_it_finds():
    context = [7, 1, 2, 3, 9, 2, 4, 7, 1, 2]
    top = [best_first(ngram_marginals(context, 1, 10, order=order), 1).tokens[1] for order in (1, 2, 3)]
    assert top == [3, 3, 3]  # order 1 ties 3 and 4: the lower id
    counts = np.exp(ngram_marginals(context, 1, 10, order=1))[0]
    assert counts[3] == counts[4] > np.exp(ngram_marginals(context, 1, 10, order=3))[0, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 4))
def test_ngram_against_a_search(context, length, order):
    found = ngram_marginals(context, length, 5, order=order)
    assert found.shape == (length, 5) and found.dtype == np.float32
    for ahead in range(1, length + 1):
        followers = []
        for n in range(min(order, len(context)), 0, -1):
            ends = [e for e in range(n - 1, len(context) - ahead) if context[e - n + 1 : e + 1] == context[-n:]]
            followers = [context[end + ahead] for end in ends]
            if followers:
                break
        expected = np.bincount(followers or [0], minlength=5) * bool(followers) + np.bincount(
            context, minlength=5
        ) / len(context)
        np.testing.assert_allclose(np.exp(found[ahead - 1]), expected / expected.sum(), rtol=1e-5)
    assert len(best_first(found, 3)) > 1


NGRAM_REFUSED = [
    pytest.param({"context": []}, "context: no tokens", id="empty"),
    pytest.param({"context": [1, 9]}, r"token 1 is 9, expected a token id in 0\.\.8", id="outside"),
    pytest.param({"context": [1, -1]}, "token 1 is -1", id="negative"),
    pytest.param({"length": 0}, "length 0", id="length"),
    pytest.param({"order": 0}, "order 0", id="order"),
    pytest.param({"smoothing": 0.0}, r"smoothing 0\.0", id="smoothing"),
    pytest.param({"smoothing": float("nan")}, "smoothing nan", id="smoothing-nan"),
]


@pytest.mark.parametrize(("more", "message"), NGRAM_REFUSED)
def test_ngram_refuses(more, message):
    with pytest.raises(ValueError, match=message):
        ngram_marginals(**{"context": [1, 2, 1], "length": 3, "vocab": 9, **more})


LOGITS = np.random.default_rng(11).normal(size=(4000, 12)).astype(np.float32)


def test_self_marginals_are_the_target_when_all_is_accepted():
    found = self_marginals(LOGITS, 1.0, seed=0)
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(1, keepdims=True))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


def hits(found, logits=LOGITS):
    return found.argmax(1) == logits.argmax(1)


def test_self_marginals_accept_at_the_stated_rate():
    for acceptance in (0.0, 0.25, 0.7, 1.0):
        found = self_marginals(LOGITS, acceptance, seed=1)
        bound = 4 * np.sqrt(acceptance * (1 - acceptance) / len(LOGITS))
        assert abs(hits(found).mean() - acceptance) <= bound, f"acceptance {acceptance}: {hits(found).mean()}"
        np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(1), 1, atol=1e-5)
    assert np.all(hits(self_marginals(LOGITS, 0.7, seed=1)) >= hits(self_marginals(LOGITS, 0.25, seed=1)))
    assert not np.array_equal(self_marginals(LOGITS, 0.5, seed=1), self_marginals(LOGITS, 0.5, seed=2))


def test_self_marginals_swap_only_ranks_2_to_8():
    found = self_marginals(LOGITS, 0.0, seed=3)
    ranks = (np.take_along_axis(LOGITS, found.argmax(1)[:, None], 1) < LOGITS).sum(1) + 1
    assert set(ranks.tolist()) == set(range(2, 9))
    assert ((found != self_marginals(LOGITS, 1.0, seed=3)).sum(1) == 2).all()


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param(np.zeros((300, 9)), id="all-equal"),
        pytest.param(np.tile([0.0, 5.0, 5.0], (300, 1)), id="two-equal"),
        pytest.param(np.tile(np.float32([9e3 - 0.001, 9e3]), (300, 1)), id="equal-after-softmax"),
        pytest.param(np.tile([100.0, -100.0], (300, 1)), id="nearly-sure"),
    ],
)
def test_self_marginals_hold_their_rate_under_ties(logits):
    assert hits(self_marginals(logits, 1.0, seed=0), logits).all()
    assert not hits(self_marginals(logits, 0.0, seed=0), logits).any()
    assert all(len(best_first(self_marginals(logits[:3], a, seed=0), 5)) > 3 for a in (0.0, 1.0))


SELF_REFUSED = [
    pytest.param(LOGITS[:2], 1.1, r"acceptance 1\.1, expected 0\.\.1", id="above-1"),
    pytest.param(LOGITS[:2], -0.1, r"acceptance -0\.1", id="below-0"),
    pytest.param(LOGITS[:2], float("nan"), "acceptance nan", id="acceptance-nan"),
    pytest.param([[0.0, -INF]], 0.5, "all finite", id="minus-inf"),
    pytest.param([[0.0, float("nan")]], 0.5, "is nan", id="nan"),
    pytest.param([[0.0]], 0.5, "2 tokens or more", id="one-token"),
    pytest.param([0.0, 1.0], 0.5, r"shape \[2\]", id="one-dimension"),
]


@pytest.mark.parametrize(("logits", "acceptance", "message"), SELF_REFUSED)
def test_self_marginals_refuse(logits, acceptance, message):
    with pytest.raises(ValueError, match=message):
        self_marginals(logits, acceptance, seed=0)


# --- recorded drafts --------------------------------------------------------------------------------------------------


SPARSE = {"ids": [[4, 1], [2, 0, 4]], "log_probs": [[-0.5, -1.0], [-0.1, -3, -4.0]]}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_recorded_tree_and_marginals(tmp_path):
    tree = {"tokens": [None, 3, 4, 3], "parents": [-1, 0, 0, 2]}
    drafts = load_recorded(write(tmp_path / "d.jsonl", {"tree": tree}, "", {"marginals": SPARSE}))
    assert drafts == [DraftTree.from_json(tree), Marginals(((4, 1), (2, 0, 4)), ((-0.5, -1.0), (-0.1, -3, -4.0)))]
    assert recorded_tree(drafts[0], 5, 64) == drafts[0]
    assert recorded_tree(drafts[0], 5, 2, root=1) == DraftTree((1, 3, 4), (-1, 0, 0))
    dense = np.full((2, 5), -INF, dtype=np.float32)
    dense[0, [4, 1]], dense[1, [2, 0, 4]] = [-0.5, -1.0], [-0.1, -3, -4.0]
    np.testing.assert_array_equal(drafts[1].dense(5), dense)
    assert recorded_tree(drafts[1], 5, 4, root=2) == best_first(dense, 4, root=2)
    assert len(recorded_tree(drafts[1], 5, 64)) == 1 + 2 + 6


def test_recorded_draft_refuses_a_small_vocabulary():
    with pytest.raises(ValueError, match=r"node 2 has token 4, expected 0\.\.3"):
        recorded_tree(DraftTree((0, 3, 4), (-1, 0, 0)), 4, 8)
    assert len(recorded_tree(DraftTree((0, 3, 4), (-1, 0, 0)), 4, 1)) == 2  # the node is cut off
    with pytest.raises(ValueError, match=r"node 0 has token 9, expected 0\.\.4"):
        recorded_tree(DraftTree((0, 3, 4), (-1, 0, 0)), 5, 8, root=9)
    with pytest.raises(ValueError, match=r"depth 1: token 0 is 4, expected a token id in 0\.\.3"):
        recorded_tree(Marginals.from_json(SPARSE), 4, 8)
    with pytest.raises(ValueError, match="budget 0"):
        recorded_tree(DraftTree((0, 3), (-1, 0)), 5, 0)


def sparse(ids, log_probs):
    return {"marginals": {"ids": ids, "log_probs": log_probs}}


BAD_LINES = [
    pytest.param("{", "at character 1, expected JSON", id="cut-off"),
    pytest.param("[" * 100_000, "expected JSON", id="too-deep"),
    pytest.param("9" * 5000, "expected JSON", id="too-many-digits"),
    pytest.param([1], "expected an object with 'tree', 'marginals' or 'trees'", id="list"),
    pytest.param({"trie": 1}, "expected an object with 'tree', 'marginals' or 'trees'", id="another-key"),
    pytest.param({"tree": {}, "marginals": {}}, "expected an object with 'tree', 'marginals' or", id="both"),
    pytest.param({"tree": {"tokens": [1, 2], "parents": [-1, 1]}}, "node 1 has parent 1", id="cycle"),
    pytest.param({"marginals": {"ids": [[1]]}}, "expected 'ids' and 'log_probs'", id="no-log-probs"),
    pytest.param(sparse([1], [-1.0]), "a list per depth", id="flat"),
    pytest.param(sparse([[1]], [[-1.0], [-1.0]]), "1 depths of ids and 2 of log_probs", id="depths"),
    pytest.param(sparse([], []), "0 depths", id="no-depths"),
    pytest.param(sparse([[1, 2]], [[-1.0]]), "depth 1 has 2 ids (2 distinct) and 1 log_probs", id="lengths"),
    pytest.param(sparse([[2, 2]], [[-1.0, -2.0]]), "depth 1 has 2 ids (1 distinct)", id="same-id-twice"),
    pytest.param(sparse([[1], []], [[-1.0], []]), "depth 2: no tokens", id="empty-depth"),
    pytest.param(sparse([[1], [-2]], [[-1.0], [-1.0]]), "depth 2: token 0 is -2", id="negative-id"),
    pytest.param(sparse([[1.0]], [[-1.0]]), "depth 1: token 0 is 1.0", id="float-id"),
    pytest.param('{"marginals": {"ids": [[1]], "log_probs": [[NaN]]}}', "token 1 has log prob nan", id="nan"),
    pytest.param('{"marginals": {"ids": [[1]], "log_probs": [[-Infinity]]}}', "log prob -inf", id="minus-inf"),
    pytest.param(sparse([[1]], [[0.5]]), "has log prob 0.5", id="no-log-prob"),
    pytest.param(sparse([[1]], [[-(10**400)]]), "has log prob -1000", id="beyond-float"),
    pytest.param(sparse([[1]], [["-1"]]), "has log prob '-1'", id="text"),
    pytest.param(sparse([[1]], [[False]]), "has log prob False", id="bool"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "d.jsonl", {"marginals": SPARSE}, line, {"marginals": SPARSE})
    with pytest.raises(ValueError) as caught:
        load_recorded(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"\n \n", "empty", id="blank"),
        pytest.param(b'{"a": "\xff"}', "byte 7 is not UTF-8", id="latin-1"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_recorded(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: No such file or directory, expected a readable file"):
        load_recorded(tmp_path / "nowhere")


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0], ids=["flat", "plain", "peaked"])
@pytest.mark.parametrize("sureness", [0.3, 0.7, 0.9])
def test_a_sure_draft_is_as_sure_as_asked_whatever_its_target(scale, sureness):
    logits = LOGITS[:15] * scale
    found = self_marginals(logits, 1.0, seed=1, sureness=sureness)
    assert np.exp(found.max(1)).mean() == pytest.approx(sureness, abs=1e-3)
    assert np.array_equal(found.argmax(1), logits.argmax(1))
    # The twin: left as it is, the draft is as sure as its target happens to be.
    assert abs(np.exp(self_marginals(logits, 1.0, seed=1).max(1)).mean() - sureness) > 0.01
