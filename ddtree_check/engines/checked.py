"""Engines around engines: one that looks at every answer, and what a wrapper of one's own begins as."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch

from ..base.errors import Broken, Unsupported, UsageError
from ..model.wiring import Layer
from .contract import ASSUMED, DECODING, BaseEngine, Engine, Watched, lacks, named

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Around:
    """An engine around another, which answers for all that a subclass does not change."""

    def __init__(self, engine: Any):
        self._engine = engine if isinstance(engine, (BaseEngine, Around)) else Checked(engine)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":  # a copy that is being made has no engine to ask yet
            raise AttributeError(name)
        return getattr(self._engine, name)

    @property
    def fresh(self) -> Any:
        return self  # what it changes belongs to its passes


class Checked(Around):
    """An engine made complete by the contract's defaults, and looked at as it is used.

    Broadcasting would turn a missing row or token into a small difference, so every answer must have its shape. size:
    columns of the vocabulary that are tokens. What follows them is padding, which some engines have in one kind of pass
    and not in another, and is cut off in every pass. None for all that the engine has. name: what messages call it.
    Logits that require a gradient are detached.
    Raises UsageError naming the engine, the pass, what came and what was expected; Broken for what a pass raises.
    """

    def __init__(self, engine: Any, size: int | None = None, name: str | None = None):
        if type(engine) is Checked:  # looked at once
            size, name, engine = size or engine.vocab_size, name or engine.name, engine._engine
        self._engine = engine
        ours = type(engine).__module__.startswith("ddtree_check.")
        self.name = name or (named(engine) if ours else type(engine).__name__)
        for part in ("prefill", "verify"):
            self._expect(callable(getattr(engine, part, None)), "has no", part, "prefill and verify at least")
        whole = self._part("vocab_size")
        if whole is None:
            whole = self._guarded("prefill", lambda: engine.prefill((0,)).logits.shape[-1])
        good = isinstance(whole, Integral) and not isinstance(whole, bool) and whole >= 2
        self._expect(good, "vocab_size", repr(whole), "a number of at least 2")
        if size is not None and size > whole:
            raise UsageError(f"vocab-size: got {size}, expected at most the model's {whole}")
        self.vocab_size = size or int(whole)
        layers = self._part("layers")
        self.layers = ASSUMED if layers is None else layers
        good = isinstance(self.layers, Sequence) and all(isinstance(layer, Layer) for layer in self.layers)
        self._expect(
            good and len(self.layers) > 0, "layers", repr(self.layers), "a Layer of ddtree_check.model.wiring each"
        )
        provenance = self._part("provenance")
        self._expect(isinstance(provenance, Mapping), "provenance", repr(provenance), "a mapping")
        self.provenance = dict(provenance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_engine":
            raise AttributeError(name)
        return partial(self._call, name) if callable(vars(Engine).get(name)) else self._part(name)

    def describe(self) -> dict[str, Any]:
        described = self._call("describe")
        self._expect(isinstance(described, dict), "describe() gave", repr(described), "a dict with a dtype")
        for key in ("dtype", "judged_as"):
            value = described.get(key)
            good = value in DTYPES if isinstance(value, str) else value is None and key == "judged_as"
            self._expect(good, f"describe() gave {key}", repr(value), f"one of {', '.join(DTYPES)}")
        try:
            json.dumps(described)
        except (TypeError, ValueError) as error:
            self._expect(False, "describe():", str(error), "values that JSON has")
        return {"engine": self.name} | described

    def supports(self, wiring) -> str | None:
        reason = self._call("supports", wiring)
        good = reason is None or (isinstance(reason, str) and reason)
        self._expect(good, "supports gave", repr(reason), "None or the reason as text")
        return reason

    def decodes(self) -> str | None:
        if isinstance(self._engine, (BaseEngine, Around)):
            return self._guarded("decodes", self._engine.decodes)
        duck = any(getattr(self._engine, name, None) for name in ("step", "decode"))
        return None if duck else str(lacks(self, DECODING))

    def prefill(self, tokens: Sequence[int]):
        return self._holder("prefill", self._call("prefill", tokens))

    def step(self, prefix, token: int):
        return self._pair("step", self._call("step", prefix, token))

    def decode(self, prefix, tree, *, batched: bool = False):
        return self._logits("ar (decode)", self._call("decode", prefix, tree, batched=batched), tree.n)

    def verify(self, prefix, tree, wiring):
        what = f"{wiring.name if wiring else 'linear'} (verify)"
        return self._holder(what, self._call("verify", prefix, tree, wiring), tree.n)

    def forward(self, paths: Sequence[Sequence[int]], keep: int):
        return self._logits("forward", self._call("forward", paths, keep), len(paths), keep)

    def chosen(self, *rows):
        return self._call("chosen", *rows)

    def commit(self, verified, node: int):
        return self._holder("commit", self._call("commit", verified, node), whole=False)

    def contents(self, prefix):
        answer = self._call("contents", prefix)
        good = (
            isinstance(answer, tuple)
            and len(answer) == 2
            and isinstance(answer[0], int)
            and isinstance(answer[1], list)
        )
        good = good and all(isinstance(channels, dict) for channels in answer[1])
        good = good and all(isinstance(x, torch.Tensor) for channels in answer[1] for x in channels.values())
        self._expect(good, "contents gave", type(answer).__name__, "(tokens, a dict of tensors for each layer)")
        return answer

    def batches(self):
        batches = self._call("batches")
        return batches if isinstance(batches, str) else CheckedBatches(self, batches)

    def exact(self) -> Checked:
        return Checked(self._call("exact"), self.vocab_size, f"{self.name} in float64")

    @contextlib.contextmanager
    def watch(self, layers: Sequence[int]) -> Iterator[Watched]:
        with contextlib.ExitStack() as undo:
            yield self._guarded("watch", lambda: undo.enter_context(self._part("watch")(layers)))

    def _part(self, name: str) -> Any:
        """Return what the engine offers under a name, or the contract's default, made of parts that are looked at."""
        if name not in vars(Engine):
            return getattr(self._engine, name)
        default = vars(Engine)[name]
        part = getattr(self._engine, name, default)
        if getattr(part, "__func__", part) is not default:
            return part
        return default.__get__(self) if callable(default) else default

    @property
    def fresh(self) -> Any:
        return getattr(self._engine, "fresh", self._engine)

    def _call(self, name: str, *args, **how) -> Any:
        return self._guarded(name, lambda: self._part(name)(*args, **how))

    def _guarded(self, what: str, run: Callable) -> Any:
        try:
            return run()
        except (UsageError, Unsupported):
            raise
        except SystemExit as error:
            raise UsageError(f"engine {self.name}: {what} {told(error)}") from error
        except Exception as error:
            raise Broken(f"engine {self.name}: {what} {told(error)}") from error

    def _expect(self, good: object, what: str, got: str, expected: str) -> None:
        if not good:
            raise UsageError(f"engine {self.name}: {what} {got:.200}, expected {expected}")

    def _holder(self, what: str, holder: Any, *rows: int, whole: bool = True) -> Any:
        """Return a Prefix or a Verified with its logits as they are used. whole: they must be there."""
        try:
            logits = holder.logits
        except AttributeError:
            raise Broken(f"engine {self.name}: {what} gave {type(holder).__name__}, expected logits in it") from None
        if logits is None and not whole:
            return holder
        fit = self._logits(what, logits, *rows)
        if fit is logits:
            return holder
        holder = copy.copy(holder)
        self._guarded(f"a copy of what {what} gave", lambda: object.__setattr__(holder, "logits", fit))
        return holder

    def _logits(self, what: str, logits: Any, *rows: int) -> torch.Tensor:
        """Return logits [*rows, vocabulary] without padding and gradients."""
        wanted = [*rows, self.vocab_size]
        kind = type(logits).__name__ if not isinstance(logits, torch.Tensor) else None
        if kind is None and (logits.dtype not in DTYPES.values() or logits.device.type == "meta"):
            kind = f"of {logits.dtype} on {logits.device}".replace("torch.", "")
        if kind is None:
            logits = logits.detach() if logits.requires_grad else logits
            if logits.ndim and logits.shape[-1] > self.vocab_size:
                logits = logits[..., : self.vocab_size]
            if list(logits.shape) == wanted:
                return logits
            kind = list(logits.shape)
        raise Broken(
            f"engine {self.name}: {what} gave logits {kind}, expected {wanted}: rows and vocabulary, "
            f"a tensor of {', '.join(DTYPES)}"
        )

    def _pair(self, what: str, answer: Any) -> tuple[torch.Tensor, Any]:
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Broken(f"engine {self.name}: {what} gave {type(answer).__name__}, expected (logits, Prefix)")
        return self._logits(what, answer[0]), self._holder(what, answer[1], whole=False)


class CheckedBatches:
    """Passes over several requests, looked at as those of one."""

    def __init__(self, engine: Checked, batches: Any):
        self._engine, self._batches = engine, batches

    def prefill(self, prompts, **how) -> list:
        return [self._engine._holder("prefill (batch)", prefix) for prefix in self._call("prefill", prompts, **how)]

    def step(self, prefixes, tokens, **how) -> list[tuple]:
        return [self._engine._pair("step (batch)", pair) for pair in self._call("step", prefixes, tokens, **how)]

    def verify(self, prefixes, trees, wiring, **how) -> list:
        passes = self._call("verify", prefixes, trees, wiring, **how)
        return [
            self._engine._holder("verify (batch)", verified, tree.n)
            for verified, tree in zip(passes, trees, strict=True)
        ]

    def reorder(self, prefixes, order) -> list:
        moved = self._call("reorder", prefixes, order)
        return [self._engine._holder("reorder (batch)", prefix, whole=False) for prefix in moved]

    def _call(self, name: str, *args, **how) -> list:
        return self._engine._guarded(f"{name} (batch)", lambda: list(getattr(self._batches, name)(*args, **how)))


def complete(engine: Any, size: int | None = None) -> Checked:
    """Return the engine as it is used: looked at, made complete, with so many tokens (None for all that it has)."""
    return engine if isinstance(engine, Checked) and size in (None, engine.vocab_size) else Checked(engine, size)


def told(error: BaseException) -> str:
    """Return in words what code of a caller's own raised."""
    return (
        f"raised {type(error).__name__}: {' '.join(str(error).split()) or 'no words':.300}; run it alone to see where"
    )
