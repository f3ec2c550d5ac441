"""compare and generate: each makes a Job of its options, runs it and prints the view of its record."""

from __future__ import annotations

from typing import Annotated

import typer

from ..job import BUDGET, Job, whole_numbers
from ..report.terminal import render, render_rounds
from .options import (
    Acceptance,
    Device,
    Draft,
    Dtype,
    EngineName,
    JsonFile,
    Length,
    Limit,
    Model,
    Order,
    Prompts,
    Quiet,
    Require,
    Seed,
    Weights,
)
from .output import finish, split_words, width


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
        "require": split_words(require),
        "accept": split_words(accept),
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
    return finish(job, json, lambda record: render(record, width(), quiet))


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
    chosen = {"acceptance": acceptance, "length": length, "order": order, "seed": seed, "require": split_words(require)}
    settings = {"budgets": (budget,)} | {name: value for name, value in chosen.items() if value is not None}
    many = {"rounds": rounds, "modes": split_words(modes), "plain": plain}
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
    return finish(job, json, lambda record: render_rounds(record, width(), quiet))
