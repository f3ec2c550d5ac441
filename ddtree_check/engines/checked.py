"""An engine whose answers hold the tokens and rows that were asked for, or one line that says which pass had others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.errors import Unsupported, UsageError


class Checked:
    """An engine, looked at as it is used: broadcasting would turn a missing row or token into a small difference.

    size: columns of the vocabulary that are tokens. What follows them is padding, which some engines have in one kind
    of pass and not in another, and is cut off in every pass. None for all that the engine says it has.
    Raises UsageError naming the pass, the shape that came and the one expected. All else is the engine's own.
    """

    def __init__(self, engine: Any, size: int | None = None):
        self._engine = engine
        if size is not None:
            self.vocab_size = size
        kinds = (type(inner) for inner in self._wrapped())
        self._foreign = next((kind.__name__ for kind in kinds if not kind.__module__.startswith("ddtree_check.")), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, tokens: Sequence[int]):
        return self._cut_in(self._call("prefill", tokens), "prefill")

    def step(self, prefix, token: int):
        logits, after = self._call("step", prefix, token)
        return self._rows("step", logits), self._cut_in(after)

    def decode(self, prefix, tree, *, batched: bool = False):
        return self._rows("ar (decode)", self._call("decode", prefix, tree, batched=batched), len(tree))

    def verify(self, prefix, tree, wiring):
        what = f"{wiring.name if wiring else 'linear'} (verify)"
        return self._cut_in(self._call("verify", prefix, tree, wiring), what, len(tree))

    def forward(self, paths: Sequence[Sequence[int]], keep: int):
        return self._rows("forward", self._call("forward", paths, keep), len(paths), keep)

    def commit(self, verified, node: int):
        self._offered("commit")
        return self._cut_in(self._call("commit", verified, node))

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

    def _cut_in(self, holder, what: str | None = None, *rows: int):
        """A Prefix, or what verify gave, without padding in its logits; the pass is named where they must be there."""
        logits = self._cut(holder.logits) if what is None else self._rows(what, holder.logits, *rows)
        return holder if logits is holder.logits else replace(holder, logits=logits)

    def _cut(self, logits):
        wide = isinstance(logits, torch.Tensor) and logits.ndim and logits.shape[-1] > self.vocab_size
        return logits[..., : self.vocab_size] if wide else logits

    def _rows(self, what: str, logits, *rows: int) -> torch.Tensor:
        logits, wanted = self._cut(logits), (*rows, self.vocab_size)
        got = getattr(logits, "shape", None)
        if got is None or tuple(got) != wanted:
            shape = type(logits).__name__ if got is None else list(got)
            raise UsageError(f"engine: {what} gave logits {shape}, expected {list(wanted)}: rows and vocabulary")
        return logits
