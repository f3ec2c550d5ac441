"""A night of the gate as GitHub Markdown: the verdict first, then what is wrong, then every cell and its trend."""

from __future__ import annotations

from ..base.words import counted
from ..judge.figures import METRICS, NIGHT
from .layout import Table
from .markdown import escaped, table
from .text import number, plain

LAST = 7  # nights whose verdicts stand in a row
TRENDS = {  # metric -> header
    column.name.format("tree_forked"): column.views[NIGHT].header for column in METRICS if NIGHT in column.views
}


def render(night: dict) -> str:
    """Return the whole page. `night` is what gate.json holds."""
    parts = [f"# {escaped(night['line'])}"]
    where = [
        f"{key} {night['environment'][key]}"
        for key in ("device", "torch", "transformers")
        if key in night["environment"]
    ]
    frozen = f"baseline of {night['frozen'][:19]}" if night["frozen"] else "no baseline"
    parts.append(
        escaped(plain(" · ".join([night["started"][:19], *where, frozen, counted(night["earlier"], "earlier night")])))
    )
    bad = [cell for cell in night["cells"] if cell["verdict"] != "pass"]
    if bad:
        rows = [
            (plain(cell["name"]), cell["verdict"], "; ".join(whys(cell)) or "see the record", plain(cell["command"]))
            for cell in bad
        ]
        parts.append(table(Table("What is not green", ("case", "verdict", "why", "again"), rows)))
    parts += [escaped(plain(note)) for note in night["notes"] if not note.startswith("drift: ")]  # they stand above
    rows = [
        (
            plain(cell["name"]),
            cell["verdict"],
            " ".join([*cell["nights"][-LAST:], cell["verdict"]]),
            f"{cell['seconds']:.1f}",
            *(trend_text(cell["metrics"].get(name)) for name in TRENDS),
        )
        for cell in night["cells"]
    ]
    headers = ("case", "verdict", "last nights", "seconds", *TRENDS.values())
    parts.append(table(Table("Cases (a figure: now, and the median of the earlier nights)", headers, rows)))
    return "\n\n".join(parts)


def whys(cell: dict) -> list[str]:
    """Return what is wrong with a cell: its reason, its drifts, and where its faults enter."""
    reasons = [cell["reason"]] if cell["reason"] else []
    return [plain(text) for text in (*reasons, *map(drift_text, cell["drifts"]), *where_texts(cell))]


def where_texts(cell: dict) -> list[str]:
    """Return where the faults enter that were looked into, in the modes that decide."""
    return [line for case in cell["cases"] for line in case["where"]]


def drift_text(drift: dict) -> str:
    """Return 'tree_forked.max_abs 0.5, frozen at most 0.0001'."""
    low, high = drift["low"], drift["high"]
    if low is None or high is None:
        bounds = f"at most {number(high)}" if low is None else f"at least {number(low)}"
    else:
        bounds = f"{number(low)} to {number(high)}"
    value = "is not measured any more" if drift.get("gone") else number(drift["value"])
    return f"{drift['metric']} {value}, frozen {bounds}"


def trend_text(metric: dict | None) -> str:
    """Return '1.2e-05 (1.1e-05)', with 'new high' or 'new low' where it left the range of the earlier nights."""
    if metric is None:
        return "-"
    text = number(metric["value"])
    if "median" in metric:
        text += f" ({number(metric['median'])})"
    return text + (f" new {metric['new']}" if metric.get("new") else "")
