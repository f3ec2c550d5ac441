"""The checks checked: every kind of fault goes red, in the right check and place, and what is right stays green.

A fault is one entry of FAULTS: what is done to which engine, which checks must see it, and where. Every other check of
the same run is its neighbour and must stay green; the same run without the fault must be green throughout.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from transformers import AutoConfig

from ..base.conclusion import DEFECT, Conclusion
from ..base.errors import Unsupported, UsageError, usage_errors
from ..base.files import record_head
from ..base.resources import DRAFTER, EMBEDDED
from ..engines.capacity import plan
from ..engines.dflash import load as load_drafter
from ..engines.recorded import TraceEngine
from ..engines.registry import load_engine
from ..engines.transformers.engine import TransformersEngine
from ..engines.transformers.loading import build_random, parse_dtype
from ..flows.batch import batch_runs
from ..flows.check import check
from ..flows.replay import judge_trace, record_trace
from ..flows.rounds import Rounds, generate
from ..flows.settings import Item, Settings
from ..judge.nodes import CONTROL
from ..judge.sampling.processing import Sampling
from ..model.small_shapes import SHAPES
from ..model.wiring import FORKED, Wiring
from ..tree.draft_tree import DraftTree
from ..tree.drafts.shapes import shape
from . import inject
from .draft_faults import shifted_block, wrong_layers
from .inject import Faulty, Remembered, keeps
from .kinds import KINDS

SCHEMA = "ddtree-check/selftest/1"
PROMPT = 24  # tokens of a drawn prompt

# 0 ─┬─ 1 ── 2 ── 3        depth first: on the first branch, node and depth are the same number
#    ├─ 4 ─┬─ 5 ── 6
#    │     └─ 7
#    └─ 8 ── 9
DRAWN = (-1, 0, 1, 2, 0, 4, 5, 4, 0, 8)
SIDE = 4  # its first node that does not continue the row before it


@dataclass(frozen=True)
class Where:
    """Where a fault must be said to enter; None is not asked for. says: words that the finding must hold."""

    node: int | None = None
    layer: int | None = None
    channel: str | None = None
    says: str | None = None


@dataclass(frozen=True)
class Fault:
    """One entry of the table.

    make    (engine) -> the engine with the fault in it
    red     check -> the verdict that it must come to; every other check must pass
    where   what must be said of the first of them
    trees   shapes by name and seed, a case each; the last one shows the fault, the others stay green
    run     which part of the package looks for it: compare, batch, rounds, bits, or a function () -> Seen
    accept  paths that are committed;  settings  more of check.Settings
    """

    kind: str
    name: str
    make: Callable | None = None
    red: Mapping[str, str] = field(default_factory=dict)
    where: Where = Where()
    model: str = EMBEDDED
    dtype: str = "float32"
    trees: tuple[str, ...] = ("drawn",)
    accept: tuple[str, ...] = ()
    run: str | Callable = "compare"
    settings: Mapping[str, object] = field(default_factory=dict)
    adjust: Callable | None = None  # of the engine, before anything is run, the clean run included
    seed: int = 0
    look: str | None = None  # the check whose words `where` asks for, if it is none of `red`


@dataclass(frozen=True)
class Sighting:
    """What one check said."""

    verdict: str
    node: int | None = None
    layer: int | None = None
    channel: str | None = None
    says: str = ""


Seen = dict[str, Sighting]  # by check, in the order of the run

GREEN = ("pass", "known_failure")  # what a library is known to do wrong is no news
FORK, LINEAR, CHECKED_CONTROL = "tree_forked", "linear", "control"


# What is looked at


def _seen_compare(engine, fault: Fault) -> Seen:
    """Return every verdict of the last case; one of an earlier case stands under its number."""
    items = [_item(engine, name, fault.seed + place) for place, name in enumerate(fault.trees)]
    record = check(engine, items, Settings(accept=fault.accept, **fault.settings))
    checks: Seen = {}
    for place, case in enumerate(record["cases"], start=1):
        number = f", case {place}" if place < len(record["cases"]) else ""
        checks |= {name + number: seen for name, seen in _of_case(case, record).items()}
    for kind in record["sensitivity"]:
        start = f"insensitive: {kind['kind']}"
        says = next((reason for reason in record["verdict"]["reasons"] if reason.startswith(start)), "")
        checks[f"sensitivity of {kind['kind']}"] = Sighting("pass" if kind["reacts"] else "insensitive", says=says)
    return checks


def _of_case(case: dict, record: dict) -> Seen:
    checks: Seen = {}
    for mode in (LINEAR, FORK):
        result, finding = case["modes"][mode], case["attribution"].get(mode) or {}
        says, entry = [result["reason"], finding.get("text")], finding.get("entry")
        if result["verdict"] == "fail" and entry and not finding["mode"].startswith("commit"):
            place = (entry["node"], entry["layer"], entry["channel"])
        else:
            place = ()
            rules = " ".join(str(rule["node"]) for rule in case["ties"]["rules"].get(mode, ()))
            says += [f"{result['tie']} ties" if result["tie"] else "", rules and f"tie rule differs at node {rules}"]
        checks[mode] = Sighting(result["verdict"], *place, says="; ".join(filter(None, says)))
    control, law = case["modes"][CONTROL], case["leak_law"]
    verdict = control["verdict"]
    if verdict in ("fail", "pass"):
        verdict = "off" if law["outside"] or law["clean_bitwise_equal"] is False else "pass"
    if law["near"] and verdict == "pass" and record["verdict"]["modes"][CONTROL] == "insensitive":
        verdict = "insensitive"
    checks[CHECKED_CONTROL] = Sighting(verdict, says=control["reason"] or "")
    for accept in case["commit"] or ():
        for mode in (LINEAR, FORK):
            result, name = accept["modes"][mode], f"commit of {mode}"
            if name not in checks or checks[name].verdict == "pass":
                bad = result["bad"][0] if result["bad"] else {}
                place = (accept["node"], bad.get("layer"), bad.get("channel"))
                checks[name] = Sighting(result["verdict"], *place, result["reason"] or "")
    return checks


def _seen_batch(engine, fault: Fault) -> Seen:
    """Return the checks of batches of one and of two; what is wrong in a batch of one stands under its own name."""
    items = [_item(engine, "drawn", fault.seed + place, PROMPT - 5 * place) for place in range(3)]
    settings = Settings(accept=("branch",), **fault.settings)
    checks: Seen = {}
    for size in (1, 2):
        section = batch_runs(engine, items, settings, (size,))
        checks |= {f"{entry['check']}, batch of {size}": Sighting("pass") for entry in section["checks"]}
        for finding in reversed(section["findings"]):  # the first of a check stays
            place = (finding["node"], finding["layer"], finding["channel"])
            checks[f"{finding['check']}, batch of {size}"] = Sighting(finding["verdict"], *place, finding["says"])
    return checks


def _seen_rounds(engine, fault: Fault) -> Seen:
    """Run rounds of decoding: whether a mode's text is plain decoding's, and whether its acceptance is withheld."""
    items = [replace(_item(engine, "drawn", fault.seed), tree=None)]
    checks: Seen = {}
    rounds = generate(engine, items, Settings(budgets=(12,), **fault.settings), Rounds(rounds=8))
    for mode, run in rounds["summary"].items():
        first, control, says = run["first"] or {}, mode == CONTROL, run["alarm"] or ""
        wrong, withheld = (value != control for value in (bool(run["off"]), run["accepted_per_round"] is None))
        checks[f"rounds of {mode}"] = Sighting("fail" if wrong else "pass", first.get("node"), says=says)
        checks[f"acceptance of {mode}"] = Sighting("withheld" if withheld else "pass", says=says)
    return checks


def _seen_bits(engine, fault: Fault) -> Seen:
    """Return what the exact checks of one case say: their verdict, and the first node where a fault enters."""
    record = check(engine, [_item(engine, name, fault.seed) for name in fault.trees], Settings(attribute=False))
    exact, nodes = record["cases"][-1]["exact"], record["cases"][-1]["nodes"]
    moved = [node["node"] for node in nodes if node["exact"]["value"] == "moved" and node["exact"]["through"] is None]
    return {"bits": Sighting(exact["verdict"], next(iter(moved), None), says="; ".join(exact["evidence"]))}


RUNS = {"compare": _seen_compare, "batch": _seen_batch, "rounds": _seen_rounds, "bits": _seen_bits}


def _item(engine, name: str, seed: int, length: int = PROMPT) -> Item:
    """Return a drawn prompt, and a tree: 'drawn', or a shape with its nodes, 'random 12'."""
    rng = np.random.default_rng(1000 + seed)
    low, high = 8, engine.vocab_size - 8  # not the ids that configurations reserve
    tokens = tuple(rng.integers(low, high, length).tolist())
    root = int(rng.integers(low, high))
    if name == "drawn":
        drafted = rng.permutation(np.setdiff1d(np.arange(low, high), [root]))[: len(DRAWN) - 1]
        return Item(f"drawn {seed}", tokens, DraftTree((root, *map(int, drafted)), DRAWN))
    kind, nodes = name.split()
    tree = shape(kind, int(nodes), vocab=high, seed=seed, root=root, exclude=range(low))
    return Item(f"{name} {seed}", tokens, tree)


# Faults that need no engine


def _refused(what: str, run: Callable, *words: str) -> Seen:
    """Run what must be refused in one line with these words."""
    try:
        with usage_errors():
            run()
    except UsageError as error:
        says = str(error)
        how = "refused" if all(word in says for word in words) else "refused in other words"
        return {what: Sighting(how, says=says)}
    return {what: Sighting("pass")}


def _planned(requests: Mapping[str, int], reserved: Mapping, right: Mapping) -> Seen:
    """Plan what is short, and beside it what is enough."""
    short = plan(requests, reserved)
    return {
        "plan": Sighting("fail" if short else "pass", says="; ".join(map(str, short))),
        "plan, one row more": Sighting("fail" if plan(requests, right) else "pass"),
    }


def _drafted(make: Callable) -> Seen:
    """Run rounds whose drafts a misled drafter makes: verify is right, and the report must say whose fault it is."""
    engine = load_engine("transformers", None, device="cpu")
    drafter = make(load_drafter(DRAFTER, engine))
    engine.read_features(drafter.spec.layers)
    items = [replace(_item(engine, "drawn", seed), tree=None, drafter=drafter) for seed in range(6)]
    rounds = Rounds(rounds=20, modes=(LINEAR, FORK))
    summary = generate(engine, items, Settings(draft="dflash", budgets=(12,)), rounds)["summary"]
    right = {mode: not run["off"] and run["same_text"] == run["texts"] for mode, run in summary.items()}
    checks = {f"rounds of {mode}": Sighting("pass" if kept else "fail") for mode, kept in right.items()}
    says = summary[FORK]["drafter"]["says"] or ""
    verdict = "drafter-side" if says.startswith("low acceptance is drafter-side") else "pass"
    return checks | {"drafter": Sighting(verdict, says=says)}


def _other_prompt(length: int) -> Seen:
    """Judge a trace whose prompt is not the one that its request had."""
    engine = load_engine("transformers", None, device="cpu")
    item = _item(engine, "drawn", 0)
    checks: Seen = {}
    with tempfile.TemporaryDirectory() as folder:
        record_trace(engine, [item], Settings(controls=1), f"{folder}/trace")
        trace = TraceEngine.load(f"{folder}/trace")
        wrong = (*item.tokens[:-length], *(token + 1 for token in item.tokens[-length:]))
        for name, tokens in (("", wrong), (", own prompt", item.tokens)):
            record = judge_trace(trace, Settings(), prompts={item.id: tokens})
            for mode, result in record["cases"][0]["modes"].items():
                right = result["verdict"] == ("fail" if mode == CONTROL else "pass")
                checks[mode + name] = Sighting("pass" if right else result["verdict"], says=result["reason"] or "")
    return checks


def _equal_rows(engine, eps: float = 0.0) -> None:
    """Make every odd row of the output head the even one before it: all largest logits come twice."""
    head = engine.model.get_output_embeddings()
    weight = head.weight.detach().clone()
    weight[1::2] = weight[0::2][: len(weight[1::2])] * (1 + eps)
    head.weight = torch.nn.Parameter(weight)


def _adjusted_head(engine) -> None:
    """Make the same rows but for their last digit: many near ties."""
    _equal_rows(engine, torch.finfo(engine.model.get_output_embeddings().weight.dtype).eps)


def _without_last(logits):
    """Return logits whose last ids are padding, which nothing may choose."""
    logits = logits.clone()
    logits[..., -3:] = -torch.inf
    return logits


def _padded_vocabulary(engine) -> None:
    engine.model.get_output_embeddings().register_forward_hook(lambda module, args, logits: _without_last(logits))


def _deaf(kind: str) -> Callable:
    """Return what deafens layers: what a convolution's older inputs, or a state, adds is multiplied by zero."""

    def adjust(engine) -> None:
        with torch.no_grad():
            for name, module in engine.model.named_modules():
                if kind == "conv" and name.endswith("conv1d"):
                    module.weight[..., :-1] = 0
                elif kind == "all" and name.endswith(("linear_attn.out_proj", "mamba.out_proj")):
                    module.weight.zero_()
                    if module.bias is not None:
                        module.bias.zero_()

    return adjust


def _bent(logits, call: int):
    """Return logits of which every second decoding's differ."""
    if call % 2:
        return logits
    return logits + torch.linspace(0, 1, logits.shape[-1], dtype=logits.dtype, device=logits.device)


def _declared(engine, **claims):
    described = engine.describe() | claims
    return Faulty(engine, commit=keeps(inject.rounded, "recurrent"), describe=lambda: described)


def _refuses(engine):
    def supports(wiring):
        return "this engine verifies chains only" if wiring is not None else None

    return Faulty(engine, supports=supports)


def _forked(wiring: Wiring | str) -> Callable:
    wrong = Wiring.parse(wiring) if isinstance(wiring, str) else wiring
    return lambda engine: Faulty(engine, forked=wrong)


def _stored(source: Callable, *channels: str) -> Callable:
    return lambda engine: Faulty(engine, commit=keeps(source, *channels, tree_only=True))


def _around(around: Callable) -> Callable:
    return lambda engine: Faulty(engine, around=around)


def _own_and_forked(wiring: Wiring) -> Callable:
    return lambda engine: Faulty(engine, own=wiring, forked=wiring)


def _in_batches(**changed: Callable) -> Callable:
    """changed: method -> (engine) -> its stand-in."""
    return lambda engine: inject.batched(engine, **{name: make(engine) for name, make in changed.items()})


def _processed(rule: str, mode: str = "tree_forked") -> Callable:
    return lambda engine: Faulty(engine, processed=inject.processed(rule, mode))


PENALTIES = {
    "sampling": Sampling(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2), "draws": 50
}  # fmt: skip
PATHS = ("zero", "full", "branch")  # nodes 0, 3, 6 of the drawn tree
UNUSABLE = {LINEAR: "reference_unusable", FORK: "reference_unusable", CHECKED_CONTROL: "reference_unusable"}
NO_REFERENCE = {LINEAR: "fail", FORK: "reference_unusable", CHECKED_CONTROL: "reference_unusable"}
LINEAR_COMMIT = {f"commit of {LINEAR}": "fail"}
TREE_COMMIT = {f"commit of {FORK}": "fail"}
RED = {FORK: "fail"}
IN_BITS = {"bits": "fail"}
CONTROL_OFF = {CHECKED_CONTROL: "off"}  # its clean nodes are right and the forked pass's are not
SPOILT = {f"{name}, batch of 2": "fail" for name in ("verify", "commit", "again")}  # the spoilt request's own turn

FAULTS: tuple[Fault, ...] = (
    # K1: nothing was committed, or not rolled back
    Fault("K1", "the commit never happened", _stored(inject.before, "recurrent", "conv"), TREE_COMMIT,
          Where(0, 0, "conv", "unchanged by the accept"), accept=PATHS),
    Fault("K1", "the window is rolled back, the state is not", _stored(inject.block_end, "recurrent"), TREE_COMMIT,
          Where(0, 0, "recurrent", "committed state is node 9's, expected node 0's"), model="bamba", accept=PATHS),
    Fault("K1", "a plain step after an accept reads the old slots", inject.stale_slots,
          LINEAR_COMMIT | TREE_COMMIT, Where(6, says="what is stored is right; logits off from step 1"),
          model="kimi_linear", accept=("branch",)),
    Fault("K1", "the commit never happened, bf16", _stored(inject.before, "recurrent"), TREE_COMMIT,
          Where(0, 0, "recurrent", "state unchanged by the accept"), dtype="bfloat16", accept=PATHS),
    # K2: another row was committed
    Fault("K2", "the state at the accepted length", _stored(inject.wired(commit="flat"), "recurrent"), TREE_COMMIT,
          Where(6, 0, "recurrent", "committed state is node 3's, expected node 6's"), accept=PATHS),
    Fault("K2", "the state at the accepted length", _stored(inject.wired(commit="flat"), "recurrent"), TREE_COMMIT,
          Where(6, 0, "recurrent", "committed state is node 3's, expected node 6's"), model="bamba", accept=PATHS),
    Fault("K2", "every row at the accepted length, bf16", _forked("commit=flat"), TREE_COMMIT,
          Where(6, 0, "conv", "window: rows of "), dtype="bfloat16", accept=PATHS),
    Fault("K2", "the window at the accepted length", _stored(inject.wired(commit="flat"), "conv"), TREE_COMMIT,
          Where(6, 0, "conv", "window: rows of "), model="lfm2", accept=PATHS),
    # K3: a branch reads another branch's state
    Fault("K3", "states in row order", _forked("state=flat"), RED,
          Where(SIDE, 0, "state", "whose state came from node 3")),
    Fault("K3", "states and windows in row order, bf16", _forked("state=flat,conv=flat"), RED,
          Where(SIDE, 0, "state and conv", "whose state came from node 3"), dtype="bfloat16"),
    Fault("K3", "states in row order", _forked("state=flat"), RED, Where(layer=0, channel="state"), model="bamba",
          trees=("random 12",), seed=3),
    Fault("K3", "states in row order", _forked("state=flat"), RED, Where(SIDE, 0, "state"), model="kimi_linear"),
    Fault("K3", "states in row order", _forked("state=flat"), RED, Where(SIDE, 0, "state"), model="minimax"),
    Fault("K3", "states in row order", _forked("state=flat"), RED, Where(SIDE, 0, "state"), model="recurrent_gemma"),
    Fault("K3", "the kernel ignores the parents of windows", _forked("conv=flat"), RED,
          Where(SIDE, 0, "conv", "whose window came from node 3"), model="lfm2"),
    Fault("K3", "one edge goes to the grandparent", _forked(inject.moved_edge("state", 6, 4)), RED,
          Where(6, 0, "state", "whose state came from node 4")),
    Fault("K3", "a parent out of range keeps the running state", _forked(Wiring("kept", state=inject.running_state)),
          RED, Where(SIDE, 0, "state", "whose state came from node 3")),
    Fault("K3", "one layer alone runs in row order", _around(inject.blended(Wiring.parse("state=flat"), layer=4)), RED,
          Where(SIDE, 4)),
    Fault("K3", "a parent that is not an earlier row", run=partial(
        _refused, "tree", lambda: DraftTree((5, 6, 7), (-1, 2, 0)), "node 1 has parent 2", "expected 0..0"),
        red={"tree": "refused"}),
    # K4: the window
    Fault("K4", "windows at the end of the block", _stored(inject.block_end, "conv"), TREE_COMMIT,
          Where(0, 0, "conv", "window: rows of "), accept=PATHS),
    Fault("K4", "windows are slices of the row buffer", _stored(inject.wired(conv="flat"), "conv"), TREE_COMMIT,
          Where(6, 0, "conv", "window: rows of "), model="bamba", accept=PATHS),
    Fault("K4", "windows are not rolled back", _stored(inject.before, "conv"), TREE_COMMIT,
          Where(0, 0, "conv", "unchanged by the accept"), model="lfm2", accept=PATHS),
    Fault("K4", "windows in row order, bf16", _forked("conv=flat"), RED,
          Where(SIDE, 0, "conv", "whose window came from node 3"), dtype="bfloat16"),
    # K5: attention
    Fault("K5", "a causal mask", _forked("mask=flat"), RED, Where(SIDE, 3, "mask", "state clean")),
    Fault("K5", "positions by row", _forked("positions=flat"), RED,
          Where(SIDE, 3, "positions", "stands at 4 instead of 1")),
    Fault("K5", "one stranger is seen", _forked(inject.moved_edge("mask", 6, 2)), RED,
          Where(6, 3, "mask", "which sees node 2")),
    Fault("K5", "the parent is not seen", _forked(inject.moved_edge("mask", 6, 5)), RED,
          Where(6, 3, "mask", "does not see node 5")),
    Fault("K5", "a causal mask, no recurrence", _forked("mask=flat"), RED, Where(SIDE, 0, "mask"), model="mistral"),
    Fault("K5", "the first rows of the keys are kept", _stored(inject.wired(commit="flat"), "keys"), TREE_COMMIT,
          Where(6, 3, "keys", "keys: rows of nodes 1 2 3, expected nodes 4 5 6"), accept=PATHS),
    Fault("K5", "a causal mask, bf16", _forked("mask=flat"), RED, Where(channel="mask"), dtype="bfloat16",
          trees=("random 24",), seed=5),
    # One edge at one node, in the dtype that is deployed
    *(
        Fault(kind, f"{name}, bf16, in bits", _forked(inject.moved_edge(channel, 6, source, DRAWN)), IN_BITS,
              Where(6, says=f"reads node 2 and others, {says}" if source == 2 else says), dtype="bfloat16", run="bits")
        for kind, name, channel, source, says in (
            ("K3", "one state comes from a stranger", "state", 2, "first in layer 0 (gated_delta)"),
            ("K3", "one state skips the parent", "state", 4, "in 0 of "),
            ("K4", "one window comes from a stranger", "conv", 2, "first in layer 0 (gated_delta)"),
            ("K5", "one stranger is seen", "mask", 2, "first in layer 3 (attention)"),
            ("K5", "one parent is not seen", "mask", 5, "in 0 of "),
            ("K5", "one position is one too far", "positions", 4, "in 0 of "),
        )
    ),
    # K6: capacity
    Fault("K6", "budgets of 17 to 65 in buffers for 16", run=partial(
        _planned, {"a": 17, "b": 64}, {"state slots": {"per_request": 16}}, {"state slots": {"per_request": 65}}),
        red={"plan": "fail"}, where=Where(says="request b needs 65 rows, reserved 16")),
    Fault("K6", "a batch that fills the budget exactly", run=partial(
        _planned, {"a": 16, "b": 16}, {"key rows": {"total": 32}}, {"key rows": {"total": 34}}),
        red={"plan": "fail"}, where=Where(says="one row short for each request: its root")),
    Fault("K6", "no captured size holds the batch", run=partial(
        _planned, {"a": 64}, {"graphs": {"sizes": [16, 32, 64]}}, {"graphs": {"sizes": [16, 32, 65]}}),
        red={"plan": "fail"}, where=Where(says="needs 65 rows, reserved 64")),
    # K7: what was captured is replayed
    Fault("K7", "the parents of the captured step", lambda e: inject.captured(e, "state", "conv"), RED | CONTROL_OFF,
          Where(says="right with one more row: it belongs to this size"), trees=("random 9", "drawn")),
    Fault("K7", "the state rows of the captured step", lambda e: inject.captured(e, "slots"), RED | CONTROL_OFF,
          Where(0, 0, says="right with one more row"), trees=("random 10", "random 10"), model="bamba", seed=2),
    Fault("K7", "the mask of the captured step, bf16", lambda e: inject.captured(e, "mask", "state"), RED,
          Where(says="right with one more row"), trees=("random 24", "random 24"), dtype="bfloat16", seed=4),
    Fault("K7", "an idle row's slot is a waiting request's", _in_batches(verify=inject.padded_slot),
          {"canary, batch of 2": "fail", "canary, batch of 1": "fail"} | SPOILT, Where(layer=0, channel="recurrent"),
          run="batch", model="qwen3_5_text"),
    # K8: rows or requests mixed
    Fault("K8", "rows are permuted, states are not",
          _in_batches(reorder=lambda e: inject.left_behind(e, "recurrent", "conv")),
          {"reorder, batch of 2": "fail"}, Where(layer=0), run="batch", model="qwen3_5_text"),
    Fault("K8", "every request starts from the first one's state",
          _in_batches(verify=lambda e: inject.states_of_first(e, "recurrent")),
          {"verify, batch of 2": "fail", "commit, batch of 2": "fail"}, Where(0, 0, "recurrent"), run="batch",
          model="bamba"),
    Fault("K8", "every request reads the first one's window",
          _in_batches(verify=lambda e: inject.states_of_first(e, "conv")),
          {"verify, batch of 2": "fail", "commit, batch of 2": "fail"}, Where(0, 0, "conv"), run="batch",
          model="lfm2"),
    # K9: a block starts anew
    Fault("K9", "a cached block starts from a zero state", _own_and_forked(inject.dropped("state")), NO_REFERENCE,
          Where(0, 0, "state", "whose state came from zeros")),
    Fault("K9", "a cached block starts from zeros", _own_and_forked(inject.dropped("state", "conv")), NO_REFERENCE,
          Where(0, 0, "state and conv", "whose state came from zeros"), model="bamba"),
    Fault("K9", "the first row's gate for all rows",
          _around(inject.altered("gated_delta", inject.gate_of_first_row("g"))), NO_REFERENCE, Where(1, 0, "state")),
    Fault("K9", "the first row's gates for all rows, bf16",
          _around(inject.altered("gated_delta", inject.gate_of_first_row("g", "beta"))), NO_REFERENCE,
          Where(layer=0, channel="state"), dtype="bfloat16"),
    Fault("K9", "the own pass starts from a zero window", lambda e: Faulty(e, own=inject.dropped("conv")),
          {LINEAR: "fail"}, Where(0, 0, "conv", "whose window came from zeros"), model="lfm2"),
    # K10: padding
    Fault("K10", "left padding is ignored at batch 1", _in_batches(
        prefill=lambda e: inject.padding_run(e, "recurrent", "conv")), {"prefill, batch of 1": "fail"},
        Where(layer=0), run="batch", model="qwen3_5_text"),
    Fault("K10", "left padding runs into the states", _in_batches(
        prefill=lambda e: inject.padding_run(e, "recurrent", alone=False)),
        {"prefill, batch of 1": "fail", "prefill, batch of 2": "fail"}, Where(layer=0, channel="recurrent"),
        run="batch", model="olmo_hybrid"),
    Fault("K10", "left padding runs into the windows", _in_batches(
        prefill=lambda e: inject.padding_run(e, "conv", alone=False)),
        {"prefill, batch of 1": "fail", "prefill, batch of 2": "fail"}, Where(layer=1, channel="conv"),  # 0: own inputs
        run="batch", model="qwen3_5_text", dtype="bfloat16"),
    # K11: numerics, explained; above what explains them they are faults
    Fault("K11", "products summed in another order", _around(inject.other_order), accept=PATHS),
    Fault("K11", "products summed in another order, bf16", _around(inject.other_order), dtype="bfloat16"),
    Fault("K11", "noise of 1e-6 in every product", _around(inject.noisy(1e-6)), model="bamba"),
    Fault("K11", "noise of 1e-2 on trees, not on chains",
          _around(inject.branching(inject.noisy(1e-2, modes=(FORKED,)))), RED | CONTROL_OFF, Where(0, 0)),
    Fault("K11", "rows of the head that differ by one rounding", lambda e: e, where=Where(says="ties"), look=FORK,
          adjust=_adjusted_head, trees=("random 24",)),
    Fault("K11", "states kept in bf16, and said so", lambda e: _declared(e, state_dtype="bfloat16"), accept=PATHS),
    Fault("K11", "states kept in bf16, float32 claimed", lambda e: _declared(e),
          LINEAR_COMMIT | TREE_COMMIT, Where(0, 0, "recurrent", "state is rounded to bfloat16"),
          accept=PATHS),
    Fault("K11", "decoding does not repeat itself (N4)", lambda e: Faulty(e, decode=_bent), UNUSABLE,
          Where(says="ar does not repeat itself")),
    Fault("K11", "decoding is not a full forward pass", lambda e: Faulty(e, forward=lambda x: _bent(x, 0)), UNUSABLE,
          Where(says="ar differs from a full forward pass")),
    # K12: what is made of right logits
    Fault("K12", "no penalties in verify", _processed("none"), RED,
          Where(says="raw pass, processed fail: its penalties are not applied"), settings=PENALTIES),
    Fault("K12", "penalties count the sibling's path", _processed("sibling"), RED,
          Where(says="the history of its penalties is its sibling's path"), settings=PENALTIES),
    Fault("K12", "penalties count all rows before, bf16", _processed("rows"), RED,
          Where(says="the history of its penalties is all rows before it"), settings=PENALTIES, dtype="bfloat16"),
    Fault("K12", "penalties of the linear pass count the committed text", _processed("prompt", LINEAR),
          {LINEAR: "fail"}, Where(says="the history of its penalties is the committed text alone"),
          settings=PENALTIES, model="bamba"),
    Fault("K12", "verify takes the last of equal tokens", lambda e: Faulty(e, chosen=inject.takes(-1, FORK)),
          adjust=_equal_rows, trees=("random 24",), where=Where(says="tie rule differs at node"), look=FORK),
    Fault("K12", "verify takes the second best token", lambda e: Faulty(e, chosen=inject.takes(1, FORK)), RED,
          Where(says="raw pass, it chose token")),
    Fault("K12", "a padded vocabulary", lambda e: e, adjust=_padded_vocabulary, accept=("branch",)),
    Fault("K12", "padding ids are cut in verify alone", _around(inject.hooked(
        lambda name, _: name.endswith("lm_head"), lambda module, args, logits: _without_last(logits))),
        RED | CONTROL_OFF, Where(0)),
    # K13: what is reported
    Fault("K13", "states rebuilt behind an empty attention cache",
          _stored(inject.replayed_without_keys, "recurrent", "conv"), TREE_COMMIT, Where(6, 4), accept=("branch",)),
    Fault("K13", "acceptance of a text that is not plain decoding's", _forked("state=flat,conv=flat"),
          {"rounds of tree_forked": "fail", "acceptance of tree_forked": "withheld"}, run="rounds"),
    Fault("K13", "acceptance behind a commit that never happened",
          lambda e: Faulty(e, commit=keeps(inject.before, "recurrent", tree_only=True)),
          {"rounds of tree_forked": "fail", "acceptance of tree_forked": "withheld"}, run="rounds", model="bamba"),
    # Not faults of verify
    Fault("N", "rows of another batch width decode ar (N3)", lambda e: e, settings={"ar": "batched"}),
    Fault("N", "the drafter reads the wrong layers (N1)", run=partial(_drafted, wrong_layers),
          red={"drafter": "drafter-side"}, where=Where(says="low acceptance is drafter-side")),
    Fault("N", "the drafter reads its block shifted (N1)", run=partial(_drafted, shifted_block),
          red={"drafter": "drafter-side"}, where=Where(says="low acceptance is drafter-side")),
    Fault("N", "the drafter as it is", run=partial(_drafted, lambda drafter: drafter)),
    Fault("N", "another prompt than the trace's (N2)", run=partial(_other_prompt, 1),
          red=dict.fromkeys((LINEAR, FORK, CONTROL), "reference_unusable"), where=Where(says="input-id mismatch")),
    Fault("N", "the engine refuses trees (N5)", _refuses,
          {FORK: "unsupported", CHECKED_CONTROL: "unsupported"}, Where(says="verifies chains only")),
    # Sensitivity
    Fault("S", "convolutions that read one token only", lambda e: e,
          {"sensitivity of conv": "insensitive"}, Where(says="insensitive: conv"), adjust=_deaf("conv")),
    Fault("S", "recurrent layers that add nothing", lambda e: e,
          {"sensitivity of gated_delta": "insensitive", "sensitivity of conv": "insensitive",
           CHECKED_CONTROL: "insensitive"}, Where(says="insensitive: gated_delta"), adjust=_deaf("all")),
    Fault("S", "recurrent layers that add nothing", lambda e: e,
          {"sensitivity of mamba2": "insensitive", "sensitivity of conv": "insensitive",
           CHECKED_CONTROL: "insensitive"}, Where(says="insensitive: mamba2"), adjust=_deaf("all"), model="bamba"),
)  # fmt: skip


# Running them


def run(
    faults: Sequence[Fault] = FAULTS, *, device: str = "cpu", progress: Callable | None = None, clean: bool = True
) -> dict:
    """Inject every fault, and run what each was put into without it. Returns the record of a self-test.

    progress(done, total, text) is called before each step. clean: also the runs without a fault.
    """
    hosts, show = _Hosts(device), progress or (lambda *_: None)
    todo = [*faults, *(_clean_runs(faults) if clean else ())]
    started, conclusion, results = time.perf_counter(), Conclusion(), [{}] * len(todo)
    order = sorted(range(len(todo)), key=lambda place: (todo[place].model, todo[place].dtype))
    for done, place in enumerate(order):
        show(done, len(todo), f"{todo[place].kind} {todo[place].name}")
        results[place] = _result(todo[place], hosts)
    show(len(todo), len(todo), "done")
    for result in results:
        if not result["as_expected"]:
            conclusion.add(DEFECT, _reason(result))
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    record = {"kinds": KINDS, "results": results, "seconds": time.perf_counter() - started}
    return conclusion.into(record_head(SCHEMA, environment) | record)


def _clean_runs(faults: Sequence[Fault]) -> list[Fault]:
    """Return the run of each fault without it, each once: all of it must be green."""
    runs: dict[tuple, Fault] = {}
    for fault in faults:
        if not callable(fault.run) and not fault.adjust:
            key = (fault.model, fault.dtype, fault.trees, fault.accept, fault.run, fault.seed, str(fault.settings))
            clean = replace(fault, kind="clean", name="no fault", make=lambda engine: engine, red={}, where=Where())
            runs.setdefault(key, clean)
    return list(runs.values())


def _result(fault: Fault, hosts: _Hosts) -> dict:
    """Run a fault, and compare what each check said with what it must say."""
    started = time.perf_counter()
    try:
        seen = fault.run() if callable(fault.run) else RUNS[fault.run](fault.make(hosts.engine(fault)), fault)
    except Unsupported as error:
        seen = {"run": Sighting("unsupported", says=str(error))}
    missed = [name for name, verdict in fault.red.items() if name not in seen or seen[name].verdict != verdict]
    neighbours = {name: check.verdict for name, check in seen.items() if name not in fault.red}
    red_neighbours = {name: verdict for name, verdict in neighbours.items() if verdict not in GREEN}
    by = fault.look or next((name for name in fault.red if name in seen), next(iter(seen)))
    sighting, where = seen[by], fault.where
    misplaced = [
        f"{name} {getattr(sighting, name)!r}, expected {want!r}"
        for name in ("node", "layer", "channel")
        if (want := getattr(where, name)) is not None and getattr(sighting, name) != want
    ]
    if where.says is not None and where.says not in sighting.says:
        misplaced.append(f"says {sighting.says!r}, expected {where.says!r} in it")
    hosted = not callable(fault.run)
    return {
        "kind": fault.kind,
        "name": fault.name,
        "model": fault.model if hosted else None,
        "dtype": fault.dtype if hosted else None,
        "expected": dict(fault.red),
        "caught": bool(fault.red) and not missed,
        "by": by if fault.red else None,
        "node": sighting.node,
        "layer": sighting.layer,
        "channel": sighting.channel,
        "says": sighting.says,
        "neighbours": list(neighbours),
        "red_neighbours": red_neighbours,
        "missed": missed,
        "misplaced": misplaced,
        "as_expected": not missed and not red_neighbours and not misplaced,
        "seconds": time.perf_counter() - started,
    }


def _reason(result: dict) -> str:
    what = [f"missed by {name}" for name in result["missed"]]
    what += [f"{name} came to {verdict}" for name, verdict in result["red_neighbours"].items()]
    what += [f"seen by {result['by']} at {text}" for text in result["misplaced"]]
    return f"{result['kind']} {result['name']} ({result['model']}, {result['dtype']}): {'; '.join(what)}"


class _Hosts:
    """The engines that faults are put into, each built once; what they compute without a fault is kept."""

    def __init__(self, device: str):
        self.device, self._kept = device, {}

    def engine(self, fault: Fault):
        if fault.run == "batch" or fault.adjust:  # their passes may touch what others would reuse
            engine = self._build(fault.model, fault.dtype)
            if fault.adjust:
                fault.adjust(engine)
            return engine
        key = (fault.model, fault.dtype)
        if key not in self._kept:
            self._kept = {key: Remembered(self._build(*key))}  # faults come sorted by host: one is kept at a time
        return self._kept[key]

    def _build(self, model: str, dtype: str) -> TransformersEngine:
        if model == EMBEDDED:
            return load_engine("transformers", None, dtype=dtype, device=self.device)
        config = AutoConfig.for_model(model, **SHAPES[model])
        wanted = parse_dtype(dtype, torch.float32)
        built = build_random(config, dtype=wanted, device=torch.device(self.device), seed=0)
        return TransformersEngine(built, provenance={"name": f"tiny {model}", "weights": "random"})
