"""The whole flow on one page: prompts and trees ─► four modes ─► differences, floors ─► verdict ─► the record.

The command line, the pytest plugin and the gate all call `check`; none of them computes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from . import __version__
from .accept import compare_walks, greedy_walk
from .apart import apart
from .attribution import Finding, attribute, attribute_commit
from .case import Case, check_vocab
from .commit import check_pattern, commit_runs, flat_contents
from .compare import Differences, measure
from .draft import (
    PUBLISHED,
    Marginals,
    best_first,
    expected_accepts,
    ngram_marginals,
    published_tree,
    recorded_tree,
    self_marginals,
    token_ids,
)
from .engines.checked import Checked
from .errors import Unsupported, UsageError, usage_errors
from .known import excuse, load_known
from .noise import absolute, chain_run, forward_run, repeat_run, strict_run
from .outcome import Outcome, make_record
from .sampled import Sampled, Tracks, attach
from .sampled import judge as judge_sampled
from .sampling import RULES, Sampler, Sampling
from .sensitivity import Reaction, react
from .ties import Ties, TieTrack, Vocabulary
from .tree import DraftTree, merge
from .verdict import (
    CONTROL,
    EXACT,
    MODES,
    NO_CONTROL,
    Leak,
    ModeResult,
    Rule,
    beyond,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    judged_as,
    name_cause,
    near_skip,
    reference_problem,
)
from .wiring import FORKED, UNFORKED, Conv, State, Wiring, contaminated, reads

FLAGS = {"budgets": "budget"}  # settings that users know by another name
DRAFTS = ("self", "ngram", "recorded", "dflash")
LENGTH = 15  # positions of a draft block of 16


@dataclass(frozen=True)
class Settings:
    """What a run does. Everything in it is in the record, so that the run can be made again.

    budgets      draft nodes per tree, one tree each;  order  its flat order: heap (as built), breadth, depth
    draft        self, ngram, recorded or dflash;  acceptance  the share of depths where `self` puts the target's token
                 first;  length  positions that are drafted, at most so many
    shape        a published static tree by name, in place of budgets;  candidates  tokens offered at each depth, None
                 for as many as the budget
    require      the modes that decide the exit code
    ar           strict (one node at a time) or batched (level by level)
    controls     how many leaf paths the chain control and the full forward passes run, those that hold most nodes;
                 None for all
    accept       which paths to commit by force, see `commit.accept_nodes`; none by default
    wiring       what the unforked control reads wrong, such as 'state=flat'; None for states and windows in row order
    attribute    whose faults to look for: True every failing mode's, the control's too, False none, None a required
                 mode's
    temperature ... frequency_penalty   as in `sampling.Sampling`; history  which nodes the unforked control's penalties
                 count, of sampling.RULES;  draws  walks drawn from each tree and mode, to be tested against ar
    vocab_size   tokens of the vocabulary, what follows them is padding; None for the model's
    """

    budgets: tuple[int, ...] = (16, 64)
    order: str = "heap"
    draft: str = "self"
    acceptance: float = 0.7
    length: int = LENGTH
    shape: str | None = None
    candidates: int | None = None
    seed: int = 0
    require: tuple[str, ...] = ("linear", "tree_forked")
    ar: str = "strict"
    controls: int | None = None
    accept: tuple[str, ...] = ()
    wiring: str | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: str = "path"
    draws: int = 500
    vocab_size: int | None = None
    attribute: bool | None = None
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self):
        for name in ("budgets", "require", "accept"):
            got = getattr(self, name)
            _expect(isinstance(got, (tuple, list)), FLAGS.get(name, name), repr(got), "a tuple")
        good = bool(self.budgets) and all(_whole(budget, 1) for budget in self.budgets)
        _expect(good, "budget", self.budgets, "numbers of at least 1")
        _expect(_whole(self.seed, 0) and self.seed < 2**63, "seed", repr(self.seed), "a number from 0 to 2**63 - 1")
        _expect(self.order in ("heap", "breadth", "depth"), "order", self.order, "heap, breadth or depth")
        _expect(self.draft in DRAFTS, "draft", self.draft, f"one of {', '.join(DRAFTS)}")
        share = isinstance(self.acceptance, (int, float)) and 0 <= self.acceptance <= 1
        _expect(share, "acceptance", self.acceptance, "a share from 0 to 1")
        _expect(_whole(self.length, 1), "length", self.length, "a number of at least 1")
        _expect(self.shape is None or self.shape in PUBLISHED, "tree", self.shape, f"one of {', '.join(PUBLISHED)}")
        for name, least in (("candidates", 1), ("controls", 1), ("vocab_size", 2)):
            got = getattr(self, name)
            good = got is None or _whole(got, least)
            _expect(good, name.replace("_", "-"), got, f"a number of at least {least}")
        _expect(self.ar in ("strict", "batched"), "ar", self.ar, "strict or batched")
        _expect(
            bool(self.require) and set(self.require) <= set(MODES),
            "require",
            self.require,
            f"some of {', '.join(MODES)}",
        )
        _expect(self.history in RULES, "history", self.history, f"one of {', '.join(RULES)}")
        penalises = self.sampling.penalises
        _expect(self.history == "path" or penalises, "history", self.history, "a penalty that counts it")
        _expect(_whole(self.draws, 0), "draws", self.draws, "a number of at least 0")
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

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn. Raises UsageError for what cannot be drawn from."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.__dataclass_fields__})

    def whole(self, engine) -> Vocabulary:
        """The engine without the columns that are no tokens. Raises UsageError for more tokens than it has."""
        size = self.vocab_size or engine.vocab_size
        _expect(size <= engine.vocab_size, "vocab-size", size, f"at most the model's {engine.vocab_size}")
        return Vocabulary(engine, size)

    def to_json(self) -> dict:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(getattr(self, name)) for name in ("budgets", "require", "accept")}
        return own | lists | {"rule": self.rule.to_json()}


@dataclass(frozen=True)
class Item:
    """One prompt to run: its id, its token ids, and a tree, recorded drafts or a drafter where the caller brings them.

    drafter: has `length` and `marginals(engine, features, root, length)`, as dflash.Drafter.
    """

    id: str
    tokens: tuple[int, ...]
    tree: DraftTree | None = None
    recorded: DraftTree | Marginals | tuple[DraftTree, ...] | None = None
    drafter: object | None = None


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
    items, engine = list(items), Checked(settings.whole(engine))
    _expect(bool(items), "prompts", 0, "at least one")
    oracle = oracle if oracle is None else settings.whole(oracle)
    for item in items:
        fits(item, settings, engine.vocab_size, engine.max_length)
    environment = {"ddtree_check": __version__, **engine.describe()}
    known = [entry for entry in load_known() if entry.covers(environment.get("model_type"), environment)]
    wanted = {True: MODES, False: (), None: settings.require}[settings.attribute]
    hunt = Hunt(set(wanted) - {entry.mode for entry in known})
    dtype, outcomes = judged_as(environment), []
    workers = 1 if trace else min(workers, len(items))
    if workers > 1:
        hunt.reactions, _ = _attempt(None, lambda: react(engine, engine.prefill(items[0].tokens), settings.rule, dtype))
        hunt.reactions = hunt.reactions or ()
    one = partial(_check_item, engine, oracle, settings=settings, dtype=dtype, trace=trace, hunt=hunt)
    ahead = [item.id for item in items[1:]] + ["done"]
    if progress:
        progress(0, len(items), items[0].id)
    for done, found in enumerate(map(one, items) if workers == 1 else apart(one, items, workers), start=1):
        outcomes += found
        if progress:
            progress(done, len(items), ahead[done - 1])
    outcomes = _first_attributions(outcomes)
    excused = excuse([outcome.results for outcome in outcomes], known)
    outcomes = [replace(outcome, results=results) for outcome, results in zip(outcomes, excused, strict=True)]
    model = model or getattr(engine, "provenance", {})
    record = make_record(outcomes, engine.layers, settings, environment, model, hunt.reactions or ())
    return attach(record, outcomes, settings) if settings.sampling.active else record


@dataclass(eq=False)
class Hunt:
    """What a run looks for once, in its first prompt or at its first red verdict.

    modes      whose fault is to be attributed, until it was; reactions  of the model to its own states
    """

    modes: set[str]
    reactions: tuple[Reaction, ...] | None = None


def _first_attributions(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Each mode's fault is shown where it first failed; processes that do not see one another look more than once."""
    seen: set[str] = set()
    found = []
    for outcome in outcomes:
        first = {mode: finding for mode, finding in outcome.attribution.items() if mode not in seen}
        seen |= first.keys()
        found.append(replace(outcome, attribution=first))
    return found


# One prompt


def _check_item(engine, oracle, item: Item, settings: Settings, dtype: str, trace, hunt: Hunt) -> list[Outcome]:
    prefix = engine.prefill(item.tokens)
    if hunt.reactions is None:
        hunt.reactions, _ = _attempt(None, lambda: react(engine, prefix, settings.rule, dtype))
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
    picks = getattr(engine, "chosen", None)
    sample = {"limit": settings.controls, "sink": sinks["forward"]}
    forward, _ = _attempt(None, lambda: forward_run(engine, item.tokens, union, reference, **sample))
    repeat = repeat_run(engine, prefix, union, reference, batched=batched, sink=sinks["repeat"])
    strict = float(np.max(strict_run(engine, prefix, union, reference).max_abs)) if batched else None
    problem = reference_problem(repeat, forward, settings.rule, dtype)
    outcomes = []
    for case, place in zip(cases, places, strict=True):
        own = slice(None) if place == tuple(range(len(union))) else list(place)  # a slice copies nothing
        rows, exact_rows = reference[own], None if exact is None else exact[own]
        step = None
        if trace:
            step = trace.step(
                case.id, case.prompt_tokens, case.tree.tokens, case.tree.parents, request=item.id, source=case.source
            )
            taken = None if picks is None else list(map(int, picks("ar", case.tree, range(len(case.tree)), rows)))
            step.add("ar", rows, wiring="engine", chosen=taken)
            for name, held in kept.items():
                nodes = [node for node, at in enumerate(place) if at in held]
                if nodes:
                    step.add(name, torch.stack([held[place[node]] for node in nodes]), nodes=nodes)
        runs = _run_case(engine, prefix, case, rows, exact_rows, settings, step)
        runs = replace(runs, forward=None if forward is None else forward[list(place)], batched=strict)
        outcome = judge_case(case, engine.layers, runs, settings, dtype, problem)
        outcomes.append(replace(outcome, attribution=_attribute(engine, prefix, outcome, rows, settings, dtype, hunt)))
        if step is not None:
            step.write()
    return outcomes


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


def _run_case(engine, prefix, case: Case, reference, exact, settings: Settings, step) -> Runs:
    """Runs all modes and controls of one tree that the engine can run. step: a step of a trace to add them to."""
    tree, control, missing = case.tree, settings.control, {}
    errors = {"ar": absolute(exact, reference)}

    tracks, ties = Tracks(engine, case, reference, settings), TieTrack(engine, tree, reference)

    def keep(mode: str, wiring: str = "engine"):
        add = None
        if step is not None:

            def add(nodes, logits):
                own = own_rows(engine, mode, case, nodes, logits, settings.sampling)
                step.add(mode, logits, nodes=nodes, width=len(tree), wiring=wiring, **own)

        return tracks.sink(mode, ties.sink(mode, add))

    def chains(forked: bool, limit: int | None, mode: str, **exact_rows):
        sink = keep(mode, "tree_forked" if forked else "engine")
        return chain_run(engine, prefix, tree, reference, forked=forked, limit=limit, sink=sink, **exact_rows)

    def whole(mode: str, wiring: Wiring | None, claim: str):
        logits = engine.verify(prefix, tree, wiring).logits
        if sink := keep(mode, claim):
            sink(range(len(tree)), logits)
        return logits

    found, missing["linear"] = _attempt(engine.supports(None), lambda: chains(False, None, "linear", exact=exact))
    linear, _, errors["linear"] = found or (None, None, None)
    # Without a recurrence the engine's own pass and its tree path are the same pass.
    chain = None if linear is None else (linear, np.ones(len(tree), dtype=bool))
    if reads(engine.layers, Conv, State):
        found, _ = _attempt(engine.supports(FORKED), lambda: chains(True, settings.controls, "chain"))
        chain = found and found[:2]
    logits, missing["tree_forked"] = _attempt(
        engine.supports(FORKED), lambda: whole("tree_forked", FORKED, "tree_forked")
    )
    forked = unforked = library = equal = fingerprints = None
    if logits is not None:
        forked, errors["tree_forked"] = measure(reference, logits), absolute(exact, logits)
        fingerprints = row_hashes(logits, tree)
    claim = settings.wiring or "tree_unforked"
    logits, missing["tree_unforked"] = _attempt(
        engine.supports(control), lambda: whole("tree_unforked", control, claim)
    )
    if logits is not None:
        unforked, errors["tree_unforked"] = measure(reference, logits), absolute(exact, logits)
        if engine.exact_control and fingerprints is not None:
            equal = row_hashes(logits, tree) == fingerprints
        if settings.wiring is None:  # the library's own pass over the rows is the same flat pass
            own, _ = _attempt(engine.supports(None), lambda: whole("own", None, "engine"))
            library = None if own is None else float(np.max(measure(logits, own).max_abs))
            del own
    del logits
    linear, forked, unforked = (
        found and ties.choose(mode, found) for mode, found in zip(MODES, (linear, forked, unforked), strict=True)
    )
    accepts = None
    if settings.accept:
        wirings = {"linear": None, "tree_forked": FORKED, "tree_unforked": control}
        wirings = {mode: wiring for mode, wiring in wirings.items() if missing[mode] is None}
        kept = None
        if step is not None:
            kept = lambda mode, path, left, probe, pattern: step.commit(  # noqa: E731
                mode, path, flat_contents(left.contents), position=left.contents[0], probe=probe, logits=left.rows,
                pattern=pattern,
            )  # fmt: skip
        accepts = tuple(
            commit_runs(engine, case.prompt_tokens, prefix, tree, settings.accept, wirings, settings.rule, kept)
        )
    return Runs(
        ar=ties.choose("ar", measure(reference, reference)),
        linear=linear,
        forked=forked,
        unforked=unforked,
        chain=chain,
        missing={mode: ("unsupported", reason) for mode, reason in missing.items() if reason is not None},
        equal=equal,
        exact={mode: error for mode, error in errors.items() if error is not None},
        library=library,
        accepts=accepts,
        sampled=tracks.finish(),
        ties=ties.finish(),
    )


def _attribute(engine, prefix, outcome: Outcome, reference, settings: Settings, dtype: str, hunt: Hunt) -> dict:
    """Where the faults enter of the modes that failed here and were not looked into yet, by mode."""
    found: dict[str, Finding] = {}
    for mode, wiring in (("linear", None), ("tree_forked", FORKED), (CONTROL, settings.control)):
        floor, accepts = outcome.floors.get(mode), [a for a in outcome.accepts or () if mode in a.modes]
        wrong = [accept for accept in accepts if accept.modes[mode].verdict == "fail" and mode not in accept.expected]
        if mode not in hunt.modes or not (outcome.results[mode].verdict == "fail" or wrong):
            continue
        hunt.modes.remove(mode)
        if outcome.results[mode].verdict == "fail" and floor is not None:
            seen, refusal = _attempt(
                None,
                lambda mode=mode, wiring=wiring, floor=floor: attribute(
                    engine, prefix, outcome.case.tree, mode, wiring, reference, floor, settings.rule, dtype
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


def _attempt(refusal: str | None, run: Callable):
    """(what `run` returned, None), or (None, why the engine does not run it): it may refuse before or on the way."""
    if refusal is not None:
        return None, refusal
    try:
        return run(), None
    except Unsupported as error:
        return None, str(error)


def own_rows(engine, mode: str, case: Case, nodes, logits, sampling: Sampling) -> dict:
    """What the engine itself makes of raw rows of a mode, for a trace: processed rows and chosen tokens."""
    found = {}
    if mode in MODES and (own := getattr(engine, "chosen", None)) is not None:
        found["chosen"] = list(map(int, own(mode, case.tree, list(nodes), logits)))
    if mode in MODES and sampling.active and (own := getattr(engine, "processed", None)) is not None:
        found["processed"] = own(mode, case.tree, list(nodes), logits, sampling, case.prompt_tokens, ())
    return found


def _keeper(rows: dict[int, torch.Tensor]) -> Callable:
    return lambda nodes, logits: rows.update(zip(nodes, logits, strict=True))


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


def row_hashes(logits: torch.Tensor, tree: DraftTree) -> list[bytes]:
    """A digest of each clean node's logits: bit for bit equality without keeping a second array."""
    rows = logits[list(tree.clean)].cpu().contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def draft_cases(engine, prefix, item: Item, settings: Settings) -> list[Case]:
    root = Sampler(settings.sampling, settings.seed, item.tokens).pick(prefix.logits, ())
    source = {"draft": settings.draft, "order": settings.order, "seed": settings.seed}
    if item.tree is not None:
        tree = item.tree if item.tree.tokens[0] is not None else item.tree.with_root(root)
        return [Case(f"{item.id}/tree", item.tokens, tree, {"draft": "file"})]
    if isinstance(item.recorded, DraftTree):
        trees = {len(item.recorded) - 1: recorded_tree(item.recorded, engine.vocab_size, len(item.recorded), root)}
        expected = {}
    else:
        trees, expected = {}, {}
        log_probs = _marginals(engine, prefix, item, settings, root)
        for budget in settings.budgets if settings.shape is None else [settings.shape]:
            trees[budget] = draft_tree(log_probs, settings, budget, root)
            expected[budget] = {"expected": expected_accepts(log_probs, trees[budget])}
    cases = []
    for budget, tree in trees.items():
        if settings.order != "heap":
            tree, _ = tree.reordered(settings.order)
        own = {"budget": budget} if settings.shape is None else {"tree": budget, "budget": len(tree) - 1}
        cases.append(Case(f"{item.id}/{budget}", item.tokens, tree, source | own | expected.get(budget, {})))
    return cases


def draft_tree(log_probs: np.ndarray, settings: Settings, budget: int | str, root: int) -> DraftTree:
    """The tree that the settings make of marginals [L, vocabulary], in heap or breadth-first order."""
    if settings.shape is not None:
        return published_tree(log_probs, settings.shape, root)
    return best_first(log_probs, budget, root=root, candidates=settings.candidates)


def _marginals(engine, prefix, item: Item, settings: Settings, root: int) -> np.ndarray:
    """Draft log probabilities [length, vocabulary] for the positions after the root."""
    if isinstance(item.recorded, Marginals):
        return item.recorded.dense(engine.vocab_size)
    if settings.draft == "ngram":
        return ngram_marginals((*item.tokens, root), settings.length, engine.vocab_size)
    if settings.draft == "dflash":
        return from_drafter(engine, item, prefix.features, root, settings.length)
    # The target's own distributions along its text, with some of its choices moved down: no drafter needed.
    sampler, rows, text = Sampler(settings.sampling, settings.seed, item.tokens), [], [root]
    for _ in range(settings.length):
        logits, prefix = engine.step(prefix, text[-1])
        text.append(sampler.pick(logits, text))
        rows.append(sampler.favour(logits, text[-1]))
    return stand_in(np.stack(rows), settings, item.id)


def from_drafter(engine, item: Item, features, root: int, length: int) -> np.ndarray:
    """The item's drafter's marginals [at most `length`, vocabulary] behind the features of all committed tokens."""
    if item.drafter is None:
        raise UsageError("draft: got dflash without a drafter, expected one that was loaded for this model")
    return item.drafter.marginals(engine, features, root, min(length, item.drafter.length))


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


def fits(item: Item, settings: Settings, vocab_size: int, max_length: int | None, *, rounds: bool = False) -> None:
    """Raises UsageError if a model of this vocabulary and context cannot take the prompt and its trees.

    rounds: for rounds alone, where trees are cut to the room that is left, and a tree may be recorded for each round.
    """
    given = item.tree or item.recorded
    if isinstance(given, tuple) and not rounds:
        raise UsageError(
            f"prompt {item.id}: got a recorded tree for each round, which generate takes; "
            "expected 'tree' or 'marginals'"
        )
    deepest = max(given.depth) if isinstance(given, DraftTree) else settings.length
    if rounds:
        deepest = 0
    if max_length is not None and len(item.tokens) + 1 + deepest > max_length:
        raise UsageError(
            f"prompt {item.id}: {len(item.tokens)} tokens and a tree {deepest} deep do not fit; "
            f"the model's context is {max_length}; shorten the prompt"
        )
    try:
        token_ids(f"prompt {item.id}", item.tokens, vocab_size)
        if isinstance(given, DraftTree):
            check_vocab(Case(item.id, item.tokens, given, {}), vocab_size)
        elif isinstance(given, tuple):
            for number, tree in enumerate(given):
                check_vocab(Case(f"{item.id}, round {number}", item.tokens, tree, {}), vocab_size)
        elif isinstance(given, Marginals):
            for depth, ids in enumerate(given.ids, start=1):
                token_ids(f"prompt {item.id}: marginals: depth {depth}", ids, vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _expect(good: bool, what: str, got: object, expected: str) -> None:
    if not good:
        raise UsageError(f"{what}: got {got}, expected {expected}")
