"""Traces: passes that were run elsewhere, in files (docs/trace.md). Needs numpy alone: any engine can write one.

Nothing a file says is believed before it is checked against the file's own size, no memory is taken by a header's word,
no file names another, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UsageError, usage_errors
from .tree import DraftTree

FORMAT = "ddtree-trace/1"
SUFFIX = ".safetensors"
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
HEADER_BYTES = 100_000_000  # as safetensors itself
PART = "part"  # a file in the folder of a trace whose run is under way, or was interrupted
AXES = 8
NAME = re.compile(
    r"([pc])(0|[1-9][0-9]{0,5})\."
    r"(logits|top_ids|top_logits|lse|mask|processed|state\.(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_.]{1,64}))"
)


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


def is_trace(path: str | Path) -> bool:
    """Whether a path looks like a trace: a folder, or a file of safetensors by its name."""
    path = Path(path)
    return path.is_dir() or path.suffix == SUFFIX


def read_trace(path: str | Path) -> Trace:
    """A trace, checked; arrays stay in their files. Raises UsageError naming the file and what is wrong with it."""
    with usage_errors():
        header, steps, first = None, [], {}
        for raw in read_raw(path):
            try:
                own = Header.from_json(raw.header)
                _same_header(header or own, own)
                step = parse_step(raw, own)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{raw.file}: {error}") from None
            header = header or own
            twin = first.setdefault(step.id, raw.file)
            if twin != raw.file:
                raise ValueError(f"{raw.file}: step id {step.id!r:.60} is that of {twin.name} too, expected its own")
            steps.append(step)
        return Trace(Path(path), header, tuple(steps), (Path(path) / PART).exists())


def read_raw(path: str | Path) -> list[Raw]:
    """The step files of a trace, by name, container by container. Raises ValueError naming the file."""
    path = Path(path)
    if path.is_dir():
        try:
            names = sorted(name for name in os.listdir(path) if name.endswith(SUFFIX) and not name.startswith("."))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}, expected a readable folder") from None
        files = [path / name for name in names]
        if not files:
            raise ValueError(f"{path}: no *{SUFFIX} in it, expected the step files of a trace (docs/trace.md)")
        for file in files:
            if file.is_symlink():
                raise ValueError(f"{file}: a link, expected a file; a trace does not lead out of its folder")
    else:
        files = [path]
    return [_container(file) for file in files]


def _container(file: Path) -> Raw:
    """The parts of one file, all sizes checked against the file's. Raises ValueError naming the file."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for its writer
            raise ValueError("not a regular file, expected a step file of a trace")
        with file.open("rb") as stream:
            about = os.fstat(stream.fileno())
            size = int.from_bytes(stream.read(8), "little")
            if about.st_size < 8 or not 2 <= size <= min(HEADER_BYTES, about.st_size - 8):
                raise ValueError(f"{about.st_size} bytes with a header of {size}, expected a whole safetensors file")
            text = stream.read(size)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}, expected a readable file") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    try:
        table = _json("safetensors header", text)
        meta = table.pop("__metadata__", None)
        if not isinstance(meta, dict) or not all(isinstance(value, str) for value in meta.values()):
            raise ValueError("no __metadata__ of strings, expected format, header and step (docs/trace.md)")
        if meta.get("format") != FORMAT:
            raise ValueError(f"format {meta.get('format')!r:.60}, expected {FORMAT!r}")
        parts = {name: _json(name, meta.get(name, "")) for name in ("header", "step")}
        arrays = _table(file, table, 8 + size, about.st_size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return Raw(file, parts["header"], parts["step"], arrays)


def _table(file: Path, table: dict, base: int, size: int) -> dict[str, Stored]:
    found, ends = {}, []
    for name, entry in table.items():
        if not isinstance(entry, dict):
            raise ValueError(f"array {name!r:.60}: got {type(entry).__name__}, expected an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in STORED:
            raise ValueError(f"array {name!r:.60}: dtype {dtype!r:.30}, expected one of {', '.join(STORED)}")
        if not _wholes(shape) or len(shape) > AXES or any(axis < 0 for axis in shape):
            raise ValueError(f"array {name!r:.60}: shape {shape!r:.60}, expected at most {AXES} numbers of at least 0")
        if not _wholes(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size - base:
            raise ValueError(
                f"array {name!r:.60}: data_offsets {offsets!r:.60}, expected two within the {size - base} bytes of data"
            )
        needed = STORED[dtype].itemsize
        for axis in shape:
            needed *= axis
        if needed != offsets[1] - offsets[0]:
            raise ValueError(
                f"array {name!r:.60}: {dtype} {shape!r:.60} needs {needed} bytes, the file holds "
                f"{offsets[1] - offsets[0]} for it"
            )
        found[name] = Stored(file, dtype, tuple(shape), base + offsets[0])
        ends.append(tuple(offsets))
    at = 0
    for begin, end in sorted(ends):
        if begin != at:
            raise ValueError(f"arrays overlap or leave a gap at byte {min(at, begin)} of the data")
        at = end
    if at != size - base:
        raise ValueError(f"{size - base} bytes of data for arrays of {at}, expected as many; the file is cut or grown")
    return found


def parse_step(raw: Raw, header: Header) -> Step:
    """The step of a file, every list and shape checked. Raises ValueError naming the field."""
    data, vocab = raw.step, header.vocab_size
    _text("step: id", data.get("id"))
    where = f"step {data['id']!r:.60}"
    for name in ("request", "bonus", "round", "accepted", "source"):
        value, kinds = data.get(name), {"request": str, "source": dict, "accepted": list}.get(name, int)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"{where}: {name} {value!r:.60}, expected {kinds.__name__}")
    prompt = _tokens(f"{where}: prompt_tokens", data.get("prompt_tokens"), vocab)
    if not prompt:
        raise ValueError(f"{where}: prompt_tokens is empty, expected what is committed before the root")
    try:
        tree = DraftTree.from_json(data.get("tree"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _tokens(f"{where}: tree: tokens", list(tree.tokens), vocab)
    accepted = data.get("accepted")
    if accepted is not None:
        if not _wholes(accepted) or not accepted or not 0 <= accepted[-1] < len(tree):
            raise ValueError(f"{where}: accepted {accepted!r:.60}, expected node ids from 0, the root, on")
        if tuple(accepted) != tree.path(accepted[-1]):
            raise ValueError(
                f"{where}: accepted {accepted!r:.60}, expected the path to its last node, {tree.path(accepted[-1])}"
            )
        accepted = tuple(accepted)
    if data.get("bonus") is not None:
        _tokens(f"{where}: bonus", [data["bonus"]], vocab)
    entries = data.get("passes")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: passes {entries!r:.60}, expected a list of at least one pass")
    commits = data.get("commits") or []
    if not isinstance(commits, list):
        raise ValueError(f"{where}: commits {commits!r:.60}, expected a list")
    own: list[dict[str, Stored]] = [{} for _ in entries]
    left: list[dict[str, Stored]] = [{} for _ in commits]
    for name, array in raw.arrays.items():
        match = NAME.fullmatch(name)
        groups = left if match and match[1] == "c" else own
        if not match or int(match[2]) >= len(groups):
            raise ValueError(
                f"{where}: array {name!r:.60} belongs to none of {len(entries)} passes and {len(commits)} commits, "
                "expected names as p0.logits"
            )
        groups[int(match[2])][match[3]] = array
    passes = tuple(
        _parse_pass(f"{where}: pass {place}", entry, arrays, len(tree), len(prompt), vocab)
        for place, (entry, arrays) in enumerate(zip(entries, own, strict=True))
    )
    return Step(
        data["id"],
        raw.file,
        prompt,
        tree,
        passes,
        request=data.get("request"),
        round=data.get("round"),
        accepted=accepted,
        bonus=data.get("bonus"),
        source=data.get("source") or {},
        commits=tuple(
            _parse_commit(f"{where}: commit {place}", entry, arrays, tree, len(prompt), vocab)
            for place, (entry, arrays) in enumerate(zip(commits, left, strict=True))
        ),
    )


def _parse_commit(
    where: str, entry: object, arrays: Mapping[str, Stored], tree: DraftTree, prompt: int, vocab: int
) -> Committed:
    if not isinstance(entry, dict) or entry.get("mode") not in COMMITS:
        got = entry.get("mode") if isinstance(entry, dict) else entry
        raise ValueError(f"{where}: mode {got!r:.60}, expected one of {', '.join(COMMITS)}")
    where, path, position = f"{where} ({entry['mode']})", entry.get("path"), entry.get("position")
    before = path == [] and entry["mode"] == "prefill"  # what stands before the root
    if not before and (
        not _wholes(path) or not path or not 0 <= path[-1] < len(tree) or tuple(path) != tree.path(path[-1])
    ):
        raise ValueError(f"{where}: path {path!r:.60}, expected the node ids of a path of the tree, 0 first")
    if position is not None and (not _whole(position) or position < 0):
        raise ValueError(f"{where}: position {position!r:.60}, expected the number of committed tokens")
    probe = _tokens(f"{where}: probe", entry.get("probe") or [], vocab)
    pattern = entry.get("pattern", "recorded")
    _text(f"{where}: pattern", pattern)
    if not any(name.startswith("state.") for name in arrays):
        raise ValueError(f"{where}: holds no state, expected arrays as c0.state.2.recurrent")
    for name, array in arrays.items():
        if array.dtype not in FLOATS or not (name.startswith("state.") or name == "logits"):
            raise ValueError(f"{where}: {name} is {array.dtype}, expected states of floats and logits")
    logits = arrays.get("logits")
    if (() if logits is None else logits.shape) != ((len(probe), vocab) if probe else ()):
        got = None if logits is None else list(logits.shape)
        raise ValueError(f"{where}: logits {got}, expected one row of {vocab} for each of {len(probe)} tokens of probe")
    return Committed(entry["mode"], tuple(path), arrays, position, probe, pattern)


def _parse_pass(where: str, entry: object, arrays: Mapping[str, Stored], n: int, prompt: int, vocab: int) -> Pass:
    if not isinstance(entry, dict) or entry.get("mode") not in PASSES:
        got = entry.get("mode") if isinstance(entry, dict) else entry
        raise ValueError(f"{where}: mode {got!r:.60}, expected one of {', '.join(PASSES)}")
    where, wiring = f"{where} ({entry['mode']})", entry.get("wiring", "engine")
    _text(f"{where}: wiring", wiring)
    lists = {}
    for name in LISTS:
        if entry.get(name) is not None:
            if not _wholes(entry[name]):
                raise ValueError(f"{where}: {name} {entry[name]!r:.60}, expected a list of integers")
            lists[name] = entry[name]
    rows = _rows(where, arrays, vocab)
    nodes = lists.get("nodes", list(range(rows)))
    if "nodes" not in lists and rows > n:
        raise ValueError(f"{where}: {rows} rows for {n} nodes; give nodes, -1 for each padding row")
    if len(nodes) != rows:
        raise ValueError(f"{where}: {len(nodes)} nodes for {rows} stored rows, expected one for each")
    odd = [node for node in nodes if not -1 <= node < n]
    if odd:
        raise ValueError(f"{where}: node {odd[0]}, expected -1..{n - 1}")
    real = [node for node in nodes if node >= 0]
    if len(set(real)) != len(real):
        raise ValueError(f"{where}: a node stands in two rows, expected each once")
    for name in ("input_ids", "positions", "chosen"):
        if name in lists and len(lists[name]) != rows:
            raise ValueError(f"{where}: {len(lists[name])} {name} for {rows} stored rows, expected one for each")
    width = entry.get("width", rows)
    if not _whole(width) or not max(rows, 1) <= width <= 10**9:
        raise ValueError(f"{where}: width {width!r:.60}, expected the rows of the pass, at least the {rows} stored")
    mask = arrays.get("mask")
    if mask is not None and (
        mask.dtype not in ("BOOL", "U8") or mask.shape not in ((width, width), (width, prompt + width))
    ):
        raise ValueError(
            f"{where}: mask is {mask.dtype} {list(mask.shape)}, expected BOOL {[width, width]} or "
            f"{[width, prompt + width]}"
        )
    for name, array in arrays.items():
        if name.startswith("state.") and (array.dtype not in FLOATS or array.shape[:1] != (rows,)):
            raise ValueError(f"{where}: {name} is {array.dtype} {list(array.shape)}, expected floats, {rows} rows")
    if "chosen" in lists:
        _tokens(
            f"{where}: chosen", [token for token, node in zip(lists["chosen"], nodes, strict=True) if node >= 0], vocab
        )
    made = arrays.get("processed")
    if made is not None and (made.dtype not in FLOATS or made.shape != (rows, vocab)):
        raise ValueError(f"{where}: processed is {made.dtype} {list(made.shape)}, expected floats {[rows, vocab]}")
    return Pass(entry["mode"], wiring, rows, tuple(nodes), width, arrays, lists)


def _rows(where: str, arrays: Mapping[str, Stored], vocab: int) -> int:
    """Stored rows of a pass, by its logits."""
    full, top = arrays.get("logits"), [arrays.get(name) for name in ("top_ids", "top_logits")]
    if (full is None) == (None in top) or (full is not None and any(top)):
        raise ValueError(f"{where}: holds {', '.join(sorted(arrays)) or 'no array'}, expected logits, or both "
                         "top_ids and top_logits")  # fmt: skip
    if full is not None:
        if full.dtype not in FLOATS or len(full.shape) != 2 or full.shape[1] != vocab or not full.shape[0]:
            raise ValueError(f"{where}: logits are {full.dtype} {list(full.shape)}, expected floats [rows, {vocab}]")
        if "lse" in arrays:
            raise ValueError(f"{where}: lse beside full logits, which hold it already")
        return full.shape[0]
    ids, values = top
    if ids.dtype not in INTEGERS or values.dtype not in FLOATS or ids.shape != values.shape or len(ids.shape) != 2:
        raise ValueError(
            f"{where}: top_ids {ids.dtype} {list(ids.shape)} and top_logits {values.dtype} {list(values.shape)}, "
            "expected integers and floats, both [rows, k]"
        )
    if not ids.shape[0] or not 2 <= ids.shape[1] <= vocab:
        raise ValueError(f"{where}: top_ids {list(ids.shape)}, expected at least one row and 2 to {vocab} ids in each")
    lse = arrays.get("lse")
    if lse is not None and (lse.dtype not in ("F64", "F32") or lse.shape != ids.shape[:1]):
        raise ValueError(f"{where}: lse is {lse.dtype} {list(lse.shape)}, expected F32 or F64 {[ids.shape[0]]}")
    return ids.shape[0]


def _same_header(first: Header, own: Header) -> None:
    for name, value in first.to_json().items():
        if name != "created" and getattr(own, name) != value:
            raise ValueError(
                f"header: {name} {getattr(own, name)!r:.60} and in the first file {value!r:.60}, expected one and the "
                "same in a trace"
            )


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


# --- writing ----------------------------------------------------------------------------------------------------------


class TraceWriter:
    """Writes a trace into a folder, one whole file a step; a folder that holds a trace with this header is continued.

    header: the fields of `Header`. max_bytes bounds the folder: a step that would pass it is dropped and counted in
    `dropped`. top: keep the so many largest logits of each row in place of all. private: only the owner can read the
    folder and its files. Raises ValueError for bad values and OSError if the folder cannot be written.
    """

    def __init__(
        self, path: str | Path, *, max_bytes: int | None = None, top: int | None = None, private: bool = False, **header
    ):
        self.path, self.max_bytes, self.top, self.private = Path(path), max_bytes, top, private
        unknown = sorted(header.keys() - Header.__dataclass_fields__.keys())
        if unknown:
            raise ValueError(f"trace: unknown {unknown[0]!r}, expected {', '.join(Header.__dataclass_fields__)}")
        if max_bytes is not None and (not _whole(max_bytes) or max_bytes < 1):
            raise ValueError(f"trace: max_bytes {max_bytes!r:.40}, expected a number of at least 1")
        if top is not None and (not _whole(top) or top < 2):
            raise ValueError(f"trace: top {top!r:.40}, expected a number of at least 2")
        header.setdefault("created", datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        self.header = Header(**header)
        self._text = json.dumps(self.header.to_json(), allow_nan=False)
        self.header = Header.from_json(json.loads(self._text))  # as it will be read back
        self.dropped, self.written, self.bytes, self._next = 0, 0, 0, 0
        self._ids: set[str] = set()
        self._continue()

    def _continue(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if self.private:
            self.path.chmod(0o700)  # raises for somebody else's
        for part in self.path.glob(f".*{SUFFIX}.part"):  # of a writer that was killed
            if not _alive(part.name):
                part.unlink(missing_ok=True)
        names = [name for name in os.listdir(self.path) if name.endswith(SUFFIX) and not name.startswith(".")]
        for raw in read_raw(self.path) if names else ():
            _same_header(Header.from_json(raw.header), self.header)
            self._ids.add(str(raw.step.get("id")))
            self.bytes += raw.file.stat().st_size
        self._next = max((int(name.removesuffix(SUFFIX)) + 1 for name in names if name[:-12].isdigit()), default=0)

    def __enter__(self) -> TraceWriter:
        """Mark the trace as a part until the block has ended without an error; each step is whole by itself."""
        (self.path / PART).touch()
        return self

    def __exit__(self, error, *_) -> None:
        if error is None:
            (self.path / PART).unlink(missing_ok=True)

    def step(
        self,
        id: str,
        prompt_tokens: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int],
        *,
        request: str | None = None,
        round: int | None = None,
        source: Mapping | None = None,
    ) -> StepWriter:
        """A step to add passes to. prompt_tokens is what is committed before the root; node 0 is the root."""
        data = {
            "id": id,
            "request": request,
            "round": round,
            "prompt_tokens": _ints(prompt_tokens),
            "tree": {"tokens": _ints(tokens), "parents": _ints(parents)},
            "source": dict(source or {}),
            "passes": [],
        }
        return StepWriter(self, {name: value for name, value in data.items() if value is not None})

    def _write(self, data: dict, arrays: Mapping[str, tuple[str, np.ndarray]]) -> bool:
        if data["id"] in self._ids:
            raise ValueError(f"trace: step id {data['id']!r:.60} stands in {self.path} already, expected its own")
        order = sorted(arrays, key=lambda name: -STORED[arrays[name][0]].itemsize)  # keeps every array aligned
        table: dict[str, object] = {
            "__metadata__": {"format": FORMAT, "header": self._text, "step": json.dumps(data, allow_nan=False)}
        }
        at = 0
        for name in order:
            dtype, array = arrays[name]
            table[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        head = json.dumps(table).encode()
        head += b" " * (-len(head) % 8)
        if len(head) > HEADER_BYTES:
            raise ValueError(f"trace: step {data['id']!r:.60} has {len(head)} bytes of JSON, at most {HEADER_BYTES}")
        # What cannot be read back is refused here, not where it is judged.
        stored = {name: Stored(self.path, arrays[name][0], arrays[name][1].shape, 0) for name in order}
        parse_step(Raw(self.path, {}, json.loads(json.dumps(data)), stored), self.header)
        size = 8 + len(head) + at
        if self.max_bytes is not None and self.bytes + size > self.max_bytes:
            self.dropped += 1
            return False
        part = self.path / f".{os.getpid()}-{id(self)}{SUFFIX}.part"
        try:
            mode = 0o600 if self.private else 0o666
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(len(head).to_bytes(8, "little"))
                file.write(head)
                for name in order:
                    file.write(
                        memoryview(np.ascontiguousarray(arrays[name][1])).cast("B") if arrays[name][1].size else b""
                    )
                file.flush()
                os.fsync(file.fileno())
            self._publish(part)
        finally:
            part.unlink(missing_ok=True)
        self._ids.add(data["id"])
        self.bytes += size
        self.written += 1
        return True

    def _publish(self, part: Path) -> None:
        """The part under the next free number; two writers of one folder do not overwrite each other."""
        while True:
            target = self.path / f"{self._next:06d}{SUFFIX}"
            self._next += 1
            try:
                os.link(part, target)
                return
            except FileExistsError:
                continue
            except OSError:  # a file system without hard links
                if not target.exists():
                    part.replace(target)
                    return


class StepWriter:
    """One step of a trace; nothing is on the disk until `write`."""

    def __init__(self, writer: TraceWriter, data: dict):
        self._writer, self._data, self._arrays = writer, data, {}

    def add(
        self,
        mode: str,
        logits=None,
        *,
        nodes: Sequence[int] | None = None,
        width: int | None = None,
        wiring: str = "engine",
        top: tuple | None = None,
        mask=None,
        processed=None,
        states: Mapping[tuple[int, str], object] | None = None,
        **lists,
    ) -> None:
        """A pass. logits [rows, vocabulary], or top = (ids [rows, k], logits [rows, k], lse [rows] or None).

        nodes: the node of each row, -1 for padding. width: rows of the pass as it was run. states: (layer, channel) ->
        [rows, ...]. processed [rows, vocabulary]: what the engine's own logit processors made of the rows. lists:
        positions, parents, next_token, next_sibling, input_ids, chosen, prompt_tokens. Arrays are numpy, torch
        (bfloat16 too) or whatever numpy takes; they are copied. Raises ValueError.
        """
        unknown = sorted(lists.keys() - set(LISTS))
        if unknown:
            raise ValueError(f"trace: unknown {unknown[0]!r}, expected one of {', '.join(LISTS)}")
        if (logits is None) == (top is None):
            raise ValueError("trace: expected either logits or top")
        number = len(self._data["passes"])
        entry = {"mode": mode, "wiring": wiring, "width": width, "nodes": None if nodes is None else _ints(nodes)}
        entry |= {name: None if values is None else _ints(values) for name, values in lists.items()}
        arrays = {}
        if logits is not None:
            arrays["logits"] = _bits("logits", logits)
            if self._writer.top is not None:
                arrays = _reduced(arrays["logits"], self._writer.top)
        else:
            ids, values, lse = (*top, None)[:3]
            arrays = {"top_ids": ("I64", np.array(_host(ids), dtype="<i8")), "top_logits": _bits("top", values)}
            if lse is not None:
                arrays["lse"] = ("F64", np.array(_bits_wide(lse), dtype="<f8"))
        if mask is not None:
            arrays["mask"] = ("BOOL", np.array(_host(mask)).astype(bool))
        if processed is not None:
            arrays["processed"] = _bits("processed", processed)
        for (layer, channel), state in (states or {}).items():
            arrays[f"state.{layer}.{channel}"] = _bits(f"state of layer {layer}", state)
        self._data["passes"].append({name: value for name, value in entry.items() if value is not None})
        self._arrays |= {f"p{number}.{name}": array for name, array in arrays.items()}

    def commit(
        self,
        mode: str,
        path: Sequence[int],
        states: Mapping[tuple[int, str], object],
        *,
        position: int | None = None,
        probe: Sequence[int] = (),
        logits=None,
        pattern: str = "recorded",
    ) -> None:
        """What stood after the path was committed. states: (layer, channel) -> as in `Committed`; position, probe and
        logits [probe, vocabulary] too. mode: of COMMITS. Raises ValueError."""
        number = len(self._data.setdefault("commits", []))
        entry = {"mode": mode, "path": _ints(path), "position": position, "probe": _ints(probe), "pattern": pattern}
        arrays = {f"state.{layer}.{name}": _bits(f"state of layer {layer}", x) for (layer, name), x in states.items()}
        if logits is not None:
            arrays["logits"] = _bits("logits", logits)
        self._data["commits"].append({name: value for name, value in entry.items() if value is not None})
        self._arrays |= {f"c{number}.{name}": array for name, array in arrays.items()}

    def accept(self, path: Sequence[int], bonus: int | None = None) -> None:
        """What the engine accepted: node ids from the root on, and the token after them."""
        self._data["accepted"] = _ints(path)
        if bonus is not None:
            self._data["bonus"] = int(bonus)

    def write(self) -> bool:
        """Puts the step on the disk, whole; False if it was dropped for `max_bytes`. Raises ValueError, OSError."""
        return self._writer._write(self._data, self._arrays)


def _alive(part: str) -> bool:
    """Whether the process that owns a part file still runs, as far as this machine can tell."""
    pid = part.removeprefix(".").partition("-")[0]
    if not pid.isdigit():
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True


def _ints(values) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ValueError(f"trace: {value!r:.40} among {values!r:.60}, expected integers")
    return [int(value) for value in values]


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


def _reduced(stored: tuple[str, np.ndarray], top: int) -> dict[str, tuple[str, np.ndarray]]:
    """The `top` largest of each row, largest first, and the log-sum-exp of the whole row."""
    dtype, bits = stored
    values = widen(dtype, bits)
    if values.ndim != 2:
        raise ValueError(f"trace: logits {list(values.shape)}, expected [rows, vocabulary]")
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :top]
    wide = values.astype(np.float64)
    largest = wide.max(-1)
    lse = largest + np.log(np.exp(wide - largest[:, None]).sum(-1))
    return {
        "top_ids": ("I64", ids.astype("<i8")),
        "top_logits": (dtype, np.take_along_axis(bits, ids, -1).copy()),
        "lse": ("F64", lse),
    }
