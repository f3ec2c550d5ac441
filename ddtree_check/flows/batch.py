"""Several requests in one pass: each must come out as it does alone, whoever stands beside it, and touch nobody else.

For every group of requests, with other prompts, lengths and trees, and for every way to put them together:

    prefill   prompts padded on the left and on the right
    verify    the trees of all requests in one pass, and commit  what is stored after an accept
    step      plain decode steps in one batch
    reorder   rows permuted and forked
    canary    a request of the pool that is not in a batch, or only waits, keeps every bit
    again     A, then B, then A: the same bits, so that no state is left outside of a Prefix
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch

from ..base.conclusion import DEFECT, INCONCLUSIVE, Conclusion, ExitCode
from ..base.errors import Broken, Unsupported, UsageError
from ..base.files import json_number
from ..engines.checked import complete
from ..judge.commit import (
    POSITION,
    STEPS,
    Contents,
    Part,
    chain_floors,
    compare_contents,
    flat_contents,
    off,
    tree_floors,
)
from ..judge.differences import Differences, measure
from ..judge.known import KnownFailure, known_for
from ..judge.nodes import beyond, judge, judged_as
from ..judge.rule import EXACT
from ..model.wiring import wirings
from ..tree.accept import accept_nodes
from ..tree.draft_tree import DraftTree
from ..tree.paths import leaf_paths, padded_chain
from .drafting import draft_cases
from .settings import Item, Settings

CHECKS = ("prefill", "verify", "commit", "step", "reorder", "canary", "again")
COUNTS = ("check", "mode", "size", "compared", "off", "largest", "floor")
PADDINGS = ("left", "right")
WIDER = 3  # columns and rows beyond what a request alone needs, for padding in a batch of one
TAIL = 16  # tokens at the end of a prompt whose plain decoding says what a prefill's states are worth
OUTSIDER = "(waiting)"


@dataclass(frozen=True, eq=False)
class Request:
    """A member of the pool, with a tree for each mode."""

    id: str
    tokens: tuple[int, ...]
    prefix: object
    trees: dict[str, DraftTree]

    def to_json(self) -> dict:
        rows = {mode: len(tree) for mode, tree in self.trees.items()}
        return {"id": self.id, "prompt_tokens": len(self.tokens), "rows": rows}


@dataclass(frozen=True)
class Composition:
    """Who stands in a batch, by place in the group; idle: requests that only fill it; rows: of every tree."""

    name: str
    places: tuple[int, ...]
    padding: str = "left"
    idle: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is off. `mode` is None where it does not depend on one. error and floor are null if they are bits
    that differ, or a number that is not finite."""

    check: str
    mode: str | None
    size: int
    composition: str
    request: str
    says: str
    node: int | None = None
    layer: int | None = None
    channel: str | None = None
    error: float | None = None
    floor: float | None = None
    verdict: str = "fail"

    def __str__(self) -> str:
        mode = f" of {self.mode}" if self.mode else ""
        return f"{self.check}{mode}, batch of {self.size}, {self.composition}, request {self.request}: {self.says}"


def compositions(size: int) -> list[Composition]:
    """Return every way in which a group is put together. A group is ordered by length: 0 is the shortest prompt."""
    everyone = tuple(range(size))
    if size == 1:
        return [
            Composition("alone", (0,)),
            Composition("rows to spare", (0,), rows=WIDER),
            Composition("an idle request", (0,), idle=1),
        ]
    ways = [
        Composition("in order", everyone),
        Composition("in reverse", everyone[::-1]),
        Composition("padded on the right", everyone, "right"),
        Composition("an idle request", everyone, idle=1),
    ]
    if size > 2:  # the others wait in the pool, and must keep every bit
        ways += [Composition("with the shortest", (0, place)) for place in everyone[1:]]
        ways += [Composition("with the longest", (size - 1, place)) for place in everyone[1:-1]]
    return ways


def batch_runs(
    engine, items: Sequence[Item], settings: Settings, sizes: Sequence[int], *, progress: Callable | None = None
) -> dict:
    """Run every item in batches of every size.

    Returns {"sizes", "groups", "checks", "findings", "coverage", "not_run", "verdict", "exit_code"}. The modes are
    those that `settings` requires. Raises UsageError for a size that there are not enough prompts for.
    """
    check_sizes(sizes, len(items))
    engine = complete(engine, settings.vocab_size)
    batches = engine.batches()
    if isinstance(batches, str):
        return conclude([], [], sizes, {}, missing=batches)
    pool = [_request(engine, item, settings, place) for place, item in enumerate(items)]
    try:
        engine.contents(pool[0].prefix)
    except Unsupported as reason:
        return conclude([], [], sizes, {}, missing=str(reason))
    tally, findings = {}, []
    groups = [(size, group) for size in sizes for group in _groups(pool, size)]
    for place, (size, group) in enumerate(groups):
        if progress:
            progress(place, len(groups), f"batch of {size}: {', '.join(request.id for request in group)}")
        others = [request for request in pool if request not in group]
        run = _Group(
            engine, batches, size, group, others[0] if others else _outsider(engine, group[0]), settings, tally
        )
        run.everything()
        findings += run.findings
    return conclude(groups, excused(findings, known_for(engine.describe())), sizes, tally)


def check_sizes(sizes: Sequence[int], prompts: int) -> None:
    """Raise UsageError for a size that there are not enough prompts for."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= prompts:
            raise UsageError(f"batch: got {size!r}, expected numbers from 1 to {prompts}, the number of prompts")


def _request(engine, item: Item, settings: Settings, place: int) -> Request:
    """Return a member of the pool, with a tree that differs from its neighbours' in size as well."""
    prefix = engine.prefill(item.tokens)
    cases = draft_cases(engine, prefix, item, settings)
    tree = cases[place % len(cases)].tree
    if len(cases) == 1 and place % 2:
        rows = max(2, 2 * len(tree) // 3)
        tree = DraftTree(tree.tokens[:rows], tree.parents[:rows])
    longest = max(leaf_paths(tree), key=lambda path: len(path.nodes)).nodes
    chain = padded_chain(tree, longest)
    trees = {mode: chain if mode == "linear" else tree for mode in settings.require}
    return Request(item.id, tuple(item.tokens), prefix, trees)


def _outsider(engine, request: Request) -> Request:
    """Return a request for the pool where every prompt is in the batch."""
    return Request(OUTSIDER, request.tokens[::-1], engine.prefill(request.tokens[::-1]), {})


def _groups(pool: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Yield groups of `size` requests, the shortest prompt first; a short last one takes requests of the first."""
    for first in range(0, len(pool), size):
        group = [pool[place % len(pool)] for place in range(first, first + size)]
        yield sorted(group, key=lambda request: len(request.tokens))


# One group


@dataclass(frozen=True, eq=False)
class _Stored:
    """What a pass stored, `contents`, against what it should have, `right`, part by part, each with its floor."""

    right: Contents
    contents: Contents
    parts: list[Part]
    floors: list[float]

    @property
    def bad(self) -> list[tuple[Part, float]]:
        return off(self.parts, self.floors)

    @property
    def first(self) -> Part | None:
        """Return the part by which the fault came in, or None if nothing is off."""
        order = {POSITION: -1, "conv": 0, "recurrent": 1}  # within a layer, a window is written before a state
        return min((part for part, _ in self.bad), key=lambda part: (part.layer, order.get(part.kind, 2)), default=None)

    def __str__(self) -> str:
        """Name the first part that is off, and which channels of which layers are."""
        first, layers = self.first, {}
        if first is None:
            return "what is stored is right, so it came in behind the last layer that stores"
        if first.channel == POSITION:
            return f"position {self.contents[0]}, expected {self.right[0]}"
        for part, _ in self.bad:
            layers.setdefault(part.kind, []).append(part.layer)
        if "keys" in layers:
            layers.pop("values", None)
        words = [f"{channel} of layer {_some(numbers)} off" for channel, numbers in layers.items()]
        return f"first {first.channel} of layer {first.layer}{self._first_row()}; {', '.join(words)}"

    def _first_row(self) -> str:
        """Name the first token whose keys are off, where there are keys."""
        for part, floor in self.bad:
            if part.channel == "keys":
                a, b = (contents[1][part.layer].get("keys") for contents in (self.right, self.contents))
                if b is not None and a.shape == b.shape:
                    wrong = ~((a.double() - b.double()).abs().amax(-1) <= floor)
                    if wrong.any():
                        return f", from token {int(wrong.nonzero()[0])} on by the keys of layer {part.layer}"
        return ""

    def figures(self, logits: Differences | None = None, floor: np.ndarray | None = None) -> dict:
        """Return where it came in and how far off that is; of the logits where everything that is stored is right."""
        if (part := self.first) is None:
            return {"error": json_number(logits.max_abs[0]), "floor": json_number(floor[0])}
        error, most = json_number(part.error), json_number(dict(self.bad)[part])
        return {"layer": part.layer, "channel": part.channel, "error": error, "floor": most}


class _Group:
    """Requests that stand in batches together, and one of the pool that waits. tally: counts by check, mode and size:
    compared, off, largest error, largest floor."""

    def __init__(self, engine, batches, size: int, group: list[Request], waiting: Request, settings: Settings, tally):
        self.engine, self.batches, self.size, self.group, self.waiting = engine, batches, size, group, waiting
        self.settings, self.rule, self.tally = settings, settings.rule, tally
        self.dtype = judged_as(engine.describe())
        self.wiring = wirings(settings.control)
        self.compare = partial(compare_contents, dtype=getattr(torch, self.dtype))
        self.findings: list[Finding] = []
        self.controls: dict[tuple, object] = {}
        self.alone: dict[tuple[str, str], object] = {}  # what a request verifies to by itself, by its id and mode
        self.bits = {request.id: _bits(engine.contents(request.prefix)) for request in (*group, waiting)}

    def everything(self) -> None:
        """Run all checks of the group."""
        first = [self._fingerprint(request) for request in self.group]
        for padding in PADDINGS:
            self._guard("prefill", None, f"padded on the {padding}", self.prefill, padding)
        for mode in self.settings.require:
            for request in self.group:
                alone = self.engine.verify(request.prefix, request.trees[mode], self.wiring[mode])
                self.alone[request.id, mode] = alone
            for made in compositions(self.size):
                self._guard("verify", mode, made.name, self.verify, mode, made)
        for made in compositions(self.size):
            if not made.idle and made.rows is None:
                self._guard("step", None, made.name, self.step, made)
        if self.size > 1:
            self._guard("reorder", None, "permuted", self.reorder)
        self._guard("again", None, "A-B-A", self.again, first)

    def _guard(self, check: str, mode: str | None, composition: str, run: Callable, *given) -> None:
        """Make a pass; one that the engine refuses, or breaks down in, is a finding. Then look at every slot."""
        try:
            run(*given)
        except Unsupported as error:
            self._add(check, mode, composition, "all", f"refused: {error}", verdict="unsupported")
        except (Broken, RuntimeError, ValueError, IndexError) as error:
            error = error.__cause__ or error
            text = " ".join(str(error).split())
            self._add(check, mode, composition, "all", f"the pass broke down: {type(error).__name__}: {text:.120}")
        self.canary(check, mode, composition)

    def _add(self, check: str, mode: str | None, composition: str, request: str, says: str, **place) -> None:
        self.findings.append(Finding(check, mode, self.size, composition, request, says, **place))

    def _count(self, check: str, mode: str | None, errors, floors, bad: int) -> None:
        largest = [float(np.max(np.where(np.isfinite(x), x, np.inf), initial=0.0)) for x in (errors, floors)]
        n, before, *most = self.tally.get((check, mode, self.size), (0, 0, 0.0, 0.0))
        self.tally[check, mode, self.size] = n + int(np.size(errors)), before + bad, *map(max, most, largest)

    def _stored(self, right: Contents, contents: Contents, floors: Callable, controls: Sequence) -> _Stored:
        parts = self.compare(right, contents)
        return _Stored(right, contents, parts, floors(parts, controls, self.rule, self.dtype))

    # prefill

    def prefill(self, padding: str) -> None:
        """Compare prompts that are prefilled together with each alone."""
        width = max(len(request.tokens) for request in self.group) + (WIDER if self.size == 1 else 0)
        prefixes = self.batches.prefill([request.tokens for request in self.group], padding=padding, width=width)
        for request, prefix in zip(self.group, prefixes, strict=True):
            steps, after = self._decoded(request)
            logits = measure(request.prefix.logits[None], prefix.logits[None])
            floor = self.rule.chain_floor([after.max_abs], logits, self.dtype)
            right, contents = self.engine.contents(request.prefix), self.engine.contents(prefix)
            stored = self._stored(right, contents, chain_floors, steps)
            wrong = bool(beyond(judge(logits, floor)))
            self._count("prefill", None, logits.max_abs, floor, int(wrong or bool(stored.bad)))
            if stored.bad or wrong:
                says = f"{stored}; its logits are {'off' if wrong else 'kept'}"
                place = stored.figures(logits, floor)
                self._add("prefill", None, f"padded on the {padding}", request.id, says, **place)

    def _decoded(self, request: Request) -> tuple[list[Part], Differences]:
        """Return what plain decoding of the prompt's end differs by from its prefill: states and logits."""
        key = ("decoded", request.id)
        if key not in self.controls:
            cut = max(1, len(request.tokens) - TAIL)
            prefix = self.engine.prefill(request.tokens[:cut])
            for token in request.tokens[cut:]:
                _, prefix = self.engine.step(prefix, token)
            parts = self.compare(self.engine.contents(request.prefix), self.engine.contents(prefix))
            self.controls[key] = parts, measure(request.prefix.logits[None], prefix.logits[None])
        return self.controls[key]

    # verify and commit

    def verify(self, mode: str, made: Composition) -> None:
        """Compare trees that are verified together, and what their commits store, with each alone."""
        requests = [self.group[place] for place in made.places]
        trees = [request.trees[mode] for request in requests]
        rows = max(map(len, trees)) + (made.rows or 0)
        passes = self.batches.verify(
            [request.prefix for request in requests], trees, self.wiring[mode],
            padding=made.padding, rows=rows, idle=made.idle,
        )  # fmt: skip
        for request, tree, verified in zip(requests, trees, passes, strict=True):
            controls = self._verified_controls(request, mode, len(requests) + made.idle, rows)
            difference = measure(self.alone[request.id, mode].logits, verified.logits)
            floor, runs = self._band([control for control, _ in controls], difference), [run for _, run in controls]
            bad = beyond(judge(difference, floor))
            self._count("verify", mode, difference.max_abs, floor, len(bad))
            if bad:
                self._off(request, mode, made.name, verified, bad[0], runs, difference, floor)
            for node in accept_nodes(tree, ("full", "branch")):
                stored = self._committed(request, mode, verified, node, runs)
                self._count("commit", mode, [part.error for part in stored.parts], stored.floors, len(stored.bad))
                if stored.bad:
                    says = f"after node {node}: {stored}"
                    self._add("commit", mode, made.name, request.id, says, node=node, **stored.figures())

    def _committed(self, request: Request, mode: str, verified, node: int, controls: Sequence) -> _Stored:
        """Compare what a commit after a pass stores with what it stores alone. controls: passes that are noise."""
        right, contents, *others = (
            self.engine.contents(self.engine.commit(run, node))
            for run in (self.alone[request.id, mode], verified, *controls)
        )
        return self._stored(right, contents, tree_floors, [self.compare(right, other) for other in others])

    def _off(self, request, mode, composition, verified, node, controls, difference: Differences, floor) -> None:
        """Note a pass that is off from `node` on; what is stored after that node says by which layer it entered."""
        stored = self._committed(request, mode, verified, node, controls)
        part, depth = stored.first, request.trees[mode].depth[node]
        self._add(
            "verify", mode, composition, request.id, f"first at node {node} (depth {depth}); {stored}",
            layer=part and part.layer, channel=part and part.channel, node=node,
            error=json_number(difference.max_abs[node]), floor=json_number(floor[node]),
        )  # fmt: skip

    def _verified_controls(self, request: Request, mode: str, width: int, rows: int) -> list[tuple]:
        """Return the passes of the request beside copies of itself and beside idle requests, in a batch as wide and of
        as many rows, with their differences: noise, if each is itself within what plain text costs at that width."""
        key = (request.id, mode, width, rows)
        if key in self.controls:
            return self.controls[key]
        tree, wiring, alone = request.trees[mode], self.wiring[mode], self.alone[request.id, mode]
        runs = {
            "copies of itself": self.batches.verify([request.prefix] * width, [tree] * width, wiring, rows=rows)[:2],
            "idle requests alone": self.batches.verify([request.prefix], [tree], wiring, rows=rows, idle=width - 1),
        }
        controls, plain = [], self._plain(request, width)
        for name, passes in runs.items():
            for verified in passes:
                difference = measure(alone.logits, verified.logits)
                floor = self.rule.chain_floor([plain.max_abs], difference, self.dtype)
                bad = beyond(judge(difference, floor))
                if bad:
                    self._off(request, mode, f"{width} wide, beside {name}", verified, bad[0], [], difference, floor)
                    break
                controls.append((difference, verified))
        self.controls[key] = controls
        return controls

    def _plain(self, request: Request, width: int) -> Differences:
        """Return what the width alone costs, without a draft: the prompt in a batch of copies against it by itself."""
        key = ("plain", request.id, width)
        if key not in self.controls:
            text, keep = list(request.tokens), min(len(request.tokens), TAIL)
            try:
                one, many = self.engine.forward([text], keep)[0], self.engine.forward([text] * width, keep)[-1]
            except Unsupported:  # no such pass: then only what the rule grants to rounding is granted
                one = many = request.prefix.logits[None]
            self.controls[key] = measure(one, many)
        return self.controls[key]

    def _band(self, controls: Sequence[Differences], difference: Differences) -> np.ndarray:
        """Return the largest error [n] that the controls explain; of any node, since a batch may run a row in another
        lane."""
        pooled = [np.full(len(difference), np.max(control.max_abs)) for control in controls]
        floor = self.rule.floor(pooled, difference.ulp)
        return np.maximum(floor, self.rule.rounding[self.dtype] * difference.std) if self.dtype in EXACT else floor

    # step

    def step(self, made: Composition) -> None:
        """Compare plain decode steps of several requests with each alone; copies of one request are the control."""
        requests = [self.group[place] for place in made.places]
        width, broken = len(requests), set()
        mine = right = copies = [request.prefix for request in requests]
        for number in range(1, STEPS + 1):
            tokens = [int(prefix.logits.argmax()) for prefix in right]
            together = self.batches.step(mine, tokens, padding=made.padding)
            alone = [self.engine.step(prefix, token) for prefix, token in zip(right, tokens, strict=True)]
            copied = [
                self.batches.step([prefix] * width, [token] * width)[-1]
                for prefix, token in zip(copies, tokens, strict=True)
            ]
            mine, right, copies = ([prefix for _, prefix in steps] for steps in (together, alone, copied))
            for place, request in enumerate(requests):
                logits, *others = (steps[place][0][None] for steps in (alone, together, copied))
                difference, control = (measure(logits, other) for other in others)
                plain = self._plain(request, width)
                usable = bool(control.max_abs[0] <= self.rule.chain_floor([plain.max_abs], control, self.dtype)[0])
                floor = self._band([plain, *([control] if usable else [])], difference)
                before, contents = self.engine.contents(right[place]), self.engine.contents(mine[place])
                steps = [self.compare(before, self.engine.contents(copies[place]))] if usable else []
                stored = self._stored(before, contents, tree_floors, steps)
                wrong = bool(beyond(judge(difference, floor))) or bool(stored.bad)
                self._count("step", None, difference.max_abs, floor, int(wrong))
                if wrong and request.id not in broken:
                    broken.add(request.id)
                    figures = stored.figures(difference, floor)
                    self._add("step", None, made.name, request.id, f"step {number}: {stored}", **figures)

    # reorder

    def reorder(self) -> None:
        """Check that rows which move or fork keep every bit: that is no arithmetic. The identity is the control."""
        prefixes = [request.prefix for request in self.group]
        contents = [self.engine.contents(prefix) for prefix in prefixes]
        everyone = list(range(self.size))
        orders = {"kept": everyone, "permuted": everyone[::-1], "forked": [everyone[-1], *everyone[:-1], everyone[-1]]}
        for name, order in orders.items():
            for place, (source, prefix) in enumerate(zip(order, self.batches.reorder(prefixes, order), strict=True)):
                moved = self.engine.contents(prefix)
                parts = self.compare(contents[source], moved)
                stored = _Stored(contents[source], moved, parts, [0.0] * len(parts))
                self._count("reorder", None, [part.error for part in parts], [0.0], len(stored.bad))
                if stored.bad:
                    owner = self._owner(stored.first, moved, contents)
                    says = f"row {place}: {stored}" + (f"; it is request {owner}'s" if owner else "")
                    self._add("reorder", None, name, self.group[source].id, says, **stored.figures())

    def _owner(self, part: Part, moved: Contents, contents: Sequence[Contents]) -> str | None:
        """Return the id of the request that a part belongs to, or None."""
        if part.layer >= 0 and (stored := moved[1][part.layer].get(part.channel)) is not None:
            for request, theirs in zip(self.group, contents, strict=True):
                other = theirs[1][part.layer].get(part.channel)
                if other is not None and torch.equal(stored, other):
                    return request.id
        return None

    # canary

    def canary(self, check: str, mode: str | None, composition: str) -> None:
        """Check that no pass touched a Prefix of the pool: neither a member's nor, above all, a bystander's."""
        for request in (*self.group, self.waiting):
            now = _bits(self.engine.contents(request.prefix))
            changed = [place for place, bits in now.items() if self.bits[request.id].get(place) != bits]
            self._count("canary", None, [0.0] * len(now), [0.0], len(changed))
            if not changed:
                continue
            self.bits[request.id] = now  # said once
            layer, channel = changed[0]
            who = "which is not in the batch" if request is self.waiting else "which the pass only reads"
            layers = _some([layer for layer, _ in changed])
            says = f"slot of request {request.id}, {who}: {channel} of layer {layers} changed"
            self._add("canary", mode, f"{check}, {composition}", request.id, says, layer=layer, channel=channel)

    # again

    def _fingerprint(self, request: Request) -> dict[tuple[str, str | None], tuple]:
        """Run a request alone: the logits and the bits stored of its prefill, of a step and of each mode's pass."""
        prefix = self.engine.prefill(request.tokens)
        logits, after = self.engine.step(request.prefix, int(request.prefix.logits.argmax()))
        prints = {
            ("prefill", None): (prefix.logits, _bits(self.engine.contents(prefix))),
            ("step", None): (logits, _bits(self.engine.contents(after))),
        }
        for mode, tree in request.trees.items():
            verified = self.engine.verify(request.prefix, tree, self.wiring[mode])
            prints[f"verify of {mode}", mode] = verified.logits, {}
        return prints

    def again(self, first: Sequence[dict]) -> None:
        """Check that each request alone gives the bits that it gave before the others ran."""
        for request, before in zip(self.group, first, strict=True):
            changed = []
            for key, (logits, bits) in self._fingerprint(request).items():
                old, stored = before[key]
                rows = (old != logits).any(-1).flatten().nonzero()
                place = next((place for place in stored if stored[place] != bits.get(place)), None)
                if len(rows) or place:
                    changed.append((*key, int(rows[0]) if key[1] else None, *(place or (None, None))))
            self._count("again", None, [0.0] * len(before), [0.0], len(changed))
            for name, mode, node, layer, channel in changed:
                at = f", first node {node}" if node is not None else ""
                at += f", first {channel} of layer {layer}" if layer is not None else ""
                says = f"its {name} alone is not bit for bit what it was before the others ran{at}: "
                says += "state is kept outside of its Prefix"
                self._add("again", mode, "A-B-A", request.id, says, node=node, layer=layer, channel=channel)


def _some(layers: Sequence[int]) -> str:
    return " ".join(map(str, sorted(set(layers))))


def _bits(contents: Contents) -> dict[tuple[int, str], bytes]:
    """Return a digest of everything that a Prefix holds, by layer and channel."""
    bits = {(-1, POSITION): str(contents[0]).encode()}
    for place, x in flat_contents(contents).items():
        raw = x.detach().cpu().contiguous().view(torch.uint8).numpy()
        bits[place] = hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
    return bits


# All groups


def excused(findings: Sequence[Finding], known: Sequence[KnownFailure]) -> list[Finding]:
    """Return the findings, those that a known failure of a library explains named: its check is 'padding' or
    'batched'."""
    explained = []
    for finding in findings:
        padded = finding.check == "prefill" and "left" in finding.composition
        check = "padding" if padded else "batched" if finding.check in ("prefill", "step") else None
        entry = next((entry for entry in known if entry.check == check), None)
        if entry is not None and finding.verdict == "fail":
            finding = replace(finding, verdict="known_failure", says=f"{finding.says} ({entry.id}: {entry.cause})")
        explained.append(finding)
    return explained


def conclude(groups, findings: Sequence[Finding], sizes, tally, missing: str | None = None) -> dict:
    """Return the section of the record and its verdict: 0 pass, 1 a defect, 2 inconclusive."""
    conclusion = Conclusion()
    if missing is not None:
        conclusion.add(INCONCLUSIVE, f"batch: not_run: {missing}")
    for check in CHECKS:
        failed = [finding for finding in findings if finding.verdict == "fail" and finding.check == check]
        if failed:
            more = f" ({len(failed)} such findings)" if len(failed) > 1 else ""
            conclusion.add(DEFECT, f"batch: fail: {failed[0]}{more}")
    for verdict in ("unsupported", "known_failure"):
        first = next((finding for finding in findings if finding.verdict == verdict), None)
        if first is not None:
            conclusion.add(ExitCode.of(verdict), f"batch: {verdict}: {first}")
    lengths = [[len(request.tokens) for request in group] for _, group in groups]
    order = sorted(tally, key=lambda key: (key[2], CHECKS.index(key[0]), key[1] or ""))
    section = {
        "sizes": list(sizes),
        "groups": [{"size": size, "requests": [request.to_json() for request in group]} for size, group in groups],
        "checks": [
            dict(zip(COUNTS, (*key, *tally[key][:2], *map(json_number, tally[key][2:])), strict=True)) for key in order
        ],
        "findings": [asdict(finding) for finding in findings],
        "coverage": {
            "groups": len(groups),
            "unequal_lengths": sum(len(set(group)) > 1 for group in lengths),
            "shortest": min(map(min, lengths), default=0),
            "longest": max(map(max, lengths), default=0),
        },
        "not_run": missing,
    }
    return conclusion.into(section)
