"""The whole flow on one page: what was run of each tree ─► floors, verdict ─► causes, known failures ─► the record.

Two sources feed it: a live engine (`check`) and the passes of a trace (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..base.forked_pool import apart
from ..judge.attribution import Finding
from ..judge.case import Outcome, Runs, judge_case
from ..judge.commit import Accept
from ..judge.known import excuse, known_for
from ..judge.nodes import MODES
from ..judge.reactions import Reaction
from ..judge.record import make_record
from ..judge.sampling.judged import attach
from ..model.wiring import Layer
from .settings import Settings


class Part(NamedTuple):
    """Trees behind one prefix, which share its reference: a prompt's, or those of steps of a trace.

    place: of its first, in what progress counts.
    """

    place: int
    name: str
    content: object


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """One tree that is to be judged. reactions: of the model to its own states, where that was tried on its prefix."""

    runs: Runs
    reactions: tuple[Reaction, ...] = ()

    def judged(self, judge: Callable[[str | None], Outcome]) -> Outcome:
        """Return what `judge` makes of the runs, told why ar is no reference, or None; with commits, if there are."""
        raise NotImplementedError

    def attribute(self, outcome: Outcome, mode: str, wrong: Sequence[Accept]) -> Finding | None:
        """Look for where the fault of a failed mode enters. wrong: its commits that failed."""
        return None


@dataclass(frozen=True)
class Hunt:
    """Modes whose fault is to be attributed: until it was, those of `each` in every case."""

    modes: set[str]
    each: set[str]


def judge_all(
    run: Callable[[Part], Iterable[Subject]], parts: Sequence[Part], total: int, settings: Settings, *,
    layers: Sequence[Layer], described: dict, dtype: str, model: dict, progress: Callable | None = None,
    workers: int = 1,
) -> dict:  # fmt: skip
    """Run and judge all parts, and return the record (see docs/record.md), ready for JSON.

    run: gives the trees of a part, each when it is asked for. described, model: of the engine that ran them; dtype: the
    one whose rules judge. progress(done, total, text) is called before each part and at the end. workers: processes
    that share the parts, if `run` keeps nothing of them; the record is the same.
    """
    show, known = progress or (lambda *_: None), known_for(described)
    wanted = {True: MODES, False: (), None: settings.require}[settings.attribute]
    # A failure is known by its wiring, case by case; of all others the first one says it.
    hunt = Hunt(set(wanted), {entry.mode for entry in known})
    work = partial(_judge_part, run, hunt, layers, settings, dtype)
    outcomes: list[Outcome] = []
    reactions: list[Reaction] = []
    show(0, total, parts[0].name)
    judged = map(work, parts) if workers == 1 else apart(work, parts, workers)
    for end, (more, reacted) in zip([*parts[1:], Part(total, "done", None)], judged, strict=True):
        outcomes += more
        reactions += reacted
        show(end.place, total, end.name)
    excused = excuse([o.results for o in outcomes], known, [o.attribution for o in outcomes])
    outcomes = [replace(outcome, results=results) for outcome, results in zip(outcomes, excused, strict=True)]
    outcomes = _first_attributions(outcomes)
    record = make_record(outcomes, layers, settings, described, model, reactions)
    return attach(record, outcomes, settings) if settings.sampling.active else record


def _judge_part(run, hunt: Hunt, layers, settings: Settings, dtype: str, part: Part):
    outcomes, reactions = [], []
    for subject in run(part):
        judge = partial(judge_case, subject.runs, layers, settings.rule, settings.control, dtype)
        outcome = subject.judged(judge)
        outcomes.append(replace(outcome, attribution=_attribute(subject, outcome, hunt)))
        reactions += subject.reactions
    return outcomes, reactions


def _attribute(subject: Subject, outcome: Outcome, hunt: Hunt) -> dict[str, Finding]:
    """Return where the faults enter of the modes that failed here and were not looked into yet, by mode."""
    findings = {}
    for mode in filter(hunt.modes.__contains__, MODES):
        accepts = [accept for accept in outcome.accepts or () if mode in accept.modes and mode not in accept.expected]
        wrong = [accept for accept in accepts if accept.modes[mode].verdict == "fail"]
        if outcome.results[mode].verdict != "fail" and not wrong:
            continue
        if mode not in hunt.each:
            hunt.modes.remove(mode)
        if finding := subject.attribute(outcome, mode, wrong):
            findings[mode] = finding
    return findings


def _first_attributions(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Show each mode's fault where it first failed, and not what is excused; processes that do not see one another
    look more than once."""
    shown: set[str] = set()
    kept = []
    for outcome in outcomes:
        first = {
            mode: finding
            for mode, finding in outcome.attribution.items()
            if mode not in shown and outcome.results[mode].verdict != "known_failure"
        }
        shown |= first.keys()
        kept.append(replace(outcome, attribution=first))
    return kept
