"""Options of a command line, built from the fields of the groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from ...base.errors import UsageError
from ...base.options import Option, offered, options
from ...flows import job
from ...flows.job import DEFAULTS, RUN, Job, Output, Saved, Stored, job_of

FIRST, LAST = RUN[:-1], RUN[-1:]  # the rule of the verdict comes last


class Panels(TyperCommand):
    """A command whose --help shows its options under the names of their groups."""

    def format_options(self, ctx, formatter) -> None:
        panels: dict[str, list] = {}
        for param in self.get_params(ctx):
            panel = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or "Options"
            panels.setdefault(panel, []).append(param.get_help_record(ctx))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def annotated(each: Option, verb: str = "compare", panel: str | None = None):
    """Return the annotation by which the command line takes an option: a text, a number, a flag, or a list of texts."""
    kind = list[str] if each.repeat else each.kind.scalar
    facts = {"help": each.help_text, "metavar": each.metavar, "show_default": False}
    if each.argument:
        return Annotated[kind | None, typer.Argument(**facts)]
    flag = each.flag(verb)
    flags = [f"{flag}/{flag.replace('--', '--no-', 1)}" if kind is bool and each.empty else flag]
    return Annotated[kind | None, typer.Option(*flags, *filter(None, [each.short]), rich_help_panel=panel, **facts)]


def offering(verb: str) -> Callable:
    """Give a command, a function of a job and of what it shows, every option that its verb offers."""
    every = offered(verb, (*FIRST, Output, Stored, Saved, *LAST))
    first = {each.panel for each in every if not each.later and not each.argument}

    def parameter(each: Option) -> inspect.Parameter:
        panel = f"{each.panel} (more)" if each.later and each.panel in first else each.panel
        each, kind = replace(each, default=DEFAULTS[verb].get(each.name, each.default)), inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(each.name, kind, default=None, annotation=annotated(each, verb, panel))

    def decorate(command: Callable[[Job, Output], int]) -> Callable:
        def run(**given) -> int:
            shown = {each.name: given[each.name] for each in options(Output) if given.get(each.name) is not None}
            return command(job_of(verb, given), Output(**shown))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(map(parameter, every))
        return run

    return decorate


def some_of(what: str, chosen: Iterable[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Return the names that were chosen, or all that are known. Raises UsageError for one that is not."""
    known = tuple(dict.fromkeys(known))
    chosen = known if chosen is None else tuple(chosen)
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(f"{what}: got {unknown[0]!r}, expected some of {', '.join(known)}")
    return chosen


# Arguments and options of other commands.
Record = Annotated[Path, typer.Argument(help="A file that compare --json wrote.", show_default=False)]
Prompts, Limit, _ = map(annotated, options(job.Prompts))
JsonFile, HtmlFile, _, Quiet = map(annotated, options(Output))
