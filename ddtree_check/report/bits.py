"""The record of exact checks alone, of an engine without plain decoding, as a table and sentences."""

from __future__ import annotations

from .layout import COMMAND, Table
from .terminal import case_where, exact_text
from .text import plain

HEADERS = ("case", "exact", "nodes", "certified", "off in bits", "near its chain", "open", "claimed")


def blocks(record: dict) -> list[Table | str]:
    """Return the whole view; its last block is the verdict."""
    rows, bounds = [], set()
    for case in record["cases"]:
        exact, chain = case["exact"], case["chain"]
        off, near = exact["moved"] + len(chain["beyond"]), chain["near"]
        counts = len(case["tree"]["tokens"]), exact["certified"], off, near, exact["open"] - near - len(chain["beyond"])
        claims = [name for name in ("influence", "relocation") if exact[name]["claimed"]]
        verdict = case["modes"]["tree_forked"]["verdict"]
        rows.append((plain(case["id"]), verdict, *counts, ", ".join(claims) or "-"))
        bounds |= {chain["bound"]} if near else set()
    lines = [
        f"No reference: {plain(record['reason'])}. Passes are compared with passes of the same shape, in bits. This is "
        "no comparison with autoregressive decoding.",
        f"In bits: {exact_text(record)}.",
        *(
            f"Near its chain: within {bound:g} of the row's std, since a right row of this dtype may have other bits."
            for bound in bounds
        ),
        *(line for case in record["cases"] for line in case_where(case)),
        *(f"Because: {plain(reason)}." for reason in record["verdict"]["reasons"]),
    ]
    lines += [f"{COMMAND}{plain(record['command'])}"] if record.get("command") else []
    environment = record["environment"]
    head = f"engine {plain(environment['engine'])} · {environment['dtype']} · {plain(environment['device'])}"
    verdict = f"verdict: exact: {record['verdict']['text']}, exit code {record['exit_code']}"
    return [head, Table("Cases, bit for bit", HEADERS, rows, spare=("claimed",)), "\n".join(lines), verdict]
