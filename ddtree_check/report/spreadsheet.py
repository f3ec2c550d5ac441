"""Nodes of a record as CSV: a row a node, all figures of every mode, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from ..judge import figures


def render_nodes(record: dict, cases: Sequence[dict], place: int | None = None) -> str:
    """Return the nodes of these cases; only node `place` of each if it is given.

    A figure that the record does not have, or that is not finite, is empty.
    """
    modes = list(dict.fromkeys(mode for case in cases for mode in case["modes"]))
    facts, names = figures.names(figures.FACTS), figures.names(figures.FIGURES)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", *facts, *(f"{mode}.{name}" for mode in modes for name in names)])
    for case in cases:
        for node in case["nodes"] if place is None else [case["nodes"][place]]:
            row = [figure for mode in modes for figure in figures.values(node.get(mode, {}), names)]
            writer.writerow([case["id"], *figures.values(node, facts), *row])
    return text.getvalue().removesuffix("\n")
