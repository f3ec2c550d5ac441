"""After the verdict on logits: what a commit stored, against a prefill of the same text, layer by layer.

The first half is pure: contents in, differences and words out. The second half runs an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .compare import Differences, measure, ulp
from .errors import UsageError
from .noise import leaf_paths, padded_chain
from .tree import DraftTree
from .verdict import EXACT, Rule, beyond, judge
from .wiring import FORKED, Wiring, contaminated

PATTERNS = ("zero", "full", "first", "branch", "every")
STEPS = 3  # plain decode steps after each commit
LEAKS = "foreign tokens, as the wiring says"
POSITION = "position"  # the channel of the number of committed tokens; it belongs to no layer
NARROW = (torch.bfloat16, torch.float16)

Contents = tuple[int, list[dict[str, torch.Tensor]]]  # as `Engine.contents` gives them


# Which nodes are accepted


def accept_nodes(tree: DraftTree, patterns: Sequence[str]) -> dict[int, str]:
    """The nodes that end the accepted paths, each with the first pattern that names it.

    zero    the root alone;  first   the root's first child;  full   the leaf at the end of the first branch
    branch  the deepest node of a path that leaves the first branch;  every   all nodes
    PATH    node ids from the root on, such as 0-2-5, or the last of them
    A pattern that the tree has no node for names none. Raises UsageError for anything else.
    """
    spine = [0]
    while tree.children[spine[-1]]:
        spine.append(tree.children[spine[-1]][0])
    aside = [node for node in range(len(tree)) if node not in spine]
    named = {
        "zero": [0],
        "first": spine[1:2],
        "full": spine[-1:],
        "branch": [max(aside, key=lambda node: (tree.depth[node], -node))] if aside else [],
        "every": range(len(tree)),
    }
    found: dict[int, str] = {}
    for pattern in patterns:
        for node in named.get(pattern) or ([] if pattern in named else [_path_end(tree, pattern)]):
            found.setdefault(node, pattern)
    return found


def check_pattern(pattern: str) -> None:
    """Raises UsageError for what can be no pattern of any tree."""
    if pattern not in PATTERNS and not all(part.isdecimal() for part in pattern.split("-")):
        raise UsageError(f"accept: got {pattern!r}, expected {', '.join(PATTERNS)} or a path of nodes such as 0-2-5")


def _path_end(tree: DraftTree, pattern: str) -> int:
    check_pattern(pattern)
    path = tuple(map(int, pattern.split("-")))
    if path[-1] >= len(tree):
        raise UsageError(f"accept: node {path[-1]} of {pattern!r}, expected 0..{len(tree) - 1}")
    right = tree.path(path[-1])
    if len(path) > 1 and path != right:
        raise UsageError(f"accept: got {pattern!r}, expected the path {'-'.join(map(str, right))}")
    return path[-1]


# Two contents, compared


@dataclass(frozen=True)
class Part:
    """One channel of one layer against the reference: how far off, how large, and the spacing of the model's dtype.

    error  max |difference|, inf if the shapes differ or a value is not finite;  rms  of the difference
    size   rms of the reference
    """

    layer: int
    channel: str
    error: float
    rms: float
    size: float
    ulp: float


def compare_contents(reference: Contents, stored: Contents, dtype: torch.dtype) -> list[Part]:
    """A Part for the position, then one for each channel of each layer of the reference."""
    apart = float(abs(stored[0] - reference[0]))
    parts = [Part(-1, POSITION, apart, apart, 0.0, 0.0)]
    for layer, channels in enumerate(reference[1]):
        for channel, right in channels.items():
            found = stored[1][layer].get(channel)
            size, spacing = _rms(right), float(ulp(right.abs().max(), dtype)) if right.numel() else 0.0
            if found is None or found.shape != right.shape or found.dtype != right.dtype:
                parts.append(Part(layer, channel, np.inf, np.inf, size, spacing))
                continue
            difference = found.double() - right.double()
            error = float(difference.abs().max()) if right.numel() else 0.0
            parts.append(Part(layer, channel, error if np.isfinite(error) else np.inf, _rms(difference), size, spacing))
    return parts


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def chain_floors(parts: Sequence[Part], steps: Sequence[Part], rule: Rule, dtype: str) -> list[float]:
    """Largest error of each part of a chain's commit that plain decoding's own (`steps`) explains.

    Steps run other kernels, so the largest of any layer counts, relative to the state's size and channel by channel.
    """
    share: dict[str, float] = {}
    for step in steps:
        if step.size:
            kind = step.channel.partition(".")[0]
            share[kind] = max(share.get(kind, 0.0), step.error / step.size)
    return [_floor(part, rule, dtype, share.get(part.channel.partition(".")[0], 0.0) * part.size) for part in parts]


def tree_floors(parts: Sequence[Part], controls: Sequence[Sequence[Part]], rule: Rule, dtype: str) -> list[float]:
    """Largest error of each part that `controls`, commits of the same path along chains, explain."""
    return [
        _floor(part, rule, dtype, max(control[place].error for control in controls)) for place, part in enumerate(parts)
    ]


def _floor(part: Part, rule: Rule, dtype: str, control: float) -> float:
    floor = rule.factor * control + rule.ulps * part.ulp
    # In float32 a control can be exactly 0 by chance, where it ran the very kernels of the reference.
    return max(floor, rule.rounding[dtype] * part.size) if dtype in EXACT else floor


def off(parts: Sequence[Part], floors: Sequence[float]) -> list[tuple[Part, float]]:
    """The parts beyond their floors, each with its floor."""
    return [(part, floor) for part, floor in zip(parts, floors, strict=True) if not part.error <= floor]


# What was stored instead


@dataclass(eq=False)
class Search:
    """Says what a commit stored in place of the state after `path`, from what plain decoding leaves at each node.

    before, reference, stored: contents before the accept, after it, and what was found. `see` is shown every node once.
    """

    path: tuple[int, ...]
    before: Contents
    reference: Contents
    stored: Contents
    bad: Sequence[tuple[Part, float]]
    nearest: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)  # of a state: error, node
    rows: dict[tuple[int, str], dict[int, torch.Tensor]] = field(default_factory=dict)  # of windows and keys: by node

    def see(self, node: int, contents: Contents) -> None:
        for part, _ in self.bad:
            key = (part.layer, part.channel)
            if part.channel == POSITION:
                continue
            theirs = contents[1][part.layer][part.channel]
            if _by_rows(part.channel):
                self.rows.setdefault(key, {})[node] = theirs[-1]
                continue
            found = self.stored[1][part.layer].get(part.channel)
            if found is not None and found.shape == theirs.shape:
                error = float((found.double() - theirs.double()).abs().max())
                self.nearest[key] = min(self.nearest.get(key, (np.inf, -1)), (error, node))

    def say(self, part: Part, floor: float) -> str:
        if part.channel == POSITION:
            return f"position {self.stored[0]}, expected {self.reference[0]}"
        name = _word(part.channel)
        found = self.stored[1][part.layer].get(part.channel)
        right = self.reference[1][part.layer][part.channel]
        if found is None:
            return f"no {name} is stored"
        if found.shape != right.shape:
            if _by_rows(part.channel) and found.shape[1:] == right.shape[1:]:
                return f"{name}: {len(found)} rows, expected {len(right)}"
            return f"{name} has shape {list(found.shape)}, expected {list(right.shape)}"
        if found.dtype != right.dtype:
            return f"{name} is {found.dtype}, expected {right.dtype}"
        if not found.isfinite().all():
            return f"{name} is not finite"
        narrow = _rounded(found, right, floor)
        if narrow:
            return f"{name} is rounded to {narrow}"
        before = self.before[1][part.layer].get(part.channel)
        if not _by_rows(part.channel):
            return self._say_state(part, floor, found, before)
        return self._say_rows(part, floor, found, right, before)

    def _say_state(self, part: Part, floor: float, found: torch.Tensor, before: torch.Tensor | None) -> str:
        if before is not None and _near(found, before, floor):
            return "state unchanged by the accept"
        if not found.any():
            return "state is zero"
        error, node = self.nearest.get((part.layer, part.channel), (np.inf, -1))
        if error <= floor:
            return f"committed state is node {node}'s, expected node {self.path[-1]}'s"
        return f"committed state is no node's, expected node {self.path[-1]}'s"

    def _say_rows(self, part: Part, floor: float, found, right, before) -> str:
        """Rows by the node they belong to; -1 is the last committed token, -2 the one before."""
        name, rows = _word(part.channel), len(right)
        if before is not None and found.shape == before.shape and _near(found, before, floor):
            return f"{name} unchanged by the accept"
        known = {-1 - back: row for back, row in enumerate(reversed(before))} if before is not None else {}
        known |= self.rows.get((part.layer, part.channel), {})
        labels = [*range(-rows, 0), *self.path][-rows:]
        got = [_label(*row, known, floor) for row in zip(found, right, labels, strict=True)]
        wrong = [place for place, (label, have) in enumerate(zip(labels, got, strict=True)) if label != have]
        first = min(wrong, default=0)
        if "?" in got[first:] and part.channel == "keys" and not any(p.channel == "values" for p in self._beside(part)):
            return f"{name}: rows of the right tokens at another position"
        shown = slice(max(first, rows - 8), None)
        return f"{name}: rows of nodes {_list(got[shown])}, expected {_list(labels[shown])}"

    def _beside(self, part: Part) -> Iterator[Part]:
        return (other for other, _ in self.bad if other.layer == part.layer)


def _by_rows(channel: str) -> bool:
    return channel.partition(".")[0] != "recurrent"


def _word(channel: str) -> str:
    kind, _, number = channel.partition(".")
    name = {"recurrent": "state", "conv": "convolution window"}.get(kind, kind)
    return f"{name} {number}" if number else name


def _near(a: torch.Tensor, b: torch.Tensor, floor: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b.double()).abs().max() <= floor)


def _rounded(found: torch.Tensor, right: torch.Tensor, floor: float) -> str | None:
    for dtype in NARROW:
        if right.dtype != dtype and torch.equal(found, found.to(dtype).to(found.dtype)) and found.any():
            error = (found.double() - right.double()).abs() - torch.finfo(dtype).eps * right.double().abs()
            if error.max() <= floor and not torch.equal(right, right.to(dtype).to(right.dtype)):
                return str(dtype).removeprefix("torch.")
    return None


def _label(row, right, label: int, known: Mapping[int, torch.Tensor], floor: float) -> int | str:
    """Whose row it is: the expected one where that fits (equal tokens can have equal rows), else the nearest."""
    if _near(row, right, floor):
        return label
    if not row.any():
        return "zero"
    apart = {name: float((row.double() - theirs.double()).abs().max()) for name, theirs in known.items()}
    best = min(apart, key=apart.get, default=None)
    return best if best is not None and apart[best] <= floor else "?"


def _list(labels: Sequence[object]) -> str:
    return " ".join(map(str, labels))


# Runs


@dataclass(frozen=True)
class Commit:
    """What one mode's commit of one path came to. `bad`: (part, floor, words) of what is off, by layer."""

    verdict: str  # pass, fail, reference_unusable
    reason: str | None = None
    bad: tuple[tuple[Part, float, str], ...] = ()
    after: Differences | None = None  # of the plain steps that follow
    floor: np.ndarray | None = None
    verdicts: tuple[str, ...] = ()

    def to_json(self) -> dict:
        steps = [] if self.after is None else zip(self.after.max_abs, self.floor, self.verdicts, strict=True)
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "bad": [
                {"layer": p.layer, "channel": p.channel, "error": _json(p.error), "floor": _json(floor), "says": says}
                for p, floor, says in self.bad
            ],
            "steps": [{"max_abs": _json(error), "floor": _json(floor), "verdict": v} for error, floor, v in steps],
        }


@dataclass(frozen=True)
class Accept:
    """One forced accept: the path to `node`, and the commit of each mode. `aside`: the path leaves the first branch."""

    pattern: str
    node: int
    path: tuple[int, ...]
    aside: bool
    modes: dict[str, Commit]
    expected: frozenset[str] = frozenset()  # modes whose wiring must leave a wrong state here

    def to_json(self) -> dict:
        return {
            "pattern": self.pattern,
            "node": self.node,
            "path": list(self.path),
            "aside": self.aside,
            "modes": {mode: found.to_json() for mode, found in self.modes.items()},
            "expected": sorted(self.expected),
        }


def commit_runs(
    engine, prompt: Sequence[int], prefix, tree: DraftTree, patterns, wirings: Mapping[str, Wiring | None], rule: Rule
) -> list[Accept]:
    """Commits the paths that `patterns` name under each wiring (None: the engine's own pass along a chain).

    The reference of each is `prefill(prompt + path)`; noise comes from plain steps along the path and from the same
    commit along a chain as wide as the tree. Raises UsageError for a path that the tree does not have.
    """
    dtype = engine.describe()["dtype"]
    verified = {mode: engine.verify(prefix, tree, wiring) for mode, wiring in wirings.items() if wiring is not None}
    dirty = {mode: contaminated(w.plan(tree), engine.layers) for mode, w in wirings.items() if w is not None}
    accepts = []
    for node, pattern in accept_nodes(tree, patterns).items():
        run = _Run(engine, prompt, prefix, tree, node, rule, dtype)
        expected = frozenset(mode for mode, nodes in dirty.items() if node in nodes)
        modes = {mode: run.commit(verified.get(mode), mode in expected) for mode in wirings}
        path = tree.path(node)
        aside = any(step != tree.children[tree.parents[step]][0] for step in path[1:])
        accepts.append(Accept(pattern, node, path, aside, modes, expected))
    return accepts


class _Run:
    """One path: its reference, its controls, and the commits that are judged by them."""

    def __init__(self, engine, prompt, prefix, tree: DraftTree, node: int, rule: Rule, dtype: str):
        self.engine, self.prefix, self.tree, self.node, self.rule, self.dtype = engine, prefix, tree, node, rule, dtype
        self.path, self.wide = tree.path(node), getattr(torch, dtype)
        fresh = engine.prefill([*prompt, *tree.path_tokens(node)])
        self.reference = engine.contents(fresh)
        self.probe, self.logits = self._greedy(fresh)
        stepped = prefix
        for token in tree.path_tokens(node):
            _, stepped = engine.step(stepped, token)
        self.steps, self.steps_after = self._measure(stepped)
        self.problem = self._problem()
        chains = {"linear": self._along_chain(None), "tree": self._along_chain(FORKED)}
        self.chains = {name: (committed, *self._measure(committed)) for name, committed in chains.items()}
        self.trusted = [
            (parts, after)
            for _, parts, after in self.chains.values()
            if not off(parts, self._chain_floors(parts)) and not beyond(judge(after, self._chain_floor(after)))
        ]

    def commit(self, verified, expected: bool) -> Commit:
        """Judges a mode's commit; a mode never enters its own floor. verified: its tree pass, None for the engine's own
        along the chain. expected: its wiring leaks at this node, so nothing needs to be searched for."""
        if self.problem:
            return Commit("reference_unusable", self.problem)
        own = verified is None  # the engine's own pass
        if own:
            committed, parts, after = self.chains["linear"]
        else:
            committed = self.engine.commit(verified, self.node)
            parts, after = self._measure(committed)
        if own or not self.trusted:
            floors, floor = self._chain_floors(parts), self._chain_floor(after)
        else:
            floors = tree_floors(parts, [control for control, _ in self.trusted], self.rule, self.dtype)
            floor = self.rule.floor([control.max_abs for _, control in self.trusted], after.ulp)
            if self.dtype in EXACT:
                floor = np.maximum(floor, self.rule.rounding[self.dtype] * after.std)
        bad, verdicts = off(parts, floors), judge(after, floor)
        if not bad and not beyond(verdicts):
            return Commit("pass", None, (), after, floor, verdicts)
        if expected:
            said = tuple((part, floor, f"{_word(part.channel)}: {LEAKS}") for part, floor in bad)
        else:
            said = self._search(committed, bad)
        return Commit("fail", _reason(said, beyond(verdicts)), said, after, floor, verdicts)

    def _chain_floors(self, parts) -> list[float]:
        return chain_floors(parts, self.steps, self.rule, self.dtype)

    def _chain_floor(self, after: Differences) -> np.ndarray:
        return self.rule.chain_floor([self.steps_after.max_abs], after, self.dtype)

    def _along_chain(self, wiring: Wiring | None):
        """The path's commit along a chain as wide as the tree; None: by the engine's own pass over a leaf path."""
        nodes, rows = self.path, len(self.tree)
        if wiring is None:
            nodes = next(path.nodes for path in leaf_paths(self.tree) if self.node in path.nodes)
            rows = len(nodes)
        chain = padded_chain(self.tree, nodes, rows)
        return self.engine.commit(self.engine.verify(self.prefix, chain, wiring), len(self.path) - 1)

    def _greedy(self, prefix) -> tuple[list[int], list[torch.Tensor]]:
        tokens, rows, logits = [], [], prefix.logits
        for _ in range(STEPS):
            tokens.append(int(logits.argmax()))
            logits, prefix = self.engine.step(prefix, tokens[-1])
            rows.append(logits)
        return tokens, rows

    def _measure(self, prefix) -> tuple[list[Part], Differences]:
        parts = compare_contents(self.reference, self.engine.contents(prefix), self.wide)
        rows = []
        for token in self.probe:
            logits, prefix = self.engine.step(prefix, token)
            rows.append(logits)
        return parts, measure(torch.stack(self.logits), torch.stack(rows))

    def _problem(self) -> str | None:
        """Why plain decoding and a prefill of the same text cannot serve as reference, or None."""
        sized = [part for part in self.steps if part.size]
        if self.steps[0].error:
            return "plain decoding and a prefill of the same text end at different positions"
        bound = self.rule.bounds[self.dtype]
        if self.dtype in EXACT:
            ratio, what = max((part.error / part.size for part in sized), default=0.0), "largest |difference| / rms"
            bound *= 10  # one entry of thousands against the rms of all
        else:
            ratio, what = float(np.median([part.rms / part.size for part in sized] or [0.0])), "median rms / rms"
        if ratio <= bound:
            return None
        return f"plain decoding leaves other states than a prefill of the same text: {what} {ratio:.3g}"

    def _search(self, committed, bad) -> tuple[tuple[Part, float, str], ...]:
        """Words for each part that is off. Costs a decode step a node, so it is only done for what failed."""
        engine = self.engine
        # A part's own floor can be 0; whose state it is shows within what steps differ by from a prefill.
        near = dict(zip(((p.layer, p.channel) for p in self.steps), self._chain_floors(self.steps), strict=True))
        search = Search(self.path, engine.contents(self.prefix), self.reference, engine.contents(committed), bad)
        for node, prefix in walk(engine, self.prefix, self.tree):
            search.see(node, engine.contents(prefix))
        return tuple((part, floor, search.say(part, max(floor, near[part.layer, part.channel]))) for part, floor in bad)


def walk(engine, prefix, tree: DraftTree) -> Iterator[tuple[int, object]]:
    """Every node in flat order with the Prefix after it, by plain steps; a Prefix is let go after its last child."""
    standing = {-1: prefix}
    waiting = [len(children) for children in tree.children]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        _, standing[node] = engine.step(standing[parent], token)
        yield node, standing[node]
        if not waiting[node]:
            del standing[node]
        if parent >= 0:
            waiting[parent] -= 1
            if not waiting[parent]:
                del standing[parent]


def _reason(said: Sequence[tuple[Part, float, str]], late: Sequence[int]) -> str:
    """What is off first in each channel, in how many layers, and what it did to the steps that follow."""
    first: dict[str, str] = {}
    for part, _, says in said:
        # Keys and values are gathered by one index: one of them says it all.
        kind = "keys" if part.channel == "values" else part.channel.partition(".")[0]
        first.setdefault(kind, says if part.channel == POSITION else f"layer {part.layer}: {says}")
    layers = {part.layer for part, _, _ in said if part.channel != POSITION}
    words = list(first.values()) or ["what is stored is right"]
    words += [f"{len(layers)} layers off"] if len(layers) > 1 else []
    words.append(f"logits off from step {late[0] + 1} after the accept" if late else "logits of the next steps kept")
    return "; ".join(words)


def _json(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
