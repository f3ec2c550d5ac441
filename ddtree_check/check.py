"""The whole flow on one page: prompts and trees ─► four modes ─► differences, floors ─► verdict ─► the record.

The command line, the pytest plugin and the gate all call `check`; none of them computes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import __version__
from .accept import compare_walks, greedy_walk
from .case import Case, check_vocab
from .commit import check_pattern, commit_runs
from .compare import Differences, measure
from .draft import Marginals, best_first, ngram_marginals, recorded_tree, self_marginals, token_ids
from .errors import Unsupported, UsageError, usage_errors
from .known import excuse, load_known
from .noise import absolute, chain_run, forward_run, repeat_run, strict_run
from .outcome import Outcome, make_record
from .tree import DraftTree, merge
from .verdict import (
    MODES,
    Leak,
    Rule,
    beyond,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    reference_problem,
)
from .wiring import FORKED, UNFORKED, Conv, State, Wiring, contaminated, reads

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
    accept       which paths to commit by force, see `commit.accept_nodes`; none by default
    wiring       what the unforked control reads wrong, such as 'state=flat'; None for states and windows in row order
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
    accept: tuple[str, ...] = ()
    wiring: str | None = None
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
        for pattern in self.accept:
            check_pattern(pattern)
        if self.wiring is not None:
            with usage_errors():
                wrong = Wiring.parse(self.wiring)
            read = {channel: getattr(wrong, channel) for channel in ("state", "conv", "mask", "positions")}
            _expect(
                "flat" in read.values(),
                "wiring",
                repr(self.wiring),
                f"a wrong rule for one of {', '.join(read)}, '=flat'",
            )

    @property
    def control(self) -> Wiring:
        """The wiring that runs as tree_unforked."""
        return UNFORKED if self.wiring is None else Wiring.parse(self.wiring)

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(getattr(self, name)) for name in ("budgets", "require", "accept")}
        return own | lists | {"rule": self.rule.to_json()}


@dataclass(frozen=True)
class Item:
    """One prompt to run: its id, its token ids, and a tree or recorded drafts where the caller brings them."""

    id: str
    tokens: tuple[int, ...]
    tree: DraftTree | None = None
    recorded: DraftTree | Marginals | None = None


def check(
    engine,
    items: Iterable[Item],
    settings: Settings,
    *,
    oracle=None,
    model: dict | None = None,
    progress: Callable | None = None,
) -> dict:
    """Runs every item through the four modes and returns the record (see docs/record.md), ready for JSON.

    oracle: an engine of the same model in float64, by which ar itself gets an error. progress(done, total, text) is
    called before each step. Raises UsageError for input that the model cannot take.
    """
    items = list(items)
    _expect(bool(items), "prompts", 0, "at least one")
    for item in items:
        fits(item, settings, engine.vocab_size, engine.max_length)
    environment = {"ddtree_check": __version__, **engine.describe()}
    known = [entry for entry in load_known() if entry.covers(environment.get("model_type"), environment)]
    outcomes = []
    for index, item in enumerate(items):
        if progress:
            progress(index, len(items), item.id)
        outcomes += _check_item(engine, oracle, item, settings, environment["dtype"])
    if progress:
        progress(len(items), len(items), "done")
    excused = excuse([outcome.results for outcome in outcomes], known)
    outcomes = [replace(outcome, results=results) for outcome, results in zip(outcomes, excused, strict=True)]
    return make_record(outcomes, engine.layers, settings, environment, model or getattr(engine, "provenance", {}))


# One prompt


def _check_item(engine, oracle, item: Item, settings: Settings, dtype: str) -> list[Outcome]:
    prefix = engine.prefill(item.tokens)
    cases = _cases(engine, prefix, item, settings)
    for case in cases:
        check_vocab(case, engine.vocab_size)
    # The reference is decoded once for all budgets: their trees share most paths.
    union, places = merge([case.tree for case in cases])
    batched = settings.ar == "batched"
    reference = engine.decode(prefix, union, batched=batched)
    exact = None if oracle is None else oracle.decode(oracle.prefill(item.tokens), union)
    forward = forward_run(engine, item.tokens, union, reference)
    repeat = repeat_run(engine, prefix, union, reference, batched=batched)
    strict = float(np.max(strict_run(engine, prefix, union, reference).max_abs)) if batched else None
    problem = reference_problem(repeat, forward, settings.rule, dtype)
    outcomes = []
    for case, place in zip(cases, places, strict=True):
        own = slice(None) if place == tuple(range(len(union))) else list(place)  # a slice copies nothing
        rows, exact_rows = reference[own], None if exact is None else exact[own]
        outcome = _check_case(engine, prefix, case, rows, exact_rows, forward[list(place)], settings, dtype, problem)
        outcomes.append(replace(outcome, batched=strict))
    return outcomes


def _check_case(
    engine, prefix, case: Case, reference, exact, forward: Differences, settings: Settings, dtype: str, problem
) -> Outcome:
    rule, tree = settings.rule, case.tree
    linear, _, exact_linear = chain_run(engine, prefix, tree, reference, forked=False, exact=exact)
    # Without a recurrence the engine's own pass and its tree path are the same pass.
    chain, measured = linear, np.ones(len(tree), dtype=bool)
    if reads(engine.layers, Conv, State):
        chain, measured, _ = chain_run(engine, prefix, tree, reference, forked=True, limit=settings.controls)
    errors = {"ar": absolute(exact, reference), "linear": exact_linear}
    logits = engine.verify(prefix, tree, FORKED).logits
    forked, errors["tree_forked"] = measure(reference, logits), absolute(exact, logits)
    fingerprints = _row_hashes(logits, tree)
    logits = engine.verify(prefix, tree, settings.control).logits
    unforked, errors["tree_unforked"] = measure(reference, logits), absolute(exact, logits)
    equal = _row_hashes(logits, tree) == fingerprints if engine.exact_control else None
    library = None
    if settings.wiring is None:  # the library's own pass over the rows is the same flat pass
        library = float(np.max(measure(logits, engine.verify(prefix, tree, None).logits).max_abs))
    del logits
    accepts = None
    if settings.accept:
        wirings = {"linear": None, "tree_forked": FORKED, "tree_unforked": settings.control}
        accepts = tuple(commit_runs(engine, case.prompt_tokens, prefix, tree, settings.accept, wirings, rule))
    plan = settings.control.plan(tree)
    dirty = contaminated(plan, engine.layers)

    # Full forward passes judge linear; only a linear that passed joins the tree's floor (a mode never enters its own).
    linear_floor = rule.chain_floor([forward.max_abs], linear, dtype)
    results = {"linear": judge_linear(linear, linear_floor, problem)}
    trusted = [linear.max_abs] if results["linear"].verdict == "pass" else []
    chain_bad = beyond(judge(chain, rule.chain_floor([forward.max_abs, *trusted], chain, dtype)))
    chain_errors = _extended(chain.max_abs, measured)
    trusted += [] if any(measured[node] for node in chain_bad) else [chain_errors]
    floor, control_floor = (rule.floor(trusted, found.ulp) if trusted else None for found in (forked, unforked))
    results["tree_forked"] = judge_forked(forked, floor, problem)
    moved = beyond(judge(unforked, control_floor)) if trusted else ()
    near = {node for node in dirty if (steps := plan.rows_since_skip(node)) is not None and steps <= rule.near_rows}
    leak = Leak(dirty, frozenset(near), frozenset(moved), equal)
    results["tree_unforked"] = judge_unforked(unforked, control_floor, leak, problem)

    differences = {"linear": linear, "tree_forked": forked, "tree_unforked": unforked}
    walks = {"ar": greedy_walk(tree, forked.argmax)} | {
        mode: greedy_walk(tree, found.run_argmax) for mode, found in differences.items()
    }
    acceptance = {}
    for mode, walk in walks.items():
        ties = () if mode == "ar" else [node for node, v in enumerate(results[mode].verdicts) if v == "tie"]
        acceptance[mode] = compare_walks(tree, walks["ar"], walk, ties)
    return Outcome(
        case=case,
        differences=differences,
        floors={"linear": linear_floor, "tree_forked": floor, "tree_unforked": control_floor},
        results=results,
        plan=plan,
        leak=leak,
        acceptance=acceptance,
        controls={"forward": forward.max_abs, "pad": linear.max_abs, "chain": chain_errors},
        library_unforked=library,
        exact=errors if exact is not None else {},
        accepts=accepts,
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
    return stand_in(np.stack(rows), settings, item.id)


def stand_in(rows: np.ndarray, settings: Settings, prompt: str, *place: int) -> np.ndarray:
    """The `self` draft from the target's own logits [L, vocabulary]; its errors are drawn for this prompt and place.

    Raises Unsupported for logits that are not all finite.
    """
    if not np.isfinite(rows).all():
        raise Unsupported(f"prompt {prompt}: the model's logits are not all finite; try another --dtype")
    key = " ".join(map(str, (settings.seed, prompt, *place)))
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    share = settings.acceptance  # a drafter is taken to be as sure as it is right
    return self_marginals(rows, share, int.from_bytes(digest, "big"), sureness=share)


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


def _expect(good: bool, what: str, got: object, expected: str) -> None:
    if not good:
        raise UsageError(f"{what}: got {got}, expected {expected}")
