"""A trace as the source of a run: recorded passes ─► differences to ar; judged by the same flow as a live run.

ar comes from the trace if it was recorded there, else from a live engine of the same model; docs/trace.md says what
floor that leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from ..base.errors import UsageError, usage_errors
from ..engines.checked import complete
from ..engines.contract import ASSUMED
from ..engines.recorded import TraceEngine, layers_to_json, tensor
from ..judge.case import Outcome, Runs
from ..judge.differences import Differences, digests, join, measure, measure_any
from ..judge.exact import Exact
from ..judge.nodes import CONTROL, MODES, reference_problem
from ..judge.pairs import RecordedPass, compare
from ..judge.sampling.processing import Sampling
from ..model.wiring import FORKED, Conv, State, Wiring, reached, reads
from ..trace.model import SUFFIX, Step, TopLogits
from ..trace.write import TraceWriter
from ..tree.accept import Accepted, compare_walks, greedy_walk
from ..tree.case import Case
from ..tree.draft_tree import merge
from .check import check
from .controls import chain_run, forward_run, repeat_run
from .flow import Part, Subject, judge_all
from .passes import Watch, attempt
from .settings import Item, Settings
from .stored import judge_stored

SAMPLED = (*vars(Sampling()), "history", "seed", "draws")  # what a trace says of how tokens were drawn
OTHER = (
    "every recorded pass differs from the reference at the root already, where no tree has a say: other weights, other "
    "input ids, another prefix, or a state that was wrong before this pass; a fault of the verify pass cannot be told "
    "from that (record ar in the trace too)"
)


# --- from a live engine -----------------------------------------------------------------------------------------------


def writer_for(engine, path: str | Path, settings: Settings | None = None, **bounds) -> TraceWriter:
    """Return a writer for the passes that a live engine makes under `settings`. bounds: max_bytes, top. Raises
    UsageError if a trace stands there."""
    folder, sampling = Path(path), None
    if settings is not None:
        engine = complete(engine, settings.vocab_size)
        flat = settings.to_json()
        sampling = {name: flat[name] for name in SAMPLED} if settings.sampling.active else None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.glob(f"*{SUFFIX}"))):
            raise UsageError(f"save-trace: {path} exists, expected the name of a new folder")
        describe, provenance = engine.describe(), engine.provenance
        with usage_errors():
            return TraceWriter(
                folder,
                engine=describe["engine"],
                engine_version=describe.get(describe["engine"]),
                model=str(provenance.get("name") or describe.get("model_type") or "unnamed"),
                dtype=describe["dtype"],
                vocab_size=engine.vocab_size,
                exact_control=engine.exact_control,
                layers=layers_to_json(engine.layers),
                sampling=sampling,
                environment={name: value for name, value in describe.items() if name not in ("engine", "dtype")},
                **bounds,
            )
    except OSError as error:
        raise UsageError(f"save-trace: {path}: {error.strerror}, expected a folder that can be written") from None


def record_trace(engine, items: Sequence[Item], settings: Settings, path: str | Path, **bounds) -> dict:
    """Run `check`, write every pass that it makes to a trace at `path`, and return the record of the live run."""
    with writer_for(engine, path, settings, **bounds) as trace:
        return check(engine, items, settings, trace=trace)


# --- from a trace -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reference:
    """What one tree is judged by. rows: ar's logits [n, vocabulary] or a top k.

    own      ar is the trace's
    problem  why it cannot be used
    across, unforked   see Runs.across: from the live engine's own controls, and its own unforked pass if it was needed
    noise    the largest error of those controls
    """

    rows: torch.Tensor | TopLogits
    own: bool
    forward: Differences | None = None
    problem: str | None = None
    across: Callable[[Differences], np.ndarray] | None = None
    unforked: Differences | None = None
    noise: float | None = None


def judge_trace(
    engine: TraceEngine, settings: Settings, *, reference=None, prompts: Mapping[str, Sequence[int]] | None = None,
    steps: Sequence[Step] | None = None, progress: Callable | None = None,
) -> dict:  # fmt: skip
    """Judge a trace and return its record, in the form of `check`'s.

    reference: a live engine of the same model, which supplies ar and what else the trace lacks. prompts: token ids that
    the requests should have had, by request. Raises UsageError if a step has no ar and there is no reference.
    """
    steps = engine.trace.steps if steps is None else steps
    reference = reference if reference is None else complete(reference)
    settings = _drawn(replace(settings, wiring=_control(steps) or settings.wiring), engine.header.sampling or {})
    if reference is not None and reference.vocab_size != engine.vocab_size:
        raise UsageError(
            f"trace: rows of {engine.vocab_size} logits, the model has {reference.vocab_size}; expected the same model"
        )
    layers = engine.layers or (reference.layers if reference is not None else ASSUMED)
    parts, total = [], 0
    for _, group in groupby(steps, key=lambda step: (step.request, step.prompt_tokens, step.tree.tokens[0])):
        content = list(group)
        parts.append(Part(total, content[0].id, content))
        total += len(content)
    recorded = _Recorded(engine, settings, reference, layers, prompts or {})
    record = judge_all(
        recorded.subjects, parts, total, settings, layers=layers, dtype=engine.trace.dtype, model=engine.provenance,
        described=engine.describe() | ({} if reference is None else {"reference": reference.describe()}),
        progress=progress,
    )  # fmt: skip
    for case in record["cases"]:
        case["engine_accepted"] = recorded.walked[case["id"]]
    record["settings"]["draft"] = "trace"
    record["trace"] = {
        "path": str(engine.trace.path),
        "steps": len(steps),
        "layers": "trace" if engine.layers else "reference" if reference is not None else "assumed",
        "supplied": sorted(recorded.supplied),
        "reference_noise": max(recorded.noise, default=None),
        "top": any("top_ids" in each.arrays for step in steps for each in step.passes),
        "notes": _notes(engine, steps, record, recorded.supplied, recorded.walked, reference),
    }
    return record


class _Recorded:
    """A trace whose steps are judged. live: an engine of the same model, or None.

    Kept of the steps so far: supplied, what the live engine gave; noise, the largest errors of its controls; walked, of
    each step what the recording engine accepted, beside ar.
    """

    def __init__(self, engine: TraceEngine, settings: Settings, live, layers, prompts: Mapping[str, Sequence[int]]):
        self.engine, self.settings, self.live, self.layers, self.prompts = engine, settings, live, layers, prompts
        self.dtype = engine.trace.dtype
        self.supplied: set[str] = set()
        self.noise: list[float] = []
        self.walked: dict[str, dict | None] = {}
        self.exact = _in_bits(engine, settings, layers)
        self._wrong = _first_wrong(engine.trace.steps)
        self._last: dict[str | None, Step] = {}  # of each request

    def subjects(self, part: Part) -> Iterator[Subject]:
        """Read steps behind one prefix, which share their reference's checks as the budgets of a live run do."""
        for step, reference in zip(part.content, _references(self, part.content), strict=True):
            self.supplied |= set() if reference.own else {"ar", "forward"}
            self.supplied |= {CONTROL} if reference.unforked is not None else set()
            self.noise += [] if reference.noise is None else [reference.noise]
            mismatch = _mismatch(step, self.prompts)
            yield _RecordedSubject(
                runs=_runs(self, step, reference, mismatch), problem=reference.problem or mismatch.get("ar"),
                recorded=self, step=step, before=self._last.get(step.request), wrong=self._wrong.get(step.request),
                mismatch=mismatch,
            )  # fmt: skip
            self._last[step.request] = step


@dataclass(frozen=True, eq=False, kw_only=True)
class _RecordedSubject(Subject):
    """One step. before: the step of its request before it; wrong: the first that was given another tree; mismatch:
    modes that were fed other tokens, and how."""

    recorded: _Recorded
    problem: str | None
    step: Step
    before: Step | None
    wrong: Step | None
    mismatch: dict[str, str]

    def judged(self, judge: Callable[[str | None], Outcome]) -> Outcome:
        recorded, step, outcome, problem = self.recorded, self.step, judge(self.problem), self.problem
        if self.runs.across is not None and not problem and _off_at_root(outcome):
            problem = OTHER
            outcome = judge(problem)
        unusable = problem or next(iter(self.mismatch.values()), None)
        accepts = judge_stored(
            recorded.engine, step, recorded.layers, recorded.settings, recorded.dtype, recorded.live, unusable
        )
        recorded.walked[step.id] = _walked(step, outcome)
        return _told(replace(outcome, accepts=accepts), step, self.before, self.wrong)


def _drawn(settings: Settings, given: Mapping) -> Settings:
    """Return the settings under which a header says that tokens were drawn. Raises UsageError for what is none."""
    if unknown := sorted(given.keys() - set(SAMPLED)):
        raise UsageError(f"trace: sampling has {unknown[0]!r:.60}, expected some of {', '.join(SAMPLED)}")
    drawn = {name: value for name, value in given.items() if name in vars(settings.sampling)}
    rest = {name: value for name, value in given.items() if name not in drawn}
    return replace(settings, sampling=replace(settings.sampling, **drawn), **rest)


def _control(steps: Sequence[Step]) -> str | None:
    """Return the wiring that the unforked passes claim, where it is not the usual one, or None."""
    claims = {each.wiring for step in steps for each in step.of(CONTROL)} - {"engine", CONTROL}
    if len(claims) > 1:
        raise UsageError(f"trace: unforked passes claim {', '.join(sorted(claims))[:80]}, expected one wiring")
    for claim in claims:
        with usage_errors():
            Wiring.parse(claim)
    return next(iter(claims), None)


# The reference


def _references(recorded: _Recorded, steps: Sequence[Step]) -> list[Reference]:
    """Return the reference of each step behind one prefix. Raises UsageError if ar is missing and no engine is live."""
    engine, settings, live, dtype = recorded.engine, recorded.settings, recorded.live, recorded.dtype
    whole = [_whole(engine, step, "ar") for step in steps]
    lacks = next((step for step, rows in zip(steps, whole, strict=True) if rows is None), None)
    if lacks and live is None:
        have = engine.rows(lacks, "ar")
        missing = "no ar" if have is None else f"ar at {have[1].sum()} of {len(lacks.tree)} nodes"
        raise UsageError(
            f"trace: step {lacks.id!r:.60} has {missing}, expected it at every node; give --model, "
            "which then decodes it, or record it"
        )
    if lacks:
        return [reference_of(step, settings, live, dtype) for step in steps]
    problem, references = _own_problem(engine, steps, whole, settings, dtype), []
    for step, rows in zip(steps, whole, strict=True):
        if (forward := engine.rows(step, "forward")) is not None:
            forward = _differences(rows, *forward, engine.dtype)
        reference = Reference(rows, True, forward, problem)
        references.append(reference if live is None else _crossed(reference, step, settings, live, dtype, engine.dtype))
    return references


def _whole(engine, step: Step, mode: str):
    """Return the rows of a mode if every node has one, or None."""
    passes = engine.rows(step, mode)
    return passes[0] if passes is not None and passes[1].all() else None


def _own_problem(engine, steps, whole, settings: Settings, dtype: str) -> str | None:
    """Return `reference_problem` over the trees of one prefix together, each node once."""
    _, places = merge([step.tree for step in steps])
    parts: dict[str, dict[int, Differences]] = {"repeat": {}, "forward": {}}
    for step, rows, place in zip(steps, whole, places, strict=True):
        for mode, nodes in parts.items():
            if (passes := engine.rows(step, mode)) is not None:
                differences = _differences(rows, *passes, engine.dtype)
                for node in np.flatnonzero(passes[1]).tolist():
                    nodes.setdefault(place[node], differences[[node]])
    joined = [join([nodes[node] for node in sorted(nodes)]) if nodes else None for nodes in parts.values()]
    return reference_problem(*joined, settings.rule, dtype)


def reference_of(step: Step, settings: Settings, live, dtype: str) -> Reference:
    """Decode ar, and say how far a right run may be from it by the live engine's own controls on this tree."""
    tree, rule = step.tree, settings.rule
    prefix = live.prefill(step.prompt_tokens)
    rows = live.decode(prefix, tree)
    runs = (
        lambda: forward_run(live, step.prompt_tokens, tree, rows),
        lambda: chain_run(live, prefix, tree, rows, None)[0],
        lambda: chain_run(live, prefix, tree, rows, FORKED)[0],
    )
    controls = [control for run in runs if (control := attempt(None, run)[0]) is not None]
    forward = next(iter(controls), None)
    problem = reference_problem(repeat_run(live, prefix, tree, rows), forward, rule, dtype)
    pooled = max((float(np.max(control.max_abs)) for control in controls), default=0.0)

    def across(run: Differences) -> np.ndarray:
        return np.maximum(rule.floor([np.full(len(run), pooled)], run.ulp), rule.across[dtype] * run.std)

    unforked = None
    if not step.of(CONTROL) and live.supports(settings.control) is None:
        unforked = measure(rows, live.verify(prefix, tree, settings.control).logits)
    return Reference(rows, False, forward, problem, across, unforked, pooled)


def _crossed(own: Reference, step: Step, settings: Settings, live, dtype: str, computed: torch.dtype) -> Reference:
    """Check the trace's ar against the live engine's: two engines may be equally wrong only if both are."""
    theirs = reference_of(step, settings, live, dtype)
    problem = own.problem or (theirs.problem and f"the model's own reference: {theirs.problem}")
    if not problem:
        off = measure_any(theirs.rows, own.rows, computed)
        beyond = ~(off.max_abs <= theirs.across(off))
        node = int(np.argmax(beyond))
        if beyond.any():
            problem = (
                f"ar of the trace is not that of the model: {beyond.sum()} of {len(beyond)} nodes differ, first node "
                f"{node} by {off.max_abs[node]:.3g}; other weights, other input ids, or plain decoding is wrong"
            )
    return replace(own, problem=problem, unforked=theirs.unforked)


# One step


def _differences(reference, rows, measured: np.ndarray, dtype: torch.dtype) -> Differences:
    """Return the differences [n] at the measured nodes; another node holds the first one's."""
    nodes = np.flatnonzero(measured)
    where = np.zeros(len(measured), dtype=int)
    where[nodes] = np.arange(len(nodes))
    return measure_any(reference[nodes], rows[nodes], dtype)[where]


def _runs(recorded: _Recorded, step: Step, reference: Reference, mismatch: Mapping[str, str]) -> Runs:
    """Return what a step holds, in differences to the reference."""
    engine, n = recorded.engine, len(step.tree)
    case = Case(step.id, step.prompt_tokens, step.tree, step.source | {"draft": step.source.get("draft", "trace")})
    watch = None
    if isinstance(reference.rows, torch.Tensor):
        watch = Watch(Given(step), case, reference.rows, recorded.settings)
    differences, missing, hashes = {}, {}, {}
    sample = None  # of linear, some paths only: a control, as a sample of them is for a live run
    for mode in MODES:
        passes = engine.rows(step, mode)
        if passes is None and mode == CONTROL and reference.unforked is not None:
            differences[mode] = reference.unforked
        elif passes is None:
            missing[mode] = ("not_run", "no pass of this mode in the trace")
        elif mode in mismatch:
            missing[mode] = ("reference_unusable", mismatch[mode])
        elif not passes[1].all():
            measured = passes[1]
            if mode == "linear":
                sample = _differences(reference.rows, *passes, engine.dtype), measured
            first = int(np.argmin(measured))
            missing[mode] = ("not_run", f"rows at {measured.sum()} of {n} nodes, none for node {first}")
        else:
            rows = passes[0]
            differences[mode] = _differences(reference.rows, *passes, engine.dtype)
            if watch and isinstance(rows, torch.Tensor):
                sink, rows = watch.sink(mode), rows.to(reference.rows.device)
                for nodes in step.order(mode):  # as they were run
                    sink(nodes, rows[nodes])
            if isinstance(rows, torch.Tensor) and engine.exact_control and mode != "linear":
                hashes[mode] = digests(rows[list(step.tree.clean)])
    ar = measure_any(reference.rows, reference.rows, engine.dtype)
    return Runs(
        case=case,
        chain=_chain(recorded, step, reference, mismatch, differences.get("linear"), sample),
        forward=reference.forward,
        missing=missing,
        equal=hashes["tree_forked"] == hashes[CONTROL] if len(hashes) == 2 else None,
        wide=_wide(step, "linear"),
        across=reference.across,
        bits=recorded.exact.get(step.id),
        library_unforked=_library(engine, step, recorded.settings),
        **(watch.findings(ar, differences) if watch else {"ar": ar, "differences": differences}),
    )


def _in_bits(engine: TraceEngine, settings: Settings, layers) -> dict[str, Exact]:
    """Return what the passes of a trace show of each other in bits, by step id; nothing if exact checks are off."""
    results: dict[str, Exact] = {}
    groups: dict[tuple, list[Step]] = {}
    for step in engine.trace.steps if settings.exact != "off" else ():
        groups.setdefault((step.prompt_tokens, len(step.tree)), []).append(step)
    for steps in groups.values():
        passes = {step.id: _digested(step) for step in steps}
        every = [recorded for step in steps for recorded in passes[step.id]]
        for step in steps:
            reach = reached(settings.control.plan(step.tree), layers)
            exact = next((compare(one, every, reach) for one in passes[step.id] if one.whole), None)
            results |= {step.id: exact} if exact else {}
    return results


def _digested(step: Step) -> list[RecordedPass]:
    """Return the passes of a step that are as wide as its tree and hold full rows, each row as a digest."""
    return [
        RecordedPass(one.mode, step.tree, one.nodes, tuple(digests(tensor(one.arrays["logits"]))))
        for one in step.passes
        if one.full and one.width >= len(step.tree) and one.mode in ("tree_forked", CONTROL, "chain")
    ]


def _chain(recorded: _Recorded, step: Step, reference: Reference, mismatch, linear: Differences | None, sample):
    """Return the chain control and which nodes it measured, or None: the engine's tree path on chains, or its linear
    pass where that is the same, or all that there is of the tree's width."""
    passes = recorded.engine.rows(step, "chain")
    if passes is not None and "chain" not in mismatch and _wide(step, "chain"):
        return _differences(reference.rows, *passes, recorded.engine.dtype), passes[1]
    if sample is not None and _wide(step, "linear"):
        return sample
    if linear is not None and not reads(recorded.layers, Conv, State):
        return linear, np.ones(len(step.tree), dtype=bool)
    return None


def _wide(step: Step, mode: str) -> bool:
    """Return whether all passes of a mode are as wide as the tree."""
    return min((each.width for each in step.of(mode)), default=0) >= len(step.tree)


def _first_wrong(steps: Sequence[Step]) -> dict[str, Step]:
    """Return the first step of each request that was given another tree than its own."""
    wrong: dict[str, Step] = {}
    for step in sorted(steps, key=lambda step: step.round or 0):
        if step.request is not None and step.request not in wrong and wrong_parents(step, None):
            wrong[step.request] = step
    return wrong


class Given:
    """What the recording engine made of its raw rows, by the parts `processed` and `chosen` of an engine. A mode
    without falls back on what we make of its rows."""

    def __init__(self, step: Step):
        self._step = step

    def chosen(self, mode, tree, nodes, logits) -> list[int] | None:
        if not any("chosen" in each.lists for each in self._step.passes):
            return None
        tokens: dict[int, int] = {}
        for each in self._step.of(mode):
            for node, token in zip(each.nodes, each.lists.get("chosen", ()), strict=False):
                tokens.setdefault(node, token)
        return [tokens.get(node, int(row.argmax())) for node, row in zip(nodes, logits, strict=True)]

    def processed(self, mode, tree, nodes, logits, sampling, prompt_tokens, made) -> torch.Tensor | None:
        for each in self._step.of(mode):
            if "processed" in each.arrays and set(nodes) <= set(each.nodes):
                return tensor(each.arrays["processed"])[[each.nodes.index(node) for node in nodes]].to(logits.device)
        return None


def _told(outcome: Outcome, step: Step, before: Step | None, first: Step | None) -> Outcome:
    """Return the outcome; a tree pass that was given another tree than the step's has failed, whatever moved.

    Where nothing can be told, since all is off at the root, the step that left a wrong state behind (`first`) is named.
    """
    result = outcome.results["tree_forked"]
    wrong = wrong_parents(step, before) or wrong_slot(step) or wrong_positions(step) or two_answers(step)
    cached = step.source.get("cached_tokens")
    if result.reason == OTHER and first is not None and (first.round or 0) < (step.round or 0):
        reason = (
            f"off at the root already: step {first.id!r:.60} of this request was given another tree and left a wrong "
            "state behind"
        )
    elif result.reason == OTHER and cached:
        reason = f"{OTHER}; the request began behind a prefix hit of {cached} tokens"
    elif wrong is None or not result.verdicts:
        return outcome
    else:
        reason = f"{wrong}; {result.reason or 'no logit moved beyond the floor'}"
        result = replace(result, verdict="fail")
    return replace(outcome, results=outcome.results | {"tree_forked": replace(result, reason=reason)})


def wrong_parents(step: Step, before: Step | None) -> str | None:
    """Say how the parents that the recurrent layers were told differ from the tree's; None if they do not.

    Only a pass whose rows are all stored can be compared, since parents are told by row.
    """
    for each in step.of("tree_forked"):
        told, nodes = each.lists.get("parents"), each.nodes
        if told is None or len(told) != len(nodes):
            continue
        parents = {node: nodes[row] if 0 <= row < len(nodes) else None for node, row in zip(nodes, told, strict=True)}
        wrong = [node for node, parent in parents.items() if node > 0 and parent != step.tree.parents[node]]
        if not wrong:
            continue
        count = f"{len(wrong)} of {len(step.tree)} nodes do not start from their parent"
        gate = step.source.get("gate")
        if list(told) == list(range(-1, len(told) - 1)):
            why = f", since SGLang's gate, speculative_eagle_topk, is {gate}" if gate in (0, 1) else ""
            return f"the recurrent layers were given no tree but a chain, row after row{why}: {count}"
        stale = before is not None and tuple(told[: len(before.tree)]) == before.tree.parents
        old = ", as in this request's step before: a stale tree" if stale else ""
        return (
            f"the recurrent layers were told parent {parents[wrong[0]]} of node {wrong[0]}, the tree has "
            f"{step.tree.parents[wrong[0]]}{old}: {count}"
        )
    return None


def wrong_slot(step: Step) -> str | None:
    """Name the state slot that the recurrent layers were given, where the server says that the request's is another."""
    given, right = step.source.get("slot"), step.source.get("own_slot")
    if given == right or None in (given, right):
        return None
    return f"the recurrent layers were given state slot {given}, the request's own is {right}"


def wrong_positions(step: Step) -> str | None:
    """Say how the positions of a tree pass's rows differ from root + depth; None if they do not."""
    for each in step.of("tree_forked"):
        positions = dict(zip(each.nodes, each.lists.get("positions") or (), strict=False))
        behind = {node: position - positions[0] for node, position in positions.items()} if 0 in positions else {}
        wrong = (node for node, distance in behind.items() if node >= 0 and distance != step.tree.depth[node])
        if (node := next(wrong, None)) is not None:
            flat = list(behind.values()) == list(range(len(behind)))
            given = "flat positions, row after row" if flat else "other positions than their depth"
            return (
                f"the rows were given {given}: node {node} stands {behind[node]} behind the root, its depth is "
                f"{step.tree.depth[node]}"
            )
    return None


def two_answers(step: Step) -> str | None:
    """Name the first node for which two recorded tree passes of one step hold other logits; None if there is none."""
    first: dict[int, object] = {}
    for each in step.of("tree_forked"):
        rows = each.arrays["logits" if "logits" in each.arrays else "top_logits"].read()
        for row, node in enumerate(each.nodes):
            if node >= 0 and not np.array_equal(first.setdefault(node, rows[row]), rows[row], equal_nan=True):
                return f"two passes of tree_forked hold other logits of node {node}; a step has one"
    return None


def _off_at_root(outcome: Outcome) -> bool:
    """Return whether every mode that was judged, but for the control, fails at node 0."""
    judged = [mode for mode, result in outcome.results.items() if mode != CONTROL and result.verdicts]
    return bool(judged) and all(not outcome.differences[mode].max_abs[0] <= outcome.floors[mode][0] for mode in judged)


def _library(engine, step: Step, settings: Settings) -> float | None:
    """Return the largest |difference| of the recorded library's own pass to the unforked one, or None."""
    rows = [_whole(engine, step, mode) for mode in (CONTROL, "own")]
    if settings.wiring is not None or any(row is None for row in rows):
        return None
    return float(np.max(measure_any(*rows, engine.dtype).max_abs))


def _mismatch(step: Step, prompts) -> dict[str, str]:
    """Return the modes whose passes were fed other tokens than the step says, and how: no verdict follows."""
    wrong: dict[str, str] = {}
    if step.request in prompts:
        wanted = tuple(prompts[step.request])
        if step.prompt_tokens[: len(wanted)] != wanted:
            place = _first_difference(wanted, step.prompt_tokens)
            wrong = dict.fromkeys((*MODES, "ar", "chain"), f"input-id mismatch: the prompt and the trace: {place}")
    for each in step.passes:
        theirs = each.lists.get("prompt_tokens")
        if theirs is not None and tuple(theirs) != step.prompt_tokens:
            place = _first_difference(step.prompt_tokens, theirs)
            wrong.setdefault(each.mode, f"input-id mismatch: the step and its pass {each.mode}: {place}")
        for node, token in zip(each.nodes, each.lists.get("input_ids", ()), strict=False):
            if node >= 0 and token != (right := step.tree.tokens[node]):
                says = f"input-id mismatch: pass {each.mode} was fed token {token} at node {node}, the tree has {right}"
                wrong.setdefault(each.mode, says)
                break
    return wrong


def _first_difference(wanted: Sequence[int], got: Sequence[int]) -> str:
    for place, (right, other) in enumerate(zip(wanted, got, strict=False)):
        if right != other:
            return f"prompt position {place} is {right} in the first, {other} in the second"
    return f"prompt has {len(wanted)} tokens in the first, {len(got)} in the second"


def _walked(step: Step, outcome: Outcome) -> dict | None:
    """Compare what the engine says that it accepted with ar's greedy walk; it decides nothing: engines may sample."""
    if step.accepted is None:
        return None
    right = greedy_walk(step.tree, outcome.ar.argmax)
    theirs = Accepted(step.accepted, right.bonus if step.bonus is None else step.bonus)
    verdicts = [outcome.results[mode].verdicts for mode in ("tree_forked", "linear")]
    ties = [node for each in verdicts for node, verdict in enumerate(each) if verdict == "tie"]
    return compare_walks(step.tree, right, theirs, ties) | {"bonus": step.bonus}


def _notes(engine, steps, record: dict, supplied: set[str], walked: Mapping, live) -> list[str]:
    """Return what a reader must know of how this trace was judged."""
    notes = []
    if engine.trace.part:
        notes.append("the trace is a part: the run that recorded it was interrupted or has not ended")
    if supplied:
        names = {"ar": "ar", "forward": "full forward passes", CONTROL: CONTROL}
        given = ", ".join(words for name, words in names.items() if name in supplied)
        notes.append(f"{given} by engine {live.describe()['engine']} from --model, not by the trace")
    if "ar" in supplied:
        rule, share = record["settings"]["rule"], record["settings"]["rule"]["across"][engine.trace.dtype]
        notes.append(
            f"its floor, but where controls of the trace give one: {rule['factor']:g} x the largest error of the "
            f"model's own controls on the tree + {rule['ulps']:g} ulp, at least {share:g} of the row's std"
        )
    if not engine.layers and live is None:
        notes.append("the trace does not say what its layers read: one state in row order is assumed for the leak law")
    if not record["floor"]["controls"].keys() & {"pad", "chain"}:
        notes.append("no control of the tree's width in the trace: small faults may hide, see docs/trace.md")
    if engine.header.sampling is None and any("processed" in each.arrays for step in steps for each in step.passes):
        notes.append("processed rows were not judged: the header does not say how they were sampled")
    if any("top_ids" in each.arrays for step in steps for each in step.passes):
        notes.append("top k only: what lies outside both top k, KL and total variation could not be compared")
    checks = [name for name in ("repeat", "forward") if not any(step.of(name) for step in steps)]
    if "ar" not in supplied and checks:
        notes.append(f"ar of the trace was not checked by {' or '.join(checks)}: not recorded")
    narrow = [step.id for step in steps if step.of("linear") and not _wide(step, "linear")]
    if narrow:
        notes.append(f"linear is narrower than the tree in {len(narrow)} steps, so it is no control there")
    walks = [walk for walk in walked.values() if walk is not None]
    wrong = ("wrong_accept", "wrong_reject", "wrong_bonus")
    off = sum(any(walk[name] for name in wrong) and not walk["by_tie"] for walk in walks)
    if walks:
        notes.append(f"what the engine accepted is not what ar's greedy walk accepts in {off} of {len(walks)} steps")
    return notes
