"""What earlier nights came to, in one SQLite file: gates that run at once share it, older files are migrated.

A run is stored whole, in one transaction, or not at all; storing it twice changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from ..base.errors import UsageError
from .stored import Code, Number, Seconds, read

MIGRATIONS = (  # each takes the file from the version that is its place to the next; never change one, add one
    (
        """CREATE TABLE runs (id TEXT PRIMARY KEY, gate TEXT NOT NULL, started TEXT NOT NULL, fingerprint TEXT NOT NULL,
           environment TEXT NOT NULL, exit_code INTEGER NOT NULL)""",
        """CREATE TABLE cells (run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, cell TEXT NOT NULL,
           verdict TEXT NOT NULL, reason TEXT NOT NULL, exit_code INTEGER NOT NULL, seconds REAL NOT NULL,
           PRIMARY KEY (run, cell))""",
        """CREATE TABLE metrics (run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, cell TEXT NOT NULL,
           name TEXT NOT NULL, value REAL, PRIMARY KEY (run, cell, name))""",
        "CREATE INDEX runs_by_gate ON runs (gate, started)",
    ),
)
WAIT = 60  # seconds that a writer waits for another


@dataclass(frozen=True)
class CellNight:
    """One cell of one night. A metric is None where it was not finite."""

    verdict: str
    reason: str
    exit_code: Code
    seconds: Seconds
    metrics: dict[str, Number | None]


@dataclass(frozen=True)
class Night:
    """One finished run of a gate. `started` is ISO 8601 in UTC; `environment` holds strings."""

    run: str
    gate: str
    started: str
    fingerprint: str
    environment: Mapping[str, str]
    exit_code: int
    cells: Mapping[str, CellNight]


def store(path: str | Path, night: Night) -> None:
    """Add a night; one that is already there stays as it is. Raises UsageError for a file that cannot be used."""
    with _open(path) as db, _transaction(db):
        if db.execute("SELECT 1 FROM runs WHERE id = ?", (night.run,)).fetchone():
            return
        environment = json.dumps(dict(night.environment), sort_keys=True)
        row = (night.run, night.gate, night.started, night.fingerprint, environment, night.exit_code)
        db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
        for name, cell in night.cells.items():
            row = (night.run, name, cell.verdict, cell.reason, cell.exit_code, cell.seconds)
            db.execute("INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?)", row)
            rows = [(night.run, name, metric, value) for metric, value in cell.metrics.items()]
            db.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)


def nights(path: str | Path, gate: str, last: int, *, but: str = "") -> list[Night]:
    """Return the last so many nights of a gate, the oldest first, without the run `but`. No file: none yet."""
    if not Path(path).exists():
        return []
    with _open(path) as db:
        db.execute("BEGIN")  # one state of the file for all that follows
        rows = db.execute(
            "SELECT id, started, fingerprint, environment, exit_code FROM runs WHERE gate = ? AND id <> ? "
            "ORDER BY started DESC, rowid DESC LIMIT ?",
            (gate, but, last),
        ).fetchall()
        found = [
            Night(run, gate, started, fingerprint, json.loads(environment), code, _cells(db, run))
            for run, started, fingerprint, environment, code in reversed(rows)
        ]
        db.execute("COMMIT")
    return found


def _cells(db: sqlite3.Connection, run: str) -> dict[str, CellNight]:
    metrics: dict[str, dict[str, float | None]] = {}
    for cell, name, value in db.execute("SELECT cell, name, value FROM metrics WHERE run = ? ORDER BY rowid", (run,)):
        metrics.setdefault(cell, {})[name] = value
    rows = db.execute(
        "SELECT cell, verdict, reason, exit_code, seconds FROM cells WHERE run = ? ORDER BY rowid", (run,)
    ).fetchall()
    names = [each.name for each in fields(CellNight)]
    return {
        cell: read(CellNight, dict(zip(names, (*rest, metrics.get(cell, {})), strict=True))) for cell, *rest in rows
    }


def check_history(path: str | Path) -> None:
    """Raise UsageError, before a long run, if `store` could not write there. Migrates an older file."""
    with _open(path):
        pass


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[sqlite3.Connection]:
    """Yield the file, made or migrated if need be."""
    try:
        db = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
    except sqlite3.Error as error:
        raise UsageError(f"history: {path}: {error}, expected a file in a folder that can be written") from None
    try:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        _migrate(db, path)
        yield db
    except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:  # values of other kinds than were written
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        step = "make room on its disk" if full else "move it away to begin a new one"
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"history: {path}: {said}, expected a history of ddtree-check that can be written; {step}"
        ) from None
    finally:
        db.close()


def _migrate(db: sqlite3.Connection, path: str | Path) -> None:
    known = len(MIGRATIONS)
    if _version(db) == known:
        return
    with _transaction(db):  # another run may have done it while this one waited: the version is read again
        version = _version(db)
        if version > known:
            raise UsageError(
                f"history: {path} has version {version}, this ddtree-check knows up to {known}; take a newer "
                "ddtree-check, or another file"
            )
        if version == 0 and db.execute("SELECT name FROM sqlite_master LIMIT 1").fetchone():
            raise UsageError(f"history: {path} is another program's database, expected a new file or a history")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {known}")
    db.execute("PRAGMA journal_mode = WAL")  # kept in the file; not before it is known to be ours


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Do all of it or none; a second writer waits before it reads anything."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
