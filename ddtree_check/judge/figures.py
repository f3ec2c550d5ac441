"""The table of figures: what a record holds of each node and mode, how it is computed and where it is shown.

A new column is one row here. The record, CSV and every view read this table; `report.columns` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .exact import CERTIFIED

WORST, CASE, NODE, HOVER, CASES = "worst", "case", "node", "hover", "cases"  # worst nodes, all of a case, one, HTML


@dataclass(frozen=True)
class Look:
    """How a view shows a column: its header, its format by name, and its rank among the columns that a narrow screen
    leaves out (the highest goes first, 0 stays)."""

    header: str
    format: str = "number"
    spare: int = 0


@dataclass(frozen=True)
class Column:
    """One figure.

    name      its key in the record and its header in CSV, `ar.` for one inside `ar`; None: it is shown, not recorded
    compute   its value, which `json_values` makes JSON's, from an `Outcome` and a node (FACTS), a node and a mode
              (FIGURES) or a mode (RESULTS)
    views     its look in each view that shows it
    """

    name: str | None = None
    compute: Callable | None = None
    views: Mapping[str, Look] = field(default_factory=dict)


def _tree(name: str) -> Callable:
    return lambda outcome, node: getattr(outcome.case.tree, name)[node]


def _difference(name: str) -> Callable:
    return lambda outcome, node, mode: getattr(outcome.differences[mode], name)[node]


def _given(values: Sequence | None, node: int) -> object:
    """Return the value of a node; null for a mode that has none, since it could not be judged."""
    return None if values is None or not len(values) else values[node]


def _count(verdict: str) -> Callable:
    return lambda outcome, mode: outcome.results[mode].count(verdict)


def _errors(summary: Callable) -> Callable:
    """Return what computes a figure of all errors of a mode; null where it was not run."""
    return lambda outcome, mode: summary(outcome.differences[mode].max_abs) if mode in outcome.differences else None


def _certified(outcome, mode: str) -> int | None:
    """Return how many nodes of the tree pass the exact checks certify; null for what they do not judge."""
    return len(outcome.bits.of(CERTIFIED)) if outcome.bits and mode == "tree_forked" else None


FACTS = (  # of a node
    Column("node", lambda outcome, node: node, {WORST: Look("node", "count"), CASE: Look("node", "count")}),
    Column("token", _tree("tokens"), {CASE: Look("token", "token")}),
    Column("parent", _tree("parents"), {WORST: Look("parent", "count"), CASE: Look("parent", "count")}),
    Column(views={WORST: Look("read from", "source"), CASE: Look("unforked reads", "source", 3)}),
    Column("depth", _tree("depth"), {WORST: Look("depth", "count", 3), CASE: Look("depth", "count", 2)}),
    Column("leaked", _tree("leaked"), {WORST: Look("leaked", "count", 2), CASE: Look("leaked", "count", 1)}),
    Column("clean", lambda outcome, node: node not in outcome.leak.contaminated),
    Column("read_from", lambda outcome, node: outcome.plan.state[node]),
    Column("rows_since_skip", lambda outcome, node: outcome.plan.rows_since_skip[node]),
    Column(
        "ar.argmax",
        lambda outcome, node: outcome.ar.argmax[node],
        {CASE: Look("ar token", "token"), NODE: Look("ar chooses", "with margin"), HOVER: Look("ar chooses", "token")},
    ),
    Column(views={CASE: Look("in bits", "bits", 1), HOVER: Look("in bits", "bits")}),
    Column("ar.margin", lambda outcome, node: outcome.ar.margin[node], {HOVER: Look("margin")}),
)
FIGURES = (  # of a node in a mode
    Column(
        "verdict",
        lambda outcome, node, mode: _given(outcome.results[mode].verdicts, node),
        {NODE: Look("verdict", "verdict"), HOVER: Look("", "verdict")},
    ),
    Column("argmax", _difference("run_argmax")),
    Column(
        "max_abs",
        _difference("max_abs"),
        {WORST: Look("|Δ|"), CASE: Look("|Δ|", "with verdict"), NODE: Look("|Δ|"), HOVER: Look("|Δ|", "with floor")},
    ),
    Column(
        "floor",
        lambda outcome, node, mode: _given(outcome.floors[mode], node),
        {WORST: Look("floor", "floor"), NODE: Look("floor", "floor")},
    ),
    Column("rms", _difference("rms"), {NODE: Look("rms", spare=1)}),
    Column("kl", _difference("kl"), {NODE: Look("KL", "share"), HOVER: Look("KL")}),
    Column("tv", _difference("tv"), {NODE: Look("TV", "share", 2)}),
    Column("ar_rank", _difference("ar_rank"), {NODE: Look("rank of ar's", "count")}),
    Column(views={WORST: Look("margin", "margin", 1)}),
    Column(
        views={
            WORST: Look("ar → mode token", "change"),
            NODE: Look("token", "choice"),
            HOVER: Look("chooses", "choice"),
        }
    ),
)
RESULTS = (  # of a mode in a case
    Column("verdict", lambda outcome, mode: outcome.results[mode].verdict, {CASES: Look("verdict", "mode verdict")}),
    Column("reason", lambda outcome, mode: outcome.results[mode].reason),
    Column("nodes", lambda outcome, mode: len(outcome.case.tree), {CASES: Look("nodes", "count", 2)}),
    Column("pass", _count("pass"), {CASES: Look("pass", "count", 1)}),
    *(Column(verdict, _count(verdict), {CASES: Look(verdict, "count")}) for verdict in ("tie", "leak", "flip")),
    Column("certified", _certified, {CASES: Look("in bits", "given", 1)}),
    Column("max_abs", _errors(np.max), {CASES: Look("max |Δ|")}),
    Column("median_abs", _errors(np.median), {CASES: Look("median |Δ|", spare=3)}),
)


def names(table: Sequence[Column]) -> list[str]:
    """Return the names of the recorded columns, in their order."""
    return [column.name for column in table if column.name]


def entry(table: Sequence[Column], outcome, *at) -> dict:
    """Return what a record holds of a node or a mode. at: what `Column.compute` takes beside the outcome."""
    values: dict = {}
    for column in table:
        if column.name:
            group, _, key = column.name.rpartition(".")
            (values.setdefault(group, {}) if group else values)[key] = column.compute(outcome, *at)
    return values


def values(entry: Mapping, names: Sequence[str | None], missing: object = None) -> list:
    """Return recorded figures by name, `missing` where the record is older than the column, None for no name."""
    parts = [(name or "").rpartition(".") for name in names]
    return [(entry.get(group, {}) if group else entry).get(key, missing) if key else None for group, _, key in parts]
