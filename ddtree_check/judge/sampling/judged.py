"""Judge what sampling makes of a mode: per node the processed distributions of ar and the mode, the tokens that shared
noise draws from both, and the walks; over all cases, whether the mode draws what ar draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...base.conclusion import DEFECT, PASS, Conclusion
from ...base.files import json_number
from ...tree.accept import compare_walks, greedy_walk
from ...tree.draft_tree import DraftTree
from ..nodes import CONTROL, ModeResult
from .draws import Outcomes, Walks, holm, power, test, visible
from .processing import (
    RULES,
    SAYS,
    Sampler,
    Sampling,
    distance,
    history,
    keep,
    log_probs,
    process,
    raw_reach,
    scaled,
    stream,
    to_numpy,
    tv_bound,
    uncertain,
    usable,
)

LEVEL = 0.01  # chance that a right run has its draws called off, over all modes
SIMULATIONS = 1999
EFFECT = 0.05  # the total variation whose power is stated


@dataclass(frozen=True, eq=False)
class Sampled:
    """One mode of one case. Arrays [n], float64 or int64.

    tv, kl     of the processed distributions, KL(ar || mode) in nats: inf where the mode cuts what ar keeps
    bound      largest tv that the node's raw difference can make
    shift      mean difference of the raw rows where it matters (repetition penalty), else 0
    cut        tokens that only one of the two keeps
    choice, ar_choice   the tokens that the shared noise draws
    wrong      nodes where the mode's processed row is not what its own raw row and the node's own path give
    rules      the histories that give it at all of those nodes, names of sampling.RULES
    outcomes   of all walks down the tree
    """

    tv: np.ndarray
    kl: np.ndarray
    bound: np.ndarray
    shift: np.ndarray
    cut: np.ndarray
    choice: np.ndarray
    ar_choice: np.ndarray
    wrong: tuple[int, ...]
    rules: tuple[str, ...]
    outcomes: Outcomes

    def beyond(self, verdicts: Sequence[str]) -> tuple[int, ...]:
        """Return the nodes whose raw logits are within the floor (all of them if they were not judged) and whose
        processed distribution is further from ar's than that can make it. NaN is."""
        within = [verdict in ("pass", "tie") for verdict in verdicts] or [True] * len(self.tv)
        far = ~(self.tv <= self.bound + 1e-9)  # float64 sums over a vocabulary
        return tuple(int(node) for node in np.flatnonzero(far & within))

    def acceptance(self, tree: DraftTree, verdicts: Sequence[str]) -> dict:
        """Compare the walks under shared noise by `compare_walks`; a choice that changed at a node within its floor and
        bound is a tie."""
        spoilt = {*self.wrong, *self.beyond(verdicts)}
        ties = [node for node, verdict in enumerate(verdicts) if verdict in ("pass", "tie") and node not in spoilt]
        return compare_walks(tree, greedy_walk(tree, self.ar_choice), greedy_walk(tree, self.choice), ties)

    def node_json(self, node: int) -> dict:
        return {
            **{name: json_number(getattr(self, name)[node]) for name in ("tv", "kl", "bound")},
            "cut": int(self.cut[node]),
            "choice": int(self.choice[node]),
            "wrong": node in self.wrong,
        }

    def mode_json(self, tree: DraftTree, verdicts: Sequence[str]) -> dict:
        return {
            "max_tv": json_number(np.max(self.tv)),
            "median_tv": json_number(np.median(self.tv)),
            "max_kl": json_number(np.max(self.kl)),
            "cut": int((self.cut > 0).sum()),
            "beyond": list(self.beyond(verdicts)),
            "wrong": list(self.wrong),
            "histories": list(self.rules),
            "tv_outcomes": json_number(self.outcomes.tv),
            "expected_accepted": json_number(self.outcomes.accepted),
            "ar_expected_accepted": json_number(self.outcomes.ar_accepted),
            "acceptance": self.acceptance(tree, verdicts),
        }


class Track:
    """Collects `Sampled` for one mode, a node at a time, parents before children.

    rule: the history that our own processing gives this mode; an engine that brings processed rows of its own is held
    to `path`. draws: walks to draw from `rng`. ulps: roundings of the processed row's dtype that are allowed.
    """

    def __init__(
        self, sampler: Sampler, tree: DraftTree, *, rule: str, draws: int, rng: np.random.Generator, ulps: float
    ):
        self.sampler, self.sampling, self.tree, self.rule, self.ulps = sampler, sampler.sampling, tree, rule, ulps
        self.nodes = 0
        self._walks = Walks(tree, draws if self.sampling.temperature else 0, rng)
        self._figures = {name: np.full(len(tree), np.nan) for name in ("tv", "kl", "bound", "shift")}
        self._counts = {name: np.zeros(len(tree), dtype=np.int64) for name in ("cut", "choice", "ar_choice")}
        self._wrong: list[int] = []
        self._rules = [rule for rule in RULES if rule != "path"]

    def see(self, node: int, reference: torch.Tensor, row: torch.Tensor, given: torch.Tensor | None = None) -> None:
        """Take in raw logits [vocabulary] of ar and of the mode; `given`: the mode's processed row if the engine has
        its own (log probabilities or logits, -inf for what it cut)."""
        sampling, path = self.sampling, self._past("path", node)
        a, b = to_numpy(reference), to_numpy(row)
        log_p = process(a, sampling, path)
        log_q, eps = _drawn_from(b, given, sampling, self._past(self.rule, node))
        z = scaled(a, sampling, path)
        rounding = self.ulps * eps * _largest(b * max(1.0, sampling.stretch), z, log_q)
        if not same_processing(b, log_q, sampling, path, rounding):
            self._wrong.append(node)
        if self._wrong:  # which history gives what was found, here and at all nodes that follow
            self._rules = [
                rule for rule in self._rules if same_processing(b, log_q, sampling, self._past(rule, node), rounding)
            ]
        reach = raw_reach(a, b, sampling) * sampling.stretch + rounding
        self._figures["tv"][node], self._figures["kl"][node] = distance(log_p, log_q)
        self._figures["bound"][node] = tv_bound(z, reach, sampling)
        there = np.isfinite(a) & np.isfinite(b)
        self._figures["shift"][node] = (b - a)[there].mean() if sampling.shifts and there.any() else 0.0
        made = self.tree.path_tokens(node)
        self._counts["cut"][node] = (np.isfinite(log_p) != np.isfinite(log_q)).sum()
        self._counts["choice"][node] = self.sampler.draw(log_q, made)
        self._counts["ar_choice"][node] = self.sampler.draw(log_p, made)
        self._walks.see(node, log_p, log_q)
        self.nodes += 1

    def finish(self) -> Sampled:
        """Return what was collected of all nodes."""
        return Sampled(
            **self._figures, **self._counts, wrong=tuple(sorted(self._wrong)),
            rules=tuple(self._rules) if self._wrong else (), outcomes=self._walks.finish(),
        )  # fmt: skip

    def _past(self, rule: str, node: int):
        return history(rule, self.tree, node, self.sampler.tokens)


class Tracks:
    """The sampling of every mode of one case, fed by the passes as they run. Does nothing for greedy decoding."""

    def __init__(self, engine, case, reference: torch.Tensor, settings):
        self.engine, self.case, self.reference, self.settings = engine, case, reference, settings
        self._tracks: dict[str, Track] = {}

    def see(self, mode: str, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Take in rows of a mode: logits [len(nodes), vocabulary]."""
        case, settings, sampling = self.case, self.settings, self.settings.sampling
        if not sampling.active:
            return
        if mode not in self._tracks:
            key = (settings.seed, case.id, mode, list(case.tree.tokens), list(case.tree.parents))
            self._tracks[mode] = Track(
                Sampler(sampling, settings.seed, case.prompt_tokens), case.tree, draws=settings.draws,
                rule=settings.history if mode == CONTROL else "path", rng=stream(*key), ulps=settings.rule.ulps,
            )  # fmt: skip
        given = self.engine.processed(mode, case.tree, list(nodes), logits, sampling, case.prompt_tokens, ())
        given = [None] * len(nodes) if given is None else given
        for node, row, processed in zip(nodes, logits, given, strict=True):
            self._tracks[mode].see(node, self.reference[node], row, processed)

    def finish(self) -> dict[str, Sampled]:
        """Return the sampling of each mode that ran to its end."""
        return {mode: track.finish() for mode, track in self._tracks.items() if track.nodes == len(self.case.tree)}


def mode_row(
    engine, sampler: Sampler, rule: str, mode: str, tree: DraftTree, node: int, row: torch.Tensor, made: Sequence[int]
) -> tuple[np.ndarray, bool]:
    """Return what a mode draws from at one node, log probabilities [vocabulary], and whether that is its raw row
    processed by the node's own path. made: the output before the tree's root. rule: as for `Track`."""
    b, sampling = to_numpy(row), sampler.sampling
    given = engine.processed(mode, tree, [node], row[None], sampling, sampler.tokens, made)
    past = history(rule, tree, node, sampler.tokens, made)
    log_q, eps = _drawn_from(b, None if given is None else given[0], sampling, past)
    rounding = 4 * eps * _largest(b * max(1.0, sampling.stretch), log_q)
    return log_q, same_processing(b, log_q, sampling, history("path", tree, node, sampler.tokens, made), rounding)


def _drawn_from(row: np.ndarray, given: torch.Tensor | None, sampling: Sampling, past) -> tuple[np.ndarray, float]:
    """Return the log probabilities [vocabulary] that a token is drawn from, the engine's own if `given`, and the
    spacing of their dtype at 1."""
    if given is None:
        return process(row, sampling, past), torch.finfo(torch.float64).eps
    theirs = to_numpy(given)
    log_q = log_probs(theirs, np.isfinite(theirs)) if usable(theirs) else np.full(len(theirs), np.nan)
    return log_q, torch.finfo(given.dtype).eps


def same_processing(row: np.ndarray, log_q: np.ndarray, sampling: Sampling, past, rounding: float) -> bool:
    """Return whether log_q [vocabulary] is `row` processed: each value off by `rounding` at most, tokens kept or cut
    otherwise only where that could do it. A row that nothing can be drawn from gives NaN, and nothing else does."""
    if not usable(row) or np.isnan(log_q[0]):
        return not usable(row) and bool(np.isnan(log_q[0]))
    z = scaled(row, sampling, past)
    kept, theirs = keep(z, sampling), np.isfinite(log_q)
    if ((kept != theirs) & ~uncertain(z, rounding, sampling)).any():
        return False
    both = kept & theirs
    return bool(both.any()) and float(np.ptp(log_probs(z, kept)[both] - log_q[both])) <= 2 * rounding + 1e-12


def judge(result: ModeResult, sampled: Sampled, floor: np.ndarray | None = None) -> ModeResult:
    """Return a mode's result with what processing adds: raw logits may pass and what is drawn from them be wrong.

    floor [n]: of the raw rows. A whole row may be shifted without a raw difference; where shifts matter it may not by
    more than that.
    """
    shifted = [] if floor is None else np.flatnonzero(~(np.abs(sampled.shift) <= floor)).tolist()
    if not result.verdicts or any(result.verdicts[node] not in ("pass", "tie") for node in shifted):
        shifted = []
    bad = sorted({*sampled.wrong, *sampled.beyond(result.verdicts), *shifted})
    if not bad or result.verdict not in ("pass", "fail", "insensitive", "known_failure"):
        return result
    what = "its distribution differs more than its logits can make it"
    if shifted:
        what = f"whole rows are shifted, by {sampled.shift[shifted[0]]:.3g} first, which a repetition penalty turns on"
    if sampled.wrong:
        says = " or ".join(SAYS[rule] for rule in sampled.rules)
        what = f"the history of its penalties is {says}" if says else "no history of its penalties explains it"
        what = "its penalties are not applied" if sampled.rules == ("none",) else what
    text = f"processed fail: {what}, first node {bad[0]}, {len(bad)} of {len(sampled.tv)} nodes"
    if result.verdict == "pass":
        return ModeResult("fail", result.verdicts, f"raw pass, {text}", finite=False)
    return ModeResult("fail", result.verdicts, f"{result.reason}; {text}", result.finite)


# All cases


def attach(record: dict, outcomes: Sequence, settings) -> dict:
    """Return the record with its `sampling`, and the verdict with what the draws said. outcomes: as of make_record.

    Draws of a required mode that do not follow the mode's own distribution are a defect of its sampler. Draws that
    follow that one but not ar's differ as the logits do, which the nodes' verdicts judge: explained, and said.
    """
    runs: dict[str, list[tuple[str, Sampled]]] = {}
    for outcome in outcomes:
        for mode, sampled in outcome.sampled.items():
            runs.setdefault(mode, []).append((outcome.case.id.rpartition("/")[0], sampled))
    modes = {mode: _summary(mode, sampled, settings) for mode, sampled in runs.items()}
    tests = {mode: summary["draws"] for mode, summary in modes.items() if summary["draws"]}
    strange, off = (holm({mode: draws[p] for mode, draws in tests.items()}, LEVEL) for p in ("p_own", "p"))
    conclusion, verdicts = Conclusion.of(record), record["verdict"]["modes"]
    for mode, draws in tests.items():
        draws["verdict"] = "not its own" if mode in strange else "not ar's" if mode in off else "pass"
        if mode not in settings.require or verdicts[mode] != "pass":
            continue  # logits that are off are judged by themselves
        if mode in strange:
            why = f"{mode}: its draws do not follow its own distribution (p {draws['p_own']:.2g})"
            conclusion.add(DEFECT, why)
        elif mode in off:
            conclusion.add(
                PASS,
                f"{mode}: its draws tell it from ar (p {draws['p']:.2g}) by rounding alone, every node is within its "
                f"floor; total variation over the outcomes of a round at most {modes[mode]['tv_outcomes']:.2g}",
            )
    for mode, summary in modes.items():
        # Acceptance that is bought with other tokens is none.
        if verdicts[mode] == "pass" and not summary["wrong"] and mode not in strange:
            summary["alarm"] = None
        else:
            summary |= {"alarm": _alarm(summary["moved"]), "expected_accepted": None}
    sampling = {"level": LEVEL, "simulations": SIMULATIONS, "effect": EFFECT, "modes": modes}
    return conclusion.into(record | {"sampling": sampling})


def _alarm(moved: float | None) -> str:
    if moved is None:
        return "its acceptance is not finite"
    if abs(moved) < 0.005:
        return "accepts as much, but other tokens"
    return "accepts more than ar would: too good to be true" if moved > 0 else "accepts less than ar would"


def _summary(mode: str, runs: Sequence[tuple[str, Sampled]], settings) -> dict:
    tv = np.concatenate([run.tv for _, run in runs])
    outcomes = [run.outcomes for _, run in runs]
    mine, theirs = (json_number(np.mean([getattr(o, name) for o in outcomes])) for name in ("accepted", "ar_accepted"))
    return {
        "nodes": len(tv),
        "median_tv": json_number(np.median(tv)),
        "max_tv": json_number(np.max(tv)),
        "max_kl": json_number(max(float(np.max(run.kl)) for _, run in runs)),
        "cut": sum(int((run.cut > 0).sum()) for _, run in runs),
        "wrong": sum(len(run.wrong) for _, run in runs),
        "tv_outcomes": json_number(max(each.tv for each in outcomes)),
        "expected_accepted": mine,
        "ar_expected_accepted": theirs,
        "moved": None if mine is None or theirs is None else mine - theirs,
        "draws": _tests(mode, runs, settings.seed) if settings.draws and settings.sampling.temperature else None,
    }


def _tests(mode: str, runs: Sequence[tuple[str, Sampled]], seed: int) -> dict:
    """Test the mode's draws against ar's distribution and against its own."""
    rng, outcomes = stream(seed, mode, "simulations"), [(prompt, run.outcomes) for prompt, run in runs]
    against_ar = test([(prompt, each.expected, each.counts) for prompt, each in outcomes], SIMULATIONS, rng)
    own = test([(prompt, each.own, each.counts) for prompt, each in outcomes], SIMULATIONS, rng)
    return {
        "count": against_ar.draws,
        "prompts": len(against_ar.clusters),
        "p": against_ar.p,
        "p_own": own.p,
        "prompts_off": holm(against_ar.clusters, LEVEL),
        "power": power(against_ar.draws, against_ar.freedom, EFFECT, LEVEL),
        "visible": visible(against_ar.draws, against_ar.freedom, LEVEL),
    }


def _largest(*rows: np.ndarray) -> float:
    """Return the largest |value| that is finite, at least 1."""
    return max(float(np.abs(row[np.isfinite(row)]).max(initial=1.0)) for row in rows)
