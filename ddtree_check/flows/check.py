"""The whole flow on one page: prompts and trees ─► four modes ─► differences, floors ─► verdict ─► the record.

The command line, the pytest plugin and the gate all call `check`; none of them computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from .. import __version__
from ..base.errors import UsageError
from ..base.forked_pool import apart
from ..engines.checked import complete
from ..judge.attribution import Finding
from ..judge.case import Outcome, judge_case
from ..judge.known import excuse, load_known
from ..judge.nodes import MODES, judged_as, reference_problem
from ..judge.record import make_record
from ..judge.sampling.judged import attach
from ..model.wiring import wirings
from ..tree.case import Case, check_vocab
from ..tree.draft_tree import merge
from .attribution import attribute, attribute_commit
from .controls import forward_run, repeat_run, strict_run
from .drafting import draft_cases
from .passes import attempt, commit_case, run_case
from .sensitivity import react
from .settings import Item, Settings, fits


def check(
    engine,
    items: Iterable[Item],
    settings: Settings,
    *,
    oracle=None,
    model: dict | None = None,
    progress: Callable | None = None,
    trace=None,
    workers: int = 1,
) -> dict:
    """Runs every item through the four modes and returns the record (see docs/record.md), ready for JSON.

    oracle: an engine of the same model in float64, by which ar itself gets an error. progress(done, total, text) is
    called before each step. trace: a `trace.TraceWriter` that gets every pass, and keeps the run in one process.
    workers: processes that share the prompts of a model on the CPU; the record is the same. A mode that the engine
    refuses is `unsupported`, for that mode alone. Raises UsageError for input that the model cannot take.
    """
    items, engine = list(items), complete(engine, settings.vocab_size)
    if not items:
        raise UsageError("prompts: got 0, expected at least one")
    oracle = oracle if oracle is None else complete(oracle, settings.vocab_size)
    for item in items:
        fits(item, settings, engine.vocab_size, engine.max_length)
    environment = {"ddtree_check": __version__, **engine.describe()}
    known = [entry for entry in load_known() if entry.covers(environment.get("model_type"), environment)]
    wanted = {True: MODES, False: (), None: settings.require}[settings.attribute]
    # A failure is known by its wiring, case by case; of all others the first one says it.
    each = {entry.mode for entry in known if entry.explained}
    hunt = Hunt(set(wanted) - {entry.mode for entry in known if not entry.explained}, each)
    dtype, outcomes, reactions = judged_as(environment), [], ()
    workers = 1 if trace else min(workers, len(items))
    ahead = [item.id for item in items[1:]] + ["done"]
    if progress:
        progress(0, len(items), items[0].id)
    one = partial(_check_item, engine, oracle, settings=settings, dtype=dtype, trace=trace, hunt=hunt)
    placed = list(enumerate(items))
    for done, (found, seen) in enumerate(map(one, placed) if workers == 1 else apart(one, placed, workers), start=1):
        outcomes, reactions = outcomes + found, reactions + seen
        if progress:
            progress(done, len(items), ahead[done - 1])
    findings = [outcome.attribution for outcome in outcomes]
    excused = excuse([outcome.results for outcome in outcomes], known, findings)
    outcomes = [replace(outcome, results=results) for outcome, results in zip(outcomes, excused, strict=True)]
    outcomes = _first_attributions(outcomes)
    record = make_record(outcomes, engine.layers, settings, environment, model or engine.provenance, reactions)
    return attach(record, outcomes, settings) if settings.sampling.active else record


@dataclass(frozen=True)
class Hunt:
    """Modes whose fault is to be attributed: until it was, those of `each` in every case."""

    modes: set[str]
    each: set[str]


def _first_attributions(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each mode's fault is shown where it first failed, and not what is excused; processes that do not see one another
    look more than once."""
    seen: set[str] = set()
    found = []
    for outcome in outcomes:
        first = {
            mode: finding
            for mode, finding in outcome.attribution.items()
            if mode not in seen and outcome.results[mode].verdict != "known_failure"
        }
        seen |= first.keys()
        found.append(replace(outcome, attribution=first))
    return found


# One prompt


def _check_item(engine, oracle, placed: tuple[int, Item], settings: Settings, dtype: str, trace, hunt: Hunt):
    """The outcomes of one prompt, a tree each, and of the first one how the model reacts to its own states."""
    number, item = placed
    prefix = engine.prefill(item.tokens)
    reactions, _ = ((), None) if number else attempt(None, lambda: react(engine, prefix, settings.rule, dtype))
    cases = draft_cases(engine, prefix, item, settings)
    for case in cases:
        check_vocab(case, engine.vocab_size)
    # The reference is decoded once for all budgets: their trees share most paths.
    union, places = merge([case.tree for case in cases])
    batched = settings.ar == "batched"
    reference = engine.decode(prefix, union, batched=batched)
    exact = None if oracle is None else oracle.decode(oracle.prefill(item.tokens), union)
    kept: dict[str, dict[int, torch.Tensor]] = {"forward": {}, "repeat": {}}  # rows by node, for a trace
    sinks = {name: _keeper(rows) if trace else None for name, rows in kept.items()}
    sample = {"limit": settings.controls, "sink": sinks["forward"]}
    forward, _ = attempt(None, lambda: forward_run(engine, item.tokens, union, reference, **sample))
    repeat = repeat_run(engine, prefix, union, reference, batched=batched, sink=sinks["repeat"])
    strict = float(np.max(strict_run(engine, prefix, union, reference).max_abs)) if batched else None
    problem = reference_problem(repeat, forward, settings.rule, dtype)
    outcomes = []
    for case, place in zip(cases, places, strict=True):
        own = slice(None) if place == tuple(range(len(union))) else list(place)  # a slice copies nothing
        rows, exact_rows = reference[own], None if exact is None else exact[own]
        step = trace and _step(trace, engine, item, case, rows, place, kept)
        runs = run_case(engine, prefix, case, rows, exact_rows, settings, step, dtype)
        runs = replace(runs, forward=None if forward is None else forward[list(place)], batched=strict)
        outcome = judge_case(runs, engine.layers, settings.rule, settings.control, dtype, problem)
        outcome = replace(outcome, accepts=commit_case(engine, prefix, runs, settings, step))
        outcomes.append(replace(outcome, attribution=_attribute(engine, prefix, outcome, rows, settings, dtype, hunt)))
        if step is not None:
            step.write()
    return outcomes, reactions or ()


def _attribute(engine, prefix, outcome: Outcome, reference, settings: Settings, dtype: str, hunt: Hunt) -> dict:
    """Where the faults enter of the modes that failed here and were not looked into yet, by mode."""
    found: dict[str, Finding] = {}
    wiring = wirings(settings.control)
    for mode in MODES:
        floor, accepts = outcome.floors.get(mode), [a for a in outcome.accepts or () if mode in a.modes]
        wrong = [accept for accept in accepts if accept.modes[mode].verdict == "fail" and mode not in accept.expected]
        if mode not in hunt.modes or not (outcome.results[mode].verdict == "fail" or wrong):
            continue
        if mode not in hunt.each:
            hunt.modes.remove(mode)
        if outcome.results[mode].verdict == "fail" and floor is not None:
            seen, refusal = attempt(
                None,
                lambda mode=mode, floor=floor: attribute(
                    engine, prefix, outcome.case.tree, mode, wiring[mode], reference, floor, settings.rule, dtype
                ),
            )
            if seen is None:
                seen = Finding(mode, 0, None, text=f"not looked into: {refusal}")
            elif not seen.nodes:  # what is made of the logits is wrong, not they
                continue
            found[mode] = seen
        elif wrong:
            found[mode] = attribute_commit(wrong[0], mode, engine.layers)
    return found


def _step(trace, engine, item: Item, case: Case, rows, place: Sequence[int], kept: dict[str, dict]):
    """A step of a trace that holds ar's rows of a tree and what was kept of the union's. place: its nodes there."""
    step = trace.step(
        case.id, case.prompt_tokens, case.tree.tokens, case.tree.parents, request=item.id, source=case.source
    )
    taken = engine.chosen("ar", case.tree, range(len(rows)), rows)
    step.add("ar", rows, wiring="engine", chosen=None if taken is None else list(map(int, taken)))
    for name, held in kept.items():
        nodes = [node for node, at in enumerate(place) if at in held]
        if nodes:
            step.add(name, torch.stack([held[place[node]] for node in nodes]), nodes=nodes)
    return step


def _keeper(rows: dict[int, torch.Tensor]) -> Callable:
    return lambda nodes, logits: rows.update(zip(nodes, logits, strict=True))
