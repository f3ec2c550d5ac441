"""One cell of the gate: the product's own command line in a process of its own, stopped when its time is up."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ..base.conclusion import INCONCLUSIVE, USAGE
from ..base.errors import UsageError
from ..report.record import READABLE, load_record
from .config import Cell
from .stored import Code, Flag, Seconds

# An interpreter that ends with the gate, however the gate ends, and is otherwise `ddtree-check`.
CHILD = (
    "from ddtree_check.gate.cells import end_with_parent; end_with_parent(); "
    "from ddtree_check.__main__ import main; raise SystemExit(main())"
)
TAIL = 4000  # bytes of a log that may hold its last line


@dataclass(frozen=True)
class CellResult:
    """What a cell came to. verdict: pass, fail, inconclusive, not_run, unsupported or error; record: whether it left
    one."""

    cell: str
    verdict: str
    exit_code: Code
    reason: str
    seconds: Seconds
    record: Flag


def slug(number: int, name: str) -> str:
    """Return a file name for a cell; the number keeps two apart that differ by what a file name cannot hold."""
    return f"{number:03d}-{re.sub(r'[^A-Za-z0-9.+_-]+', '-', name)[:80]}"


def run_cell(cell: Cell, record: Path, log: Path) -> CellResult:
    """Run a cell. Its record, if it comes to one, is written to `record`, its stderr to `log`."""
    record.unlink(missing_ok=True)
    # -P: a file of the current directory does not stand before the package
    words = shlex.split(cell.job.command())[1:]
    command = [sys.executable, "-P", "-c", CHILD, *words, "--json", str(record), "--quiet"]
    began = time.monotonic()
    with log.open("wb") as errors:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": errors}
        child = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            code = child.wait(cell.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(child)
    seconds = time.monotonic() - began
    if code is None:
        reason = f"stopped after {cell.timeout:g} s, the time limit of a case"
        return CellResult(cell.name, "not_run", INCONCLUSIVE, reason, seconds, False)
    return _result(cell.name, code, record, log, seconds)


def _result(name: str, code: int, path: Path, log: Path, seconds: float) -> CellResult:
    if code < 0:
        reason = f"its process was ended by {signal.Signals(-code).name}, see {log}"
        return CellResult(name, "not_run", INCONCLUSIVE, reason, seconds, False)
    if path.exists():
        try:
            record = load_record(path, rounds=True)
        except UsageError as error:
            return CellResult(name, "error", USAGE, str(error), seconds, False)
        if record["exit_code"] == code:
            reason = "; ".join(record["verdict"]["reasons"])
            return CellResult(name, record["verdict"]["text"], code, reason, seconds, record["schema"] in READABLE)
    said = _last_line(log)
    if code == INCONCLUSIVE and said.startswith("unsupported: "):
        return CellResult(name, "unsupported", INCONCLUSIVE, said.removeprefix("unsupported: "), seconds, False)
    said = said or f"it ended with exit code {code} and without a record"
    return CellResult(name, "error", USAGE, said, seconds, False)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("ddtree-check: ") if lines else ""


def _stop(child: subprocess.Popen) -> None:
    """End a child and what it started; a child that has ended is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.stdin.close()
    child.wait()


def end_with_parent() -> None:
    """End this process, and what it starts, when whoever started it is gone: then nobody holds its stdin open."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
