"""Many rounds: a right engine gives plain decoding's text, a wrong one leaves it where the fault is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.flows import rounds as module
from ddtree_check.flows.check import Item, Settings
from ddtree_check.flows.rounds import MODES, Ahead, Rounds, attach, generate
from ddtree_check.judge.known import KnownFailure
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.layout import laid_out
from ddtree_check.report.terminal import rounds_blocks
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty, keeps
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.recorded import Marginals
from ddtree_check.tree.paths import first_branch, padded_chain
from tests.models import engine, make_engine, nan_at_the_root, prompt, small, tree

SETTINGS = Settings(budgets=(16,))
ITEMS = [Item("one", prompt(1, 1)), Item("some", prompt(12, 0))]


def plain_text(host, item: Item, count: int) -> list[int]:
    return list(module._plain_text(host, item.tokens, count, frozenset()))


def run(host, items=ITEMS, count: int = 6, settings: Settings = SETTINGS, **rounds) -> dict:
    return generate(host, items, settings, Rounds(count, **rounds))


@pytest.fixture(scope="module")
def right():
    return run(small(), count=8, modes=tuple(MODES), plain=3)


# --- a right engine ---------------------------------------------------------------------------------------------------


def test_forked_rounds_give_plain_decodings_text_and_unforked_ones_do_not(right):
    for mode in ("linear", "tree_forked"):
        found = right["summary"][mode]
        assert (found["off"], found["same_text"], found["agreement"]) == (0, 2, 1.0)
        assert found["drift"]["largest"] < 1e-5 and found["accepted_per_round"] == found["ar_accepted_per_round"] > 1
    leaky = right["summary"]["tree_unforked"]
    assert leaky["off"] > 0 and leaky["same_text"] == 0 and leaky["drift"]["largest"] > 0.1
    assert leaky["accepted_per_round"] is None and leaky["alarm"]
    for prompt_ in right["prompts"]:
        item = next(item for item in ITEMS if item.id == prompt_["id"])
        text = prompt_["modes"]["tree_forked"]["tokens"]
        assert text == plain_text(small(), item, len(text))
        assert len(text) == 1 + sum(found["emitted"] for found in prompt_["modes"]["tree_forked"]["rounds"])


def test_where_the_leak_enters_is_told_apart(right):
    """Logits alone: the stored state stays right. The commit alone: the first round, from a clean state, is right."""
    verify, commit = right["summary"]["leaky_verify"], right["summary"]["leaky_commit"]
    assert verify["off"] > 0 and verify["drift"]["largest"] < 1e-5
    assert commit["off"] > 0 and commit["drift"]["largest"] > 0.1 and commit["first"]["round"] > 0


def test_shadow_notes_what_the_tree_would_have_done_and_keeps_the_text(right):
    shadow = right["summary"]["shadow"]
    assert shadow["off"] > 0 and shadow["same_text"] == 2 and shadow["drift"]["largest"] < 1e-5


def test_plain_steps_stand_between_the_rounds(right):
    for found in right["prompts"][0]["modes"].values():
        assert [r["plain"] for r in found["rounds"]] == [n % 4 == 3 for n in range(8)]
        assert all(r["emitted"] == 1 for r in found["rounds"] if r["plain"])


def test_everything_is_plain_json_and_can_be_shown(right):
    assert json.loads(json.dumps(right, allow_nan=False)) == right
    text = laid_out(rounds_blocks(right), None)
    row = next(line for line in text.splitlines() if line.startswith("tree_unforked"))
    assert "withheld" in row and "0 of 2" in row
    assert "Coverage: of 12 drafted rounds" in text


@pytest.mark.parametrize("family", ["llama", "olmo_hybrid"])
def test_other_families(family):
    found = run(engine(family), ITEMS[1:], 4)
    assert found["summary"]["tree_forked"]["off"] == found["summary"]["linear"]["off"] == 0
    assert (found["summary"]["tree_unforked"]["off"] == 0) == (family == "llama")
    assert any("insensitive" in reason for reason in found["verdict"]["reasons"]) is False


def test_bf16_parts_at_ties_only():
    found = run(small("bfloat16"), count=5, modes=("linear", "tree_forked"))
    assert found["summary"]["tree_forked"]["off"] == found["summary"]["linear"]["off"] == 0


@pytest.mark.parametrize("order", ["breadth", "depth"])
@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_draft_sources_and_orders(draft, order):
    settings = replace(SETTINGS, draft=draft, order=order)
    assert run(small(), ITEMS, 3, settings, modes=("tree_forked",))["summary"]["tree_forked"]["off"] == 0


# --- the ends of a text and of a draft --------------------------------------------------------------------------------


def test_a_text_ends_with_its_end_token_wherever_that_stands():
    host, item = small(), ITEMS[1]
    text = plain_text(host, item, 12)
    for place in (0, 1, 2, 5):  # the root, inside an accepted path, a bonus token
        stop = text[place]
        expected = text[: text.index(stop) + 1]
        found = run(host, [item], 12, modes=("linear", "tree_forked"), stop=frozenset([stop]))["prompts"][0]["modes"]
        for mode in ("linear", "tree_forked"):
            assert found[mode]["tokens"] == expected and found[mode]["ended"] == "end of text", (place, mode)
            assert found[mode]["same_text"]


def test_a_tree_is_no_deeper_than_the_context_has_room():
    host = make_engine("qwen3_5_text", max_position_embeddings=24)
    seen = []
    verify = host.verify

    def watched(prefix, case, wiring):
        seen.append(prefix.length + max(case.depth))
        return verify(prefix, case, wiring)

    host.verify = watched
    found = run(host, ITEMS[1:], 30, replace(SETTINGS, acceptance=1.0))
    assert max(seen) == 23  # the last position, and none after it
    for mode in ("linear", "tree_forked"):
        run_ = found["prompts"][0]["modes"][mode]
        assert run_["ended"] == "context full" and len(run_["tokens"]) == 24 - 12 + 1 and run_["same_text"]
    with pytest.raises(UsageError, match="prompt p: 24 tokens leave no room; the model's context is 24"):
        run(host, [Item("p", prompt(24))])


def test_an_empty_draft_is_a_plain_step(monkeypatch):
    monkeypatch.setattr(module, "draft_tree", lambda table, settings, budget, root: DraftTree((root,), (-1,)))
    found = run(small(), ITEMS[1:], 5)
    for mode in found["summary"]:
        assert found["prompts"][0]["modes"][mode]["tokens"] == plain_text(small(), ITEMS[1], 6)
    assert found["exit_code"] == 2 and any("not exercised: 0%" in reason for reason in found["verdict"]["reasons"])


def test_recorded_marginals_go_on_and_a_fixed_tree_does_not():
    marginals = Marginals(((3, 4), (5, 6)), ((-0.5, -1.0), (-0.4, -1.2)))
    found = run(small(), [Item("m", prompt(5), recorded=marginals)], 3, modes=("tree_forked",))
    assert found["summary"]["tree_forked"]["off"] == 0
    with pytest.raises(UsageError, match="got one fixed tree, expected a draft that goes on"):
        run(small(), [Item("t", prompt(5), tree=tree("kary", 6))])


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_commit_by_accepted_length_leaves_the_text_after_a_side_branch():
    fault = keeps(inject.wired(commit="flat"), "recurrent")
    found = run(Faulty(small(), commit=fault), count=8, modes=("tree_forked",))
    forked = found["summary"]["tree_forked"]
    assert found["exit_code"] == 1 and forked["off"] > 0 and forked["drift"]["largest"] > 0.01
    first = forked["first"]
    before = next(p for p in found["prompts"] if p["id"] == first["prompt"])["modes"]["tree_forked"]["rounds"]
    assert first["round"] > 0 and before[first["round"] - 1]["drift"] > 0.01
    reason = next(reason for reason in found["verdict"]["reasons"] if "tree_forked" in reason)
    assert reason.startswith("rounds: tree_forked: fail (") and f"round {first['round']}" in reason


def test_a_slot_from_before_the_accept_shows_in_plain_steps_only():
    host = inject.stale_slots(small())
    assert run(host, count=6, modes=("tree_forked",))["summary"]["tree_forked"]["off"] == 0
    found = run(host, count=6, modes=("tree_forked",), plain=1)
    off = [r for p in found["prompts"] for r in p["modes"]["tree_forked"]["rounds"] if r["parted"]]
    assert off and off[0]["plain"] and found["exit_code"] == 1


def _agrees(logits, case, wiring):
    """Logits that put the first child first: whatever was drafted is accepted."""
    for node, children in enumerate(case.children):
        if children:
            logits[node, case.tokens[children[0]]] += 100
    return logits


def test_an_acceptance_that_is_too_good_is_an_alarm():
    host = Faulty(small(), logits=_agrees)
    found = run(host, count=4, settings=replace(SETTINGS, acceptance=0.3))["summary"]["tree_forked"]
    assert found["moved_per_round"] > 0 and found["alarm"].startswith("accepts more than plain decoding would")
    assert found["accepted_per_round"] is found["tokens_per_round"] is None


def test_logits_that_are_not_finite_are_off_and_no_tie():
    host = Faulty(small(), logits=nan_at_the_root)
    found = run(host, ITEMS[1:], 2, modes=("tree_forked",))
    assert found["exit_code"] == 1 and found["summary"]["tree_forked"]["ties"] == 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert any("margin not finite" in reason for reason in found["verdict"]["reasons"])


def test_a_lost_position_is_a_drift_without_a_number():
    host = Faulty(small(), commit=lambda _, verified, node, right: replace(right, length=right.length - 1))
    assert run(host, ITEMS[1:], 2, modes=("tree_forked",))["summary"]["tree_forked"]["drift"]["largest"] is None


def test_a_known_failure_of_the_library_is_named_and_no_defect(monkeypatch):
    entry = KnownFailure(
        "bent", "transformers", ">=5", ("qwen3_5_text",), "linear", "linear", "bends", "see", "1", "state=flat"
    )
    host = Faulty(small(), linear=lambda logits: logits.flip(-1))
    assert run(host, ITEMS[1:], 2)["exit_code"] == 1
    monkeypatch.setattr("ddtree_check.judge.known.load_known", lambda: (entry,))
    found = run(host, ITEMS[1:], 2)
    assert found["exit_code"] != 1 and found["verdict"]["reasons"][0].startswith("rounds: linear: known_failure (")


def test_a_control_that_never_leaves_the_text_proves_nothing():
    host = Faulty(small(), unforked=FORKED)
    found = generate(host, ITEMS[1:], SETTINGS, Rounds(3))
    assert found["exit_code"] == 2 and any("insensitive" in reason for reason in found["verdict"]["reasons"])


def test_a_required_mode_that_did_not_run_is_inconclusive():
    found = run(small(), ITEMS[1:], 2, modes=("tree_forked",))
    assert found["exit_code"] == 2 and "rounds: linear: not_run" in found["verdict"]["reasons"]


# --- one verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "two", "both"), [(0, 0, 0), (0, 1, 1), (2, 1, 1), (1, 2, 1), (0, 2, 2), (2, 0, 2)])
def test_a_defect_counts_before_what_is_inconclusive(one, two, both):
    record = {"exit_code": one, "verdict": {"text": "", "reasons": ["a"], "modes": {}}}
    joined = attach(record, "rounds", {"exit_code": two, "verdict": {"text": "", "reasons": ["b"]}})
    assert joined["exit_code"] == both and joined["verdict"]["reasons"] == ["a", "b"]
    assert joined["verdict"]["text"] == ("pass", "fail", "inconclusive")[both]


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"plain": -1}, {"modes": ("ar",)}, {"modes": ()}], ids=str)
def test_settings_name_what_is_wrong(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Rounds(**wrong)


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_after_its_whole_lines(tmp_path):
    path, host = tmp_path / "run.jsonl", Faulty(small())
    rounds = Rounds(2, ("tree_forked",))
    whole = generate(host, ITEMS, SETTINGS, rounds, journal=path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])  # killed in the midst of the second prompt's line
    passes = []
    verify = host.verify
    host.verify = lambda *given: passes.append(1) or verify(*given)
    assert generate(host, ITEMS, SETTINGS, rounds, journal=path) == whole
    assert path.read_bytes() == b"".join(lines) and len(passes) == 2  # the rounds of one prompt
    path.write_bytes(lines[0][:20])  # killed in the midst of the head
    assert generate(host, ITEMS, SETTINGS, rounds, journal=path) == whole
    with pytest.raises(UsageError, match="belongs to a run with other settings"):
        generate(host, ITEMS, SETTINGS, Rounds(3, ("tree_forked",)), journal=path)
    path.write_bytes(b"no json\n")
    with pytest.raises(UsageError, match=r"run\.jsonl:1: .*expected JSON"):
        generate(host, ITEMS, SETTINGS, rounds, journal=path)
    with pytest.raises(UsageError, match="cannot be written"):
        generate(host, ITEMS, SETTINGS, rounds, journal=tmp_path / "none" / "run.jsonl")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_looking_ahead_is_plain_decoding_from_wherever_the_text_went():
    host = small()
    ahead = Ahead(host, host.prefill(prompt(5)), 7)
    ahead.row(4)
    greedy = [int(ahead.row(k).argmax()) for k in range(3)]
    ahead.advance([7, greedy[0], 99], 3)  # along the greedy text, off it, and another root
    fresh = host.decode(host.prefill([*prompt(5), 7, greedy[0], 99]), DraftTree.chain([3]))
    assert torch.allclose(ahead.row(0), fresh[0], atol=1e-4)


def test_the_first_branch():
    case = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2))
    assert first_branch(case) == (0, 1, 3) and padded_chain(case, (0, 1, 3)) == DraftTree.chain([1, 2, 4])
    assert first_branch(DraftTree((1,), (-1,))) == (0,)


# --- engines that refuse a wiring, or pick tokens themselves ----------------------------------------------------------


def test_a_mode_whose_wiring_is_refused_is_unsupported_and_the_others_go_on():
    host = Faulty(small(), supports=lambda wiring: "no links here" if wiring is UNFORKED else None)
    found = run(host, ITEMS[1:], 2, modes=("tree_forked", "tree_unforked", "leaky_commit"))
    assert found["unsupported"] == {"tree_unforked": "no links here", "leaky_commit": "no links here"}
    assert set(found["summary"]) == set(found["prompts"][0]["modes"]) == {"tree_forked"}
    assert found["summary"]["tree_forked"]["off"] == 0
    assert not any("no links here" in reason for reason in found["verdict"]["reasons"])  # they are not required
    assert "tree_unforked: unsupported (no links here)" in rounds_blocks(found)
    required = replace(SETTINGS, require=("tree_unforked",))
    found = run(host, ITEMS[1:], 1, required, modes=("tree_unforked",))
    assert (
        found["exit_code"] == 2 and "rounds: tree_unforked: unsupported (no links here)" in found["verdict"]["reasons"]
    )


def test_a_commit_that_is_refused_takes_its_mode_alone():
    def commit(_, verified, node, right):
        if verified.plan is None:
            return right
        raise Unsupported("no commit of a tree")

    found = run(Faulty(small(), commit=commit), ITEMS[1:], 1, modes=("linear", "tree_forked"))
    assert found["unsupported"] == {"tree_forked": "no commit of a tree"} and set(found["summary"]) == {"linear"}
    assert found["exit_code"] == 2 and found["summary"]["linear"]["off"] == 0


def test_an_engine_that_refuses_its_own_pass_and_full_passes_still_tells_a_leak():
    def forward(paths, keep):
        raise Unsupported("no full pass")

    host = Faulty(small(), supports=lambda wiring: "no" if wiring is None else None, forward=None)
    host.__dict__["forward"] = forward
    found = run(host, ITEMS, 4, modes=("tree_forked", "tree_unforked"))
    assert found["summary"]["tree_forked"]["off"] == 0 and found["summary"]["tree_unforked"]["off"] > 0


@pytest.mark.parametrize(("place", "off"), [(0, False), (1, True)])
def test_tokens_that_the_engine_takes_itself_decide_its_rounds(place, off):
    host = Faulty(small(), chosen=inject.takes(place, "tree_forked"))
    found = run(host, ITEMS[1:], 2, modes=("tree_forked",))
    assert bool(found["summary"]["tree_forked"]["off"]) == off
    assert not off or found["summary"]["tree_forked"]["first"]["margin"] > 0
