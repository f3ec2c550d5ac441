"""Faults put into a running engine: which node a channel reads, what a commit stores, what a kernel is handed.

Nothing here knows how a fault is found: comparison and verdict may not be imported, and no logit or record is edited
after the fact unless a seam of the engine hands it over. The self-test, the calibration and the tests all use these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from ..base.errors import Unsupported
from ..engines.checked import Around
from ..engines.transformers.adapters import ADAPTERS, Swap
from ..judge.sampling.processing import history, process, to_numpy
from ..model.wiring import BLANK, FORKED, UNFORKED, Wiring, with_edge
from ..tree.draft_tree import DraftTree

# Engines with one thing changed


class Faulty(Around):
    """An engine that behaves like `engine` but for what a keyword replaces.

    forked, unforked   the wiring that really runs when that mode is asked for
    own        the wiring that runs in place of the engine's own multi-token pass
    around     (engine, tree, the wiring that runs) -> a context that every verify pass runs in
    logits     a function (logits, tree, the wiring that was asked for) of what every verify pass gives
    linear     the same of the engine's own multi-token pass alone, a function of the logits
    decode     a function (logits, number of the call) of decoded logits
    forward    a function of the logits of full forward passes
    commit     a function (engine, verified, node, the right Prefix) of what a commit stores
    """

    def __init__(
        self, engine, *, forked=FORKED, unforked=UNFORKED, own=None, around=None, logits=None, linear=None,
        decode=None, forward=None, commit=None, **claims,
    ):  # fmt: skip
        super().__init__(engine)
        self._wirings = {FORKED: forked, UNFORKED: unforked, None: own}
        self._around, self._linear, self._decode, self._forward = around, linear, decode, forward
        self._logits, self._commit, self._calls = logits, commit, 0
        self.__dict__.update(claims)

    def verify(self, prefix, tree, wiring):
        real, engine = self._wirings.get(wiring, wiring), self._engine if self._around is None else self._engine.fresh
        with self._around(engine, tree, real) if self._around else contextlib.nullcontext():
            verified = engine.verify(prefix, tree, real)
        if wiring is None and self._linear:
            verified = replace(verified, logits=self._linear(verified.logits))
        if self._logits:
            verified = replace(verified, logits=self._logits(verified.logits, tree, wiring))
        return verified

    def decode(self, prefix, tree, *, batched=False):
        logits = self._engine.decode(prefix, tree, batched=batched)
        self._calls += 1
        return self._decode(logits, self._calls) if self._decode else logits

    def forward(self, paths, keep):
        logits = self._engine.forward(paths, keep)
        return self._forward(logits) if self._forward else logits

    def commit(self, verified, node):
        right = self._engine.commit(verified, node)
        return self._commit(self._engine, verified, node, right) if self._commit else right

    def prefill(self, tokens):
        return replace(self._engine.prefill(tokens))


class Remembered(Around):
    """An engine that makes no pass twice: many faults share one prefix, its reference and its controls.

    Only right for an engine whose passes do not depend on what ran before; faults go around it.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self._known, self._kept, self._off = {}, [], 0

    @property
    def fresh(self):
        return self._engine.fresh

    def prefill(self, tokens):
        return self._once(("prefill", tuple(tokens)), lambda: self.fresh.prefill(tokens))

    def step(self, prefix, token):
        return self._once(("step", self._name(prefix), token), lambda: self.fresh.step(prefix, token))

    def decode(self, prefix, tree, *, batched=False):
        key = ("decode", self._name(prefix), tree, batched)
        return self._once(key, lambda: self.fresh.decode(prefix, tree, batched=batched))

    def verify(self, prefix, tree, wiring):
        return self._once(("verify", self._name(prefix), tree, wiring), lambda: self.fresh.verify(prefix, tree, wiring))

    def forward(self, paths, keep):
        return self._once(("forward", *map(tuple, paths), keep), lambda: self.fresh.forward(paths, keep))

    @contextlib.contextmanager
    def watch(self, layers):
        """Watch the engine's own passes; they are made again, because a remembered one runs no layer."""
        self._off += 1
        try:
            with self.fresh.watch(layers) as seen:
                yield seen
        finally:
            self._off -= 1

    def _name(self, prefix) -> int:
        self._kept.append(prefix.cache)  # an id is a name only as long as its owner lives
        return id(prefix.cache)

    def _once(self, key, make: Callable):
        if self._off:
            return make()
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


# Wirings


def moved_edge(channel: str, node: int, source: int, parents: Sequence[int] | None = None) -> Wiring:
    """Return the right wiring but for one node of a branching tree, which continues, sees, or stands at, another.

    parents: of the trees in which it does; None for all that have such a row.
    """

    def rule(tree):
        moves = not tree.is_chain and len(tree) > node and parents in (None, tree.parents)
        return with_edge(tree, channel, node, source) if moves else getattr(FORKED.plan(tree), channel)

    return Wiring(f"{channel} of node {node}", **{channel: rule})


def dropped(*channels: str) -> Wiring:
    """Return a wiring that reads zeros for what the committed text left in these channels, state or conv."""
    return Wiring("dropped", **{channel: lambda tree: (BLANK, *tree.parents[1:]) for channel in channels})


def running_state(tree: DraftTree) -> tuple[int, ...]:
    """A parent that is out of range, here that of every second sibling, keeps the state that happens to be there."""
    return tuple(
        node - 1 if parent >= 0 and node != tree.children[parent][0] else parent
        for node, parent in enumerate(tree.parents)
    )


# What a commit can store in place of the right contents. Channels: recurrent, conv, keys (with values).


def keeps(source: Callable, *channels: str, tree_only: bool = False, share: float = 1.0) -> Callable:
    """Return a commit whose `channels` hold what `source(engine, verified, node)`, a Prefix, holds; the rest is right.

    tree_only: the engine's own pass along a chain is left alone. share: of the wrong contents, the rest right ones.
    """

    def commit(engine, verified, node, right):
        if tree_only and verified.plan is None:
            return right
        return mixed(engine, right, source(engine, verified, node), channels, share)

    return commit


def mixed(engine, right, other, channels: Sequence[str], share: float = 1.0, layer: int | None = None):
    """Return `right` with `share` of some channels of `other`, Prefixes of the transformers engine; in one layer or in
    all."""
    cache = engine.caches.fork(right.cache)

    def blend(mine, theirs):
        return theirs.clone() if share == 1 else torch.lerp(mine, theirs, share)

    for index, (mine, theirs) in enumerate(zip(cache.layers, other.cache.layers, strict=True)):
        if layer not in (None, index):
            continue
        for channel, name in (("recurrent", "recurrent_states"), ("conv", "conv_states")):
            if channel in channels and hasattr(theirs, name):
                right_states, others = getattr(mine, name), getattr(theirs, name)
                setattr(mine, name, {number: blend(right_states[number], x) for number, x in others.items()})
        if "keys" in channels and getattr(theirs, "keys", None) is not None:
            mine.keys, mine.values = blend(mine.keys, theirs.keys), blend(mine.values, theirs.values)
    return replace(right, cache=cache)


def before(engine, verified, node):
    """Store what stood before: the commit never happened."""
    return verified.prefix


def block_end(engine, verified, node):
    """Store the state after the last row of the block, however few of its rows were accepted."""
    return engine.commit(verified, len(verified.tree) - 1)


def stale_slots(engine) -> Faulty:
    """Return an engine whose commits are right, but a plain step after one reads the recurrent slots of before."""
    slots = {}

    def commit(_, verified, node, right):
        right = replace(right)
        slots[id(right)] = (right, verified.prefix)
        return right

    def step(prefix, token):
        if id(prefix) in slots:
            prefix = mixed(engine, prefix, slots[id(prefix)][1], ("recurrent", "conv"))
        return engine.step(prefix, token)

    return Faulty(engine, commit=commit, step=step)


def wired(**channels):
    """Return what stores as another wiring of the commit would, such as commit='flat': rows by depth, not by node."""

    def source(engine, verified, node):
        if verified.plan is None:
            return engine.commit(verified, node)
        plan = replace(FORKED, **channels).plan(verified.tree)
        kept = {channel: getattr(plan, channel) for channel in channels}
        return engine.commit(replace(verified, plan=replace(verified.plan, **kept)), node)

    return source


def replayed_without_keys(engine, verified, node):
    """Run the accepted tokens again to rebuild the states, behind an attention cache that is empty."""
    cache = engine.caches.fork(verified.prefix.cache)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    prefix = replace(verified.prefix, cache=cache)
    for token in verified.tree.path_tokens(node):
        _, prefix = engine.step(prefix, token)
    return prefix


def rounded(engine, verified, node):
    """Store states in bf16."""
    right = engine.commit(verified, node)
    cache = engine.caches.fork(right.cache)
    for layer in cache.layers:
        for number, x in getattr(layer, "recurrent_states", {}).items():
            layer.recurrent_states[number] = x.to(torch.bfloat16).to(x.dtype)
    return replace(right, cache=cache)


# A step that was captured once and is replayed for every later pass of its shape


def captured(engine, *channels: str, share: float = 1.0) -> Faulty:
    """Return an engine whose tree passes of as many rows read these `channels` (of a wiring) as the first one did;
    chains are not captured.

    slots: in place of a wiring's channel, the states and windows that the first pass started from.
    """
    first: dict[int, tuple] = {}

    def verify(prefix, tree, wiring):
        if wiring is not FORKED or tree.is_chain:
            return engine.verify(prefix, tree, wiring)
        theirs, plan = first.setdefault(len(tree), (prefix, FORKED.plan(tree)))
        if "slots" in channels:
            prefix = mixed(engine, prefix, theirs, ("recurrent", "conv"), share)
        stale = {name: lambda tree, name=name: getattr(plan, name) for name in channels if name != "slots"}
        if plan.tree == tree or not stale:
            return engine.verify(prefix, tree, FORKED)
        if share == 1:
            return engine.verify(prefix, tree, Wiring("captured", **stale))
        with blended(Wiring("captured", **stale), share)(engine.fresh, tree, FORKED):
            return engine.fresh.verify(prefix, tree, FORKED)

    return Faulty(engine, verify=verify)


# What runs inside a pass


def altered(kind: str, change: Callable) -> Callable:
    """Return a context for `Faulty.around`: recurrent functions that the adapter `kind` stands in for run as
    `change(function, arguments, keywords)`, in tree passes and in the library's own pass."""

    def through(function: Callable) -> Callable:
        return lambda *args, **kwargs: change(function, args, kwargs)

    @contextlib.contextmanager
    def around(engine, tree, wiring):
        with contextlib.ExitStack() as undo:
            adapter = ADAPTERS[kind]
            stand_in = {kind: lambda swap, *args, **kwargs: change(partial(adapter, swap), args, kwargs)}
            undo.enter_context(patch.dict(ADAPTERS, stand_in))
            for name, stands_for in engine.family.calls.items():
                if stands_for == kind:
                    place, attribute = engine._place(name)
                    undo.enter_context(patch.object(place, attribute, through(getattr(place, attribute))))
            yield

    return around


def gate_of_first_row(*names: str, share: float = 1.0) -> Callable:
    """Return a change for `altered`: these keyword arguments, [1, n, ...], are the first row's for every row."""

    def change(function, args, kwargs):
        first = {name: kwargs[name][:, :1].expand_as(kwargs[name]) for name in names}
        return function(*args, **kwargs | {name: torch.lerp(kwargs[name], x, share) for name, x in first.items()})

    return change


def blended(wrong: Wiring, share: float = 1.0, *, layer: int | None = None, everywhere: bool = False) -> Callable:
    """Return a context for `Faulty.around`: a share of what the wiring `wrong` gives, the rest as the pass is wired.

    State and conv: recurrent functions run under both wirings and their outputs are mixed, in one layer or in all.
    Mask: a row that only one of the two sees gets that share of its attention weight. Positions cannot be mixed.
    everywhere: in every tree pass; else only where tree_forked was asked for.
    """
    if wrong.positions != "tree":
        raise ValueError("blended: positions cannot be mixed, expected state, conv or mask; use the wiring itself")

    @contextlib.contextmanager
    def around(engine, tree, wiring):
        if wiring is None or (wiring is not FORKED and not everywhere):
            yield
            return
        plan, calls = wrong.plan(tree), engine.family.calls.values()
        scans = {kind for kind in calls if not kind.endswith(("_update", "_only"))}
        adapters = {kind: _both(ADAPTERS[kind], plan, share, layer) for kind in scans}
        seen = patch.object(engine, "_mask", _partly_seen(engine, plan, share))
        with patch.dict(ADAPTERS, adapters), seen if wrong.mask != "tree" else contextlib.nullcontext():
            yield

    return around


def _both(adapter: Callable, wrong, share: float, layer: int | None) -> Callable:
    def run(swap, *args, **kwargs):
        right = adapter(swap, *args, **kwargs)
        if layer is not None and swap.layer != layer:
            return right
        aside = None if swap.record is None else replace(swap.record, scans={}, inputs={})
        twin = Swap(wrong, aside, swap.caches, swap.originals)
        twin.enter(swap.layer)
        other = adapter(twin, *args, **kwargs)
        if isinstance(right, tuple):
            return (torch.lerp(right[0], other[0], share), *right[1:])
        return torch.lerp(right, other, share)

    return run


def _partly_seen(engine, wrong, share: float) -> Callable:
    def blend(right, other):
        if isinstance(right, dict):
            return {kind: blend(mask, other[kind]) for kind, mask in right.items()}
        if right is None or right.ndim < 4:  # no attention, or a mask of padding
            return right
        seen = [(mask if mask.dtype == torch.bool else mask == 0).to(engine.dtype) for mask in (right, other)]
        return torch.lerp(*seen, share).log().clamp_min(torch.finfo(engine.dtype).min)

    return lambda plan, prefix: blend(*(type(engine)._mask(engine, each, prefix) for each in (plan, wrong)))


def hooked(find: Callable, hook: Callable, *, modes: Sequence[Wiring | None] | None = (FORKED,)) -> Callable:
    """Return a context for `Faulty.around`: in passes of these modes (None: of all) over more than one row,
    `hook(module, args, output)` may replace the output of every module for which `find(name, module)` is true. Raises
    Unsupported if there is none."""

    @contextlib.contextmanager
    def around(engine, tree, wiring):
        modules = [module for name, module in engine.model.named_modules() if find(name, module)]
        if not modules:
            raise Unsupported("hooked: the model has no such module")
        with contextlib.ExitStack() as undo:
            for module in modules if (modes is None or wiring in modes) and len(tree) > 1 else ():
                undo.callback(module.register_forward_hook(hook).remove)
            yield

    return around


def _is_linear(name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def _halves(module, args, output):
    (x,), half = args, args[0].shape[-1] // 2
    if x.shape[-2] < 2:
        return output
    wide = torch.promote_types(x.dtype, torch.float32)  # as kernels sum, and rounded once
    x, weight, bias = (None if part is None else part.to(wide) for part in (x, module.weight, module.bias))
    parts = F.linear(x[..., :half], weight[:, :half]), F.linear(x[..., half:], weight[:, half:], bias)
    return sum(parts).to(output.dtype)


# A context for `Faulty.around`: every product of more than one row is summed in two halves, in every mode.
other_order = hooked(_is_linear, _halves, modes=None)


def noisy(size: float, *, modes: Sequence[Wiring | None] | None = None) -> Callable:
    """Return a context for `Faulty.around`: every product of more than one row gets noise, `size` of each row's rms.

    modes: only in these; None for all.
    """

    def noise(module, args, output):
        if output.shape[-2] < 2:
            return output
        draw = torch.Generator(device=output.device).manual_seed(output.shape[-2])
        rms = output.float().square().mean(-1, keepdim=True).sqrt()
        extra = torch.randn(output.shape, generator=draw, device=output.device)
        return (output.float() + size * rms * extra).to(output.dtype)

    return hooked(_is_linear, noise, modes=modes)


def branching(around: Callable) -> Callable:
    """Return the same context, for trees that branch alone: chains, the controls among them, stay right."""
    return lambda engine, tree, wiring: contextlib.nullcontext() if tree.is_chain else around(engine, tree, wiring)


# What is made of logits


def processed(rule: str, mode: str) -> Callable:
    """Return what `Faulty(engine, processed=...)` takes: penalties of one mode count the tokens that a rule of
    `sampling.RULES` names; those of the other modes the node's own path."""

    def rows(asked, tree, nodes, logits, sampling, prompt, made):
        pasts = [history(rule if asked == mode else "path", tree, node, prompt, made) for node in nodes]
        log_q = [process(to_numpy(row), sampling, past) for row, past in zip(logits, pasts, strict=True)]
        return torch.from_numpy(np.stack(log_q))

    return rows


def takes(place: int, mode: str) -> Callable:
    """Return what `Faulty(engine, chosen=...)` takes: one mode chooses the last of equal largest logits (-1), where the
    others choose the first, or what stands at this place by size, which is wrong from the second largest (1) on."""

    def chosen(asked, tree, nodes, logits):
        order = logits.sort(dim=-1, descending=True, stable=True).indices  # equals by id, the lowest first
        equal = (logits == logits.amax(-1, keepdim=True)).sum(-1).tolist()
        where = place if asked == mode else 0
        return [int(row[count - 1 if where < 0 else where]) for row, count in zip(order, equal, strict=True)]

    return chosen


# Several requests in one pass


class FaultyBatches:
    """Batches that behave like `batches` but for what a keyword replaces: prefill, step, verify or reorder, each a
    function (right, *arguments, **keywords) where right is the method that it stands in for."""

    def __init__(self, batches, **changed):
        self._batches = batches
        for name, change in changed.items():
            right = getattr(batches, name)
            setattr(self, name, lambda *args, right=right, change=change, **kwargs: change(right, *args, **kwargs))

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)


def batched(engine, **changed) -> Faulty:
    """Return an engine whose passes over several requests are changed; `changed` as in `FaultyBatches`."""
    return Faulty(engine, batches=lambda: FaultyBatches(engine.batches(), **changed))


def states_of_first(engine, *channels: str) -> Callable:
    """Return a change of `verify` or `step`: every request starts from the first one's states."""

    def change(right, prefixes, *args, **kwargs):
        wrong = [mixed(engine, prefix, prefixes[0], channels) for prefix in prefixes[1:]]
        return right([prefixes[0], *wrong], *args, **kwargs)

    return change


def left_behind(engine, *channels: str) -> Callable:
    """Return a change of `reorder`: the rest is permuted, these channels stay where they were."""

    def change(right, prefixes, order):
        moved = enumerate(right(prefixes, order))
        return [mixed(engine, prefix, prefixes[place % len(prefixes)], channels) for place, prefix in moved]

    return change


def padding_run(engine, *channels: str, alone: bool = True) -> Callable:
    """Return a change of `prefill`: on the left, recurrent layers run over the padding too; alone: of a batch of one
    only."""

    def change(right, prompts, *, padding="left", width=None):
        prefixes = right(prompts, padding=padding, width=width)
        longest = max(width or 0, *map(len, prompts))
        if padding != "left" or (alone and len(prompts) > 1):
            return prefixes
        dirty = (engine.prefill([0] * (longest - len(prompt)) + list(prompt)) for prompt in prompts)
        return [mixed(engine, prefix, other, channels) for prefix, other in zip(prefixes, dirty, strict=True)]

    return change


def padded_slot(engine) -> Callable:
    """Return a change of `verify`: an idle row's slot is a waiting request's, the last one that stood in a batch."""
    known: dict[int, object] = {}

    def change(right, prefixes, trees, wiring, *, idle=0, **keywords):
        verified = right(prefixes, trees, wiring, idle=idle, **keywords)
        waiting = [prefix.cache for name, prefix in known.items() if name not in map(id, prefixes)]
        known.update((id(prefix), prefix) for prefix in prefixes)
        if idle and waiting:
            states = (getattr(layer, "recurrent_states", None) for layer in waiting[-1].layers)
            engine.caches.state(waiting[-1], next(at for at, each in enumerate(states) if each)).mul_(0.5)
        return verified

    return change
