"""The results of all cases ─► one verdict and exit code for the run. Runs nothing, prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..base.conclusion import INCONCLUSIVE, PASS, Conclusion, ExitCode
from ..base.words import counted
from .nodes import CONTROL, MODES, Leak, ModeResult, Systematic
from .rule import Rule

# Worst first: what a run says of a mode is the worst that any of its cases said.
MODE_VERDICTS = ("fail", "reference_unusable", "unsupported", "not_run", "insensitive", "known_failure", "pass")


@dataclass
class Verdict(Conclusion):
    """The conclusion of a comparison, with the verdict of each mode."""

    modes: dict[str, str] = field(default_factory=dict)
    sensitive: bool | None = None  # None: nothing to leak

    def into(self, record: Mapping) -> dict:
        return super().into({**record, "verdict": {"modes": self.modes, "sensitive": self.sensitive}})


def conclude(
    cases: Sequence[dict[str, ModeResult]], leaks: Sequence[Leak], rule: Rule, dtype: str, required, commits=(),
    reactions=(), above: Systematic | None = None, recurrent: bool = False,
) -> Verdict:  # fmt: skip
    """Reduce all cases to one verdict and exit code, decided by the `required` modes.

    commits: what was found of each forced accept, with `modes` (verdict and reason of each), `path`, and `expected`,
    the modes whose wiring must leave a wrong state there. reactions: a `sensitivity.Reaction` for each kind of state.
    above: what `systematic` says of the run's tree passes. recurrent: the model has layers whose state a tree must
    fork; then a tree mode is proven by forks alone.
    """
    modes = {
        mode: min((case[mode].verdict for case in cases), key=MODE_VERDICTS.index, default="not_run") for mode in MODES
    }
    if above and above.beyond and modes["tree_forked"] == "pass":
        modes["tree_forked"] = "fail"
    verdict = Verdict(modes=modes)
    # Only what was judged can be sensitive or not: an unusable reference says nothing of the model.
    judged = [
        leak
        for case, leak in zip(cases, leaks, strict=True)
        if case[CONTROL].verdict in ("fail", "insensitive", "pass")
    ]
    near = sum(len(leak.near) for leak in judged)
    moved, needed = near - sum(len(leak.still) for leak in judged), rule.near_share[dtype]
    if near:
        verdict.sensitive = moved >= needed * near
    if verdict.sensitive is False:
        if CONTROL not in required or modes[CONTROL] != "fail":  # what is required and was seen to leak has failed
            modes[CONTROL] = "insensitive"
        verdict.add(
            INCONCLUSIVE,
            f"insensitive: {moved} of {counted(near, 'contaminated node')} near a skip edge moved, expected "
            f"{needed:.0%}; this model or this input does not show a leak, so a pass says little",
        )
    for calm in (reaction for reaction in reactions if not reaction.reacts):
        verdict.sensitive = False
        verdict.add(INCONCLUSIVE, str(calm))
    outside = sum(len(leak.outside) for leak in leaks)
    unequal = sum(leak.clean_equal is False for leak in leaks)
    lawless = sum(bool(leak.law and not leak.law.kept) for leak in leaks)
    if outside or unequal or lawless:
        verdict.sensitive = False
        what = (
            f"{counted(outside, 'node')} moved outside the leak law"
            if outside
            else f"clean nodes differ in {counted(unequal, 'case')}"
            if unequal
            else f"foreign tokens move other nodes than the leak law says in {counted(lawless, 'case')}"
        )
        verdict.add(INCONCLUSIVE, f"the unforked control is off: {what}; the forked verdict is not proven")
    for mode in required:
        if modes[mode] != "pass":
            pooled = above if mode == "tree_forked" else None
            why = next((case[mode].reason for case in cases if case[mode].verdict == modes[mode]), pooled)
            verdict.add(ExitCode.of(modes[mode]), f"{mode}: {modes[mode]}" + (f" ({why})" if why else ""))
    states = [commit for commit in commits if getattr(commit, "pattern", "") == "state"]
    paths = [commit for commit in commits if getattr(commit, "pattern", "") != "state"]
    for mode in required:
        for what, of, group in (("commit after", "accepted paths", paths), ("states of", "recorded nodes", states)):
            wrong = [commit for commit in group if mode in commit.modes and commit.modes[mode].verdict != "pass"]
            if not wrong or modes[mode] == "known_failure":  # a pass that is known to be wrong leaves no right state
                continue
            worst = min(wrong, key=lambda commit: MODE_VERDICTS.index(commit.modes[mode].verdict))
            result = worst.modes[mode]
            verdict.add(
                ExitCode.of(result.verdict),
                f"{what} {mode}: {result.verdict} for {len(wrong)} of {len(group)} {of} "
                f"(path {'-'.join(map(str, worst.path))}: {result.reason})",
            )
    stray = [
        c for c in commits if CONTROL in c.modes and c.modes[CONTROL].verdict == "fail" and CONTROL not in c.expected
    ]
    if stray and CONTROL not in required:
        verdict.sensitive = False
        verdict.add(
            INCONCLUSIVE,
            f"the unforked control is off: a wrong state after {counted(len(stray), 'commit')} that the leak law calls "
            "clean; the forked verdict is not proven",
        )
    forks = any(leak.contaminated for leak in leaks)
    if cases and recurrent and not forks and {"tree_forked", CONTROL} & {*required}:
        verdict.add(
            INCONCLUSIVE,
            "no fork was exercised: every tree is a chain, on which a recurrent layer that forks nothing is right too; "
            "take a --budget or --tree that branches",
        )
    if not cases:
        verdict.add(INCONCLUSIVE, "no case was run")
    elif verdict.exit_code == PASS and all(modes[mode] == "known_failure" for mode in required):
        verdict.add(INCONCLUSIVE, "every required mode is a known failure, which leaves nothing that was proven")
    elif verdict.exit_code == PASS and modes[CONTROL] in ("not_run", "unsupported"):
        why = f"{CONTROL}: {modes[CONTROL]}; without the control nothing shows that a leak is seen"
        verdict.add(INCONCLUSIVE, why)
    return verdict
