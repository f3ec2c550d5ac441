"""A night: cells that are not finished yet ─► results, held against the baseline ─► history ─► reports.

Every step leaves a whole file, and the journal goes last: a gate that is killed anywhere goes on where it was, and a
step that is made twice changes nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import __version__
from ..base.conclusion import DEFECT, INCONCLUSIVE, PASS, ExitCode, combine
from ..base.errors import UsageError, usage_errors
from ..base.files import check_writable, clear_parts, json_number, write_text
from ..base.journal import append_journal, read_journal
from ..base.words import counted
from ..judge.figures import Metric, metrics
from ..report import html, junit, nightly
from ..report.record import load_record
from ..report.terminal import case_where, exact_text
from .baseline import Baseline, envelope, load_baseline, outside, write_baseline
from .cells import CellResult, run_cell, slug
from .config import Cell, Config, fingerprint
from .history import CellNight, Night, check_history, nights, store
from .stored import read

SCHEMA = "ddtree-check/gate/1"
FRESH = 24  # hours after which what a killed run finished is run again
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that GitHub shows on a job's page


def run_gate(
    config: Config,
    *,
    freeze: bool = False,
    run: Callable[[Cell, Path, Path], CellResult] = run_cell,
    say: Callable[[str], None] = print,
) -> int:
    """Run what is not finished, writes every report and returns the exit code. `say` gets a line a cell, the verdict
    last.

    freeze: write the baseline from this run and the earlier nights that passed; a run that does not pass freezes
    nothing. Raises UsageError.
    """
    if freeze and config.baseline is None:
        raise UsageError(f"{config.path}: gate.baseline: got nothing, expected a file to freeze into")
    folders = [config.out / name for name in ("records", "logs")]
    for what, folder in (("out", folders[0]), ("out", folders[1]), ("history", config.history.parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{what}: {folder} cannot be made ({error.strerror}), expected a folder") from None
    with _alone(config.out):
        for folder in (config.out, folders[0]):
            clear_parts(folder)
        with usage_errors():
            check_writable(config.out / "gate.json")
            if freeze:
                check_writable(config.baseline)
        check_history(config.history)
        frozen = None if config.baseline is None else load_baseline(config.baseline)
        journal = config.out / "journal.jsonl"
        head, done = _begin(journal, fingerprint(config))
        results, records, resumed = [], [], []
        for number, cell in enumerate(config.cells, start=1):
            path, log = _files(config, number, cell)
            result, record = done.get(cell.name), None
            if result is not None and result.record:
                try:
                    record = load_record(path)
                except UsageError:  # gone or damaged since: the cell is run again
                    del done[cell.name]
            before = cell.name in done
            if not before:
                result = run(cell, path, log)
                append_journal(journal, asdict(result))
                record = load_record(path) if result.record else None
            results.append(result)
            records.append(record)
            resumed += [cell.name] if before else []
            note = " (finished before)" if before else ""
            why = f": {result.reason}" if result.reason else ""
            say(f"[{number}/{len(config.cells)}] {result.verdict} {cell.name}, {result.seconds:.1f} s{note}{why}")
        files = [_files(config, n, cell)[0] for n, cell in enumerate(config.cells, start=1)]
        earlier = nights(config.history, config.name, config.nights, but=head["run"])
        night = conclude(config, head, results, records, earlier, frozen, judge=not freeze, resumed=resumed)
        night["records"] = [str(path) if record else None for path, record in zip(files, records, strict=True)]
        store(config.history, _night(config, head, night))
        if freeze:
            _freeze(config, night, records, earlier)
        _report(config, night, records, earlier)
        journal.unlink()
    for note in night["notes"]:
        say(note)
    say(night["line"])
    return night["exit_code"]


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Let one gate at a time into a folder. The lock goes with its process, however that ends."""
    with (out / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f"out: {out} is in use by a gate that runs (process {file.read().strip() or 'unknown'}); "
                "wait for it, or give this one another out"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _files(config: Config, number: int, cell: Cell) -> tuple[Path, Path]:
    """Return where a cell's record and its log go."""
    name = slug(number, cell.name)
    return config.out / "records" / f"{name}.json", config.out / "logs" / f"{name}.log"


def _begin(journal: Path, print_: str) -> tuple[dict, dict[str, CellResult]]:
    """Return the head of this run, and by cell what a killed run of the same configuration and code finished of it less
    than FRESH hours ago."""
    now = datetime.datetime.now(datetime.UTC)
    try:
        head, *lines = read_journal(journal)
        age = abs(now - datetime.datetime.fromisoformat(head["started"]))
        if head["fingerprint"] == print_ and isinstance(head["run"], str) and age < datetime.timedelta(hours=FRESH):
            return head, {line["cell"]: read(CellResult, line) for line in lines}
    except (UsageError, TypeError, KeyError, AttributeError, ValueError):
        pass  # not ours to go on with: what it says is run again
    head = {"schema": SCHEMA, "fingerprint": print_, "run": uuid.uuid4().hex, "started": now.isoformat()}
    with usage_errors():
        write_text(journal, json.dumps(head) + "\n")  # whole, in place of the old one
    return head, {}


# What a night comes to


def conclude(
    config: Config,
    head: dict,
    results: Sequence[CellResult],
    records: Sequence[dict | None],
    earlier: Sequence[Night],
    frozen: Baseline | None,
    *,
    judge: bool = True,
    resumed: Sequence[str] = (),
) -> dict:
    """Return the night as plain JSON, that every report is made from.

    judge: hold it against the baseline; resumed: cells that a killed run finished.
    """
    cells = []
    for cell, result, record in zip(config.cells, results, records, strict=True):
        found = {} if record is None else metrics(record)
        bounds = frozen.cells.get(cell.name) if frozen and judge else None
        drifts = [] if bounds is None else _drifts(found, bounds, record)
        code = result.exit_code
        if drifts:
            code = combine(code, DEFECT)
        verdict, why = "drift" if drifts and result.exit_code in (PASS, INCONCLUSIVE) else result.verdict, result.reason
        if judge and config.baseline is not None and record is not None and bounds is None:
            code = combine(code, INCONCLUSIVE)
            if verdict == "pass":
                verdict, why = "inconclusive", f"not in the baseline {config.baseline}"
        cells.append(
            {
                "name": cell.name,
                "command": cell.job.command(),
                "verdict": verdict,
                "reason": why,
                "exit_code": int(code),
                "ran": cell.name not in resumed,
                "seconds": result.seconds,
                "drifts": drifts,
                "in_baseline": None if config.baseline is None or not judge else bounds is not None,
                "metrics": {name: _trend(cell.name, name, metric, earlier) for name, metric in found.items()},
                "nights": [night.cells[cell.name].verdict for night in earlier if cell.name in night.cells],
                "cases": [] if record is None else _cases(record),
                "exact": None if record is None else exact_text(record),
            }
        )
    environment = next((record["environment"] for record in records if record), {})
    night = {
        "schema": SCHEMA,
        "gate": config.name,
        "config": config.path,
        "run": head["run"],
        "started": head["started"],
        "ddtree_check": __version__,
        "environment": {key: str(value) for key, value in environment.items() if isinstance(value, str | int | float)},
        "baseline": None if config.baseline is None else str(config.baseline),
        "frozen": frozen.created if frozen else None,
        "earlier": len(earlier),
        "cells": cells,
    }
    night["notes"] = _notes(config, night, frozen, judge)
    code = combine(*(cell["exit_code"] for cell in cells))
    return night | {"exit_code": int(code), "verdict": code.text, "line": _line(night, code)}


def _drifts(found: dict[str, Metric], bounds: dict, record: dict) -> list[dict]:
    """Return metrics outside their envelope, and those that were frozen and are not measured any more."""
    drifts = [
        {"metric": name, "value": found[name].value, **bounds[name]._asdict()}
        for name in bounds
        if name in found and outside(found[name], bounds[name])
    ]
    gone = [name for name in bounds if name not in found] if record is not None else []
    return drifts + [{"metric": name, "value": None, **bounds[name]._asdict(), "gone": True} for name in gone]


def _trend(cell: str, name: str, metric: Metric, earlier: Sequence[Night]) -> dict:
    """Return a metric beside what it was on earlier nights."""
    before = [
        night.cells[cell].metrics[name]
        for night in earlier
        if cell in night.cells and night.cells[cell].metrics.get(name) is not None
    ]
    found: dict[str, object] = {"value": metric.value, "unit": metric.unit, "nights": len(before)}
    if before:
        found |= {"median": json_number(statistics.median(before)), "low": min(before), "high": max(before)}
        if metric.value is not None:
            found["new"] = "high" if metric.value > max(before) else "low" if metric.value < min(before) else None
    return found


def _cases(record: dict) -> list[dict]:
    """Return each case with the verdict and reason of the modes that decide, and where their faults enter."""
    required = record["settings"]["require"]
    return [
        {
            "id": case["id"],
            "modes": {mode: {key: case["modes"][mode][key] for key in ("verdict", "reason")} for mode in required},
            "where": case_where(case, *required),
        }
        for case in record["cases"]
    ]


def _notes(config: Config, night: dict, frozen: Baseline | None, judge: bool) -> list[str]:
    found = []
    if resumed := [cell["name"] for cell in night["cells"] if not cell["ran"]]:
        found.append(
            f"not run tonight: {counted(len(resumed), 'case')}, the first {resumed[0]}; a run that was killed finished "
            f"them, begun {night['started'][:19]}"
        )
    for cell in night["cells"]:
        for drift in cell["drifts"]:
            found.append(f"drift: {cell['name']}: {nightly.drift_text(drift)}")
    if config.baseline is None:
        found.append("baseline: none is named in the configuration; only the verdicts decide")
    elif judge and frozen is None:
        found.append(f"baseline: {config.baseline} is not there; freeze one with gate --freeze")
    elif judge:
        if missing := [cell["name"] for cell in night["cells"] if cell["in_baseline"] is False and cell["metrics"]]:
            found.append(
                f"baseline: not in it: {counted(len(missing), 'case')}, the first {missing[0]}; freeze it again"
            )
        here, there = (where.get("device") for where in (night["environment"], frozen.environment))
        if here and here != there:
            found.append(f"baseline: frozen on {there}, this run is on {here}: their noise may differ")
        names = {cell["name"] for cell in night["cells"]}
        if unused := [name for name in frozen.cells if name not in names]:
            found.append(
                f"baseline: frozen and not run any more: {counted(len(unused), 'case')}, the first {unused[0]}"
            )
    return found


def _line(night: dict, code: ExitCode) -> str:
    verdicts = [cell["verdict"] for cell in night["cells"]]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
    drifts = sum(len(cell["drifts"]) for cell in night["cells"])
    out = f"; {counted(drifts, 'metric')} outside the baseline" if drifts else ""
    before = sum(not cell["ran"] for cell in night["cells"])
    out += f"; {before} not run tonight" if before else ""
    return f"gate {night['gate']}: {code.text}, {counted(len(verdicts), 'case')}: {counts}{out}, exit code {code}"


def _night(config: Config, head: dict, night: dict) -> Night:
    cells = {
        cell["name"]: CellNight(
            *(cell[name] for name in ("verdict", "reason", "exit_code", "seconds")),
            {name: metric["value"] for name, metric in cell["metrics"].items()},
        )
        for cell in night["cells"]
    }
    places = (head["run"], config.name, head["started"], head["fingerprint"])
    return Night(*places, night["environment"], night["exit_code"], cells)


def _freeze(config: Config, night: dict, records: Sequence[dict | None], earlier: Sequence[Night]) -> None:
    """Freeze the envelope of this run and of those earlier nights on which the cell passed."""
    if night["exit_code"]:
        night["notes"].append(
            f"freeze: the run ended {night['verdict']}, expected pass; {config.baseline} is unchanged"
        )
        return
    cells = {}
    for cell, record in zip(config.cells, records, strict=True):
        passed = [n.cells[cell.name] for n in earlier if cell.name in n.cells and n.cells[cell.name].verdict == "pass"]
        cells[cell.name] = {
            name: envelope(metric, [n.metrics[name] for n in passed if name in n.metrics], config.factor)
            for name, metric in metrics(record).items()
        }
    write_baseline(config.baseline, Baseline(night["started"], night["environment"], cells))
    night["frozen"] = night["started"]
    night["notes"].append(f"freeze: {config.baseline} holds {counted(len(cells), 'case')}")


def _report(config: Config, night: dict, records: Sequence[dict | None], earlier: Sequence[Night]) -> None:
    """Write gate.json, JUnit XML, Markdown and HTML, each whole; Markdown goes to GitHub's page as well."""
    summary = nightly.render(night)
    with usage_errors():
        write_text(config.out / "gate.json", json.dumps(night, allow_nan=False) + "\n")
        write_text(config.out / "junit.xml", junit.render(night))
        write_text(config.out / "summary.md", summary + "\n")
        write_text(config.out / "report.html", html.render_gate(night, records, earlier))
    if page := os.environ.get(STEP_SUMMARY):
        try:
            with open(page, "a", encoding="utf-8") as file:
                file.write(summary + "\n")
        except OSError as error:
            raise UsageError(f"{STEP_SUMMARY}: {page} cannot be written ({error.strerror}), expected a file") from None
