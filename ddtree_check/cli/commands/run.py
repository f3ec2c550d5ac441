"""compare, generate and sweep: each runs the Job of its options and prints the view of its record."""

from __future__ import annotations

from functools import partial

from ...flows.job import Job, Output, run
from ...report.sweep import check_plot
from .options import offering
from .output import finish


@offering("compare")
def compare(job: Job, output: Output) -> int:
    """Run identical prompts through ar, linear, tree_forked and tree_unforked on the same draft trees, compare logits
    and argmax at every node, and tell leak from noise."""
    return finish(partial(run, job), output)


@offering("generate")
def generate(job: Job, output: Output) -> int:
    """Run real speculative decoding for many rounds in each mode, each with its own commits, and compare every round's
    acceptance, text and state with plain decoding."""
    return finish(partial(run, job), output)


@offering("sweep")
def sweep(job: Job, output: Output) -> int:
    """Compare linear drafts with draft trees by budget and mode: accepted nodes, agreement, wrong accepts and rejects,
    rows and time; and, in the shadow of plain decoding, how much of what an unforked tree seems to gain is leak."""
    if output.plot is not None:
        check_plot(output.plot)
    return finish(partial(run, job), output)
