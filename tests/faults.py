"""Engines with one thing wrong, for tests that must see a check go red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ddtree_check.wiring import FORKED, UNFORKED


class Faulty:
    """An engine that behaves like `engine` but for what a keyword replaces.

    forked, unforked   the wiring that really runs when that mode is asked for
    linear             a function of the logits of the engine's own multi-token pass
    decode             a function (logits, number of the call) of decoded logits
    forward            a function of the logits of full forward passes
    commit             a function (engine, verified, node, the right Prefix) of what a commit stores
    """

    def __init__(
        self, engine, *, forked=FORKED, unforked=UNFORKED, linear=None, decode=None, forward=None, commit=None, **claims
    ):
        self._engine, self._wirings = engine, {FORKED: forked, UNFORKED: unforked}
        self._linear, self._decode, self._forward, self._calls = linear, decode, forward, 0
        self._commit = commit
        self.__dict__.update(claims)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def verify(self, prefix, tree, wiring):
        verified = self._engine.verify(prefix, tree, self._wirings.get(wiring, wiring))
        if wiring is None and self._linear:
            verified.logits = self._linear(verified.logits)
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


# What a commit can store in place of the right contents. Channels: recurrent, conv, keys (with values).


def keeps(source: Callable, *channels: str, tree_only: bool = False) -> Callable:
    """A commit whose `channels` hold what `source(engine, verified, node)`, a Prefix, holds; the rest is right.

    tree_only: the engine's own pass along a chain is left alone.
    """

    def commit(engine, verified, node, right):
        if tree_only and verified.plan is None:
            return right
        return mixed(engine, right, source(engine, verified, node), channels)

    return commit


def mixed(engine, right, other, channels):
    """`right` with some channels of `other`, both Prefixes of the transformers engine."""
    cache = engine.caches.fork(right.cache)
    for mine, theirs in zip(cache.layers, other.cache.layers, strict=True):
        for channel, name in (("recurrent", "recurrent_states"), ("conv", "conv_states")):
            if channel in channels and hasattr(theirs, name):
                setattr(mine, name, {number: x.clone() for number, x in getattr(theirs, name).items()})
        if "keys" in channels and getattr(theirs, "keys", None) is not None:
            mine.keys, mine.values = theirs.keys, theirs.values
    return replace(right, cache=cache)


def before(engine, verified, node):
    """The commit never happened."""
    return verified.prefix


def block_end(engine, verified, node):
    """The state after the last row of the block, however few of its rows were accepted."""
    return engine.commit(verified, len(verified.tree) - 1)


def stale_slots(engine) -> Faulty:
    """Every commit is right, but a plain step after it reads the recurrent slots from before the accept."""
    slots = {}

    def commit(_, verified, node, right):
        slots[id(right)] = (right, verified.prefix)
        return right

    def step(prefix, token):
        if id(prefix) in slots:
            prefix = mixed(engine, prefix, slots[id(prefix)][1], ("recurrent", "conv"))
        return engine.step(prefix, token)

    return Faulty(engine, commit=commit, step=step)


def wired(**channels):
    """What another wiring of the commit would have stored, such as commit='flat': rows by depth, not by node."""

    def source(engine, verified, node):
        if verified.plan is None:
            return engine.commit(verified, node)
        plan = replace(FORKED, **channels).plan(verified.tree)
        kept = {channel: getattr(plan, channel) for channel in channels}
        return engine.commit(replace(verified, plan=replace(verified.plan, **kept)), node)

    return source


def replayed_without_keys(engine, verified, node):
    """The accepted tokens run again to rebuild the states, behind an attention cache that is empty."""
    cache = engine.caches.fork(verified.prefix.cache)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    prefix = replace(verified.prefix, cache=cache)
    for token in verified.tree.path_tokens(node):
        _, prefix = engine.step(prefix, token)
    return prefix


def rounded(engine, verified, node):
    """States stored in bf16."""
    right = engine.commit(verified, node)
    cache = engine.caches.fork(right.cache)
    for layer in cache.layers:
        for number, x in getattr(layer, "recurrent_states", {}).items():
            layer.recurrent_states[number] = x.to(torch.bfloat16).to(x.dtype)
    return replace(right, cache=cache)
