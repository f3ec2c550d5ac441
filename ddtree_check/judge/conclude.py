"""Differences and their floor ─► a verdict per node, per mode and for the run. Runs nothing, prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.words import counted
from .nodes import CONTROL, MODES, Leak, ModeResult, Systematic
from .rule import Rule

if TYPE_CHECKING:
    pass  # which imports torch
# Worst first: what a run says of a mode is the worst that any of its cases said.
MODE_VERDICTS = ("fail", "reference_unusable", "unsupported", "not_run", "insensitive", "known_failure", "pass")
DTYPES = ("float64", "float32", "bfloat16", "float16")
SHARES = "DTYPE=SHARE,..."

PASS, DEFECT, INCONCLUSIVE, USAGE = 0, 1, 2, 3
TEXTS = {PASS: "pass", DEFECT: "fail", INCONCLUSIVE: "inconclusive"}


def _by_dtype(double: float, single: float, half: float) -> Callable[[], dict[str, float]]:
    return lambda: dict(zip(DTYPES, (double, single, half, half), strict=True))


@dataclass(frozen=True)
class Verdict:
    """What the whole run came to. `modes` maps each mode to its verdict, `reasons` says why in plain words."""

    modes: dict[str, str]
    reasons: tuple[str, ...]
    sensitive: bool | None  # None: nothing to leak
    exit_code: int

    @property
    def text(self) -> str:
        return TEXTS[self.exit_code]


def conclude(
    cases: Sequence[dict[str, ModeResult]], leaks: Sequence[Leak], rule: Rule, dtype: str, required, commits=(),
    reactions=(), above: Systematic | None = None,
) -> Verdict:  # fmt: skip
    """From all cases to one verdict and exit code, decided by the `required` modes.

    commits: what was found of each forced accept, with `modes` (verdict and reason of each), `path`, and `expected`,
    the modes whose wiring must leave a wrong state there. reactions: a `sensitivity.Reaction` for each kind of state.
    above: what `systematic` says of the run's tree passes.
    """
    reasons: list[str] = []
    modes = {
        mode: min((case[mode].verdict for case in cases), key=MODE_VERDICTS.index, default="not_run") for mode in MODES
    }
    if above and above.beyond and modes["tree_forked"] == "pass":
        modes["tree_forked"] = "fail"
    # Only what was judged can be sensitive or not: an unusable reference says nothing of the model.
    judged = [
        leak
        for case, leak in zip(cases, leaks, strict=True)
        if case[CONTROL].verdict in ("fail", "insensitive", "pass")
    ]
    near = sum(len(leak.near) for leak in judged)
    moved = near - sum(len(leak.still) for leak in judged)
    sensitive: bool | None = None
    if near:
        needed = rule.near_share[dtype]
        sensitive = moved >= needed * near
        if not sensitive:
            if CONTROL not in required or modes[CONTROL] != "fail":  # what is required and was seen to leak has failed
                modes[CONTROL] = "insensitive"
            reasons.append(
                f"insensitive: {moved} of {counted(near, 'contaminated node')} near a skip edge moved, expected "
                f"{needed:.0%}; this model or this input does not show a leak, so a pass says little"
            )
    for calm in (reaction for reaction in reactions if not reaction.reacts):
        sensitive = False
        reasons.append(str(calm))
    outside = sum(len(leak.outside) for leak in leaks)
    unequal = sum(leak.clean_equal is False for leak in leaks)
    if outside or unequal:
        sensitive = False
        what = (
            f"{counted(outside, 'node')} moved outside the leak law"
            if outside
            else f"clean nodes differ in {counted(unequal, 'case')}"
        )
        reasons.append(f"the unforked control is off: {what}; the forked verdict is not proven")
    for mode in required:
        if modes[mode] != "pass":
            pooled = above if mode == "tree_forked" else None
            why = next((case[mode].reason for case in cases if case[mode].verdict == modes[mode]), pooled)
            reasons.append(f"{mode}: {modes[mode]}" + (f" ({why})" if why else ""))
    demanded = [modes[mode] for mode in required]
    for mode in required:
        # A pass that is known to be wrong cannot leave a right state.
        wrong = (
            [c for c in commits if mode in c.modes and c.modes[mode].verdict != "pass"]
            if modes[mode] != "known_failure"
            else []
        )
        for what, of, kind in (("commit after", "accepted paths", False), ("states of", "recorded nodes", True)):
            own = [commit for commit in wrong if (getattr(commit, "pattern", "") == "state") == kind]
            if not own:
                continue
            count = sum((getattr(commit, "pattern", "") == "state") == kind for commit in commits)
            worst = min(own, key=lambda commit: MODE_VERDICTS.index(commit.modes[mode].verdict))
            found = worst.modes[mode]
            demanded.append(found.verdict)
            reasons.append(
                f"{what} {mode}: {found.verdict} for {len(own)} of {count} {of} "
                f"(path {'-'.join(map(str, worst.path))}: {found.reason})"
            )
    stray = [
        c for c in commits if CONTROL in c.modes and c.modes[CONTROL].verdict == "fail" and CONTROL not in c.expected
    ]
    if stray and CONTROL not in required:
        sensitive = False
        reasons.append(
            f"the unforked control is off: a wrong state after {counted(len(stray), 'commit')} that the leak law calls "
            "clean; the forked verdict is not proven"
        )
    if not cases:
        reasons.append("no case was run")
        code = INCONCLUSIVE
    elif "fail" in demanded:
        code = DEFECT
    elif any(verdict not in ("pass", "known_failure") for verdict in demanded) or sensitive is False:
        code = INCONCLUSIVE
    elif "pass" not in demanded:
        reasons.append("every required mode is a known failure, which leaves nothing that was proven")
        code = INCONCLUSIVE
    elif modes["tree_unforked"] in ("not_run", "unsupported"):
        reasons.append(
            f"tree_unforked: {modes['tree_unforked']}; without the control nothing shows that a leak is seen"
        )
        code = INCONCLUSIVE
    else:
        code = PASS
    return Verdict(modes, tuple(reasons), sensitive, code)
