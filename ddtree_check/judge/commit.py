"""After the verdict on logits: what a commit stored, against a prefill of the same text, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from ..base.files import json_number
from ..base.words import counted
from .differences import Differences, measure, ulp
from .nodes import beyond, judge
from .rule import EXACT, Rule

STEPS = 3  # plain decode steps after each commit
LEAKS = "foreign tokens, as the wiring says"
POSITION = "position"  # the channel of the number of committed tokens; it belongs to no layer
NARROW = (torch.bfloat16, torch.float16)

Contents = tuple[int, list[dict[str, torch.Tensor]]]  # as `Engine.contents` gives them


def flat_contents(contents: Contents) -> dict[tuple[int, str], torch.Tensor]:
    """Return contents by layer and channel."""
    return {(layer, channel): x for layer, channels in enumerate(contents[1]) for channel, x in channels.items()}


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

    @property
    def kind(self) -> str:
        """The channel without the number of a further one: 'conv' for 'conv.1'."""
        return self.channel.partition(".")[0]


def compare_contents(reference: Contents, stored: Contents, dtype: torch.dtype) -> list[Part]:
    """Return a Part for the position, then one for each channel of each layer of the reference."""
    apart = float(abs(stored[0] - reference[0]))
    parts, theirs = [Part(-1, POSITION, apart, apart, 0.0, 0.0)], flat_contents(stored)
    for place, right in flat_contents(reference).items():
        mine, error, rms = theirs.get(place), np.inf, np.inf
        if mine is not None and mine.shape == right.shape and mine.dtype == right.dtype:
            difference = mine.double() - right.double()
            error, rms = float(difference.abs().max()) if right.numel() else 0.0, _rms(difference)
        spacing = float(ulp(right.abs().max(), dtype)) if right.numel() else 0.0
        parts.append(Part(*place, error if np.isfinite(error) else np.inf, rms, _rms(right), spacing))
    return parts


def _rms(x: torch.Tensor) -> float:
    return float(x.double().contiguous().square().mean().sqrt()) if x.numel() else 0.0  # one order of summation


def chain_floors(parts: Sequence[Part], steps: Sequence[Part], rule: Rule, dtype: str) -> list[float]:
    """Return the largest error of each part of a chain's commit that plain decoding's own (`steps`) explains.

    Steps run other kernels, so the largest of any layer counts, relative to the state's size and channel by channel.
    """
    share: dict[str, float] = {}
    for step in steps:
        if step.size:
            share[step.kind] = max(share.get(step.kind, 0.0), step.error / step.size)
    return [_floor(part, rule, dtype, share.get(part.kind, 0.0) * part.size) for part in parts]


def tree_floors(parts: Sequence[Part], controls: Sequence[Sequence[Part]], rule: Rule, dtype: str) -> list[float]:
    """Return the largest error of each part that `controls`, commits of the same path along chains, explain."""
    errors = [max((control[place].error for control in controls), default=0.0) for place in range(len(parts))]
    return [_floor(part, rule, dtype, error) for part, error in zip(parts, errors, strict=True)]


def _floor(part: Part, rule: Rule, dtype: str, control: float) -> float:
    floor = rule.factor * control + rule.ulps * part.ulp
    # In float32 a control can be exactly 0 by chance, where it ran the very kernels of the reference.
    return max(floor, rule.rounding[dtype] * part.size) if dtype in EXACT else floor


def off(parts: Sequence[Part], floors: Sequence[float]) -> list[tuple[Part, float]]:
    """Return the parts beyond their floors, each with its floor."""
    return [(part, floor) for part, floor in zip(parts, floors, strict=True) if not part.error <= floor]


# What was stored instead


@dataclass(eq=False)
class Search:
    """The search for what a commit stored in place of the state after `path`, in what plain decoding leaves at nodes.

    before, reference, stored: contents before the accept (None: not known), after it, and what was found. `see` is
    shown nodes, each once; `complete`: all of them. what: as which state it was found.
    """

    path: tuple[int, ...]
    before: Contents | None
    reference: Contents
    stored: Contents
    bad: Sequence[tuple[Part, float]]
    nearest: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)  # of a state: error, node
    rows: dict[tuple[int, str], dict[int, torch.Tensor]] = field(default_factory=dict)  # of windows and keys: by node
    complete: bool = True
    what: str = "committed state"

    def see(self, node: int, contents: Contents) -> None:
        """Take in what plain decoding leaves at a node."""
        for part, _ in self.bad:
            key = (part.layer, part.channel)
            theirs, mine = _tensor(contents, part), _tensor(self.stored, part)
            if theirs is None:  # the position, or of a trace that does not hold it
                continue
            if _by_rows(part):
                self.rows.setdefault(key, {})[node] = theirs[-1]
            elif mine is not None and mine.shape == theirs.shape:
                error = float((mine.double() - theirs.double()).abs().max())
                self.nearest[key] = min(self.nearest.get(key, (np.inf, -1)), (error, node))

    def say(self, part: Part, floor: float) -> str:
        """Say what was stored in the place of a part."""
        if part.channel == POSITION:
            return f"position {self.stored[0]}, expected {self.reference[0]}"
        name = _word(part.channel)
        mine, right, before = (_tensor(contents, part) for contents in (self.stored, self.reference, self.before))
        if mine is None:
            return f"no {name} is stored"
        if mine.shape != right.shape:
            if _by_rows(part) and mine.shape[1:] == right.shape[1:]:
                return f"{name}: {len(mine)} rows, expected {len(right)}"
            return f"{name} has shape {list(mine.shape)}, expected {list(right.shape)}"
        if mine.dtype != right.dtype:
            return f"{name} is {mine.dtype}, expected {right.dtype}"
        if not mine.isfinite().all():
            return f"{name} is not finite"
        if narrow := _rounded(mine, right, floor):
            return f"{name} is rounded to {narrow}"
        if before is not None and _near(mine, before, floor):
            return f"{name} unchanged by the accept"
        if _by_rows(part):
            return self._say_rows(part, floor, mine, right, before)
        if not mine.any():
            return "state is zero"
        error, node = self.nearest.get((part.layer, part.channel), (np.inf, -1))
        if error <= floor:
            return f"{self.what} is node {node}'s, expected node {self.path[-1]}'s"
        if not self.complete:
            return f"{self.what} is not node {self.path[-1]}'s"
        return f"{self.what} is no node's, expected node {self.path[-1]}'s"

    def _say_rows(self, part: Part, floor: float, stored, right, before) -> str:
        """Name rows by the node they belong to; -1 is the last committed token, -2 the one before."""
        name, rows = _word(part.channel), len(right)
        known = {-1 - back: row for back, row in enumerate(reversed(before))} if before is not None else {}
        known |= self.rows.get((part.layer, part.channel), {})
        labels = [*range(-rows, 0), *self.path][-rows:]
        got = [_label(*row, known, floor) for row in zip(stored, right, labels, strict=True)]
        first = next((place for place in range(rows) if labels[place] != got[place]), None)
        if first is None:
            return f"{name}: rows of the right tokens, wrong in their numbers: {part.error:.2g}, floor {floor:.2g}"
        values = any((other.layer, other.channel) == (part.layer, "values") for other, _ in self.bad)
        if "?" in got[first:] and part.channel == "keys" and not values:
            return f"{name}: rows of the right tokens at another position"
        shown = slice(max(first, rows - 8), None)
        return f"{name}: rows of {_owners(got[shown])}, expected {_owners(labels[shown])}"


def words(
    judged: Judge, before: Contents | None, found: Left, bad: Sequence[tuple[Part, float]],
    standing: Iterable[tuple[int, Contents]], **how,
) -> tuple[tuple[Part, float, str], ...]:  # fmt: skip
    """Say of each part that is off what was stored in its place. standing: each node with what plain decoding leaves
    there; before and how: as in Search."""
    search = Search(judged.path, before, judged.reference.contents, found.contents, bad, **how)
    for node, contents in standing:
        search.see(node, contents)
    return tuple((part, floor, search.say(part, judged.near(part, floor))) for part, floor in bad)


def _tensor(contents: Contents | None, part: Part) -> torch.Tensor | None:
    """Return what contents hold of a part; None for the position, or what is not there."""
    return None if contents is None or part.layer < 0 else contents[1][part.layer].get(part.channel)


def _by_rows(part: Part) -> bool:
    return part.kind != "recurrent"


def _word(channel: str) -> str:
    kind, _, number = channel.partition(".")
    name = {"recurrent": "state", "conv": "convolution window"}.get(kind, kind)
    return f"{name} {number}" if number else name


def _near(a: torch.Tensor, b: torch.Tensor, floor: float) -> bool:
    return a.shape == b.shape and bool((a.double() - b.double()).abs().max() <= floor)


def _rounded(stored: torch.Tensor, right: torch.Tensor, floor: float) -> str | None:
    """Return the narrower dtype that explains what was stored, or None."""
    for dtype in NARROW:
        if right.dtype != dtype and torch.equal(stored, stored.to(dtype).to(stored.dtype)) and stored.any():
            error = (stored.double() - right.double()).abs() - torch.finfo(dtype).eps * right.double().abs()
            if error.max() <= floor and not torch.equal(right, right.to(dtype).to(right.dtype)):
                return str(dtype).removeprefix("torch.")
    return None


def _label(row, right, label: int, known: Mapping[int, torch.Tensor], floor: float) -> int | str:
    """Return whose row it is: the expected one where it fits (equal tokens can have equal rows), else the nearest."""
    if _near(row, right, floor):
        return label
    if not row.any():
        return "zero"
    apart = {name: float((row.double() - theirs.double()).abs().max()) for name, theirs in known.items()}
    best = min(apart, key=apart.get, default=None)
    return best if best is not None and apart[best] <= floor else "?"


def _owners(labels: Sequence[int | str]) -> str:
    """Name the owners of rows: 'token -1 before the block, nodes 0 4, 1 unknown row'."""
    kinds = {"?": "unknown row", "zero": "zero row"}
    parts = []
    for kind, group in groupby(labels, lambda label: kinds.get(label) or ("token" if label < 0 else "node")):
        rows = list(group)
        names = f"{kind}{'s' * (len(rows) > 1)} {' '.join(map(str, rows))}"
        place = " before the block" if kind == "token" else ""
        parts.append(counted(len(rows), kind) if kind in kinds.values() else f"{names}{place}")
    return ", ".join(parts)


# One path, judged


@dataclass(frozen=True)
class Commit:
    """What one mode's commit of one path came to. `bad`: (part, floor, words) of what is off, by layer."""

    verdict: str  # pass, fail, reference_unusable, unsupported, not_run
    reason: str | None = None
    bad: tuple[tuple[Part, float, str], ...] = ()
    after: Differences | None = None  # of the plain steps that follow
    floor: np.ndarray | None = None
    verdicts: tuple[str, ...] = ()

    def to_json(self) -> dict:
        bad, steps = [], []
        for part, floor, says in self.bad:
            numbers = {"error": json_number(part.error), "floor": json_number(floor)}
            bad.append({"layer": part.layer, "channel": part.channel, **numbers, "says": says})
        if self.after is not None:
            for error, floor, verdict in zip(self.after.max_abs, self.floor, self.verdicts, strict=True):
                steps.append({"max_abs": json_number(error), "floor": json_number(floor), "verdict": verdict})
        return {"verdict": self.verdict, "reason": self.reason, "bad": bad, "steps": steps}


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
        modes = {mode: commit.to_json() for mode, commit in self.modes.items()}
        return vars(self) | {"path": list(self.path), "modes": modes, "expected": sorted(self.expected)}


@dataclass(frozen=True, eq=False)
class Left:
    """What stands after a path: its contents, and the logits [probe, vocabulary] after each token that was fed then."""

    contents: Contents
    rows: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Standard:
    """What commits of one path are judged by.

    reference   what a prefill of the same text leaves;  steps  what plain decoding leaves, None if that is not known
    chains      what commits along chains as wide as the tree leave: `linear` by its own pass, `chain` by its tree path
    refused     why one of them was not run, by name;  probe  tokens that were fed after each of them
    """

    reference: Left
    steps: Left | None
    chains: Mapping[str, Left]
    refused: Mapping[str, str] = field(default_factory=dict)
    probe: tuple[int, ...] = ()


class Judge:
    """Judges what commits of `path` left. dtype: as `nodes.judged_as`. kept: the dtype that the engine says it keeps
    states in. Runs nothing.

    across: the standard is another engine's. Then a right commit may be as far off as any of its controls, or by
    `Rule.across` of the state's rms, unless `own`, chains of the engine that is judged, say it closer.
    """

    def __init__(
        self, path: Sequence[int], standard: Standard, rule: Rule, dtype: str, *, kept: str | None = None,
        across: bool = False, own: Mapping[str, Left] | None = None,
    ):  # fmt: skip
        self.path, self.standard, self.rule, self.dtype, self.kept = tuple(path), standard, rule, dtype, kept
        self.reference, self.across = standard.reference, across
        self.steps, after = ([], None) if standard.steps is None else self._measure(standard.steps)
        self.problem = self._problem()
        chains = [self._measure(left) for left in standard.chains.values()]
        self.pooled, self.pooled_after = list(self.steps), [after]
        if across:
            self.pooled += [part for parts, _ in chains for part in parts]
            self.pooled_after += [after for _, after in chains]
            chains = [self._measure(left) for left in (own or {}).values()]
        self.pooled_after = [after.max_abs for after in self.pooled_after if after is not None]
        self.trusted = [
            (parts, after)
            for parts, after in chains
            if not off(parts, self.chain_floors(parts)) and not self._late(after, self._chain_floor(after))
        ]

    @property
    def blind(self) -> bool:
        """Nothing measured says how far off a right run is, and no bound of the dtype does."""
        return not self.pooled and not self.trusted and self.dtype not in EXACT

    def commit(
        self, left: Left, *, own: bool = False, expected: bool = False, search: Callable | None = None
    ) -> Commit:
        """Judge what a commit left. own: by the engine's own pass along the chain, which never enters its own floor.
        expected: its wiring leaks at this node, so nothing needs to be searched for. search(judge, left, bad): words
        for parts that are off."""
        if self.problem:
            return Commit("reference_unusable", self.problem)
        parts, after = self._measure(left)
        if own or not self.trusted:
            floors, floor = self.chain_floors(parts), self._chain_floor(after)
        else:
            floors = tree_floors(parts, [control for control, _ in self.trusted], self.rule, self.dtype)
            floor = self._tree_floor(after)
            if self.across and self.dtype in EXACT:
                floors = [max(pair) for pair in zip(floors, self.chain_floors(parts), strict=True)]
        bad, late = off(parts, floors), self._late(after, floor)
        verdicts = () if after is None else judge(after, floor)
        if not bad and not late:
            return Commit("pass", None, (), after, floor, verdicts)
        if self.blind:
            return Commit("reference_unusable", "nothing was recorded that tells noise from a wrong state")
        if search and not expected:
            words = search(self, left, bad)
        else:
            why = f": {LEAKS}" if expected else ""
            words = tuple((part, floor, _word(part.channel) + why) for part, floor in bad)
        if not expected and (explained := self._explained(words, after)):
            return explained
        return Commit("fail", _reason(words, late, after is not None), words, after, floor, verdicts)

    def near(self, part: Part, floor: float) -> float:
        """Return the floor within which a part shows whose state it is: its own can be 0, and steps differ by more from
        a prefill."""
        known = {(step.layer, step.channel): step for step in self.steps}
        return max(floor, *self.chain_floors([known.get((part.layer, part.channel), part)]))

    def _explained(self, words, after: Differences | None) -> Commit | None:
        """Pass states no worse than the dtype that the engine says it keeps them in; None if there is more to it."""
        kept = self.kept
        rounded = all(says.endswith(f"is rounded to {kept}") for *_, says in words)
        if kept not in self.rule.rounding or not words or not rounded:
            return None
        floor = None if after is None else self.rule.rounding[kept] * after.std
        if self._late(after, floor):
            return None
        reason = f"explained: {words[0][2]}, the dtype that the engine says it keeps states in"
        return Commit("pass", reason, words, after, floor, () if after is None else judge(after, floor))

    def chain_floors(self, parts: Sequence[Part]) -> list[float]:
        """Return the floor of each part of a chain's commit."""
        floors = chain_floors(parts, self.pooled, self.rule, self.dtype)
        share = self.rule.across[self.dtype] if self.across else 0.0
        return [max(floor, share * part.size) for part, floor in zip(parts, floors, strict=True)]

    def _chain_floor(self, after: Differences | None) -> np.ndarray | None:
        if after is None:
            return None
        if not self.across:
            return self.rule.chain_floor(self.pooled_after, after, self.dtype)
        pooled = [np.full(len(after), np.max(errors)) for errors in self.pooled_after]
        return np.maximum(self.rule.floor(pooled, after.ulp), self.rule.across[self.dtype] * after.std)

    def _tree_floor(self, after: Differences | None) -> np.ndarray | None:
        controls = [control.max_abs for _, control in self.trusted if control is not None]
        if after is None or not controls:
            return self._chain_floor(after)
        floor = self.rule.floor(controls, after.ulp)
        if self.dtype not in EXACT:
            return floor
        return np.maximum(
            floor, self._chain_floor(after) if self.across else self.rule.rounding[self.dtype] * after.std
        )

    def _late(self, after: Differences | None, floor: np.ndarray | None) -> Sequence[int]:
        return () if after is None else beyond(judge(after, floor))

    def _measure(self, left: Left) -> tuple[list[Part], Differences | None]:
        parts = compare_contents(self.reference.contents, left.contents, getattr(torch, self.dtype))
        if left.rows is None or self.reference.rows is None:
            return parts, None
        return parts, measure(self.reference.rows, left.rows)

    def _problem(self) -> str | None:
        """Return why plain decoding and a prefill of the same text cannot serve as reference, or None."""
        sized = [part for part in self.steps if part.size]
        if self.steps and self.steps[0].error:
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


def _reason(words: Sequence[tuple[Part, float, str]], late: Sequence[int], stepped: bool = True) -> str:
    """Say what is off first in each channel, in how many layers, and what it did to the steps that follow."""
    first: dict[str, str] = {}
    for part, _, says in words:
        # Keys and values are gathered by one index: one of them says it all.
        kind = "keys" if part.channel == "values" else part.kind
        first.setdefault(kind, says if part.channel == POSITION else f"layer {part.layer}: {says}")
    layers = {part.layer for part, *_ in words if part.channel != POSITION}
    texts = list(first.values()) or ["what is stored is right"]
    texts += [f"{len(layers)} layers off"] if len(layers) > 1 else []
    if stepped:
        texts.append(
            f"logits off from step {late[0] + 1} after the accept" if late else "logits of the next steps kept"
        )
    return "; ".join(texts)
