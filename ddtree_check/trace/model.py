"""The parts of a trace: its header, steps, passes and commits, and the arrays that a file stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import UsageError
from ..tree.draft_tree import DraftTree

FORMAT = "ddtree-trace/1"
SUFFIX = ".safetensors"
PART = "part"  # a file in the folder of a trace whose run is under way, or was interrupted
PASSES = ("ar", "linear", "tree_forked", "tree_unforked", "chain", "forward", "repeat", "own")
# What a step may say was committed: by whom, see docs/trace.md.
COMMITS = ("prefill", "ar", "linear", "chain", "tree_forked", "tree_unforked")
DTYPES = ("float32", "bfloat16", "float16", "float64")
LISTS = ("nodes", "prompt_tokens", "input_ids", "positions", "parents", "next_token", "next_sibling", "chosen")
STORED = {  # safetensors' names of what may stand in a file; bfloat16 is kept as its bits
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
}
FLOATS, INTEGERS = ("F64", "F32", "F16", "BF16"), ("I64", "I32")


# --- what a trace holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """Who computed the passes and in which dtype; the fields are those of docs/trace.md. Raises ValueError."""

    engine: str
    model: str
    dtype: str
    vocab_size: int
    engine_version: str | None = None
    exact_control: bool = False
    layers: list | None = None
    sampling: dict | None = None
    environment: dict = field(default_factory=dict)
    created: str | None = None

    def __post_init__(self):
        for name in ("engine", "model"):
            _text(f"header: {name}", getattr(self, name))
        for name in ("engine_version", "created"):
            if getattr(self, name) is not None:
                _text(f"header: {name}", getattr(self, name))
        if self.dtype not in DTYPES:
            raise ValueError(f"header: dtype {self.dtype!r:.60}, expected one of {', '.join(DTYPES)}")
        if not _whole(self.vocab_size) or not 2 <= self.vocab_size < 2**31:
            raise ValueError(f"header: vocab_size {self.vocab_size!r:.60}, expected a number from 2 to 2^31 - 1")
        if not isinstance(self.exact_control, bool):
            raise ValueError(f"header: exact_control {self.exact_control!r:.60}, expected true or false")
        if not isinstance(self.environment, dict):
            raise ValueError(f"header: environment {self.environment!r:.60}, expected an object")
        if self.layers is not None:
            _check_layers(self.layers)
        if self.sampling is not None and not isinstance(self.sampling, dict):
            raise ValueError(f"header: sampling {self.sampling!r:.60}, expected an object such as {{'temperature': 1}}")

    @classmethod
    def from_json(cls, data: object) -> Header:
        """Other keys are left alone."""
        if not isinstance(data, dict):
            raise ValueError(f"header: got {type(data).__name__}, expected an object")
        missing = [name for name in ("engine", "model", "dtype", "vocab_size") if name not in data]
        if missing:
            raise ValueError(f"header: no {missing[0]!r}, expected engine, model, dtype and vocab_size")
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in known.items() if value is not None or name != "environment"})

    def to_json(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Stored:
    """One array of a file: where it stands and what it is; `read` takes the memory."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    at: int

    def read(self) -> np.ndarray:
        """A copy; bfloat16 as its bits, uint16. Raises UsageError if the file has shrunk meanwhile."""
        count = int(np.prod(self.shape, dtype=object)) if self.shape else 1
        try:
            with self.file.open("rb") as file:
                found = np.fromfile(file, STORED[self.dtype], count, offset=self.at)
        except OSError as error:
            raise UsageError(f"{self.file}: {error.strerror}, expected a readable file") from None
        if found.size != count:
            raise UsageError(f"{self.file}: ended early, expected {count} values at byte {self.at}")
        return found.reshape(self.shape)


@dataclass(frozen=True)
class Pass:
    """One recorded pass. rows: how many are stored; nodes[rows]: the node of each, -1 for padding; width: rows as run.

    arrays by the name of docs/trace.md without `p{i}.`; lists: the step's lists of the pass, as they stand there.
    """

    mode: str
    wiring: str
    rows: int
    nodes: tuple[int, ...]
    width: int
    arrays: Mapping[str, Stored]
    lists: Mapping[str, list]

    @property
    def full(self) -> bool:
        return "logits" in self.arrays


@dataclass(frozen=True)
class Committed:
    """What one commit of the path to a node left: arrays `state.{layer}.{channel}` in the form of `Engine.contents`.

    mode: who committed it, of COMMITS. position: committed tokens, the path included, if it is said. probe: tokens that
    were fed one by one afterwards; `logits` [tokens, vocabulary] then are those after each.
    """

    mode: str
    path: tuple[int, ...]
    arrays: Mapping[str, Stored]
    position: int | None = None
    probe: tuple[int, ...] = ()
    pattern: str = "recorded"


@dataclass(frozen=True)
class Step:
    """One prompt and tree, and the passes over it. `accepted` and `bonus` are what the engine did, if it says."""

    id: str
    file: Path
    prompt_tokens: tuple[int, ...]
    tree: DraftTree
    passes: tuple[Pass, ...]
    request: str | None = None
    round: int | None = None
    accepted: tuple[int, ...] | None = None
    bonus: int | None = None
    source: dict = field(default_factory=dict)
    commits: tuple[Committed, ...] = ()

    def of(self, mode: str) -> list[Pass]:
        return [found for found in self.passes if found.mode == mode]

    def order(self, mode: str) -> list[list[int]]:
        """The nodes whose rows each pass of a mode is the first to hold, parents before children."""
        seen: set[int] = set()
        found = []
        for one in self.of(mode):
            fresh = sorted(node for node in one.nodes if node >= 0 and node not in seen)
            seen |= set(fresh)
            found += [fresh] if fresh else []
        return found


@dataclass(frozen=True)
class Trace:
    """A header and its steps, in the order of their files. part: the run that recorded it has not ended."""

    path: Path
    header: Header
    steps: tuple[Step, ...]
    part: bool = False

    @cached_property
    def dtype(self) -> str:
        """The coarsest of the dtype that was computed in and those that logits are stored in: the rounding there is."""
        stored = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        order = ("float64", "float32", "float16", "bfloat16")
        found = {self.header.dtype}
        for step in self.steps:
            for one in step.passes:
                found |= {stored[array.dtype] for name, array in one.arrays.items() if name in ("logits", "top_logits")}
        return max(found, key=order.index)


@dataclass(frozen=True, eq=False)
class TopLogits:
    """The k largest logits of each row: tensors ids int64 [n, k] and values [n, k] of any floating dtype, in any order.

    lse [n] float64 is the log-sum-exp of the whole rows, None if it is not known.
    """

    ids: Any
    values: Any
    lse: Any | None = None

    def __getitem__(self, rows) -> TopLogits:
        return TopLogits(self.ids[rows], self.values[rows], None if self.lse is None else self.lse[rows])


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Raw:
    """A step file whose container is sound: its header and step as JSON objects, nothing more is known of them."""

    file: Path
    header: dict
    step: dict
    arrays: dict[str, Stored]


def _check_layers(layers: object) -> None:
    kinds = {"conv": (2, 2), "state": (2, 2), "attention": (1, 3)}
    for place, layer in enumerate(layers if isinstance(layers, list) else [None]):
        good = isinstance(layer, (list, tuple)) and len(layer) == 2 and isinstance(layer[0], str)
        good, ops = good and isinstance(layer[1], (list, tuple)), []
        if good:
            good = all(isinstance(branch, (list, tuple)) for branch in layer[1])
            ops = [op for branch in layer[1] for op in branch] if good else []
        for op in ops:
            known = isinstance(op, (list, tuple)) and op and isinstance(op[0], str) and op[0] in kinds
            good &= bool(known) and kinds[op[0]][0] <= len(op) <= kinds[op[0]][1]
            if good and op[0] == "conv":
                good = _whole(op[1]) and 1 <= op[1] <= 4096
            elif good and op[0] == "state":
                good = isinstance(op[1], str)
            elif good:
                good = (len(op) < 2 or op[1] is None or _whole(op[1])) and (len(op) < 3 or isinstance(op[2], bool))
        if not good:
            raise ValueError(
                f"header: layers[{place}] is {layer!r:.80}, expected [kind, [[operation, ...], ...]], operations such "
                'as ["conv", 4], ["state", "gated_delta"], ["attention", null, true]'
            )


def _json(what: str, text: str | bytes) -> dict:
    """A JSON object; no NaN, no key twice. Raises ValueError naming `what`."""

    def once(pairs):
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"{what}: a key stands twice in one object")
        return found

    def refuse(name):
        raise ValueError(f"{what}: {name}, expected numbers that JSON knows")

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        found = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{what}: not UTF-8, expected JSON") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: {error.msg} at character {error.pos}, expected JSON") from None
    except RecursionError:
        raise ValueError(f"{what}: lists within lists without end, expected JSON of a few levels") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what}: got {type(found).__name__}, expected a JSON object")
    return found


def _text(what: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} {value!r:.60}, expected a string that is not blank")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{what} {value!a:.60} holds half a surrogate pair, expected text")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wholes(values: object) -> bool:
    return isinstance(values, list) and all(map(_whole, values))


def _tokens(what: str, values: object, vocab: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{what} {values!r:.60}, expected a list of token ids")
    for place, value in enumerate(values):
        if not _whole(value) or not 0 <= value < vocab:
            raise ValueError(f"{what}: {value!r:.40} at {place}, expected a token id in 0..{vocab - 1}")
    return tuple(values)


def _host(array):
    """Something numpy reads: a torch tensor is brought to the CPU."""
    return array.detach().cpu() if hasattr(array, "detach") else array


def _bits(what: str, array) -> tuple[str, np.ndarray]:
    """safetensors' dtype and the values, a copy; bfloat16 as its bits. Torch is never imported, only met."""
    array = _host(array)
    if str(getattr(array, "dtype", "")) == "torch.bfloat16":
        found = array.contiguous().view(sys.modules["torch"].int16).numpy().view("<u2")
        return "BF16", found.copy()
    found = np.asarray(array)
    if found.dtype.name == "bfloat16":  # of ml_dtypes
        return "BF16", found.view("<u2").copy()
    names = {"float64": "F64", "float32": "F32", "float16": "F16"}
    if found.dtype.name not in names:
        raise ValueError(f"trace: {what} is {found.dtype}, expected float32, bfloat16, float16 or float64")
    return names[found.dtype.name], found.astype(STORED[names[found.dtype.name]], copy=True)


def widen(dtype: str, bits: np.ndarray) -> np.ndarray:
    """Stored values as float32 or float64, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64 if dtype == "F64" else np.float32)


def _bits_wide(array) -> np.ndarray:
    return widen(*_bits("lse", array))
