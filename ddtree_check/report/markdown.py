"""The terminal's tables and sentences as GitHub Markdown."""

from __future__ import annotations

from .terminal import Table, blocks, layout, verdict_line


def render(record: dict) -> str:
    parts = []
    for block in blocks(record):
        if isinstance(block, Table):
            rows = [[str(cell).replace("|", "\\|") for cell in row] for row in block.rows]
            headers = tuple(name.replace("|", "\\|") for name in block.headers)
            parts.append(f"## {block.title}\n\n{layout(Table(block.title, headers, rows), None, 'github')}")
        else:
            parts.append("\n\n".join(_escaped(line) for line in block.splitlines()))
    return "\n\n".join(["# ddtree-check", *parts, f"**{verdict_line(record)}**"])


def _escaped(text: str) -> str:
    """Prose without marks that Markdown would obey."""
    return "".join(f"\\{letter}" if letter in "\\`*_<>[]|" else letter for letter in text)
