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
from .job import BUDGET, Job, quiet_libraries, run, whole_numbers
from .report.drawing import draw_tree
from .report.record import check_writable, load_record, write_record
from .report.terminal import Table, find_case, layout, render, render_case, render_node, render_rounds, titled, wrap
from .report.text import number, plain

PASS, DEFECT, INCONCLUSIVE, USAGE, INTERRUPTED = 0, 1, 2, 3, 130
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
# Options of every command that runs a model.
Model = Annotated[
    str | None,
    typer.Option(help="A name (see models), path or hub id. Default: the tiny trained hybrid of this package."),
]
EngineName = Annotated[str, typer.Option(help="What runs the model.")]
Prompts = Annotated[
    str | None,
    typer.Option(
        help="Text file, .jsonl of {text} or {token_ids}, or humaneval. Default: 8 code prompts of this package."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many prompts.")]
Draft = Annotated[str | None, typer.Option(help="self, ngram or recorded:FILE. Default: self.")]
Acceptance = Annotated[
    float | None,
    typer.Option(help="Share of depths where draft self ranks the target's token first. Default: 0.7."),
]
Length = Annotated[int | None, typer.Option(help="Positions that are drafted. Default: 15.")]
Order = Annotated[str | None, typer.Option(help="Flat order: heap, breadth or depth. Default: heap.")]
Seed = Annotated[int | None, typer.Option(help="Seed of draft self and of random weights. Default: 0.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16, float64. Default: the checkpoint's.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]
Weights = Annotated[str, typer.Option(help="real, or random: any architecture without a download.")]
Require = Annotated[str | None, typer.Option(help="Modes that decide the exit code. Default: linear,tree_forked.")]
JsonFile = Annotated[str | None, typer.Option(help="Write the record to this file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.")]


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
    model: Model = None,
    engine: EngineName = "transformers",
    budget: Annotated[str, typer.Option(help="Draft nodes per tree, one tree for each number.")] = BUDGET,
    prompts: Prompts = None,
    limit: Limit = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the prompt with this id; may be repeated.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="File with {tokens, parents}: this tree in place of --draft and --budget.")
    ] = None,
    draft: Draft = None,
    acceptance: Acceptance = None,
    length: Length = None,
    order: Order = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    weights: Weights = "real",
    require: Require = None,
    ar: Annotated[
        str | None, typer.Option(help="strict, a node at a time, or batched, a level at a time. Default: strict.")
    ] = None,
    controls: Annotated[
        int | None, typer.Option(help="Paths that the chain control runs. Default: every path to a leaf.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Also decode so many rounds in each mode, as generate does.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(help="Commit these paths and check the state: zero, first, full, branch, every, or nodes 0-2-5."),
    ] = None,
    wiring: Annotated[
        str | None,
        typer.Option(help="What the unforked control reads wrong, such as conv=flat. Default: states and windows."),
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run the model in float64 too, and give every mode an error.")
    ] = False,
    json: JsonFile = None,
    quiet: Quiet = False,
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
        "require": _words(require),
        "accept": _words(accept),
    }
    settings: dict[str, object] = {"budgets": whole_numbers("budget", budget)}
    settings |= {name: value for name, value in chosen.items() if value is not None}
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
        rounds=None if rounds is None else {"rounds": rounds},
    )
    return _finish(job, json, lambda record: render(record, _width(), quiet))


@app.command(short_help="Decode many rounds in each mode; compare every round with plain decoding.")
def generate(
    rounds: Annotated[int, typer.Option(help="Rounds for each prompt.")] = 20,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Some of linear, tree_forked, tree_unforked, leaky_verify, leaky_commit, shadow. Default: the first 3."
        ),
    ] = None,
    plain: Annotated[
        int | None, typer.Option(help="A plain one-token step after so many rounds. Default: none.")
    ] = None,
    model: Model = None,
    engine: EngineName = "transformers",
    budget: Annotated[int, typer.Option(help="Draft nodes per tree.")] = 16,
    prompts: Prompts = None,
    limit: Limit = None,
    draft: Draft = None,
    acceptance: Acceptance = None,
    length: Length = None,
    order: Order = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    weights: Weights = "real",
    require: Require = None,
    journal: Annotated[
        str | None, typer.Option(help="File of finished prompts; a killed run goes on after them.")
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
):
    """Run real speculative decoding for many rounds in each mode, each with its own commits, and compare every round's
    acceptance, text and state with plain decoding."""
    chosen = {"acceptance": acceptance, "length": length, "order": order, "seed": seed, "require": _words(require)}
    settings = {"budgets": (budget,)} | {name: value for name, value in chosen.items() if value is not None}
    many = {"rounds": rounds, "modes": _words(modes), "plain": plain}
    job = Job(
        model=model,
        engine=engine,
        weights=weights,
        dtype=dtype,
        device=device,
        prompts=prompts,
        limit=limit,
        draft=draft,
        settings=settings,
        verb="generate",
        rounds={name: value for name, value in many.items() if value is not None},
        journal=journal,
    )
    return _finish(job, json, lambda record: render_rounds(record, _width(), quiet))


def _finish(job: Job, path: str | None, view: Callable[[dict], str]) -> int:
    """Runs a job, writes its record if there is a path for it, prints the view, and returns the record's exit code."""
    if path is not None:
        check_writable(path)
    with _progress() as progress:
        record = run(job, progress)
    if path is not None:
        write_record(path, record)
    _print(view(record))
    return record["exit_code"]


def _words(text: str | None) -> tuple[str, ...] | None:
    """'a, b' as ('a', 'b'), each once."""
    return None if text is None else tuple(dict.fromkeys(word.strip() for word in text.split(",")))


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
    measure: Annotated[
        bool, typer.Option("--run", help="Run every family at a small shape, and print what was measured.")
    ] = False,
    family: Annotated[list[str] | None, typer.Option(help="With --run: only this model type; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="With --run: float32, bfloat16, float16, float64.")] = "float32",
    device: Annotated[str, typer.Option(help="With --run: cpu, cuda ...")] = "cpu",
):
    """List the short names of models, and the families whose checkpoints can be checked."""
    if measure:
        return _measure_families(family, dtype, device)
    from .families import UNSUPPORTED

    if markdown:
        _print(layout(list(_model_tables())[1], None, "github"))
        return 0
    refused = [wrap(f"Not supported: {name}: {why}.", _width()) for name, why in UNSUPPORTED.items()]
    _print("\n\n".join([titled(table, _width()) for table in _model_tables()] + refused))
    return 0


def _measure_families(chosen: list[str] | None, dtype: str, device: str) -> int:
    """The table of `survey`, and the worst exit code of any family."""
    from .families import FAMILIES

    unknown = [name for name in chosen or () if name not in FAMILIES]
    if unknown:
        raise UsageError(f"family: got {unknown[0]!r}, expected one of {', '.join(FAMILIES)}")
    with _progress() as progress, quiet_libraries():
        from .survey import survey

        names, found = chosen or list(FAMILIES), []
        for place, name in enumerate(names):
            if progress:
                progress(place, len(names), name)
            found.append(survey(name, dtype=dtype, device=device))
    rows = [
        (
            row["family"],
            ", ".join(f"{count} {kind}" for kind, count in row["layers"].items()),
            row["modes"]["linear"],
            row["modes"]["tree_forked"],
            number(row["forked"]),
            number(row["unforked"]),
            f"{row['flips']}/{row['nodes']}",
            ", ".join(row["channels"]),
            row["exit_code"],
        )
        for row in found
    ]
    headers = (
        "family", "layers", "linear", "forked", "forked |Δ|", "unforked |Δ|", "flips", "leaks by", "exit",
    )  # fmt: skip
    title = (
        f"Families at a small shape, random weights, {dtype}, {device}, one drawn tree; |Δ| is the largest of a node"
    )
    _print(titled(Table(title, headers, rows, ("layers",)), _width()))
    return max((row["exit_code"] for row in found), key=(PASS, INCONCLUSIVE, DEFECT, USAGE).index)


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
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror}, expected a place that can be written", USAGE)
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
    except (KeyError, TypeError, IndexError, AttributeError) as error:
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
