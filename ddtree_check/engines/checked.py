"""An engine whose answers have the shapes that were asked for, or one line that says which pass had another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import Unsupported, UsageError


class Checked:
    """An engine, looked at as it is used: broadcasting would turn a missing row or token into a small difference.

    Raises UsageError naming the pass, the shape that came and the one expected. All else is the engine's own.
    """

    def __init__(self, engine: Any):
        self._engine = engine._engine if isinstance(engine, Checked) else engine
        kinds = (type(inner) for inner in self._wrapped())
        self._foreign = next((kind.__name__ for kind in kinds if not kind.__module__.startswith("ddtree_check.")), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, tokens: Sequence[int]):
        prefix = self._call("prefill", tokens)
        self._expect("prefill", prefix.logits)
        return prefix

    def step(self, prefix, token: int):
        logits, after = self._call("step", prefix, token)
        self._expect("step", logits)
        return logits, after

    def decode(self, prefix, tree, *, batched: bool = False):
        logits = self._call("decode", prefix, tree, batched=batched)
        self._expect("ar (decode)", logits, len(tree))
        return logits

    def verify(self, prefix, tree, wiring):
        verified = self._call("verify", prefix, tree, wiring)
        self._expect(f"{wiring.name if wiring else 'linear'} (verify)", verified.logits, len(tree))
        return verified

    def commit(self, verified, node: int):
        self._offered("commit")
        return self._call("commit", verified, node)

    def contents(self, prefix):
        self._offered("contents")
        return self._call("contents", prefix)

    def _call(self, name: str, *args, **how):
        """A pass of the engine. What a caller's own engine raises is its own, and told in one line."""
        try:
            return getattr(self._engine, name)(*args, **how)
        except (UsageError, Unsupported, MemoryError):
            raise
        except Exception as error:
            if self._foreign is None:
                raise
            raise UsageError(
                f"engine: {name} of {self._foreign} raised {type(error).__name__}: {str(error) or 'no words'}; "
                "run it alone to see where"
            ) from error

    def _offered(self, name: str) -> None:
        """Raises Unsupported if the engine has no `name`, which a wrapper on the way may only pass on."""
        for inner in self._wrapped():
            if not hasattr(inner, name):
                raise Unsupported(f"engine {self.describe().get('engine', type(inner).__name__)} has no {name}")

    def _wrapped(self) -> Iterator[Any]:
        """The engine, and what it wraps."""
        inner = self._engine
        while inner is not None:
            yield inner
            inner = vars(inner).get("_engine") if hasattr(inner, "__dict__") else None

    def forward(self, paths: Sequence[Sequence[int]], keep: int):
        logits = self._call("forward", paths, keep)
        self._expect("forward", logits, len(paths), keep)
        return logits

    def _expect(self, what: str, logits, *rows: int) -> None:
        got, wanted = getattr(logits, "shape", None), (*rows, self._engine.vocab_size)
        if got is None or tuple(got) != wanted:
            shape = type(logits).__name__ if got is None else list(got)
            raise UsageError(f"engine: {what} gave logits {shape}, expected {list(wanted)}: rows and vocabulary")
