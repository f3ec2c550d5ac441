"""A run as its callers name it, in words and files, turned into models, prompts and trees for `check`.

The command line and the pytest plugin each make a Job and know no more than that. Nothing here imports torch until a
job is run, so that a prompt file or an option can be refused at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .case import Prompt, load_prompts, load_tree
from .draft import load_recorded
from .errors import UsageError, usage_errors
from .resources import EMBEDDED, fixtures_dir

BUDGET = "16,64"
SMALL = 100_000_000  # parameters below which a second thread costs more than it brings
HUMANEVAL = "humaneval"
RECORDED = "recorded:"
FLAGS = {"budgets": "budget"}  # settings whose option has another name


@dataclass(frozen=True)
class Job:
    """What to run. None stands for the default, which the part that uses the value owns.

    model      a name, path or hub id; None is the embedded model
    prompts    a file, 'humaneval', or None for the code prompts of the package
    limit      run the first so many prompts;  only  run the prompts with these ids
    tree       a file with the one tree to run behind every prompt, in place of drafted ones
    draft      self, ngram or recorded:FILE, whose n-th draft belongs to the n-th prompt of the prompt file
    oracle     run the model in float64 as well
    settings   the keyword arguments of check.Settings that were chosen, but for its draft
    verb       compare, or generate, which runs rounds alone
    rounds     the keyword arguments of rounds.Rounds; None for no rounds;  journal  a file of finished prompts
    """

    model: str | None = None
    engine: str = "transformers"
    weights: str = "real"
    dtype: str | None = None
    device: str = "auto"
    prompts: str | None = None
    limit: int | None = None
    only: tuple[str, ...] = ()
    tree: str | None = None
    draft: str | None = None
    oracle: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    verb: str = "compare"
    rounds: Mapping[str, object] | None = None
    journal: str | None = None

    def command(self) -> str:
        """The command line that runs this job."""
        words = ["ddtree-check", self.verb]
        chosen = {name: getattr(self, name) for name, default in vars(Job()).items() if getattr(self, name) != default}
        prompts = chosen.pop("only", ())
        chosen.pop("verb", None)
        settings = {**chosen.pop("settings", {}), **(chosen.pop("rounds", None) or {})}
        for name, value in (chosen | {FLAGS.get(name, name): value for name, value in settings.items()}).items():
            if value is True:
                words.append(f"--{name}")
                continue
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        for prompt in prompts:
            words += ["--only", prompt]
        return shlex.join(words)


def whole_numbers(what: str, text: str) -> tuple[int, ...]:
    """'16,64' as (16, 64), each number once. Raises UsageError for anything but numbers of at least 1."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"{what}: got {text!r}, expected numbers of at least 1 such as {BUDGET}")
    return found


def select_prompts(job: Job) -> list[tuple[int, Prompt]]:
    """The prompts of a job, each with its place in the file. Needs no model. Raises UsageError."""
    folder = fixtures_dir() / "prompts"
    path = {None: folder / "code.jsonl", HUMANEVAL: folder / "humaneval.jsonl"}.get(job.prompts, job.prompts)
    with usage_errors():
        prompts = list(enumerate(load_prompts(path)))
    if job.limit is not None and job.limit < 1:
        raise UsageError(f"limit: got {job.limit}, expected a number of at least 1")
    prompts = prompts[: job.limit]
    known = {prompt.id for _, prompt in prompts}
    unknown = [name for name in job.only if name not in known]
    if unknown:
        raise UsageError(f"only: no prompt {unknown[0]!r} among {len(prompts)}, first {prompts[0][1].id!r}")
    return [(place, prompt) for place, prompt in prompts if not job.only or prompt.id in job.only]


def case_ids(job: Job) -> dict[str, list[str]]:
    """The ids of the cases that each prompt of a job leads to, as `check` names them. For drafted trees."""
    return {
        prompt.id: [f"{prompt.id}/{budget}" for budget in job.settings["budgets"]] for _, prompt in select_prompts(job)
    }


def run(job: Job, progress: Callable[[int, int, str], None] | None = None) -> dict:
    """Runs a job and returns its record. progress(done, total, text) is called before each long step.

    Raises UsageError for bad input, found before the weights are read wherever that is possible, and Unsupported.
    """
    prompts = select_prompts(job)
    with usage_errors():
        tree = load_tree(job.tree) if job.tree else None
    drafts = _drafts(job, prompts)
    with quiet_libraries():
        return _run(job, prompts, tree, drafts, progress or (lambda *_: None))


def _drafts(job: Job, prompts: Sequence[tuple[int, Prompt]]) -> list:
    """For each prompt its recorded draft, or None."""
    if not (job.draft or "").startswith(RECORDED):
        return [None] * len(prompts)
    path = job.draft.removeprefix(RECORDED)
    if job.tree:
        raise UsageError(f"draft: got {job.draft} and the tree {job.tree}, expected one of them")
    with usage_errors():
        drafts = load_recorded(path)
    last = prompts[-1][0]
    if last >= len(drafts):
        raise UsageError(
            f"draft: {path} holds {len(drafts)} drafts, expected one for each prompt up to number {last + 1}; "
            "record more, or take a smaller --limit"
        )
    return [drafts[place] for place, _ in prompts]


def _run(job: Job, prompts, tree, drafts, progress) -> dict:
    from .check import Item, Settings, check, fits
    from .engines import load_engine, loading
    from .rounds import Rounds, attach, generate, make_record

    draft = {"draft": job.draft.partition(":")[0]} if job.draft else {}
    settings = Settings(**job.settings, **draft)
    loading.parse_dtype(job.dtype, None)
    progress(0, len(prompts), f"looking for {job.model or EMBEDDED}")
    source = loading.resolve(job.model)
    config = loading.load_config(job.model, source, job.weights).get_text_config(decoder=True)
    tokenizer, origin = _tokenizer(job, source, any(prompt.text is not None for _, prompt in prompts))
    items = []
    for (_, prompt), recorded in zip(prompts, drafts, strict=True):
        tokens = prompt.token_ids or tuple(tokenizer(prompt.text)["input_ids"])
        items.append(Item(prompt.id, tokens, tree, recorded))
        fits(items[-1], settings, config.vocab_size, getattr(config, "max_position_embeddings", None))
    engine = load_engine(
        job.engine,
        job.model,
        weights=job.weights,
        dtype=job.dtype,
        device=job.device,
        seed=settings.seed,
        progress=lambda text: progress(0, len(items), text),
    )
    model = {**getattr(engine, "provenance", {}), "tokenizer": origin}
    rounds = None
    with _threads(model):
        if job.rounds is not None:
            rounds = Rounds(**job.rounds, stop=_stop_tokens(config, tokenizer))
            rounds = generate(engine, items, settings, rounds, journal=job.journal, progress=progress)
        if job.verb == "generate":
            return make_record(engine, rounds, settings, model) | {"command": job.command()}
        oracle = engine.exact() if job.oracle else None
        record = check(engine, items, settings, oracle=oracle, model=model, progress=progress)
    record |= {"command": job.command(), "tokens": _texts(record, tokenizer)}
    return record if rounds is None else attach(record, rounds)


@contextlib.contextmanager
def _threads(model: Mapping[str, object]) -> Iterator[None]:
    """One thread for a small model, unless the caller chose: threads wait through its many small steps."""
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and int(model.get("parameters", SMALL)) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stop_tokens(config, tokenizer) -> frozenset[int]:
    """Token ids that end a text, by the model's config and by its tokenizer."""
    ids = getattr(config, "eos_token_id", None)
    found = [*(ids if isinstance(ids, list) else [ids]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(token for token in found if token is not None)


def _tokenizer(job: Job, source: str, needed: bool):
    """A tokenizer and whose it is. One that is only there to make views readable is not fetched from anywhere."""
    from .engines import loading

    if needed or Path(source).is_dir():
        tokenizer = loading.load_tokenizer(source)
        if tokenizer is not None:
            return tokenizer, "own"
    if not needed:
        return None, None
    if job.weights == "random":
        tokenizer = loading.load_tokenizer(loading.resolve(None))
        if tokenizer is not None:
            return tokenizer, "embedded"
    raise UsageError(
        f"prompts: {source} has no tokenizer for prompts given as text; "
        'give --prompts a .jsonl file with lines of {"token_ids": [...]}'
    )


def _texts(record: dict, tokenizer) -> dict[str, str]:
    """Text by token id (a string, as JSON keys are) of every token that a view of the record may show."""
    if tokenizer is None:
        return {}
    ids = set()
    for case in record["cases"]:
        ids.update(walk["bonus"] for walk in case["acceptance"].values())
        for node in case["nodes"]:
            ids.add(node["token"])
            ids.update(value["argmax"] for value in node.values() if isinstance(value, dict) and "argmax" in value)
    return {str(token): tokenizer.decode([token]) for token in sorted(ids) if token < len(tokenizer)}


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No loading bars, retries or advice of the libraries amid our output; afterwards as it was.

    Enter it before torch is imported: threads that spin while they wait, its default, make a small model on shared
    cores many times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as library

    levels, bars = (library.get_verbosity(), hub.get_verbosity()), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    hub.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            library.enable_progress_bar()
