"""selftest: injects every kind of fault and shows what saw it."""

from __future__ import annotations

from typing import Annotated

import typer

from ...base.errors import UsageError
from ...base.options import split_words
from ...flows.job import few_threads, quiet_libraries
from ...report.record import check_writable, write_record
from ...selftest.kinds import KINDS
from .options import JsonFile, Quiet
from .output import progress, show_text, width


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
    wanted = None if kind is None else split_words(kind)
    unknown = [name for name in wanted or () if name not in KINDS]
    if unknown:
        raise UsageError(f"kind: got {unknown[0]!r}, expected some of {', '.join(KINDS)}")
    if json is not None:
        check_writable(json)
    with quiet_libraries(), few_threads({"parameters": 0}):
        from ...report import selftest as view
        from ...selftest.run import FAULTS, run

        faults = [fault for fault in FAULTS if wanted is None or fault.kind in wanted]
        with progress() as show:
            record = run(faults, progress=show)
    if json is not None:
        write_record(json, record)
    show_text(view.markdown(record) if markdown else view.render(record, width(), quiet))
    return record["exit_code"]
