"""Before a pass is run: does an engine reserve the rows that a tree needs? That is its budget and one, the root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import UsageError

KINDS = ("per_request", "total", "sizes")


@dataclass(frozen=True)
class Problem:
    """A buffer that is too small. `request` is None where all requests share it."""

    buffer: str
    request: str | None
    needed: int
    reserved: int
    hint: str = ""

    def __str__(self) -> str:
        who = f"request {self.request} needs" if self.request is not None else "the batch needs"
        return (
            f"{self.buffer}: {who} {self.needed} rows, reserved {self.reserved}{'; ' if self.hint else ''}{self.hint}"
        )


def plan(requests: Mapping[str, int], reserved: Mapping[str, Mapping[str, object]]) -> list[Problem]:
    """What does not fit, without a forward pass; an empty list if all does.

    requests: the draft budget of each request, by its id. reserved: what the engine says that it sets aside, by buffer
    (key and value slots, state slots, convolution windows ...), each with one of
        {"per_request": rows}     rows for each request
        {"total": rows}           rows that the whole batch shares
        {"sizes": [rows, ...]}    rows of the batches that were captured, as graphs are; the largest one counts
    Raises UsageError for budgets or rows that are no numbers of at least 0, and for a buffer of another form.
    """
    needed = {name: _rows(f"request {name}: budget", budget) + 1 for name, budget in requests.items()}
    batch, found = sum(needed.values()), []
    for buffer, form in reserved.items():
        if not isinstance(form, Mapping) or len(form) != 1 or next(iter(form)) not in KINDS:
            raise UsageError(f"plan: {buffer} is {form!r:.60}, expected an object with one of {', '.join(KINDS)}")
        ((kind, value),) = form.items()
        if kind == "per_request":
            rows = _rows(f"{buffer}: per_request", value)
            hint = _hint(rows, max(needed.values(), default=0), 1)
            found += [Problem(buffer, name, want, rows, hint) for name, want in needed.items() if want > rows]
            continue
        if kind == "sizes":
            if not isinstance(value, (list, tuple)) or not value:
                raise UsageError(f"plan: {buffer}: sizes is {value!r:.60}, expected a list of numbers")
            value = max(_rows(f"{buffer}: sizes", size) for size in value)
        rows = _rows(f"{buffer}: {kind}", value)
        if batch > rows:
            found.append(Problem(buffer, None, batch, rows, _hint(rows, batch, len(needed))))
    return found


def _hint(rows: int, needed: int, requests: int) -> str:
    return "one row short for each request: its root" if needed - rows == requests else ""


def _rows(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"plan: {what} is {value!r:.60}, expected a number of at least 0")
    return value
