"""A trace as an engine: passes that were run elsewhere, given back row by row. It runs nothing and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import Unsupported, UsageError
from ..model.wiring import Attention, Conv, Layer, State, Wiring
from ..trace.model import Pass, Step, Stored, TopLogits, Trace
from ..trace.read import read_trace
from .contract import BaseEngine

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
OPS = {"conv": Conv, "state": State, "attention": Attention}


class TraceEngine(BaseEngine):
    """The passes of a trace as tensors. Its steps take the place of prompts and prefixes: see `rows`.

    `supports` refuses every wiring, and running anything raises Unsupported: a trace holds what was run.
    """

    name = "trace"

    def __init__(self, trace: Trace):
        self.trace, self.header = trace, trace.header
        self.vocab_size, self.max_length = self.header.vocab_size, None
        self.exact_control = self.header.exact_control
        self.layers = None if self.header.layers is None else layers_from_json(self.header.layers)
        self.dtype = getattr(torch, trace.dtype)
        self.provenance = {"name": self.header.model, "weights": "traced"}

    @classmethod
    def load(cls, path: str | Path, **_) -> TraceEngine:
        """Return a trace by its path. Raises UsageError naming the file and what is wrong with it."""
        return cls(read_trace(path))

    def describe(self) -> dict[str, Any]:
        environment = {
            name: value for name, value in self.header.environment.items() if name not in ("engine", "dtype")
        }
        return {
            "device": "unknown",
            **environment,
            "engine": self.header.engine,
            "engine_version": self.header.engine_version,
            "dtype": self.trace.dtype,
            "computed_in": self.header.dtype,
            "trace": self.trace.path.name,
        }

    def rows(self, step: Step, mode: str) -> tuple[torch.Tensor | TopLogits, np.ndarray] | None:
        """Return the logits of a mode by node, [n, vocabulary] or a top k, and which nodes have a row, bool [n].

        A node's row comes from the first pass that holds it; a node without one holds another's. None if no pass of the
        mode was recorded. Raises UsageError if full rows and top k are mixed in one mode, or ids are not distinct.
        """
        passes = step.of(mode)
        if not passes:
            return None
        if len({0 if part.full else part.arrays["top_ids"].shape[1] for part in passes}) > 1:
            raise UsageError(f"step {step.id}: {mode} mixes full rows and top k, expected one of them in a mode")
        parts, owner = [], np.full(step.tree.n, -1)
        at = 0
        for part in passes:
            taken = [row for row, node in enumerate(part.nodes) if node >= 0 and owner[node] < 0]
            owner[[part.nodes[row] for row in taken]] = np.arange(at, at + len(taken))
            at += len(taken)
            parts.append(self._read(step, part, taken))
        measured = owner >= 0
        if not measured.any():
            return None
        where = np.where(measured, owner, owner[measured][0])
        whole = parts[0] if len(parts) == 1 else _join(parts)
        in_order = len(where) == at and (where == np.arange(at)).all()
        return whole if in_order else whole[where], measured

    def _read(self, step: Step, part: Pass, rows: Sequence[int]) -> torch.Tensor | TopLogits:
        if part.full:
            return tensor(part.arrays["logits"])[rows]
        ids = torch.from_numpy(part.arrays["top_ids"].read().astype(np.int64))[rows]
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if wrong.any() or any(len(set(row)) != len(row) for row in ids.tolist()):
            raise UsageError(
                f"step {step.id}: top_ids of {part.mode} are not distinct ids in 0..{self.vocab_size - 1} in every row"
            )
        lse = part.arrays.get("lse")
        return TopLogits(
            ids, tensor(part.arrays["top_logits"])[rows], None if lse is None else tensor(lse).double()[rows]
        )

    # What a live engine does

    def supports(self, wiring: Wiring | None) -> str | None:
        return "a trace holds passes that were run; it runs none"

    def prefill(self, tokens: Sequence[int]):
        raise Unsupported(f"engine trace: {self.supports(None)}; use compare --engine trace PATH")

    step = decode = verify = commit = contents = forward = prefill


def tensor(array: Stored) -> torch.Tensor:
    """Return a stored array of floats as a tensor of its own dtype."""
    bits = array.read()
    if array.dtype == "BF16":
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits).to(DTYPES[array.dtype])


def layers_to_json(layers: Sequence[Layer]) -> list:
    """Return layers in the form of a trace's header."""
    names = {kind: name for name, kind in OPS.items()}
    return [[layer.kind, [[[names[type(op)], *op] for op in branch] for branch in layer.branches]] for layer in layers]


def layers_from_json(data: Sequence) -> tuple[Layer, ...]:
    return tuple(
        Layer(kind, tuple(tuple(OPS[name](*values) for name, *values in branch) for branch in branches))
        for kind, branches in data
    )


def _join(parts: Sequence[torch.Tensor | TopLogits]) -> torch.Tensor | TopLogits:
    if isinstance(parts[0], TopLogits):
        lse = [part.lse for part in parts]
        return TopLogits(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.values for part in parts]),
            None if any(part is None for part in lse) else torch.cat(lse),
        )
    return torch.cat(parts)
