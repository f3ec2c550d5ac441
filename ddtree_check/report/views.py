"""The view of a record as text, by its schema. The last block of every view is the verdict."""

from __future__ import annotations

from . import bits, blackbox, rounds, selftest, sweep, terminal
from .layout import Table, laid_out
from .record import BITS, ROUNDS, SELFTEST, SERVER, SWEEP

VIEWS = {
    BITS: bits.blocks,
    ROUNDS: rounds.blocks,
    SERVER: blackbox.blocks,
    SWEEP: sweep.blocks,
    SELFTEST: selftest.blocks,
}


def blocks(record: dict) -> list[Table | str]:
    """Return the tables and paragraphs of a whole record in reading order."""
    return VIEWS.get(record["schema"], terminal.blocks)(record)


def render(record: dict, width: int | None = None, quiet: bool = False) -> str:
    """Return the whole view as text. width: columns of the screen, None for any; quiet: the verdict alone."""
    return laid_out(blocks(record), width, quiet)
