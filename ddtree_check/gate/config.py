"""gate.toml: what is run and where the results go. Says what is wrong with a file by key, value and expectation."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from .. import __version__
from ..base.errors import UsageError, usage_errors
from ..base.files import read_text
from ..base.resources import EMBEDDED
from ..flows.job import RECORDED, Job, select_prompts

SECTIONS = ("gate", "matrix", "settings", "case", "exclude")
DEFAULTS = {
    "name": "gate",
    "out": "reports/gate",
    "history": "reports/history.db",
    "baseline": None,
    "nights": 14,
    "timeout": 1800,
    "factor": 2.0,
}
MATRIX = ("model", "engine", "prompts", "budget", "dtype", "weights", "draft")  # in the order of a cell's name
SECONDS = "a number of seconds, more than 0"
SETTINGS = {  # key -> what it takes
    "acceptance": "a finite number",
    "length": "a whole number",
    "order": "a text",
    "seed": "a whole number",
    "require": "a list of texts",
    "ar": "a text",
    "controls": "a whole number",
    "accept": "a list of texts",
    "wiring": "a text",
    "attribute": "true or false",
    "shape": "a text",
    "candidates": "a whole number",
    "temperature": "a finite number",
    "top_k": "a whole number",
    "top_p": "a finite number",
    "repetition_penalty": "a finite number",
    "presence_penalty": "a finite number",
    "frequency_penalty": "a finite number",
    "history": "a text",
    "draws": "a whole number",
}
OF_JOB = {
    "device": "a text",
    "tp": "a whole number",
    "engine_args": "a list of texts",
    "limit": "a whole number",
    "only": "a list of texts",
    "tree": "a text",
    "oracle": "true or false",
    "rounds": "a whole number",
}
GATE = {
    "name": "a text",
    "out": "a text",
    "history": "a text",
    "baseline": "a text",
    "nights": "a whole number",
    "timeout": SECONDS,
    "factor": "a finite number",
}
KINDS = {
    "a text": lambda value: isinstance(value, str) and bool(value.strip()),
    "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "a finite number": lambda value: isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e12,
    SECONDS: lambda value: KINDS["a finite number"](value) and value > 0,
    "true or false": lambda value: isinstance(value, bool),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
}
LIBRARIES = ("torch", "transformers", "numpy", "sglang", "triton")


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix, or one [[case]] of the file. `timeout` in seconds."""

    name: str
    job: Job
    timeout: float


@dataclass(frozen=True)
class Config:
    """A file, read. `factor` widens what a frozen noise may come to; `text` is the whole file as JSON."""

    path: str
    name: str
    out: Path
    history: Path
    baseline: Path | None
    nights: int
    factor: float
    cells: tuple[Cell, ...]
    text: str


def load_config(path: str | Path) -> Config:
    """Reads a gate.toml. Paths in it are taken from the current directory, as on a command line. Raises UsageError."""
    with usage_errors():
        text = read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}, expected TOML") from None
    where = str(path)
    _known(where, "", data, SECTIONS)
    for section in ("gate", "matrix", "settings"):
        _expect(isinstance(data.get(section, {}), dict), where, section, data.get(section), "a table")
    for section in ("case", "exclude"):
        found = data.get(section, [])
        good = isinstance(found, list) and all(isinstance(part, dict) for part in found)
        _expect(good, where, section, found, f"tables, each beginning with [[{section}]]")
    gate = DEFAULTS | _values(where, "gate", data.get("gate", {}), GATE)
    _expect(gate["nights"] >= 1, where, "gate.nights", gate["nights"], "a number of at least 1")
    _expect(gate["factor"] >= 1, where, "gate.factor", gate["factor"], "a number of at least 1")
    shared = _values(where, "settings", data.get("settings", {}), SETTINGS | OF_JOB)
    cells = []
    if "matrix" in data:
        for chosen in _combinations(where, data["matrix"], data.get("exclude", [])):
            cells.append(Cell(_name(chosen), _job(chosen, shared), gate["timeout"]))
    elif "exclude" in data:
        raise UsageError(f"{where}: exclude: nothing to leave out, expected a [matrix] too")
    for number, case in enumerate(data.get("case", []), start=1):
        cells.append(_one(where, f"case {number}", case, shared, gate["timeout"]))
    if not cells:
        raise UsageError(f"{where}: nothing to run, expected a [matrix] or a [[case]]")
    seen: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            raise UsageError(f"{where}: two cases are named {cell.name!r}; give a [[case]] a name of its own")
        seen.add(cell.name)
    baseline = None if gate["baseline"] is None else Path(gate["baseline"])
    return Config(
        where,
        gate["name"],
        Path(gate["out"]),
        Path(gate["history"]),
        baseline,
        gate["nights"],
        float(gate["factor"]),
        tuple(cells),
        json.dumps(data, sort_keys=True, default=str),
    )


def _one(where: str, what: str, case: dict, shared: dict, timeout: float) -> Cell:
    own = {"name": "a text", "timeout": SECONDS}
    _known(where, what, case, (*own, *MATRIX, *SETTINGS, *OF_JOB))
    chosen = {key: _axis(where, f"{what}: {key}", key, [case[key]])[0] if key in case else None for key in MATRIX}
    rest = {key: value for key, value in case.items() if key not in MATRIX}
    values = _values(where, what, rest, own | SETTINGS | OF_JOB)
    limit = values.pop("timeout", timeout)
    return Cell(values.pop("name", _name(chosen)), _job(chosen, shared | values), limit)


def _combinations(where: str, matrix: dict, excluded: list[dict]) -> list[dict]:
    """Every combination that no [[exclude]] names. One that names none is a slip."""
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
    """The values of one key of the matrix, each once. A budget is a number, or a list of numbers to run together."""
    _expect(isinstance(values, list) and bool(values), where, what, values, "a list with at least one value")
    found = []
    for value in values:
        if key == "budget":
            numbers = value if isinstance(value, list) else [value]
            good = bool(numbers) and all(KINDS["a whole number"](part) and part >= 1 for part in numbers)
            _expect(good, where, what, value, "a number of at least 1, or a list of such numbers")
            value = tuple(dict.fromkeys(numbers))
        else:
            _expect(KINDS["a text"](value), where, what, value, "a text")
        if value not in found:
            found.append(value)
    return found


def _job(chosen: Mapping[str, object], values: Mapping[str, object]) -> Job:
    settings: dict[str, object] = {"budgets": chosen["budget"] or (16, 64)}
    settings |= {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in SETTINGS}
    own = {key: values[key] for key in ("device", "tp", "limit", "tree", "oracle") if key in values}
    own |= {key: tuple(values[key]) for key in ("only", "engine_args") if key in values}
    names = ("model", "engine", "prompts", "dtype", "weights", "draft")
    own |= {key: chosen[key] for key in names if chosen[key] is not None}
    rounds = {"rounds": {"rounds": values["rounds"]}} if "rounds" in values else {}
    return Job(**own, **rounds, settings=settings)


def _name(chosen: Mapping[str, object]) -> str:
    """A name to type and to find again: what was chosen, in the order of MATRIX."""
    words = [
        Path(str(chosen["model"] or EMBEDDED)).name,
        *([str(chosen["engine"])] if chosen["engine"] else []),
        Path(str(chosen["prompts"] or "code")).stem,
        "+".join(map(str, chosen["budget"] or (16, 64))),
        *(str(chosen[key]) for key in ("dtype", "weights", "draft") if chosen[key]),
    ]
    return "/".join(words)


def _values(where: str, section: str, found: dict, kinds: Mapping[str, str]) -> dict:
    _known(where, section, found, kinds)
    for key, value in found.items():
        _expect(KINDS[kinds[key]](value), where, f"{section}.{key}", value, kinds[key])
    return found


def _known(where: str, section: str, found: dict, known: Iterable[str]) -> None:
    """Refuses a key that is not known, and says which one may have been meant."""
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
    """Raises UsageError for what a run of any cell would refuse before it looks for its model. Imports torch."""
    from ..engines import find_engine
    from ..engines.transformers.loading import parse_dtype
    from ..flows.settings import Settings

    for cell in config.cells:
        job = cell.job
        try:
            _expect(job.weights in ("real", "random"), cell.name, "weights", job.weights, "real or random")
            select_prompts(job)
            find_engine(job.engine)
            parse_dtype(job.dtype, None)
            draft = {"draft": job.draft.partition(":")[0]} if job.draft else {}
            Settings(**job.settings, **draft)
        except UsageError as error:
            raise UsageError(f"{config.path}: case {cell.name}: {error}") from None


def fingerprint(config: Config) -> str:
    """What a resumed run must share with the one that was killed: the configuration, the code and the input files."""
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
    """The file of an engine given as module:Class, without importing it."""
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


assert set(DEFAULTS) == set(GATE) and {"model", "engine", "prompts"} <= {field.name for field in fields(Job)}
