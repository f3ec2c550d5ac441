"""Options that several commands share, and the Job that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ...flows.job import Job, whole_numbers
from .output import split_words

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
Draft = Annotated[
    str | None,
    typer.Option(
        help="dflash[:PATH|HUB_ID], ngram, recorded:FILE, or self. Default: dflash for the embedded model, else self."
    ),
]
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
Tp = Annotated[int, typer.Option(help="GPUs that share the model's heads; engine sglang.")]
EngineArg = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE for the engine itself, such as mamba_ssm_dtype=bfloat16; may be repeated."),
]
JsonFile = Annotated[str | None, typer.Option(help="Write the record to this file.")]
HtmlFile = Annotated[str | None, typer.Option(help="Write the record as one self-contained HTML page to this file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone.")]
# How tokens are drawn; see sampling.Sampling. Without any of them, decoding is greedy.
Temperature = Annotated[float | None, typer.Option(help="Sample at this temperature. Default: 0, greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the so many most probable tokens. Default: all.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the fewest tokens with this mass. Default: 1.")]
Repetition = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Divides the logits of tokens in prompt or output. Default: 1."),
]
Presence = Annotated[
    float | None, typer.Option("--presence-penalty", help="Taken from tokens of the output. Default: 0.")
]
Frequency = Annotated[
    float | None, typer.Option("--frequency-penalty", help="Taken for each time in the output. Default: 0.")
]
History = Annotated[
    str | None,
    typer.Option(
        help="What the unforked control's penalties count: path, prompt, parent, rows, sibling, batch, none. "
        "Default: path, which is right."
    ),
]
VocabSize = Annotated[
    int | None, typer.Option("--vocab-size", help="Tokens; logits after them are padding. Default: the model's.")
]

WORDS, NUMBERS = ("require", "accept", "modes"), ("budget", "budgets", "blocks", "batch")  # several in one option
ROUNDS = ("rounds", "modes", "plain")  # of rounds.Rounds; the rest is of the Job, of settings.Settings, or of a view
VIEWS = {"json", "html", "quiet", "plot"}


def job_of(verb: str, given: Mapping[str, object]) -> Job:
    """The job of a command's options by their Python names; what is None or False was not chosen. Raises UsageError."""
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    chosen |= {name: split_words(chosen[name]) for name in WORDS if name in chosen}
    chosen |= {name: whole_numbers(name, str(chosen[name])) for name in NUMBERS if name in chosen}
    chosen |= {
        many: tuple(chosen.pop(one)) for one, many in (("only", "only"), ("engine_arg", "engine_args")) if one in chosen
    }
    budgets = chosen.pop("budget", None) or chosen.pop("budgets")
    rounds = {name: chosen.pop(name) for name in ROUNDS if name in chosen}
    own = {field.name for field in fields(Job)}
    return Job(
        verb=verb,
        settings={"budgets": budgets} | {name: value for name, value in chosen.items() if name not in own | VIEWS},
        rounds=rounds or None,
        **{name: value for name, value in chosen.items() if name in own},
    )
