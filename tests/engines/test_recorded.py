"""A trace is judged as the live run was; passes of any engine are judged by ar of the same model, or not at all."""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.cli.main import main
from ddtree_check.engines.recorded import TraceEngine, layers_from_json, layers_to_json
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.replay import judge_trace, record_trace, writer_for
from ddtree_check.judge.commit import flat_contents
from ddtree_check.judge.differences import TopLogits, measure, measure_any
from ddtree_check.judge.sampling.processing import Sampling
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.views import render
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty
from ddtree_check.trace.model import PASSES
from ddtree_check.trace.read import read_trace
from ddtree_check.trace.write import TraceWriter
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.paths import leaf_paths, padded_chain
from ddtree_check.tree.variants import front_chain, retoken
from tests.models import engine, make_engine, prompt, small, tree

SETTINGS = Settings(budgets=(3, 8), exact="off")  # a trace of its passes holds none of the exact ones
ITEMS = [Item(f"p{seed}", prompt(5, seed)) for seed in range(2)]
TREE = tree("random", 9, seed=4)
ITEM = Item("p", prompt(5), TREE)
SAME = ("exit_code", "verdict", "leakage", "coverage", "floor", "oracle")


def equal(live: dict, replayed: dict) -> None:
    """Verdicts, every figure of every node, acceptance and exit code."""
    assert {name: live[name] for name in SAME} == {name: replayed[name] for name in SAME}
    for ours, theirs in zip(live["cases"], replayed["cases"], strict=True):
        for name in ("id", "prompt_tokens", "nodes", "modes", "acceptance", "leak_law"):
            assert ours[name] == theirs[name], (ours["id"], name)
        assert ours["tree"]["parents"] == theirs["tree"]["parents"]


def replay(path, settings=SETTINGS, **options) -> dict:
    return judge_trace(TraceEngine.load(path), settings, **options)


# --- a live run and its trace -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), [
    ("qwen3_5_text", "float32"), ("qwen3_5_text", "bfloat16"), ("lfm2", "bfloat16"), ("bamba", "float32"),
    ("llama", "float32"),
])  # fmt: skip
def test_a_trace_is_judged_as_the_live_run_was(tmp_path, family, dtype):
    live = record_trace(engine(family, dtype), ITEMS[:1], SETTINGS, tmp_path / "t")
    assert {one.mode for step in read_trace(tmp_path / "t").steps for one in step.passes} >= set(PASSES) - {"chain"}
    equal(live, replay(tmp_path / "t"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-lfm2", "tiny-mamba2-hybrid"])
def test_the_trace_of_a_trained_fixture_is_judged_as_the_live_run_was(tmp_path, capsys, name, dtype):
    model, folder = str(fixtures_dir() / "models" / name), str(tmp_path / "t")
    files = [tmp_path / f"{which}.json" for which in ("live", "trace")]
    live = ["compare", "--model", model, "--dtype", dtype, "--limit", "1", "--budget", "16,64", "--save-trace", folder]
    codes = [
        main([*live, "--json", str(files[0])]),
        main(["compare", "--engine", "trace", folder, "--json", str(files[1])]),
    ]
    assert codes == [0, 0], capsys.readouterr().out[-2000:]
    equal(*(json.loads(file.read_text()) for file in files))


def _bend(logits):
    return logits + torch.linspace(0, 1, logits.shape[-1]).to(logits)


WRONG = [
    pytest.param({"forked": UNFORKED}, 1, id="not-forked"),
    pytest.param({"linear": _bend}, 1, id="linear"),
    pytest.param({"forward": _bend}, 2, id="full-forward-differs"),
    pytest.param(
        {"decode": lambda logits, call: _bend(logits) if call % 2 == 0 else logits}, 2, id="ar-does-not-repeat"
    ),
    pytest.param({"unforked": FORKED}, 2, id="control-does-not-leak"),
    pytest.param({"supports": lambda wiring: "no" if wiring is None else None}, 2, id="linear-refused"),
]


@pytest.mark.parametrize(("fault", "code"), WRONG)
def test_the_trace_of_a_wrong_engine_is_judged_as_the_live_run_was(tmp_path, fault, code):
    live = record_trace(Faulty(small(), **fault), ITEMS[:1], SETTINGS, tmp_path / "t")
    replayed = replay(tmp_path / "t")
    assert live["exit_code"] == replayed["exit_code"] == code
    if "supports" in fault:  # what was refused is not in the trace
        assert replayed["verdict"]["modes"]["linear"] == "not_run"
        return
    equal(live, replayed)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    replace(SETTINGS, controls=1), replace(SETTINGS, wiring="conv=flat"), replace(SETTINGS, order="depth"),
    replace(SETTINGS, require=("tree_unforked",)),
], ids=["some-controls", "another-control", "another-order", "unforked-required"])  # fmt: skip
def test_settings_of_the_live_run_are_found_again_in_its_trace(tmp_path, settings):
    live = record_trace(small(), ITEMS[:1], settings, tmp_path / "t")
    equal(live, replay(tmp_path / "t", Settings(require=settings.require)))


def test_a_run_is_not_changed_by_recording_it(tmp_path):
    recorded = record_trace(small(), ITEMS[:1], SETTINGS, tmp_path / "t")
    plain = check(small(), ITEMS[:1], SETTINGS)
    assert plain["cases"] == recorded["cases"]
    with pytest.raises(UsageError, match="expected the name of a new folder"):
        record_trace(small(), ITEMS, SETTINGS, tmp_path / "t")


# --- states and commits -----------------------------------------------------------------------------------------------

# 0 ─┬─ 1 ── 2 ── 3        on the first branch, node and depth are the same number
#    └─ 4 ─── 5
FORK = DraftTree((5, 11, 12, 13, 21, 22), (-1, 0, 1, 2, 0, 4))
SIDE = Item("p", prompt(5), FORK)
BY_LENGTH = inject.keeps(inject.wired(commit="flat"), "recurrent")  # commit row accepted_len - 1, not the node's
BLOCK_END = inject.keeps(inject.block_end, "recurrent", tree_only=True)  # the matrix at the end of the block
ACCEPT = replace(SETTINGS, accept=("full", "branch"), controls=1)
TREE_ONLY = replace(SETTINGS, require=("tree_forked",))


def test_a_trace_whose_run_was_interrupted_says_that_it_is_a_part(tmp_path):

    def stop(done, *_):
        if done:
            raise KeyboardInterrupt

    live = small()
    with pytest.raises(KeyboardInterrupt), writer_for(live, tmp_path / "t", SETTINGS) as trace:
        check(live, ITEMS, SETTINGS, trace=trace, progress=stop)
    assert replay(tmp_path / "t")["trace"]["notes"][0].startswith("the trace is a part")
    record_trace(live, ITEMS[:1], SETTINGS, tmp_path / "whole")
    assert not any("a part" in note for note in replay(tmp_path / "whole")["trace"]["notes"])


def stored(record: dict, mode: str = "tree_forked", pattern: str | None = None) -> dict[int, dict]:
    return {
        accept["node"]: accept["modes"][mode]
        for accept in record["cases"][0]["commit"]
        if pattern is None or accept["pattern"] == pattern
    }


@pytest.mark.parametrize(("fault", "node", "says"), [
    (None, None, None), (BY_LENGTH, 5, "committed state is not node 5's"),
    (BLOCK_END, 3, "committed state is node 5's, expected node 3's"),
], ids=["right", "by-accepted-length", "end-of-block"])  # fmt: skip
def test_recorded_commits_are_judged_as_the_live_run_was(tmp_path, fault, node, says):
    host = engine("qwen3_5_text") if fault is None else Faulty(engine("qwen3_5_text"), commit=fault)
    live, replayed = record_trace(host, [SIDE], ACCEPT, tmp_path / "t"), replay(tmp_path / "t")
    equal(*(record | {"verdict": record["verdict"] | {"reasons": ()}} for record in (live, replayed)))
    for mode in ("linear", "tree_forked", "tree_unforked"):
        ours, theirs = stored(live, mode), stored(replayed, mode)
        for place in (3, 5):
            assert ours[place]["verdict"] == theirs[place]["verdict"] and ours[place]["steps"] == theirs[place]["steps"]
            figures = [
                [{k: v for k, v in bad.items() if k != "says"} for bad in m[place]["bad"]] for m in (ours, theirs)
            ]
            assert figures[0] == figures[1]
    found = stored(replayed)
    assert {place for place, one in found.items() if one["verdict"] == "fail"} == ({node} if fault else set())
    assert replayed["exit_code"] == bool(fault)
    if fault:
        assert {(bad["layer"], bad["channel"]) for bad in found[node]["bad"]} == {(n, "recurrent") for n in range(3)}
        assert found[node]["bad"][0]["says"] == says  # by the nodes whose states are in the trace
        named = stored(replay(tmp_path / "t", reference=engine("qwen3_5_text")))[node]  # by all of the model's
        assert named["reason"] == stored(live)[node]["reason"] and " is node " in named["reason"]
        assert replayed["verdict"]["modes"]["tree_forked"] == "pass"  # the logits are right
        assert any(
            reason.startswith("commit after tree_forked: fail for 1 of 2") for reason in replayed["verdict"]["reasons"]
        )


def with_states(path, host, node: int, change=None, *, rows: bool = False, channels=("recurrent", "conv")):
    """A trace of another engine: its tree pass, the state of each node if `rows`, and what its commit left."""
    prefix = host.prefill(SIDE.tokens)
    verified = host.verify(prefix, FORK, FORKED)
    dtype = str(host.dtype).removeprefix("torch.")

    def held(after):
        found = flat_contents(host.contents(after))
        return {(layer, name): x for (layer, name), x in found.items() if name in channels}

    at = {end: held(host.commit(verified, end)) for end in range(len(FORK))}
    with TraceWriter(path, engine="elsewhere", model="m", dtype=dtype, vocab_size=host.vocab_size) as trace:
        step = trace.step("p", SIDE.tokens, FORK.tokens, FORK.parents)
        states = {key: torch.stack([at[end][key] for end in range(len(FORK))]) for key in at[0]} if rows else None
        if rows and change:
            states = change(states)
        step.add("tree_forked", verified.logits, states=states)
        step.accept(FORK.path(node), 9)
        if not rows:
            step.commit("tree_forked", FORK.path(node), change(at) if change else at[node])
        step.write()
    return path


WINDOW = lambda at: {key: (x if key[1] == "recurrent" else x[1:]) for key, x in at[5].items()}  # noqa: E731
WRONG_COMMITS = [  # the node that was accepted, what was stored, whose state it is, channels
    pytest.param(5, None, None, None, id="right"),
    pytest.param(3, None, None, None, id="right-on-the-first-branch"),
    pytest.param(5, WINDOW, None, None, id="a-window-without-its-oldest-input"),
    pytest.param(5, lambda at: at[2], 2, {"recurrent", "conv"}, id="by-accepted-length"),
    pytest.param(3, lambda at: at[3], None, None, id="by-accepted-length-on-the-first-branch"),
    pytest.param(
        2, lambda at: {key: at[5 if key[1] == "recurrent" else 2][key] for key in at[2]}, 5, {"recurrent"},
        id="state-after-the-block",
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("node", "change", "theirs", "channels"), WRONG_COMMITS)
def test_the_commit_of_another_engine_is_judged_by_the_model(tmp_path, node, change, theirs, channels, dtype):
    host = engine("qwen3_5_text", dtype)
    record = replay(with_states(tmp_path / "t", host, node, change), TREE_ONLY, reference=host)
    found = stored(record)[node]
    assert record["verdict"]["modes"]["tree_forked"] == "pass" and record["exit_code"] == (theirs is not None)
    assert found["verdict"] == ("pass" if theirs is None else "fail"), found
    if theirs is not None:
        assert {bad["channel"] for bad in found["bad"]} == channels
        assert {bad["layer"] for bad in found["bad"]} == {0, 1, 2}
        says = [bad["says"] for bad in found["bad"] if bad["channel"] == "recurrent"]
        assert set(says) == {f"committed state is node {theirs}'s, expected node {node}'s"}
        assert f"layer 0: committed state is node {theirs}'s" in record["verdict"]["reasons"][-1]


def test_the_states_of_a_tree_pass_are_judged_node_by_node(tmp_path):
    host = engine("qwen3_5_text")

    def swapped(states):
        wrong = {key: x.clone() for key, x in states.items()}
        wrong[1, "recurrent"][5] = states[1, "recurrent"][3]
        return wrong

    record = replay(with_states(tmp_path / "a", host, 5, rows=True), TREE_ONLY, reference=host)
    assert record["exit_code"] == 0 and {one["verdict"] for one in stored(record, pattern="state").values()} == {"pass"}
    record = replay(with_states(tmp_path / "b", host, 5, swapped, rows=True), TREE_ONLY, reference=host)
    found = stored(record, pattern="state")
    assert record["exit_code"] == 1 and [node for node, one in found.items() if one["verdict"] != "pass"] == [5]
    (bad,) = found[5]["bad"]
    assert (bad["layer"], bad["channel"], bad["says"]) == (1, "recurrent", "state is node 3's, expected node 5's")
    assert "states of tree_forked: fail for 1 of 6 recorded nodes" in record["verdict"]["reasons"][-1]
    assert "Recorded states" in render(record) and "1 of 6 fail" in render(record)


def test_states_that_nothing_can_be_compared_with_are_no_pass(tmp_path):
    host = small()
    prefix = host.prefill(SIDE.tokens)
    odd = {(3, "recurrent"): torch.ones(2, 2)}  # layer 3 is attention
    flat = {(0, "recurrent"): host.contents(prefix)[1][0]["recurrent"].flatten()}
    for name, states, says in (
        ("odd", odd, "layer 3 of the model holds no recurrent"),
        ("flat", flat, "another layout"),
        ("alone", flat, "give --model"),
    ):
        with TraceWriter(tmp_path / name, engine="x", model="m", dtype="float32", vocab_size=host.vocab_size) as trace:
            step = trace.step("p", SIDE.tokens, FORK.tokens, FORK.parents)
            step.add("ar", host.decode(prefix, FORK))
            step.add("tree_forked", host.verify(prefix, FORK, FORKED).logits)
            step.commit("tree_forked", FORK.path(5), states)
            step.write()
        record = replay(tmp_path / name, TREE_ONLY, reference=None if name == "alone" else host)
        found = stored(record)[5]
        assert found["verdict"] == "not_run" and says in found["reason"] and record["exit_code"] == 2


def test_states_of_other_weights_blame_no_commit(tmp_path):
    record_trace(engine("qwen3_5_text"), [SIDE], replace(ACCEPT, accept=("branch",)), tmp_path / "t")
    assert replay(tmp_path / "t", reference=engine("qwen3_5_text"))["exit_code"] == 0
    record = replay(tmp_path / "t", reference=make_engine("qwen3_5_text", seed=1))
    assert record["exit_code"] == 2 and stored(record)[5]["verdict"] == "reference_unusable"
    assert "a prefill leaves other states than the model's own" in stored(record)[5]["reason"]


WRONG_ENTRIES = [
    pytest.param({"path": [0, 5]}, "expected the path to its last node", id="no-path"),
    pytest.param({"path": []}, "expected node ids from 0", id="empty"),
    pytest.param({"mode": "own"}, "mode 'own', expected one of prefill", id="mode"),
    pytest.param({"states": {}}, "holds no state", id="no-state"),
    pytest.param({"probe": [1, 2]}, "expected one row of", id="probe-without-logits"),
    pytest.param({"probe": [-1], "logits": np.zeros((1, 300), np.float32)}, "expected a token id", id="probe"),
    pytest.param({"position": -1}, "position -1", id="position"),
    pytest.param({"states": {(0, "a/b"): np.zeros(1, np.float32)}}, "belongs to none of", id="channel"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), WRONG_ENTRIES)
def test_a_commit_that_cannot_be_read_back_is_refused(tmp_path, change, says):
    with TraceWriter(tmp_path / "t", engine="x", model="m", dtype="float32", vocab_size=300) as trace:
        step = trace.step("s", [1], FORK.tokens, FORK.parents)
        step.add("tree_forked", np.zeros((6, 300), np.float32))
        states = {(0, "recurrent"): np.zeros(3, np.float32)}
        step.commit(**{"mode": "tree_forked", "path": [0, 4], "states": states} | change)
        with pytest.raises(ValueError, match=says):
            step.write()


# --- what the engine made of its logits -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "code"), [("path", 0), ("none", 1)])
def test_processed_rows_are_judged_as_the_live_run_was(tmp_path, rule, code):
    host = Faulty(small(), processed=inject.processed(rule, "tree_forked"))
    settings = replace(SETTINGS, budgets=(8,), sampling=Sampling(temperature=0.8, repetition_penalty=1.3), draws=0)
    live, replayed = record_trace(host, ITEMS[:1], settings, tmp_path / "t"), replay(tmp_path / "t")
    assert live["exit_code"] == replayed["exit_code"] == code
    equal(live, replayed)
    reason = replayed["cases"][0]["modes"]["tree_forked"]["reason"]
    assert (reason or "").startswith("raw pass, processed fail: its penalties are not applied") == bool(code)


@pytest.mark.parametrize("wrong", [False, True])
def test_chosen_tokens_are_judged_as_the_live_run_was(tmp_path, wrong):
    def chosen(mode, tree, nodes, logits):
        return [
            int(row.argsort()[-2 if wrong and mode == "tree_forked" and n == 4 else -1])
            for n, row in zip(nodes, logits, strict=True)
        ]

    host = Faulty(small(), chosen=chosen)
    live, replayed = record_trace(host, [SIDE], SETTINGS, tmp_path / "t"), replay(tmp_path / "t")
    equal(live, replayed)
    assert replayed["exit_code"] == wrong
    reason = replayed["cases"][0]["modes"]["tree_forked"]["reason"] or ""
    assert reason.startswith("raw pass, it chose token") == wrong


def test_layers_survive_the_header():
    for family in ("qwen3_5_text", "lfm2", "falcon_h1", "gemma3_text"):
        layers = engine(family).layers
        assert layers_from_json(json.loads(json.dumps(layers_to_json(layers)))) == layers


# --- another engine's passes ------------------------------------------------------------------------------------------


def foreign(path, host, *, modes=("tree_forked", "linear"), item=ITEM, forked=FORKED, keep=None, top=None, **changes):
    """A trace as somebody else's recorder writes it: the tree pass, linear chains, nothing of a reference."""
    prefix, case = host.prefill(item.tokens), item.tree
    header = {"engine": "elsewhere", "model": "m", "dtype": str(host.dtype).removeprefix("torch."), "top": top}
    with TraceWriter(path, vocab_size=host.vocab_size, **header) as trace:
        step = trace.step(
            item.id, changes.pop("prompt_tokens", item.tokens), case.tokens, case.parents, request=item.id
        )
        shape = changes.pop("shape", lambda rows: rows)
        for mode in modes:
            if mode in ("linear", "chain"):
                for path_ in leaf_paths(case)[:keep]:
                    chain = padded_chain(case, path_.nodes, changes.get("rows", len(case)))
                    rows = host.verify(prefix, chain, FORKED if mode == "chain" else None).logits
                    nodes = [*path_.nodes, *[-1] * (len(chain) - len(path_.nodes))]
                    step.add(mode, shape(rows), nodes=nodes)
                continue
            wiring = {"tree_forked": forked, "tree_unforked": UNFORKED}.get(mode)
            rows = host.decode(prefix, case) if mode == "ar" else host.verify(prefix, case, wiring).logits
            step.add(mode, shape(rows), **{name: held for name, held in changes.items() if name != "rows"})
        step.write()
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_of_another_engine_are_judged_by_ar_of_the_model(tmp_path, dtype):
    host = small(dtype)
    record = replay(foreign(tmp_path / "t", host), reference=host)
    assert record["verdict"]["modes"] == {"linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"}
    assert record["exit_code"] == 0 and record["trace"]["supplied"] == ["ar", "forward", "tree_unforked"]
    assert any("by engine transformers from --model" in note for note in record["trace"]["notes"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tree_pass_alone_is_judged_if_it_alone_is_required(tmp_path, dtype):
    host, settings = small(dtype), replace(SETTINGS, require=("tree_forked",))
    path = foreign(tmp_path / "t", host, modes=("tree_forked",))
    record = replay(path, settings, reference=host)
    assert record["exit_code"] == 0 and record["verdict"]["modes"]["linear"] == "not_run"
    assert any("no control of the tree's width" in note for note in record["trace"]["notes"])
    assert replay(path, reference=host)["exit_code"] == 2  # linear is required by default, and was not recorded
    with pytest.raises(UsageError, match="has no ar, expected it at every node; give --model"):
        replay(path, settings)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        (lambda case: [37 + depth for depth in case.depth], None),
        (
            lambda case: [37 + row for row in range(len(case))],
            "given flat positions, row after row: node",
        ),
        (lambda case: [37 + 2 * depth for depth in case.depth], "given other positions than their depth"),
    ],
    ids=["depths", "rows", "twice"],
)
def test_positions_that_are_no_depths_fail_whatever_the_logits_did(tmp_path, positions, says):
    host = small()
    path = foreign(tmp_path / "t", host, modes=("tree_forked",), positions=positions(ITEM.tree))
    record = replay(path, replace(SETTINGS, require=("tree_forked",)), reference=host)
    assert record["exit_code"] == (1 if says else 0)
    assert says is None or says in record["verdict"]["reasons"][0]


@pytest.mark.parametrize("second", [FORKED, UNFORKED], ids=["same", "other"])
def test_two_passes_of_one_step_must_agree(tmp_path, second):
    host = small()
    prefix, case = host.prefill(ITEM.tokens), ITEM.tree
    with TraceWriter(
        tmp_path / "t", engine="elsewhere", model="m", dtype="float32", vocab_size=host.vocab_size
    ) as trace:
        step = trace.step(ITEM.id, ITEM.tokens, case.tokens, case.parents)
        for wiring in (FORKED, second):
            step.add("tree_forked", host.verify(prefix, case, wiring).logits)
        step.write()
    record = replay(tmp_path / "t", replace(SETTINGS, require=("tree_forked",)), reference=host)
    assert record["exit_code"] == (0 if second is FORKED else 1)
    assert second is FORKED or "two passes of tree_forked hold other logits of node" in record["verdict"]["reasons"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("modes", [("tree_forked",), ("tree_forked", "linear")], ids=["alone", "with-linear"])
def test_the_pass_of_an_engine_that_does_not_fork_looks_unforked(tmp_path, modes, dtype):
    host = small(dtype)
    path = foreign(tmp_path / "t", host, modes=modes, forked=UNFORKED)
    record = replay(path, replace(SETTINGS, require=("tree_forked",)), reference=host)
    assert record["exit_code"] == 1
    assert "looks unforked: states or windows read in row order" in record["cases"][0]["modes"]["tree_forked"]["reason"]
    bad = {node["node"] for node in record["cases"][0]["nodes"] if node["tree_forked"]["verdict"] in ("leak", "flip")}
    assert bad <= set(record["cases"][0]["leak_law"]["contaminated"])


def test_one_wrong_edge_of_another_engine_is_found_in_float32(tmp_path):
    from ddtree_check.model.wiring import Wiring

    host = small()
    wrong = Wiring("x", state=lambda t: (*t.parents[:-1], 0))
    record = replay(foreign(tmp_path / "t", host, forked=wrong), reference=host)
    assert record["exit_code"] == 1
    bad = [node["node"] for node in record["cases"][0]["nodes"] if node["tree_forked"]["verdict"] in ("leak", "flip")]
    assert bad == [len(TREE) - 1]


def test_other_weights_are_no_fault_of_the_verify_pass(tmp_path):
    path = foreign(tmp_path / "t", make_engine("qwen3_5_text", seed=1))
    record = replay(path, reference=small())
    assert record["exit_code"] == 2 and record["verdict"]["modes"]["tree_forked"] == "reference_unusable"
    assert any("differs from the reference at the root already" in reason for reason in record["verdict"]["reasons"])


def test_an_ar_of_its_own_is_checked_against_the_model(tmp_path):
    host = small()
    modes = ("ar", "linear", "chain", "tree_forked", "tree_unforked")
    record = replay(foreign(tmp_path / "t", host, modes=modes), reference=host)
    assert record["exit_code"] == 0 and record["trace"]["supplied"] == []
    record = replay(tmp_path / "t", reference=make_engine("qwen3_5_text", seed=1))
    assert record["exit_code"] == 2 and "ar of the trace is not that of the model" in record["verdict"]["reasons"][0]
    assert replay(tmp_path / "t")["exit_code"] == 0  # without a model its own word counts, and the view says so
    assert any("not checked by repeat or forward" in note for note in replay(tmp_path / "t")["trace"]["notes"])


def test_some_paths_of_linear_are_a_control_and_no_verdict(tmp_path):
    host = small()
    record = replay(foreign(tmp_path / "t", host, keep=2), reference=host)
    assert record["verdict"]["modes"]["linear"] == "not_run" and record["verdict"]["modes"]["tree_forked"] == "pass"
    assert "rows at" in record["cases"][0]["modes"]["linear"]["reason"] and "chain" in record["floor"]["controls"]


def test_a_linear_narrower_than_the_tree_is_no_control(tmp_path):
    host = small()
    longest = max(len(path.nodes) for path in leaf_paths(TREE))
    record = replay(foreign(tmp_path / "t", host, rows=longest), reference=host)
    assert record["verdict"]["modes"]["linear"] == "pass" and "pad" not in record["floor"]["controls"]
    assert any("narrower than the tree" in note for note in record["trace"]["notes"])


def test_padding_rows_are_left_out(tmp_path):
    host = small()
    nodes = [-1, *range(len(TREE)), -1, -1]

    def padded(rows):
        return torch.cat([torch.full_like(rows[:1], torch.nan), rows, torch.zeros_like(rows[:2])])

    path = foreign(tmp_path / "t", host, modes=("tree_forked",), nodes=nodes, shape=padded)
    assert replay(path, replace(SETTINGS, require=("tree_forked",)), reference=host)["exit_code"] == 0


def test_nan_in_a_recorded_row_is_a_defect(tmp_path):
    host = small()

    def spoilt(rows):
        rows = rows.clone()
        rows[3, 7] = torch.nan
        return rows

    record = replay(
        foreign(tmp_path / "t", host, modes=("tree_forked",), shape=spoilt),
        replace(SETTINGS, require=("tree_forked",)),
        reference=host,
    )
    assert record["exit_code"] == 1 and record["cases"][0]["nodes"][3]["tree_forked"]["max_abs"] is None


# --- input ids --------------------------------------------------------------------------------------------------------


def test_a_pass_that_was_fed_other_tokens_is_no_verify_fault(tmp_path):
    host, settings = small(), replace(SETTINGS, require=("tree_forked",))
    ids = [*TREE.tokens[:5], 3, *TREE.tokens[6:]]
    path = foreign(tmp_path / "a", host, modes=("tree_forked",), input_ids=ids)
    record = replay(path, settings, reference=host)
    assert record["exit_code"] == 2 and record["verdict"]["modes"]["tree_forked"] == "reference_unusable"
    assert "input-id mismatch: pass tree_forked was fed token 3 at node 5" in record["verdict"]["reasons"][0]
    with TraceWriter(tmp_path / "b", engine="x", model="m", dtype="float32", vocab_size=host.vocab_size) as trace:
        step = trace.step("s", ITEM.tokens, TREE.tokens, TREE.parents)
        step.add("ar", host.decode(host.prefill(ITEM.tokens), TREE), prompt_tokens=[1, *ITEM.tokens])
        step.add("tree_forked", host.verify(host.prefill(ITEM.tokens), TREE, FORKED).logits)
        step.write()
    record = replay(tmp_path / "b", settings)
    assert record["exit_code"] == 2 and "input-id mismatch: the step and its pass ar" in record["verdict"]["reasons"][0]


def test_prompts_that_a_trace_should_have_had_are_compared(tmp_path):
    host = small()
    path = foreign(tmp_path / "t", host)
    assert replay(path, reference=host, prompts={"p": ITEM.tokens, "q": (1, 2)})["exit_code"] == 0
    record = replay(path, reference=host, prompts={"p": (1, *ITEM.tokens)})
    assert record["exit_code"] == 2
    assert "input-id mismatch: the prompt and the trace: prompt position 0" in record["verdict"]["reasons"][0]


# --- top k ------------------------------------------------------------------------------------------------------------


def test_the_top_k_alone_still_tell_a_leak(tmp_path):
    host, settings = small(), replace(SETTINGS, require=("tree_forked",))
    right = replay(foreign(tmp_path / "a", host, modes=("tree_forked",), top=8), settings, reference=host)
    assert right["exit_code"] == 0 and any("top k only" in note for note in right["trace"]["notes"])
    assert right["cases"][0]["nodes"][3]["tree_forked"]["kl"] is None
    wrong = foreign(tmp_path / "b", host, modes=("tree_forked",), forked=UNFORKED, top=8)
    assert replay(wrong, settings, reference=host)["exit_code"] == 1
    both = foreign(tmp_path / "c", host, modes=("ar", "linear", "tree_forked", "tree_unforked"), top=8)
    record = replay(both)
    assert record["exit_code"] == 0 and record["verdict"]["modes"]["tree_unforked"] == "fail"


def _top(rows: torch.Tensor, k: int, lse: bool = True) -> TopLogits:
    values, ids = rows.topk(k)
    return TopLogits(ids, values, rows.double().logsumexp(-1) if lse else None)


@pytest.mark.parametrize("lse", [True, False], ids=["lse", "no-lse"])
def test_what_the_top_k_show_is_measured_and_never_more(lse):
    generator = torch.Generator().manual_seed(0)
    a = 3 * torch.randn(40, 64, generator=generator)
    b = a + 0.1 * torch.randn(40, 64, generator=generator)
    whole = measure(a, b)
    shifted = (b - b.logsumexp(-1, keepdim=True)) - (a - a.logsumexp(-1, keepdim=True))
    for reference, run in ((a, _top(b, 6, lse)), (_top(a, 6, lse), b), (_top(a, 6, lse), _top(b, 6, lse))):
        found = measure_any(reference, run, torch.float32)
        assert (found.argmax == whole.argmax).all() and (found.run_argmax == whole.run_argmax).all()
        assert (found.max_abs > 0).all() and np.isnan(found.kl).all()
        if lse:
            assert (found.max_abs <= shifted.abs().amax(-1).numpy() + 1e-6).all()
    same = measure_any(a, _top(a, 6, lse), torch.float32)
    assert (same.max_abs < 1e-9).all() and (same.ar_rank == 0).all()


def test_ids_that_fell_out_of_the_top_k_count():
    a = torch.arange(8, dtype=torch.float32)[None]
    b = a.clone()
    b[0, 7] = -50.0  # the best one is gone: none of the others moved
    found = measure_any(_top(a, 3, False), _top(b, 3, False), torch.float32)
    assert found.changed.all() and found.max_abs[0] >= 2
    disjoint = measure_any(_top(a, 2, False), _top(-a, 2, False), torch.float32)
    assert disjoint.max_abs[0] > 0 and disjoint.ar_rank[0] == 2
    b[0, 3] = torch.nan
    assert np.isnan(measure_any(a, TopLogits(torch.tensor([[3, 5]]), b[:, [3, 5]]), torch.float32).max_abs).all()


# --- what the engine accepted -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_accepted_path_of_the_engine_is_shown_beside_ar(tmp_path):
    host = small()
    live = check(host, [ITEM], SETTINGS)["cases"][0]["acceptance"]["ar"]
    other = next(node for node in range(1, len(TREE)) if list(TREE.path(node)) != live["path"])
    for name, path in (("right", live["path"]), ("wrong", TREE.path(other))):
        foreign(tmp_path / name, host)
        with TraceWriter(
            tmp_path / f"{name}2", engine="x", model="m", dtype="float32", vocab_size=host.vocab_size
        ) as w:
            step = w.step("s", ITEM.tokens, TREE.tokens, TREE.parents)
            step.add("tree_forked", host.verify(host.prefill(ITEM.tokens), TREE, FORKED).logits)
            step.accept(path, live["bonus"])
            step.write()
        record = replay(tmp_path / f"{name}2", replace(SETTINGS, require=("tree_forked",)), reference=host)
        found = record["cases"][0]["engine_accepted"]
        assert record["exit_code"] == 0 and bool(found["wrong_accept"] or found["wrong_reject"]) == (name == "wrong")


# --- the command line -------------------------------------------------------------------------------------------------


def test_compare_judges_a_trace_from_the_command_line(tmp_path, capsys):
    live = ["compare", "--limit", "1", "--budget", "8", "--dtype", "float32"]
    folder = str(tmp_path / "t")
    assert main([*live, "--save-trace", folder, "--json", str(tmp_path / "live.json")]) == 0
    assert main(["compare", "--engine", "trace", folder, "--json", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    assert f"Again: ddtree-check compare --engine trace {folder}\n" in out
    equal(*(json.loads((tmp_path / f"{name}.json").read_text()) for name in ("live", "trace")))
    for view in (["show"], ["show", "--format", "markdown"]):
        assert main([view[0], str(tmp_path / "trace.json"), *view[1:]]) == 0
    assert main(["lint", folder]) == 0
    assert main(["compare", "--engine", "trace", folder, "--model", "tiny-qwen3_5", "--quiet"]) == 0


@pytest.mark.parametrize(
    "more", [(), ("--accept", "full,branch"), ("--temperature", "0.8")], ids=lambda m: "".join(m[:1])
)
def test_a_trace_that_would_be_too_large_is_refused_before_it_is_begun(tmp_path, capsys, more):
    folder = tmp_path / "t"
    live = ["compare", "--limit", "1", "--budget", "4,6", "--draft", "self", *more, "--save-trace", str(folder)]
    assert main([*live, "--max-bytes", "1000"]) == 3 and not folder.exists()
    said = capsys.readouterr().err
    found = re.fullmatch(
        r"ddtree-check: save-trace: ([\d,]+) bytes would be written for 1 prompt, expected at most 1,000; take fewer "
        r"prompts, smaller budgets or a larger --max-bytes\n", said,
    )  # fmt: skip
    assert found, said
    needed = int(found[1].replace(",", ""))
    assert main([*live, "--max-bytes", str(needed), "--quiet"]) == 0
    assert 0.5 * needed < sum(part.stat().st_size for part in folder.iterdir()) <= needed


USAGE = [
    pytest.param(["compare", "--engine", "trace"], "expected --engine trace with the path of a trace", id="no-path"),
    pytest.param(["compare", "somewhere"], "expected --engine trace with the path of a trace", id="no-engine"),
    pytest.param(
        ["compare", "--engine", "trace", "nowhere.safetensors"], "nowhere.safetensors: No such file", id="none"
    ),
    pytest.param(["compare", "--engine", "trace", "x", "--oracle"], "oracle: says nothing of passes", id="oracle"),
    pytest.param(["compare", "--engine", "trace", "x", "--wiring", "conv=flat"], "wiring: says nothing", id="wiring"),
    pytest.param(["compare", "--engine", "trace", "x", "--save-trace", "y"], "save-trace: says nothing", id="again"),
]


@pytest.mark.parametrize(("words", "message"), USAGE)
def test_bad_words_are_refused_in_one_line(words, message, capsys):
    assert main(words) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_trace_is_no_live_engine(tmp_path):
    from ddtree_check.base.errors import Unsupported

    host = TraceEngine.load(foreign(tmp_path / "t", small()))
    assert host.supports(None) and host.describe()["engine"] == "elsewhere"
    with pytest.raises(Unsupported, match="a trace holds passes that were run"):
        host.prefill((1, 2))


def test_a_trace_of_another_vocabulary_or_dtype_is_refused(tmp_path, capsys):
    path = foreign(tmp_path / "t", small())
    with pytest.raises(UsageError, match="expected the same model"):
        replay(path, reference=TraceEngine.load(_wider(tmp_path / "w")))
    assert main(["compare", "--engine", "trace", str(path), "--model", "tiny-qwen3_5", "--dtype", "bf16"]) == 3
    assert "the trace was computed in float32" in capsys.readouterr().err
    assert main(["compare", "--engine", "trace", str(path), "--model", "tiny-qwen3_5"]) == 3
    assert os.path.isdir(path)


def _wider(path):
    with TraceWriter(path, engine="x", model="m", dtype="float32", vocab_size=999) as trace:
        step = trace.step("s", [1], [2], [-1])
        step.add("ar", np.zeros((1, 999), dtype=np.float32))
        step.write()
    return path


# --- two runs of one tree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wiring", [FORKED, UNFORKED], ids=["forked", "not-forked"])
def test_two_runs_of_one_tree_are_judged_in_bits(wiring, tmp_path):
    draw, host = random.Random(1), engine("qwen3_5_text", "bfloat16")
    fresh = [retoken(TREE, TREE.path(leaf), host.vocab_size, draw) for leaf in TREE.leaves]
    trees = [TREE, *fresh, *(front_chain(tree, TREE.path(leaf)) for tree, leaf in zip(fresh, TREE.leaves, strict=True))]
    trees += [front_chain(TREE, TREE.path(leaf)) for leaf in TREE.leaves]
    with writer_for(host, tmp_path / "t") as trace:
        prefix = host.prefill(prompt(5))
        for number, recorded in enumerate(trees):
            step = trace.step(str(number), prompt(5), recorded.tokens, recorded.parents)
            step.add("ar", host.decode(prefix, recorded))
            step.add("tree_forked", host.verify(prefix, recorded, wiring).logits)
            step.write()
    record = replay(tmp_path / "t", replace(SETTINGS, exact="leaves", require=("tree_forked",)))
    exact = record["cases"][0]["exact"]
    assert exact["influence"]["claimed"], exact
    if wiring == FORKED:
        assert (exact["verdict"], exact["certified"]) == ("pass", len(TREE))
    else:
        assert exact["verdict"] == "fail" and exact["moved"] == len(TREE) - len(TREE.clean)
        assert record["exit_code"] == 1
    assert replay(tmp_path / "t")["exact"] is None  # off
