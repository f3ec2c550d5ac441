"""States that a trace holds, judged: what its commits left, and what stood at the nodes of its passes (docs/trace.md).

The same judge as a live run's, `commit.Judge`: by what the trace's own engine left after a prefill of the same text,
or, where that was not recorded, by what a live engine of the same model leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import torch

from ..base.errors import Unsupported
from ..engines.contract import walk
from ..engines.recorded import tensor
from ..judge.commit import Accept, Commit, Contents, Judge, Left, Standard, words
from ..judge.nodes import CONTROL, MODES
from ..model.wiring import contaminated
from ..trace.model import Committed, Step, Stored
from ..tree.paths import leaves_first_branch
from .commit import gather

STATE = "state"  # the pattern of what is no commit but the state at a node of a pass
ALONE = "the trace holds no states of a prefill of this path to compare with; record them, or give --model"


def judge_stored(engine, step: Step, layers, settings, dtype: str, live=None, problem: str | None = None):
    """An `Accept` for each path whose commit, and each node whose state, the trace holds; None if it holds none.

    live: an engine of the same model. problem: why passes of the trace cannot be judged by it, if so.
    """
    found = _Stored(engine, step, layers, settings, dtype, live, problem)
    accepts = [*found.commits(), *found.states()]
    return tuple(accepts) or None


class _Stored:
    def __init__(self, engine, step: Step, layers, settings, dtype: str, live, problem: str | None):
        self.step, self.tree, self.rule, self.dtype = step, step.tree, settings.rule, dtype
        self.live, self.problem, self.kept = live, problem, engine.describe().get("state_dtype")
        self.dirty = contaminated(settings.control.plan(step.tree), layers)
        arrays = [name for one in (*step.passes, *step.commits) for name in one.arrays if name.startswith("state.")]
        self.count = max([len(layers), *(1 + int(name.split(".")[1]) for name in arrays)])
        self.left: dict[tuple[int, ...], dict[str, Committed]] = {}
        for one in step.commits:
            self.left.setdefault(one.path, {})[one.mode] = one
        self.rows = {mode: self._rows(mode) for mode in ("ar", "chain", *MODES)}
        self._standards: dict[tuple, Standard] = {}

    # What is judged

    def commits(self) -> Iterator[Accept]:
        for path, held in self.left.items():
            modes = {mode: self._left(held[mode]) for mode in MODES if mode in held}
            if path and modes:
                controls = {name: self._left(held[name]) for name in ("linear", "chain") if name in held}
                first = next(held[mode] for mode in MODES if mode in held)
                yield self._judged(path, first.pattern, modes, controls, first.probe)

    def states(self) -> Iterator[Accept]:
        for node in range(len(self.tree)):
            modes = {mode: self._at(mode, node) for mode in MODES if node in self.rows[mode]}
            controls = {name: self._at(name, node) for name in ("linear", "chain") if self._wide(name, node)}
            if any(mode in modes for mode in MODES):
                yield self._judged(self.tree.path(node), STATE, modes, controls, ())

    def _judged(self, path, pattern: str, modes: Mapping[str, Left], controls: Mapping[str, Left], probe) -> Accept:
        expected = frozenset({CONTROL} & modes.keys() if path[-1] in self.dirty else ())
        found = {}
        for mode, left in modes.items():
            try:
                found[mode] = self._judge(path, pattern, mode, left, controls, probe, mode in expected)
            except Unsupported as error:
                found[mode] = Commit("not_run", str(error))
        return Accept(pattern, path[-1], path, leaves_first_branch(self.tree, path), found, expected)

    def _judge(self, path, pattern: str, mode: str, left: Left, controls, probe, expected: bool) -> Commit:
        standard, how = self._own(path, controls, pattern), {"kept": self.kept}
        if standard is None:
            if self.live is None:
                raise Unsupported(ALONE)
            if self.problem:
                return Commit("reference_unusable", self.problem)
            standard, left = self._matched(self._live(path, probe), left)
            own = {name: _cast(control, left) for name, control in controls.items() if name != mode}
            how |= {"across": True, "own": own}
        elif self.live is not None:  # two engines may be equally wrong only if both are
            theirs, mine = self._matched(self._live(path, standard.probe), standard.reference)
            found = Judge(path, theirs, self.rule, self.dtype, kept=self.kept, across=True).commit(mine)
            if found.verdict == "fail":
                return Commit(
                    "reference_unusable", "a prefill leaves other states than the model's own: " + found.reason
                )
        search = partial(self._words, "committed state" if pattern != STATE else "state")
        judge = Judge(path, standard, self.rule, self.dtype, **how)
        return judge.commit(left, own=mode == "linear", expected=expected, search=search)

    def _words(self, what: str, judge: Judge, found: Left, bad):
        """Whose states they are, by those that the trace holds, or by plain decoding of the live engine."""
        known = dict(self._known())
        if len(known) < len(self.tree) and self.live is not None:
            known = None
        before = self.left.get((), {}).get("prefill")
        if before is not None:
            before = self._left(before).contents
        elif self.live is not None:
            before = _aligned(self.live.contents(self._prefix), found.contents)
        complete = known is None or len(known) == len(self.tree)
        standing = known.items() if known is not None else self._walk(found.contents)
        return words(judge, before, found, bad, standing, complete=complete, what=what)

    def _known(self) -> Iterator[tuple[int, Contents]]:
        for node in self.rows["ar"]:
            yield node, self._at("ar", node).contents
        for path, held in self.left.items():
            one = held.get("prefill") or held.get("ar")
            if path and one is not None:
                yield path[-1], self._left(one).contents

    def _walk(self, like: Contents) -> Iterator[tuple[int, Contents]]:
        for node, _, prefix in walk(self.live, self._prefix, self.tree):
            yield node, _aligned(self.live.contents(prefix), like)

    # What it is judged by

    def _own(self, path, controls: Mapping[str, Left], pattern: str) -> Standard | None:
        """The trace's own reference of a path, None if it has none."""
        held = {name: self._left(one) for name, one in self.left.get(path, {}).items() if name in ("prefill", "ar")}
        node = path[-1]
        if node in self.rows["ar"]:
            held.setdefault("ar", self._at("ar", node))
        if not held:
            return None
        reference = held.get("prefill") or held["ar"]
        probe = next((one.probe for one in self.left.get(path, {}).values()), ())
        steps = held.get("ar") if "prefill" in held else None
        if pattern == STATE:  # channels that the pass does not hold are not missing from it
            like = next((self._at(mode, node).contents for mode in MODES if node in self.rows[mode]), None)
            reference, steps = (one and Left(_only(one.contents, like)) for one in (reference, steps))
        return Standard(reference, steps, controls, {}, probe)

    def _live(self, path, probe: Sequence[int]) -> Standard:
        key = (path, tuple(probe))
        if key not in self._standards:
            self._standards = {
                key: gather(self.live, self.step.prompt_tokens, self._prefix, self.tree, path[-1], tuple(probe))
            }
        return self._standards[key]

    @cached_property
    def _prefix(self):
        return self.live.prefill(self.step.prompt_tokens)

    @staticmethod
    def _matched(standard: Standard, left: Left) -> tuple[Standard, Left]:
        """The live engine's standard in the channels and the dtype of what the trace holds, and that in its dtype."""

        def like(one: Left) -> Left:
            rows = None if one.rows is None or left.rows is None else one.rows.cpu()
            return Left(_aligned(one.contents, left.contents), None if rows is None else rows.to(left.rows.dtype))

        reference = like(standard.reference)
        chains = {name: like(one) for name, one in standard.chains.items()}
        return replace(standard, reference=reference, steps=like(standard.steps), chains=chains), _cast(left, reference)

    # What the trace holds

    def _left(self, one: Committed) -> Left:
        after = len(self.step.prompt_tokens) + len(one.path)
        contents = _contents(one.arrays, self.count, after if one.position is None else one.position)
        return Left(contents, tensor(one.arrays["logits"]) if one.probe else None)

    def _rows(self, mode: str) -> dict[int, tuple[Mapping[str, Stored], int, int]]:
        """Node -> the arrays of the first pass that holds its states, its row there, and the width of the pass."""
        found: dict[int, tuple] = {}
        for one in self.step.of(mode):
            if any(name.startswith("state.") for name in one.arrays):
                for row, node in enumerate(one.nodes):
                    if node >= 0:
                        found.setdefault(node, (one.arrays, row, one.width))
        return found

    def _wide(self, mode: str, node: int) -> bool:
        return node in self.rows[mode] and self.rows[mode][node][2] >= len(self.tree)

    def _at(self, mode: str, node: int) -> Left:
        arrays, row, _ = self.rows[mode][node]
        return Left(_contents(arrays, self.count, len(self.step.prompt_tokens) + self.tree.depth[node] + 1, row))


def _contents(arrays: Mapping[str, Stored], count: int, position: int, row: int | None = None) -> Contents:
    channels: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        if kind == "state":
            layer, _, channel = rest.partition(".")
            channels[int(layer)][channel] = tensor(array) if row is None else tensor(_one(array, row))
    return position, channels


def _one(array: Stored, row: int) -> Stored:
    """One row of an array; the others are not read."""
    size = {"F64": 8, "F32": 4}.get(array.dtype, 2) * int(np.prod(array.shape[1:], dtype=object))
    return replace(array, shape=array.shape[1:], at=array.at + row * size)


def _only(contents: Contents, like: Contents | None) -> Contents:
    """Contents without the channels that `like` does not hold."""
    if like is None:
        return contents
    held = [
        {name: x for name, x in own.items() if name in want} for own, want in zip(contents[1], like[1], strict=True)
    ]
    return contents[0], held


def _aligned(contents: Contents, like: Contents) -> Contents:
    """A live engine's contents in the channels that another engine recorded, in the wider of both dtypes.

    An engine may keep one input less in a convolution window: the one that the next token pushes out. Raises
    Unsupported for a channel that the model does not have or states in another layout.
    """
    found = []
    for layer, channels in enumerate(like[1]):
        own = contents[1][layer] if layer < len(contents[1]) else {}
        held = {}
        for name, theirs in channels.items():
            if name not in own:
                raise Unsupported(
                    f"layer {layer} of the model holds no {name}, which the trace has; cannot be compared"
                )
            mine = own[name].cpu()
            if name.partition(".")[0] == "conv" and len(theirs) == len(mine) - 1:
                mine = mine[1:]
            rows = 1 if name.partition(".")[0] != "recurrent" else 0
            if mine.shape[rows:] != theirs.shape[rows:]:
                raise Unsupported(
                    f"{name} of layer {layer} is {list(theirs.shape)} in the trace, {list(mine.shape)} in the model: "
                    "another layout, which cannot be compared"
                )
            held[name] = mine.to(torch.promote_types(mine.dtype, theirs.dtype))
        found.append(held)
    return contents[0], found


def _cast(left: Left, like: Left) -> Left:
    """What was recorded in the dtypes of a reference."""
    channels = [
        {name: x.to(want[name].dtype) if name in want else x for name, x in own.items()}
        for own, want in zip(left.contents[1], like.contents[1], strict=True)
    ]
    return Left((left.contents[0], channels), left.rows)
