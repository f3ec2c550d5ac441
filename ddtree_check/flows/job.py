"""A run as its callers name it, in words and files, turned into models, prompts and trees for `check`.

The command line and the pytest plugin each make a Job and know no more than that. Nothing here imports torch until a
job is run, so that a prompt file or an option can be refused at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..base.errors import Unsupported, UsageError, usage_errors
from ..base.forked_pool import apart
from ..base.options import check_options, group, make, offered, option, options
from ..base.resources import DRAFTER, EMBEDDED, fixtures_dir
from ..base.words import counted
from ..base.words import option as spoken
from ..engines.registry import REPLAYED, of_class
from ..judge.rule import Rule
from ..judge.sampling.processing import DECODING, Sampling
from ..model.families import ALIASES
from ..tree.case import Prompt, load_prompts, load_tree
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import PUBLISHED
from ..tree.drafts.recorded import load_recorded
from .settings import DRAFTS, Checks, Drafting, Draws, Item, Rounds, Settings, fits

SMALL = 100_000_000  # parameters below which a second thread costs more than it brings
HUMANEVAL = "humaneval"
RECORDED = "recorded:"
DFLASH = "dflash"
TRACE_BYTES = 4 << 30  # that a trace may take, unless the caller allows more
SAMPLED = 16  # leaf paths that the controls take of a drafter's trees, which have many


@group("Model")
class Target:
    """The model, and what runs it. None stands for the embedded model and for the dtype of a checkpoint."""

    model: str | None = option(
        None, "A name (see models), path or hub id. Default: the tiny trained hybrid of this package.", "MODEL"
    )
    weights: str = option(
        "real", "real, or random: any architecture without a download.", "HOW", choices=("real", "random")
    )
    engine: str = option("transformers", "What runs the model: transformers, sglang, trace or MODULE:CLASS.", "ENGINE")
    dtype: str | None = option(None, "float32, bfloat16, float16, float64. Default: the checkpoint's.", "DTYPE")
    device: str = option("auto", "auto, cpu, cuda, cuda:1 ...", "DEVICE", later=True)
    tp: int = option(1, "GPUs that share the model's heads; engine sglang.", "N", later=True)
    engine_args: tuple[str, ...] = option(
        (), "NAME=VALUE for the engine itself, such as mamba_ssm_dtype=bfloat16; may be repeated.", "NAME=VALUE",
        later=True, repeat=True,
    )  # fmt: skip


@group("Prompts")
class Prompts:
    """What to run it on. None stands for the code prompts of the package."""

    prompts: str | None = option(
        None, "Text file, .jsonl of {text} or {token_ids}, or humaneval. Default: 8 code prompts of this package.",
        "FILE",
    )  # fmt: skip
    limit: int | None = option(None, "Only the first so many prompts.", "N", least=1)
    only: tuple[str, ...] = option((), "Only the prompt with this id; may be repeated.", "ID", later=True, repeat=True)


@group("Draft trees")
class Sources:
    """Where trees come from. recorded:FILE: its n-th draft belongs to the n-th prompt of the prompt file."""

    draft: str | None = option(
        None, "dflash[:PATH|HUB_ID], ngram, recorded:FILE, or self. Default: dflash for the embedded model, else self.",
        "DRAFT", holds=lambda source: source.partition(":")[0] in DRAFTS,
        expects="self, ngram, recorded:FILE or dflash",
    )  # fmt: skip
    tree: str | None = option(
        None, "File with {tokens, parents}: this tree in place of --draft and --budget; or a published shape, filled "
        f"from the draft: {', '.join(PUBLISHED)}.", "TREE", verbs="compare",
    )  # fmt: skip
    blocks: tuple[int, ...] = option(
        (), "Positions of a draft block, the root's included. Default: 16, or the drafter's.", "N,...", least=1,
        verbs="sweep",
    )  # fmt: skip


@group("Checks", later=True, verbs="compare")
class Besides:
    """Further runs of the same prompts."""

    batch: tuple[int, ...] = option(
        (), "Also run the prompts in batches of these sizes, such as 1,2,4, against each alone.", "N,...", least=1
    )
    oracle: bool = option(False, "Run the model in float64 too, and give every mode an error.")


@group("Files", later=True)
class Stored:
    """Files that a run goes on from."""

    trace: str | None = option(
        None, "With --engine trace: recorded passes, a folder or one file (docs/trace.md).", "TRACE", argument=True,
        verbs="compare",
    )  # fmt: skip
    journal: str | None = option(
        None, "File of finished prompts; a killed run goes on after them.", "FILE", verbs=DECODING
    )


@group("Files", later=True, verbs="compare")
class Saved:
    """A trace to be written: a new folder for every pass that is made, and the bytes that it may take."""

    save_trace: str | None = option(None, "Write every pass to this new folder, for --engine trace.", "FOLDER")
    max_bytes: int = option(TRACE_BYTES, "Bytes that --save-trace may write. Default: 4 GiB.", "N", least=1)


@group("Output")
class Output:
    """What is shown of a record, and the files that it is written to."""

    json: str | None = option(None, "Write the record to this file.", "FILE")
    html: str | None = option(
        None, "Write the record as one self-contained HTML page to this file.", "FILE", verbs="compare"
    )
    plot: str | None = option(None, "Draw it to this .png, .svg or .pdf; needs the extra plot.", "FILE", verbs="sweep")
    quiet: bool = option(False, "Print the verdict alone.", short="-q")


# What every door offers, in the order of --help and of a repeated command.
RUN = (Target, Prompts, Drafting, Sources, Checks, Besides, Rounds, Draws, Sampling, Rule)
DEFAULTS = {  # where the default is not that of the option
    "compare": {"budgets": (16, 64)},
    "generate": {"budgets": (16,), "rounds": 20},
    "sweep": {"budgets": (8, 16, 22, 32, 64, 128), "rounds": 6},
}


@dataclass(frozen=True)
class Job(Target, Prompts, Sources, Besides, Stored, Saved):
    """What to run. None stands for the default, which the part that uses the value owns. Raises UsageError.

    settings   the fields of settings.Settings that were chosen, of its sampling and its rule, but for its draft
    verb       compare, generate, which runs rounds alone, or sweep, which runs them for every budget and block
    rounds     the keyword arguments of settings.Rounds; None for no rounds
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    verb: str = "compare"
    rounds: Mapping[str, object] | None = None

    def __post_init__(self):
        check_options(self)
        settings = make(Settings, self.settings)
        if self.verb == "generate" and len(settings.budgets) > 1:
            raise UsageError(f"budget: got {', '.join(map(str, settings.budgets))}, expected one number")
        make(Rounds, self.rounds or {})

    def command(self) -> str:
        """Return the command line that runs this job. A trace that it saves is not saved again."""
        chosen = {each.name: getattr(self, each.name) for each in options(Job)}
        chosen = {name: value for name, value in chosen.items() if value != getattr(Job, name)}
        chosen |= {**self.settings, **(self.rounds or {})}
        if self.trace is not None or self.tree is not None:  # such a tree has the size that it has
            chosen.pop("budgets", None)
        every = sorted(offered(self.verb, (*RUN, Stored)), key=lambda each: each.argument)
        words = [each.words(chosen[each.name], self.verb) for each in every if each.name in chosen]
        return shlex.join(["ddtree-check", self.verb, *itertools.chain(*words)])


def job_of(verb: str, given: Mapping[str, object]) -> Job:
    """Return the job of a command's options by name, as texts or values; None was not chosen. Raises UsageError."""
    known = offered(verb, (*RUN, Stored, Saved))
    settings = dict(DEFAULTS[verb])
    settings |= {each.name: each.read(given[each.name]) for each in known if given.get(each.name) is not None}
    chosen, rounds = (
        {each.name: settings.pop(each.name) for each in options(group) if each.name in settings}
        for group in (Job, Rounds)
    )
    return Job(verb=verb, settings=settings, rounds=rounds or None, **chosen)


def select_prompts(job: Job) -> list[tuple[int, Prompt]]:
    """Return the prompts of a job, each with its place in the file. Needs no model. Raises UsageError."""
    folder = fixtures_dir() / "prompts"
    path = {None: folder / "code.jsonl", HUMANEVAL: folder / "humaneval.jsonl"}.get(job.prompts, job.prompts)
    with usage_errors():
        prompts = list(enumerate(load_prompts(path)))[: job.limit]
    known = {prompt.id for _, prompt in prompts}
    for name in job.only:
        if name not in known:
            raise UsageError(f"only: no prompt {name!r} among {len(prompts)}, first {prompts[0][1].id!r}")
    return [(place, prompt) for place, prompt in prompts if not job.only or prompt.id in job.only]


def case_ids(job: Job) -> dict[str, list[str]]:
    """Return the ids of the cases that each prompt of a job leads to, as `check` names them. Raises UsageError."""
    prompts, shape = select_prompts(job), job.tree if job.tree in PUBLISHED else job.tree and "tree"
    names = make(Settings, job.settings).budgets if shape is None else [shape]
    return {
        prompt.id: [
            f"{prompt.id}/{name}" for name in ([len(recorded) - 1] if isinstance(recorded, DraftTree) else names)
        ]
        for (_, prompt), recorded in zip(prompts, _drafts(job, prompts), strict=True)
    }


def run(job: Job, progress: Callable[[int, int, str], None] | None = None) -> dict:
    """Run a job and return its record. progress(done, total, text) is called before each long step.

    Raises UsageError for bad input, found before the weights are read wherever that is possible, and Unsupported.
    """
    if (job.engine in REPLAYED) != (job.trace is not None):
        got = f"engine {job.engine} and {'no trace' if job.trace is None else job.trace}"
        raise UsageError(f"trace: got {got}, expected --engine trace with the path of a trace, or neither")
    progress = progress or (lambda *_: None)
    if job.trace is not None:
        return _run_trace(job, progress)
    prompts = select_prompts(job)
    with usage_errors():
        tree = load_tree(job.tree) if job.tree and job.tree not in PUBLISHED else None
    drafts = _drafts(job, prompts)
    with quiet_libraries():
        record, tokenizer = _run(job, prompts, tree, drafts, progress)
    return _shown(record, job, tokenizer)


def _drafts(job: Job, prompts: Sequence[tuple[int, Prompt]]) -> list:
    """Return for each prompt its recorded draft, or None. Raises UsageError."""
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


def _run(job: Job, prompts, tree, drafts, progress) -> tuple[dict, object]:
    """Load the model and run it; return the record and the tokenizer, if there is one."""
    from ..engines.registry import load_engine, load_options
    from ..engines.transformers import loading
    from .batch import batch_runs, check_sizes
    from .bits import needs_decoding
    from .check import check
    from .replay import writer_for
    from .rounds import attach, generate, make_record
    from .sweep import sweep

    draft = draft_source(job)
    shape = {"shape": job.tree} if job.tree in PUBLISHED else {}
    sampled = {"controls": SAMPLED} if draft.startswith(DFLASH) else {}
    settings = make(Settings, {**sampled, **job.settings, **shape, "draft": draft.partition(":")[0]})
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
    engine = load_engine(
        job.engine, job.model, vocab_size=settings.vocab_size, weights=job.weights, dtype=job.dtype, device=job.device,
        seed=settings.seed, progress=lambda text: progress(0, len(items), text),
        **load_options(job.engine, args=engine_args(job.engine_args), tp=job.tp, rows=largest),
    )  # fmt: skip
    model = {**engine.provenance, "tokenizer": origin}
    if settings.draft == DFLASH and tree is None:
        items, model["drafter"] = _with_drafter(job, draft, engine, items)
    with few_threads(model):
        if job.save_trace:
            _expect_room(job, engine, items, settings)
        if job.verb == "sweep":
            blocks = job.blocks or (_block(items, settings),)
            return sweep(engine, items, settings, rounds, blocks, model=model, progress=progress), None
        if rounds is not None:
            rounds = generate(engine, items, settings, rounds, journal=job.journal, progress=progress)
        if job.verb == "generate":
            return make_record(engine, rounds, settings, model), tokenizer
        if reason := engine.decodes():
            needs_decoding(reason, {"batch": job.batch, "oracle": job.oracle})
        oracle = engine.exact() if job.oracle else None
        together = batch_runs(engine, items, settings, job.batch, progress=progress) if job.batch else None
        workers = processes(model, environment=engine.describe())
        with writer_for(engine, job.save_trace, settings) if job.save_trace else contextlib.nullcontext() as trace:
            record = check(
                engine, items, settings, oracle=oracle, model=model, progress=progress, trace=trace, workers=workers
            )
    if ":" in job.engine:  # one of the caller's own, which may pass on what the engine that it wraps says of itself
        record["environment"]["engine"] = job.engine
    for name, section in (("rounds", rounds), ("batch", together)):
        if section is not None:
            record = attach(record, name, section)
    return record, tokenizer


def _shown(record: dict, job: Job, tokenizer) -> dict:
    """Return a record with the command that makes it again and, but for a sweep, the texts of its tokens."""
    texts = {} if job.verb == "sweep" else {"tokens": _texts(record, tokenizer)}
    return record | {"command": job.command()} | texts


def engine_args(pairs: Sequence[str]) -> dict[str, object]:
    """Read NAME=VALUE pairs into a mapping; values that are JSON (8, 0.5, true, null) as such, others as text."""
    values: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"engine-arg: got {pair!r}, expected NAME=VALUE such as mamba_ssm_dtype=bfloat16")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def draft_source(job: Job) -> str:
    """Return the draft of a job, the default filled in: the embedded drafter where it fits, else the model's own."""
    if job.draft:
        return job.draft
    embedded = job.model in (None, EMBEDDED) and job.weights == "real"
    return of_class(job.engine, "default_draft") if embedded and "acceptance" not in job.settings else "self"


def _with_drafter(job: Job, draft: str, engine, items: Sequence) -> tuple[list, dict]:
    """Return the items with their DFlash drafter, which the engine reads features for from now on, and its facts."""
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
    """Return the positions of a draft block with the root's: those of the settings, or the drafter's if fewer."""
    return 1 + min([settings.length, *(item.drafter.length for item in items if item.drafter is not None)])


def _tree_rows(item, settings) -> list[int]:
    """Return how many rows, at most, each tree that a prompt will get has, its root included."""
    given = item.tree or item.recorded
    if isinstance(given, DraftTree | tuple):
        return list(map(len, given if isinstance(given, tuple) else (given,)))
    budgets = settings.budgets if settings.shape is None else [len(PUBLISHED[settings.shape].split())]
    return [1 + budget for budget in budgets]


def _expect_room(job: Job, engine, items: Sequence, settings) -> None:
    """Raise UsageError for a trace that would take more than `max_bytes`, before any of it is written."""
    from .passes import trace_bytes

    needed = trace_bytes(engine, items, settings, [_tree_rows(item, settings) for item in items])
    if needed > job.max_bytes:
        raise UsageError(
            f"save-trace: {needed:,} bytes would be written for {counted(len(items), 'prompt')}, expected at most "
            f"{job.max_bytes:,}; take fewer prompts, smaller budgets or a larger --max-bytes"
        )


def _run_trace(job: Job, progress) -> dict:
    """Judge recorded passes; a model is loaded only if one is named."""
    from ..trace.read import read_trace

    free = {"budgets", "seed", "require", *(each.name for each in options(Rule))}
    live = ("tree", "draft", "oracle", "batch", "rounds", "journal", "save_trace", "max_bytes")
    useless = [name for name in job.settings if name not in free]
    useless += [name for name in live if getattr(job, name) != getattr(Job, name)]
    if useless or job.verb != "compare":
        what = spoken((useless or [job.verb])[0])
        raise UsageError(f"{what}: says nothing of passes that were recorded; leave it out")
    trace = read_trace(job.trace)
    with quiet_libraries():
        from ..engines.recorded import TraceEngine
        from ..engines.registry import load_engine
        from ..engines.transformers import loading
        from .replay import judge_trace

        steps = _select_steps(job, trace)
        settings = make(Settings, job.settings)
        live = tokenizer = None
        if job.model is not None:
            wanted = loading.parse_dtype(job.dtype, None)
            if wanted is not None and str(wanted).removeprefix("torch.") != trace.header.dtype:
                raise UsageError(
                    f"dtype: got {job.dtype}, the trace was computed in {trace.header.dtype}; a floor needs the same"
                )
            progress(0, len(steps), f"loading {job.model}")
            live = load_engine(
                "transformers", job.model, weights=job.weights, dtype=trace.header.dtype, device=job.device,
                seed=settings.seed,
            )  # fmt: skip
            tokenizer, _ = _tokenizer(job, loading.resolve(job.model), False)
        prompts = None if job.prompts is None else _wanted_prompts(job, tokenizer)
        with few_threads({} if live is None else live.provenance):
            record = judge_trace(
                TraceEngine(trace), settings, reference=live, prompts=prompts, steps=steps, progress=progress
            )
    return _shown(record, job, tokenizer)


def _select_steps(job: Job, trace) -> tuple:
    """Return the steps of a trace that --only (a step's or request's id) and --limit leave. Raises UsageError."""
    known = {name for step in trace.steps for name in (step.id, step.request)}
    for name in job.only:
        if name not in known:
            raise UsageError(f"only: no step or request {name!r} in {job.trace}, first {trace.steps[0].id!r}")
    chosen = [step for step in trace.steps if not job.only or {step.id, step.request} & set(job.only)]
    return tuple(chosen[: job.limit])


def _wanted_prompts(job: Job, tokenizer) -> dict[str, tuple[int, ...]]:
    """Return token ids by prompt, that the requests of a trace should have had. Raises UsageError."""
    wanted = {}
    for _, prompt in select_prompts(replace(job, limit=None, only=())):
        if prompt.token_ids is None and tokenizer is None:
            raise UsageError("prompts: text needs a tokenizer; give --model, or a .jsonl file of token_ids")
        wanted[prompt.id] = prompt.token_ids or tuple(tokenizer(prompt.text)["input_ids"])
    return wanted


@contextlib.contextmanager
def few_threads(model: Mapping[str, object]) -> Iterator[None]:
    """Take one thread for a small model, unless the caller chose: threads wait through its many small steps."""
    import torch

    before = torch.get_num_threads()
    if _is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processes(model: Mapping[str, object], environment: Mapping[str, object]) -> int:
    """Return how many processes share a run's prompts: a small model on the CPU gets a core for each, unless the caller
    chose threads."""
    forks = hasattr(os, "sched_getaffinity")  # Linux, where a process can be forked and cores can be counted
    spread = forks and _is_small(model) and environment.get("device") == "cpu"
    return min(4, len(os.sched_getaffinity(0))) if spread else 1


def _is_small(model: Mapping[str, object]) -> bool:
    """Return whether threads cost more than they bring; False if the caller chose them."""
    return "OMP_NUM_THREADS" not in os.environ and int(model.get("parameters", SMALL)) < SMALL


def _stop_tokens(config, tokenizer) -> frozenset[int]:
    """Return the token ids that end a text, by the model's config and by its tokenizer."""
    ids = getattr(config, "eos_token_id", None)
    ids = [*(ids if isinstance(ids, list) else [ids]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(ids) - {None}


def _tokenizer(job: Job, source: str, needed: bool):
    """Return a tokenizer and whose it is. One that only makes views readable is not fetched from anywhere."""
    from ..engines.transformers import loading

    alias = ALIASES.get((job.model or "").lower())
    built_in = job.weights == "random" and alias is not None and alias.shape  # nothing of it is asked for
    if (needed and not built_in) or Path(source).is_dir():
        _check_tokenizer(source)
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


def _check_tokenizer(source: str) -> None:
    """Raise UsageError, one line, for a tokenizer that brings its process down: it is loaded in another one first."""
    if Path(source).is_relative_to(fixtures_dir()):
        return  # ours
    try:
        fault = next(apart(_tokenizer_fault, [source], 1))
    except UsageError:
        fault = "it ends its process"
    if fault:
        raise UsageError(
            f"tokenizer: {source} cannot be used ({fault}); expected a whole tokenizer.json; download it again"
        )


def _tokenizer_fault(source: str) -> str | None:
    """Return what a tokenizer raises that is no Exception, such as a panic of its library, or None."""
    from ..engines.transformers import loading

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic tells its own story, on many lines
    try:
        if tokenizer := loading.load_tokenizer(source):
            with contextlib.suppress(Exception):
                tokenizer("a b\n")
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


def _texts(record: dict, tokenizer) -> dict[str, str]:
    """Return texts by token id (a string, as JSON keys are) of every token that a view of the record may show."""
    if tokenizer is None:
        return {}
    ids = set()
    for prompt in record.get("rounds", {}).get("prompts", ()):
        for mode in prompt["modes"].values():
            ids.update(token for each in mode["rounds"] for token in each["tree"]["tokens"])
    for case in record.get("cases", ()):
        ids.update(walk["bonus"] for walk in case.get("acceptance", {}).values())  # none of exact checks alone
        for node in case["nodes"]:
            ids.add(node["token"])
            ids.update(value["argmax"] for value in node.values() if isinstance(value, dict) and "argmax" in value)
    ids.discard(None)  # the argmax of a mode that was not run
    return {str(token): tokenizer.decode([token]) for token in sorted(ids) if token < len(tokenizer)}


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep loading bars, retries and advice of the libraries out of our output; afterwards all is as it was.

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
