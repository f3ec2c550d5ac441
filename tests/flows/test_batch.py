"""Requests in one pass: a right engine gives each what it gets alone, and every mix-up goes red where it is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.engines.transformers import batches as batched
from ddtree_check.engines.transformers import engine as transformers
from ddtree_check.engines.transformers.adapters import gated_delta
from ddtree_check.flows import batch as module
from ddtree_check.flows.batch import batch_runs, compositions
from ddtree_check.flows.check import Item, Settings
from ddtree_check.judge.commit import compare_contents
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.layout import laid_out
from ddtree_check.report.terminal import batch_blocks
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import engine, make_engine, make_small, off, prompt, small, states_of_next, tree
from tests.own_engine import Least

ITEMS = [
    Item(name, prompt(length, place)) for place, (name, length) in enumerate((("some", 9), ("one", 1), ("long", 21)))
]
SETTINGS = Settings(budgets=(9, 6), length=4)
FORKED_ONLY = Settings(budgets=(9, 6), length=4, require=("tree_forked",))
BOTH = [pytest.param(padding, id=padding) for padding in module.PADDINGS]
DELTA = [0, 1, 2]  # of the small Qwen3.5's four layers; 3 is attention


def run(host, sizes=(2,), items=ITEMS[:2], settings=FORKED_ONLY) -> dict:
    return batch_runs(host, items, settings, sizes)


def where(found: dict, *names: str) -> set:
    """What the findings name."""
    return {tuple(finding[name] for name in names) for finding in found["findings"]}


# --- the passes -------------------------------------------------------------------------------------------------------


def apart(host, a, b) -> float:
    """Largest difference of two contents, relative to the size of each part."""
    parts = compare_contents(host.contents(a), host.contents(b), torch.float32)
    return max(part.error / (part.size or 1) for part in parts)


@pytest.mark.parametrize("padding", BOTH)
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_text",
        "lfm2",
        "gemma3_text",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("zamba2", "falcon_h1", "mamba2", "olmo_hybrid")),
    ],
)
def test_several_requests_are_each_as_alone(family, padding):
    host = engine(family)
    batches, prefixes = host.batches(), [host.prefill(item.tokens) for item in ITEMS]
    trees = [tree("random", 12, seed=1), tree("comb", 7, seed=2), tree("chain", 3, seed=3)]
    for wiring in (FORKED, UNFORKED, None):
        found = batches.verify(prefixes, trees, wiring, padding=padding, idle=1, rows=15)
        for prefix, case, verified in zip(prefixes, trees, found, strict=True):
            alone = host.verify(prefix, case, wiring)
            assert verified.logits.shape == alone.logits.shape
            assert (off(verified.logits, alone.logits) <= 1e-4 * alone.logits.std(-1)).all()
            for node in (0, len(case) - 1):
                assert apart(host, host.commit(alone, node), host.commit(verified, node)) < 1e-3
    if family == "falcon_h1":  # a known failure of its one-token step
        return
    found = batches.step(prefixes, [3, 4, 5], padding=padding)
    for prefix, token, (logits, after) in zip(prefixes, (3, 4, 5), found, strict=True):
        alone, right = host.step(prefix, token)
        assert off(logits[None], alone[None]) <= 1e-4 * alone.std() and apart(host, right, after) < 1e-3


@pytest.mark.parametrize("padding", BOTH)
@pytest.mark.parametrize("count", [1, 3])
def test_prompts_are_prefilled_together(padding, count):
    host = small()
    prompts = [item.tokens for item in ITEMS[:count]]
    found = host.batches().prefill(prompts, padding=padding, width=30)
    for text, prefix in zip(prompts, found, strict=True):
        alone = host.prefill(text)
        assert prefix.length == len(text) and apart(host, alone, prefix) < 1e-3
        assert off(prefix.logits[None], alone.logits[None]) <= 1e-4 * alone.logits.std()


def test_rows_move_and_fork_bit_for_bit():
    host = small()
    prefixes = [host.prefill(item.tokens) for item in ITEMS]
    for place, found in zip((2, 0, 0, 1), host.batches().reorder(prefixes, (2, 0, 0, 1)), strict=True):
        assert apart(host, prefixes[place], found) == 0 and found.length == prefixes[place].length


@pytest.mark.parametrize(
    ("family", "says"), [("zamba", "mamba1"), ("recurrent_gemma", "griffin_block"), ("minimax", "lightning")]
)
def test_what_takes_one_request_at_a_time_is_not_run(family, says):
    found = run(engine(family))
    assert found["exit_code"] == 2 and found["checks"] == found["findings"] == []
    (reason,) = found["verdict"]["reasons"]
    assert reason.startswith("batch: not_run: ") and says in reason
    assert batch_blocks(found) == [f"Batches: not_run: {found['not_run']}"]


def test_an_engine_that_knows_of_no_batches_is_not_run():
    found = run(Least())
    assert found["exit_code"] == 2 and found["not_run"] == "the engine Least runs one request a pass"


# --- a right engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_5_text", "float32"),
        pytest.param("qwen3_5_text", "bfloat16", marks=pytest.mark.slow),
        ("llama", "float32"),
    ],
)
def test_a_right_engine_passes_every_check(family, dtype):
    found = batch_runs(engine(family, dtype), ITEMS, SETTINGS, (1, 3))
    assert found["exit_code"] == 0 and found["findings"] == [], found["verdict"]["reasons"]
    ran = {(check["check"], check["size"]) for check in found["checks"]}
    assert ran == {(check, size) for check in module.CHECKS for size in (1, 3)} - {("reorder", 1)}
    assert all(check["compared"] > 0 and check["off"] == 0 for check in found["checks"])
    assert found["coverage"] == {"groups": 4, "unequal_lengths": 1, "shortest": 1, "longest": 21}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    text = laid_out(batch_blocks(found), None)
    assert "Coverage of batches: 4 groups, 1 of unequal lengths, prompts of 1 to 21 tokens." in text


def test_every_request_meets_shorter_and_longer_partners_in_both_orders():
    names = {made.name: made.places for made in compositions(4)}
    assert names["in order"] == (0, 1, 2, 3) and names["in reverse"] == (3, 2, 1, 0)
    pairs = {made.places for made in compositions(4) if len(made.places) == 2}
    assert {place for pair in pairs if pair[0] == 0 for place in pair} == {0, 1, 2, 3}
    assert {place for pair in pairs if pair[0] == 3 for place in pair} == {1, 2, 3}


@pytest.mark.parametrize("sizes", [(3,), (0,), (True,), ("2",)], ids=str)
def test_a_size_without_prompts_is_refused(sizes):
    with pytest.raises(UsageError, match=r"batch: got .*, expected numbers from 1 to 2, the number of prompts"):
        run(engine("llama"), sizes)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "channel"), [(0, "recurrent"), pytest.param(2, "recurrent", marks=pytest.mark.slow), (1, "conv")]
)
def test_a_neighbours_state_is_named_by_request_node_layer_and_channel(layer, channel):
    host = engine("qwen3_5_text")
    wrong = inject.batched(host, verify=states_of_next(host, channel, layer=layer))
    found = run(wrong)
    verify = [finding for finding in found["findings"] if finding["check"] == "verify"]
    assert found["exit_code"] == 1 and {finding["request"] for finding in verify} == {"some", "one"}
    assert {(f["node"], f["layer"], f["channel"]) for f in verify} == {(0, layer, channel)}
    assert where(found, "check") == {("verify",), ("commit",)}  # prefill, step, reorder, canary and again stay green
    # The copies of a request have its own state beside them.
    assert not any("beside" in finding["composition"] for finding in found["findings"])
    assert run(wrong, (1,))["exit_code"] == 0


def test_one_requests_gate_for_all_spares_the_first(monkeypatch):
    """In the library's own pass: the tree path and whoever stands first are right."""
    host = make_small()
    right = host._module.torch_chunk_gated_delta_rule

    def first_gate(*args, g, **kwargs):
        return right(*args, g=g[:1].expand_as(g), **kwargs)

    monkeypatch.setattr(host._module, "torch_chunk_gated_delta_rule", first_gate)
    found = run(host, settings=SETTINGS)
    verify = [finding for finding in found["findings"] if finding["check"] == "verify"]
    assert found["exit_code"] == 1 and {finding["mode"] for finding in verify} == {"linear"}
    group = ["one", "some"]  # the shortest first
    for made in compositions(2):
        hit = {finding["request"] for finding in verify if finding["composition"] == made.name}
        assert hit == {group[place] for place in made.places[1:]}, made.name
    assert {finding["node"] for finding in verify} == {0}


@pytest.mark.slow
def test_the_same_in_our_tree_path(monkeypatch):
    def first_gate(swap, *args, g, **kwargs):
        return gated_delta.rows(swap, *args, g=g[:1].expand_as(g), **kwargs)

    monkeypatch.setitem(transformers.ADAPTERS, "gated_delta", first_gate)
    found = run(make_small())
    assert {(f["layer"], f["channel"]) for f in found["findings"] if f["check"] == "verify"} == {(0, "recurrent")}


def test_an_idle_row_that_writes_a_live_slot_is_named_with_the_slot():
    host, pool = engine("qwen3_5_text"), []

    def prefill(tokens):
        pool.append(host.prefill(tokens))
        return pool[-1]

    def writes(right, prefixes, trees, wiring, **how):
        found = right(prefixes, trees, wiring, **how)
        if how.get("idle") and len(prefixes) > 1:
            batch = [prefix.cache for prefix in prefixes]
            next(prefix for prefix in pool if prefix.cache not in batch).cache.layers[1].recurrent_states[0].zero_()
        return found

    found = run(inject.batched(Faulty(host, prefill=prefill), verify=writes))
    (finding,) = found["findings"]
    assert found["exit_code"] == 1 and finding["request"] == module.OUTSIDER
    assert (finding["check"], finding["layer"], finding["channel"]) == ("canary", 1, "recurrent")
    assert finding["composition"] == "verify, an idle request"
    assert finding["says"] == (
        f"slot of request {finding['request']}, which is not in the batch: recurrent of layer 1 changed"
    )


def test_rows_that_move_without_their_recurrent_states():
    host = engine("qwen3_5_text")
    found = run(inject.batched(host, reorder=inject.left_behind(host, "recurrent")), (3,), ITEMS)
    assert found["exit_code"] == 1 and where(found, "check") == {("reorder",)}
    assert where(found, "composition") == {("permuted",), ("forked",)}  # rows that keep their place are right: greedy
    assert where(found, "layer", "channel") == {(0, "recurrent")}
    assert all("recurrent of layer 0 1 2 off" in finding["says"] for finding in found["findings"])
    row = next(f for f in found["findings"] if f["composition"] == "permuted" and f["request"] == "long")
    assert row["says"].startswith("row 0: ") and row["says"].endswith("it is request one's")


def test_padding_that_is_ignored_in_a_batch_of_one_only(monkeypatch):
    host = make_engine("qwen3_5_text")
    right = host._module.apply_mask_to_padding_states

    def ignored(hidden_states, attention_mask):
        return hidden_states if len(hidden_states) == 1 else right(hidden_states, attention_mask)

    monkeypatch.setattr(host._module, "apply_mask_to_padding_states", ignored)
    found = run(host, (1,))
    assert found["exit_code"] == 1
    assert where(found, "check", "composition", "size") == {("prefill", "padded on the left", 1)}
    assert where(found, "request", "layer") == {("some", 0), ("one", 0)}
    for finding in found["findings"]:
        assert "recurrent of layer 0 1 2 off" in finding["says"] and "its logits are off" in finding["says"]
        assert "from token 0 on by the keys of layer 3" in finding["says"]
    short = next(finding for finding in found["findings"] if finding["request"] == "one")
    assert "conv of layer 0 1 2 off" in short["says"]  # of the longer prompt the window has moved past the padding
    assert run(host, (2,))["exit_code"] == 0


def test_padding_that_attention_sees_hits_who_is_padded(monkeypatch):
    host = make_small()
    right = host._masks

    def open_columns(seen, padding=None):
        def everything(layer, window):
            found = seen(layer, window)
            found[:, :, : found.shape[2] - found.shape[1]] = True
            return found

        return right(everything, padding)

    monkeypatch.setattr(host, "_masks", open_columns)
    found = run(host, (2,))
    verify = [finding for finding in found["findings"] if finding["check"] == "verify"]
    assert {finding["request"] for finding in verify} == {"one"}
    assert {finding["composition"] for finding in verify} >= {"in order", "in reverse", "padded on the right"}
    assert {(finding["node"], finding["channel"]) for finding in verify} == {(0, None)}
    assert all("behind the last layer that stores" in finding["says"] for finding in verify)


def test_state_that_is_kept_outside_of_a_prefix_shows_when_a_runs_again():
    host = small()
    left = [0.0]

    def verify(prefix, case, wiring):
        found = host.verify(prefix, case, wiring)
        found.logits = found.logits + left[0]
        left[0] = 1e-5 * prefix.length
        return found

    found = run(Faulty(host, verify=verify))
    assert found["exit_code"] == 1 and where(found, "check") == {("again",)}
    (finding,) = found["findings"]
    assert finding["request"] == "one" and finding["node"] == 0
    assert "state is kept outside of its Prefix" in finding["says"]


def test_another_order_of_sums_is_explained_by_the_width_and_nothing_above_it():
    host, size = small(), 3e-3

    def jittered(size, logits):
        draw = torch.Generator().manual_seed(0)
        return logits + size * (2 * torch.rand(logits.shape[-1], generator=draw) - 1)

    def noisy(size):
        """As soon as a pass has more than one request; equal for all, and the same in every run."""

        def verify(right, prefixes, trees, wiring, **how):
            found = right(prefixes, trees, wiring, **how)
            wide = len(prefixes) + how.get("idle", 0) > 1
            return [replace(v, logits=jittered(size, v.logits)) for v in found] if wide else found

        return verify

    wide = Faulty(host, forward=lambda logits: jittered(size, logits) if len(logits) > 1 else logits)
    explained = run(inject.batched(wide, verify=noisy(size)))
    assert explained["exit_code"] == 0 and explained["findings"] == [], explained["verdict"]["reasons"]
    (check,) = (c for c in explained["checks"] if c["check"] == "verify")
    assert size / 2 < check["largest"] <= check["floor"]
    alone = run(inject.batched(host, verify=noisy(size)))
    assert alone["exit_code"] == 1  # the same, where the width alone costs nothing
    above = run(inject.batched(wide, verify=noisy(100 * size)))
    assert above["exit_code"] == 1 and where(above, "check") == {("verify",)}


def test_a_pass_that_breaks_down_or_is_refused_is_found():
    def breaks(right, *args, **kwargs):
        raise RuntimeError("sizes of tensors\nmust match")

    def refuses(right, *args, **kwargs):
        raise Unsupported("no steps of several requests")

    found = run(inject.batched(small(), step=breaks))
    assert found["exit_code"] == 1 and where(found, "check", "request") == {("step", "all")}
    assert "the pass broke down: RuntimeError: sizes of tensors must match" in found["verdict"]["reasons"][0]
    found = run(inject.batched(small(), step=refuses))
    assert found["exit_code"] == 2 and where(found, "verdict") == {("unsupported",)}
    assert found["verdict"]["reasons"][0].startswith("batch: unsupported: step, batch of 2")


@pytest.mark.parametrize("number", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_what_is_not_finite_is_never_within(number):
    def verify(right, prefixes, trees, wiring, **how):
        found = right(prefixes, trees, wiring, **how)
        found[-1].logits = found[-1].logits.clone()
        found[-1].logits[2, 7] = number
        return found

    found = run(inject.batched(small(), verify=verify))
    assert found["exit_code"] == 1 and where(found, "node", "error") == {(2, None)}
    assert json.dumps(found, allow_nan=False)


# --- what libraries do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "zamba2"])
def test_left_padding_still_comes_through_a_bias(family):
    """The sight of `padding-through-bias`; one that is mended: take it out of known_failures.toml."""
    host = engine(family, "float64")
    alone, (padded,) = host.prefill(prompt(9)), host.batches().prefill([prompt(9)], width=14)
    assert off(padded.logits[None], alone.logits[None]) > 1e-3 * alone.logits.std()


def test_a_known_failure_is_named_and_does_not_turn_the_run_red():
    found = run(engine("bamba"), (1,))
    assert found["exit_code"] == 0 and where(found, "verdict") == {("known_failure",)}
    assert where(found, "check", "composition") == {("prefill", "padded on the left")}
    assert found["verdict"]["reasons"][0].startswith("batch: known_failure: prefill, batch of 1, padded on the left")
    assert "padding-through-bias" in found["verdict"]["reasons"][0]


def test_filled_trees_keep_their_nodes():
    case = tree("random", 6)
    filled = batched._filled(case, 11)
    assert (filled.tokens[:7], filled.parents[:7]) == (case.tokens, case.parents)
    assert filled.parents[7:] == (6, 7, 8, 9) and batched._filled(case, 7) == case
    assert DraftTree.chain([1, 2]) == batched._filled(DraftTree.chain([1, 2]), 2)
