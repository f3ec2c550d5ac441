"""The terminal's tables and sentences as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .terminal import Table, blocks, layout, rounds_verdict, rounds_view, verdict_line


def render(record: dict) -> str:
    return "\n\n".join(["# ddtree-check", render_blocks(blocks(record)), f"**{verdict_line(record)}**"])


def render_rounds(record: dict) -> str:
    """A record of rounds alone."""
    return "\n\n".join(["# ddtree-check", render_blocks(rounds_view(record)), f"**{rounds_verdict(record)}**"])


def render_blocks(blocks: Sequence[Table | str]) -> str:
    """Tables and sentences, such as those of one case or one node."""
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
    return title + layout(Table(block.title, headers, rows), None, "github")


def _inert(text: str) -> str:
    for mark, shown in (("|", "\\|"), ("<", "&lt;"), ("[", "\\["), ("]", "\\]"), ("`", "\\`"), ("://", ":\\//")):
        text = text.replace(mark, shown)
    return text


def escaped(text: str) -> str:
    """Prose without marks that Markdown would obey."""
    marked = "".join(f"\\{letter}" if letter in "\\`*_<>[]|" else letter for letter in text)
    return marked.replace("://", ":\\//")  # GitHub makes a link of a bare address
