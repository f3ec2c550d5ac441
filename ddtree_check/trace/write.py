"""Write a trace, a file a step, within a bound on its bytes. Needs numpy alone: any engine can write one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..base.files import now, runs
from ..tree.token_ids import at_least
from .model import FORMAT, LISTS, PART, STORED, SUFFIX, Header, Raw, Stored, _bits, _host, widen
from .read import HEADER_BYTES, _same_header, parse_step, read_raw


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
        for name, value, low in (("max_bytes", max_bytes, 1), ("top", top, 2)):
            if value is not None:
                at_least(low, f"trace: {name}", value)
        header.setdefault("created", now())
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
        """Return a step to add passes to. prompt_tokens is what is committed before the root; node 0 is the root."""
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
        """Put the part under the next free number; two writers of one folder do not overwrite each other."""
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
        """Return a pass. logits [rows, vocabulary], or top = (ids [rows, k], logits [rows, k], lse [rows] or None).

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
                arrays["lse"] = ("F64", np.array(widen(*_bits("lse", lse)), dtype="<f8"))
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
        """Add what stood after the path's commit. states: (layer, channel) -> as in `Committed`; position, probe and
        logits [probe, vocabulary] too. mode: of COMMITS. Raises ValueError."""
        number = len(self._data.setdefault("commits", []))
        entry = {"mode": mode, "path": _ints(path), "position": position, "probe": _ints(probe), "pattern": pattern}
        arrays = {f"state.{layer}.{name}": _bits(f"state of layer {layer}", x) for (layer, name), x in states.items()}
        if logits is not None:
            arrays["logits"] = _bits("logits", logits)
        self._data["commits"].append({name: value for name, value in entry.items() if value is not None})
        self._arrays |= {f"c{number}.{name}": array for name, array in arrays.items()}

    def accept(self, path: Sequence[int], bonus: int | None = None) -> None:
        """Return what the engine accepted: node ids from the root on, and the token after them."""
        self._data["accepted"] = _ints(path)
        if bonus is not None:
            self._data["bonus"] = int(bonus)

    def write(self) -> bool:
        """Put the step on the disk, whole; False if it was dropped for `max_bytes`. Raises ValueError, OSError."""
        return self._writer._write(self._data, self._arrays)


def _alive(part: str) -> bool:
    """Return whether the process that owns a part file is under way."""
    pid = part.removeprefix(".").partition("-")[0]
    return pid.isdecimal() and runs(int(pid))


def _ints(values) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ValueError(f"trace: {value!r:.40} among {values!r:.60}, expected integers")
    return [int(value) for value in values]


def _reduced(stored: tuple[str, np.ndarray], top: int) -> dict[str, tuple[str, np.ndarray]]:
    """Return the `top` largest of each row, largest first, and the log-sum-exp of the whole row."""
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
