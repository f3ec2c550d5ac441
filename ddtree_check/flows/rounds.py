"""Many rounds of real speculative decoding in each mode, judged round by round against plain decoding of its own text.

Every mode drafts, verifies, accepts and commits by itself. Beside it plain decoding follows the text that the mode
emits, so that each round's acceptance can be compared with what autoregressive decoding would have accepted of the same
tree, long after the texts have parted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..base.conclusion import INCONCLUSIVE, Conclusion, ExitCode
from ..base.errors import Unsupported, UsageError
from ..base.files import json_number, record_head
from ..base.journal import append_journal, resume_journal
from ..base.words import counted
from ..engines.checked import complete
from ..judge.commit import compare_contents
from ..judge.differences import measure
from ..judge.known import known_for
from ..judge.nodes import CONTROL, judged_as
from ..judge.sampling.judged import mode_row
from ..judge.sampling.processing import Sampler, Sampling
from ..model.wiring import Conv, State, reads
from ..tree.accept import Accepted, compare_walks, descend
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import expected_accepts
from ..tree.drafts.marginals import drafter_says, ngram_marginals, surprise
from ..tree.drafts.recorded import Marginals, recorded_to_json
from ..tree.paths import first_branch, leaves_first_branch, padded_chain
from .drafting import draft_tree, from_drafter, stand_in
from .settings import ROUND_MODES as MODES
from .settings import SHADOW, Item, Mode, Rounds, Settings

SCHEMA = "ddtree-check/rounds/1"
GREEDY = Sampler(Sampling(), 0, ())
POLLUTED = {"bfloat16": 0.25, "float16": 0.25}  # features further off, relative to their rms; 1e-3 in other dtypes
POLLUTION = "the drafter read what a leaked verify left: polluted features"
INSENSITIVE = f"insensitive: {CONTROL} never left plain decoding, so that forked did not says little"
DEEP, ASIDE = 0.3, 0.1  # shares of rounds that must accept two nodes or more, and leave the first branch


def generate(
    engine, items: Sequence[Item], settings: Settings, rounds: Rounds, *, journal: str | Path | None = None,
    progress: Callable | None = None,
) -> dict:  # fmt: skip
    """Run all prompts in all modes. Returns {"settings", "prompts", "summary", "coverage", "verdict", "exit_code"}.

    settings: its draft, first budget, order, seed, rule and required modes are used. journal: a file of JSON lines with
    the prompts that are finished; a run that was killed goes on after them. Raises UsageError for a journal of another
    run and for a prompt that fills the model's context.
    """
    engine = complete(engine, settings.vocab_size)
    for item in items:
        if engine.max_length is not None and len(item.tokens) >= engine.max_length:
            raise UsageError(
                f"prompt {item.id}: {len(item.tokens)} tokens leave no room; the model's context is {engine.max_length}"
            )
    environment = engine.describe()
    known = {entry.mode for entry in known_for(environment)}
    head = {"settings": settings.to_json(), "rounds": rounds.to_json(), "environment": environment}
    use = lambda line: conclude([line], settings, rounds, engine.layers, known)  # noqa: E731
    done = {} if journal is None else resume_journal(journal, head, use)
    results, show = [], progress or (lambda *_: None)
    for place, item in enumerate(items):
        show(place, len(items), item.id)
        key = {"id": item.id, "prompt_tokens": list(item.tokens)}
        if item.recorded is not None:
            key["recorded"] = recorded_to_json(item.recorded)
        result = done.get(item.id)
        if result is None or any(result.get(name) != key.get(name) for name in ("prompt_tokens", "recorded")):
            result = key | _run_prompt(engine, item, settings, rounds)
            if journal is not None:
                append_journal(journal, result)
        results.append(result)
    show(len(items), len(items), "done")
    return conclude(results, settings, rounds, engine.layers, known)


# One prompt


def _run_prompt(engine, item: Item, settings: Settings, rounds: Rounds) -> dict[str, dict]:
    """Return {"modes": the run of each, "refused": why the engine does not run the others}."""
    modes, refused = {}, {}
    for mode in rounds.modes:
        wirings = (MODES[mode].verify, MODES[mode].commit)
        reason = next(filter(None, map(engine.supports, wirings)), None)
        try:
            if reason:
                raise Unsupported(reason)
            modes[mode] = _Run(engine, item, settings, rounds, MODES[mode], mode).run()
        except Unsupported as error:
            refused[mode] = str(error)
    longest = max((len(run["tokens"]) for run in modes.values()), default=0)
    sampler = Sampler(settings.sampling, settings.seed, item.tokens)
    text = list(_plain_text(engine, item.tokens, longest, rounds.stop, sampler))
    for run in modes.values():
        pairs = list(zip(run["tokens"], text, strict=False))
        same = sum(mine == theirs for mine, theirs in pairs)
        run |= {"agreement": same / max(1, len(pairs)), "same_text": same == len(pairs)}
    return {"modes": modes, "refused": refused}


def _plain_text(
    engine, prompt: Sequence[int], count: int, stop: frozenset[int], sampler: Sampler = GREEDY
) -> Iterator[int]:
    """Decode autoregressively: up to `count` tokens after the prompt, the end-of-text token included."""
    prefix = engine.prefill(prompt)
    text = [sampler.pick(prefix.logits, ())]
    for _ in range(count):
        yield text[-1]
        if text[-1] in stop:
            return
        logits, prefix = engine.step(prefix, text[-1])
        text.append(sampler.pick(logits, text))


class Ahead:
    """Plain decoding beside a text: `before` stands before the root, and looks ahead by the sampler's tokens as far as
    it is asked. `made` is the text before the root."""

    def __init__(self, engine, prefix, root: int, sampler: Sampler = GREEDY):
        self.engine, self.before, self.root, self.sampler, self.made = engine, prefix, root, sampler, ()
        self.passed: list = []  # the Prefix behind each token of the last advance
        self._steps: list[tuple[int, torch.Tensor, object]] = []

    def row(self, k: int) -> torch.Tensor:
        """Return the logits [vocabulary] after the root and k tokens of the text that follows it."""
        while len(self._steps) <= k:
            last = len(self._steps) - 1
            token, start = (self.root, self.before) if last < 0 else (self.token(last), self._steps[last][2])
            self._steps.append((token, *self.engine.step(start, token)))
        return self._steps[k][1]

    def token(self, k: int) -> int:
        """Return the token that follows there."""
        return self.sampler.pick(self.row(k), (*self.made, *(step[0] for step in self._steps[: k + 1])))

    def advance(self, tokens: Sequence[int], root: int) -> None:
        """Commit the root and what was accepted; what was looked up on the way is kept."""
        self.passed = []
        for token in tokens:
            if self._steps and self._steps[0][0] == token:
                self.before = self._steps.pop(0)[2]
            else:
                self._steps.clear()
                _, self.before = self.engine.step(self.before, token)
            self.passed.append(self.before)
        self.root, self.made = root, (*self.made, *tokens)
        if self._steps and self._steps[0][0] != root:
            self._steps.clear()

    def walk(self, tree: DraftTree) -> Accepted:
        """Return what plain decoding accepts of a tree."""
        pick = self.sampler.pick
        return descend(tree, lambda node: pick(self.row(tree.depth[node]), (*self.made, *tree.path_tokens(node))))


class _Run:
    """One prompt in one mode."""

    def __init__(self, engine, item: Item, settings: Settings, rounds: Rounds, mode: Mode, name: str):
        self.engine, self.item, self.settings, self.rounds, self.mode, self.name = (
            engine, item, settings, rounds, mode, name,
        )  # fmt: skip
        self.dtype = judged_as(engine.describe())
        self.prefix = engine.prefill(item.tokens)
        self.sampler = Sampler(settings.sampling, settings.seed, item.tokens)
        self.root = self.sampler.pick(self.prefix.logits, ())
        self.text = [self.root]
        self.ahead = Ahead(engine, self.prefix, self.root, self.sampler)
        # What a drafter reads of the target: the prompt's features, then those that each round's own pass accepted.
        reads_target = settings.draft == "dflash" and item.drafter is not None
        self.features = [self.prefix.features] if reads_target else None
        self.polluted = False
        self.table: np.ndarray | None = None  # this round's marginals

    def run(self) -> dict:
        """Run all rounds, or as many as the text and the context have room for."""
        records, ended = [], None
        while ended is None:
            if len(records) == self.rounds.rounds:
                ended = "rounds"
            elif self.root in self.rounds.stop:
                ended = "end of text"
            elif self._room() < 0:
                ended = "context full"
            else:
                records.append(self._round(len(records)))
        return {"tokens": self.text, "rounds": records, "ended": ended}

    def _room(self) -> int:
        """Return how deep a tree may be so that its last node has a position; negative if the root has none."""
        used = len(self.item.tokens) + len(self.text)  # the root included
        left = self.settings.length if self.engine.max_length is None else self.engine.max_length - used
        return min(self.settings.length, left)

    def _round(self, number: int) -> dict:
        plain = self.rounds.plain and number % (self.rounds.plain + 1) == self.rounds.plain
        tree = DraftTree((self.root,), (-1,)) if plain else self._draft(number)
        tree = self._shaped(tree)
        if plain:
            logits, committed = self.engine.step(self.prefix, self.root)
            verified, logits = committed, logits[None]
        else:
            verified, committed = self.engine.verify(self.prefix, tree, self.mode.verify), None
            logits = verified.logits
        walk = self._walk(tree, logits)
        right = self.ahead.walk(tree)
        walk, right = (_until_stop(tree, w, self.rounds.stop) for w in (walk, right))
        parted = self._parted(tree, walk, right, logits)
        taken = right if self.name == SHADOW else walk
        if committed is None:
            committed = self._commit(tree, taken.path[-1], verified)
        ended = tree.tokens[taken.path[-1]] in self.rounds.stop and len(taken.path) > 1
        emitted = [tree.tokens[node] for node in taken.path[1:]] + ([] if ended else [taken.bonus])
        drafter = None if self.features is None or plain or self.table is None else self._drafter_record(tree, right)
        self.ahead.advance(tree.path_tokens(taken.path[-1]), taken.bonus)
        if self.features is not None:
            self._keep_features(verified, taken.path)
        position = len(self.text)
        self.text += emitted
        self.prefix, self.root = committed, taken.bonus
        return {
            "round": number,
            "position": position,
            "nodes": len(tree) - 1,
            "tree": tree.to_json(),
            "path": list(walk.path),
            "ar_path": list(right.path),
            "plain": bool(plain),
            "accepted": walk.accepted,
            "ar_accepted": right.accepted,
            "aside": leaves_first_branch(tree, right.path),
            "emitted": len(emitted),
            "parted": parted,
            "drift": self._drift(committed),
            "drafter": drafter,
        }

    def _shaped(self, tree: DraftTree) -> DraftTree:
        """Return what the mode runs of a tree: the first branch alone in the engine's own pass."""
        return padded_chain(tree, first_branch(tree)) if self.mode.verify is None else tree

    def _walk(self, tree: DraftTree, logits: torch.Tensor) -> Accepted:
        if not self.sampler.sampling.active:
            return descend(tree, self._chosen(tree, range(len(tree)), logits).__getitem__)

        def choose(node: int) -> int:
            log_q, _ = self._drawn_from(tree, node, logits)
            token = self.sampler.draw(log_q, (*self.text[:-1], *tree.path_tokens(node)))
            return token if token >= 0 else int(logits[node].argmax())

        return descend(tree, choose)

    def _chosen(self, tree: DraftTree, nodes: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Return the tokens that the engine takes greedily, by itself where it picks tokens."""
        taken = None if self.name == SHADOW else self.engine.chosen(self.name, tree, list(nodes), logits)
        return logits.argmax(-1).tolist() if taken is None else list(map(int, taken))

    def _drawn_from(self, tree: DraftTree, node: int, logits: torch.Tensor) -> tuple[np.ndarray, bool]:
        """Return what the mode draws from at a node, and whether that is its raw row processed as it should be."""
        rule = self.settings.history if self.name == CONTROL else "path"
        return mode_row(self.engine, self.sampler, rule, self.name, tree, node, logits[node], tuple(self.text[:-1]))

    def _drafter_record(self, tree: DraftTree, right: Accepted) -> dict:
        """Return what the drafter expected of its draft and how much what followed surprised it, whether what it read
        was polluted, and, in one mode, what plain decoding accepts of an n-gram draft of the same form in its place."""
        ngram = None
        if self.name == _reference(self.rounds) and self._room():
            table = ngram_marginals((*self.item.tokens, *self.text), self._room(), self.engine.vocab_size)
            other = draft_tree(table, self.settings, self.settings.budgets[0], self.root)
            ngram = self.ahead.walk(self._shaped(other)).accepted
        excess, variance = surprise(self.table, [*tree.path_tokens(right.path[-1])[1:], right.bonus])
        return {
            "expected": expected_accepts(self.table, tree),
            "excess": excess,
            "variance": variance,
            "polluted": self.polluted,
            "ngram": ngram,
        }

    def _keep_features(self, verified, path: Sequence[int]) -> None:
        """Append the features of what was accepted, from this round's own verify pass, and note whether they are plain
        decoding's. In shadow the drafter reads plain decoding's."""
        right = torch.cat([prefix.features for prefix in self.ahead.passed])
        mine = right if self.name == SHADOW else verified.features[list(path)]
        self.features.append(mine)
        off, size = (part.double().square().mean().sqrt().item() for part in (mine - right, right))
        self.polluted |= not off <= POLLUTED.get(self.dtype, 1e-3) * size

    def _commit(self, tree: DraftTree, node: int, verified):
        if self.mode.commit is None and not tree.is_chain:
            chain = DraftTree.chain(tree.path_tokens(node))
            return self.engine.commit(self.engine.verify(self.prefix, chain, None), len(chain) - 1)
        if self.mode.commit != self.mode.verify:
            verified = self.engine.verify(self.prefix, tree, self.mode.commit)
        return self.engine.commit(verified, node)

    def _draft(self, number: int) -> DraftTree:
        settings, root, depth = self.settings, self.root, self._room()
        self.table, tree = None, DraftTree((root,), (-1,))
        if isinstance(self.item.recorded, tuple) and depth:
            if number < len(self.item.recorded):
                tree = _no_deeper(self.item.recorded[number].with_root(root), depth)
        elif depth:
            self.table = self._marginals(number, depth)
            tree = draft_tree(self.table, settings, settings.budgets[0], root)
        return tree if settings.order == "heap" else tree.reordered(settings.order)[0]

    def _marginals(self, number: int, depth: int) -> np.ndarray:
        """Return the marginals [at most depth, vocabulary] that this round's tree is made of. Raises UsageError."""
        settings, item = self.settings, self.item
        if isinstance(item.recorded, Marginals):
            return item.recorded.dense(self.engine.vocab_size)[:depth]
        if settings.draft == "dflash" and item.tree is None:
            return from_drafter(self.engine, item, torch.cat(self.features), self.root, depth)
        if settings.draft == "ngram":
            return ngram_marginals((*item.tokens, *self.text), depth, self.engine.vocab_size)
        if settings.draft == "self" and item.tree is None and item.recorded is None:
            rows = [self.sampler.favour(self.ahead.row(k), self.ahead.token(k)) for k in range(depth)]
            return stand_in(np.stack(rows), settings, item.id, number)
        raise UsageError(
            "rounds: got one fixed tree, expected a draft that goes on: self, ngram, or recorded lines of marginals or "
            "of trees, one for each round"
        )

    def _parted(self, tree: DraftTree, walk: Accepted, right: Accepted, logits: torch.Tensor) -> dict | None:
        """Return where and how far the mode left plain decoding in this round, or None."""
        if walk == right:
            return None
        moved = compare_walks(tree, right, walk)
        node = [a for a, b in zip(walk.path, right.path, strict=False) if a == b][-1]
        row = self.ahead.row(tree.depth[node])[None]
        difference = measure(row, logits[node : node + 1])
        path, rule = tree.path(node), self.settings.rule
        text = [*self.item.tokens, *self.text[:-1], *tree.path_tokens(node)]
        controls = []
        with contextlib.suppress(Unsupported):
            controls.append(measure(row, self.engine.forward([text], 1)[0]).max_abs)
        if self.mode.verify is not None and self.engine.supports(None) is None:  # a mode never enters its own floor
            chain = self.engine.verify(self.ahead.before, padded_chain(tree, path, len(tree)), None).logits
            linear = measure(row, chain[len(path) - 1 : len(path)])
            if linear.max_abs[0] <= rule.chain_floor(controls, linear, self.dtype)[0]:  # only one that is right itself
                controls.append(linear.max_abs)
        floor = rule.chain_floor(controls, difference, self.dtype)
        tie = bool(difference.max_abs[0] <= floor[0])
        if tie and self.sampler.sampling.active:  # noise explains the logits, not what was made of them
            tie = self._drawn_from(tree, node, logits)[1]
        elif tie:  # a token that its own logits do not put first is no tie
            (token,) = self._chosen(tree, [node], logits[node : node + 1])
            tie = bool(logits[node, token] == logits[node].max())
        return {
            "node": node,
            "depth": tree.depth[node],
            "position": len(self.text) + tree.depth[node],
            "margin": json_number(difference.margin[0]),
            "max_abs": json_number(difference.max_abs[0]),
            "floor": json_number(floor[0]),
            "tie": tie,
            "wrong_accept": len(moved["wrong_accept"]),
            "wrong_reject": len(moved["wrong_reject"]),
            "wrong_bonus": moved["wrong_bonus"],
        }

    def _drift(self, committed) -> float | None:
        """Compare the stored states with plain decoding of the same text: return the largest rms difference / rms of
        any channel, or None if it is not finite or the engine shows no states."""
        try:
            right, stored = self.engine.contents(self.ahead.before), self.engine.contents(committed)
        except Unsupported:
            return None
        position, *parts = compare_contents(right, stored, getattr(torch, self.dtype))
        shares = (part.rms / part.size for part in parts if part.size)
        return None if position.error else json_number(max(shares, default=0.0))


def _no_deeper(tree: DraftTree, depth: int) -> DraftTree:
    """Return the tree without what is deeper than the context has room for."""
    kept = [node for node in range(len(tree)) if tree.depth[node] <= depth]
    place = {node: at for at, node in enumerate(kept)} | {-1: -1}
    return DraftTree(tuple(tree.tokens[node] for node in kept), tuple(place[tree.parents[node]] for node in kept))


def _until_stop(tree: DraftTree, walk: Accepted, stop: frozenset[int]) -> Accepted:
    """End a walk with an accepted end-of-text token, which then stands for its bonus too."""
    for place, node in enumerate(walk.path[1:], start=1):
        if tree.tokens[node] in stop:
            return Accepted(walk.path[: place + 1], tree.tokens[node])
    return walk


# All prompts


def conclude(prompts: Sequence[Mapping], settings: Settings, rounds: Rounds, layers, known=()) -> dict:
    """Return the summary of each mode, what was exercised, and a verdict: 0 pass, 1 a defect, 2 inconclusive.

    known: modes that a library is known to compute wrong for this model; they leave plain decoding without a defect.
    """
    refused = {mode: reason for prompt in prompts for mode, reason in prompt.get("refused", {}).items()}
    run = [mode for mode in rounds.modes if mode not in refused]
    summary = {mode: summarise([{"id": p["id"]} | p["modes"][mode] for p in prompts]) for mode in run}
    telling = _reference(rounds, run)
    judged = [r for prompt in prompts for r in prompt["modes"][telling]["rounds"] if not r["plain"]] if run else []
    coverage = {
        "rounds": len(judged),
        "accepted_two_or_more": _share(r["ar_accepted"] >= 2 for r in judged),
        "side_branch_accepts": _share(r["aside"] for r in judged),
        "least": {"accepted_two_or_more": DEEP, "side_branch_accepts": ASIDE},
    }
    conclusion = Conclusion()
    for mode in settings.require:
        if mode not in summary:
            why = f"unsupported ({refused[mode]})" if mode in refused else "not_run"
            conclusion.add(INCONCLUSIVE, f"rounds: {mode}: {why}")
        elif summary[mode]["off"]:
            first = summary[mode]["first"]
            margin = "not finite" if first["margin"] is None else f"{first['margin']:.3g}"
            verdict = "known_failure" if mode in known else "fail"
            conclusion.add(
                ExitCode.of(verdict),
                f"rounds: {mode}: {verdict} ({summary[mode]['off']} of {counted(summary[mode]['rounds'], 'round')} "
                f"left plain decoding, first in prompt {first['prompt']}, round {first['round']}, "
                f"token {first['position']}, node {first['node']}, margin {margin})",
                f"rounds: {mode}: alarm: it {summary[mode]['alarm']}; its acceptance is withheld",
            )
    shown = reads(layers, Conv, State) and CONTROL not in settings.require
    if shown and CONTROL in summary and not summary[CONTROL]["off"]:
        conclusion.add(INCONCLUSIVE, f"rounds: {INSENSITIVE}")
    for name, least, what in (
        ("accepted_two_or_more", DEEP, "accept two nodes or more"),
        ("side_branch_accepts", ASIDE, "leave the first branch"),
    ):
        if coverage[name] < least:
            why = f"rounds: not exercised: {coverage[name]:.0%} of rounds {what}, expected {least:.0%}"
            conclusion.add(INCONCLUSIVE, why)
    section = {
        "settings": rounds.to_json(),
        "prompts": list(prompts),
        "summary": summary,
        "unsupported": refused,
        "coverage": coverage,
    }
    return conclusion.into(section)


def _reference(rounds: Rounds, run: Sequence[str] | None = None) -> str:
    """Return the mode whose trees tell what was exercised, of those that ran: the forked tree's if it did."""
    modes = rounds.modes if run is None else run
    return "tree_forked" if not modes or "tree_forked" in modes else modes[-1]


def summarise(runs: Sequence[Mapping]) -> dict:
    """Return counts and averages over all rounds of a mode. `accepted_per_round` excludes the root and the bonus token
    and is withheld (None) when the mode's output is not plain decoding's: a speed bought with another text is none."""
    rounds = [each | {"prompt": run["id"]} for run in runs for each in run["rounds"]]
    drafted = [each for each in rounds if not each["plain"]]
    parted = [each["parted"] | {"prompt": each["prompt"], "round": each["round"]} for each in rounds if each["parted"]]
    off = [each for each in parted if not each["tie"]]
    mine, theirs, emitted = (sum(each[name] for each in drafted) for name in ("accepted", "ar_accepted", "emitted"))
    count = max(1, len(drafted))
    drift = [each["drift"] for each in rounds]
    return {
        "rounds": len(rounds),
        "off": len(off),
        "ties": len(parted) - len(off),
        "accepted_per_round": None if off else mine / count,
        "tokens_per_round": None if off else emitted / count,
        "ar_accepted_per_round": theirs / count,
        "moved_per_round": (mine - theirs) / count,
        "wrong_accept_per_round": sum(each["wrong_accept"] for each in parted) / count,
        "wrong_reject_per_round": sum(each["wrong_reject"] for each in parted) / count,
        "alarm": _alarm(mine, theirs) if off else None,
        "agreement": sum(run["agreement"] for run in runs) / max(1, len(runs)),
        "same_text": sum(run["same_text"] for run in runs),
        "texts": len(runs),
        "first": min(off, key=lambda each: each["position"], default=None),
        "drafter": _drafter_summary(drafted, theirs / count, off),
        "drift": {
            "first": drift[0] if drift else None,
            "last": drift[-1] if drift else None,
            "largest": None if None in drift else max(drift, default=None),
        },
    }


def _drafter_summary(drafted: Sequence[Mapping], accepted: float, off: Sequence) -> dict | None:
    """Return what the drafter expected per round beside what plain decoding accepts of its drafts, and what that says.

    ngram: what plain decoding accepts of an n-gram draft in the same places, in the mode where it was asked, else None;
    surprised: by what followed, in standard deviations (`marginals.surprise`);
    polluted: rounds that were drafted from features which are not plain decoding's.
    """
    drafts = [each["drafter"] for each in drafted if each.get("drafter")]
    if not drafts:
        return None
    expected, polluted, excess, variance = (
        sum(draft[name] for draft in drafts) for name in ("expected", "polluted", "excess", "variance")
    )
    asked = [draft["ngram"] for draft in drafts if draft["ngram"] is not None]
    ngram = sum(asked) / len(asked) if asked else None
    surprised = excess / variance**0.5 if variance else 0.0
    return {
        "expected": expected / len(drafts),
        "accepted": accepted,
        "ngram": ngram,
        "surprised": surprised,
        "polluted": polluted,
        "says": POLLUTION if polluted else None if off else drafter_says(surprised, accepted, ngram),
    }


def _alarm(mine: int, theirs: int) -> str:
    if mine > theirs:
        return "accepts more than plain decoding would: too good to be true"
    return "accepts less than plain decoding would" if mine < theirs else "accepts as much, but other tokens"


def _share(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


# The record


def attach(record: dict, name: str, section: dict) -> dict:
    """Join one more section to the record of a comparison, and conclude from both."""
    both, more = Conclusion.of(record), Conclusion.of(section)
    both.add(more.exit_code, *more.reasons)
    return both.into(record | {name: section})


def make_record(engine, rounds: dict, settings: Settings, model: dict) -> dict:
    """Return the record of rounds alone."""
    return record_head(SCHEMA, engine.describe()) | {
        "model": model,
        "settings": settings.to_json(),
        "rounds": rounds,
        "verdict": rounds["verdict"],
        "exit_code": rounds["exit_code"],
    }
