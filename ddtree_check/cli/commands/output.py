"""Where a command's words go: stdout and stderr, a terminal's width and colours, and the record's file."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

from ...base.errors import usage_errors
from ...flows.job import Output
from ...report.record import check_writable, write_record
from ...report.sweep import write_plot
from ...report.text import plain
from ...report.views import render

PAGE = 120  # columns of what no terminal shows
WORDS = {  # colour of the words that decide, on a terminal
    "green": r"\bpass\b",
    "yellow": r"\b(tie|insensitive|not_run|unsupported|reference_unusable|inconclusive|RANDOM[ A-Z]*)\b",
    "red": r"\b(flip|leak|fail)\b",
}


def finish(run: Callable[[Callable | None], dict], output: Output, view: Callable[..., str] = render) -> int:
    """Run, write the record and its page where there is a path for it, print the view, return the exit code.

    run: takes what shows its progress, and returns a record; view: its text, of the record, a width and --quiet.
    """
    for target in filter(None, (output.json, output.html)):
        check_writable(target)
    with progress() as show:
        record = run(show)
    try:
        if output.json is not None:
            write_record(output.json, record)
        if output.html is not None:
            write_html(output.html, record)
        if output.plot is not None:
            write_plot(record, output.plot)
    finally:
        show_text(view(record, width(), output.quiet))  # of what was run, also where a file cannot be written
    return record["exit_code"]


def write_html(path: str, record: dict) -> None:
    """Write the page of a record, whole or not at all. Raises UsageError if the file cannot be written."""
    from ...base.files import write_text
    from ...report import html

    with usage_errors():
        write_text(path, html.render(record))


def show_text(text: str, *, data: bool = False) -> None:
    """Write to stdout, in colour on a terminal. A reader that has gone, such as `head`, is no error.

    Words of a file must not steer the terminal: what is neither printed nor the end of a line is shown as `?`.
    data: JSON or CSV for a program, whose values come out as they are.
    """
    if not data:
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
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


def width() -> int:
    """Return the columns of the terminal, or what COLUMNS asks for; of a file or a pipe PAGE."""
    return shutil.get_terminal_size((PAGE, 0)).columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else PAGE


def unicode(stream) -> bool:
    return "utf" in (getattr(stream, "encoding", None) or "").lower()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield what shows a bar on stderr while it is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=plain(text))
