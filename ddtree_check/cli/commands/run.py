"""compare, generate and sweep: each runs the Job of its options and prints the view of its record."""

from __future__ import annotations

from ...flows.job import Job, Output
from ...report.terminal import render, render_rounds
from .options import offering
from .output import finish, width


@offering("compare")
def compare(job: Job, output: Output) -> int:
    """Run identical prompts through ar, linear, tree_forked and tree_unforked on the same draft trees, compare logits
    and argmax at every node, and tell leak from noise."""
    return finish(job, output.json, lambda record: render(record, width(), output.quiet), output.html)


@offering("generate")
def generate(job: Job, output: Output) -> int:
    """Run real speculative decoding for many rounds in each mode, each with its own commits, and compare every round's
    acceptance, text and state with plain decoding."""
    return finish(job, output.json, lambda record: render_rounds(record, width(), output.quiet))


@offering("sweep")
def sweep(job: Job, output: Output) -> int:
    """Linear drafts against draft trees by budget and mode: accepted nodes, agreement, wrong accepts and rejects, rows
    and time; and, in the shadow of plain decoding, how much of what an unforked tree seems to gain is leak."""
    from ...report.sweep import check_plot, render_sweep, write_plot

    if output.plot is not None:
        check_plot(output.plot)

    def view(record: dict) -> str:
        if output.plot is not None:
            write_plot(record, output.plot)
        return render_sweep(record, width(), output.quiet)

    return finish(job, output.json, view)
