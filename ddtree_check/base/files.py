"""Text files in, and text files out that are written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import glob
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from .. import __version__

PART = ".ddtree-check-part"  # ends the name of a file that is being written


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark. Raises ValueError naming the file and the cause."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8, expected a UTF-8 text file") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, expected a readable file") from None


def parse_json(text: str, where: str, **hooks) -> object:
    """Return the value of a JSON text. hooks: as `json.loads` takes them. Raises ValueError beginning with `where`."""
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error.msg} at character {error.pos}, expected JSON") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists within lists within ...
        raise ValueError(f"{where}: {str(error).splitlines()[0]}, expected JSON") from None


def parse_toml(text: str, where: str) -> dict:
    """Return the tables of a TOML text. Raises ValueError beginning with `where`."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a slip, a number of too many digits, or lists within lists
        raise ValueError(f"{where}: {str(error).splitlines()[0]}, expected TOML") from None


def json_lines(path: str | Path) -> Iterator[tuple[int, object]]:
    """Yield (line number, value) of each line that is not blank. Raises ValueError naming the line, or for none."""
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{path}: empty, expected one JSON value a line")
    for number, line in lines:
        yield number, parse_json(line, f"{path}:{number}")


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file. A run killed meanwhile leaves the old file or the new one, never a part.

    Raises ValueError if the file cannot be written, or is no regular file.
    """
    with _part_of(path) as (target, part), part.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        part.replace(target)


def check_writable(path: str | Path) -> None:
    """Raise ValueError, before a long run, if `write_text` could not write there."""
    with _part_of(path) as (_, part):
        part.touch(exist_ok=False)


def clear_parts(folder: Path, name: str = "*") -> None:
    """Remove what killed runs left of files that they were writing; name: a pattern of the files meant."""
    with contextlib.suppress(OSError):
        for part in folder.glob(f".{name}.*{PART}"):
            pid = part.name.removesuffix(PART).rpartition(".")[2]
            if pid.isdecimal() and (int(pid) == os.getpid() or not runs(int(pid))):
                part.unlink()


def runs(pid: int) -> bool:
    """Return whether a process is under way, as far as this machine can tell."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


@contextlib.contextmanager
def _part_of(path: str | Path):
    """Yield the file meant (a link is followed) and a file beside it to write first, gone at the end."""
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"output: {path} is not a regular file, expected the name of a file to write")
    clear_parts(target.parent, glob.escape(target.name))
    part = target.with_name(f".{target.name}.{os.getpid()}{PART}")
    try:
        yield target, part
    except OSError as error:
        raise ValueError(f"output: {path} {unwritable(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def unwritable(error: OSError) -> str:
    """Return why a file cannot be written, and the next step."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    step = "make room there or name a file on another disk" if full else "expected a file in a folder"
    return f"cannot be written ({error.strerror}), {step}"


def now() -> str:
    """Return the time in UTC, to the second, as records hold it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def record_head(schema: str, environment: Mapping) -> dict:
    """Return what every record begins with: its schema, the time, and what ran it, this package's version first."""
    return {"schema": schema, "created": now(), "environment": {"ddtree_check": __version__, **environment}}


def json_number(value: float) -> float | None:
    """Return a JSON number; null for what is not finite, which no floor ever covers."""
    value = float(value)
    return value if math.isfinite(value) else None


def json_values(value: object) -> object:
    """Return dicts and lists of numbers as JSON holds them: plain numbers, null for what is not finite."""
    if isinstance(value, dict):
        return {key: json_values(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(json_values, value))
    value = value.item() if hasattr(value, "item") else value  # of numpy
    return None if isinstance(value, float) and not math.isfinite(value) else value
