"""A gate that is killed at any of its steps: python -m tests.gate_process FOLDER FIRST STRIDE [sql]

Its cells are records made by hand. A step is an opening or renaming of a file, or a statement of SQL (with `sql`, those
alone); a kill is SIGKILL just before it, as a power cut would. Every kill and every resumed run is a fork of this
process, which has imported all that it needs.
Prints one JSON object: {"steps": of a gate that is not killed, "killed": how many were, "wrong": [...]}.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from ddtree_check.gate.baseline import load_baseline
from ddtree_check.gate.cells import CellResult
from ddtree_check.gate.config import load_config
from ddtree_check.gate.run import run_gate
from ddtree_check.report import html
from ddtree_check.report.record import write_record
from tests.tiny import hand_record

CONFIG = """
[gate]
name = "kill"
out = "{folder}/out"
history = "{folder}/history.db"
baseline = "{folder}/baseline.json"
[matrix]
budget = [2, 3, 4]
"""


EVENTS = ("sql",) if "sql" in sys.argv else ("open", "os.rename", "sql")


def run_by_hand(cell, record, log) -> CellResult:
    write_record(record, hand_record(f"a/{cell.job.settings['budgets'][0]}"))
    return CellResult(cell.name, "pass", 0, "", 1.0, True)


class Steps:
    """Counts steps, and kills the process before step `last`."""

    def __init__(self, last: int | None):
        self.count, self.last = 0, last

    def __call__(self, event: str, _=None) -> None:
        if event in EVENTS:
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def forked(work) -> int:
    """Runs `work` in a fork and returns how that ended, as waitpid says it: 9 for SIGKILL, 0 for all well."""
    child = os.fork()
    if not child:
        code = 70
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def freeze(folder: Path, last: int | None = None, count: Path | None = None) -> int:
    """A gate that freezes; its steps are counted into a file."""
    config = load_config(folder / "gate.toml")
    steps = Steps(last)

    class Connection(sqlite3.Connection):
        def execute(self, *given):
            steps("sql")
            return super().execute(*given)

        def executemany(self, *given):
            steps("sql")
            return super().executemany(*given)

    connect = sqlite3.connect
    sqlite3.connect = lambda *given, **more: connect(*given, factory=Connection, **more)
    sys.addaudithook(steps)
    code = run_gate(config, freeze=True, run=run_by_hand, say=lambda _: None)
    if count:
        seen = steps.count
        count.write_text(str(seen))
    return code


def outcome(folder: Path) -> dict:
    """What a finished gate leaves, without what differs from run to run; every file is read whole."""
    out = folder / "out"
    found = json.loads((out / "gate.json").read_text())
    ElementTree.parse(out / "junit.xml")
    assert (out / "report.html").read_text().rstrip().endswith("</html>") and (out / "summary.md").read_text()
    for name in ("run", "started", "frozen", "records", "config", "baseline"):
        found.pop(name)
    found["notes"] = [n.replace(str(folder), "") for n in found["notes"] if not n.startswith("not run tonight: ")]
    found["line"] = re.sub("; [0-9]+ not run tonight", "", found["line"])
    for cell in found["cells"]:
        cell.pop("ran")
    with contextlib.closing(sqlite3.connect(folder / "history.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("runs", "cells", "metrics")]
    assert not (out / "journal.jsonl").exists() and not [*out.rglob(".*")]
    return {"night": found, "counts": counts, "baseline": load_baseline(folder / "baseline.json").cells}


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "gate.toml").write_text(CONFIG.format(folder=folder))
    return folder


def killed_at(steps: Iterable[int], prepare: Callable, work: Callable, hold: Callable) -> list[str]:
    """Kill work(folder, step) at each of its steps and return what `hold(folder)` then finds wrong, a line each.

    prepare: makes the folder afresh.
    """
    wrong = []
    for step in steps:
        folder = prepare()
        ended = forked(partial(work, folder, step))
        if ended != -signal.SIGKILL:
            wrong.append(f"step {step}: ended {ended}, expected a kill")
        try:
            hold(folder)
        except Exception as error:
            wrong.append(f"step {step}: {type(error).__name__}: {error}")
    return wrong


def main() -> int:
    root, first, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    html._plotly = str  # reading and packing it takes longer than all the rest
    html.render(hand_record("warm/1"))  # modules that are imported late are no files of ours
    whole = fresh(root / "whole")
    assert forked(lambda: freeze(whole, count=root / "count")) == 0
    steps, right = int((root / "count").read_text()), outcome(whole)
    todo = range(first, steps + 1, stride)

    def hold(folder: Path) -> None:
        frozen = load_baseline(folder / "baseline.json")
        assert frozen is None or frozen.cells == right["baseline"], "baseline"
        assert forked(lambda: freeze(folder)) == 0, "resumed"
        assert outcome(folder) == right, "outcome"

    wrong = killed_at(todo, lambda: fresh(root / "killed"), freeze, hold)
    print(json.dumps({"steps": steps, "killed": len(todo), "wrong": wrong}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
