"""gate: a matrix of runs every night, against a frozen baseline and the nights before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...report.layout import wrap
from .output import show_text, width


def gate(
    config: Annotated[Path, typer.Option(help="A gate.toml, see docs/gate.md.", show_default=False)],
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Write the baseline from this run, if it passes, and from earlier nights.")
    ] = False,
):
    """Run the matrix of a gate.toml, each case in a process of its own, and hold it against the frozen baseline. A gate
    that was killed goes on where it was."""
    from ...flows.job import quiet_libraries
    from ...gate.config import load_config, validate
    from ...gate.run import run_gate

    loaded = load_config(config)
    with quiet_libraries():
        validate(loaded)
    return run_gate(loaded, freeze=freeze, say=lambda line: show_text(wrap(line, width())))
