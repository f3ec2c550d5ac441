"""One tree: what was run on it ─► floors ─► what was judged of it. Live runs and recorded ones are judged alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..model.wiring import Layer, Plan, Wiring, contaminated
from ..tree.accept import compare_walks, greedy_walk
from ..tree.case import Case
from .attribution import Finding
from .commit import Accept
from .differences import Differences
from .exact import MOVED, Exact
from .nodes import (
    CONTROL,
    MODES,
    NO_CONTROL,
    Leak,
    ModeResult,
    beyond,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    name_cause,
    near_skip,
)
from .rule import EXACT, Rule
from .sampling.judged import Sampled
from .sampling.judged import judge as judge_sampled
from .ties import Ties


@dataclass(frozen=True, eq=False, kw_only=True)
class Runs:
    """One case as it was run, in differences to ar. Arrays are float64 [n], one figure for each of n nodes.

    ar           the reference against itself: its argmax and margin
    differences  of each mode that was run
    missing      of each mode that was not: 'unsupported', 'not_run' or 'reference_unusable', and the reason
    chain        the engine's tree path on chains [n], and which nodes it measured, bool [n]
    forward      full forward passes
    equal        clean nodes of both trees agree bit for bit; None if the engine claims no such thing
    wide         linear was as wide as the tree, so that it may be its control
    across       for runs whose reference is another engine's: the floor [n] of any run, see docs/trace.md
    exact        errors [n] of ar and each mode against the float64 oracle, if there was one
    bits         what the exact checks say; None if they were not run
    library_unforked   largest |difference| of the library's own unforked pass to ours
    batched      largest |difference| of a batched reference to one-token steps, on one path
    sampled      what sampling makes of each mode; empty for greedy decoding
    ties         equal largest logits, and who takes which
    """

    case: Case
    ar: Differences
    differences: dict[str, Differences]
    missing: dict[str, tuple[str, str]]
    chain: tuple[Differences, np.ndarray] | None = None
    forward: Differences | None = None
    equal: bool | None = None
    wide: bool = True
    across: Callable[[Differences], np.ndarray] | None = None
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    bits: Exact | None = None
    library_unforked: float | None = None
    batched: float | None = None
    sampled: dict[str, Sampled] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome(Runs):
    """One case as it was judged. A mode that was not run has a result without verdicts, and no acceptance.

    floors       [n] of each mode, None where there is none;  results  of each mode
    plan         the control's wiring on this tree;  leak  what it did
    acceptance   of ar and each mode that was run: its greedy walk against ar's
    controls     errors [n] of the runs that are equal by construction
    accepts      the paths that were committed by force, if any were asked for
    attribution  where the fault of a red mode enters, for those that were looked into
    """

    floors: dict[str, np.ndarray | None]
    results: dict[str, ModeResult]
    plan: Plan
    leak: Leak
    acceptance: dict[str, dict]
    controls: dict[str, np.ndarray]
    accepts: tuple[Accept, ...] | None = None
    attribution: dict[str, Finding] = field(default_factory=dict)


def judge_case(
    runs: Runs, layers: Sequence[Layer], rule: Rule, control: Wiring, dtype: str, problem: str | None
) -> Outcome:
    """Judge what was run on one tree. problem: why ar cannot serve as the reference, or None."""
    tree = runs.case.tree
    plan = control.plan(tree)
    dirty = contaminated(plan, layers)
    results = {mode: ModeResult(verdict, reason=reason) for mode, (verdict, reason) in runs.missing.items()}
    floors: dict[str, np.ndarray | None] = dict.fromkeys(MODES)
    noise = _Noise(runs, rule, dtype)
    if (linear := runs.differences.get("linear")) is not None:
        floors["linear"] = noise.chain_floor(linear)
        blind = runs.forward is None and runs.across is None and dtype not in EXACT
        results["linear"] = judge_linear(linear, floors["linear"], problem, blind=blind)
        if runs.wide:
            noise.add("pad", linear.max_abs, trusted=results["linear"].verdict == "pass")
    noise.add_chain()
    if (forked := runs.differences.get("tree_forked")) is not None:
        floors["tree_forked"] = noise.tree_floor(forked)
        why = None if noise.recorded or runs.across else NO_CONTROL
        result = judge_forked(forked, floors["tree_forked"], problem or why)
        results["tree_forked"] = _exactly(name_cause(result, tree, layers, rule), runs.bits)
    law = runs.bits and runs.bits.law
    leak = Leak(dirty, frozenset(), frozenset(), runs.equal, law)
    if (unforked := runs.differences.get(CONTROL)) is not None:
        floors[CONTROL] = floor = noise.tree_floor(unforked)
        moved = beyond(judge(unforked, floor)) if floor is not None else ()
        leak = Leak(dirty, near_skip(plan, dirty, rule), frozenset(moved), runs.equal, law)
        results[CONTROL] = judge_unforked(unforked, floor, leak, problem)
    results = {mode: runs.ties.judge(mode, results[mode]) for mode in MODES}
    for mode, sampled in runs.sampled.items():
        results[mode] = judge_sampled(results[mode], sampled, floors[mode])
    return Outcome(
        **vars(runs),
        floors=floors,
        results=results,
        plan=plan,
        leak=leak,
        acceptance=_acceptance(runs, results),
        controls=noise.controls,
    )


def _exactly(result: ModeResult, bits: Exact | None) -> ModeResult:
    """Return a mode's result with what its exact checks found: a node that is off in bits is no pass and no tie."""
    if bits is None or bits.verdict != "fail":
        return result
    off, worse = set(bits.of(MOVED)), {"pass": "leak", "tie": "flip"}
    verdicts = [worse.get(verdict, verdict) if node in off else verdict for node, verdict in enumerate(result.verdicts)]
    reason = f"{result.reason}; {bits.reason}" if result.verdict == "fail" else bits.reason
    return replace(result, verdict="fail", verdicts=tuple(verdicts), reason=reason)


class _Noise:
    """The controls of one tree, and the floors that they give. A mode never enters its own floor.

    trusted: errors of those that are right themselves. recorded: one of the tree's width was run.
    """

    def __init__(self, runs: Runs, rule: Rule, dtype: str):
        self.runs, self.rule, self.dtype = runs, rule, dtype
        self.controls = {} if runs.forward is None else {"forward": runs.forward.max_abs}
        self.trusted: list[np.ndarray] = []
        self.recorded = False

    def add(self, name: str, errors: np.ndarray, *, trusted: bool) -> None:
        self.recorded, self.controls[name] = True, errors
        self.trusted += [errors] if trusted else []

    def add_chain(self) -> None:
        """Add the chain control; a node that it did not measure takes the largest that it did."""
        if self.runs.chain is None:
            return
        chain, measured = self.runs.chain
        bad = beyond(judge(chain, self.chain_floor(chain)))
        errors = np.where(measured, chain.max_abs, chain.max_abs[measured].max())
        self.add("chain", errors, trusted=not any(measured[node] for node in bad))

    def chain_floor(self, differences: Differences) -> np.ndarray:
        """Return the floor [n] of chains: by full forward passes, and by what is trusted so far."""
        if self.runs.across is None:
            forward = [self.controls[name] for name in ("forward",) if name in self.controls]
            return self.rule.chain_floor([*forward, *self.trusted], differences, self.dtype)
        floor = self.runs.across(differences)
        if not self.trusted:
            return floor
        return np.maximum(floor, self.rule.chain_floor(self.trusted, differences, self.dtype))

    def tree_floor(self, differences: Differences) -> np.ndarray | None:
        """Return the floor [n] of a tree pass, or None if no control of its width can be trusted."""
        own = self.rule.floor(self.trusted, differences.ulp) if self.trusted else None
        if self.runs.across is None:
            return own
        floor = self.runs.across(differences)
        if not self.recorded:
            return floor
        return np.maximum(own, floor) if self.trusted and self.dtype in EXACT else own


def _acceptance(runs: Runs, results: dict[str, ModeResult]) -> dict[str, dict]:
    """Compare the greedy walk of ar and of each mode with ar's."""
    tree, right = runs.case.tree, greedy_walk(runs.case.tree, runs.ar.argmax)
    acceptance = {"ar": compare_walks(tree, right, right, ())}
    for mode, differences in runs.differences.items():
        ties = [node for node, verdict in enumerate(results[mode].verdicts) if verdict == "tie"]
        acceptance[mode] = compare_walks(tree, right, greedy_walk(tree, differences.run_argmax), ties)
    return acceptance
