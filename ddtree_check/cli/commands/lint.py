"""lint: convention mistakes in a trace, a tree file, a DDTree dump or a dump of links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...base.conclusion import DEFECT, PASS
from ...report.layout import wrap
from ...report.text import plain
from .output import show_text, width


def lint(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace, or JSON (.json, .jsonl) with a tree, a DDTree dump or SGLang links.", show_default=False
        ),
    ],
):
    """Name convention mistakes in a trace or a tree that somebody wrote, and guess what was meant. Exit code 1 if there
    is one."""
    from ...trace.lint import lint as find

    found = find(file)
    for finding in found:
        show_text(wrap(plain(str(finding)), width()))
    names = sorted({finding.name for finding in found})
    show_text(f"{len(found)} found: {', '.join(names)}" if found else "nothing found")
    return DEFECT if found else PASS
