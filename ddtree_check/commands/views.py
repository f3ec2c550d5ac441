"""show and tree: views of a record that stands in a file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import UsageError
from ..report.drawing import draw_tree
from ..report.record import load_record
from ..report.terminal import find_case, render, render_case, render_node
from .options import Record
from .output import show_text, unicode, viewing, width


def show(
    record: Record,
    case: Annotated[str | None, typer.Option(help="Every node of this case.")] = None,
    node: Annotated[int | None, typer.Option(help="All figures of this node of the case.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The whole record as GitHub Markdown.")] = False,
):
    """Show a record that compare --json wrote."""
    if node is not None and case is None:
        raise UsageError(f"node: got {node} without a case, expected --case ID too")
    if markdown and case is not None:
        raise UsageError("markdown: shows the whole record, expected no --case")
    data = load_record(record)
    with viewing(record):
        if markdown:
            from ..report import markdown as view

            text = view.render(data)
        elif case is None:
            text = render(data, width())
        elif node is None:
            text = render_case(data, find_case(data, case), width())
        else:
            text = render_node(data, find_case(data, case), node, width())
    show_text(text)
    return 0


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
