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
from ..judge.commit import Accept, Commit, Contents, Judge, Left, Standard, flat_contents, words
from ..judge.nodes import CONTROL, MODES
from ..model.wiring import contaminated
from ..trace.model import Committed, Step, Stored
from ..tree.paths import leaves_first_branch
from .commit import gather

STATE = "state"  # the pattern of what is no commit but the state at a node of a pass
ALONE = "the trace holds no states of a prefill of this path to compare with; record them, or give --model"


def judge_stored(engine, step: Step, layers, settings, dtype: str, live=None, problem: str | None = None):
    """Return an `Accept` for each path whose commit, and each node whose state, the trace holds; None if none.

    live: an engine of the same model. problem: why passes of the trace cannot be judged by it, if so.
    """
    stored = _Stored(engine, step, layers, settings, dtype, live, problem)
    return (*stored.commits(), *stored.states()) or None


class _Stored:
    def __init__(self, engine, step: Step, layers, settings, dtype: str, live, problem: str | None):
        self.step, self.tree, self.rule, self.dtype = step, step.tree, settings.rule, dtype
        self.live, self.problem, self.kept = live, problem, engine.describe().get("state_dtype")
        self.dirty = contaminated(settings.control.plan(step.tree), layers)
        arrays = [name for each in (*step.passes, *step.commits) for name in each.arrays if name.startswith("state.")]
        self.count = max([len(layers), *(1 + int(name.split(".")[1]) for name in arrays)])
        self.left: dict[tuple[int, ...], dict[str, Committed]] = {}
        for each in step.commits:
            self.left.setdefault(each.path, {})[each.mode] = each
        self.rows = {mode: self._rows(mode) for mode in ("ar", "chain", *MODES)}
        self._standards: dict[tuple, Standard] = {}

    # What is judged

    def commits(self) -> Iterator[Accept]:
        """Yield what the trace's commits of each path come to."""
        for path, commits in self.left.items():
            modes, controls = (
                {name: self._left(commits[name]) for name in names if name in commits}
                for names in (MODES, ("linear", "chain"))
            )
            if path and modes:
                first = commits[next(iter(modes))]
                yield self._judged(path, first.pattern, modes, controls, first.probe)

    def states(self) -> Iterator[Accept]:
        """Yield what the states at each node of the trace's passes come to."""
        for node in range(len(self.tree)):
            modes = {mode: self._at(mode, node) for mode in MODES if node in self.rows[mode]}
            controls = {name: self._at(name, node) for name in ("linear", "chain") if self._wide(name, node)}
            if any(mode in modes for mode in MODES):
                yield self._judged(self.tree.path(node), STATE, modes, controls, ())

    def _judged(self, path, pattern: str, modes: Mapping[str, Left], controls: Mapping[str, Left], probe) -> Accept:
        expected = frozenset({CONTROL} & modes.keys() if path[-1] in self.dirty else ())
        commits = {}
        for mode, left in modes.items():
            try:
                commits[mode] = self._judge(path, pattern, mode, left, controls, probe, mode in expected)
            except Unsupported as error:
                commits[mode] = Commit("not_run", str(error))
        return Accept(pattern, path[-1], path, leaves_first_branch(self.tree, path), commits, expected)

    def _judge(self, path, pattern: str, mode: str, left: Left, controls, probe, expected: bool) -> Commit:
        standard, how = self._own(path, controls, pattern), {"kept": self.kept}
        if standard is None:
            if self.live is None:
                raise Unsupported(ALONE)
            if self.problem:
                return Commit("reference_unusable", self.problem)
            standard, left = self._matched(self._live(path, probe), left)
            chains = {name: _cast(control, left) for name, control in controls.items() if name != mode}
            how |= {"across": True, "own": chains}
        elif self.live is not None:  # two engines may be equally wrong only if both are
            theirs, mine = self._matched(self._live(path, standard.probe), standard.reference)
            check = Judge(path, theirs, self.rule, self.dtype, kept=self.kept, across=True).commit(mine)
            if check.verdict == "fail":
                reason = "a prefill leaves other states than the model's own: " + check.reason
                return Commit("reference_unusable", reason)
        search = partial(self._words, "committed state" if pattern != STATE else "state")
        judge = Judge(path, standard, self.rule, self.dtype, **how)
        return judge.commit(left, own=mode == "linear", expected=expected, search=search)

    def _words(self, what: str, judge: Judge, left: Left, bad):
        """Say whose states they are, by those that the trace holds, or by plain decoding of the live engine."""
        known, before = dict(self._known()), self.left.get((), {}).get("prefill")
        complete = len(known) == len(self.tree) or self.live is not None
        standing = known.items() if len(known) == len(self.tree) or not complete else self._walk(left.contents)
        if before is not None:
            before = self._left(before).contents
        elif self.live is not None:
            before = _aligned(self.live.contents(self._prefix), left.contents)
        return words(judge, before, left, bad, standing, complete=complete, what=what)

    def _known(self) -> Iterator[tuple[int, Contents]]:
        for node in self.rows["ar"]:
            yield node, self._at("ar", node).contents
        for path, commits in self.left.items():
            right = commits.get("prefill") or commits.get("ar")
            if path and right is not None:
                yield path[-1], self._left(right).contents

    def _walk(self, like: Contents) -> Iterator[tuple[int, Contents]]:
        for node, _, prefix in walk(self.live, self._prefix, self.tree):
            yield node, _aligned(self.live.contents(prefix), like)

    # What it is judged by

    def _own(self, path, controls: Mapping[str, Left], pattern: str) -> Standard | None:
        """Return the trace's own reference of a path, or None if it has none."""
        commits, node = self.left.get(path, {}), path[-1]
        right = {name: self._left(commits[name]) for name in ("prefill", "ar") if name in commits}
        if node in self.rows["ar"]:
            right.setdefault("ar", self._at("ar", node))
        if not right:
            return None
        reference = right.get("prefill") or right["ar"]
        steps = right.get("ar") if "prefill" in right else None
        probe = next((each.probe for each in commits.values()), ())
        if pattern == STATE:  # channels that the pass does not hold are not missing from it
            like = next((self._at(mode, node).contents for mode in MODES if node in self.rows[mode]), None)
            reference, steps = (each and Left(_only(each.contents, like)) for each in (reference, steps))
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
        """Return the live engine's standard in the channels and the dtype of what the trace holds, and that in its
        dtype."""

        def like(live: Left) -> Left:
            rows = None if live.rows is None or left.rows is None else live.rows.cpu().to(left.rows.dtype)
            return Left(_aligned(live.contents, left.contents), rows)

        reference = like(standard.reference)
        chains = {name: like(chain) for name, chain in standard.chains.items()}
        return replace(standard, reference=reference, steps=like(standard.steps), chains=chains), _cast(left, reference)

    # What the trace holds

    def _left(self, commit: Committed) -> Left:
        after = len(self.step.prompt_tokens) + len(commit.path)
        contents = _contents(commit.arrays, self.count, after if commit.position is None else commit.position)
        return Left(contents, tensor(commit.arrays["logits"]) if commit.probe else None)

    def _rows(self, mode: str) -> dict[int, tuple[Mapping[str, Stored], int, int]]:
        """Return by node the arrays of the first pass that holds its states, its row there, and the pass's width."""
        rows: dict[int, tuple] = {}
        for each in self.step.of(mode):
            if any(name.startswith("state.") for name in each.arrays):
                for row, node in enumerate(each.nodes):
                    rows.setdefault(node, (each.arrays, row, each.width))
        rows.pop(-1, None)  # padding
        return rows

    def _wide(self, mode: str, node: int) -> bool:
        return node in self.rows[mode] and self.rows[mode][node][2] >= len(self.tree)

    def _at(self, mode: str, node: int) -> Left:
        arrays, row, _ = self.rows[mode][node]
        return Left(_contents(arrays, self.count, len(self.step.prompt_tokens) + self.tree.depth[node] + 1, row))


def _contents(arrays: Mapping[str, Stored], count: int, position: int, row: int | None = None) -> Contents:
    """Return what arrays hold of `count` layers, or one row of it; the others are not read."""
    channels: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, array in arrays.items():
        kind, _, rest = name.partition(".")
        if kind == "state":
            layer, _, channel = rest.partition(".")
            if row is not None:
                size = {"F64": 8, "F32": 4}.get(array.dtype, 2) * int(np.prod(array.shape[1:], dtype=object))
                array = replace(array, shape=array.shape[1:], at=array.at + row * size)
            channels[int(layer)][channel] = tensor(array)
    return position, channels


def _only(contents: Contents, like: Contents | None) -> Contents:
    """Return contents without the channels that `like` does not hold."""
    if like is None:
        return contents
    layers = zip(contents[1], like[1], strict=True)
    return contents[0], [{name: x for name, x in mine.items() if name in wanted} for mine, wanted in layers]


def _aligned(contents: Contents, like: Contents) -> Contents:
    """Return a live engine's contents in the channels that another engine recorded, in the wider of both dtypes.

    An engine may keep one input less in a convolution window: the one that the next token pushes out. Raises
    Unsupported for a channel that the model does not have or states in another layout.
    """
    aligned: list[dict[str, torch.Tensor]] = [{} for _ in like[1]]
    mine = flat_contents(contents)
    for (layer, name), theirs in flat_contents(like).items():
        if (layer, name) not in mine:
            raise Unsupported(f"layer {layer} of the model holds no {name}, which the trace has; cannot be compared")
        x, kind = mine[layer, name].cpu(), name.partition(".")[0]
        if kind == "conv" and len(theirs) == len(x) - 1:
            x = x[1:]
        rows = 0 if kind == "recurrent" else 1
        if x.shape[rows:] != theirs.shape[rows:]:
            raise Unsupported(
                f"{name} of layer {layer} is {list(theirs.shape)} in the trace, {list(x.shape)} in the model: "
                "another layout, which cannot be compared"
            )
        aligned[layer][name] = x.to(torch.promote_types(x.dtype, theirs.dtype))
    return contents[0], aligned


def _cast(left: Left, like: Left) -> Left:
    """Return what was recorded in the dtypes of a reference."""
    layers = zip(left.contents[1], like.contents[1], strict=True)
    channels = [
        {name: x.to(wanted[name].dtype) if name in wanted else x for name, x in mine.items()} for mine, wanted in layers
    ]
    return Left((left.contents[0], channels), left.rows)
