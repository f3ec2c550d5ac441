"""Differences and floors in, a verdict per node and per mode out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..base.files import json_number
from ..base.words import counted
from ..model.wiring import UNFORKED, Attention, Layer, Plan, contaminated, reads
from ..tree.draft_tree import DraftTree
from .exact import Law
from .rule import EXACT, Rule

if TYPE_CHECKING:
    from .differences import Differences  # which imports torch

NODE_VERDICTS = ("pass", "tie", "leak", "flip")
MODES = ("linear", "tree_forked", "tree_unforked")
CONTROL = "tree_unforked"
NO_CONTROL = "no control of the tree's width was run, so nothing tells noise from a fault"
NO_FORWARD = "beyond plain rounding, and no full forward pass was run that would tell noise from a fault"
UNTRUSTED = "neither linear nor the chain control can be trusted"


def judge(differences: Differences, floor: np.ndarray) -> tuple[str, ...]:
    """One of NODE_VERDICTS per node. NaN is never within anything."""
    within = differences.max_abs <= floor  # not ~(error > floor): NaN answers False to both
    return tuple(
        ("tie" if changed else "pass") if inside else ("flip" if changed else "leak")
        for inside, changed in zip(within, differences.changed, strict=True)
    )


def beyond(verdicts: Sequence[str]) -> tuple[int, ...]:
    """Nodes that noise does not explain."""
    return tuple(node for node, verdict in enumerate(verdicts) if verdict in ("leak", "flip"))


def judged_as(environment: Mapping[str, object]) -> str:
    """The dtype whose rules judge a run: the coarsest one that the engine names, where it computes in several."""
    return str(environment.get("judged_as") or environment["dtype"])


def reference_problem(repeat: Differences | None, forward: Differences | None, rule: Rule, dtype: str) -> str | None:
    """Why autoregressive decoding cannot serve as ground truth, or None.

    repeat: a path decoded twice; forward: decoding against full forward passes, all nodes. None: it was not run.
    """
    drift = np.zeros(0, dtype=bool) if repeat is None else ~(repeat.max_abs <= rule.ulps * repeat.ulp)
    if drift.any():
        worst = int(np.argmax(np.where(np.isnan(repeat.max_abs), np.inf, repeat.max_abs)))
        return (
            f"ar does not repeat itself: |difference| {repeat.max_abs[worst]:.3g} at depth {worst}, "
            f"expected at most {rule.ulps * repeat.ulp[worst]:.3g}"
        )
    if forward is None:
        return None
    bound = rule.bounds[dtype]
    if dtype in EXACT:
        ratio, what = forward.max_abs / forward.std, "largest |difference| / std"
        off = float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))
    else:
        ratio, what = forward.rms / forward.std, "median rms / std"
        off = float(np.median(np.where(np.isnan(ratio), np.inf, ratio)))
    if not off <= bound:
        return f"ar differs from a full forward pass: {what} {off:.3g}, expected at most {bound:.3g}"
    return None


@dataclass(frozen=True)
class ModeResult:
    """What one mode of one case came to. `verdicts` is empty if it was not judged."""

    verdict: str
    verdicts: tuple[str, ...] = ()
    reason: str | None = None
    finite: bool = True  # false if a node's difference is NaN or inf, which no known failure explains

    def count(self, name: str) -> int:
        return self.verdicts.count(name)


def judge_linear(
    differences: Differences, floor: np.ndarray, problem: str | None, *, blind: bool = False
) -> ModeResult:
    """blind: the floor is the bound of plain rounding alone, which clears a run but cannot condemn it."""
    if problem:
        return ModeResult("reference_unusable", reason=problem)
    verdicts = judge(differences, floor)
    bad = beyond(verdicts)
    if not bad:
        return ModeResult("pass", verdicts)
    if blind:
        return ModeResult("reference_unusable", reason=NO_FORWARD)
    finite = bool(np.isfinite(differences.max_abs).all())
    return ModeResult("fail", verdicts, f"{counted(len(bad), 'node')} beyond the floor, first node {bad[0]}", finite)


def judge_forked(differences: Differences, floor: np.ndarray | None, problem: str | None) -> ModeResult:
    """As `judge_linear`; a floor of None means that no control could be trusted."""
    return judge_linear(differences, floor, problem or (UNTRUSTED if floor is None else None))


@dataclass(frozen=True)
class Systematic:
    """The errors of a run's tree passes against those of their controls, as a geometric mean over so many prompts.

    ratio   NaN where no control differs from ar;  limit  what it may be;  least  prompts below which nothing is said
    rows    that were looked at;  quiet  further ones that differ from ar where their controls are ar's bit for bit
    given   prompts with rows to look at, whether or not there was noise to compare with
    """

    ratio: float
    prompts: int
    limit: float
    least: int
    rows: int = 0
    quiet: int = 0
    given: int = 0

    @property
    def judged(self) -> bool:
        """Whether anything is said: most rows must have noise to be compared with, unless the others suffice."""
        return self.beyond or (self.prompts >= self.least and self.quiet <= self.rows)

    @property
    def beyond(self) -> bool:
        return self.prompts >= self.least and not self.ratio <= self.limit

    def __str__(self) -> str:
        return (
            f"systematically above noise: node by node within the floor, yet over {self.prompts} prompts the errors "
            f"are {self.ratio:.2f} x those of chains as wide, expected at most {self.limit:.2f}; a wrong position or a "
            "wrong mask in attention looks like this, and --dtype float32 shows at which nodes"
        )

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in ("prompts", "limit", "least", "rows", "quiet", "given")}
        return {"ratio": json_number(self.ratio), **own, "judged": self.judged, "beyond": self.beyond}


def systematic(
    cases: Iterable[tuple[object, DraftTree, Differences, Sequence[np.ndarray]]], rule: Rule, dtype: str
) -> Systematic | None:
    """How far tree passes that noise explains node by node are above it all the same, over a whole run.

    cases: the prompt, the tree, the tree pass against ar and the controls of its width, each [n]. Equal rows of a chain
    and a tree differ from ar by the same law, so errors are as often below their controls as above; a prompt counts
    once, since its nodes share their noise. A node counts for `factor` at most, either way: rows that an expert's
    near tie moves say nothing of all. Looked at are nodes that stand in another row than in a chain, since no order of
    rows can be wrong for the others, and whose control is not ar bit for bit, since that is no measure of noise. None
    in float32 and float64, and where no tree has such rows.
    """
    found: dict[object, list[np.ndarray]] = {}
    quiet = 0
    for prompt, tree, differences, controls in cases:
        moved = np.array(tree.depth) != np.arange(len(tree))
        if moved.any() and controls and dtype not in EXACT:
            control = np.max(np.stack(controls), axis=0)
            quiet += int((moved & (control == 0) & (differences.max_abs != 0)).sum())
            moved &= control != 0
            ratios = differences.max_abs[moved] / control[moved]
            found.setdefault(prompt, []).append(np.log(np.clip(ratios, 1 / rule.factor, rule.factor)))
    if not found:
        return None
    logs = [np.concatenate(own) for own in found.values()]
    means = [np.mean(own) for own in logs if len(own)]
    ratio = float(np.exp(np.mean(means))) if means else np.nan
    room = max(1.0, rule.pooled_prompts / max(1, len(means))) ** 0.5
    rows = sum(map(len, logs))
    return Systematic(ratio, len(means), rule.pooled**room, rule.pooled_least, rows, quiet, len(found))


def near_skip(plan: Plan, dirty: frozenset[int], rule: Rule) -> frozenset[int]:
    """Contaminated nodes that are at most `near_rows` path steps after a skip edge: those that must move."""
    after = {node: plan.rows_since_skip[node] for node in dirty}
    return frozenset(node for node, steps in after.items() if steps is not None and steps <= rule.near_rows)


def name_cause(result: ModeResult, tree: DraftTree, layers: Sequence[Layer], rule: Rule) -> ModeResult:
    """A failed tree pass whose bad nodes are those that rows in flat order contaminate, said in plain words."""
    bad = frozenset(beyond(result.verdicts))
    plan = UNFORKED.plan(tree)
    dirty = contaminated(plan, layers)
    if result.verdict != "fail" or not bad or not near_skip(plan, dirty, rule) <= bad <= dirty:
        return result
    also = "; a mask or positions in row order would hit the same nodes" if reads(layers, Attention) else ""
    return replace(result, reason=f"{result.reason}; looks unforked: states or windows read in row order{also}")


@dataclass(frozen=True)
class Leak:
    """The unforked run of one case against the leak law."""

    contaminated: frozenset[int]
    near: frozenset[int]  # contaminated, and within Rule.near_rows of a skip edge
    moved: frozenset[int]  # beyond noise
    clean_equal: (
        bool | None
    )  # clean nodes bit for bit equal to the forked run's; None if the engine claims no such thing
    law: Law | None = None  # which nodes moved in bits with foreign tokens, where that is claimed

    @property
    def outside(self) -> frozenset[int]:
        """Moved, though the law says that nothing reached them."""
        return self.moved - self.contaminated

    @property
    def still(self) -> frozenset[int]:
        """Near a skip edge, and yet within noise."""
        return self.near - self.moved


def judge_unforked(differences: Differences, floor: np.ndarray | None, leak: Leak, problem: str | None) -> ModeResult:
    if problem or floor is None:
        return ModeResult("reference_unusable", reason=problem or UNTRUSTED)
    verdicts = judge(differences, floor)
    if leak.outside:
        return ModeResult("fail", verdicts, f"nodes {sorted(leak.outside)[:8]} moved, which the leak law calls clean")
    if leak.clean_equal is False:
        return ModeResult("fail", verdicts, "clean nodes are not bit for bit those of the forked run")
    if leak.law and not leak.law.kept:
        return ModeResult("fail", verdicts, f"with other foreign tokens {leak.law}")
    if not leak.contaminated:
        return ModeResult("pass", verdicts, "nothing to leak")
    nodes = counted(len(leak.contaminated), "contaminated node")
    if not leak.moved:
        return ModeResult("insensitive", verdicts, f"none of {nodes} moved")
    return ModeResult("fail", verdicts, f"leaks as predicted: {len(leak.moved)} of {nodes} moved")
