"""plan: what a tree needs against what an engine says that it reserves, before anything is run."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.conclusion import DEFECT, PASS
from ...base.errors import UsageError, usage_errors
from ...base.files import parse_json, read_text
from ...base.options import whole_numbers
from ...engines.capacity import SCHEMA, Need, batches, needs, parse_reserved
from ...report.layout import Table, laid_out
from ...report.record import check_writable, write_record
from ...report.text import plain
from .options import Quiet
from .output import show_text, width

BUFFERS = ("kv", "state", "conv", "graph")  # what a server sets aside for a tree, by the names in --reserved's help
SLOTS = ("slots", "rows", "intermediate")  # further ones that SGLang's pools have
NAMED = 4  # requests of one need that are named
LARGEST = 4096  # requests in one batch: more is a slip of the finger


def plan(
    reserved: Annotated[
        str,
        typer.Option(
            help="What the engine sets aside: kv=total:256,state=16,graph=sizes:17/64,slots=requests:8 (a number alone "
            "is rows for each request), or a .json file of {buffer: {per_request, total, sizes or requests}}.",
            show_default=False,
        ),
    ],
    budget: Annotated[str, typer.Option(help="Draft nodes per tree; several are taken by turns.")] = "64",
    requests: Annotated[str, typer.Option(help="Requests in a batch; several sizes are batches of their own.")] = "1",
    json: Annotated[str | None, typer.Option(help="Write what was found to this file.")] = None,
    quiet: Quiet = False,
):
    """Compare the rows that trees need, a budget and its root for each request, with what an engine reserves for keys
    and values, states, convolution windows and graphs. Runs no model. Exit code 1 if anything is too small."""
    budgets, sizes = whole_numbers("budget", budget), whole_numbers("requests", requests)
    if max(sizes) > LARGEST:
        raise UsageError(f"requests: got {max(sizes)}, expected at most {LARGEST}")
    buffers = _reserved(reserved)
    if json is not None:
        check_writable(json)
    found = [(size, needs(batch, buffers)) for size, batch in zip(sizes, batches(budgets, sizes), strict=True)]
    short = [(size, need) for size, each in found for need in each if need.short]
    code = DEFECT if short else PASS
    last = f"verdict: {code.text}, {_count(short, found)}, no pass was run, exit code {code}"
    if json is not None:
        write_record(json, _record(budgets, buffers, found, code))
    unstated = [name for name in BUFFERS if not any(name in buffer for buffer in buffers)]
    unknown = [plain(buffer) for buffer in buffers if not any(name in buffer for name in (*BUFFERS, *SLOTS))]
    notes = [f"Not stated, so not looked at: {', '.join(unstated)}."] if unstated else []
    if unknown:
        notes.append(f"Compared as given, though no name of them is known: {', '.join(unknown)}.")
    show_text(laid_out([_table(found), *_lines(short), *notes, last], width(), quiet))
    return code


def _reserved(text: str) -> dict:
    if not text.endswith(".json"):
        return parse_reserved(text)
    with usage_errors():
        found = parse_json(read_text(text), text)
    if not isinstance(found, dict) or not found:
        raise UsageError(f"reserved: {text} holds {found!r:.60}, expected an object with a buffer a key")
    return found


def _table(found: list[tuple[int, list[Need]]]) -> Table:
    """Return the table; requests of one need share a row: a batch of 64 is not 64 rows."""
    rows = []
    for size, each in found:
        groups: dict[tuple, list[Need]] = {}
        for need in each:
            groups.setdefault((need.buffer, need.request is None, need.needed), []).append(need)
        for group in groups.values():
            one = group[0]
            who = f"all {size}" if one.request is None else _span([need.request for need in group])
            share = (f"{rows_ / size:g}" for rows_ in (one.needed, one.reserved)) if one.request is None else ("", "")
            verdict = f"short by {one.needed - one.reserved}" if one.short else "fits"
            rows.append((plain(one.buffer), size, who, one.needed, one.reserved, *share, verdict))
    headers = ("buffer", "batch", "request", "needed", "reserved", "needed each", "reserved each", "verdict")
    return Table("Rows needed and reserved, by buffer", headers, rows, spare=("reserved each", "needed each"))


def _span(names: list[str]) -> str:
    return " ".join(names) if len(names) <= NAMED else f"{' '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _lines(short: list[tuple[int, Need]]) -> list[str]:
    """Return the first request that each buffer is short for, in the smallest batch where it is."""
    first: dict[str, str] = {}
    for size, need in short:
        first.setdefault(need.buffer, f"batch of {size}: {plain(need)}")
    return ["\n".join(first.values())] if first else []


def _count(short: list[tuple[int, Need]], found: list[tuple[int, list[Need]]]) -> str:
    buffers = len({need.buffer for _, need in short})
    return f"{buffers} of {len({need.buffer for _, each in found for need in each})} buffers too small"


def _record(budgets, buffers, found, code: int) -> dict:
    parts = [{"requests": size, "needs": [need.to_json() for need in each]} for size, each in found]
    return {"schema": SCHEMA, "budgets": list(budgets), "reserved": buffers, "batches": parts, "exit_code": int(code)}
