"""The command line: translates arguments and prints views. Everything heavy is imported when a command needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import Unsupported, UsageError
from .job import BUDGET, Job, run, whole_numbers
from .report.drawing import draw_tree
from .report.record import check_writable, load_record, write_record
from .report.terminal import Table, find_case, layout, render, render_case, render_node, titled, wrap
from .report.text import plain

INCONCLUSIVE, USAGE, INTERRUPTED = 2, 3, 130
WORDS = {  # colour of the words that decide, on a terminal
    "green": r"\bpass\b",
    "yellow": r"\b(tie|insensitive|not_run|unsupported|reference_unusable|inconclusive|RANDOM[ A-Z]*)\b",
    "red": r"\b(flip|leak|fail)\b",
}

app = typer.Typer(
    name="ddtree-check",
    help="Is a draft tree verified right on a hybrid recurrent model, and if not, where, how badly and why?",
    epilog="Exit codes: 0 pass, 1 a defect, 2 inconclusive, 3 bad input or environment.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Record = Annotated[Path, typer.Argument(help="A file that compare --json wrote.", show_default=False)]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
):
    if version:
        _print(f"ddtree-check {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        raise UsageError("no command, expected one of those that ddtree-check --help lists")


@app.command(short_help="Run prompts through four modes on the same trees; compare every node.")
def compare(
    model: Annotated[
        str | None,
        typer.Option(help="A name (see models), path or hub id. Default: the tiny trained hybrid of this package."),
    ] = None,
    engine: Annotated[str, typer.Option(help="What runs the model.")] = "transformers",
    budget: Annotated[str, typer.Option(help="Draft nodes per tree, one tree for each number.")] = BUDGET,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Text file, .jsonl of {text} or {token_ids}, or humaneval. Default: 8 code prompts of this package."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the prompt with this id; may be repeated.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="File with {tokens, parents}: this tree in place of --draft and --budget.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="self, ngram or recorded:FILE. Default: self.")] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Share of depths where draft self ranks the target's token first. Default: 0.7."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Positions that are drafted. Default: 15.")] = None,
    order: Annotated[str | None, typer.Option(help="Flat order: heap, breadth or depth. Default: heap.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of draft self and of random weights. Default: 0.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, float64. Default: the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    weights: Annotated[str, typer.Option(help="real, or random: any architecture without a download.")] = "real",
    require: Annotated[
        str | None, typer.Option(help="Modes that decide the exit code. Default: linear,tree_forked.")
    ] = None,
    ar: Annotated[
        str | None, typer.Option(help="strict, a node at a time, or batched, a level at a time. Default: strict.")
    ] = None,
    controls: Annotated[
        int | None, typer.Option(help="Paths that the chain control runs. Default: every path to a leaf.")
    ] = None,
    wiring: Annotated[
        str | None,
        typer.Option(help="What the unforked control reads wrong, such as conv=flat. Default: states and windows."),
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run the model in float64 too, and give every mode an error.")
    ] = False,
    json: Annotated[str | None, typer.Option(help="Write the record to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.")] = False,
):
    """Run identical prompts through ar, linear, tree_forked and tree_unforked on the same draft trees, compare logits
    and argmax at every node, and tell leak from noise."""
    chosen = {
        "acceptance": acceptance,
        "length": length,
        "order": order,
        "seed": seed,
        "ar": ar,
        "controls": controls,
        "wiring": wiring,
    }
    settings: dict[str, object] = {"budgets": whole_numbers("budget", budget)}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    if require is not None:
        settings["require"] = tuple(dict.fromkeys(mode.strip() for mode in require.split(",")))
    job = Job(
        model=model,
        engine=engine,
        weights=weights,
        dtype=dtype,
        device=device,
        prompts=prompts,
        limit=limit,
        only=tuple(only or ()),
        tree=tree,
        draft=draft,
        oracle=oracle,
        settings=settings,
    )
    if json is not None:
        check_writable(json)
    with _progress() as progress:
        record = run(job, progress)
    if json is not None:
        write_record(json, record)
    _print(render(record, _width(), quiet))
    return record["exit_code"]


@app.command(short_help="Show a record again, whole, one case or one node.")
def show(
    record: Record,
    case: Annotated[str | None, typer.Option(help="Every node of this case.")] = None,
    node: Annotated[int | None, typer.Option(help="All figures of this node of the case.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The whole record as GitHub Markdown.")] = False,
):
    """Show a record that compare --json wrote."""
    if node is not None and case is None:
        raise UsageError(f"node: got {node} without a case, expected --case ID too")
    if markdown and case is not None:
        raise UsageError("markdown: shows the whole record, expected no --case")
    data = load_record(record)
    with _viewing(record):
        if markdown:
            from .report import markdown as view

            text = view.render(data)
        elif case is None:
            text = render(data, _width())
        elif node is None:
            text = render_case(data, find_case(data, case), _width())
        else:
            text = render_node(data, find_case(data, case), node, _width())
    _print(text)
    return 0


@app.command(short_help="Draw the draft tree of a case.")
def tree(
    record: Record,
    case: Annotated[str, typer.Option(help="The id of the case.", show_default=False)],
    mode: Annotated[str, typer.Option(help="Whose accepted path to mark beside ar's.")] = "tree_unforked",
):
    """Draw the draft tree of a case of a record, with the verdict of every node."""
    data = load_record(record)
    with _viewing(record):
        text = draw_tree(find_case(data, case), mode, data.get("tokens"), not _unicode(sys.stdout))
    _print(text)
    return 0


@app.command(short_help="List model names and the supported families.")
def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="The families alone, as a Markdown table.")] = False,
):
    """List the short names of models, and the families whose checkpoints can be checked."""
    from .families import UNSUPPORTED

    if markdown:
        _print(layout(list(_model_tables())[1], None, "github"))
        return 0
    refused = [wrap(f"Not supported: {name}: {why}.", _width()) for name, why in UNSUPPORTED.items()]
    _print("\n\n".join([titled(table, _width()) for table in _model_tables()] + refused))
    return 0


def _model_tables() -> Iterator[Table]:
    from .engines import ENGINES
    from .families import ALIASES, FAMILIES

    names = [
        (
            name,
            alias.hub_id,
            FAMILIES[alias.model_type].title,
            alias.shape["num_hidden_layers"] if alias.shape else "",
            "built in" if alias.shape else "needs the hub",
        )
        for name, alias in ALIASES.items()
    ]
    yield Table("Names for --model", ("name", "hub id", "family", "layers", "shape for --weights random"), names)
    rows = []
    for family in FAMILIES.values():
        kinds = sorted({stand_in.removesuffix("_update") for stand_in in family.calls.values()} - {"training_only"})
        rows.append(
            (
                family.model_type,
                family.title,
                ", ".join(family.layers),
                " + ".join(kinds) or "none",
                ", ".join(ENGINES),
                ", ".join(family.examples),
            )
        )
    headers = ("model type", "family", "layer types", "recurrent", "engines", "for example")
    yield Table("Families: any checkpoint of these model types, by path or hub id", headers, rows, ("for example",))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
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
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line library's own, which would exit 2
            return _complain(error.format_message(), USAGE)
        traceback.print_exc()  # ours; its exit code must not read as a defect of the engine
        return _complain(f"internal error: {type(error).__name__}; please report it with the lines above", USAGE)
    return _complain("interrupted", INTERRUPTED) if code == INTERRUPTED else int(code or 0)


def _complain(text: str, code: int) -> int:
    """One line on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(f"ddtree-check: {plain(' '.join(text.split()))}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _viewing(path: Path) -> Iterator[None]:
    """What a view does not find was named by the caller, or is missing from a file that somebody edited."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path}: no whole record ({type(error).__name__}: {error}); make it again") from None


def _print(text: str) -> None:
    """To stdout, in colour on a terminal. A reader that has gone, such as `head`, is no error."""
    try:
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            from rich.console import Console
            from rich.text import Text

            shown = Text(text)
            for colour, words in WORDS.items():
                shown.highlight_regex(words, colour)
            Console().print(shown, soft_wrap=True)
        else:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it exits


def _width() -> int | None:
    """Columns of the terminal; None where nobody looks at lines, unless COLUMNS asks for a width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else None


def _unicode(stream) -> bool:
    return "utf" in (getattr(stream, "encoding", None) or "").lower()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr while it is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=plain(text))
