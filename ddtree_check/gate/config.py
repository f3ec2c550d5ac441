"""gate.toml: what is run and where the results go. Says what is wrong with a file by key, value and expectation."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..base.errors import UsageError, usage_errors
from ..base.files import parse_toml, read_text
from ..base.options import Option, group, offered, option, options
from ..base.resources import EMBEDDED
from ..flows.job import RECORDED, RUN, Job, job_of, select_prompts

SECTIONS = ("gate", "matrix", "settings", "case", "exclude")
MATRIX = ("model", "engine", "prompts", "budget", "dtype", "weights", "draft")  # in the order of a cell's name
OPTIONS = {"budget" if each.name == "budgets" else each.name: each for each in offered("compare", RUN)}  # by key
SETTINGS = {key: each for key, each in OPTIONS.items() if key not in MATRIX}


@group("gate")
class Gate:
    """The table [gate]. timeout: seconds for a case; factor: how much a frozen noise may grow."""

    name: str = option("gate", "Its name in the history.")
    out: Path = option(Path("reports/gate"), "Folder of the reports.")
    history: Path = option(Path("reports/history.db"), "File of the earlier nights.")
    baseline: Path | None = option(None, "File of the frozen figures.")
    nights: int = option(14, "Earlier nights to compare with.", least=1)
    timeout: float = option(
        1800, "Seconds for a case.", holds=lambda value: value > 0, expects="a number of seconds, more than 0"
    )
    factor: float = option(2.0, "What a frozen noise may grow by.", least=1)


GATE = {each.name: each for each in options(Gate)}
LIBRARIES = ("torch", "transformers", "numpy", "sglang", "triton")


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix, or one [[case]] of the file. `timeout` in seconds."""

    name: str
    job: Job
    timeout: float


@dataclass(frozen=True)
class Config(Gate):
    """A file, read. `text` is the whole file as JSON."""

    path: str = ""
    cells: tuple[Cell, ...] = ()
    text: str = ""


def load_config(path: str | Path) -> Config:
    """Read a gate.toml. Paths in it are taken from the current directory, as on a command line. Raises UsageError."""
    with usage_errors():
        data = parse_toml(read_text(path), str(path))
    where = str(path)
    _known(where, "", data, SECTIONS)
    for section in ("gate", "matrix", "settings"):
        _expect(isinstance(data.get(section, {}), dict), where, section, data.get(section), "a table")
    for section in ("case", "exclude"):
        found = data.get(section, [])
        good = isinstance(found, list) and all(isinstance(part, dict) for part in found)
        _expect(good, where, section, found, f"tables, each beginning with [[{section}]]")
    gate = _values(where, "gate", data.get("gate", {}), GATE)
    gate = gate | {name: Path(gate[name]) for name in ("out", "history", "baseline") if name in gate}
    shared = _values(where, "settings", data.get("settings", {}), SETTINGS)
    cells, timeout = [], gate.get("timeout", Gate.timeout)
    if "matrix" in data:
        for chosen in _combinations(where, data["matrix"], data.get("exclude", [])):
            cells.append(_cell(where, _name(chosen), chosen | shared, timeout))
    elif "exclude" in data:
        raise UsageError(f"{where}: exclude: nothing to leave out, expected a [matrix] too")
    for number, case in enumerate(data.get("case", []), start=1):
        cells.append(_one(where, f"case {number}", case, shared, timeout))
    if not cells:
        raise UsageError(f"{where}: nothing to run, expected a [matrix] or a [[case]]")
    seen: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            raise UsageError(f"{where}: two cases are named {cell.name!r}; give a [[case]] a name of its own")
        seen.add(cell.name)
    text = json.dumps(data, sort_keys=True, default=str)
    return Config(**gate, path=where, cells=tuple(cells), text=text)


def _one(where: str, what: str, case: dict, shared: dict, timeout: float) -> Cell:
    own = {name: GATE[name] for name in ("name", "timeout")}
    _known(where, what, case, (*own, *MATRIX, *SETTINGS))
    chosen = {key: _axis(where, f"{what}: {key}", key, [case[key]])[0] if key in case else None for key in MATRIX}
    values = _values(where, what, {key: value for key, value in case.items() if key not in MATRIX}, own | SETTINGS)
    limit, name = values.pop("timeout", timeout), values.pop("name", _name(chosen))
    return _cell(where, name, chosen | shared | values, limit)


def _cell(where: str, name: str, values: Mapping[str, object], timeout: float) -> Cell:
    """Return a case of the gate. Raises UsageError for values that do not go together."""
    try:
        return Cell(name, job_of("compare", {OPTIONS[key].name: value for key, value in values.items()}), timeout)
    except UsageError as error:
        raise UsageError(f"{where}: case {name}: {error}") from None


def _combinations(where: str, matrix: dict, excluded: list[dict]) -> list[dict]:
    """Return every combination that no [[exclude]] names. One that names none is a slip."""
    _known(where, "matrix", matrix, MATRIX)
    default: dict[str, list] = {key: [None] for key in MATRIX} | {"budget": [(16,), (64,)]}
    axes = default | {key: _axis(where, f"matrix.{key}", key, value) for key, value in matrix.items()}
    found = [dict(zip(MATRIX, values, strict=True)) for values in itertools.product(*(axes[key] for key in MATRIX))]
    for number, rule in enumerate(excluded, start=1):
        what = f"exclude {number}"
        _known(where, what, rule, MATRIX)
        _expect(bool(rule), where, what, rule, f"some of {', '.join(MATRIX)}")
        wanted = {key: _axis(where, f"{what}: {key}", key, [value])[0] for key, value in rule.items()}
        kept = [chosen for chosen in found if any(chosen[key] != value for key, value in wanted.items())]
        if len(kept) == len(found):
            raise UsageError(f"{where}: {what}: {rule} is no combination of the matrix, expected one that is")
        found = kept
    return found


def _axis(where: str, what: str, key: str, values: object) -> list:
    """Return the values of one key of the matrix, each once. A budget is a number, or a list that runs together."""
    _expect(isinstance(values, list) and bool(values), where, what, values, "a list with at least one value")
    found = []
    for value in values:
        if key == "budget" and not isinstance(value, list):
            value = [value]
        _check(where, what, OPTIONS[key], value)
        value = tuple(dict.fromkeys(value)) if key == "budget" else value
        if value not in found:
            found.append(value)
    return found


def _name(chosen: Mapping[str, object]) -> str:
    """Return a name to type and to find again: what was chosen, in the order of MATRIX."""
    words = [
        Path(str(chosen["model"] or EMBEDDED)).name,
        *([str(chosen["engine"])] if chosen["engine"] else []),
        Path(str(chosen["prompts"] or "code")).stem,
        "+".join(map(str, chosen["budget"] or (16, 64))),
        *(str(chosen[key]) for key in ("dtype", "weights", "draft") if chosen[key]),
    ]
    return "/".join(words)


def _values(where: str, section: str, table: dict, known: Mapping[str, Option]) -> dict:
    _known(where, section, table, known)
    for key, value in table.items():
        _check(where, f"{section}.{key}", known[key], value)
    return table


def _check(where: str, what: str, each: Option, value: object) -> None:
    if problem := each.problem(value):
        raise UsageError(f"{where}: {what}: {problem}")


def _known(where: str, section: str, found: dict, known: Iterable[str]) -> None:
    """Refuse a key that is not known, and says which one may have been meant."""
    known = list(known)
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise UsageError(f"{where}: {f'{section}: ' if section else ''}unknown key {key!r}; {meant}")


def _expect(good: bool, where: str, what: str, got: object, expected: str) -> None:
    if not good:
        raise UsageError(f"{where}: {what}: got {got!r:.60}, expected {expected}")


def validate(config: Config) -> None:
    """Raise UsageError for what a run of any cell would refuse before it looks for its model. Imports torch."""
    from ..engines.registry import find_engine
    from ..engines.transformers.loading import parse_dtype

    for cell in config.cells:
        try:
            select_prompts(cell.job)
            find_engine(cell.job.engine)
            parse_dtype(cell.job.dtype, None)
        except UsageError as error:
            raise UsageError(f"{config.path}: case {cell.name}: {error}") from None


def fingerprint(config: Config) -> str:
    """Return what a resumed run must share with the killed one: the configuration, the code and the input files."""
    digest = hashlib.blake2b(digest_size=16)

    def add(*words: object) -> None:
        digest.update(json.dumps(words, default=str).encode())

    add(config.text, __version__, *(_version(name) for name in LIBRARIES))
    package = Path(__file__).resolve().parents[1]
    for path in sorted(package.rglob("*.py")):
        add(str(path.relative_to(package)), path.read_bytes().hex())
    for job in (cell.job for cell in config.cells):
        draft = job.draft.removeprefix(RECORDED) if (job.draft or "").startswith(RECORDED) else None
        for name in (job.prompts, job.tree, draft, _module_file(job.engine)):
            if name and Path(name).is_file():
                add(name, hashlib.blake2b(Path(name).read_bytes()).hexdigest())
        folder = Path(job.model or "")
        if job.model and folder.is_dir():
            add(job.model, sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir()))
    return digest.hexdigest()


def _module_file(engine: str) -> str | None:
    """Return the file of an engine given as module:Class, without importing it."""
    module, colon, _ = engine.partition(":")
    if not colon or not re.fullmatch(r"\w+(\.\w+)*", module):
        return None
    place = Path(*module.split("."))
    found = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    return None if found is None else str(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
