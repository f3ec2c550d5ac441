"""A live engine as the source of a run: prompts and trees ─► four modes and their controls ─► differences to ar.

The command line, the pytest plugin and the gate all call `check`; none of them computes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..base.errors import UsageError
from ..engines.checked import complete
from ..judge.attribution import Finding
from ..judge.case import Outcome
from ..judge.commit import Accept
from ..judge.nodes import judged_as, reference_problem
from ..model.wiring import wirings
from ..tree.case import Case, check_vocab
from ..tree.draft_tree import merge
from .attribution import attribute, attribute_commit
from .bits import check_bits, needs_decoding
from .controls import forward_run, repeat_run, strict_run
from .drafting import draft_cases
from .flow import Part, Subject, judge_all
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
    """Run every item through the four modes and return the record (see docs/record.md), ready for JSON.

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
    if reason := engine.decodes():
        needs_decoding(reason, {"accept": settings.accept, "oracle": oracle, "save-trace": trace})
        return check_bits(engine, items, settings, reason, model=model or engine.provenance, progress=progress)
    described = engine.describe()
    live = _Live(engine, settings, oracle, trace, judged_as(described))
    parts = [Part(place, item.id, item) for place, item in enumerate(items)]
    return judge_all(
        live.subjects, parts, len(items), settings, layers=engine.layers, described=described, dtype=live.dtype,
        model=model or engine.provenance, progress=progress, workers=1 if trace else min(workers, len(items)),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Live:
    """An engine that runs prompts, and under what. trace: a writer that gets every pass, or None."""

    engine: object
    settings: Settings
    oracle: object
    trace: object
    dtype: str

    def subjects(self, part: Part) -> Iterator[Subject]:
        """Run a prompt's trees, one after the other."""
        engine, oracle, item, settings = self.engine, self.oracle, part.content, self.settings
        prefix = engine.prefill(item.tokens)
        first, _ = ((), None) if part.place else attempt(None, lambda: react(engine, prefix, settings.rule, self.dtype))
        cases = draft_cases(engine, prefix, item, settings)
        for case in cases:
            check_vocab(case, engine.vocab_size)
        # The reference is decoded once for all budgets: their trees share most paths.
        union, places = merge([case.tree for case in cases])
        batched = settings.ar == "batched"
        reference = engine.decode(prefix, union, batched=batched)
        exact = None if oracle is None else oracle.decode(oracle.prefill(item.tokens), union)
        kept: dict[str, dict[int, torch.Tensor]] = {"forward": {}, "repeat": {}}  # rows by node, for a trace
        sinks = {name: _keeper(rows) if self.trace else None for name, rows in kept.items()}
        sample = {"limit": settings.controls, "sink": sinks["forward"]}
        forward, _ = attempt(None, lambda: forward_run(engine, item.tokens, union, reference, **sample))
        repeat = repeat_run(engine, prefix, union, reference, batched=batched, sink=sinks["repeat"])
        strict = float(np.max(strict_run(engine, prefix, union, reference).max_abs)) if batched else None
        problem = reference_problem(repeat, forward, settings.rule, self.dtype)
        for case, place in zip(cases, places, strict=True):
            own = slice(None) if place == tuple(range(len(union))) else list(place)  # a slice copies nothing
            rows, exact_rows = reference[own], None if exact is None else exact[own]
            step = self.trace and _step(self.trace, engine, item, case, rows, place, kept)
            runs = run_case(engine, prefix, case, rows, exact_rows, settings, step, self.dtype)
            runs = replace(runs, forward=None if forward is None else forward[list(place)], batched=strict)
            yield _LiveSubject(
                runs=runs, reactions=first or (), live=self, problem=problem, prefix=prefix, rows=rows, step=step
            )
            first = ()
            if step is not None:
                step.write()


@dataclass(frozen=True, eq=False, kw_only=True)
class _LiveSubject(Subject):
    """A tree that an engine ran. rows: ar's logits [n, vocabulary]; step: of a trace that is written, or None."""

    live: _Live
    problem: str | None
    prefix: object
    rows: torch.Tensor
    step: object

    def judged(self, judge: Callable[[str | None], Outcome]) -> Outcome:
        outcome, live = judge(self.problem), self.live
        return replace(outcome, accepts=commit_case(live.engine, self.prefix, outcome, live.settings, self.step))

    def attribute(self, outcome: Outcome, mode: str, wrong: Sequence[Accept]) -> Finding | None:
        live, floor = self.live, outcome.floors[mode]
        if outcome.results[mode].verdict != "fail" or floor is None:
            return attribute_commit(wrong[0], mode, live.engine.layers) if wrong else None
        wiring, tree = wirings(live.settings.control)[mode], outcome.case.tree
        finding, refusal = attempt(
            None,
            lambda: attribute(
                live.engine, self.prefix, tree, mode, wiring, self.rows, floor, live.settings.rule, live.dtype
            ),
        )
        if finding is None:
            return Finding(mode, 0, None, text=f"not looked into: {refusal}")
        return finding if finding.nodes else None  # what is made of the logits is wrong, not they


def _step(trace, engine, item: Item, case: Case, rows, place: Sequence[int], kept: dict[str, dict]):
    """Begin a step of a trace with ar's rows of a tree and what was kept of the union's. place: its nodes there."""
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
