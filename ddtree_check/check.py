"""The whole flow on one page: prompts and trees ─► four modes ─► differences, floors ─► verdict ─► the record.

The command line, the pytest plugin and the gate all call `check`; none of them computes anything.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import __version__
from .accept import compare_walks, greedy_walk
from .case import Case, check_vocab
from .compare import Differences, measure
from .draft import Marginals, best_first, ngram_marginals, recorded_tree, self_marginals, token_ids
from .errors import Unsupported, UsageError
from .noise import chain_run, forward_run, repeat_run, strict_run
from .tree import DraftTree, merge
from .verdict import (
    MODES,
    Leak,
    ModeResult,
    Rule,
    beyond,
    conclude,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    reference_problem,
)
from .wiring import FORKED, UNFORKED, Attention, Conv, State, contaminated

SCHEMA = "ddtree-check/1"
DRAFTS = ("self", "ngram", "recorded")
LENGTH = 15  # positions of a draft block of 16


@dataclass(frozen=True)
class Settings:
    """What a run does. Everything in it is in the record, so that the run can be made again.

    budgets      draft nodes per tree, one tree each;  order  its flat order: heap (as built), breadth, depth
    draft        self, ngram or recorded;  acceptance  the share of depths where `self` puts the target's token first
    require      the modes that decide the exit code
    ar           strict (one node at a time) or batched (level by level)
    controls     how many leaf paths the chain control runs, those that hold most nodes; None for all
    """

    budgets: tuple[int, ...] = (16, 64)
    order: str = "heap"
    draft: str = "self"
    acceptance: float = 0.7
    length: int = LENGTH
    seed: int = 0
    require: tuple[str, ...] = ("linear", "tree_forked")
    ar: str = "strict"
    controls: int | None = None
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self):
        _expect(
            bool(self.budgets) and all(b >= 1 for b in self.budgets), "budget", self.budgets, "numbers of at least 1"
        )
        _expect(self.order in ("heap", "breadth", "depth"), "order", self.order, "heap, breadth or depth")
        _expect(self.draft in DRAFTS, "draft", self.draft, f"one of {', '.join(DRAFTS)}")
        _expect(0 <= self.acceptance <= 1, "acceptance", self.acceptance, "a share from 0 to 1")
        _expect(self.length >= 1, "length", self.length, "a number of at least 1")
        _expect(self.ar in ("strict", "batched"), "ar", self.ar, "strict or batched")
        _expect(self.controls is None or self.controls >= 1, "controls", self.controls, "a number of at least 1")
        _expect(
            bool(self.require) and set(self.require) <= set(MODES),
            "require",
            self.require,
            f"some of {', '.join(MODES)}",
        )

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"budgets": list(self.budgets), "require": list(self.require), "rule": self.rule.to_json()}


@dataclass(frozen=True)
class Item:
    """One prompt to run: its id, its token ids, and a tree or recorded drafts where the caller brings them."""

    id: str
    tokens: tuple[int, ...]
    tree: DraftTree | None = None
    recorded: DraftTree | Marginals | None = None


def check(
    engine, items: Iterable[Item], settings: Settings, *, model: dict | None = None, progress: Callable | None = None
):
    """Runs every item through the four modes and returns the record (see docs/record.md), ready for JSON.

    progress(done, total, text) is called before each step. Raises UsageError for input that the model cannot take.
    """
    items = list(items)
    _expect(bool(items), "prompts", 0, "at least one")
    for item in items:
        fits(item, settings, engine.vocab_size, engine.max_length)
    environment = {"ddtree_check": __version__, **engine.describe()}
    outcomes = []
    for index, item in enumerate(items):
        if progress:
            progress(index, len(items), item.id)
        outcomes += _check_item(engine, item, settings, environment["dtype"])
    if progress:
        progress(len(items), len(items), "done")
    return _record(engine, outcomes, settings, environment, model or getattr(engine, "provenance", {}))


# One prompt


@dataclass(frozen=True, eq=False)
class _Outcome:
    case: Case
    differences: dict[str, Differences]
    floors: dict[str, np.ndarray | None]
    results: dict[str, ModeResult]
    leak: Leak
    acceptance: dict[str, dict]
    controls: dict[str, np.ndarray]
    library_unforked: float
    batched: float | None = None  # largest |difference| of the batched reference to one-token steps, on one path


def _check_item(engine, item: Item, settings: Settings, dtype: str) -> list[_Outcome]:
    prefix = engine.prefill(item.tokens)
    cases = _cases(engine, prefix, item, settings)
    for case in cases:
        check_vocab(case, engine.vocab_size)
    # The reference is decoded once for all budgets: their trees share most paths.
    union, places = merge([case.tree for case in cases])
    batched = settings.ar == "batched"
    reference = engine.decode(prefix, union, batched=batched)
    forward = forward_run(engine, item.tokens, union, reference)
    repeat = repeat_run(engine, prefix, union, reference, batched=batched)
    strict = float(np.max(strict_run(engine, prefix, union, reference).max_abs)) if batched else None
    problem = reference_problem(repeat, forward, settings.rule, dtype)
    outcomes = []
    for case, place in zip(cases, places, strict=True):
        rows = reference if place == tuple(range(len(union))) else reference[list(place)]
        outcomes.append(_check_case(engine, prefix, case, rows, forward[list(place)], settings, dtype, problem))
    return [replace(outcome, batched=strict) for outcome in outcomes]


def _check_case(engine, prefix, case: Case, reference, forward: Differences, settings, dtype: str, problem: str | None):
    rule, tree = settings.rule, case.tree
    linear, _ = chain_run(engine, prefix, tree, reference, forked=False)
    # Without a recurrence the engine's own pass and its tree path are the same pass.
    chain, measured = linear, np.ones(len(tree), dtype=bool)
    if any(isinstance(op, (Conv, State)) for layer in engine.layers for branch in layer.branches for op in branch):
        chain, measured = chain_run(engine, prefix, tree, reference, forked=True, limit=settings.controls)
    forked_logits = engine.verify(prefix, tree, FORKED).logits
    forked = measure(reference, forked_logits)
    fingerprints = _row_hashes(forked_logits, tree)
    del forked_logits
    unforked_run = engine.verify(prefix, tree, UNFORKED)
    unforked = measure(reference, unforked_run.logits)
    library = measure(unforked_run.logits, engine.verify(prefix, tree, None).logits)
    plan = UNFORKED.plan(tree)
    dirty = contaminated(plan, engine.layers)

    # Full forward passes judge linear; only a linear that passed joins the tree's floor (a mode never enters its own).
    linear_floor = rule.chain_floor([forward.max_abs], linear, dtype)
    results = {"linear": judge_linear(linear, linear_floor, problem)}
    chain_controls = [forward.max_abs] + ([linear.max_abs] if results["linear"].verdict == "pass" else [])
    chain_verdicts = judge(chain, rule.chain_floor(chain_controls, chain, dtype))
    chain_fine = not any(measured[node] for node in beyond(chain_verdicts))
    trusted = [linear.max_abs] if results["linear"].verdict == "pass" else []
    chain_errors = _extended(chain.max_abs, measured)
    trusted += [chain_errors] if chain_fine else []
    floor = rule.floor(trusted, forked.ulp) if trusted else None
    results["tree_forked"] = judge_forked(forked, floor, contaminated(FORKED.plan(tree), engine.layers), problem)
    unforked_floor = rule.floor(trusted, unforked.ulp) if trusted else None
    equal = _row_hashes(unforked_run.logits, tree) == fingerprints if engine.exact_control else None
    moved = beyond(judge(unforked, unforked_floor)) if unforked_floor is not None else ()
    near = {node for node in dirty if (steps := plan.rows_since_skip(node)) is not None and steps <= rule.near_rows}
    leak = Leak(dirty, frozenset(near), frozenset(moved), equal)
    results["tree_unforked"] = judge_unforked(unforked, unforked_floor, leak, problem)

    differences = {"linear": linear, "tree_forked": forked, "tree_unforked": unforked}
    walks = {"ar": greedy_walk(tree, forked.argmax)} | {
        mode: greedy_walk(tree, found.run_argmax) for mode, found in differences.items()
    }
    acceptance = {}
    for mode, walk in walks.items():
        ties = () if mode == "ar" else [node for node, v in enumerate(results[mode].verdicts) if v == "tie"]
        acceptance[mode] = compare_walks(tree, walks["ar"], walk, ties)
    return _Outcome(
        case=case,
        differences=differences,
        floors={"linear": linear_floor, "tree_forked": floor, "tree_unforked": unforked_floor},
        results=results,
        leak=leak,
        acceptance=acceptance,
        controls={"forward": forward.max_abs, "pad": linear.max_abs, "chain": chain_errors},
        library_unforked=float(np.max(library.max_abs)),
    )


def _extended(control: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Controls of a sample of paths, for all nodes: a node without one takes the largest that was measured."""
    return np.where(measured, control, control[measured].max())


def _row_hashes(logits: torch.Tensor, tree: DraftTree) -> list[bytes]:
    """A digest of each clean node's logits: bit for bit equality without keeping a second array."""
    rows = logits[list(tree.clean)].cpu().contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _cases(engine, prefix, item: Item, settings: Settings) -> list[Case]:
    root = int(prefix.logits.argmax())
    source = {"draft": settings.draft, "order": settings.order, "seed": settings.seed}
    if item.tree is not None:
        tree = item.tree if item.tree.tokens[0] is not None else item.tree.with_root(root)
        return [Case(f"{item.id}/tree", item.tokens, tree, {"draft": "file"})]
    if isinstance(item.recorded, DraftTree):
        trees = {len(item.recorded) - 1: recorded_tree(item.recorded, engine.vocab_size, len(item.recorded), root)}
    else:
        trees = {}
        log_probs = _marginals(engine, prefix, item, settings, root)
        for budget in settings.budgets:
            trees[budget] = best_first(log_probs, budget, root=root)
    cases = []
    for budget, tree in trees.items():
        if settings.order != "heap":
            tree, _ = tree.reordered(settings.order)
        cases.append(Case(f"{item.id}/{budget}", item.tokens, tree, source | {"budget": budget}))
    return cases


def _marginals(engine, prefix, item: Item, settings: Settings, root: int) -> np.ndarray:
    """Draft log probabilities [length, vocabulary] for the positions after the root."""
    if isinstance(item.recorded, Marginals):
        return item.recorded.dense(engine.vocab_size)
    if settings.draft == "ngram":
        return ngram_marginals((*item.tokens, root), settings.length, engine.vocab_size)
    # The target's own distributions along its greedy text, with some of its choices moved down: no drafter needed.
    rows, token = [], root
    for _ in range(settings.length):
        logits, prefix = engine.step(prefix, token)
        rows.append(logits.double().cpu().numpy())
        token = int(logits.argmax())
    if not np.isfinite(rows).all():
        raise Unsupported(f"prompt {item.id}: the model's logits are not all finite; try another --dtype")
    digest = hashlib.blake2b(f"{settings.seed} {item.id}".encode(), digest_size=4).digest()
    share = settings.acceptance  # a drafter is taken to be as sure as it is right
    return self_marginals(np.stack(rows), share, int.from_bytes(digest, "big"), sureness=share)


def fits(item: Item, settings: Settings, vocab_size: int, max_length: int | None) -> None:
    """Raises UsageError if a model of this vocabulary and context cannot take the prompt and its trees."""
    given = item.tree or item.recorded
    deepest = max(given.depth) if isinstance(given, DraftTree) else settings.length
    if max_length is not None and len(item.tokens) + 1 + deepest > max_length:
        raise UsageError(
            f"prompt {item.id}: {len(item.tokens)} tokens and a tree {deepest} deep do not fit; "
            f"the model's context is {max_length}; shorten the prompt"
        )
    try:
        token_ids(f"prompt {item.id}", item.tokens, vocab_size)
        if isinstance(given, DraftTree):
            check_vocab(Case(item.id, item.tokens, given, {}), vocab_size)
        elif isinstance(given, Marginals):
            for depth, ids in enumerate(given.ids, start=1):
                token_ids(f"prompt {item.id}: marginals: depth {depth}", ids, vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None


# The record


def _record(engine, outcomes: Sequence[_Outcome], settings: Settings, environment: dict, model: dict) -> dict:
    verdict = conclude(
        [outcome.results for outcome in outcomes],
        [outcome.leak for outcome in outcomes],
        settings.rule,
        environment["dtype"],
        settings.require,
    )
    cases = [_case_json(outcome) for outcome in outcomes]
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment,
        "model": model | {"layers_by_kind": _layer_kinds(engine.layers)},
        "settings": settings.to_json(),
        "floor": {
            "rule": "max_abs > factor * max(controls) + ulps * ulp(dtype at the row's max |logit|)",
            "factor": settings.rule.factor,
            "ulps": settings.rule.ulps,
            "controls": {
                name: _number(max(float(np.max(outcome.controls[name])) for outcome in outcomes))
                for name in ("forward", "pad", "chain")
            },
            "library_unforked": _number(max(outcome.library_unforked for outcome in outcomes)),
            "batched_against_strict": _number(max(outcome.batched for outcome in outcomes))
            if settings.ar == "batched"
            else None,
        },
        "cases": cases,
        "leakage": _leakage(outcomes),
        "coverage": _coverage(engine, outcomes),
        "verdict": {
            "text": verdict.text,
            "modes": verdict.modes,
            "reasons": list(verdict.reasons),
            "sensitive": verdict.sensitive,
        },
        "exit_code": verdict.exit_code,
    }


def _case_json(outcome: _Outcome) -> dict:
    tree, leak = outcome.case.tree, outcome.leak
    reference = outcome.differences["tree_forked"]
    plan = UNFORKED.plan(tree)
    nodes = []
    for node in range(len(tree)):
        entry = {
            "node": node,
            "token": tree.tokens[node],
            "parent": tree.parents[node],
            "depth": tree.depth[node],
            "leaked": tree.leaked[node],
            "clean": node not in leak.contaminated,
            "read_from": plan.state[node],
            "rows_since_skip": plan.rows_since_skip(node),
            "ar": {"argmax": int(reference.argmax[node]), "margin": _number(reference.margin[node])},
            "controls": {name: _number(values[node]) for name, values in outcome.controls.items()},
        }
        for mode, found in outcome.differences.items():
            floor = outcome.floors[mode]
            verdicts = outcome.results[mode].verdicts
            entry[mode] = {
                "argmax": int(found.run_argmax[node]),
                "max_abs": _number(found.max_abs[node]),
                "rms": _number(found.rms[node]),
                "kl": _number(found.kl[node]),
                "tv": _number(found.tv[node]),
                "ar_rank": int(found.ar_rank[node]),
                "floor": None if floor is None else _number(floor[node]),
                "verdict": verdicts[node] if verdicts else None,
            }
        nodes.append(entry)
    modes = {}
    for mode, result in outcome.results.items():
        error = outcome.differences[mode].max_abs
        modes[mode] = {
            "verdict": result.verdict,
            "reason": result.reason,
            "nodes": len(tree),
            **{name: result.count(name) for name in ("pass", "tie", "leak", "flip")},
            "max_abs": _number(np.max(error)),
            "median_abs": _number(np.median(error)),
        }
    return {
        **outcome.case.to_json(),
        "nodes": nodes,
        "modes": modes,
        "acceptance": outcome.acceptance,
        "leak_law": {
            "contaminated": sorted(leak.contaminated),
            "near": sorted(leak.near),
            "still": sorted(leak.still),
            "outside": sorted(leak.outside),
            "clean_bitwise_equal": leak.clean_equal,
        },
        "commit": None,
    }


def _leakage(outcomes: Sequence[_Outcome]) -> dict:
    """The headline: what not forking did, over all cases."""
    dirty = sum(len(outcome.leak.contaminated) for outcome in outcomes)
    kl = [outcome.differences["tree_unforked"].kl[sorted(outcome.leak.contaminated)] for outcome in outcomes if dirty]
    walks = [outcome.acceptance["tree_unforked"] for outcome in outcomes]
    return {
        "nodes": sum(len(outcome.case.tree) for outcome in outcomes),
        "contaminated": dirty,
        "flipped": sum(outcome.results["tree_unforked"].count("flip") for outcome in outcomes),
        "median_kl": _number(np.median(np.concatenate(kl))) if dirty else 0.0,
        "rounds": len(outcomes),
        "rounds_changed": sum(bool(w["wrong_accept"] or w["wrong_reject"] or w["wrong_bonus"]) for w in walks),
        "wrong_accept_per_round": sum(len(walk["wrong_accept"]) for walk in walks) / len(outcomes),
    }


def _coverage(engine, outcomes: Sequence[_Outcome]) -> dict:
    """What the run exercised; a fault in what it did not exercise would not have been seen."""
    trees = [outcome.case.tree for outcome in outcomes]
    paths = [outcome.acceptance["ar"]["path"] for outcome in outcomes]
    side = sum(
        any(node != tree.children[tree.parents[node]][0] for node in path[1:])
        for tree, path in zip(trees, paths, strict=True)
    )
    return {
        "cases": len(outcomes),
        "nodes": sum(map(len, trees)),
        "branch_nodes": sum(sum(len(kids) > 1 for kids in tree.children) for tree in trees),
        "contaminated": sum(len(outcome.leak.contaminated) for outcome in outcomes),
        "near": sum(len(outcome.leak.near) for outcome in outcomes),
        "near_moved": sum(len(outcome.leak.near - outcome.leak.still) for outcome in outcomes),
        "accepted_two_or_more": sum(len(path) > 2 for path in paths),
        "side_branch_accepts": side,
        "rejections": sum(bool(tree.children[path[-1]]) for tree, path in zip(trees, paths, strict=True)),
        "layers": _layer_kinds(engine.layers),
    }


def _layer_kinds(layers) -> dict[str, int]:
    found: dict[str, int] = {}
    for layer in layers:
        for branch in layer.branches:
            for op in branch:
                name = {Conv: "conv", Attention: "attention"}.get(type(op)) or (
                    op.kind if isinstance(op, State) else ""
                )
                found[name] = found.get(name, 0) + 1
    return found


def _number(value: float) -> float | None:
    """A JSON number; null for what is not finite, which no floor ever covers."""
    value = float(value)
    return value if math.isfinite(value) else None


def _expect(good: bool, what: str, got: object, expected: str) -> None:
    if not good:
        raise UsageError(f"{what}: got {got}, expected {expected}")
