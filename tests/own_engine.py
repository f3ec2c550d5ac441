"""Engines of one's own, as docs/guide.md says they are written: one recurrent layer, and as little else as it takes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ddtree_check.engines import BaseEngine
from ddtree_check.model.small_shapes import VOCAB
from ddtree_check.model.wiring import FORKED

WIDTH = 8


class Least(BaseEngine):
    """What must be there: a prefill, and a verify that runs each row from its parent's state."""

    def __init__(self, model=None, **settings):
        draw = torch.Generator().manual_seed(0)
        shapes = {"table": (VOCAB, WIDTH), "mix": (WIDTH, WIDTH), "out": (WIDTH, VOCAB)}
        self.weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}

    def prefill(self, tokens):
        state = torch.zeros(WIDTH)
        for token in tokens:
            state = self.run(state, token)
        return self.standing(state)

    def verify(self, prefix, tree, wiring):
        states = {-1: prefix.state}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            states[node] = self.run(states[parent if wiring == FORKED else node - 1], token)
        rows = torch.stack([states[node] @ self.weights["out"] for node in range(len(tree))])
        return SimpleNamespace(states=states, logits=rows)

    def run(self, state, token):
        return torch.tanh(state @ self.weights["mix"] + self.weights["table"][token])

    def standing(self, state):
        return SimpleNamespace(state=state, logits=state @ self.weights["out"])


class Steps(Least):
    """With plain decoding, which everything is compared with."""

    def step(self, prefix, token):
        after = self.standing(self.run(prefix.state, token))
        return after.logits, after


class Unforked(Steps):
    """The fault: rows are run in a row."""

    def verify(self, prefix, tree, wiring):
        return super().verify(prefix, tree, None)


class Duck:
    """The same without a base class, and without what the contract has a default for."""

    @classmethod
    def load(cls, model, **settings):
        return cls()

    def __init__(self):
        inner = Steps()
        self.prefill, self.step, self.verify = inner.prefill, inner.step, inner.verify
