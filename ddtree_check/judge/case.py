"""What was run on one tree ─► floors ─► the verdict of each mode. Live runs and recorded ones are judged alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..flows.settings import Settings
from ..model.wiring import contaminated
from ..tree.accept import compare_walks, greedy_walk
from ..tree.case import Case
from .differences import Differences
from .nodes import (
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
from .record import Outcome
from .rule import EXACT
from .sampling.judged import Sampled
from .sampling.judged import judge as judge_sampled
from .ties import Ties


@dataclass(frozen=True, eq=False)
class Runs:
    """What was run on one tree, as differences to ar. A mode that was not stands in `missing` instead: its name, then
    the verdict ('unsupported', 'not_run' or 'reference_unusable') and the reason.

    ar         the reference against itself: its argmax and margin
    linear, forked, unforked   Differences [n]
    chain      the engine's tree path on chains [n], and which nodes it measured, bool [n]
    forward    full forward passes [n]
    equal      clean nodes of both trees agree bit for bit; None if the engine claims no such thing
    wide       `linear` was as wide as the tree, so that it may be its control
    across     for runs whose reference is another engine's: the floor [n] of any run, see docs/trace.md
    exact, library, batched   as in Outcome
    """

    ar: Differences
    linear: Differences | None = None
    forked: Differences | None = None
    unforked: Differences | None = None
    chain: tuple[Differences, np.ndarray] | None = None
    forward: Differences | None = None
    missing: dict[str, tuple[str, str]] = field(default_factory=dict)
    equal: bool | None = None
    wide: bool = True
    across: Callable[[Differences], np.ndarray] | None = None
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    library: float | None = None
    batched: float | None = None
    accepts: tuple | None = None
    sampled: dict[str, Sampled] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)


def judge_case(case: Case, layers, runs: Runs, settings: Settings, dtype: str, problem: str | None) -> Outcome:
    """The floors and verdicts of what was run on one tree. problem: why ar cannot serve as the reference, if so."""
    rule, tree = settings.rule, case.tree
    plan = settings.control.plan(tree)
    dirty = contaminated(plan, layers)
    results = {mode: ModeResult(verdict, reason=reason) for mode, (verdict, reason) in runs.missing.items()}
    floors: dict[str, np.ndarray | None] = dict.fromkeys(MODES)
    controls = {} if runs.forward is None else {"forward": runs.forward.max_abs}

    def chain_floor(found: Differences, *trusted: np.ndarray) -> np.ndarray:
        if runs.across is None:
            return rule.chain_floor([*controls_of_ar, *trusted], found, dtype)
        floor = runs.across(found)
        return np.maximum(floor, rule.chain_floor(trusted, found, dtype)) if trusted else floor

    controls_of_ar = list(controls.values())
    # Full forward passes judge linear; only a linear that passed joins the tree's floor (a mode never enters its own).
    trusted, recorded = [], False
    if runs.linear is not None:
        floors["linear"] = chain_floor(runs.linear)
        blind = runs.forward is None and runs.across is None and dtype not in EXACT
        results["linear"] = judge_linear(runs.linear, floors["linear"], problem, blind=blind)
        if runs.wide:
            recorded, controls["pad"] = True, runs.linear.max_abs
            trusted += [runs.linear.max_abs] if results["linear"].verdict == "pass" else []
    if runs.chain is not None:
        recorded, (chain, measured) = True, runs.chain
        bad = beyond(judge(chain, chain_floor(chain, *trusted)))
        controls["chain"] = _extended(chain.max_abs, measured)
        trusted += [] if any(measured[node] for node in bad) else [controls["chain"]]

    def tree_floor(found: Differences) -> np.ndarray | None:
        if runs.across is None:
            return rule.floor(trusted, found.ulp) if trusted else None
        floor = runs.across(found)
        if not recorded:
            return floor
        own = rule.floor(trusted, found.ulp) if trusted else None
        return np.maximum(own, floor) if trusted and dtype in EXACT else own

    if runs.forked is not None:
        floors["tree_forked"] = tree_floor(runs.forked)
        why = None if recorded or runs.across else NO_CONTROL
        results["tree_forked"] = judge_forked(runs.forked, floors["tree_forked"], problem or why)
        results["tree_forked"] = name_cause(results["tree_forked"], tree, layers, rule)
    moved, near = (), set()
    if runs.unforked is not None:
        floors["tree_unforked"] = control_floor = tree_floor(runs.unforked)
        moved = beyond(judge(runs.unforked, control_floor)) if control_floor is not None else ()
        near = near_skip(plan, dirty, rule)
    leak = Leak(dirty, frozenset(near), frozenset(moved), runs.equal)
    if runs.unforked is not None:
        results["tree_unforked"] = judge_unforked(runs.unforked, floors["tree_unforked"], leak, problem)

    results = {mode: runs.ties.judge(mode, result) for mode, result in results.items()}
    for mode, found in runs.sampled.items():
        results[mode] = judge_sampled(results[mode], found, floors[mode])
    differences = {"linear": runs.linear, "tree_forked": runs.forked, "tree_unforked": runs.unforked}
    differences = {mode: found for mode, found in differences.items() if found is not None}
    walks = {"ar": greedy_walk(tree, runs.ar.argmax)} | {
        mode: greedy_walk(tree, found.run_argmax) for mode, found in differences.items()
    }
    acceptance = {}
    for mode, walk in walks.items():
        ties = () if mode == "ar" else [node for node, v in enumerate(results[mode].verdicts) if v == "tie"]
        acceptance[mode] = compare_walks(tree, walks["ar"], walk, ties)
    return Outcome(
        case=case,
        ar=runs.ar,
        differences=differences,
        floors=floors,
        results={mode: results[mode] for mode in MODES},
        plan=plan,
        leak=leak,
        acceptance=acceptance,
        controls=controls,
        library_unforked=runs.library,
        exact=runs.exact,
        batched=runs.batched,
        accepts=runs.accepts,
        sampled=runs.sampled,
        ties=runs.ties,
    )


def _extended(control: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Controls of a sample of paths, for all nodes: a node without one takes the largest that was measured."""
    return np.where(measured, control, control[measured].max())
