"""Traces: passes that were run elsewhere, in files (docs/trace.md). Needs numpy alone: any engine can write one.

Nothing a file says is believed before it is checked against the file's own size, no memory is taken by a header's word,
no file names another, and nothing is unpickled.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from ..base.errors import usage_errors
from ..tree.draft_tree import DraftTree
from .model import (
    COMMITS,
    FLOATS,
    FORMAT,
    INTEGERS,
    LISTS,
    PART,
    PASSES,
    STORED,
    SUFFIX,
    Committed,
    Header,
    Pass,
    Raw,
    Step,
    Stored,
    Trace,
    _json,
    _text,
    _tokens,
    _whole,
    _wholes,
)

HEADER_BYTES = 100_000_000  # as safetensors itself
AXES = 8
NAME = re.compile(
    r"([pc])(0|[1-9][0-9]{0,5})\."
    r"(logits|top_ids|top_logits|lse|mask|processed|state\.(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_.]{1,64}))"
)


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
