"""Tables and sentences laid out for a screen: tables through tabulate, sentences wrapped to the width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

GAP = 2  # columns of the screen between two columns of a table
SHORTEST = 8  # characters of a name that a narrow screen still shows
COMMAND = "Again: "  # begins a line that holds a command


@dataclass(frozen=True)
class Table:
    """A table to be laid out. `spare` are the columns to leave out, the last first, where the screen is too narrow."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    spare: tuple[str, ...] = ()


def laid_out(blocks: Sequence[Table | str], width: int | None, quiet: bool = False) -> str:
    """Return tables and paragraphs as they stand on a screen of `width` columns (None: any); quiet: the last alone."""
    if quiet:
        return blocks[-1]
    return "\n\n".join(titled(block, width) if isinstance(block, Table) else wrap(block, width) for block in blocks)


def titled(table: Table, width: int | None) -> str:
    """Return a table below its title, where it has one."""
    return "\n".join(filter(None, [wrap(table.title, width), layout(table, width)]))


def wrap(text: str, width: int | None) -> str:
    """Return sentences cut at spaces, each in lines of its own. A command stays one that a shell takes."""
    return "\n".join(_wrapped(line, width) if width else line for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    command = line.startswith(COMMAND)
    lines = textwrap.wrap(
        line,
        max(width - GAP * command, 1),
        subsequent_indent="  ",
        break_long_words=not command,
        break_on_hyphens=False,
    )
    return (" \\\n" if command else "\n").join(lines)


def layout(table: Table, width: int | None = None, style: str = "plain") -> str:
    """Return a table as text, no wider than `width` if that can be.

    Headers wrap first, then spare columns go, then cells wrap at spaces, then the first column is shortened.
    """
    headers, rows, spare = list(table.headers), [list(map(str, row)) for row in table.rows], list(table.spare)
    sides = {name: "left" if _words(column) else "right" for name, *column in zip(headers, *rows, strict=True)}
    if style != "plain":
        return tabulate(rows, headers, style, disable_numparse=True, colalign=sides.values() if rows else None)
    while True:
        limits, over = _limits(headers, rows, width, cells=not spare)
        if over <= 0 or not spare:
            break
        place = headers.index(spare.pop())
        for row in (headers, *rows):
            del row[place]
    if over > 0 and limits[0] - over >= SHORTEST:
        limits[0] -= over
        for row in rows:  # the end of a name tells more than its beginning
            row[0] = row[0] if len(row[0]) <= limits[0] else "…" + row[0][1 - limits[0] :]
    lines = [headers, ["-" * limit for limit in limits], *rows]  # tabulate's own header makes every column two wider
    most = [limit if any(len(row[i]) > limit for row in lines) else None for i, limit in enumerate(limits)]
    return tabulate(
        lines,
        tablefmt=style,
        disable_numparse=True,
        colalign=[sides[name] for name in headers],
        maxcolwidths=most,
        break_on_hyphens=False,
        rowalign=["bottom", *["top"] * (len(lines) - 1)],
    )


def _limits(headers: list[str], rows: list[list[str]], width: int | None, cells: bool) -> tuple[list[int], int]:
    """Return the width of each column, and by how much they exceed the screen together. cells: they wrap as headers."""
    columns = list(zip(headers, *rows, strict=True))
    limits = [max(map(len, column)) for column in columns]
    least = [max(_least(text, cells or not place) for place, text in enumerate(column)) for column in columns]
    over = 0 if width is None else sum(limits) + GAP * (len(limits) - 1) - width
    while over > 0 and limits != least:
        widest = max(range(len(limits)), key=lambda place: (limits[place] > least[place], limits[place]))
        limits[widest] -= 1
        over -= 1
    return limits, over


def _least(text: str, wraps: bool) -> int:
    """Return the narrowest a text can be; one in quotes is a token, which stays whole."""
    return max(map(len, text.split()), default=0) if wraps and "'" not in text and '"' not in text else len(text)


def _words(column: Iterable[str]) -> bool:
    """Return whether a column holds words: those go to the left."""
    return any(cell and not (cell[0].isdigit() or cell[0] == "-" or cell in ("not finite", "inf")) for cell in column)
