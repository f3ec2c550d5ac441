"""A file of what is finished: JSON lines, the first says which run they belong to. A killed run goes on after them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from .errors import UsageError, usage_errors
from .files import parse_json, unwritable


def read_journal(path: str | Path) -> list:
    """Return its lines, the head first; [] without a file. A last line without an end is cut off: a run died in it.

    Raises UsageError naming the file and the line.
    """
    path = Path(path)
    try:
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise UsageError(f"journal: {path} cannot be read ({error.strerror}), expected a file in a folder") from None
    try:
        lines = whole.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"journal: {path}: byte {error.start} is not UTF-8, expected a journal") from None
    with usage_errors():
        return [parse_json(line, f"journal: {path}:{number}") for number, line in enumerate(lines, start=1)]


def resume_journal(path: str | Path, head: dict, use: Callable[[dict], object]) -> dict[str, dict]:
    """Return the finished lines of the run that `head` describes, by id; a new journal gets the head.

    use: what a line is for; one that it cannot use was not written by this run. Raises UsageError for a journal of
    another run, for such a line, and for a file that cannot be written.
    """
    lines = read_journal(path)
    if not lines:
        append_journal(path, head)
        return {}
    if lines[0] != json.loads(json.dumps(head)):
        raise UsageError(
            f"journal: {path} belongs to a run with other settings; give another file or the same settings"
        )
    for number, line in enumerate(lines[1:], start=2):
        try:
            use(line)
            if not isinstance(line["id"], str):
                raise TypeError("id")
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise UsageError(
                f"journal: {path}:{number}: no finished line of this run ({type(error).__name__}: {error!s:.60}); give "
                "another file"
            ) from None
    return {line["id"]: line for line in lines[1:]}


def append_journal(path: str | Path, line: dict) -> None:
    """Append one more line, on the disk when this returns. Raises UsageError if it cannot be written."""
    try:
        with Path(path).open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"journal: {path} {unwritable(error)}") from None
