"""show and tree: views of a record that stands in a file."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated

import typer

from ...base.errors import UsageError
from ...report.drawing import draw_tree
from ...report.record import ROUNDS, SERVER, SWEEP, load_record, viewing
from ...report.terminal import (
    case_blocks,
    find_case,
    find_node,
    laid_out,
    node_blocks,
    render,
    render_case,
    render_node,
    render_rounds,
)
from .options import HtmlFile, Record
from .output import show_text, unicode, width, write_html


class Format(StrEnum):
    TABLE, MARKDOWN, JSON, CSV = "table", "markdown", "json", "csv"


DATA = (Format.JSON, Format.CSV)


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
    if data["schema"] in (SERVER, SWEEP):
        return _show_whole(record, data, prompt, format)
    if prompt is not None or data["schema"] == ROUNDS:
        return _show_rounds(record, data, prompt, round, format)
    with viewing(record):
        if html is not None:
            if case is not None:
                raise UsageError("html: shows the whole record, expected no --case")
            write_html(html, data)
            return 0
        chosen = None if case is None else find_case(data, case)
        text = VIEWS[format](data, chosen, node)
    show_text(text, data=format in DATA)
    return 0


def _show_whole(record, data: dict, prompt: str | None, format: Format) -> int:
    """Two servers or a sweep: the whole record, as a view or as JSON."""
    from ...report import blackbox, sweep

    name, render = {SERVER: ("server", blackbox.render), SWEEP: ("sweep", sweep.render_sweep)}[data["schema"]]
    if prompt is not None or format not in (Format.TABLE, Format.JSON):
        raise UsageError(f"show: {record} is a record of {name}, expected no --prompt, and --format table or json")
    with viewing(record):
        text = render(data, width()) if format is Format.TABLE else _json(data, None, None)
    show_text(text, data=format in DATA)
    return 0


def _show_rounds(record, data: dict, prompt: str | None, place: int | None, format: Format) -> int:
    """Rounds: all that generate found, one prompt of it, or one round of that."""
    from ...report import markdown, rounds

    if format is Format.CSV:
        raise UsageError("format: got csv, expected table, markdown or json; rounds have no rows of nodes")
    if not data.get("rounds"):
        raise UsageError(f"prompt: {record} holds no rounds; expected a record of generate or of compare --rounds")
    with viewing(record):
        found = data["rounds"] if prompt is None else rounds.find_prompt(data["rounds"], prompt)
        if format is Format.JSON:
            chosen = data if prompt is None else found if place is None else rounds.find_round(found, place)
            text = json.dumps(chosen, indent=1, ensure_ascii=not unicode(sys.stdout))
        elif prompt is None:
            text = render_rounds(data, width()) if format is Format.TABLE else markdown.render_rounds(data)
        else:
            tokens = data.get("tokens", {})
            blocks = rounds.prompt_blocks(found) if place is None else rounds.round_blocks(found, place, tokens)
            text = markdown.render_blocks(blocks) if format is Format.MARKDOWN else laid_out(blocks, width())
    show_text(text, data=format in DATA)
    return 0


def _table(data: dict, case: dict | None, node: int | None) -> str:
    if case is None:
        return render(data, width())
    return render_case(data, case, width()) if node is None else render_node(data, case, node, width())


def _markdown(data: dict, case: dict | None, node: int | None) -> str:
    from ...report import markdown

    if case is None:
        return markdown.render(data)
    return markdown.render_blocks(case_blocks(data, case) if node is None else node_blocks(data, case, node))


def _json(data: dict, case: dict | None, node: int | None) -> str:
    chosen = data if case is None else case if node is None else find_node(case, node)
    return json.dumps(chosen, indent=1, ensure_ascii=not unicode(sys.stdout))


def _csv(data: dict, case: dict | None, node: int | None) -> str:
    from ...report.spreadsheet import render_nodes

    if node is not None:
        find_node(case, node)
    return render_nodes(data, [case] if case else data["cases"], node)


VIEWS = {Format.TABLE: _table, Format.MARKDOWN: _markdown, Format.JSON: _json, Format.CSV: _csv}


def tree(
    record: Record,
    case: Annotated[str, typer.Option(help="The id of the case.", show_default=False)],
    mode: Annotated[str, typer.Option(help="Whose accepted path to mark beside ar's.")] = "tree_unforked",
):
    """Draw the draft tree of a case of a record, with the verdict of every node."""
    data = load_record(record)
    with viewing(record):
        text = draw_tree(find_case(data, case), mode, data.get("tokens"), not unicode(sys.stdout))
    show_text(text)
    return 0
