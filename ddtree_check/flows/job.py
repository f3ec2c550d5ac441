"""A run as its callers name it, in words and files, turned into models, prompts and trees for `check`.

The command line and the pytest plugin each make a Job and know no more than that. Nothing here imports torch until a
job is run, so that a prompt file or an option can be refused at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.errors import Unsupported, UsageError, usage_errors
from ..base.resources import DRAFTER, EMBEDDED, fixtures_dir
from ..base.words import counted, option
from ..engines import REPLAYED, of_class
from ..model.families import ALIASES
from ..tree.case import Prompt, load_prompts, load_tree
from ..tree.drafts.best_first import PUBLISHED
from ..tree.drafts.recorded import load_recorded

BUDGET = "16,64"
SMALL = 100_000_000  # parameters below which a second thread costs more than it brings
HUMANEVAL = "humaneval"
RECORDED = "recorded:"
DFLASH = "dflash"
TRACE_BYTES = 4 << 30  # that a trace may take, unless the caller allows more
SAMPLED = 16  # leaf paths that the controls take of a drafter's trees, which have many


@dataclass(frozen=True)
class Job:
    """What to run. None stands for the default, which the part that uses the value owns.

    model      a name, path or hub id; None is the embedded model
    tp         GPUs to spread the model's heads over;  engine_args  NAME=VALUE, the engine's own
    prompts    a file, 'humaneval', or None for the code prompts of the package
    limit      run the first so many prompts;  only  run the prompts with these ids
    tree       a file with the one tree to run behind every prompt, in place of drafted ones, or a published tree's name
    draft      self, ngram, dflash[:PATH|HUB_ID] or recorded:FILE, whose n-th draft belongs to the n-th prompt of the
               prompt file; None is dflash for the embedded model and self for any other
    oracle     run the model in float64 as well
    batch      also run the prompts in batches of these sizes, against each alone
    trace      with engine trace: the recorded passes to judge;  save_trace  a new folder for every pass that is made;
               max_bytes  that it may take
    settings   the keyword arguments of settings.Settings that were chosen, but for its draft
    verb       compare, generate, which runs rounds alone, or sweep, which runs them for every budget and block
    rounds     the keyword arguments of rounds.Rounds; None for no rounds;  journal  a file of finished prompts
    blocks     sizes of a draft block that a sweep tries; None for the drafter's own
    """

    model: str | None = None
    engine: str = "transformers"
    weights: str = "real"
    dtype: str | None = None
    device: str = "auto"
    tp: int = 1
    engine_args: tuple[str, ...] = ()
    prompts: str | None = None
    limit: int | None = None
    only: tuple[str, ...] = ()
    tree: str | None = None
    draft: str | None = None
    oracle: bool = False
    batch: tuple[int, ...] = ()
    trace: str | None = None
    save_trace: str | None = None
    max_bytes: int = TRACE_BYTES
    settings: Mapping[str, object] = field(default_factory=dict)
    verb: str = "compare"
    rounds: Mapping[str, object] | None = None
    journal: str | None = None
    blocks: tuple[int, ...] | None = None

    def command(self) -> str:
        """The command line that runs this job."""
        words = ["ddtree-check", self.verb]
        chosen = {name: getattr(self, name) for name, default in vars(Job()).items() if getattr(self, name) != default}
        prompts, own = chosen.pop("only", ()), chosen.pop("engine_args", ())
        place = [chosen.pop("trace")] if "trace" in chosen else []
        for name in ("verb", "save_trace", "max_bytes"):
            chosen.pop(name, None)
        settings = {**chosen.pop("settings", {}), **(chosen.pop("rounds", None) or {})}
        if self.trace is not None or self.tree is not None:  # such a tree has the size that it has
            settings.pop("budgets", None)
        for name, value in (chosen | settings).items():
            flag = "--budgets" if (self.verb, name) == ("sweep", "budgets") else f"--{option(name)}"
            if value is True:
                words.append(flag)
                continue
            words += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        for prompt in prompts:
            words += ["--only", prompt]
        for pair in own:
            words += ["--engine-arg", pair]
        return shlex.join(words + place)


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
    if (job.engine in REPLAYED) != (job.trace is not None):
        got = f"engine {job.engine} and {'no trace' if job.trace is None else job.trace}"
        raise UsageError(f"trace: got {got}, expected --engine trace with the path of a trace, or neither")
    if job.trace is not None:
        return _run_trace(job, progress or (lambda *_: None))
    prompts = select_prompts(job)
    with usage_errors():
        tree = load_tree(job.tree) if job.tree and job.tree not in PUBLISHED else None
    drafts = _drafts(job, prompts)
    with quiet_libraries():
        return _run(job, prompts, tree, drafts, progress or (lambda *_: None))


def _drafts(job: Job, prompts: Sequence[tuple[int, Prompt]]) -> list:
    """For each prompt its recorded draft, or None."""
    if not (job.draft or "").startswith(RECORDED):
        return [None] * len(prompts)
    path = job.draft.removeprefix(RECORDED)
    if job.tree and job.tree not in PUBLISHED:
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
    from ..engines import load_engine, load_options
    from ..engines.transformers import loading
    from .batch import batch_runs, check_sizes
    from .check import check
    from .replay import writer_for
    from .rounds import Rounds, attach, generate, make_record
    from .settings import Item, Settings, fits
    from .sweep import sweep

    draft = draft_source(job)
    shape = {"shape": job.tree} if job.tree in PUBLISHED else {}
    sampled = {"controls": SAMPLED} if draft.startswith(DFLASH) else {}
    settings = Settings(**sampled | job.settings, **shape, draft=draft.partition(":")[0])
    loading.parse_dtype(job.dtype, None)
    progress(0, len(prompts), f"looking for {job.model or EMBEDDED}")
    source = loading.resolve(job.model)
    config = of_class(job.engine, "load_config")(job.model, source, job.weights).get_text_config(decoder=True)
    tokenizer, origin = _tokenizer(job, source, any(prompt.text is not None for _, prompt in prompts))
    check_sizes(job.batch, len(prompts))
    items = []
    for (_, prompt), recorded in zip(prompts, drafts, strict=True):
        tokens = prompt.token_ids or tuple(tokenizer(prompt.text)["input_ids"])
        items.append(Item(prompt.id, tokens, tree, recorded))
        room = getattr(config, "max_position_embeddings", None)
        fits(items[-1], settings, config.vocab_size, room, rounds=job.verb == "generate")
    rounds = None if job.rounds is None else Rounds(**job.rounds, stop=_stop_tokens(config, tokenizer))
    idle = [mode for mode in settings.require if job.verb == "generate" and mode not in rounds.modes]
    if idle:
        raise UsageError(
            f"require: got {idle[0]}, which is none of --modes {','.join(rounds.modes)}; run it too, or require others"
        )
    largest = max(rows for item in items for rows in _tree_rows(item, settings))
    own = load_options(job.engine, args=engine_args(job.engine_args), tp=job.tp, rows=largest)
    engine = load_engine(
        job.engine,
        job.model,
        vocab_size=settings.vocab_size,
        weights=job.weights,
        dtype=job.dtype,
        device=job.device,
        seed=settings.seed,
        progress=lambda text: progress(0, len(items), text),
        **own,
    )
    model = {**engine.provenance, "tokenizer": origin}
    if settings.draft == DFLASH and tree is None:
        items, model["drafter"] = _with_drafter(job, draft, engine, items)
    with few_threads(model):
        if job.save_trace:
            _expect_room(job, engine, items, settings)
        if job.verb == "sweep":
            blocks = job.blocks or (_block(items, settings),)
            record = sweep(engine, items, settings, rounds, blocks, model=model, progress=progress)
            return record | {"command": job.command()}
        if rounds is not None:
            rounds = generate(engine, items, settings, rounds, journal=job.journal, progress=progress)
        if job.verb == "generate":
            found = make_record(engine, rounds, settings, model)
            return found | {"command": job.command(), "tokens": _texts(found, tokenizer)}
        oracle = engine.exact() if job.oracle else None
        together = batch_runs(engine, items, settings, job.batch, progress=progress) if job.batch else None
        trace = writer_for(engine, job.save_trace, settings) if job.save_trace else None
        workers = processes(model, environment=engine.describe())
        record = check(
            engine, items, settings, oracle=oracle, model=model, progress=progress, trace=trace, workers=workers
        )
    if ":" in job.engine:  # one of the caller's own, which may pass on what the engine that it wraps says of itself
        record["environment"]["engine"] = job.engine
    for section, found in (("rounds", rounds), ("batch", together)):
        if found is not None:
            record = attach(record, section, found)
    return record | {"command": job.command(), "tokens": _texts(record, tokenizer)}


def engine_args(pairs: Sequence[str]) -> dict[str, object]:
    """NAME=VALUE pairs as a mapping; values are read as JSON where they are (8, 0.5, true, null), else as text."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"engine-arg: got {pair!r}, expected NAME=VALUE such as mamba_ssm_dtype=bfloat16")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def draft_source(job: Job) -> str:
    """The draft of a job, the default filled in: the embedded drafter where it fits, else the model's own choices."""
    if job.draft:
        return job.draft
    embedded = job.model in (None, EMBEDDED) and job.weights == "real"
    return of_class(job.engine, "default_draft") if embedded and "acceptance" not in job.settings else "self"


def _with_drafter(job: Job, draft: str, engine, items: Sequence) -> tuple[list, dict]:
    """The items with their DFlash drafter, which the engine reads features for from now on, and what it is."""
    from ..engines.dflash import load

    try:
        engine.read_features(())
    except Unsupported as reason:
        raise Unsupported(f"draft: {reason}; take --draft self") from None
    alias = ALIASES.get((job.model or "").lower())
    default = DRAFTER if job.model in (None, EMBEDDED) else alias and alias.drafter
    drafter = load(draft.partition(":")[2] or None, engine, default)
    engine.read_features(drafter.spec.layers)
    return [replace(item, drafter=drafter) for item in items], drafter.describe()


def _block(items: Sequence, settings) -> int:
    """Positions of a draft block with the root's: those of the settings, or the drafter's if they are fewer."""
    return 1 + min([settings.length, *(item.drafter.length for item in items if item.drafter is not None)])


def _tree_rows(item, settings) -> list[int]:
    """At most so many rows has each tree that a prompt will get, its root included."""
    given = item.tree or (item.recorded if hasattr(item.recorded, "parents") else None)
    if given is not None:
        return [len(given)]
    if isinstance(item.recorded, tuple):
        return list(map(len, item.recorded))
    budgets = settings.budgets if settings.shape is None else [len(PUBLISHED[settings.shape].split())]
    return [1 + budget for budget in budgets]


def _expect_room(job: Job, engine, items: Sequence, settings) -> None:
    """Raises UsageError for a trace that would take more than `max_bytes`, before any of it is written."""
    from .passes import trace_bytes

    if job.max_bytes < 1:
        raise UsageError(f"max-bytes: got {job.max_bytes}, expected a number of at least 1")
    needed = trace_bytes(engine, items, settings, [_tree_rows(item, settings) for item in items])
    if needed > job.max_bytes:
        raise UsageError(
            f"save-trace: {needed:,} bytes would be written for {counted(len(items), 'prompt')}, expected at most "
            f"{job.max_bytes:,}; take fewer prompts, smaller budgets or a larger --max-bytes"
        )


def _run_trace(job: Job, progress) -> dict:
    """Judges recorded passes; a model is loaded only if one is named."""
    from ..trace.read import read_trace

    free = {"budgets", "seed", "require"}
    useless = [name for name in job.settings if name not in free]
    useless += [
        name
        for name in ("tree", "draft", "oracle", "batch", "rounds", "journal", "save_trace", "max_bytes")
        if getattr(job, name) != getattr(Job(), name)
    ]
    if useless or job.verb != "compare":
        what = option((useless or [job.verb])[0])
        raise UsageError(f"{what}: says nothing of passes that were recorded; leave it out")
    trace = read_trace(job.trace)
    with quiet_libraries():
        from ..engines import load_engine
        from ..engines.transformers import loading
        from ..trace.recorded import TraceEngine
        from .replay import judge_trace
        from .settings import Settings

        steps = _select_steps(job, trace)
        settings = Settings(**{name: value for name, value in job.settings.items() if name in free})
        live = tokenizer = None
        if job.model is not None:
            wanted = loading.parse_dtype(job.dtype, None)
            if wanted is not None and str(wanted).removeprefix("torch.") != trace.header.dtype:
                raise UsageError(
                    f"dtype: got {job.dtype}, the trace was computed in {trace.header.dtype}; a floor needs the same"
                )
            progress(0, len(steps), f"loading {job.model}")
            live = load_engine(
                "transformers",
                job.model,
                weights=job.weights,
                dtype=trace.header.dtype,
                device=job.device,
                seed=settings.seed,
            )
            tokenizer, _ = _tokenizer(job, loading.resolve(job.model), False)
        prompts = None if job.prompts is None else _wanted_prompts(job, tokenizer)
        with few_threads({} if live is None else live.provenance):
            record = judge_trace(
                TraceEngine(trace), settings, reference=live, prompts=prompts, steps=steps, progress=progress
            )
    return record | {"command": job.command(), "tokens": _texts(record, tokenizer)}


def _select_steps(job: Job, trace) -> tuple:
    """The steps of a trace that --only (a step's or request's id) and --limit leave."""
    if job.limit is not None and job.limit < 1:
        raise UsageError(f"limit: got {job.limit}, expected a number of at least 1")
    known = {name for step in trace.steps for name in (step.id, step.request)}
    for name in job.only:
        if name not in known:
            raise UsageError(f"only: no step or request {name!r} in {job.trace}, first {trace.steps[0].id!r}")
    chosen = [step for step in trace.steps if not job.only or {step.id, step.request} & set(job.only)]
    return tuple(chosen[: job.limit])


def _wanted_prompts(job: Job, tokenizer) -> dict[str, tuple[int, ...]]:
    """Token ids by prompt, that the requests of a trace should have had."""
    found = {}
    for _, prompt in select_prompts(replace(job, limit=None, only=())):
        if prompt.token_ids is None and tokenizer is None:
            raise UsageError("prompts: text needs a tokenizer; give --model, or a .jsonl file of token_ids")
        found[prompt.id] = prompt.token_ids or tuple(tokenizer(prompt.text)["input_ids"])
    return found


@contextlib.contextmanager
def few_threads(model: Mapping[str, object]) -> Iterator[None]:
    """One thread for a small model, unless the caller chose: threads wait through its many small steps."""
    import torch

    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and int(model.get("parameters", SMALL)) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processes(model: Mapping[str, object], environment: Mapping[str, object]) -> int:
    """How many processes share a run's prompts: a small model on the CPU gets a core for each, unless the caller chose
    threads."""
    small = int(model.get("parameters", SMALL)) < SMALL and environment.get("device") == "cpu"
    forks = hasattr(os, "sched_getaffinity")  # Linux, where a process can be forked and cores can be counted
    return min(4, len(os.sched_getaffinity(0))) if small and forks and "OMP_NUM_THREADS" not in os.environ else 1


def _stop_tokens(config, tokenizer) -> frozenset[int]:
    """Token ids that end a text, by the model's config and by its tokenizer."""
    ids = getattr(config, "eos_token_id", None)
    found = [*(ids if isinstance(ids, list) else [ids]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(token for token in found if token is not None)


def _tokenizer(job: Job, source: str, needed: bool):
    """A tokenizer and whose it is. One that is only there to make views readable is not fetched from anywhere."""
    from ..engines.transformers import loading

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
    for prompt in record.get("rounds", {}).get("prompts", ()):
        for mode in prompt["modes"].values():
            ids.update(token for found in mode["rounds"] for token in found["tree"]["tokens"])
    for case in record.get("cases", ()):
        ids.update(walk["bonus"] for walk in case["acceptance"].values())
        for node in case["nodes"]:
            ids.add(node["token"])
            ids.update(value["argmax"] for value in node.values() if isinstance(value, dict) and "argmax" in value)
    ids.discard(None)  # the argmax of a mode that was not run
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
