"""A column is one row of `figures`: it is seen in the record, in CSV and in every view, and without the row nowhere."""

from __future__ import annotations

import json

import pytest

from ddtree_check.judge import figures
from ddtree_check.judge.figures import CASE, CASES, HOVER, NODE, WORST, Column, Look
from ddtree_check.report import columns, html, markdown, spreadsheet, terminal, views
from ddtree_check.report.layout import laid_out
from tests.tiny import hand_record

ROWS = {  # table -> a column that nobody has yet
    "FACTS": Column(
        "children",
        lambda outcome, node: len(outcome.case.tree.children[node]),
        {view: Look("children of it", "count") for view in (WORST, CASE, NODE, HOVER)},
    ),
    "FIGURES": Column(
        "of_floor",
        lambda outcome, node, mode: float(outcome.differences[mode].max_abs[node] / outcome.floors[mode][node]),
        {view: Look("share of the floor") for view in (WORST, CASE, NODE, HOVER)},
    ),
    "RESULTS": Column(
        "least_abs",
        lambda outcome, mode: float(outcome.differences[mode].max_abs.min()),
        {CASES: Look("least error", spare=9)},
    ),
}


def add(monkeypatch, *tables):
    for name in tables:
        monkeypatch.setattr(figures, name, (*getattr(figures, name), ROWS[name]))


def written(record: dict) -> dict[str, str]:
    """Return the text of the cases of a record, and of each view of it."""
    case = record["cases"][0]
    page = html._Page()
    page.run(record, "record")
    return {
        "record": json.dumps(record["cases"]),
        "csv": spreadsheet.render_nodes(record, record["cases"]),
        "whole": views.render(record),
        "case": laid_out(terminal.case_blocks(record, case), None),
        "node": laid_out(terminal.node_blocks(record, case, len(case["nodes"]) - 1), None),
        "markdown": markdown.render(views.blocks(record)),
        "html tables": html.render(record),
        "html trees": json.dumps(page.figures, ensure_ascii=False),
    }


@pytest.fixture(scope="module")
def run():
    """Return a function that checks one prompt on a small model."""
    pytest.importorskip("torch")
    from ddtree_check.flows.check import Item, Settings, check
    from tests.models import prompt, small

    model = small()
    return lambda: check(model, [Item("p", prompt(12, 1))], Settings(budgets=(24,)))


SHOWN = {  # table -> the views in which its header, or its name, stands
    "FACTS": {"record", "csv", "whole", "case", "node", "markdown", "html tables", "html trees"},
    "FIGURES": {"record", "csv", "whole", "case", "node", "markdown", "html tables", "html trees"},
    "RESULTS": {"record", "whole", "markdown", "html tables"},
}


@pytest.mark.parametrize("table", ROWS)
def test_a_row_is_a_column_of_the_record_and_of_every_view(table, run, monkeypatch):
    column = ROWS[table]
    words = {column.name, *(look.header for look in column.views.values())}

    def views() -> set[str]:
        return {view for view, text in written(run()).items() if any(word in text for word in words)}

    assert views() == set()
    add(monkeypatch, table)
    assert views() == SHOWN[table]


def test_a_row_computes_what_it_says(run, monkeypatch):
    add(monkeypatch, *ROWS)
    record = run()
    (case,) = record["cases"]
    for node in case["nodes"]:
        assert node["children"] == case["tree"]["parents"].count(node["node"])
        for mode in case["modes"]:
            value = node[mode]
            assert value["of_floor"] == pytest.approx(value["max_abs"] / value["floor"])
    for mode, result in case["modes"].items():
        assert result["least_abs"] == min(node[mode]["max_abs"] for node in case["nodes"])


def test_a_record_that_is_older_than_a_column_can_be_shown(monkeypatch):
    old = hand_record("a/3")
    add(monkeypatch, *ROWS)
    text = laid_out(terminal.node_blocks(old, old["cases"][0], 3), None)
    assert "share of the floor" in text and text.splitlines()[-1].split()[-1] == columns.NONE
    assert "children of it -" in text and "not finite" not in text
    header, *rows = spreadsheet.render_nodes(old, old["cases"]).splitlines()
    assert "children" in header.split(",") and all(len(row.split(",")) == len(header.split(",")) for row in rows)


def test_every_format_of_the_table_is_known():
    tables = (*figures.FACTS, *figures.FIGURES, *figures.RESULTS)
    used = {look.format for column in tables for look in column.views.values()}
    assert used == columns.FORMATS.keys()


def test_a_narrow_screen_leaves_out_the_highest_rank_first(monkeypatch):
    add(monkeypatch, "RESULTS")
    assert terminal.case_table(hand_record("a/3")).spare[-1] == "least error"
