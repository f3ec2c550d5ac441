"""The parts of a trace: its header, steps, passes and commits, and the arrays that a file stores."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import UsageError, need, need_text
from ..base.files import parse_json
from ..tree.draft_tree import DraftTree
from ..tree.token_ids import token_ids

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
LAYER = (
    '[kind, [[operation, ...], ...]], operations such as ["conv", 4], ["state", "gated_delta"], '
    '["attention", null, true]'
)
FLOATS, INTEGERS = ("F64", "F32", "F16", "BF16"), ("I64", "I32")


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
        for name in ("engine", "model", "engine_version", "created"):
            if getattr(self, name) is not None or name in ("engine", "model"):
                need_text(f"header: {name}", getattr(self, name))
        need(self.dtype in DTYPES, "header: dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        sized = _whole(self.vocab_size) and 2 <= self.vocab_size < 2**31
        need(sized, "header: vocab_size", self.vocab_size, "a number from 2 to 2^31 - 1")
        need(isinstance(self.exact_control, bool), "header: exact_control", self.exact_control, "true or false")
        need(isinstance(self.environment, dict), "header: environment", self.environment, "an object")
        need(isinstance(self.sampling, dict | None), "header: sampling", self.sampling, 'an object: {"temperature": 1}')
        need(isinstance(self.layers, list | tuple | None), "header: layers", self.layers, "a list")
        for place, layer in enumerate(self.layers or ()):
            need(_is_layer(layer), f"header: layers[{place}] is", layer, LAYER)

    @classmethod
    def from_json(cls, data: object) -> Header:
        """Read a header; other keys are left alone."""
        need(isinstance(data, dict), "header: got", data, "an object")
        for name in ("engine", "model", "dtype", "vocab_size"):
            need(name in data, "header: no", name, "engine, model, dtype and vocab_size")
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
        """Return a copy; bfloat16 as its bits, uint16. Raises UsageError if the file has shrunk meanwhile."""
        count = int(np.prod(self.shape, dtype=object)) if self.shape else 1
        try:
            with self.file.open("rb") as file:
                values = np.fromfile(file, STORED[self.dtype], count, offset=self.at)
        except OSError as error:
            raise UsageError(f"{self.file}: {error.strerror}, expected a readable file") from None
        if values.size != count:
            raise UsageError(f"{self.file}: ended early, expected {count} values at byte {self.at}")
        return values.reshape(self.shape)


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
        return [entry for entry in self.passes if entry.mode == mode]

    def order(self, mode: str) -> list[list[int]]:
        """Return the nodes whose rows each pass of a mode is the first to hold, parents before children."""
        covered: set[int] = set()
        order = []
        for entry in self.of(mode):
            fresh = sorted(node for node in entry.nodes if node >= 0 and node not in covered)
            covered |= set(fresh)
            order += [fresh] if fresh else []
        return order


@dataclass(frozen=True)
class Trace:
    """A header and its steps, in the order of their files. part: the run that recorded it has not ended."""

    path: Path
    header: Header
    steps: tuple[Step, ...]
    part: bool = False

    @cached_property
    def dtype(self) -> str:
        """Return the coarsest of the dtypes that were computed in and that logits are stored in."""
        stored = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        order = ("float64", "float32", "float16", "bfloat16")
        names = {self.header.dtype}
        for step in self.steps:
            for entry in step.passes:
                names |= {
                    stored[array.dtype] for name, array in entry.arrays.items() if name in ("logits", "top_logits")
                }
        return max(names, key=order.index)


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


@dataclass(frozen=True)
class Raw:
    """A step file whose container is sound: its header and step as JSON objects, nothing more is known of them."""

    file: Path
    header: dict
    step: dict
    arrays: dict[str, Stored]


def _is_layer(layer: object) -> bool:
    match layer:
        case [str(), [*branches]]:
            return all(isinstance(branch, list | tuple) and all(map(_is_operation, branch)) for branch in branches)
    return False


def _is_operation(operation: object) -> bool:
    match operation:
        case ["conv", width]:
            return _whole(width) and 1 <= width <= 4096
        case ["state", str()] | ["attention"]:
            return True
        case ["attention", window] | ["attention", window, bool()]:
            return window is None or _whole(window)
    return False


def _json(what: str, text: bytes | str) -> dict:
    """Return a JSON object; no NaN, no key twice. Raises ValueError naming `what`."""

    def once(pairs):
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key stands twice in one object")
        return value

    def finite(digits):
        if not math.isfinite(float(digits)):
            raise ValueError(f"a number is {digits}")
        return float(digits)

    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what}: not UTF-8, expected JSON") from None
    value = parse_json(text, what, object_pairs_hook=once, parse_constant=finite, parse_float=finite)
    need(isinstance(value, dict), f"{what}: got", value, "a JSON object")
    return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wholes(values: object) -> bool:
    return isinstance(values, list) and all(map(_whole, values))


def _tokens(what: str, values: object, vocab: int) -> tuple[int, ...]:
    need(isinstance(values, list), what, values, "a list of token ids")
    return token_ids(what, values, vocab) if values else ()


def _host(array):
    """Return what numpy reads: a torch tensor is brought to the CPU."""
    return array.detach().cpu() if hasattr(array, "detach") else array


def _bits(what: str, array) -> tuple[str, np.ndarray]:
    """Return safetensors' dtype and the values, a copy; bfloat16 as its bits. Torch is never imported, only met."""
    array = _host(array)
    if str(getattr(array, "dtype", "")) == "torch.bfloat16":
        values = array.contiguous().view(sys.modules["torch"].int16).numpy().view("<u2")
        return "BF16", values.copy()
    values = np.asarray(array)
    if values.dtype.name == "bfloat16":  # of ml_dtypes
        return "BF16", values.view("<u2").copy()
    names = {"float64": "F64", "float32": "F32", "float16": "F16"}
    if values.dtype.name not in names:
        raise ValueError(f"trace: {what} is {values.dtype}, expected float32, bfloat16, float16 or float64")
    return names[values.dtype.name], values.astype(STORED[names[values.dtype.name]], copy=True)


def widen(dtype: str, bits: np.ndarray) -> np.ndarray:
    """Return stored values as float32 or float64, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64 if dtype == "F64" else np.float32)
