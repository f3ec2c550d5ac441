"""The rows of `figures` as cells: each format by its name, for a place in a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..judge.figures import Column, Look, values
from .text import number, token_text

CONTROL = "tree_unforked"
NOT_JUDGED = "not judged"
NONE = "-"  # a mode that was not run or judged, or a record that is older than the column


@dataclass(frozen=True)
class Place:
    """A case of a record, and the node and the mode that a cell is about."""

    record: dict
    case: dict
    node: dict | None = None
    mode: str | None = None

    @property
    def figures(self) -> dict:
        return self.node[self.mode]

    def token(self, token: int | None) -> str:
        return token_text(token, self.record.get("tokens", {}))

    def margin(self) -> str:
        return number(self.node["ar"]["margin"])


def floor_text(floor: float | None) -> str:
    """Return a floor; a mode that could not be judged has none."""
    return NONE if floor is None else number(floor)


def mode_verdict(record: dict, case: dict, mode: str) -> str:
    """Return a mode's verdict in words: the negative control must fail, and says so."""
    verdict = case["modes"][mode]["verdict"]
    if mode != CONTROL or mode in record["settings"]["require"]:
        return verdict
    law = case["leak_law"]
    if verdict == "fail":
        off = law["outside"] or law["clean_bitwise_equal"] is False
        return "fail (NOT as predicted)" if off else "fail (expected: control)"
    return "pass (nothing to leak)" if verdict == "pass" else verdict


FORMATS = {  # name -> text of a recorded value at a place
    "count": lambda count, place: count,
    "given": lambda count, place: NONE if count is None else count,
    "number": lambda figure, place: number(figure),
    "bits": lambda _, place: (place.node.get("exact") or {"value": NONE})["value"],
    "floor": lambda floor, place: floor_text(floor),
    # KL and total variation, which rows that were recorded in part do not give
    "share": lambda share, place: (
        "unknown" if share is None and place.figures["max_abs"] is not None else number(share)
    ),
    "token": lambda token, place: place.token(token),
    "verdict": lambda verdict, place: verdict or NOT_JUDGED,
    "mode verdict": lambda _, place: mode_verdict(place.record, place.case, place.mode),
    "with verdict": lambda figure, place: f"{number(figure)} {place.figures['verdict'] or NOT_JUDGED}",
    "with floor": lambda figure, place: f"{number(figure)} (floor {floor_text(place.figures['floor'])})",
    "with margin": lambda token, place: f"{place.token(token)} by a margin of {place.margin()}",
    "margin": lambda _, place: place.margin(),
    "source": lambda _, place: place.node["read_from" if place.mode in (None, CONTROL) else "parent"],
    "choice": lambda _, place: place.token(place.figures["argmax"]),
    "change": lambda _, place: f"{place.token(place.node['ar']['argmax'])} → {place.token(place.figures['argmax'])}",
}


def looks(view: str, table: Sequence[Column], mode: str = "") -> list[Look]:
    """Return the looks of a view's columns in their order, headed by the mode where one is given."""
    chosen = [column.views[view] for column in table if view in column.views]
    return [replace(look, header=f"{mode} {look.header}".strip()) for look in chosen]


def cells(view: str, table: Sequence[Column], entry: Mapping, place: Place) -> list:
    """Return the cells of a view. entry: what the record holds under the names of the table."""
    columns = [column for column in table if view in column.views]
    recorded = values(entry, [column.name for column in columns], NONE)
    return [
        NONE if figure == NONE else FORMATS[column.views[view].format](figure, place)
        for column, figure in zip(columns, recorded, strict=True)
    ]


def phrases(view: str, table: Sequence[Column], entry: Mapping, place: Place, between: str = " ") -> list[str]:
    """Return the cells of a view, each after its header."""
    row = cells(view, table, entry, place)
    return [
        between.join(filter(None, [look.header, str(cell)])) for look, cell in zip(looks(view, table), row, strict=True)
    ]
