"""Nodes of a record as CSV: a row a node, all figures of every mode, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

FACTS = ("node", "token", "parent", "depth", "leaked", "clean", "read_from", "rows_since_skip")
FIGURES = ("verdict", "argmax", "max_abs", "floor", "rms", "kl", "tv", "ar_rank")


def render_nodes(record: dict, cases: Sequence[dict], place: int | None = None) -> str:
    """The nodes of these cases; only node `place` of each if it is given. A figure that the record does not have, or
    that is not finite, is empty."""
    modes = list(dict.fromkeys(mode for case in cases for mode in case["modes"]))
    headers = ["case", *FACTS, "ar.argmax", "ar.margin", *(f"{mode}.{name}" for mode in modes for name in FIGURES)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    for case in cases:
        for node in case["nodes"] if place is None else [case["nodes"][place]]:
            figures = [node.get(mode, {}).get(name) for mode in modes for name in FIGURES]
            facts = [node.get(name) for name in FACTS]
            writer.writerow([case["id"], *facts, node["ar"]["argmax"], node["ar"]["margin"], *figures])
    return text.getvalue().removesuffix("\n")
