"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
