"""A red verdict says where the fault is: by channel, layer, kind and dose, and less where the engine shows less."""

from __future__ import annotations

import functools
import html
from dataclasses import replace

import numpy as np
import pytest

from ddtree_check.base.errors import Unsupported
from ddtree_check.engines.checked import complete
from ddtree_check.flows import attribution
from ddtree_check.flows.attribution import attribute
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.controls import chain_run
from ddtree_check.judge.attribution import Entry
from ddtree_check.judge.rule import Rule
from ddtree_check.model.wiring import BLANK, FORKED, UNFORKED, Wiring
from ddtree_check.report.html import render as page
from ddtree_check.report.layout import laid_out
from ddtree_check.report.terminal import case_blocks, node_blocks
from ddtree_check.report.views import render
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty, keeps
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import engine, prompt

# 0 ─┬─ 1 ── 2 ── 3
#    ├─ 4 ─┬─ 5 ── 6
#    │     └─ 7
#    └─ 8 ── 9
TREE = DraftTree((5, 11, 12, 13, 21, 22, 23, 24, 31, 32), (-1, 0, 1, 2, 0, 4, 5, 4, 0, 8))
RULE = Rule()


@functools.cache
def right(family: str, dtype: str = "float32"):
    """An engine, its prefix, plain decoding, and the floors of a tree pass and of chains."""
    host = engine(family, dtype)
    prefix = host.prefill(prompt(12))
    reference = host.decode(prefix, TREE)
    runs = [chain_run(host, prefix, TREE, reference, wiring)[0] for wiring in (None, FORKED)]
    floor = RULE.floor([run.max_abs for run in runs], runs[0].ulp)
    return host, prefix, reference, floor, RULE.chain_floor([runs[0].max_abs], runs[0], dtype)


def hunt(make, family: str = "qwen3_5_text", dtype: str = "float32", mode: str = "tree_forked", wiring=FORKED):
    host, prefix, reference, floor, chain_floor = right(family, dtype)
    used = chain_floor if wiring is None else floor
    return attribute(make(host), prefix, TREE, mode, wiring, reference, used, RULE, dtype)


def forked(wiring):
    wrong = Wiring.parse(wiring) if isinstance(wiring, str) else wiring
    return lambda host: Faulty(host, forked=wrong)


@pytest.mark.parametrize(
    ("wiring", "node", "layer", "channel", "source", "says"),
    [
        ("state=flat", 4, 0, "state", 3, "layer 0 (gated delta, state) at node 4, whose state came from node 3"),
        ("conv=flat", 4, 0, "conv", 3, "at node 4, whose window came from node 3"),
        ("mask=flat", 4, 3, "mask", 1, "enters at layer 3 (attention, attention mask) at node 4, which sees node 1"),
        ("positions=flat", 4, 3, "positions", 4, "which stands at 4 instead of 1"),
        ("state=flat,conv=flat", 4, 0, "state and conv", 3, "attention clean"),
        (inject.moved_edge("state", 6, 4), 6, 0, "state", 4, "whose state came from node 4"),
        (inject.moved_edge("conv", 6, 0), 6, 0, "conv", 0, "whose window came from node 0"),
        (inject.moved_edge("mask", 6, 5), 6, 3, "mask", 5, "which does not see node 5"),
        (inject.dropped("state"), 0, 0, "state", BLANK, "whose state came from zeros"),
    ],
)  # fmt: skip
def test_a_wrong_wiring_is_named_by_channel_layer_and_node(wiring, node, layer, channel, source, says):
    found = hunt(forked(wiring))
    entry = found.entry
    assert (entry.node, entry.layer, entry.channel, entry.source) == (node, layer, channel, source)
    assert says in found.text and found.explained is not None
    off = set(channel.split(" and "))
    assert {name: state for name, state in found.channels.items()} == {
        name: "off" if name in off else "clean" for name in ("state", "conv", "mask", "positions")
    }
    assert not found.shape and found.growth[node] > 0
    # One value for the input and for each layer: nothing before the layer that it enters by, something at the end.
    assert len(found.profile) == 1 + len(engine("qwen3_5_text").layers)
    assert max(found.profile[: layer + 1]) < 1e-5 < found.profile[-1]


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("kimi_linear", "minimax")]


@pytest.mark.parametrize("family", ["bamba", *SLOW])
def test_other_mixers(family):
    found = hunt(forked("state=flat"), family)
    assert (found.entry.node, found.entry.layer, found.entry.channel) == (4, 0, "state")
    assert f"({found.entry.kind.replace('_', ' ')}, state)" in found.text


def test_bf16():
    found = hunt(forked("state=flat"), dtype="bfloat16")
    assert (found.entry.node, found.entry.layer, found.entry.channel) == (4, 0, "state")


def test_one_layer_alone_is_found_by_its_output():
    found = hunt(lambda host: Faulty(host, around=inject.blended(Wiring.parse("state=flat"), layer=1)))
    assert (found.entry.node, found.entry.layer, found.entry.channel, found.explained) == (4, 1, "output", None)
    assert min(found.first.values()) == 1 and found.channels["mask"] == "clean"


def test_the_head_and_the_input():
    head = inject.hooked(lambda name, _: name.endswith("lm_head"), lambda m, a, out: out.roll(1, -1))
    found = hunt(lambda host: Faulty(host, around=head))
    assert found.entry.channel == "head" and "behind the last layer" in found.text
    rows = inject.hooked(lambda name, _: name.endswith("embed_tokens"), lambda m, a, out: out.roll(1, 1))
    found = hunt(lambda host: Faulty(host, around=inject.branching(rows)))
    assert found.entry.channel == "input" and "the rows are not the tree's tokens" in found.text


def test_a_row_that_is_sent_to_other_experts():
    def reroute(module, args, output):
        logits, weights, chosen = output
        chosen = chosen.clone()
        chosen[6] = (chosen[6] + 1) % 4
        return logits, weights, chosen

    router = inject.branching(inject.hooked(lambda name, _: name.endswith("layers.1.mlp.gate"), reroute))
    found = hunt(lambda host: Faulty(host, around=router), "qwen3_5_moe_text")
    assert (found.entry.node, found.entry.layer, found.entry.channel) == (6, 1, "routing")


def test_linear_is_looked_into_along_its_chains():
    found = hunt(lambda host: Faulty(host, own=inject.dropped("state")), mode="linear", wiring=None)
    assert (found.entry.node, found.entry.layer, found.entry.channel, found.entry.source) == (0, 0, "state", BLANK)
    gate = inject.altered("gated_delta", inject.gate_of_first_row("g"))
    found = hunt(lambda host: Faulty(host, around=gate), mode="linear", wiring=None)
    assert (found.entry.node, found.entry.layer, found.entry.channel) == (1, 0, "state")


def test_a_captured_step_belongs_to_its_size():
    def make(host):
        wrong = inject.captured(host, "state", "conv")
        wrong.verify(host.prefill(prompt(5)), DraftTree(TREE.tokens, (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4)), FORKED)
        return wrong

    found = hunt(make)
    assert found.shape and "right with one more row: it belongs to this size" in found.text


def test_the_control_is_known_and_a_right_pass_has_nothing_to_find():
    found = hunt(lambda host: host, mode="tree_unforked", wiring=UNFORKED)
    assert found.entry.channel == "state and conv" and found.channels["mask"] == "clean"
    assert hunt(lambda host: host).nodes == 0


def test_an_engine_that_shows_no_layers_leaves_more_to_guess():
    class Blind(Faulty):
        def __getattr__(self, name):
            if name == "watch":
                raise AttributeError(name)
            return super().__getattr__(name)

    found = hunt(lambda host: complete(Blind(host, forked=Wiring.parse("state=flat"))))
    assert found.entry.layer is None and found.entry.channel == "state" and found.first == {}
    assert "the engine shows no layer outputs" in found.text and "whose state came from node 3" in found.text


def test_what_an_engine_refuses_is_left_out_and_the_rest_is_said():
    class Narrow(Faulty):
        def verify(self, prefix, tree, wiring):
            if len(tree) > len(TREE):
                raise Unsupported("no room for one more row")
            return super().verify(prefix, tree, wiring)

        def contents(self, prefix):
            raise Unsupported("states cannot be read")

    found = hunt(lambda host: Narrow(host, forked=Wiring.parse("conv=flat")))
    assert (found.entry.node, found.entry.layer, found.entry.channel, found.shape) == (4, 0, "conv", None)


def test_few_layers_are_held_at_a_time(monkeypatch):
    whole = hunt(forked("mask=flat"))
    monkeypatch.setattr(attribution, "KEPT", 1)
    held = []
    group = attribution._Hunt._group
    monkeypatch.setattr(attribution._Hunt, "_group", lambda self, g: held.append(len(g)) or group(self, g))
    assert hunt(forked("mask=flat")) == whole and held == [1] * 5  # the input and four layers


def test_the_dose_says_what_the_error_goes_with():
    found = hunt(forked("positions=flat"))
    assert found.dose.keys() == {"leaked count", "depth", "sibling rank"}
    assert {figures["nodes"] for figures in found.dose.values()} == {found.nodes} == {6}
    host, prefix, reference, floor, _ = right("qwen3_5_text")
    seeker = attribution._Hunt(host, prefix, TREE, "tree_forked", FORKED, reference, floor, RULE, "float32")
    seeker.bad = tuple(range(1, 10))
    seeker.differences = replace(seeker.differences, max_abs=np.array(TREE.leaked, dtype=float))
    dose = seeker._dose()
    assert dose["leaked count"]["rho"] == pytest.approx(1) and abs(dose["depth"]["rho"]) < 1
    text = seeker._text(Entry(4, 0, "gated_delta", "state", 3), {}, {}, None, False, dose)
    assert text.endswith("; the error grows with leaked count (rank correlation 1.00)")


# --- in a run ---------------------------------------------------------------------------------------------------------

SETTINGS = Settings(controls=2, exact="off")  # what they say stands between the verdict and the place


def run(host, **settings) -> dict:
    return check(host, [Item("p", prompt(12), tree=TREE)], replace(SETTINGS, **settings))


def test_a_red_required_mode_is_looked_into_by_itself_and_a_green_run_is_not():
    assert run(engine("qwen3_5_text"))["cases"][0]["attribution"] == {}
    record = run(Faulty(engine("qwen3_5_text"), forked=Wiring.parse("state=flat")))
    (found,) = record["cases"][0]["attribution"].values()
    assert found["mode"] == "tree_forked" and found["entry"]["layer"] == 0 and found["first"]["4"] == 0
    line = f"Where (tree_forked in p/tree, 6 beyond): {found['text']}."
    assert line in render(record) and line in laid_out(case_blocks(record, record["cases"][0]), None)
    assert f"<p>{html.escape(line)}</p>" in page(record).partition("<h3>")[0]  # beside the verdict, above all tables
    said = render(record).splitlines()
    assert said[said.index(line) - 1].startswith("Because: tree_forked: fail") and len(said) - said.index(line) < 5
    node = laid_out(node_blocks(record, record["cases"][0], 4), None)
    assert line in node and "tree_forked is off here from layer 0 on" in node


def test_who_asks_gets_the_control_looked_into_and_who_declines_nothing():
    assert run(engine("qwen3_5_text"), attribute=True)["cases"][0]["attribution"].keys() == {"tree_unforked"}
    wrong = Faulty(engine("qwen3_5_text"), forked=Wiring.parse("state=flat"))
    assert run(wrong, attribute=False)["cases"][0]["attribution"] == {}


def test_only_the_first_failing_case_is_looked_into():
    items = [Item(name, prompt(12, seed), tree=TREE) for seed, name in enumerate("ab")]
    record = check(Faulty(engine("qwen3_5_text"), forked=Wiring.parse("conv=flat")), items, SETTINGS)
    assert [len(case["attribution"]) for case in record["cases"]] == [1, 0]


def test_a_wrong_commit_is_said_from_what_it_stored():
    commit = keeps(inject.wired(commit="flat"), "recurrent", tree_only=True)
    record = run(Faulty(engine("qwen3_5_text"), commit=commit), accept=("branch",))
    found = record["cases"][0]["attribution"]["tree_forked"]
    assert found["mode"] == "commit after tree_forked" and found["entry"]["layer"] == 0
    assert found["text"] == (
        "path 0-4-5-6: enters at layer 0 (gated delta): committed state is node 3's, expected node 6's; "
        "3 layers off; conv clean; attention clean"
    )


def test_logits_that_are_not_finite_are_looked_into_too():
    def spoil(module, args, output):
        output = output.clone()
        output[:, -1] = np.nan
        return output

    spoiled = inject.branching(inject.hooked(lambda name, _: name.endswith("layers.1.mlp"), spoil))
    record = run(Faulty(engine("qwen3_5_text"), around=spoiled))
    found = record["cases"][0]["attribution"]["tree_forked"]
    assert (found["entry"]["node"], found["entry"]["layer"]) == (9, 1) and found["growth"] == {}


@pytest.mark.parametrize(
    ("layer", "kind", "says"),
    [
        (3, "attention", "enters at layer 3 (attention, positions) at node 4"),
        (
            2,
            "gated_delta",
            "is first beyond noise at layer 2 (gated delta) and enters by positions, so at an attention",
        ),
        (4, "head", "is first beyond noise at layer 4 (head) and enters by positions, so at an attention layer before"),
    ],
)
def test_positions_enter_at_attention_whatever_layer_shows_them_first(layer, kind, says):
    host, *_ = right("qwen3_5_text")
    words = object.__new__(attribution._Hunt)
    words.layers, words.wiring, words.tree = host.layers, FORKED, TREE
    assert words._text(Entry(4, layer, kind, "positions"), {}, {}, None, False, {}).startswith(says)
