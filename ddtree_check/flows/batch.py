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
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..base.conclusion import DEFECT, INCONCLUSIVE, Conclusion, ExitCode
from ..base.errors import Broken, Unsupported, UsageError
from ..base.files import json_number
from ..engines.checked import complete
from ..judge.commit import STEPS, Contents, Part, chain_floors, compare_contents, off, tree_floors
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


@dataclass(frozen=True)
class Composition:
    """Who stands in a batch, in order, by place in the group; idle: requests that only fill it; rows: of every tree."""

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

    def to_json(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        mode = f" of {self.mode}" if self.mode else ""
        return f"{self.check}{mode}, batch of {self.size}, {self.composition}, request {self.request}: {self.says}"


def compositions(size: int) -> list[Composition]:
    """Every way in which a group is put together. The order of a group is by length: 0 is the shortest prompt."""
    everyone = tuple(range(size))
    if size == 1:
        return [
            Composition("alone", (0,)),
            Composition("rows to spare", (0,), rows=WIDER),
            Composition("an idle request", (0,), idle=1),
        ]
    found = [
        Composition("in order", everyone),
        Composition("in reverse", everyone[::-1]),
        Composition("padded on the right", everyone, "right"),
        Composition("an idle request", everyone, idle=1),
    ]
    if size > 2:  # the others wait in the pool, and must keep every bit
        found += [Composition("with the shortest", (0, place)) for place in everyone[1:]]
        found += [Composition("with the longest", (size - 1, place)) for place in everyone[1:-1]]
    return found


def batch_runs(
    engine,
    items: Sequence[Item],
    settings: Settings,
    sizes: Sequence[int],
    *,
    progress: Callable | None = None,
) -> dict:
    """Runs every item in batches of every size. Returns {"settings", "groups", "checks", "findings", "coverage",
    "verdict", "exit_code"}.

    The modes are those that `settings` requires. Raises UsageError for a size that there are not enough prompts for.
    """
    check_sizes(sizes, len(items))
    engine = complete(engine, settings.vocab_size)
    batches = engine.batches()
    if isinstance(batches, str):
        return conclude([], [], settings, sizes, {}, missing=batches)
    pool = [_request(engine, item, settings, place) for place, item in enumerate(items)]
    try:
        engine.contents(pool[0].prefix)
    except Unsupported as reason:
        return conclude([], [], settings, sizes, {}, missing=str(reason))
    groups, tally, findings = [], {}, []
    parts = [(size, group) for size in sizes for group in _groups(pool, size)]
    for place, (size, group) in enumerate(parts):
        if progress:
            progress(place, len(parts), f"batch of {size}: {', '.join(request.id for request in group)}")
        others = [request for request in pool if request not in group]
        run = _Group(engine, batches, size, group, others[0] if others else _outsider(engine, group[0]), settings)
        run.everything()
        findings += run.findings
        for key, counts in run.tally.items():
            tally[key] = tuple(map(_add, tally.get(key, (0, 0, 0.0, 0.0)), counts))
        groups.append(
            {
                "size": size,
                "requests": [
                    {
                        "id": request.id,
                        "prompt_tokens": len(request.tokens),
                        "rows": {mode: len(tree) for mode, tree in request.trees.items()},
                    }
                    for request in group
                ],
            }
        )
    return conclude(groups, excused(findings, known_for(engine.describe())), settings, sizes, tally)


def check_sizes(sizes: Sequence[int], prompts: int) -> None:
    """Raises UsageError for a size that there are not enough prompts for."""
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= prompts:
            raise UsageError(f"batch: got {size!r}, expected numbers from 1 to {prompts}, the number of prompts")


def _add(a, b):
    return max(a, b) if isinstance(a, float) else a + b


def _request(engine, item: Item, settings: Settings, place: int) -> Request:
    """A member of the pool, with a tree that differs from its neighbours' in size as well."""
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
    """A request for the pool where every prompt is in the batch."""
    return Request(OUTSIDER, request.tokens[::-1], engine.prefill(request.tokens[::-1]), {})


def _groups(pool: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Groups of so many requests, the shortest prompt first; the last takes requests of the first if it is short."""
    for first in range(0, len(pool), size):
        group = [pool[place % len(pool)] for place in range(first, first + size)]
        yield sorted(group, key=lambda request: len(request.tokens))


# One group


class _Group:
    def __init__(self, engine, batches, size: int, group: list[Request], waiting: Request, settings: Settings):
        self.engine, self.batches, self.size, self.group, self.waiting = engine, batches, size, group, waiting
        self.settings, self.rule = settings, settings.rule
        self.dtype = judged_as(engine.describe())
        self.wide, self.wiring = getattr(torch, self.dtype), wirings(settings.control)
        self.findings: list[Finding] = []
        self.tally: dict[tuple[str, str | None, int], tuple] = {}  # compared, off, largest error, largest floor
        self.controls: dict[tuple, tuple] = {}
        self.alone: dict[tuple[str, str], object] = {}  # what a request verifies to by itself, by its id and mode
        self.bits = {request.id: _bits(engine.contents(request.prefix)) for request in (*group, waiting)}

    def everything(self) -> None:
        first = self._fingerprints()
        for padding in PADDINGS:
            self._guard("prefill", None, f"padded on the {padding}", lambda padding=padding: self.prefill(padding))
        for mode in self.settings.require:
            for request in self.group:
                self.alone[request.id, mode] = self.engine.verify(
                    request.prefix, request.trees[mode], self.wiring[mode]
                )
            for made in compositions(self.size):
                self._guard("verify", mode, made.name, lambda mode=mode, made=made: self.verify(mode, made))
        for made in compositions(self.size):
            if not made.idle and made.rows is None:
                self._guard("step", None, made.name, lambda made=made: self.step(made))
        if self.size > 1:
            self._guard("reorder", None, "permuted", self.reorder)
        self._guard("again", None, "A-B-A", lambda: self.again(first))

    def _guard(self, check: str, mode: str | None, composition: str, run: Callable) -> None:
        """A pass that the engine refuses, or breaks down in, is found, not fatal; then every slot is looked at."""
        try:
            run()
        except Unsupported as error:
            self._found(check, mode, composition, "all", f"refused: {error}", verdict="unsupported")
        except (Broken, RuntimeError, ValueError, IndexError) as error:
            error = error.__cause__ or error
            text = " ".join(str(error).split())
            self._found(check, mode, composition, "all", f"the pass broke down: {type(error).__name__}: {text:.120}")
        self.canary(check, mode, composition)

    def _found(self, check: str, mode: str | None, composition: str, request: str, says: str, **place) -> None:
        self.findings.append(Finding(check, mode, self.size, composition, request, says, **place))

    def _count(self, check: str, mode: str | None, errors, floors, bad: int) -> None:
        key, size = (check, mode, self.size), np.size(errors)
        largest = [float(np.max(np.where(np.isfinite(x), x, np.inf), initial=0.0)) for x in (errors, floors)]
        before = self.tally.get(key, (0, 0, 0.0, 0.0))
        self.tally[key] = tuple(map(_add, before, (int(size), bad, *largest)))

    # prefill

    def prefill(self, padding: str) -> None:
        width = max(len(request.tokens) for request in self.group) + (WIDER if self.size == 1 else 0)
        found = self.batches.prefill([request.tokens for request in self.group], padding=padding, width=width)
        for request, prefix in zip(self.group, found, strict=True):
            steps, after = self._decoded(request)
            where = f"padded on the {padding}"
            logits = measure(request.prefix.logits[None], prefix.logits[None])
            floor = self.rule.chain_floor([after.max_abs], logits, self.dtype)
            right, stored = self.engine.contents(request.prefix), self.engine.contents(prefix)
            parts = compare_contents(right, stored, self.wide)
            bad = off(parts, chain_floors(parts, steps, self.rule, self.dtype))
            wrong = bool(beyond(judge(logits, floor)))
            self._count("prefill", None, logits.max_abs, floor, int(wrong or bool(bad)))
            if not bad and not wrong:
                continue
            says, part = _stored(bad, right, stored)
            says += "; its logits are off" if wrong else "; its logits are kept"
            self._found(
                "prefill", None, where, request.id, says,
                **_figures(bad, part, logits, floor),
            )  # fmt: skip

    def _decoded(self, request: Request) -> tuple[list[Part], Differences]:
        """What plain decoding of the prompt's end differs by from its prefill: states and logits."""
        key = ("decoded", request.id)
        if key not in self.controls:
            cut = max(1, len(request.tokens) - TAIL)
            prefix = self.engine.prefill(request.tokens[:cut])
            for token in request.tokens[cut:]:
                _, prefix = self.engine.step(prefix, token)
            parts = compare_contents(self.engine.contents(request.prefix), self.engine.contents(prefix), self.wide)
            self.controls[key] = parts, measure(request.prefix.logits[None], prefix.logits[None])
        return self.controls[key]

    # verify and commit

    def verify(self, mode: str, made: Composition) -> None:
        requests = [self.group[place] for place in made.places]
        trees = [request.trees[mode] for request in requests]
        rows = max(map(len, trees)) + (made.rows or 0)
        found = self._pass(requests, mode, made, rows)
        for request, tree, verified in zip(requests, trees, found, strict=True):
            alone = self.alone[request.id, mode]
            controls = self._verified_controls(request, mode, len(requests) + made.idle, rows)
            difference = measure(alone.logits, verified.logits)
            floor = self._band([control for control, _ in controls], difference)
            bad = beyond(judge(difference, floor))
            self._count("verify", mode, difference.max_abs, floor, len(bad))
            if bad:
                self._off(request, mode, made.name, verified, bad[0], controls, difference, floor)
            for node in accept_nodes(tree, ("full", "branch")):
                self._committed(request, mode, made, node, verified, controls)

    def _pass(self, requests: Sequence[Request], mode: str, made: Composition, rows: int) -> list:
        return self.batches.verify(
            [request.prefix for request in requests],
            [request.trees[mode] for request in requests],
            self.wiring[mode],
            padding=made.padding,
            rows=rows,
            idle=made.idle,
        )

    def _committed(self, request, mode, made, node, verified, controls) -> None:
        alone = self.alone[request.id, mode]
        right, stored = (self.engine.contents(self.engine.commit(run, node)) for run in (alone, verified))
        parts = compare_contents(right, stored, self.wide)
        floors = self._part_floors(parts, right, [run for _, run in controls], node)
        bad = off(parts, floors)
        self._count("commit", mode, [part.error for part in parts], floors, len(bad))
        if bad:
            says, part = _stored(bad, right, stored)
            self._found(
                "commit", mode, made.name, request.id, f"after node {node}: {says}", node=node,
                **_figures(bad, part, None, None),
            )  # fmt: skip

    def _part_floors(self, parts, right: Contents, controls: Sequence, node: int) -> list[float]:
        runs = [self.engine.contents(self.engine.commit(control, node)) for control in controls]
        measured = [compare_contents(right, run, self.wide) for run in runs]
        return tree_floors(parts, measured or [[replace(part, error=0.0) for part in parts]], self.rule, self.dtype)

    def _off(self, request, mode, composition, verified, node, controls, difference: Differences, floor) -> None:
        """Note a pass that is off from `node` on; what is stored after that node says by which layer it entered."""
        alone = self.alone[request.id, mode]
        right, stored = (self.engine.contents(self.engine.commit(run, node)) for run in (alone, verified))
        parts = compare_contents(right, stored, self.wide)
        bad = off(parts, self._part_floors(parts, right, [run for _, run in controls], node))
        says, part = _stored(bad, right, stored)
        self._found(
            "verify", mode, composition, request.id,
            f"first at node {node} (depth {request.trees[mode].depth[node]}); {says}",
            layer=part and part.layer, channel=part and part.channel, node=node,
            error=json_number(difference.max_abs[node]), floor=json_number(floor[node]),
        )  # fmt: skip

    def _verified_controls(self, request: Request, mode: str, width: int, rows: int) -> list[tuple]:
        """The request beside copies of itself and beside idle requests, in a batch as wide and as many rows: noise, if
        each is itself within what plain text costs at that width."""
        key = (request.id, mode, width, rows)
        if key in self.controls:
            return self.controls[key]
        tree, wiring, alone = request.trees[mode], self.wiring[mode], self.alone[request.id, mode]
        runs = {
            "copies of itself": self.batches.verify([request.prefix] * width, [tree] * width, wiring, rows=rows),
            "idle requests alone": self.batches.verify([request.prefix], [tree], wiring, rows=rows, idle=width - 1),
        }
        found, plain = [], self._plain(request, width)
        for name, passes in runs.items():
            for verified in passes[: 1 if len(passes) == 1 else 2] if width > 1 else passes:
                difference = measure(alone.logits, verified.logits)
                floor = self.rule.chain_floor([plain.max_abs], difference, self.dtype)
                bad = beyond(judge(difference, floor))
                if not bad:
                    found.append((difference, verified))
                    continue
                self._off(request, mode, f"{width} wide, beside {name}", verified, bad[0], [], difference, floor)
                break
        self.controls[key] = found
        return found

    def _plain(self, request: Request, width: int) -> Differences:
        """What the width alone costs, without a draft: the prompt's text in a batch of copies, and by itself."""
        key = ("plain", request.id, width)
        if key not in self.controls:
            text, keep = list(request.tokens), min(len(request.tokens), TAIL)
            try:
                one, many = self.engine.forward([text], keep)[0], self.engine.forward([text] * width, keep)
            except Unsupported:  # no such pass: then only what the rule grants to rounding is granted
                one = request.prefix.logits[None]
                many = [one]
            self.controls[key] = measure(one, many[-1])
        return self.controls[key]

    def _band(self, controls: Sequence[Differences], difference: Differences) -> np.ndarray:
        """The largest error [n] that the controls explain; of any node, since a batch may run a row in another lane."""
        pooled = [np.full(len(difference), np.max(control.max_abs)) for control in controls]
        floor = self.rule.floor(pooled, difference.ulp)
        return np.maximum(floor, self.rule.rounding[self.dtype] * difference.std) if self.dtype in EXACT else floor

    # step

    def step(self, made: Composition) -> None:
        requests = [self.group[place] for place in made.places]
        mine, theirs = [request.prefix for request in requests], [request.prefix for request in requests]
        copies = [request.prefix for request in requests]
        broken: set[str] = set()
        for number in range(1, STEPS + 1):
            tokens = [int(prefix.logits.argmax()) for prefix in theirs]
            rows = self.batches.step(mine, tokens, padding=made.padding)
            pairs = [self.engine.step(prefix, token) for prefix, token in zip(theirs, tokens, strict=True)]
            for place, request in enumerate(requests):
                width = len(requests)
                beside = self.batches.step([copies[place]] * width, [tokens[place]] * width)[-1]
                (logits, prefix), (alone, right) = rows[place], pairs[place]
                difference, control = (measure(alone[None], x[None]) for x in (logits, beside[0]))
                plain = self._plain(request, width)
                usable = bool(control.max_abs[0] <= self.rule.chain_floor([plain.max_abs], control, self.dtype)[0])
                floor = self._band([plain, *([control] if usable else [])], difference)
                before, held = self.engine.contents(right), self.engine.contents(prefix)
                parts = compare_contents(before, held, self.wide)
                steps = compare_contents(before, self.engine.contents(beside[1]), self.wide) if usable else []
                bad = off(parts, tree_floors(parts, [steps or _nothing(parts)], self.rule, self.dtype))
                wrong = bool(beyond(judge(difference, floor)))
                self._count("step", None, difference.max_abs, floor, int(wrong or bool(bad)))
                copies[place] = beside[1]
                if (wrong or bad) and request.id not in broken:
                    broken.add(request.id)
                    says, part = _stored(bad, before, held)
                    self._found(
                        "step", None, made.name, request.id, f"step {number}: {says}",
                        **_figures(bad, part, difference, floor),
                    )  # fmt: skip
            mine, theirs = [row[1] for row in rows], [pair[1] for pair in pairs]

    # reorder

    def reorder(self) -> None:
        """Moving rows is no arithmetic: every bit must be where it was sent. The identity is the control."""
        prefixes = [request.prefix for request in self.group]
        contents = [self.engine.contents(prefix) for prefix in prefixes]
        everyone = list(range(self.size))
        orders = {"kept": everyone, "permuted": everyone[::-1], "forked": [everyone[-1], *everyone[:-1], everyone[-1]]}
        for name, order in orders.items():
            for place, (source, prefix) in enumerate(zip(order, self.batches.reorder(prefixes, order), strict=True)):
                found = self.engine.contents(prefix)
                parts = compare_contents(contents[source], found, self.wide)
                bad = [(part, 0.0) for part in parts if part.error > 0]
                self._count("reorder", None, [part.error for part in parts], [0.0], len(bad))
                if not bad:
                    continue
                says, part = _stored(bad, contents[source], found)
                owner = self._owner(part, found, contents)
                self._found(
                    "reorder", None, name, self.group[source].id,
                    f"row {place}: {says}" + (f"; it is request {owner}'s" if owner else ""),
                    layer=part.layer, channel=part.channel, error=json_number(part.error), floor=0.0,
                )  # fmt: skip

    def _owner(self, part: Part, found: Contents, contents: Sequence[Contents]) -> str | None:
        if part.layer < 0:
            return None
        stored = found[1][part.layer].get(part.channel)
        for request, theirs in zip(self.group, contents, strict=True):
            other = theirs[1][part.layer].get(part.channel)
            if stored is not None and other is not None and stored.shape == other.shape and torch.equal(stored, other):
                return request.id
        return None

    # canary

    def canary(self, check: str, mode: str | None, composition: str) -> None:
        """Nothing that ran may have touched a Prefix of the pool: neither a member's nor, above all, a bystander's."""
        for request in (*self.group, self.waiting):
            now = _bits(self.engine.contents(request.prefix))
            changed = [place for place, bits in now.items() if self.bits[request.id].get(place) != bits]
            self._count("canary", None, [0.0] * len(now), [0.0], len(changed))
            if not changed:
                continue
            self.bits[request.id] = now  # said once
            layer, channel = changed[0]
            layers = sorted({layer for layer, _ in changed})
            who = "which is not in the batch" if request is self.waiting else "which the pass only reads"
            self._found(
                "canary", mode, f"{check}, {composition}", request.id,
                f"slot of request {request.id}, {who}: {channel} of layer {_some(layers)} changed",
                layer=layer, channel=channel,
            )  # fmt: skip

    # again

    def _fingerprints(self) -> dict[str, tuple]:
        """Every request alone: prefill, a step, and each mode's pass, bit by bit."""
        found = {}
        for request in self.group:
            prefix = self.engine.prefill(request.tokens)
            logits, after = self.engine.step(request.prefix, int(request.prefix.logits.argmax()))
            passes = {
                mode: self.engine.verify(request.prefix, tree, self.wiring[mode]).logits
                for mode, tree in request.trees.items()
            }
            found[request.id] = prefix.logits, self.engine.contents(prefix), logits, self.engine.contents(after), passes
        return found

    def again(self, first: dict[str, tuple]) -> None:
        for request, then in zip(self.group, self._fingerprints().values(), strict=True):
            before = first[request.id]
            what: list[tuple[str, str | None, int | None, int | None, str | None]] = []
            for name, at in (("prefill", 0), ("step", 2)):
                layer, channel = _first_difference(before[at + 1], then[at + 1])
                if layer is not None or not torch.equal(before[at], then[at]):
                    what.append((name, None, None, layer, channel))
            for mode, logits in before[4].items():
                differs = (logits != then[4][mode]).any(-1) | logits.isnan().any(-1)
                if differs.any():
                    what.append((f"verify of {mode}", mode, int(differs.nonzero()[0]), None, None))
            self._count("again", None, [0.0] * (2 + len(before[4])), [0.0], len(what))
            for name, mode, node, layer, channel in what:
                stored = f", first {channel} of layer {layer}" if layer is not None else ""
                at = f", first node {node}" if node is not None else ""
                self._found(
                    "again", mode, "A-B-A", request.id,
                    f"its {name} alone is not bit for bit what it was before the others ran{at}{stored}: "
                    "state is kept outside of its Prefix",
                    node=node, layer=layer, channel=channel,
                )  # fmt: skip


def _stored(bad: Sequence[tuple[Part, float]], right: Contents, found: Contents) -> tuple[str, Part | None]:
    """Which channels of which layers are off, in words, and the first of them: there the fault came in."""
    if not bad:
        return "what is stored is right, so it came in behind the last layer that stores", None
    kinds: dict[str, list[int]] = {}
    for part, _ in bad:
        kinds.setdefault(part.channel.partition(".")[0], []).append(part.layer)
    if "position" in kinds:
        return f"position {found[0]}, expected {right[0]}", bad[0][0]
    kinds.pop("values", None) if "keys" in kinds else None
    order = {"conv": 0, "recurrent": 1}  # within a layer, a window is written before a state
    first = min((part for part, _ in bad), key=lambda part: (part.layer, order.get(part.channel.partition(".")[0], 2)))
    words = [f"{channel} of layer {_some(sorted(set(layers)))} off" for channel, layers in kinds.items()]
    row = _first_row(first, bad, right, found)
    return f"first {first.channel} of layer {first.layer}{row}; {', '.join(words)}", first


def _figures(bad: Sequence[tuple[Part, float]], part: Part | None, logits: Differences | None, floor) -> dict:
    """Where it came in and how far off that is; of the logits where everything that is stored is right."""
    if part is None:
        return {"error": json_number(logits.max_abs[0]), "floor": json_number(floor[0])}
    error, most = json_number(part.error), json_number(dict(bad)[part])
    return {"layer": part.layer, "channel": part.channel, "error": error, "floor": most}


def _first_row(first: Part, bad: Sequence[tuple[Part, float]], right: Contents, found: Contents) -> str:
    """The first token whose keys are off, where there are keys."""
    for part, floor in bad:
        if part.channel == "keys":
            a, b = right[1][part.layer]["keys"], found[1][part.layer].get("keys")
            if b is not None and a.shape == b.shape:
                wrong = ~((a.double() - b.double()).abs().amax(-1) <= floor)
                if wrong.any():
                    return f", from token {int(wrong.nonzero()[0])} on by the keys of layer {part.layer}"
    return ""


def _some(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers))


def _nothing(parts: Sequence[Part]) -> list[Part]:
    return [replace(part, error=0.0) for part in parts]


def _bits(contents: Contents) -> dict[tuple[int, str], bytes]:
    """A digest of everything that a Prefix holds, by layer and channel."""
    found = {(-1, "position"): str(contents[0]).encode()}
    for layer, channels in enumerate(contents[1]):
        for channel, x in channels.items():
            raw = x.detach().cpu().contiguous().view(torch.uint8).numpy()
            found[layer, channel] = hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
    return found


def _first_difference(before: Contents, now: Contents) -> tuple[int | None, str | None]:
    a, b = _bits(before), _bits(now)
    return next((place for place in a if a[place] != b.get(place)), (None, None))


# All groups


def excused(findings: Sequence[Finding], known: Sequence[KnownFailure]) -> list[Finding]:
    """Findings that a known failure of a library explains, named: its check is 'padding' or 'batched'."""
    covered = {
        "padding": [entry for entry in known if entry.check == "padding"],
        "batched": [entry for entry in known if entry.check == "batched"],
    }
    found = []
    for finding in findings:
        kind = "padding" if finding.check == "prefill" and "left" in finding.composition else "batched"
        kind = kind if finding.check in ("prefill", "step") else None
        entry = next(iter(covered.get(kind, ())), None)
        if entry is not None and finding.verdict == "fail":
            finding = replace(finding, verdict="known_failure", says=f"{finding.says} ({entry.id}: {entry.cause})")
        found.append(finding)
    return found


def conclude(groups, findings: Sequence[Finding], settings: Settings, sizes, tally, missing: str | None = None) -> dict:
    """The section of the record and its verdict: 0 pass, 1 a defect, 2 inconclusive."""
    checks = [
        {
            "check": check,
            "mode": mode,
            "size": size,
            "compared": n,
            "off": bad,
            "largest": json_number(e),
            "floor": json_number(f),
        }
        for (check, mode, size), (n, bad, e, f) in sorted(
            tally.items(), key=lambda item: (item[0][2], CHECKS.index(item[0][0]), item[0][1] or "")
        )
    ]
    failed = [finding for finding in findings if finding.verdict == "fail"]
    conclusion = Conclusion()
    if missing is not None:
        conclusion.add(INCONCLUSIVE, f"batch: not_run: {missing}")
    for check in CHECKS:
        mine = [finding for finding in failed if finding.check == check]
        if mine:
            more = f" ({len(mine)} such findings)" if len(mine) > 1 else ""
            conclusion.add(DEFECT, f"batch: fail: {mine[0]}{more}")
    for verdict in ("unsupported", "known_failure"):
        first = next((finding for finding in findings if finding.verdict == verdict), None)
        if first is not None:
            conclusion.add(ExitCode.of(verdict), f"batch: {verdict}: {first}")
    lengths = [request["prompt_tokens"] for group in groups for request in group["requests"]]
    section = {
        "sizes": list(sizes),
        "groups": groups,
        "checks": checks,
        "findings": [finding.to_json() for finding in findings],
        "coverage": {
            "groups": len(groups),
            "unequal_lengths": sum(len({r["prompt_tokens"] for r in g["requests"]}) > 1 for g in groups),
            "shortest": min(lengths, default=0),
            "longest": max(lengths, default=0),
        },
        "not_run": missing,
    }
    return conclusion.into(section)
