"""The record of a self-test as tables: what was injected, what saw it, and what stayed green."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Table, layout
from .terminal import ending
from .text import number, plain


def blocks(record: dict) -> list[Table | str]:
    """Return the whole view: every fault, the kinds, and the ending."""
    good = sum(result["as_expected"] for result in record["results"])
    detail = f"{good} of {len(record['results'])} as expected, {number(record['seconds'])} s"
    return [fault_table(record), kind_table(record), *ending(record, detail)]


def markdown(record: dict, *_) -> str:
    """Return the table of kinds for a README."""
    return layout(kind_table(record), style="github")


def fault_table(record: dict) -> Table:
    rows = []
    for result in record["results"]:
        host = "" if result["model"] is None else f"{result['model']} {result['dtype']}"
        neighbours = len(result["neighbours"])
        green = neighbours - len(result["red_neighbours"])
        verdict = "as expected" if result["as_expected"] else "NOT as expected"
        by, where = result["by"] or "nothing, as it must", _place(result)
        rows.append(
            (result["kind"], plain(result["name"]), host, plain(by), where, f"{green} of {neighbours}", verdict)
        )
    headers = ("kind", "injected", "into", "seen by", "at", "others green", "result")
    return Table("Faults injected into the running engine", headers, rows, spare=("into", "at"))


def _place(result: dict) -> str:
    found = [f"{name} {result[name]}" for name in ("node", "layer", "channel") if result[name] is not None]
    return " ".join(found).replace("channel ", "") if result["expected"] else ""


def kind_table(record: dict) -> Table:
    rows = []
    for kind, title in record["kinds"].items():
        mine = [result for result in record["results"] if result["kind"] == kind]
        if mine:
            rows.append((kind, title, *_counts(mine)))
    clean = [result for result in record["results"] if result["kind"] == "clean"]
    if clean:
        rows.append(("", "the same runs without a fault", *_counts(clean)))
    headers = ("kind", "what", "instances", "caught", "green as they must", "seen by", "other checks red")
    return Table("By kind", headers, rows, spare=("seen by",))


def _counts(results: Sequence[dict]) -> tuple[object, ...]:
    faults = [result for result in results if result["expected"]]
    calm = [result for result in results if not result["expected"]]
    caught = sum(result["caught"] and not result["misplaced"] for result in faults)
    by = ", ".join(dict.fromkeys(result["by"].partition(", batch")[0] for result in faults if result["by"]))
    return (
        len(results),
        f"{caught} of {len(faults)}" if faults else "",
        f"{sum(result['as_expected'] for result in calm)} of {len(calm)}" if calm else "",
        by,
        sum(len(result["red_neighbours"]) for result in results),
    )
