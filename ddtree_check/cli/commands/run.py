"""compare and generate: each makes a Job of its options, runs it and prints the view of its record."""

from __future__ import annotations

from typing import Annotated

import typer

from ...flows.job import BUDGET
from ...report.terminal import render, render_rounds
from .options import (
    Acceptance,
    Device,
    Draft,
    Dtype,
    EngineArg,
    EngineName,
    Frequency,
    History,
    HtmlFile,
    JsonFile,
    Length,
    Limit,
    Model,
    Order,
    Presence,
    Prompts,
    Quiet,
    Repetition,
    Require,
    Seed,
    Temperature,
    TopK,
    TopP,
    Tp,
    VocabSize,
    Weights,
    job_of,
)
from .output import finish, width


def compare(
    trace: Annotated[
        str | None,
        typer.Argument(help="With --engine trace: recorded passes, a folder or one file (docs/trace.md)."),
    ] = None,
    model: Model = None,
    engine: EngineName = "transformers",
    budget: Annotated[str, typer.Option(help="Draft nodes per tree, one tree for each number.")] = BUDGET,
    prompts: Prompts = None,
    limit: Limit = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the prompt with this id; may be repeated.")] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help="File with {tokens, parents}: this tree in place of --draft and --budget; or a published shape, "
            "filled from the draft: eagle, medusa, token-recycling."
        ),
    ] = None,
    draft: Draft = None,
    acceptance: Acceptance = None,
    length: Length = None,
    order: Order = None,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = "auto",
    tp: Tp = 1,
    engine_arg: EngineArg = None,
    weights: Weights = "real",
    require: Require = None,
    ar: Annotated[
        str | None, typer.Option(help="strict, a node at a time, or batched, a level at a time. Default: strict.")
    ] = None,
    controls: Annotated[
        int | None, typer.Option(help="Leaf paths that the controls run. Default: all; 16 under draft dflash.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Also decode so many rounds in each mode, as generate does.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Also run the prompts in batches of these sizes, such as 1,2,4, against each alone."),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(help="Commit these paths and check the state: zero, first, full, branch, every, or nodes 0-2-5."),
    ] = None,
    wiring: Annotated[
        str | None,
        typer.Option(help="What the unforked control reads wrong, such as conv=flat. Default: states and windows."),
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option("--attribute", help="Look for where every failing mode goes wrong, the control too."),
    ] = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    history: History = None,
    vocab_size: VocabSize = None,
    draws: Annotated[
        int | None,
        typer.Option(help="Walks drawn from each tree and tested against ar when sampling; 0 for none. Default: 500."),
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Run the model in float64 too, and give every mode an error.")
    ] = False,
    save_trace: Annotated[
        str | None, typer.Option(help="Write every pass to this new folder, for --engine trace.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Bytes that --save-trace may write. Default: 4 GiB.")
    ] = None,
    json: JsonFile = None,
    html: HtmlFile = None,
    quiet: Quiet = False,
):
    """Run identical prompts through ar, linear, tree_forked and tree_unforked on the same draft trees, compare logits
    and argmax at every node, and tell leak from noise."""
    job = job_of("compare", locals())
    return finish(job, json, lambda record: render(record, width(), quiet), html)


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
    tp: Tp = 1,
    engine_arg: EngineArg = None,
    weights: Weights = "real",
    require: Require = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    history: History = None,
    vocab_size: VocabSize = None,
    journal: Annotated[
        str | None, typer.Option(help="File of finished prompts; a killed run goes on after them.")
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
):
    """Run real speculative decoding for many rounds in each mode, each with its own commits, and compare every round's
    acceptance, text and state with plain decoding."""
    job = job_of("generate", locals())
    return finish(job, json, lambda record: render_rounds(record, width(), quiet))
