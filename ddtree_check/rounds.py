"""Many rounds of real speculative decoding in each mode, judged round by round against plain decoding of its own text.

Every mode drafts, verifies, accepts and commits by itself. Beside it plain decoding follows the text that the mode
emits, so that each round's acceptance can be compared with what autoregressive decoding would have accepted of the same
tree, long after the texts have parted.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import __version__
from .accept import Accepted, compare_walks, greedy_walk
from .check import Item, Settings, stand_in
from .commit import compare_contents
from .compare import measure
from .draft import Marginals, best_first, ngram_marginals
from .errors import UsageError
from .files import parse_json
from .known import load_known
from .noise import padded_chain
from .tree import DraftTree
from .verdict import CONTROL, TEXTS
from .wiring import FORKED, UNFORKED, Conv, State, Wiring, reads

SCHEMA = "ddtree-check/rounds/1"
SHADOW = "shadow"
DEEP, ASIDE = 0.3, 0.1  # shares of rounds that must accept two nodes or more, and leave the first branch


@dataclass(frozen=True)
class Mode:
    """How a mode verifies and by which wiring it commits; None is the engine's own pass along the first branch."""

    verify: Wiring | None
    commit: Wiring | None


MODES = {
    "linear": Mode(None, None),
    "tree_forked": Mode(FORKED, FORKED),
    CONTROL: Mode(UNFORKED, UNFORKED),
    "leaky_verify": Mode(UNFORKED, FORKED),  # the leak reaches the text by the logits alone
    "leaky_commit": Mode(FORKED, UNFORKED),  # by the stored state alone
    SHADOW: Mode(UNFORKED, None),  # plain decoding decides; what the tree would have done is only noted
}


@dataclass(frozen=True)
class Rounds:
    """rounds: how many of each prompt; modes: names of MODES; plain: a plain one-token step after so many rounds, 0 for
    none; stop: token ids that end a text. Raises UsageError for anything else."""

    rounds: int = 20
    modes: tuple[str, ...] = ("linear", "tree_forked", CONTROL)
    plain: int = 0
    stop: frozenset[int] = frozenset()

    def __post_init__(self):
        for name, least in (("rounds", 1), ("plain", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a number of at least {least}")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise UsageError(f"modes: got {', '.join(unknown) or 'none'}, expected some of {', '.join(MODES)}")

    def to_json(self) -> dict:
        return {"rounds": self.rounds, "modes": list(self.modes), "plain": self.plain, "stop": sorted(self.stop)}


def generate(
    engine,
    items: Sequence[Item],
    settings: Settings,
    rounds: Rounds,
    *,
    journal: str | Path | None = None,
    progress: Callable | None = None,
) -> dict:
    """Runs all prompts in all modes. Returns {"settings", "prompts", "summary", "coverage", "verdict", "exit_code"}.

    settings: its draft, first budget, order, seed, rule and required modes are used. journal: a file of JSON lines with
    the prompts that are finished; a run that was killed goes on after them. Raises UsageError for a journal of another
    run and for a prompt that fills the model's context.
    """
    for item in items:
        if engine.max_length is not None and len(item.tokens) >= engine.max_length:
            raise UsageError(
                f"prompt {item.id}: {len(item.tokens)} tokens leave no room; the model's context is {engine.max_length}"
            )
    environment = engine.describe()
    known = {entry.mode for entry in load_known() if entry.covers(environment.get("model_type"), environment)}
    head = {"settings": settings.to_json(), "rounds": rounds.to_json(), "environment": environment}
    done = _resume(journal, head) if journal is not None else {}
    found = []
    for place, item in enumerate(items):
        if progress:
            progress(place, len(items), item.id)
        key = {"id": item.id, "prompt_tokens": list(item.tokens)}
        result = done.get(item.id)
        if result is None or result["prompt_tokens"] != key["prompt_tokens"]:
            result = key | {"modes": _run_prompt(engine, item, settings, rounds)}
            if journal is not None:
                _append(journal, result)
        found.append(result)
    if progress:
        progress(len(items), len(items), "done")
    return conclude(found, settings, rounds, engine.layers, known)


# One prompt


def _run_prompt(engine, item: Item, settings: Settings, rounds: Rounds) -> dict[str, dict]:
    modes = {mode: _Run(engine, item, settings, rounds, MODES[mode], mode).run() for mode in rounds.modes}
    longest = max(len(found["tokens"]) for found in modes.values())
    text = list(_plain_text(engine, item.tokens, longest, rounds.stop))
    for found in modes.values():
        pairs = list(zip(found["tokens"], text, strict=False))
        same = sum(mine == theirs for mine, theirs in pairs)
        found["agreement"] = same / max(1, len(pairs))
        found["same_text"] = same == len(pairs)
    return modes


def _plain_text(engine, prompt: Sequence[int], count: int, stop: frozenset[int]) -> Iterator[int]:
    """Autoregressive decoding: up to `count` tokens after the prompt, the end-of-text token included."""
    prefix = engine.prefill(prompt)
    token = int(prefix.logits.argmax())
    for _ in range(count):
        yield token
        if token in stop:
            return
        logits, prefix = engine.step(prefix, token)
        token = int(logits.argmax())


class Ahead:
    """Plain decoding beside a text: `before` stands before the root, and looks ahead greedily as far as it is asked."""

    def __init__(self, engine, prefix, root: int):
        self.engine, self.before, self.root = engine, prefix, root
        self._steps: list[tuple[int, torch.Tensor, object]] = []

    def row(self, k: int) -> torch.Tensor:
        """Logits after the root and k tokens of the greedy text that follows it."""
        while len(self._steps) <= k:
            token, start = (int(self._steps[-1][1].argmax()), self._steps[-1][2]) if self._steps else (None, None)
            token, start = (self.root, self.before) if token is None else (token, start)
            self._steps.append((token, *self.engine.step(start, token)))
        return self._steps[k][1]

    def advance(self, tokens: Sequence[int], root: int) -> None:
        """Commits the root and what was accepted; what was looked up on the way is kept."""
        for token in tokens:
            if self._steps and self._steps[0][0] == token:
                self.before = self._steps.pop(0)[2]
            else:
                self._steps.clear()
                _, self.before = self.engine.step(self.before, token)
        self.root = root
        if self._steps and self._steps[0][0] != root:
            self._steps.clear()

    def walk(self, tree: DraftTree) -> Accepted:
        """What plain decoding accepts of a tree."""
        path = [0]
        while True:
            token = int(self.row(len(path) - 1).argmax())
            child = next((node for node in tree.children[path[-1]] if tree.tokens[node] == token), None)
            if child is None:
                return Accepted(tuple(path), token)
            path.append(child)


class _Run:
    """One prompt in one mode."""

    def __init__(self, engine, item: Item, settings: Settings, rounds: Rounds, mode: Mode, name: str):
        self.engine, self.item, self.settings, self.rounds, self.mode, self.name = (
            engine, item, settings, rounds, mode, name,
        )  # fmt: skip
        self.dtype = engine.describe()["dtype"]
        self.prefix = engine.prefill(item.tokens)
        self.root = int(self.prefix.logits.argmax())
        self.text = [self.root]
        self.ahead = Ahead(engine, self.prefix, self.root)

    def run(self) -> dict:
        found, ended = [], "rounds"
        for number in range(self.rounds.rounds):
            if self.root in self.rounds.stop:
                ended = "end of text"
                break
            if self._room() < 0:
                ended = "context full"
                break
            found.append(self._round(number))
        return {"tokens": self.text, "rounds": found, "ended": ended}

    def _room(self) -> int:
        """How deep a tree may be so that its last node still has a position; negative if the root has none."""
        used = len(self.item.tokens) + len(self.text)  # the root included
        left = self.settings.length if self.engine.max_length is None else self.engine.max_length - used
        return min(self.settings.length, left)

    def _round(self, number: int) -> dict:
        plain = self.rounds.plain and number % (self.rounds.plain + 1) == self.rounds.plain
        tree = DraftTree((self.root,), (-1,)) if plain else self._draft(number)
        if self.mode.verify is None:
            tree = first_branch(tree)
        if plain:
            logits, committed = self.engine.step(self.prefix, self.root)
            logits = logits[None]
        else:
            verified, committed = self.engine.verify(self.prefix, tree, self.mode.verify), None
            logits = verified.logits
        walk = greedy_walk(tree, logits.argmax(-1).cpu().numpy())
        right = self.ahead.walk(tree)
        walk, right = (_until_stop(tree, w, self.rounds.stop) for w in (walk, right))
        parted = self._parted(tree, walk, right, logits)
        taken = right if self.name == SHADOW else walk
        if committed is None:
            committed = self._commit(tree, taken.path[-1], verified)
        ended = tree.tokens[taken.path[-1]] in self.rounds.stop and len(taken.path) > 1
        emitted = [tree.tokens[node] for node in taken.path[1:]] + ([] if ended else [taken.bonus])
        self.ahead.advance(tree.path_tokens(taken.path[-1]), taken.bonus)
        record = {
            "round": number,
            "position": len(self.text),
            "nodes": len(tree) - 1,
            "plain": bool(plain),
            "accepted": walk.accepted,
            "ar_accepted": right.accepted,
            "aside": any(node != tree.children[tree.parents[node]][0] for node in right.path[1:]),
            "emitted": len(emitted),
            "parted": parted,
            "drift": self._drift(committed),
        }
        self.text += emitted
        self.prefix, self.root = committed, taken.bonus
        return record

    def _commit(self, tree: DraftTree, node: int, verified):
        if self.mode.commit is None and not tree.is_chain:
            chain = DraftTree.chain(tree.path_tokens(node))
            return self.engine.commit(self.engine.verify(self.prefix, chain, None), len(chain) - 1)
        if self.mode.commit != self.mode.verify:
            verified = self.engine.verify(self.prefix, tree, self.mode.commit)
        return self.engine.commit(verified, node)

    def _draft(self, number: int) -> DraftTree:
        settings, root, depth = self.settings, self.root, self._room()
        if not depth:
            return DraftTree((root,), (-1,))
        if isinstance(self.item.recorded, Marginals):
            table = self.item.recorded.dense(self.engine.vocab_size)[:depth]
        elif settings.draft == "ngram":
            table = ngram_marginals((*self.item.tokens, *self.text), depth, self.engine.vocab_size)
        elif settings.draft == "self" and self.item.tree is None and self.item.recorded is None:
            rows = torch.stack([self.ahead.row(k) for k in range(depth)]).double().cpu().numpy()
            table = stand_in(rows, settings, self.item.id, number)
        else:
            raise UsageError("rounds: got one fixed tree, expected a draft that goes on: self, ngram or marginals")
        tree = best_first(table, settings.budgets[0], root=root)
        return tree if settings.order == "heap" else tree.reordered(settings.order)[0]

    def _parted(self, tree: DraftTree, walk: Accepted, right: Accepted, logits: torch.Tensor) -> dict | None:
        """Where and how far the mode left plain decoding in this round; None if it did not."""
        if walk == right:
            return None
        found = compare_walks(tree, right, walk)
        node = [a for a, b in zip(walk.path, right.path, strict=False) if a == b][-1]
        row = self.ahead.row(tree.depth[node])[None]
        difference = measure(row, logits[node : node + 1])
        path, rule = tree.path(node), self.settings.rule
        text = [*self.item.tokens, *self.text[:-1], *tree.path_tokens(node)]
        controls = [measure(row, self.engine.forward([text], 1)[0]).max_abs]
        if self.mode.verify is not None:  # a mode never enters its own floor
            chain = self.engine.verify(self.ahead.before, padded_chain(tree, path, len(tree)), None).logits
            linear = measure(row, chain[len(path) - 1 : len(path)])
            if linear.max_abs[0] <= rule.chain_floor(controls, linear, self.dtype)[0]:  # only one that is right itself
                controls.append(linear.max_abs)
        floor = rule.chain_floor(controls, difference, self.dtype)
        tie = bool(difference.max_abs[0] <= floor[0])
        return {
            "node": node,
            "depth": tree.depth[node],
            "position": len(self.text) + tree.depth[node],
            "margin": _json(difference.margin[0]),
            "max_abs": _json(difference.max_abs[0]),
            "floor": _json(floor[0]),
            "tie": tie,
            "wrong_accept": len(found["wrong_accept"]),
            "wrong_reject": len(found["wrong_reject"]),
            "wrong_bonus": found["wrong_bonus"],
        }

    def _drift(self, committed) -> float | None:
        """The stored states against plain decoding of the same text: largest rms difference / rms of any channel."""
        parts = compare_contents(
            self.engine.contents(self.ahead.before), self.engine.contents(committed), getattr(torch, self.dtype)
        )
        if parts[0].error:
            return None
        return _json(max((part.rms / part.size for part in parts if part.size), default=0.0))


def first_branch(tree: DraftTree) -> DraftTree:
    """The chain of first children."""
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    return DraftTree.chain([tree.tokens[node] for node in path])


def _until_stop(tree: DraftTree, walk: Accepted, stop: frozenset[int]) -> Accepted:
    """A walk that ends with an accepted end-of-text token, which then stands for its bonus too."""
    for place, node in enumerate(walk.path[1:], start=1):
        if tree.tokens[node] in stop:
            return Accepted(walk.path[: place + 1], tree.tokens[node])
    return walk


# All prompts


def conclude(prompts: Sequence[Mapping], settings: Settings, rounds: Rounds, layers, known=()) -> dict:
    """The summary of each mode, what was exercised, and a verdict: 0 pass, 1 a defect, 2 inconclusive.

    known: modes that a library is known to compute wrong for this model; they leave plain decoding without a defect.
    """
    summary = {mode: _summary([{"id": p["id"]} | p["modes"][mode] for p in prompts]) for mode in rounds.modes}
    judged = [r for prompt in prompts for r in prompt["modes"][_reference(rounds)]["rounds"] if not r["plain"]]
    coverage = {
        "rounds": len(judged),
        "accepted_two_or_more": _share(r["ar_accepted"] >= 2 for r in judged),
        "side_branch_accepts": _share(r["aside"] for r in judged),
    }
    reasons, defect, open_ = [], False, False
    for mode in settings.require:
        if mode not in summary:
            reasons.append(f"rounds: {mode}: not_run")
            open_ = True
        elif summary[mode]["off"]:
            first = summary[mode]["first"]
            margin = "not finite" if first["margin"] is None else f"{first['margin']:.3g}"
            reasons.append(
                f"rounds: {mode}: {'known_failure' if mode in known else 'fail'} "
                f"({summary[mode]['off']} of {summary[mode]['rounds']} rounds left plain decoding, first in prompt "
                f"{first['prompt']}, round {first['round']}, token {first['position']}, node {first['node']}, "
                f"margin {margin})"
            )
            defect |= mode not in known
    if (
        reads(layers, Conv, State)
        and CONTROL in summary
        and CONTROL not in settings.require
        and not summary[CONTROL]["off"]
    ):
        reasons.append(f"rounds: insensitive: {CONTROL} never left plain decoding, so that forked did not says little")
        open_ = True
    for name, least, what in (
        ("accepted_two_or_more", DEEP, "accept two nodes or more"),
        ("side_branch_accepts", ASIDE, "leave the first branch"),
    ):
        if coverage[name] < least:
            reasons.append(f"rounds: not exercised: {coverage[name]:.0%} of rounds {what}, expected {least:.0%}")
            open_ = True
    code = 1 if defect else 2 if open_ else 0
    return {
        "settings": rounds.to_json(),
        "prompts": list(prompts),
        "summary": summary,
        "coverage": coverage,
        "verdict": {"text": TEXTS[code], "reasons": reasons},
        "exit_code": code,
    }


def _reference(rounds: Rounds) -> str:
    """The mode whose trees tell what was exercised: the forked tree's if it ran."""
    return "tree_forked" if "tree_forked" in rounds.modes else rounds.modes[-1]


def _summary(runs: Sequence[Mapping]) -> dict:
    """Counts and averages over all rounds of a mode. `accepted_per_round` excludes the root and the bonus token and is
    withheld (None) when the mode's output is not plain decoding's: a speed bought with another text is none."""
    rounds = [(run, found) for run in runs for found in run["rounds"]]
    drafted = [found for _, found in rounds if not found["plain"]]
    parted = [(run, found) for run, found in rounds if found["parted"]]
    off = [(run, found) for run, found in parted if not found["parted"]["tie"]]
    mine, theirs = (sum(found[name] for found in drafted) for name in ("accepted", "ar_accepted"))
    count = max(1, len(drafted))
    drift = [found["drift"] for _, found in rounds]
    lost = any(value is None for value in drift)
    first = None
    if off:
        run, found = min(off, key=lambda item: item[1]["parted"]["position"])
        first = {"prompt": run["id"], "round": found["round"]} | found["parted"]
    return {
        "rounds": len(rounds),
        "off": len(off),
        "ties": len(parted) - len(off),
        "accepted_per_round": mine / count if not off else None,
        "tokens_per_round": sum(found["emitted"] for found in drafted) / count if not off else None,
        "ar_accepted_per_round": theirs / count,
        "moved_per_round": (mine - theirs) / count,
        "wrong_accept_per_round": sum(found["parted"]["wrong_accept"] for _, found in parted) / count,
        "wrong_reject_per_round": sum(found["parted"]["wrong_reject"] for _, found in parted) / count,
        "alarm": None if not off else _alarm(mine, theirs),
        "agreement": sum(run["agreement"] for run in runs) / max(1, len(runs)),
        "same_text": sum(run["same_text"] for run in runs),
        "texts": len(runs),
        "first": first,
        "drift": {
            "first": drift[0] if drift else None,
            "last": drift[-1] if drift else None,
            "largest": None if lost or not drift else max(drift),
        },
    }


def _alarm(mine: int, theirs: int) -> str:
    if mine > theirs:
        return "accepts more than plain decoding would: too good to be true"
    return "accepts less than plain decoding would" if mine < theirs else "accepts as much, but other tokens"


def _share(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


# The record


def attach(record: dict, rounds: dict) -> dict:
    """The record of a comparison with its rounds, and one verdict over both: a defect before what is inconclusive."""
    codes = {record["exit_code"], rounds["exit_code"]}
    code = 1 if 1 in codes else max(codes)
    reasons = [*record["verdict"]["reasons"], *rounds["verdict"]["reasons"]]
    verdict = record["verdict"] | {"text": TEXTS[code], "reasons": reasons}
    return record | {"rounds": rounds, "verdict": verdict, "exit_code": code}


def make_record(engine, rounds: dict, settings: Settings, model: dict) -> dict:
    """The record of rounds alone."""
    return {
        "schema": SCHEMA,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": {"ddtree_check": __version__, **engine.describe()},
        "model": model,
        "settings": settings.to_json(),
        "rounds": rounds,
        "verdict": rounds["verdict"],
        "exit_code": rounds["exit_code"],
    }


# The journal


def _resume(path: str | Path, head: dict) -> dict[str, dict]:
    """Finished prompts of a journal by id. A new journal gets its head; a last line without an end is dropped."""
    path = Path(path)
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            path.write_bytes(json.dumps(head).encode() + b"\n")
            return {}
        if whole != data:
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"journal: {path} cannot be written ({error.strerror}), expected a file in a folder") from None
    try:
        lines = [parse_json(line, f"{path}:{n}") for n, line in enumerate(whole.decode().splitlines(), start=1)]
    except ValueError as error:
        raise UsageError(f"journal: {error}") from None
    if lines[0] != json.loads(json.dumps(head)):
        raise UsageError(
            f"journal: {path} belongs to a run with other settings; give another file or the same settings"
        )
    return {line["id"]: line for line in lines[1:]}


def _append(path: str | Path, result: dict) -> None:
    with Path(path).open("ab") as file:
        file.write(json.dumps(result, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _json(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
