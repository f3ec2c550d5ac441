"""The command line: registers the commands and turns what they raise into one line and an exit code."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Annotated

import typer

from .. import __version__
from ..base.conclusion import INCONCLUSIVE, USAGE
from ..base.errors import Unsupported, UsageError
from ..base.files import unwritable
from ..report.text import plain
from .commands import gate, kernels, lint, models, plan, run, selftest, server, views
from .commands.options import Panels
from .commands.output import show_text

INTERRUPTED = 130  # as a shell has it, beside the codes of a run that ended

app = typer.Typer(
    name="ddtree-check",
    help="Is a draft tree verified right on a hybrid recurrent model, and if not, where, how badly and why?",
    epilog="Exit codes: 0 pass, 1 a defect, 2 inconclusive, 3 bad input or environment.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
):
    if version:
        show_text(f"ddtree-check {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        raise UsageError("no command, expected one of those that ddtree-check --help lists")


COMMANDS = (  # in the order of --help
    (run.compare, "Run prompts through four modes on the same trees; compare every node."),
    (run.generate, "Decode many rounds in each mode; compare every round with plain decoding."),
    (run.sweep, "Linear drafts against trees by budget: what a tree gains, and how much of it is leak."),
    (server.server, "Compare two servers through their API alone."),
    (gate.gate, "Run a matrix every night against a frozen baseline."),
    (plan.plan, "Rows that trees need against what an engine reserves; runs no model."),
    (views.show, "Show a record again, whole, one case or one node."),
    (views.tree, "Draw the draft tree of a case."),
    (lint.lint, "Name convention mistakes in a trace or tree that somebody wrote."),
    (models.models, "List model names and the supported families."),
    (selftest.selftest, "Inject every kind of fault; show that the checks see it, and nothing else."),
    (kernels.kernels, "Check verify kernels alone, without a model: conv, delta rule, Mamba-2, commit."),
)
for command, short_help in COMMANDS:
    app.command(short_help=short_help, cls=Panels)(command)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a model's tokens may not exist in the terminal's encoding
    try:
        code = app(argv, prog_name="ddtree-check", standalone_mode=False)
    except UsageError as error:
        return _complain(str(error), USAGE)
    except Unsupported as error:
        return _complain(f"unsupported: {error}", INCONCLUSIVE)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {unwritable(error)}", USAGE)
    except ImportError as error:
        return _complain(f"import: {error}, expected libraries as in constraints.txt", USAGE)
    except SystemExit as error:  # of an engine of one's own: its code is not ours
        return _complain(f"engine: it ends its process ({error.code!r:.60}), expected it to return or raise", USAGE)
    except BaseException as error:
        if not isinstance(error, Exception):
            if type(error).__name__ != "PanicException":  # of a library's Rust, which is no Exception
                raise
            return _complain(f"library: it panicked ({error!s:.100}), expected input that it can read", USAGE)
        if hasattr(error, "format_message"):  # the command line library's own, which would exit 2
            return _complain(error.format_message(), USAGE)
        traceback.print_exc()  # ours; its exit code must not read as a defect of the engine
        return _complain(f"internal error: {type(error).__name__}; please report it with the lines above", USAGE)
    return _complain("interrupted", INTERRUPTED) if code == INTERRUPTED else int(code or 0)


def _complain(text: str, code: int) -> int:
    """Print one line on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(f"ddtree-check: {plain(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
