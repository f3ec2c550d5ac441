"""show and tree: views of a record that stands in a file."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from ...base.errors import UsageError
from ...report import markdown, rounds, spreadsheet, terminal, views
from ...report.drawing import draw_tree
from ...report.layout import laid_out, wrap
from ...report.record import load_record, viewing
from .options import HtmlFile, Record
from .output import show_text, unicode, width, write_html


class Format(StrEnum):
    TABLE, MARKDOWN, JSON, CSV = "table", "markdown", "json", "csv"


def show(
    record: Record,
    case: Annotated[str | None, typer.Option(help="Every node of this case.")] = None,
    node: Annotated[int | None, typer.Option(help="All figures of this node of the case.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Every round of this prompt, of generate or --rounds.")] = None,
    round: Annotated[int | None, typer.Option(help="The tree of this round of the prompt, node by node.")] = None,
    format: Annotated[
        Format, typer.Option(help="table, markdown (GitHub's), json or csv (a row a node).")
    ] = Format.TABLE,
    html: HtmlFile = None,
):
    """Show a record that --json of compare, generate, sweep or server wrote: whole, one case or one node, one prompt or
    one round."""
    if node is not None and case is None:
        raise UsageError(f"node: got {node} without a case, expected --case ID too")
    if round is not None and prompt is None:
        raise UsageError(f"round: got {round} without a prompt, expected --prompt ID too")
    if prompt is not None and case is not None:
        raise UsageError("prompt: got a case too, expected one of --case and --prompt")
    data = load_record(record, rounds=case is None and html is None)
    if prompt is not None and "prompts" not in (data.get("rounds") or ()):
        raise UsageError(f"prompt: {record} holds no rounds; expected a record of generate or of compare --rounds")
    if format is Format.CSV and (prompt is not None or "cases" not in data):
        raise UsageError("format: got csv, expected table, markdown or json; this view has no rows of nodes")
    with viewing(record):
        if html is not None:
            if case is not None:
                raise UsageError("html: shows the whole record, expected no --case")
            write_html(html, data)
            return 0
        part, blocks = _chosen(data, case, node, prompt, round)
        if format is Format.TABLE:
            text = laid_out(blocks, width())
        elif format is Format.MARKDOWN:
            text = (markdown.render if part is data else markdown.render_blocks)(blocks)
        elif format is Format.JSON:
            text = json.dumps(part, indent=1, ensure_ascii=not unicode(sys.stdout))
        else:
            cases = data["cases"] if case is None else [terminal.find_case(data, case)]
            text = spreadsheet.render_nodes(data, cases, node)
    show_text(text, data=format in (Format.JSON, Format.CSV))
    return 0


def _chosen(data: dict, case: str | None, node: int | None, prompt: str | None, round: int | None):
    """Return the part of a record that was asked for, and its blocks. Raises ValueError for one that is not there."""
    if prompt is not None:
        found = rounds.find_prompt(data["rounds"], prompt)
        if round is None:
            return found, rounds.prompt_blocks(found)
        return rounds.find_round(found, round), rounds.round_blocks(found, round, data.get("tokens", {}))
    if case is None:
        return data, views.blocks(data)
    found = terminal.find_case(data, case)
    if node is None:
        return found, terminal.case_blocks(data, found)
    return terminal.find_node(found, node), terminal.node_blocks(data, found, node)


def tree(
    record: Record,
    case: Annotated[str, typer.Option(help="The id of the case.", show_default=False)],
    mode: Annotated[str, typer.Option(help="Whose accepted path to mark beside ar's.")] = "tree_unforked",
):
    """Draw the draft tree of a case of a record, with the verdict of every node."""
    data = load_record(record)
    with viewing(record):
        text = draw_tree(terminal.find_case(data, case), mode, data.get("tokens"), not unicode(sys.stdout))
    show_text(wrap(text, width()))
    return 0
