"""The record of exact checks alone, of an engine without plain decoding, as a table and sentences."""

from __future__ import annotations

from .layout import COMMAND, Table
from .terminal import case_where, exact_text
from .text import plain


def blocks(record: dict) -> list[Table | str]:
    """Return the whole view; its last block is the verdict."""
    rows = []
    for case in record["cases"]:
        exact = case["exact"]
        claims = [name for name in ("influence", "relocation") if exact[name]["claimed"]]
        counts = (exact["certified"], exact["moved"], exact["open"])
        rows.append(
            (plain(case["id"]), exact["verdict"], len(case["tree"]["tokens"]), *counts, ", ".join(claims) or "-")
        )
    headers = ("case", "exact", "nodes", "certified", "off in bits", "open", "claimed")
    lines = [
        f"No reference: {plain(record['reason'])}. Passes are compared with passes of the same shape, in bits; this is no "
        "comparison with autoregressive decoding.",
        f"In bits: {exact_text(record)}.",
        *(line for case in record["cases"] for line in case_where(case)),
        *(f"Because: {plain(reason)}" for reason in record["verdict"]["reasons"]),
    ]
    lines += [f"{COMMAND}{plain(record['command'])}"] if record.get("command") else []
    environment = record["environment"]
    head = f"engine {plain(environment['engine'])} · {environment['dtype']} · {plain(environment['device'])}"
    verdict = f"verdict: exact: {record['verdict']['text']}, exit code {record['exit_code']}"
    return [head, Table("Cases, bit for bit", headers, rows, spare=("claimed",)), "\n".join(lines), verdict]
