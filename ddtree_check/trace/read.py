"""Read traces: passes that were run elsewhere, in files (docs/trace.md).

Nothing a file says is believed before it is checked against the file's own size, no memory is taken by a header's word,
no file names another, and nothing is unpickled.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base.errors import named, need, need_text, usage_errors
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
    _tokens,
    _whole,
    _wholes,
)

HEADER_BYTES = 100_000_000  # as safetensors itself
AXES = 8
SAID = {"request": str, "bonus": int, "round": int, "accepted": list, "source": dict}  # of a step, if it says
NAME = re.compile(
    r"([pc])(0|[1-9][0-9]{0,5})\."
    r"(logits|top_ids|top_logits|lse|mask|processed|state\.(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_.]{1,64}))"
)


def is_trace(path: str | Path) -> bool:
    """Return whether a path looks like a trace: a folder, or a file of safetensors by its name."""
    path = Path(path)
    return path.is_dir() or path.suffix == SUFFIX


def read_trace(path: str | Path) -> Trace:
    """Return a trace, checked; arrays stay in their files. Raises UsageError naming the file and the field."""
    with usage_errors():
        header, steps, first = None, [], {}
        for raw in read_raw(path):
            with named(str(raw.file)):
                current = Header.from_json(raw.header)
                header = header or current
                _same_header(header, current)
                step = parse_step(raw, current)
                twin = first.setdefault(step.id, raw.file)
                if twin != raw.file:
                    raise ValueError(f"step id {step.id!r:.60} is that of {twin.name} too, expected its own")
            steps.append(step)
        return Trace(Path(path), header, tuple(steps), (Path(path) / PART).exists())


def read_raw(path: str | Path) -> list[Raw]:
    """Return the step files of a trace, by name, container by container. Raises ValueError naming the file."""
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
    """Return the parts of one file, all sizes checked against the file's. Raises ValueError naming the file."""
    try:
        with named(str(file)):
            if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for its writer
                raise ValueError("not a regular file, expected a step file of a trace")
            with file.open("rb") as stream:
                whole = os.fstat(stream.fileno()).st_size
                size = int.from_bytes(stream.read(8), "little")
                good = whole >= 8 and 2 <= size <= min(HEADER_BYTES, whole - 8)
                need(good, f"{whole} bytes with a header of", size, "a whole safetensors file")
                text = stream.read(size)
            table = _json("safetensors header", text)
            meta = table.pop("__metadata__", None)
            good = isinstance(meta, dict) and all(isinstance(value, str) for value in meta.values())
            need(good, "no __metadata__ of strings:", meta, "format, header and step (docs/trace.md)")
            need(meta.get("format") == FORMAT, "format", meta.get("format"), repr(FORMAT))
            parts = {name: _json(name, meta.get(name, "")) for name in ("header", "step")}
            return Raw(file, parts["header"], parts["step"], _table(file, table, 8 + size, whole))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}, expected a readable file") from None


def _table(file: Path, table: dict, base: int, size: int) -> dict[str, Stored]:
    arrays, ends, room = {}, [], size - base
    for name, entry in table.items():
        with named(f"array {name!r:.60}"):
            need(isinstance(entry, dict), "got", entry, "an object")
            dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
            need(isinstance(dtype, str) and dtype in STORED, "dtype", dtype, f"one of {', '.join(STORED)}")
            good = _wholes(shape) and len(shape) <= AXES and all(axis >= 0 for axis in shape)
            need(good, "shape", shape, f"at most {AXES} numbers of at least 0")
            good = _wholes(offsets) and len(offsets) == 2 and 0 <= offsets[0] <= offsets[1] <= room
            need(good, "data_offsets", offsets, f"two within the {room} bytes of data")
            needed, stands = STORED[dtype].itemsize * math.prod(shape), offsets[1] - offsets[0]
            if needed != stands:
                raise ValueError(f"{dtype} {shape!r:.60} needs {needed} bytes, the file holds {stands} for it")
        arrays[name] = Stored(file, dtype, tuple(shape), base + offsets[0])
        ends.append(tuple(offsets))
    at = 0
    for begin, end in sorted(ends):
        if begin != at:
            raise ValueError(f"arrays overlap or leave a gap at byte {min(at, begin)} of the data")
        at = end
    if at != room:
        raise ValueError(f"{room} bytes of data for arrays of {at}, expected as many; the file is cut or grown")
    return arrays


def parse_step(raw: Raw, header: Header) -> Step:
    """Return the step of a file, every list and shape checked. Raises ValueError naming the field."""
    data, vocab = raw.step, header.vocab_size
    need_text("step: id", data.get("id"))
    with named(f"step {data['id']!r:.60}"):
        for name, kind in SAID.items():
            value = data.get(name)
            good = value is None or (isinstance(value, kind) and not isinstance(value, bool))
            need(good, name, value, kind.__name__)
        prompt = _tokens("prompt_tokens", data.get("prompt_tokens"), vocab)
        need(prompt, "prompt_tokens", [], "what is committed before the root")
        tree = DraftTree.from_json(data.get("tree"))
        _tokens("tree: tokens", list(tree.tokens), vocab)
        accepted = data.get("accepted")
        if accepted is not None:
            _check_path("accepted", accepted, tree)
        _tokens("bonus", [] if data.get("bonus") is None else [data["bonus"]], vocab)
        entries, commits = data.get("passes"), data.get("commits") or []
        need(isinstance(entries, list) and entries, "passes", entries, "a list of at least one pass")
        need(isinstance(commits, list), "commits", commits, "a list")
        arrays: dict[str, list[dict[str, Stored]]] = {"p": [{} for _ in entries], "c": [{} for _ in commits]}
        for name, array in raw.arrays.items():
            match = NAME.fullmatch(name)
            if not match or int(match[2]) >= len(arrays[match[1]]):
                raise ValueError(
                    f"array {name!r:.60} belongs to none of {len(entries)} passes and {len(commits)} commits, "
                    "expected names as p0.logits"
                )
            arrays[match[1]][int(match[2])][match[3]] = array
        return Step(
            file=raw.file,
            prompt_tokens=prompt,
            tree=tree,
            passes=tuple(
                _parse_pass(f"pass {place}", entry, stored, tree.n, len(prompt), vocab)
                for place, (entry, stored) in enumerate(zip(entries, arrays["p"], strict=True))
            ),
            accepted=accepted and tuple(accepted),
            source=data.get("source") or {},
            commits=tuple(
                _parse_commit(f"commit {place}", entry, stored, tree, vocab)
                for place, (entry, stored) in enumerate(zip(commits, arrays["c"], strict=True))
            ),
            **{name: data.get(name) for name in ("id", "request", "round", "bonus")},
        )


def _check_path(what: str, path: object, tree: DraftTree) -> None:
    """Raise ValueError for anything but the nodes of a path from the root on."""
    need(_wholes(path) and path and 0 <= path[-1] < tree.n, what, path, "node ids from 0, the root, on")
    right = tree.path(path[-1])
    need(tuple(path) == right, what, path, f"the path to its last node, {right!r:.60}")


def _mode(where: str, entry: object, modes: Sequence[str]) -> str:
    """Return the name of a pass or commit with its mode. Raises ValueError for a mode that is none of these."""
    mode = entry.get("mode") if isinstance(entry, dict) else entry
    need(isinstance(entry, dict) and mode in modes, f"{where}: mode", mode, f"one of {', '.join(modes)}")
    return f"{where} ({mode})"


def _parse_commit(where: str, entry: object, arrays: Mapping[str, Stored], tree: DraftTree, vocab: int) -> Committed:
    with named(_mode(where, entry, COMMITS)):
        path, position = entry.get("path"), entry.get("position")
        if path != [] or entry["mode"] != "prefill":  # which may leave what stands before the root
            _check_path("path", path, tree)
        need(position is None or (_whole(position) and position >= 0), "position", position, "a number of tokens")
        probe = _tokens("probe", entry.get("probe") or [], vocab)
        pattern = entry.get("pattern", "recorded")
        need_text("pattern", pattern)
        states = [name for name in arrays if name.startswith("state.")]
        need(states, "holds no state:", sorted(arrays), "arrays as c0.state.2.recurrent")
        for name, array in arrays.items():
            need(array.dtype in FLOATS and (name in states or name == "logits"), name, array.dtype, "states of floats")
        logits = arrays["logits"].shape if "logits" in arrays else ()
        good = logits == ((len(probe), vocab) if probe else ())
        need(good, "logits", logits, f"one row of {vocab} for each of {len(probe)} tokens of probe")
        return Committed(entry["mode"], tuple(path), arrays, position, probe, pattern)


def _parse_pass(where: str, entry: object, arrays: Mapping[str, Stored], n: int, prompt: int, vocab: int) -> Pass:
    with named(_mode(where, entry, PASSES)):
        wiring = entry.get("wiring", "engine")
        need_text("wiring", wiring)
        lists = {name: entry[name] for name in LISTS if entry.get(name) is not None}
        for name, values in lists.items():
            need(_wholes(values), name, values, "a list of integers")
        rows = _rows(arrays, vocab)
        if "nodes" not in lists and rows > n:
            raise ValueError(f"{rows} rows for {n} nodes; give nodes, -1 for each padding row")
        nodes = lists.get("nodes", list(range(rows)))
        for name in ("nodes", "input_ids", "positions", "chosen"):
            if name in lists and len(lists[name]) != rows:
                raise ValueError(f"{len(lists[name])} {name} for {rows} stored rows, expected one for each")
        for node in nodes:
            need(-1 <= node < n, "node", node, f"-1..{n - 1}")
        real = [node for node in nodes if node >= 0]
        if len(set(real)) != len(real):
            raise ValueError("a node stands in two rows, expected each once")
        width = entry.get("width", rows)
        good = _whole(width) and max(rows, 1) <= width <= 10**9
        need(good, "width", width, f"the rows of the pass, at least the {rows} stored")
        for name, array in arrays.items():
            expected = None
            if name == "mask" and (
                array.dtype not in ("BOOL", "U8") or array.shape not in ((width, width), (width, prompt + width))
            ):
                expected = f"BOOL {[width, width]} or {[width, prompt + width]}"
            elif name.startswith("state.") and (array.dtype not in FLOATS or array.shape[:1] != (rows,)):
                expected = f"floats, {rows} rows"
            elif name == "processed" and (array.dtype not in FLOATS or array.shape != (rows, vocab)):
                expected = f"floats {[rows, vocab]}"
            if expected:
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected {expected}")
        taken = zip(lists.get("chosen", nodes), nodes, strict=True)
        _tokens("chosen", [token for token, node in taken if node >= 0 and "chosen" in lists], vocab)
        return Pass(entry["mode"], wiring, rows, tuple(nodes), width, arrays, lists)


def _rows(arrays: Mapping[str, Stored], vocab: int) -> int:
    """Return how many rows of a pass are stored, by its logits."""
    full, ids, values, lse = (arrays.get(name) for name in ("logits", "top_ids", "top_logits", "lse"))
    if (full is None) == (ids is None or values is None) or (full is not None and (ids or values)):
        names = ", ".join(sorted(arrays)) or "no array"
        raise ValueError(f"holds {names}, expected logits, or both top_ids and top_logits")
    if full is not None:
        good = full.dtype in FLOATS and len(full.shape) == 2 and full.shape[1] == vocab and full.shape[0]
        need(good, "logits are", (full.dtype, *full.shape), f"floats [rows, {vocab}]")
        if lse:
            raise ValueError("lse beside full logits, which hold it already")
        return full.shape[0]
    good = ids.dtype in INTEGERS and values.dtype in FLOATS and ids.shape == values.shape and len(ids.shape) == 2
    need(good, "top_ids and top_logits are", (ids.dtype, *ids.shape, values.dtype, *values.shape), "both [rows, k]")
    good = ids.shape[0] and 2 <= ids.shape[1] <= vocab
    need(good, "top_ids", ids.shape, f"at least one row and 2 to {vocab} ids in each")
    good = lse is None or (lse.dtype in ("F64", "F32") and lse.shape == ids.shape[:1])
    need(good, "lse is", lse and (lse.dtype, *lse.shape), f"F32 or F64 {[ids.shape[0]]}")
    return ids.shape[0]


def _same_header(first: Header, other: Header) -> None:
    for name, value in first.to_json().items():
        if name != "created" and getattr(other, name) != value:
            got = f"{getattr(other, name)!r:.60} and in the first file {value!r:.60}"
            raise ValueError(f"header: {name} {got}, expected one and the same in a trace")
