"""What a commit stores: each fault goes red in its own channel, layer and node, and a right engine stays green."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.judge.commit import Part, Search, _owners, compare_contents, off, tree_floors
from ddtree_check.judge.known import KnownFailure
from ddtree_check.judge.nodes import MODES
from ddtree_check.judge.rule import Rule
from ddtree_check.model.wiring import BLANK, UNFORKED, Wiring
from ddtree_check.report.terminal import commit_blocks
from ddtree_check.report.views import render
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty, keeps
from ddtree_check.tree.accept import accept_nodes
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import engine, make_engine, prompt, small, tree

# 0 ─┬─ 1 ── 2 ── 3        depth first: on the first branch, node and depth are the same number
#    ├─ 4 ─┬─ 5 ── 6
#    │     └─ 7
#    └─ 8 ── 9
TREE = DraftTree((5, 11, 12, 13, 21, 22, 23, 24, 31, 32), (-1, 0, 1, 2, 0, 4, 5, 4, 0, 8))
SIDE, LAST = 6, 9
SOME = ("zero", "full", "branch", "9")  # nodes 0, 3, 6, 9
DTYPES = ("float32", "bfloat16")
DELTA = [0]  # the layers of the small model; 1 is attention


# --- which paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "nodes"),
    [
        (("zero",), [0]),
        (("first",), [1]),
        (("full",), [3]),
        (("branch",), [6]),
        (("every",), list(range(10))),
        (("0-4-7",), [7]),
        (("9", "zero"), [9, 0]),
        (("full", "0-1-2-3"), [3]),
    ],
)
def test_patterns_name_nodes(patterns, nodes):
    assert list(accept_nodes(TREE, patterns)) == nodes


def test_patterns_that_a_tree_has_no_node_for_name_none():
    assert accept_nodes(DraftTree((5,), (-1,)), ("first", "branch", "full")) == {0: "full"}
    assert accept_nodes(tree("chain", 3), ("branch",)) == {}


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("most", "got 'most', expected zero, full, first, branch, every or a path"),
        ("0-5", "expected the path 0-4-5"),
        ("10", "node 10 of '10', expected 0..9"),
        ("0-", "got '0-', expected zero"),
    ],
)
def test_a_bad_pattern_is_refused(pattern, says):
    with pytest.raises(UsageError, match=says):
        accept_nodes(TREE, [pattern])


# --- contents, compared -----------------------------------------------------------------------------------------------


def test_rows_are_said_by_whose_they_are():
    assert _owners([-2, -1, 0, "?", "?", "zero", 4]) == (
        "tokens -2 -1 before the block, node 0, 2 unknown rows, 1 zero row, node 4"
    )


def test_shape_dtype_and_nan_are_never_within_a_floor():
    right = (3, [{"recurrent": torch.ones(2, 2), "keys": torch.ones(3, 4)}])
    assert [part.error for part in compare_contents(right, right, torch.float32)] == [0, 0, 0]
    wrong = {
        "a missing channel": {"keys": torch.ones(3, 4)},
        "one row less": {"recurrent": torch.ones(2, 2), "keys": torch.ones(2, 4)},
        "another dtype": {"recurrent": torch.ones(2, 2).bfloat16(), "keys": torch.ones(3, 4)},
        "nan": {"recurrent": torch.full((2, 2), torch.nan), "keys": torch.ones(3, 4)},
    }
    for what, channels in wrong.items():
        parts = compare_contents(right, (3, [channels]), torch.float32)
        assert [part.channel for part, _ in off(parts, [1e30] * 3)] != [], what
    (position, *_) = compare_contents(right, (4, right[1]), torch.float32)
    assert position == Part(-1, "position", 1, 1, 0, 0)


def test_bf16_has_no_tolerance_but_what_was_measured():
    part, control = Part(0, "recurrent", 0.5, 0.1, 1.0, 0.01), Part(0, "recurrent", 0.1, 0.1, 1.0, 0.01)
    assert tree_floors([part], [[control]], Rule(), "bfloat16") == [pytest.approx(0.44)]
    assert tree_floors([part], [[replace(control, error=0.0)]], Rule(), "bfloat16") == [pytest.approx(0.04)]
    tiny = replace(part, ulp=1e-7)
    assert tree_floors([tiny], [[replace(control, error=0.0)]], Rule(), "float32") == [pytest.approx(1e-4)]


# --- a right engine ---------------------------------------------------------------------------------------------------


def commits(host, case: DraftTree = TREE, length: int = 12, accept=("every",), **settings) -> dict:
    return check(host, [Item("p", prompt(length), tree=case)], Settings(accept=accept, controls=1, **settings))


def verdicts(record: dict, mode: str) -> dict[int, str]:
    return {accept["node"]: accept["modes"][mode]["verdict"] for accept in record["cases"][0]["commit"]}


@pytest.mark.parametrize(
    ("length", "dtype", "accept"),
    [(1, "float32", SOME), (3, "bfloat16", SOME), (6, "float32", ("every",))]
    + [pytest.param(n, dtype, ("every",), marks=pytest.mark.slow) for n in (1, 2, 3, 4, 5) for dtype in DTYPES],
)  # up to two more than the window is wide
def test_every_node_commits_right_after_short_prompts(length, dtype, accept):
    record = commits(small(dtype), length=length, accept=accept)
    assert record["exit_code"] == 0, record["verdict"]["reasons"]
    for mode in ("linear", "tree_forked"):
        assert set(verdicts(record, mode).values()) == {"pass"}
    clean = {node for node, verdict in verdicts(record, "tree_unforked").items() if verdict == "pass"}
    assert clean == set(TREE.clean) & set(
        verdicts(record, "tree_forked")
    )  # the twin: flat states are committed wherever they leaked


@pytest.mark.parametrize("budget", [1, 17, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 16, 33, 64))])
def test_budgets(budget):
    accept = ("zero", "first", "full", "branch")
    record = commits(small(), tree("random", budget, seed=budget), accept=accept)
    forks = budget > 1  # a root alone forks nothing, which proves nothing of a recurrent model
    assert record["exit_code"] == (0 if forks else 2) or record["verdict"]["sensitive"] is False
    assert set(verdicts(record, "tree_forked").values()) == {"pass"}


@pytest.mark.parametrize("family", ["llama", "olmo_hybrid"])
def test_other_families(family):
    record = commits(engine(family), accept=SOME)
    assert set(verdicts(record, "tree_forked").values()) == set(verdicts(record, "linear").values()) == {"pass"}


# --- faults -----------------------------------------------------------------------------------------------------------

BY_DEPTH = inject.wired(commit="flat")
# id, the commit, channels that go red, layers, nodes whose commit is right, node, what is said there
FAULTS = [
    pytest.param(
        keeps(inject.before, "recurrent", "conv"), {"recurrent", "conv"}, DELTA, set(), SIDE,
        ["convolution window unchanged by the accept", "state unchanged by the accept"], id="commit-missing",
    ),
    pytest.param(
        keeps(inject.block_end, "recurrent"), {"recurrent"}, DELTA, {LAST}, SIDE,
        ["committed state is node 9's, expected node 6's"], id="rollback-of-the-window-only",
    ),
    pytest.param(
        keeps(inject.block_end, "conv"), {"conv"}, DELTA, {LAST}, SIDE,
        ["convolution window: rows of token -1 before the block, nodes 0 8 9, expected nodes 0 4 5 6"],
        id="window-at-the-end-of-the-block",
    ),
    pytest.param(
        keeps(BY_DEPTH, "recurrent"), {"recurrent"}, DELTA, {0, 3}, SIDE,
        ["committed state is node 3's, expected node 6's"], id="state-by-accepted-length",
    ),
    pytest.param(
        keeps(inject.wired(conv="flat"), "conv"), {"conv"}, DELTA, {0, 3}, SIDE,
        ["convolution window: rows of nodes 3 4 5 6, expected nodes 0 4 5 6"], id="windows-overlap-in-the-row-buffer",
    ),
    pytest.param(
        keeps(BY_DEPTH, "keys"), {"keys", "values"}, [1], {0, 3}, SIDE,
        ["keys: rows of nodes 1 2 3, expected nodes 4 5 6"], id="first-rows-of-the-keys",
    ),
    pytest.param(
        keeps(inject.rounded, "recurrent"), {"recurrent"}, DELTA, set(), SIDE,
        ["state is rounded to bfloat16"], id="state-rounded",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("commit", "channels", "layers", "right", "node", "says"), FAULTS)
def test_a_wrong_commit_is_a_defect_where_it_is(commit, channels, layers, right, node, says):
    record = commits(Faulty(small(), commit=commit), accept=SOME)
    assert record["exit_code"] == 1 and record["verdict"]["modes"]["tree_forked"] == "pass"  # the logits are right
    assert any(reason.startswith("commit after tree_forked: fail") for reason in record["verdict"]["reasons"])
    accepts = {accept["node"]: accept["modes"]["tree_forked"] for accept in record["cases"][0]["commit"]}
    assert {place for place, found in accepts.items() if found["verdict"] == "pass"} == right
    for place, found in accepts.items():
        assert {bad["channel"] for bad in found["bad"]} == (set() if place in right else channels)
        assert sorted({bad["layer"] for bad in found["bad"]}) == ([] if place in right else layers)
    said = {bad["says"] for bad in accepts[node]["bad"] if bad["channel"] != "values"}
    assert said and said <= set(says), said


def test_a_commit_that_never_happened_shows_at_the_first_plain_step():
    """All logits of the verify pass are right, and the commit itself returns the right contents."""
    host = inject.stale_slots(small())
    record = commits(host, accept=("branch",))
    found = record["cases"][0]["commit"][0]["modes"]["tree_forked"]
    assert record["exit_code"] == 1 and found["bad"] == [] and found["steps"][0]["verdict"] in ("leak", "flip")
    assert found["reason"] == "what is stored is right; logits off from step 1 after the accept"


@pytest.mark.parametrize("channel", ["recurrent", "conv"])
def test_a_linear_rollback_fails_after_a_partial_accept_only(channel):
    fault = keeps(lambda engine, verified, node: engine.commit(verified, len(verified.tree) - 1), channel)
    host = Faulty(small(), commit=lambda *args: fault(*args) if args[1].plan is None else args[3])
    record = commits(host, accept=("1", "full", "branch"))
    assert record["exit_code"] == 1 and set(verdicts(record, "tree_forked").values()) == {"pass"}
    leaves = {3, 6}
    assert {node for node, verdict in verdicts(record, "linear").items() if verdict == "pass"} == leaves
    first = next(a for a in record["cases"][0]["commit"] if a["node"] == 1)["modes"]["linear"]
    assert {bad["channel"] for bad in first["bad"]} == {channel}
    if channel == "recurrent":
        assert first["bad"][0]["says"] == "committed state is node 3's, expected node 1's"


def test_a_replay_without_keys_is_wrong_above_the_first_attention_layer():
    host = make_engine("qwen3_5_text", num_hidden_layers=8)
    wrong = Faulty(host, commit=keeps(inject.replayed_without_keys, "recurrent", "conv"))
    record = commits(wrong, accept=("branch",))
    found = record["cases"][0]["commit"][0]["modes"]["tree_forked"]
    assert record["exit_code"] == 1 and {bad["layer"] for bad in found["bad"]} == {4, 5, 6}
    assert commits(host, accept=("branch",))["exit_code"] == 0


def test_right_rows_with_wrong_numbers_are_not_called_rows_of_others():
    right = torch.arange(8.0).reshape(4, 2)
    stored = right.clone()
    stored[3] += 0.4  # near the row of node 1 still, and of no other
    part = Part(0, "values", 0.6, rms=1.0, size=1.0, ulp=0.0)
    search = Search((0, 1), None, (4, [{"values": right}]), (4, [{"values": stored}]), [(part, 0.1)])
    search.see(0, (3, [{"values": right[:3]}]))
    search.see(1, (4, [{"values": right}]))
    assert search.say(part, 0.5) == "values: rows of the right tokens, wrong in their numbers: 0.6, floor 0.5"
    stored[3] = right[2]
    assert search.say(part, 0.5) == "values: rows of node 0, expected node 1"


def test_keys_at_another_position_and_lost_rows_are_named():
    host = Faulty(small())
    host._commit = keeps(lambda engine, verified, node: engine.commit(_moved(engine, verified), node), "keys")
    record = commits(host, accept=("branch",))
    (keys, *_) = record["cases"][0]["commit"][0]["modes"]["tree_forked"]["bad"]
    assert keys["channel"] == "keys" and keys["says"] == "keys: rows of the right tokens at another position"
    host._commit = _short
    record = commits(host, accept=("branch",))
    bad = record["cases"][0]["commit"][0]["modes"]["tree_forked"]["bad"]
    assert [found["says"] for found in bad] == [
        "position 15, expected 16", "keys: 15 rows, expected 16", "values: 15 rows, expected 16"
    ]  # fmt: skip


def _moved(engine, verified):
    """The same pass with every row one position late: the values of the one attention layer stay right."""
    if verified.plan is None:
        return verified
    late = Wiring("late", positions=lambda tree: tuple(depth + 1 for depth in tree.depth))
    return engine.verify(verified.prefix, verified.tree, late)


def _short(engine, verified, node, right):
    cache = engine.caches.fork(right.cache)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
    return replace(right, cache=cache, length=right.length - 1)


def test_a_pass_that_starts_from_zero_leaves_no_nodes_state():
    host = Faulty(small(), forked=Wiring("x", state=lambda t: (BLANK, *t.parents[1:])))
    record = commits(host, accept=("zero", "branch"))
    assert record["exit_code"] == 1 and set(verdicts(record, "tree_forked").values()) == {"fail"}
    bad = record["cases"][0]["commit"][1]["modes"]["tree_forked"]["bad"]
    assert (bad[0]["layer"], bad[0]["channel"]) == (0, "recurrent")
    assert bad[0]["says"] == "committed state is no node's, expected node 6's"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(keeps(BY_DEPTH, "recurrent"), id="state"),
        pytest.param(keeps(BY_DEPTH, "keys"), id="keys", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_index_is_seen_in_bf16(fault):
    record = commits(Faulty(small("bfloat16"), commit=fault), accept=SOME)
    assert {node for node, verdict in verdicts(record, "tree_forked").items() if verdict == "pass"} == {0, 3}


def test_the_wirings_own_commit_channel_is_the_wrong_index():
    record = commits(Faulty(small(), forked=Wiring.parse("commit=flat")), accept=SOME)
    assert record["verdict"]["modes"]["tree_forked"] == "pass" and record["exit_code"] == 1
    assert {node for node, verdict in verdicts(record, "tree_forked").items() if verdict == "fail"} == {6, 9}


def test_states_that_a_prefill_does_not_repeat_judge_nothing():
    host = Faulty(small())
    run = host.contents
    calls = iter(range(10**6))
    host.contents = lambda prefix: _scaled(run(prefix), 1 + 1e-2 * (next(calls) % 2))
    record = commits(host, accept=("branch",))
    assert record["exit_code"] == 2
    assert any("plain decoding leaves other states" in reason for reason in record["verdict"]["reasons"])


def _scaled(contents, factor):
    length, layers = contents
    return length, [{channel: x * factor for channel, x in layer.items()} for layer in layers]


def test_a_pass_that_is_known_to_be_wrong_may_leave_a_wrong_state(monkeypatch):
    entry = KnownFailure(
        "bent", "transformers", ">=5", ("qwen3_5_text",), "linear", "linear", "bends", "see", "1", "state=flat"
    )
    monkeypatch.setattr("ddtree_check.judge.known.load_known", lambda: (entry,))
    fault = keeps(inject.before, "recurrent")
    host = Faulty(
        small(),
        linear=lambda logits: logits.flip(-1),
        commit=lambda *given: fault(*given) if given[1].plan is None else given[3],
    )
    record = commits(host, accept=("branch",), attribute=False)  # nobody asks whose logits they are
    assert verdicts(record, "linear") == {SIDE: "fail"} and record["exit_code"] == 0
    monkeypatch.setattr("ddtree_check.judge.known.load_known", lambda: ())
    assert commits(host, accept=("branch",))["exit_code"] == 1


def test_a_commit_outside_the_law_puts_the_control_off():
    host = Faulty(small(), unforked=replace(UNFORKED, commit=lambda t: (0,) * len(t)))
    record = commits(host, accept=SOME)
    assert record["exit_code"] == 2
    (reason,) = [r for r in record["verdict"]["reasons"] if "control is off" in r]
    assert re.search(r"a wrong state after \d+ commits? that the leak law calls clean; the forked", reason)


# --- the record and its view ------------------------------------------------------------------------------------------


@functools.cache
def wrong_record() -> dict:
    return commits(Faulty(engine("qwen3_5_text"), commit=keeps(BY_DEPTH, "recurrent")), accept=("full", "branch"))


def test_the_view_has_a_line_a_case_and_says_what_was_stored():
    lines = render(wrong_record(), width=None).splitlines()
    assert any(line.split() == ["p/tree", "2", "1", "2", "pass", "1", "of", "2", "fail", "1", "of", "2", "fail"]
               for line in lines)  # fmt: skip
    assert lines[-1] == (
        "verdict: fail (linear pass, tree_forked pass; commit after tree_forked: fail for 1 of 2 accepted paths), "
        "exit code 1"
    )
    said = next(line for line in lines if line.startswith("Wrong commit of tree_forked in p/tree, path 0-4-5-6: "))
    assert "layer 0: committed state is node 3's, expected node 6's; 3 layers off; logits off from step 1" in said
    assert wrong_record()["coverage"] | {"commits": 2, "commits_aside": 1} == wrong_record()["coverage"]


def test_without_a_pattern_nothing_is_committed():
    record = check(small(), [Item("p", prompt(12), tree=TREE)], Settings(controls=1))
    assert record["cases"][0]["commit"] is None and commit_blocks(record) == []
    chain = commits(small(), tree("chain", 4), accept=("branch",))
    assert chain["cases"][0]["commit"] == [] and "no such path" in render(chain)


# --- engines without a commit, or that refuse one ---------------------------------------------------------------------


class Without:
    """An engine that lacks some methods."""

    def __init__(self, engine, *names):
        self._inner, self._names = engine, names

    def __getattr__(self, name):
        if name.startswith("__") or name in self._names:
            raise AttributeError(name)
        return getattr(self._inner, name)


def _refusing(engine, verified, node, right):
    if verified.plan is None:
        return right
    raise Unsupported("a tree cannot be committed here")


LACKING = [
    pytest.param(lambda host: Without(host, "commit"), "engine Without has no commit", MODES, id="no-commit"),
    pytest.param(lambda host: Without(host, "contents"), "engine Without has no contents", MODES, id="no-states"),
    pytest.param(
        lambda host: Faulty(host, commit=_refusing), "a tree cannot be committed here", MODES[1:], id="refused"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lacking", "says", "modes"), LACKING)
def test_a_commit_that_cannot_be_made_is_unsupported_alone(lacking, says, modes):
    host = lacking(small())
    record = commits(host, accept=("branch",))
    assert {name: found["verdict"] for name, found in record["cases"][0]["modes"].items()} == {
        "linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"
    }  # fmt: skip
    found = record["cases"][0]["commit"][0]["modes"]
    assert {mode for mode in found if found[mode]["verdict"] == "unsupported"} == set(modes)
    assert all(found[mode]["reason"] == says for mode in modes) and record["exit_code"] == 2
    assert (
        f"commit after tree_forked: unsupported for 1 of 1 accepted paths (path 0-4-5-6: {says})"
        in (record["verdict"]["reasons"])
    )
    assert "1 of 1 unsupported" in render(record)
    assert commits(host, accept=())["exit_code"] == 0  # the twin: nothing else needs a commit


def test_a_red_tree_pass_of_an_engine_without_a_commit_is_still_red():
    host = Without(Faulty(small(), forked=UNFORKED), "commit", "contents")
    record = commits(host, accept=("branch",))
    assert record["exit_code"] == 1 and record["verdict"]["modes"]["tree_forked"] == "fail"
