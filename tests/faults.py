"""Engines with one thing wrong, for tests that must see a check go red."""

from __future__ import annotations

from dataclasses import replace

from ddtree_check.wiring import FORKED, UNFORKED


class Faulty:
    """An engine that behaves like `engine` but for what a keyword replaces.

    forked, unforked   the wiring that really runs when that mode is asked for
    linear             a function of the logits of the engine's own multi-token pass
    decode             a function (logits, number of the call) of decoded logits
    forward            a function of the logits of full forward passes
    """

    def __init__(self, engine, *, forked=FORKED, unforked=UNFORKED, linear=None, decode=None, forward=None, **claims):
        self._engine, self._wirings = engine, {FORKED: forked, UNFORKED: unforked}
        self._linear, self._decode, self._forward, self._calls = linear, decode, forward, 0
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

    def prefill(self, tokens):
        return replace(self._engine.prefill(tokens))
