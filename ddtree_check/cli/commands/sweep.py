"""sweep: draft budgets and block sizes against each other, linear against trees."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    Device,
    Draft,
    Dtype,
    EngineName,
    JsonFile,
    Limit,
    Model,
    Order,
    Prompts,
    Quiet,
    Seed,
    Weights,
    job_of,
)
from .output import finish, width

BUDGETS = "8,16,22,32,64,128"


def sweep(
    budgets: Annotated[str, typer.Option(help="Draft nodes per tree, a tree for each number.")] = BUDGETS,
    blocks: Annotated[
        str | None, typer.Option(help="Positions of a draft block, the root's included. Default: 16, or the drafter's.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds for each prompt and configuration.")] = 6,
    model: Model = None,
    engine: EngineName = "transformers",
    prompts: Prompts = None,
    limit: Limit = None,
    draft: Draft = None,
    order: Order = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    weights: Weights = "real",
    plot: Annotated[str | None, typer.Option(help="Draw it to this .png, .svg or .pdf; needs the extra plot.")] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
):
    """Linear drafts against draft trees by budget and mode: accepted nodes, agreement, wrong accepts and rejects, rows
    and time; and, in the shadow of plain decoding, how much of what an unforked tree seems to gain is leak."""
    job = job_of("sweep", locals())
    from ...report.sweep import check_plot, render_sweep, write_plot

    if plot is not None:
        check_plot(plot)

    def view(record: dict) -> str:
        if plot is not None:
            write_plot(record, plot)
        return render_sweep(record, width(), quiet)

    return finish(job, json, view)
