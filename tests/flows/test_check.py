"""The whole flow on small models: it is green on a right engine and red, in the right place, on a wrong one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.cli.main import main
from ddtree_check.engines.registry import load_engine
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.judge.known import KnownFailure
from ddtree_check.model.wiring import BLANK, FORKED, UNFORKED, Wiring
from ddtree_check.report.record import write_record
from ddtree_check.report.terminal import remarks
from ddtree_check.selftest.inject import Faulty
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.recorded import Marginals
from tests.models import SMALL, VOCAB, engine, make_engine, prompt, small, tree

SETTINGS = Settings(budgets=(8,))
TWO = replace(SETTINGS, budgets=(8, 24))
ITEMS = [Item(f"p{seed}", prompt(12, seed)) for seed in range(2)]
NODE_KEYS = {"node", "token", "parent", "depth", "leaked", "clean", "ar", "linear", "tree_forked", "tree_unforked"}
MODE_NODE_KEYS = {"argmax", "max_abs", "rms", "kl", "tv", "ar_rank", "verdict"}
MODE_KEYS = {"verdict", "nodes", "pass", "tie", "leak", "flip", "max_abs", "median_abs"}
ACCEPTANCE_KEYS = {"path", "accepted", "bonus", "wrong_accept", "wrong_reject", "wrong_bonus", "by_tie"}


@pytest.fixture(scope="module")
def record():
    return check(small(), ITEMS, TWO)


def test_a_right_engine_passes_and_its_control_fails(record):
    assert record["exit_code"] == 0
    assert record["verdict"]["modes"] == {"linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"}
    assert record["coverage"]["near_moved"] == record["coverage"]["near"] > 0
    for case in record["cases"]:
        assert case["leak_law"]["clean_bitwise_equal"] and not case["leak_law"]["outside"]


def test_the_record_has_the_promised_keys_and_is_plain_json(record):
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {"schema", "environment", "model", "settings", "floor", "cases", "verdict", "exit_code"} <= record.keys()
    for case in record["cases"]:
        assert {"id", "prompt_tokens", "tree", "nodes", "modes", "acceptance", "commit"} <= case.keys()
        assert {"tokens", "parents", "source"} <= case["tree"].keys()
        for node in case["nodes"]:
            assert node.keys() >= NODE_KEYS and {"argmax", "margin"} <= node["ar"].keys()
            assert all(node[mode].keys() >= MODE_NODE_KEYS for mode in case["modes"])
        assert all(mode.keys() >= MODE_KEYS for mode in case["modes"].values())
        assert all(found.keys() >= ACCEPTANCE_KEYS for found in case["acceptance"].values())
    assert {"contaminated", "flipped", "median_kl", "wrong_accept_per_round"} <= record["leakage"].keys()


def test_a_record_holds_what_is_needed_to_run_its_case_again(record):
    case = record["cases"][1]
    item = Item("again", tuple(case["prompt_tokens"]), tree=DraftTree.from_json(case["tree"]))
    again = check(small(), [item], TWO)["cases"][0]
    assert again["nodes"] == case["nodes"]


def test_smaller_budgets_share_the_reference_of_larger_ones(record):
    small, large = record["cases"][:2]
    assert (len(small["nodes"]), len(large["nodes"])) == (9, 25)
    assert [node["ar"] for node in small["nodes"]] == [node["ar"] for node in large["nodes"][:9]]


def test_positions_two_too_far_show_over_five_prompts_where_no_node_shows_them():
    """bfloat16 rounds more than two attention layers of eight move a row by, but not at every node of every prompt."""
    host = load_engine("transformers", str(fixtures_dir() / "models" / "tiny-qwen3_5"), dtype="bfloat16", device="cpu")
    far = Wiring("far", positions=lambda t: tuple(depth + 2 * (depth != node) for node, depth in enumerate(t.depth)))
    items = [Item(f"p{seed}", prompt(12, seed), tree=tree("random", 8, seed=seed)) for seed in range(5)]
    right, wrong = (check(e, items, Settings()) for e in (host, Faulty(host, forked=far)))
    for record in (right, wrong):
        assert [case["modes"]["tree_forked"]["verdict"] for case in record["cases"]] == ["pass"] * 5
    assert right["exit_code"] == 0 and right["floor"]["systematic"]["ratio"] < 1.2
    assert wrong["exit_code"] == 1 and wrong["verdict"]["modes"]["tree_forked"] == "fail"
    assert "tree_forked: fail (systematically above noise" in wrong["verdict"]["reasons"][0]
    assert "prompts, within 1.53; one wrong" in remarks(right) and "prompts, beyond 1.53; one wrong" in remarks(wrong)
    few = check(host, items[:2], Settings())
    assert few["exit_code"] == 0 and not few["floor"]["systematic"]["judged"]
    assert "not judged" in remarks(
        few
    ) and "2 prompts with noise to compare with, 3 are needed; in bfloat16 wrong positions" in remarks(few)


FAULTS = [
    pytest.param(UNFORKED, id="not-forked"),
    pytest.param(Wiring.parse("state=flat"), id="state-only"),
    pytest.param(Wiring.parse("conv=flat"), id="conv-only"),
    pytest.param(Wiring.parse("mask=flat"), id="causal-mask"),
    pytest.param(Wiring.parse("positions=flat"), id="positions-by-index"),
    pytest.param(Wiring("x", state=lambda t: (BLANK, *t.parents[1:])), id="dropped-root-state"),
    pytest.param(Wiring("x", conv=lambda t: (BLANK, *t.parents[1:])), id="dropped-root-window"),
    pytest.param(Wiring("x", state=lambda t: (*t.parents[:-1], 0)), id="one-wrong-edge"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tree_pass_is_a_defect_at_its_first_node(fault, dtype):
    case = tree("random", 9, seed=4)
    host = Faulty(small(dtype), forked=fault)
    record = check(host, [Item("p", prompt(12), tree=case)], replace(SETTINGS, attribute=False))
    assert record["verdict"]["modes"]["tree_forked"] == "fail" and record["exit_code"] == 1
    bad = [n["node"] for n in record["cases"][0]["nodes"] if n["tree_forked"]["verdict"] in ("leak", "flip")]
    plan = fault.plan(case)
    assert min(bad) == min(plan.skip_rows) if dtype == "float32" else min(bad) >= min(plan.skip_rows)
    assert f"first node {bad[0]}" in record["cases"][0]["modes"]["tree_forked"]["reason"]


def test_who_deploys_without_forking_asks_for_it():
    settings = replace(SETTINGS, require=("tree_unforked",))
    assert check(small(), ITEMS[:1], settings)["exit_code"] == 1


def _bend(logits):
    logits = logits.clone()
    logits[-1] += torch.linspace(0, 1, logits.shape[-1])
    return logits


def test_a_wrong_linear_is_named_and_the_tree_still_judged_by_its_chain_control():
    host = Faulty(small(), linear=lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]))
    record = check(host, ITEMS[:1], SETTINGS)
    assert record["verdict"]["modes"]["linear"] == "fail" and record["exit_code"] == 1
    assert record["verdict"]["modes"]["tree_forked"] == "pass"
    assert "first node 0" in record["cases"][0]["modes"]["linear"]["reason"]
    # With a wrong fork too nothing is left to judge by when the fault shows on chains as well.
    both = Faulty(host, forked=Wiring("x", state=lambda t: (BLANK, *t.parents[1:])))
    assert check(both, ITEMS[:1], SETTINGS)["verdict"]["modes"]["tree_forked"] == "reference_unusable"


def test_decoding_that_does_not_repeat_itself_judges_nothing():
    host = Faulty(small(), decode=lambda logits, call: _bend(logits) if call % 2 == 0 else logits)
    record = check(host, ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 2 and set(record["verdict"]["modes"].values()) == {"reference_unusable"}
    assert any("does not repeat itself" in reason for reason in record["verdict"]["reasons"])


def test_decoding_that_differs_from_full_forward_passes_judges_nothing():
    host = Faulty(small(), forward=lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]))
    record = check(host, ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 2
    assert any("full forward" in reason for reason in record["verdict"]["reasons"])


def test_a_model_that_does_not_react_is_insensitive():
    """A control that does not leak proves nothing, whatever the forked run says."""
    host = Faulty(small(), unforked=Wiring("quiet"))
    record = check(host, ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 2 and record["verdict"]["modes"]["tree_unforked"] == "insensitive"
    assert record["verdict"]["sensitive"] is False


def test_a_control_that_leaks_elsewhere_proves_nothing_either():
    dropped = Wiring("x", state=lambda t: (BLANK, *range(len(t) - 1)), conv="flat")
    record = check(Faulty(small(), unforked=dropped), ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 2
    assert any("outside the leak law" in reason for reason in record["verdict"]["reasons"])


def test_one_bit_in_a_clean_node_is_seen():
    """Clean nodes of the two wirings must agree bit for bit: no tolerance."""

    def one_bit(logits, tree, wiring):
        if wiring is UNFORKED:
            logits[0, 3] = torch.nextafter(logits[0, 3], torch.tensor(torch.inf))
        return logits

    host = Faulty(small(), logits=one_bit)
    record = check(host, ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 2 and not record["cases"][0]["leak_law"]["clean_bitwise_equal"]
    # An engine that makes no such claim is not held to it.
    host.exact_control = False
    assert check(host, ITEMS[:1], SETTINGS)["exit_code"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_only_models_pass_in_every_mode(family):
    record = check(engine(family), ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 0 and set(record["verdict"]["modes"].values()) == {"pass"}
    assert record["cases"][0]["modes"]["tree_unforked"]["reason"] == "nothing to leak"


def test_a_chain_has_nothing_to_leak():
    record = check(small(), [Item("p", prompt(5), tree=tree("chain", 8))], SETTINGS)
    assert record["exit_code"] == 2 and record["verdict"]["sensitive"] is None
    assert set(record["verdict"]["modes"].values()) == {"pass"}
    assert "no fork was exercised" in record["verdict"]["reasons"][0]
    single = replace(SETTINGS, budgets=(1,), require=("tree_unforked",))
    assert check(small(), ITEMS[:1], single)["exit_code"] == 2
    attention = check(engine("llama"), [Item("p", prompt(5), tree=tree("chain", 8))], SETTINGS)
    assert attention["exit_code"] == 0


@pytest.mark.parametrize(("name", "code"), [("root-only", 2), ("star", 0), ("comb", 0)])
def test_small_and_flat_trees(name, code):
    case = DraftTree((5,), (-1,)) if name == "root-only" else tree(name, 6)
    assert check(small(), [Item("p", prompt(1), tree=case)], SETTINGS)["exit_code"] == code


def test_nan_logits_are_never_within_noise():
    def broken(logits, tree, wiring):
        if wiring is not None and not tree.is_chain:
            logits[-1, 0] = torch.nan
        return logits

    host = Faulty(small(), logits=broken)
    record = check(host, [Item("p", prompt(12), tree=tree("random", 16))], SETTINGS)
    assert record["exit_code"] == 1
    worst = record["cases"][0]["nodes"][-1]["tree_forked"]
    assert worst["max_abs"] is None and worst["verdict"] in ("leak", "flip")


@pytest.mark.parametrize("draft", ["self", "ngram"])
@pytest.mark.parametrize("order", ["heap", "breadth", "depth"])
def test_draft_sources_and_orders(draft, order):
    record = check(small(), ITEMS[:1], replace(SETTINGS, draft=draft, order=order, budgets=(12,)))
    assert record["exit_code"] == 0
    source = record["cases"][0]["tree"]["source"]
    assert 0 < source.pop("expected") <= 12  # nodes that the draft itself expects to be accepted
    assert source == {"draft": draft, "order": order, "seed": 0, "budget": 12}


def test_recorded_marginals_and_trees():
    marginals = Marginals(((3, 4), (5, 6)), ((-0.5, -1.0), (-0.4, -1.2)))
    items = [Item("m", prompt(5), recorded=marginals), Item("t", prompt(5), recorded=tree("kary", 6))]
    record = check(small(), items, replace(SETTINGS, draft="recorded", budgets=(4,)))
    assert record["exit_code"] == 0
    assert record["cases"][0]["tree"]["tokens"][1:] == [3, 5, 4, 5]


def test_self_draft_accepts_as_often_as_asked(monkeypatch):
    """At acceptance 1 the target's greedy text is the first path of the tree; at 0 it leaves it at once."""
    host = small()
    for share, check_paths in ((1.0, lambda a: a["accepted"] >= 1), (0.0, lambda a: a["path"][:2] != [0, 1])):
        record = check(host, ITEMS, replace(SETTINGS, acceptance=share, budgets=(16,)))
        assert all(check_paths(case["acceptance"]["ar"]) for case in record["cases"])


def test_batched_reference_gives_the_same_verdict():
    record = check(small(), ITEMS[:1], replace(SETTINGS, ar="batched"))
    assert record["exit_code"] == 0 and 0 < record["floor"]["batched_against_strict"] < 1e-3
    shaky = Faulty(small(), decode=lambda logits, call: _bend(logits) if call == 2 else logits)
    assert check(shaky, ITEMS[:1], replace(SETTINGS, ar="batched"))["exit_code"] == 2


def test_no_pass_is_wasted(monkeypatch):
    """One prefill, three passes of one row that show the model's sensitivity, each union node decoded once, and per
    case: two controls a leaf path and three tree passes."""
    host, calls = small(), []
    run = type(host)._run

    def counted(self, tokens, *args, **kwargs):
        calls.append(np.shape(tokens))
        return run(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(host), "_run", counted)
    case = tree("random", 16)
    check(host, [Item("p", prompt(5), tree=case)], replace(SETTINGS, exact="off"))
    steps = sum(shape == (1, 1) for shape in calls)
    rows = sum(shape == (1, len(case)) for shape in calls)
    reactions = 3  # all states, none of the recurrence, none of the windows
    assert steps == len(case) + max(case.depth) + 1 + reactions  # every node, and the deepest path once more
    assert rows == 2 * len(case.leaves) + 3
    assert len(calls) == steps + rows + 2  # the prefill and one batch of full forward passes


def test_deterministic(record):
    again = check(small(), ITEMS, TWO)
    assert {k: v for k, v in again.items() if k != "created"} == {k: v for k, v in record.items() if k != "created"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        pytest.param(Item("p", prompt(510)), "context is 512", id="too-long"),
        pytest.param(Item("p", (1, VOCAB)), f"token 1 is {VOCAB}", id="prompt-token"),
        pytest.param(
            Item("p", prompt(3), tree=DraftTree((5, VOCAB), (-1, 0))), f"node 1 has token {VOCAB}", id="tree-token"
        ),
        pytest.param(Item("p", ()), "no tokens", id="empty-prompt"),
    ],
)
def test_input_that_does_not_fit_is_refused(item, says):
    with pytest.raises((UsageError, ValueError), match=says):
        check(small(), [item], SETTINGS)


def test_input_is_refused_before_anything_runs(monkeypatch):
    host = small()
    monkeypatch.setattr(type(host), "_run", lambda *a, **k: pytest.fail("ran a pass"))
    for item in (
        Item("p", prompt(510)),
        Item("p", (1, VOCAB)),
        Item("p", ()),
        Item("p", (1,), tree=DraftTree((5, VOCAB), (-1, 0))),
    ):
        with pytest.raises((UsageError, ValueError)):
            check(host, [item], SETTINGS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budgets": ()}, {"budgets": (0,)}, {"order": "up"}, {"draft": "tea"}, {"acceptance": 1.5}, {"length": 0},
        {"ar": "fast"}, {"controls": 0}, {"require": ()}, {"require": ("ar",)},
    ],
    ids=str,
)  # fmt: skip
def test_settings_name_what_is_wrong(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong)).removesuffix("s")):
        Settings(**wrong)


def test_progress_is_told():
    seen = []
    check(small(), ITEMS, replace(SETTINGS, budgets=(4,)), progress=lambda *step: seen.append(step))
    assert seen == [(0, 2, "p0"), (1, 2, "p1"), (2, 2, "done")]


@pytest.mark.parametrize("limit", [1, 3])
def test_a_sample_of_controls_judges_every_node(limit):
    settings = replace(SETTINGS, controls=limit, budgets=(16,))
    record, whole = (check(small(), ITEMS[:1], s) for s in (settings, replace(settings, controls=None)))
    assert record["exit_code"] == 0
    for few, all_of_them in zip(record["cases"][0]["nodes"], whole["cases"][0]["nodes"], strict=True):
        assert few["linear"] == all_of_them["linear"]  # a mode is never sampled
        assert few["controls"]["chain"] >= all_of_them["controls"]["chain"] or few["controls"]["chain"] > 0
    fault = Faulty(small(), forked=UNFORKED)
    assert check(fault, ITEMS[:1], settings)["exit_code"] == 1


@pytest.mark.parametrize("wiring", ["state=flat", "conv=flat", "mask=flat", "positions=flat"])
def test_one_channel_can_be_the_control(wiring):
    settings = replace(SETTINGS, wiring=wiring)
    record = check(small(), [Item("p", prompt(12), tree=tree("random", 16))], settings)
    assert record["exit_code"] == 0 and record["verdict"]["modes"]["tree_unforked"] == "fail"
    assert record["settings"]["wiring"] == wiring and record["floor"]["library_unforked"] is None
    with pytest.raises(UsageError, match="state='sideways'"):
        replace(SETTINGS, wiring="state=sideways")
    for empty in ("state=tree", "commit=flat"):  # a control that reads nothing wrong would prove nothing
        with pytest.raises(UsageError, match="expected a wrong rule"):
            replace(SETTINGS, wiring=empty)


def test_an_oracle_gives_every_mode_an_error_and_finds_the_outlier():
    host = small()
    exact = make_engine("qwen3_5_text", "float64", "own", **SMALL)
    exact.model.load_state_dict({key: value.double() for key, value in host.model.state_dict().items()})
    record = check(host, ITEMS[:1], SETTINGS, oracle=exact)
    assert record["exit_code"] == 0 and not record["oracle"]["ar_is_the_outlier"]
    assert all(0 < record["oracle"][mode]["max_abs"] < 1e-3 for mode in ("ar", "linear", "tree_forked"))
    assert record["oracle"]["tree_unforked"]["max_abs"] > 0.1
    assert record["cases"][0]["nodes"][3]["oracle"].keys() == {"ar", "linear", "tree_forked", "tree_unforked"}
    # The twin: decoding bent by ten times its own error, while passes over many rows stay right.
    bent = Faulty(host, decode=lambda logits, _: logits + 2e-4 * torch.linspace(-1, 1, logits.shape[-1]))
    assert check(bent, ITEMS[:1], SETTINGS, oracle=exact)["oracle"]["ar_is_the_outlier"]


@pytest.mark.parametrize(("family", "wiring"), [("mamba", "state from zeros"), ("recurrent_gemma", "conv from zeros")])
def test_a_known_failure_excuses_no_other_failure_of_its_mode(family, wiring):
    host = engine(family)
    record = check(host, ITEMS[:1], TWO)
    assert record["verdict"]["modes"]["linear"] == "known_failure" and record["exit_code"] == 0
    assert record["cases"][0]["attribution"] == {}
    other = Faulty(host, linear=lambda logits: logits + 0.5 * torch.linspace(0, 1, logits.shape[-1]))
    record = check(other, ITEMS[:1], TWO)
    reason = record["cases"][0]["modes"]["linear"]["reason"]
    assert record["exit_code"] == 1 and reason.endswith(f"its logits are not those of {wiring}"), reason
    assert record["cases"][0]["attribution"].keys() == {"linear"}
    assert check(other, ITEMS[:1], replace(TWO, attribute=False))["exit_code"] == 0  # nobody looked


def test_known_failures_are_named_and_do_not_turn_the_exit_code(monkeypatch):
    entry = KnownFailure(
        "bent", "transformers", ">=5", ("qwen3_5_text",), "linear", "linear", "bends", "see", "1", "state=flat"
    )
    monkeypatch.setattr("ddtree_check.judge.known.load_known", lambda: (entry,))
    host = Faulty(small(), linear=lambda logits: logits + torch.linspace(0, 1, logits.shape[-1]))
    host.describe = lambda: small().describe() | {"model_type": "qwen3_5_text"}
    unsought = replace(SETTINGS, attribute=False)  # nobody asks whether the logits are those of state=flat
    record = check(host, ITEMS[:1], unsought)
    assert record["verdict"]["modes"] == {"linear": "known_failure", "tree_forked": "pass", "tree_unforked": "fail"}
    assert record["exit_code"] == 0 and "bent: bends" in record["cases"][0]["modes"]["linear"]["reason"]
    assert record["cases"][0]["attribution"] == {}
    healed = Faulty(small())
    healed.describe = host.describe
    record = check(healed, ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 1 and any("no longer fails" in reason for reason in record["verdict"]["reasons"])


def _refuse(host, *wirings):
    """`host`, which says that it cannot run these wirings, and breaks if it is asked to."""
    run = host.verify

    def verify(prefix, tree, wiring):
        assert wiring not in wirings, "asked for what it refused"
        return run(prefix, tree, wiring)

    return Faulty(host, supports=lambda wiring: "no such pass" if wiring in wirings else None, verify=verify)


REFUSED = [
    pytest.param((None,), {"linear": "unsupported", "tree_forked": "pass", "tree_unforked": "fail"}, id="linear"),
    pytest.param((FORKED,), {"linear": "pass", "tree_forked": "unsupported", "tree_unforked": "fail"}, id="forked"),
    pytest.param((UNFORKED,), {"linear": "pass", "tree_forked": "pass", "tree_unforked": "unsupported"}, id="control"),
    pytest.param(
        (None, FORKED),
        {"linear": "unsupported", "tree_forked": "unsupported", "tree_unforked": "reference_unusable"},
        id="linear-and-forked",
    ),
    pytest.param(
        (None, FORKED, UNFORKED), dict.fromkeys(("linear", "tree_forked", "tree_unforked"), "unsupported"), id="all"
    ),
]


@pytest.mark.parametrize(("wirings", "modes"), REFUSED)
def test_what_an_engine_refuses_is_unsupported_and_no_pass(wirings, modes, tmp_path):
    record = check(_refuse(small(), *wirings), ITEMS[:1], SETTINGS)
    assert record["verdict"]["modes"] == modes and record["exit_code"] == 2
    assert any("unsupported" in reason or "without the control" in reason for reason in record["verdict"]["reasons"])
    lost = [mode for mode, verdict in modes.items() if verdict == "unsupported"]
    for case in record["cases"]:
        assert {mode for mode in modes if mode not in case["acceptance"]} == set(lost)
        assert all(set(node[mode].values()) == {None} for node in case["nodes"] for mode in lost)
        assert all(case["modes"][mode]["reason"] == "no such pass" for mode in lost)
    if lost == ["linear"]:  # who cannot run it does not require it
        settings = replace(SETTINGS, require=("tree_forked",))
        assert check(_refuse(small(), *wirings), ITEMS[:1], settings)["exit_code"] == 0
    path = tmp_path / "record.json"
    write_record(path, record)
    for view in ([], ["--case", "p0/8"], ["--case", "p0/8", "--node", "3"]):
        for form in ("table", "markdown", "json", "csv"):
            assert main(["show", str(path), *view, "--format", form]) == 0
    assert main(["tree", str(path), "--case", "p0/8"]) == 0


def test_a_required_control_that_is_refused_is_no_pass():
    settings = replace(SETTINGS, require=("tree_unforked",))
    assert check(_refuse(small(), UNFORKED), ITEMS[:1], settings)["exit_code"] == 2


def _no_forward(paths, keep):
    raise Unsupported("no full forward pass")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_full_forward_pass_rounding_alone_clears_linear(dtype):
    record = check(_blind(dtype), ITEMS[:1], SETTINGS)
    assert record["exit_code"] == 0 and record["floor"]["controls"].keys() == {"pad", "chain"}
    bent = Faulty(_blind(dtype), linear=lambda logits: logits + torch.linspace(0, 4, logits.shape[-1]).to(logits))
    record = check(bent, ITEMS[:1], SETTINGS)
    # Only float32 can condemn it: what bf16 rounds away without a control nobody knows.
    wanted = ("fail", 1) if dtype == "float32" else ("reference_unusable", 2)
    assert (record["verdict"]["modes"]["linear"], record["exit_code"]) == wanted
    assert record["verdict"]["modes"]["tree_forked"] == "pass"


def _blind(dtype):
    host = Faulty(small(dtype))
    host.forward = _no_forward
    return host


def test_a_pass_that_fails_on_the_nodes_of_flat_rows_is_said_to_look_unforked():
    record = check(Faulty(small(), forked=UNFORKED), ITEMS[:1], SETTINGS)
    assert (
        "looks unforked: states or windows read in row order" in record["cases"][-1]["modes"]["tree_forked"]["reason"]
    )
    other = Faulty(small(), forked=Wiring("x", state=lambda t: (BLANK, *t.parents[1:])))
    record = check(other, ITEMS[:1], SETTINGS)
    assert "looks unforked" not in record["cases"][-1]["modes"]["tree_forked"]["reason"]
