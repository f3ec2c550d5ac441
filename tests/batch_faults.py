"""Engines whose passes over several requests have one thing wrong, for tests that must see the batch check go red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch


class Host:
    """An engine like `engine`, but for `claims`, and for its batched passes: hooks by name, called as
    hook(host, the right pass, *its arguments)."""

    def __init__(self, engine, hooks: dict[str, Callable] | None = None, **claims):
        self._engine, self._hooks, self.pool = engine, hooks or {}, []
        self.__dict__.update(claims)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def prefill(self, tokens):
        self.pool.append(self._engine.prefill(tokens))
        return self.pool[-1]

    def batches(self):
        return Hooked(self, self._engine.batches(), self._hooks)


class Hooked:
    def __init__(self, host: Host, batches, hooks: dict[str, Callable]):
        self._host, self._batches, self._hooks = host, batches, hooks

    def __getattr__(self, name):
        right, hook = getattr(self._batches, name), self._hooks.get(name)
        return (lambda *args, **kwargs: hook(self._host, right, *args, **kwargs)) if hook else right


def with_layer(host, prefix, other, layer: int | None, name: str):
    """`prefix` with the recurrent_states or conv_states that `other` holds, in one layer or in all."""
    cache = host.caches.fork(prefix.cache)
    for index, (mine, theirs) in enumerate(zip(cache.layers, other.cache.layers, strict=True)):
        if hasattr(theirs, name) and layer in (None, index):
            setattr(mine, name, {number: x.clone() for number, x in getattr(theirs, name).items()})
    return replace(prefix, cache=cache)


def neighbours_state(layer: int, name: str) -> Callable:
    """Each request starts from what the next one in the batch carries in this layer."""

    def verify(host, right, prefixes, trees, wiring, **how):
        others = [*prefixes[1:], *prefixes[:1]]
        mixed = [with_layer(host, a, b, layer, name) for a, b in zip(prefixes, others, strict=True)]
        return right(mixed, trees, wiring, **how)

    return verify


def idle_writes_a_live_slot(host, right, prefixes, trees, wiring, **how):
    """A row that only fills the batch writes its state where a request's stands that waits for its turn."""
    found = right(prefixes, trees, wiring, **how)
    if how.get("idle") and len(prefixes) > 1:
        live = [prefix for prefix in host.pool if prefix not in prefixes]
        live[0].cache.layers[1].recurrent_states[0].zero_()
    return found


def recurrent_rows_stay(host, right, prefixes, order, **how):
    """Keys and windows move with their rows, recurrent states stay where they are."""
    found = right(prefixes, order, **how)
    here = [prefixes[min(place, len(prefixes) - 1)] for place in range(len(order))]
    return [
        with_layer(host, moved, stayed, None, "recurrent_states") for moved, stayed in zip(found, here, strict=True)
    ]


def noisy(size: float) -> Callable:
    """Another order of sums, as soon as a pass has more than one request: equal for all, and the same in every run."""

    def verify(host, right, prefixes, trees, wiring, **how):
        found = right(prefixes, trees, wiring, **how)
        wide = len(prefixes) + how.get("idle", 0) > 1
        return [replace(v, logits=v.logits + (jitter(v.logits, size) if wide else 0)) for v in found]

    return verify


def jitter(logits: torch.Tensor, size: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return size * (2 * torch.rand(logits.shape[-1], generator=draw) - 1).to(logits)
