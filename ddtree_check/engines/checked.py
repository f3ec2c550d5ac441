"""An engine whose answers have the shapes that were asked for, or one line that says which pass had another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Unsupported, UsageError


class Checked:
    """An engine, looked at as it is used: broadcasting would turn a missing row or token into a small difference.

    Raises UsageError naming the pass, the shape that came and the one expected. All else is the engine's own.
    """

    def __init__(self, engine: Any):
        self._engine = engine._engine if isinstance(engine, Checked) else engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, tokens: Sequence[int]):
        prefix = self._engine.prefill(tokens)
        self._expect("prefill", prefix.logits)
        return prefix

    def step(self, prefix, token: int):
        logits, after = self._engine.step(prefix, token)
        self._expect("step", logits)
        return logits, after

    def decode(self, prefix, tree, *, batched: bool = False):
        logits = self._engine.decode(prefix, tree, batched=batched)
        self._expect("ar (decode)", logits, len(tree))
        return logits

    def verify(self, prefix, tree, wiring):
        verified = self._engine.verify(prefix, tree, wiring)
        self._expect(f"{wiring.name if wiring else 'linear'} (verify)", verified.logits, len(tree))
        return verified

    def commit(self, verified, node: int):
        return self._offered("commit")(verified, node)

    def contents(self, prefix):
        return self._offered("contents")(prefix)

    def _offered(self, name: str):
        """The engine's own `name`, which a wrapper on the way may only pass on. Raises Unsupported if there is none."""
        inner = self._engine
        while inner is not None:
            if not hasattr(inner, name):
                raise Unsupported(f"engine {self.describe().get('engine', type(inner).__name__)} has no {name}")
            inner = vars(inner).get("_engine") if hasattr(inner, "__dict__") else None
        return getattr(self._engine, name)

    def forward(self, paths: Sequence[Sequence[int]], keep: int):
        logits = self._engine.forward(paths, keep)
        self._expect("forward", logits, len(paths), keep)
        return logits

    def _expect(self, what: str, logits, *rows: int) -> None:
        got, wanted = getattr(logits, "shape", None), (*rows, self._engine.vocab_size)
        if got is None or tuple(got) != wanted:
            shape = type(logits).__name__ if got is None else list(got)
            raise UsageError(f"engine: {what} gave logits {shape}, expected {list(wanted)}: rows and vocabulary")
