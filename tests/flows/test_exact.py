"""Exact checks: what must not matter changes no bit, and each fault at one node is found where it is."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import fisher_exact

from ddtree_check.base.errors import Unsupported
from ddtree_check.engines.checked import Checked
from ddtree_check.flows.check import check
from ddtree_check.flows.exact import _rounds, exact_run
from ddtree_check.flows.settings import Item, Settings
from ddtree_check.judge.differences import digests
from ddtree_check.judge.exact import Change, Claim, Edge, Exact, Node, Tally, chance, foreign, law
from ddtree_check.judge.exact import keeps as sets_of
from ddtree_check.model.small_shapes import VOCAB
from ddtree_check.model.wiring import FORKED, UNFORKED, Attention, Conv, Layer, State, Wiring, contaminated, reached
from ddtree_check.selftest.inject import Faulty, batched, keeps, moved_edge, wired
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.variants import front_chain, only, other_order, retoken
from tests import models

LAYERS = (Layer("gated_delta", ((Conv(4), State("gated_delta")),)), Layer("attention", ((Attention(),),)))
TREES = [models.tree(name, nodes) for name in ("random", "comb", "star", "kary") for nodes in (5, 14)]


def rng() -> random.Random:
    return random.Random(0)


# Trees that change what must not matter


@pytest.mark.parametrize("tree", TREES)
def test_retoken_changes_every_token_off_a_path_and_any_part_of_it_is_a_tree(tree):
    path = tree.path(tree.leaves[0])
    changed = retoken(tree, path, VOCAB, rng())
    assert changed.parents == tree.parents
    assert [i for i in range(len(tree)) if changed.tokens[i] == tree.tokens[i]] == sorted(path)
    for node in range(1, len(tree)):
        single = only(tree, changed, [node])
        assert {i for i in range(len(tree)) if single.tokens[i] != tree.tokens[i]} <= {node}


def test_retoken_refuses_a_vocabulary_too_small_for_a_node_s_children():
    with pytest.raises(Unsupported, match="node 0 has 5 children, expected a vocabulary of at least 10, got 9"):
        retoken(DraftTree((0, 1, 2, 3, 4, 5), (-1, 0, 0, 0, 0, 0)), (), 9, rng())


def test_a_path_in_front_is_a_chain_of_all_tokens():
    tree = DraftTree((9, 1, 2, 3), (-1, 0, 0, 2))
    assert front_chain(tree, tree.path(3)) == DraftTree.chain([9, 2, 3, 1])


@pytest.mark.parametrize("tree", TREES)
def test_other_orders_hold_the_same_paths(tree):
    draw = rng()
    orders = [other_order(tree, draw) for _ in range(5)]
    for other, old in orders:
        assert all(other.path_tokens(new) == tree.path_tokens(node) for new, node in enumerate(old))
    assert len(tree) < 6 or len({old for _, old in orders}) > 1


# Which passes cover which nodes


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_sets_are_closed_under_parents_and_separate_every_pair(tree, after):
    wanted = foreign(tree, after=after)
    sets, separated = sets_of(tree, wanted, rng())
    assert all(node == 0 or tree.parents[node] in kept for kept in sets for node in kept)
    for i, j in itertools.product(range(len(tree)), repeat=2):
        assert separated[i, j] == any(i in kept and j not in kept for kept in sets)
    assert not (wanted & ~separated).any()


def test_a_star_takes_fewer_passes_than_leaves_and_a_limit_keeps_the_most():
    star = models.tree("star", 64)
    wanted = foreign(star, after=False)
    assert len(sets_of(star, wanted, rng())[0]) <= 20
    sets, separated = sets_of(star, wanted, rng(), 4)
    assert len(sets) == 4 and separated.sum() > 0.6 * wanted.sum()


def test_foreign_nodes_are_all_but_ancestors_and_descendants_come_after():
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1))
    assert np.argwhere(foreign(tree, after=False)).tolist() == [[1, 2], [2, 1], [2, 3], [3, 2]]
    assert (foreign(tree) ^ foreign(tree, after=False)).sum() == 4  # 0: 1, 2 and 3; 1: 3


# The law of tokens


@pytest.mark.parametrize("tree", TREES)
def test_tokens_reach_descendants_alone_and_strangers_the_law_s_nodes_when_unforked(tree):
    assert np.array_equal(reached(FORKED.plan(tree), LAYERS), tree.ancestor_mask)
    plan = UNFORKED.plan(tree)
    astray = (reached(plan, LAYERS) & foreign(tree)).any(1)
    assert frozenset(np.flatnonzero(astray).tolist()) == contaminated(plan, LAYERS)


def test_a_wrong_position_and_a_missing_parent_bring_no_token():
    tree = models.tree("random", 12)
    for wiring in (moved_edge("positions", 6, 9), moved_edge("mask", 6, tree.parents[6])):
        assert not (reached(wiring.plan(tree), LAYERS) & foreign(tree)).any()


def test_the_law_says_which_rows_must_move():
    reach = np.eye(4, dtype=bool)
    reach[3, 2] = reach[1, 2] = True
    found = law([Change(frozenset({0, 1, 3}), frozenset({3, 0})), Change(frozenset({0, 2}), frozenset())], reach)
    assert (found.expected, found.moved, found.outside, found.missed) == ({1, 3}, {3}, {0}, {1})
    assert not found.kept and str(found) == "1 node moved, the law says 2; outside [0]; missed [1]"
    assert law([Change(frozenset({0, 1, 3}), frozenset({1, 3}))], reach).kept


# Chance


@pytest.mark.parametrize("rows, null", [((3, 4), (1, 20)), ((7, 7), (0, 63)), ((0, 5), (2, 9)), ((17, 17), (1, 40))])
def test_chance_is_fisher_s_exact_test(rows, null):
    table = [[rows[0], rows[1] - rows[0]], [null[0], null[1] - null[0]]]
    assert chance(Tally(*rows), Tally(*null)) == pytest.approx(fisher_exact(table, "greater").pvalue, rel=1e-9)


def test_nothing_drawn_excludes_nothing():
    assert chance(Tally(), Tally()) == 1 and chance(Tally(5, 5), Tally()) == 1


# Digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_digests_tell_any_bit_and_nan_equals_nothing(dtype):
    rows = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[5] = rows[4]
    before = digests(rows)
    assert before[5] == before[4] and len(set(before)) == 39 and before == digests(rows.clone())
    flipped = rows.clone()
    bits = flipped.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[7, 2999] ^= 1
    flipped[8, 0], flipped[9, 1] = torch.inf, torch.nan
    assert [i for i in range(40) if digests(flipped)[i] != before[i]] == [7, 8, 9] and digests(flipped)[9] is None
    zero = torch.zeros(2, 8, dtype=dtype)
    zero[1] = -zero[1]
    assert len(set(digests(zero))) == 2
    assert digests(rows[:, :10]) == digests(rows[:, :10].contiguous())


# What it comes to


def exact(*nodes: Node, **parts) -> Exact:
    return Exact(nodes, Claim(Tally(0, 9)), Claim(Tally(3, 3)), Tally(4, 4), **parts)


def test_the_verdict_of_a_tree():
    right, stays = Node("certified", Tally(1, 1)), Node("open", Tally(0, 4), elsewhere=Tally(1, 6))
    wrong = Node("moved", Tally(0, 1), Tally(8, 8), reads=(Edge(9, False, 3, "attention"),))
    assert exact(right).verdict == "pass" and exact(right).reason == "1 node certified"
    assert exact(right, stays).verdict == "open"
    assert exact(right, stays).reason == (
        "1 of 2 nodes not certified: node 1 equals its path as a chain in 0 of 4 draws, in 1 of 6 where it stands "
        "elsewhere"
    )
    off = exact(right, stays, replace(wrong, reads=(), through=0), wrong)
    assert off.verdict == "fail" and off.of("moved") == (2, 3)
    assert off.reason == "2 nodes off in bits: node 3 reads node 9, first in layer 3 (attention)"
    assert exact(right, others=("what ran before moves 1 row",)).verdict == "fail"
    unclaimed = replace(exact(right), influence=Claim(Tally(1, 9), "rows meet"))
    assert (unclaimed.verdict, unclaimed.reason) == ("open", "not claimed: rows meet")


# On an engine


TREE = models.tree("random", 14, seed=3)
PROMPT = models.prompt(20)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return request.param


def run(engine, tree=TREE, **settings):
    return exact_run(engine, engine.prefill(PROMPT), tree, **{"control": UNFORKED} | settings)


def test_a_right_engine_is_certified_and_its_control_moves_exactly_where_the_law_says(dtype):
    found = run(models.small(dtype), precise=dtype == "float32")
    assert found.influence.claimed and found.law.kept and not found.of("moved") and not found.others
    assert found.law.expected == contaminated(UNFORKED.plan(TREE), models.small(dtype).layers)
    assert len(found.of("certified")) >= (15 if dtype == "bfloat16" else 3)
    assert found.verdict == ("pass" if dtype == "bfloat16" else "open")


def fault(kind: str, node: int) -> tuple[str, int]:
    strangers = [other for other in range(node) if other not in TREE.path(node)]
    return {
        "stranger in mask": ("mask", strangers[-1]),
        "parent missing": ("mask", TREE.parents[node]),
        "position + 1": ("positions", TREE.depth[node] + 1),
        "state of stranger": ("state", strangers[-1]),
        "window of stranger": ("conv", strangers[-1]),
    }[kind]


@pytest.mark.parametrize("node", [6, 9])
@pytest.mark.parametrize(
    "kind", ["stranger in mask", "parent missing", "position + 1", "state of stranger", "window of stranger"]
)
def test_one_fault_at_one_node_is_found_in_bfloat16(kind, node):
    channel, source = fault(kind, node)
    engine = Faulty(models.small("bfloat16"), forked=moved_edge(channel, node, source))
    found = run(engine, control=None)
    assert found.verdict == "fail" and node in found.of("moved") and not found.others
    assert all(node in TREE.path(other) for other in found.of("moved"))
    kinds = {"mask": "attention", "positions": "attention", "state": "linear_attention", "conv": "linear_attention"}
    blamed = found.nodes[node]
    if "stranger" in kind:
        assert [edge.source for edge in blamed.reads] == [source]
        assert blamed.reads[0].kind == engine.layers[blamed.reads[0].layer].kind
        entered = blamed.reads[0].layer
    else:
        entered = blamed.layer
    right = Attention if kinds[channel] == "attention" else State
    assert any(isinstance(op, right) for branch in engine.layers[entered].branches for op in branch)


def test_an_engine_that_behaves_on_chains_and_leaks_on_trees_is_caught(dtype):
    flat = lambda tree: tree.parents if tree.is_chain else tuple(range(-1, len(tree) - 1))  # noqa: E731
    engine = Faulty(models.small(dtype), forked=Wiring("hidden", state=flat))
    found = run(engine, control=None, precise=dtype == "float32")
    assert found.verdict == "fail" and found.of("moved") == tuple(i for i in range(len(TREE)) if TREE.depth[i] != i)


def test_an_engine_that_is_right_for_the_first_rows_only_is_caught():
    late = Wiring("late", state=lambda tree: [parent if i < 8 else i - 1 for i, parent in enumerate(tree.parents)])
    found = run(Faulty(models.small("bfloat16"), forked=late), control=None)
    assert found.verdict == "fail" and min(found.of("moved")) == 8


def sum_of_tokens(logits, tree, wiring):
    return logits + (sum(tree.tokens) % 7) * 0.1


def test_an_engine_whose_rows_meet_claims_nothing_and_is_not_blamed():
    found = run(Faulty(models.small("bfloat16"), logits=sum_of_tokens))
    assert found.verdict == "open" and not found.influence.claimed and not found.of("moved") and found.law is None
    assert "rows of chains move where only tokens behind them change" in found.reason


def test_an_engine_that_does_not_repeat_itself_claims_nothing():
    passes = itertools.count()
    found = run(Faulty(models.small("bfloat16"), logits=lambda x, *_: x + next(passes) % 3))
    assert found.verdict == "open" and not found.of("moved")


def test_what_ran_before_is_a_finding():
    passes = itertools.count(1)
    late = lambda logits, tree, wiring: logits + (next(passes) > 5 and tree == TREE)  # noqa: E731
    found = run(Faulty(models.small("bfloat16"), logits=late), control=None)
    assert found.verdict == "fail" and found.reason == "what ran before moves 15 of 15 rows, first node 0"


def test_a_control_that_moves_elsewhere_than_the_law_says_is_shown():
    engine = models.small("bfloat16")
    still = Faulty(engine, unforked=FORKED)
    assert run(still).law.missed == contaminated(UNFORKED.plan(TREE), engine.layers)
    stray = Wiring("stray", state="flat", conv="flat", mask=lambda tree: with_stranger(tree, 1))
    assert run(Faulty(engine, unforked=stray)).law.outside == {1}


def with_stranger(tree: DraftTree, node: int) -> np.ndarray:
    wrong = tree.ancestor_mask.copy()
    wrong[node, len(tree) - 1] = True
    return wrong


def test_prefill_and_verify_are_enough():
    inner = models.small("bfloat16")
    parts = {"vocab_size": inner.vocab_size, "layers": inner.layers, "prefill": inner.prefill}
    assert run(Checked(SimpleNamespace(**parts, verify=inner.verify), name="bare")).verdict == "pass"
    wrong = Faulty(inner, forked=moved_edge("mask", 9, fault("stranger in mask", 9)[1]))
    found = run(Checked(SimpleNamespace(**parts, verify=wrong.verify), name="bare"))
    assert found.verdict == "fail" and found.nodes[9].reads[0].layer is None


def test_rows_that_were_made_already_are_not_made_again():
    engine = models.small("bfloat16")
    prefix = engine.prefill(PROMPT)
    rows = digests(engine.verify(prefix, TREE, FORKED).logits)
    chains = dict(enumerate(rows))
    found = exact_run(engine, prefix, TREE, rows=rows, chains=chains)
    assert found.verdict == "pass" and not {"tree", "relocation"} & found.passes.keys()
    assert sum(found.passes.values()) <= 16


@pytest.fixture(scope="module")
def small():
    return models.tree("random", 7, seed=3)


def test_orders_requests_and_commits_of_a_right_engine(small):
    found = run(models.small("bfloat16"), small, how="all", prompt=PROMPT)
    assert found.verdict == "pass" and not found.others and not found.skipped
    assert {"orders", "requests", "commits"} <= found.passes.keys()


def test_a_commit_that_stores_another_row_is_found(small):
    engine = Faulty(models.small("bfloat16"), commit=keeps(wired(commit="flat"), "recurrent"))
    found = run(engine, small, how="all", control=None)
    assert found.verdict == "fail" and "commit of path" in found.reason and "recurrent of layer 0" in found.reason


def test_another_request_that_moves_rows_is_found(small):
    inner = models.small("bfloat16")
    hosts = batched(inner, verify=models.states_of_next(inner, "recurrent", layer=0))
    found = run(hosts, small, how="all", prompt=PROMPT)
    assert found.verdict == "fail" and "another request's tokens move 8 rows" in found.reason


def test_another_order_that_is_wrong_is_found(small):
    def state(tree):
        breadth = list(tree.depth) == sorted(tree.depth) and not tree.is_chain and tree != small
        return tuple(range(-1, len(tree) - 1)) if breadth else tree.parents

    engine = Faulty(models.small("bfloat16"), forked=Wiring("order", state=state))
    found = run(engine, small, how="all", control=None)
    assert found.verdict == "fail" and "with the tree breadth first, " in found.reason


def test_what_an_engine_cannot_vary_is_said(small):
    def refuses(*_):
        raise Unsupported("no commit here")

    engine = Faulty(models.engine("llama", "bfloat16"), batches=lambda: "one request a pass", commit=refuses)
    found = run(engine, small, how="all", prompt=PROMPT)
    assert found.verdict == "pass" and found.skipped == {"requests": "one request a pass", "commits": "no commit here"}


# In a comparison


def checked(engine, **settings) -> dict:
    return check(engine, [Item("one", PROMPT, TREE)], Settings(**{"exact": "leaves"} | settings))


def test_a_comparison_holds_the_evidence_of_every_node():
    record = checked(models.small("bfloat16"))
    (case,) = record["cases"]
    assert record["exact"]["verdict"] == case["exact"]["verdict"] == "pass" and record["exact"]["certified"] == len(
        TREE
    )
    assert {node["exact"]["value"] for node in case["nodes"]} == {"certified"}
    assert case["exact"]["law"]["expected"] == case["leak_law"]["contaminated"]
    assert "relocation" not in case["exact"]["passes"]  # the chain control was the first draw
    assert checked(models.small("bfloat16"), exact="off")["exact"] is None


def test_a_position_too_far_in_bfloat16_fails_the_run_which_floors_let_pass():
    node = 8  # moved by a quarter of its floor
    moved = moved_edge("positions", node, TREE.depth[node] + 1)
    engine = Faulty(models.small("bfloat16"), forked=moved)
    assert checked(engine, exact="off")["verdict"]["modes"]["tree_forked"] == "pass"
    record = checked(engine)
    assert record["exit_code"] == 1 and record["verdict"]["modes"]["tree_forked"] == "fail"
    assert record["cases"][0]["nodes"][node]["tree_forked"]["verdict"] in ("leak", "flip")
    assert any(
        f"off in bits: node {node} equals its path as a chain in 0 of" in why for why in record["verdict"]["reasons"]
    )


def test_a_control_that_moves_other_nodes_than_the_law_says_proves_nothing():
    stray = Wiring("stray", state="flat", conv="flat", mask=lambda tree: with_stranger(tree, 1))
    engine = Faulty(models.small("bfloat16"), unforked=stray, exact_control=False)
    record = checked(engine)
    assert record["cases"][0]["exact"]["law"]["outside"] == [1] and record["exit_code"] == 2
    assert any("the unforked control is off" in reason for reason in record["verdict"]["reasons"])


def last_row_otherwise(logits, tree, wiring):
    """Round the last row another way, whatever stands there, as the last row of a tile may be."""
    return torch.cat([logits[:-1], logits[-1:] * 1.01])


def test_a_row_that_is_computed_otherwise_whatever_stands_there_is_no_fault_of_its_node():
    found = run(Faulty(models.engine("qwen3_5_text", "bfloat16"), logits=last_row_otherwise), control=None)
    last = len(TREE) - 1
    assert found.verdict == "open" and found.of("open") == (last,) and not found.of("moved")
    evidence = found.nodes[last]
    assert evidence.equal.count == 0 and evidence.others.of >= 8 and evidence.others.count == 0
    assert "other nodes in its row in 0 of" in found.reason


@pytest.mark.parametrize("channel", ["state", "conv"])
@pytest.mark.parametrize("node", [1, 7])  # node 1 stands where its chain does, so that no place can explain it
def test_more_than_rounding_in_the_first_layer_is_a_fault_whatever_stands_there(channel, node):
    above = TREE.parents[TREE.parents[node]] if TREE.parents[node] else -1
    found = run(
        Faulty(models.engine("qwen3_5_text", "bfloat16"), forked=moved_edge(channel, node, above)), control=None
    )
    assert node in found.of("moved"), found.nodes[node].text(node)


def test_other_instructions_in_the_first_layer_are_no_fault(monkeypatch):
    """The same place, off by rounding from the first layer on: open."""
    host = models.make_small("bfloat16")
    layer = host.model.model.layers[0]
    place = len(TREE) - 2

    def otherwise(module, inputs, outputs):
        out = outputs[0] if isinstance(outputs, tuple) else outputs
        if out.shape[1] == len(TREE):
            half = out[:, place, ::2]
            out[:, place, ::2] = torch.where(half.abs() > 0, half * (1 + 2**-8), half)

    layer.register_forward_hook(otherwise)
    found = run(host, control=None)
    assert found.of("open") == (place,), found.reason
    assert not found.of("moved")


@pytest.mark.parametrize(
    "entry, rounds",
    [
        ((None, None, 0.0), True),  # it rounds in half of the draws, or the engine cannot be watched
        ((11, "attention", 0.15), True),  # SGLang's row 64 of 65 at the 27B shape
        ((3, "attention", 0.61), False),  # its mask without the parent
        ((0, "gated_delta", 0.45), True),
        ((0, "gated_delta", 1.7), False),
        ((-1, None, 0.01), False),  # nothing rounds before the first layer
        ((3, "attention", float("nan")), False),
    ],
)
def test_what_enters_is_held_against_what_other_instructions_make(entry, rounds):
    assert _rounds(entry) is rounds


@pytest.mark.parametrize("asked", [True, False])
def test_a_row_that_its_place_explains_is_asked_once_more_for_foreign_tokens(asked, monkeypatch):
    """Without the passes of influence, and with a place that explains everything; the twin has no stranger."""
    monkeypatch.setattr("ddtree_check.flows.exact.PASSES", 0)
    monkeypatch.setattr("ddtree_check.flows.exact._rounds", lambda entry: True)
    node = 7
    stranger = next(j for j in range(node) if j not in TREE.path(node))
    edge = ("mask", node, stranger) if asked else ("positions", node, TREE.depth[node] + 1)
    found = run(Faulty(models.engine("qwen3_5_text", "bfloat16"), forked=moved_edge(*edge)), control=None)
    assert (node in found.of("moved")) is asked and (node in found.of("open")) is not asked
    if asked:
        assert f"reads node {stranger}" in found.nodes[node].text(node)
