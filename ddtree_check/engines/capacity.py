"""Before a pass is run: does an engine reserve the rows that a tree needs? That is its budget and one, the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..base.errors import UsageError

KINDS = ("per_request", "total", "sizes", "requests")
SCHEMA = "ddtree-check/plan/1"


@dataclass(frozen=True)
class Need:
    """Rows, or slots of one request each (`unit`), that a buffer must hold; `request` is None where all share it."""

    buffer: str
    request: str | None
    needed: int
    reserved: int
    requests: int = 1
    unit: str = "rows"

    @property
    def short(self) -> bool:
        return self.needed > self.reserved

    @property
    def hint(self) -> str:
        one_each = self.unit == "rows" and self.needed - self.reserved == self.requests
        return "one row short for each request: its root" if one_each else ""

    def __str__(self) -> str:
        who = f"request {self.request} needs" if self.request is not None else "the batch needs"
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.buffer}: {who} {self.needed} {self.unit}, reserved {self.reserved}{hint}"

    def to_json(self) -> dict:
        return {
            "buffer": self.buffer, "request": self.request, "needed": self.needed, "reserved": self.reserved,
            "short": self.short, "hint": self.hint,
        }  # fmt: skip


def plan(requests: Mapping[str, int], reserved: Mapping[str, Mapping[str, object]]) -> list[Need]:
    """Return what does not fit, without a forward pass; an empty list if all does. See `needs`."""
    return [need for need in needs(requests, reserved) if need.short]


def needs(requests: Mapping[str, int], reserved: Mapping[str, Mapping[str, object]]) -> list[Need]:
    """Return rows needed and reserved, buffer by buffer, and request by request where each has its own.

    requests: the draft budget of each request, by its id. reserved: what the engine says that it sets aside, by buffer
    (key and value slots, state slots, convolution windows ...), each with one of
        {"per_request": rows}     rows for each request
        {"total": rows}           rows that the whole batch shares
        {"sizes": [rows, ...]}    rows of the batches that were captured, as graphs are; the largest one counts
        {"requests": slots}       slots of one request each, however large its tree
    Raises UsageError for budgets or rows that are no numbers of at least 0, and for a buffer of another form.
    """
    needed = {name: _rows(f"request {name}: budget", budget) + 1 for name, budget in requests.items()}
    if not isinstance(reserved, Mapping):
        raise UsageError(f"plan: reserved is {reserved!r:.60}, expected an object with a buffer a key")
    batch, listed = sum(needed.values()), []
    for buffer, form in reserved.items():
        if not isinstance(form, Mapping) or len(form) != 1 or next(iter(form)) not in KINDS:
            raise UsageError(f"plan: {buffer} is {form!r:.60}, expected an object with one of {', '.join(KINDS)}")
        ((kind, value),) = form.items()
        if kind == "per_request":
            rows = _rows(f"{buffer}: per_request", value)
            listed += [Need(buffer, name, want, rows) for name, want in needed.items()]
            continue
        if kind == "sizes":
            if not isinstance(value, (list, tuple)) or not value:
                raise UsageError(f"plan: {buffer}: sizes is {value!r:.60}, expected a list of numbers")
            value = max(_rows(f"{buffer}: sizes", size) for size in value)
        amount = _rows(f"{buffer}: {kind}", value)
        want, unit = (len(needed), "slots") if kind == "requests" else (batch, "rows")
        listed.append(Need(buffer, None, want, amount, len(needed), unit))
    return listed


def parse_reserved(text: str) -> dict[str, dict[str, object]]:
    """Read 'kv=total:256,state=16,graph=sizes:17/64,slots=requests:8'; a number alone is rows for each request.

    Raises UsageError naming the part.
    """
    reserved: dict[str, dict[str, object]] = {}
    for part in text.split(","):
        buffer, equals, value = (piece.strip() for piece in part.partition("="))
        kind, colon, rows = value.partition(":")
        kind, rows = (kind, rows) if colon else ("per_request", value)
        numbers = rows.split("/") if kind == "sizes" else [rows]
        if not buffer or not equals or kind not in KINDS or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise UsageError(
                f"reserved: got {part.strip()!r:.60}, expected BUFFER=ROWS for each request, BUFFER=total:ROWS, "
                "BUFFER=sizes:ROWS/ROWS, BUFFER=requests:SLOTS, or a .json file"
            )
        if buffer in reserved:
            raise UsageError(f"reserved: got {buffer!r:.60} twice, expected each buffer once")
        reserved[buffer] = {kind: [int(n) for n in numbers] if kind == "sizes" else int(rows)}
    return reserved


def batches(budgets: Sequence[int], sizes: Sequence[int]) -> list[dict[str, int]]:
    """Return a batch of each size: its requests, numbered from 1, take the budgets by turns."""
    return [{str(place + 1): budgets[place % len(budgets)] for place in range(size)} for size in sizes]


def _rows(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"plan: {what} is {value!r:.60}, expected a number of at least 0")
    return value
