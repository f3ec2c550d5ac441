"""The terminal's tables and sentences as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Table, layout


def render(blocks: Sequence[Table | str]) -> str:
    """Return the page of a whole view, whose last block is the verdict."""
    return "\n\n".join(["# ddtree-check", render_blocks(blocks[:-1]), f"**{blocks[-1]}**"])


def render_blocks(blocks: Sequence[Table | str]) -> str:
    """Return tables and sentences, such as those of one case or one node, as Markdown."""
    parts = [
        table(block) if isinstance(block, Table) else "\n\n".join(escaped(line) for line in block.splitlines())
        for block in blocks
    ]
    return "\n\n".join(parts)


def table(block: Table) -> str:
    """Return a table with its title above: a bar inside a cell makes no column, and no word of a record a link."""
    rows = [[_inert(str(cell)) for cell in row] for row in block.rows]
    headers = tuple(map(_inert, block.headers))
    title = f"## {_inert(block.title)}\n\n" if block.title else ""
    return title + layout(Table(block.title, headers, rows), style="github")


def _inert(text: str) -> str:
    for mark, shown in (("|", "\\|"), ("<", "&lt;"), ("[", "\\["), ("]", "\\]"), ("`", "\\`"), ("://", ":\\//")):
        text = text.replace(mark, shown)
    return text


def escaped(text: str) -> str:
    """Return prose without marks that Markdown would obey."""
    marked = "".join(f"\\{letter}" if letter in "\\`*_<>[]|" else letter for letter in text)
    return marked.replace("://", ":\\//")  # GitHub makes a link of a bare address
