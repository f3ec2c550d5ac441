"""selftest: injects every kind of fault and shows what saw it."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.options import split_words
from ...flows.job import Output, few_threads, quiet_libraries
from ...report.selftest import markdown as table
from ...report.views import render
from ...selftest.kinds import KINDS
from .options import JsonFile, Quiet, some_of
from .output import finish


def selftest(
    kind: Annotated[
        str | None, typer.Option(help="Only these kinds of fault, such as K3,K9. Default: all of them.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of kinds as GitHub Markdown.")] = False,
    json: JsonFile = None,
    quiet: Quiet = False,
):
    """Inject every kind of fault into a running engine: each must be seen by the right check, in the right place, and
    what is right must stay green."""
    wanted = None if kind is None else some_of("kind", split_words(kind), KINDS)
    with quiet_libraries(), few_threads({"parameters": 0}):
        from ...selftest.run import FAULTS, run

        faults = [fault for fault in FAULTS if wanted is None or fault.kind in wanted]
        output, view = Output(json=json, quiet=quiet), table if markdown else render
        return finish(lambda show: run(faults, progress=show), output, view)
