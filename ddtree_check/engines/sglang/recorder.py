"""Records the TARGET_VERIFY steps of a running SGLang server as a trace, and can put a script's trees in their place.

An SGLang plugin (entry-point group `sglang.srt.plugins`). It does nothing unless DDTREE_CHECK_RECORD names a folder or
a TOML file of `Options`. It never changes what the server computes, copies without waiting for the GPU, writes in a
thread of its own, drops what it cannot keep up with, and on any error of its own stops, says so once, and lets the
server go on. Imports nothing of SGLang or torch until a step is there to be recorded. See docs/sglang-server.md.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import UsageError, usage_errors
from ...base.files import parse_toml, read_text
from ...base.options import check_options, group, make, option
from ...trace.model import DTYPES
from ...trace.write import TraceWriter
from ...tree.accept import descend
from ...tree.draft_tree import DraftTree
from ..capacity import needs
from . import pools
from .scripted import Script, drafts, read_script

VARIABLE = "DDTREE_CHECK_RECORD"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"  # 0.5.14 and later; EAGLE and NGRAM
RUN = "sglang.srt.managers.scheduler.Scheduler.run_batch"
DRAFT = "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens"
LINKS = ("next_token", "next_sibling", "parent_token")
FLAGS = (  # of ServerArgs, all that can change a number
    "attention_backend", "linear_attn_backend", "sampling_backend", "mamba_ssm_dtype", "kv_cache_dtype", "page_size",
    "tp_size", "disable_cuda_graph", "disable_radix_cache", "disable_overlap_schedule", "chunked_prefill_size",
    "max_running_requests", "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_match_type", "speculative_ngram_max_trie_depth", "enable_fp32_lm_head",
    "mamba_radix_cache_strategy", "uses_mamba_radix_cache", "mamba_track_interval", "speculative_draft_model_path",
)  # fmt: skip
ABOVE_0 = {"holds": lambda value: value > 0, "expects": "more than 0"}
EVERY = 1.0  # seconds between two looks at the file of the options
PATIENCE = 5.0  # seconds until a request's text must have caught up with a step that was run ahead of it

log = logging.getLogger(__name__)


# --- options ----------------------------------------------------------------------------------------------------------


@group("Recorder")
class Options:
    """What to record, and where; None for folder records nothing, None for trees scripts none. Raises UsageError."""

    folder: str | None = option(None, "Where traces go, one folder a process.")
    rate: float = option(
        0.05, "Share of (request, step) pairs that are recorded, drawn by seed.",
        holds=lambda value: 0 <= value <= 1, expects="a share from 0 to 1",
    )  # fmt: skip
    top: int = option(
        64, "The so many largest logits of each row; 0 keeps whole rows.",
        holds=lambda value: value == 0 or value >= 2, expects="0 (whole rows) or at least 2",
    )  # fmt: skip
    max_mb: float = option(1024.0, "Bound on each folder; recording ends there.", **ABOVE_0)
    pending_mb: float = option(256.0, "Bound on what waits to be written; steps beyond it are dropped.", **ABOVE_0)
    ranks: str = option("first", "The tensor-parallel ranks that record.", choices=("first", "all"))
    trees: str | None = option(None, "A script of draft trees (`scripted.Script`), for NGRAM.")
    seed: int = option(0, "Seed of what is recorded.")
    states: bool = option(False, "Also what SGLang's commit left in each recorded request's state slot.")

    def __post_init__(self):
        check_options(self)
        if not self.folder and not self.trees:
            raise UsageError("neither folder nor trees, expected a folder to record into, a script of trees, or both")


def read_options(value: str) -> Options:
    """Return the options that DDTREE_CHECK_RECORD names: a folder, or a TOML file (by its name). Raises UsageError."""
    if not value.endswith(".toml"):
        return Options(folder=value)
    with usage_errors():
        data = parse_toml(read_text(value), value)
    try:
        return make(Options, data)
    except UsageError as error:
        raise UsageError(f"{value}: {error}") from None


# --- the plugin -------------------------------------------------------------------------------------------------------


def sglang_plugin() -> None:
    """Register the hooks in a process of SGLang, which calls this in each, if the environment asks for them."""
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return
    try:
        options = read_options(value)
        script = read_script(options.trees) if options.trees else None
    except UsageError as error:
        log.warning("ddtree-check: %s: %s; nothing is recorded, serving goes on", VARIABLE, error)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def register(target: str, hook: Callable, kind: str) -> bool:
        """Hook a place of SGLang's, or say that this version has none."""
        owner, _, name = target.rpartition(".")
        module, _, cls = owner.rpartition(".") if owner.rpartition(".")[2][:1].isupper() else (owner, "", "")
        holder = importlib.import_module(module)
        if not hasattr(getattr(holder, cls) if cls else holder, name):
            return False
        HookRegistry.register(target, hook, getattr(HookType, kind))
        return True

    install(options, script, register, value if value.endswith(".toml") else None)


def install(
    options: Options, script: Script | None, register: Callable[[str, Callable, str], bool], file: str | None = None
) -> None:
    """Register what the options ask for; `register` (target, hook, kind) answers False for a place that is missing."""
    if options.folder:
        recorder = Recorder(options, file)
        for target, hook, kind in ((RUN, recorder.run, "AROUND"), (FORWARD, recorder.forwarded, "AFTER")):
            if not register(target, hook, kind):
                log.warning("ddtree-check: this SGLang has no %s; nothing is recorded, serving goes on", target)
                return
        register(SAMPLE, recorder.sampled, "AFTER")
    if script is not None and not register(DRAFT, Drafter(script).drafted, "AFTER"):
        log.warning("ddtree-check: this SGLang has no %s; no tree is scripted, serving goes on", DRAFT)


class Guarded:
    """Work of ours inside the server: an error ends it, is said once and goes no further."""

    what = "work"

    def __init__(self):
        self.off: str | None = None
        self._lock = threading.Lock()

    def _guard(self, work: Callable, *args) -> None:
        if self.off is None:
            try:
                work(*args)
            except Exception as error:
                self.stop(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def stop(self, why: str) -> None:
        with self._lock:
            if self.off is not None:
                return
            self.off = why
        log.warning("ddtree-check: %s has stopped (%s); serving goes on", self.what, why)


class Drafter(Guarded):
    """Puts a script's trees in place of NGRAM's."""

    what = "scripting trees"

    def __init__(self, script: Script):
        super().__init__()
        self.script, self.turns, self.contexts = script, Counter(), Counter()

    def drafted(self, result, worker, batch, *_, **__) -> None:
        self._guard(self._drafted, result, worker, batch)

    def _drafted(self, result, worker, batch) -> None:
        tokens, mask = result
        rows, vocab = worker.draft_token_num, worker.model_runner.model_config.vocab_size
        # With overlap the newest tokens stand beside the requests, as the worker itself has it.
        ahead = getattr(worker, "enable_overlap", False) and not batch.grammar_needs_sync()
        trees: list[DraftTree | None] = []
        for place, req in enumerate(batch.reqs):
            context = [*req.origin_input_ids, *req.output_ids]
            if ahead:
                at = place * rows
                context += worker.prev_token_ids[at : at + worker.prev_accept_lens[place]]
            size, key = len(req.origin_input_ids), hash(tuple(context))
            tree = self.script.tree(context, size, self.turns[req.rid], vocab, self.contexts[key])
            self.turns[req.rid] += tree is not None
            if self.script.pairs:
                self.contexts[key] += 1
            trees.append(tree)
        if len(self.turns) > 100_000:
            self.turns = Counter({req.rid: self.turns[req.rid] for req in batch.reqs})
        if len(self.contexts) > 100_000:
            self.contexts.clear()
        drafts(trees, tokens, mask, rows)


# --- the recorder -----------------------------------------------------------------------------------------------------


@dataclass
class Taken:
    """One verify of a batch, on its way to the disk. host: small arrays of the whole batch, in copies that may not have
    arrived yet; rows: the logits of each chosen request (whole, or ids, values and log-sum-exp)."""

    step: int
    reqs: list
    chosen: list[int]
    width: int
    source: dict  # of every chosen request alike
    about: dict
    header: dict
    host: dict[str, Any]
    rows: dict[int, tuple]
    runner: Any = None
    slots: dict[int, Any] = field(default_factory=dict)  # the state slot of each chosen request, [1] on its device
    states: dict[int, list] = field(default_factory=dict)  # what was in it after the commit
    ready: Any = None  # an event of the GPU
    result: Any = None
    nbytes: int = 0
    since: float = field(default_factory=time.monotonic)


class Recorder(Guarded):
    """Records verifies; one for each process of the server. `counts` says what became of what it saw."""

    what = "recording"

    def __init__(self, options: Options, file: str | None = None):
        super().__init__()
        self._file = file
        self._changed, self._look = _changed(file), time.monotonic() + EVERY
        self.options, self.dropped = options, Counter()
        self.counts, self._spent = Counter(steps=0, verifies=0, taken=0, written=0), 0.0
        self._capacity: list[dict] = []
        self._random = random.Random(options.seed)
        self._batch, self._taken, self._pending = None, None, 0
        self._rounds: dict[str, int] = {}
        self._queue: queue.SimpleQueue[Taken | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: list[Taken] = []
        self._writer: TraceWriter | None = None
        self._path: Path | None = None

    # In the scheduler's thread

    def run(self, original: Callable, scheduler, batch, *args, **named):
        """Run one batch, know its requests, and hand over what was taken of it."""
        self._batch, self._taken = batch, None
        if self._file is not None and time.monotonic() > self._look:
            self._timed(self._reread)
        try:
            result = original(scheduler, batch, *args, **named)
        finally:
            self._batch = None
        if self._taken is not None:
            self._timed(self._close, result, scheduler)
        return result

    def _reread(self) -> None:
        """Take a new rate from the file of the options, if it was edited while the server runs."""
        self._look = time.monotonic() + EVERY
        if (changed := _changed(self._file)) == self._changed:
            return
        self._changed = changed
        try:
            rate = read_options(self._file).rate
        except UsageError as error:  # half an edit, maybe
            log.warning("ddtree-check: %s; the rate stays %g", error, self.options.rate)
            return
        self.options = replace(self.options, rate=rate)
        log.info("ddtree-check: the rate is %g now", rate)

    def forwarded(self, result, worker, batch=None, forward_batch=None, *_, **__) -> None:
        if self.off is None and self._batch is not None:
            self._timed(self._take, result, worker, batch if batch is not None else forward_batch)

    def sampled(self, result, *_, **__) -> None:
        if self._taken is not None:
            self._timed(self._accept, result)

    def _timed(self, work: Callable, *args) -> None:
        begun = time.perf_counter()
        self._guard(work, *args)
        self._spent += time.perf_counter() - begun

    def _take(self, result, worker, batch) -> None:
        if not batch.forward_mode.is_target_verify() or not self._batch.reqs:
            return
        runner, spec = worker.model_runner, batch.spec_info
        if getattr(worker, "is_draft_worker", False):
            return
        rank = int(getattr(getattr(worker, "ps", worker), "tp_rank", 0) or 0)
        if rank and self.options.ranks == "first":
            self.off = "not the first rank"
            return
        self.counts["steps"] += 1
        reqs = list(self._batch.reqs)
        self.counts["verifies"] += len(reqs)
        chosen = [place for place in range(len(reqs)) if self._random.random() < self.options.rate]
        rounds = {req.rid: self._rounds.get(req.rid, -1) + 1 for req in reqs}
        if len(self._rounds) > 10_000:
            self._rounds.clear()
        self._rounds.update(rounds)
        if not chosen:
            return
        logits, rows = result.logits_output.next_token_logits, spec.draft_token_num
        chain = getattr(spec, "retrieve_next_token", None) is None  # the rows of a block, as DFLASH verifies it
        if chain and getattr(spec, "topk", None) != 1:
            self._drop("no tree", len(chosen))
            return
        if logits.shape[0] != len(reqs) * rows:
            self._drop(f"{logits.shape[0]} rows of logits for {len(reqs)} requests of {rows}", len(chosen))
            return
        states = pools.slot_bytes(runner) if self.options.states else 0
        cost = len(chosen) * (rows * (12 * self.options.top or logits.shape[1] * 4) + states)
        if self._pending + cost > self.options.pending_mb * 2**20:
            self._drop("the writer does not keep up", len(chosen))
            return
        backend = _recurrent(getattr(runner, "attn_backend", None))
        meta = getattr(backend, "forward_metadata", None)
        received = {name: getattr(meta, f"retrieve_{name}", None) for name in LINKS}
        try:
            masks, unread = _masks(spec, batch, len(reqs), rows, chosen), None
        except Exception as error:  # a second witness alone: a step without it can be judged
            masks, unread = {}, f"{type(error).__name__}: {error}"
        host = {
            "tokens": spec.draft_token,
            "positions": spec.positions,
            "seq_lens": batch.seq_lens,
            "next_token": None if chain else spec.retrieve_next_token,
            "next_sibling": None if chain else spec.retrieve_next_sibling,
            "slots": getattr(meta, "mamba_cache_indices", None),
            **{f"received_{name}": tensor for name, tensor in received.items()},
            **masks,
        }
        slots = {place: slot for place in chosen if (slot := _own_slot(runner, reqs[place])) is not None}
        host |= {f"slot{place}": slot for place, slot in slots.items()}
        taken = Taken(
            self.counts["steps"] - 1,
            reqs,
            chosen,
            rows,
            source={
                "draft": "server",
                "algorithm": str(getattr(getattr(runner, "spec_algorithm", None), "name", "unknown")),
                "input": type(spec).__name__,
                "batch": [str(req.rid) for req in reqs],
                "graph": bool(getattr(result, "can_run_cuda_graph", False)),
                "recurrent": None if backend is None else type(backend).__name__,
                "gate": getattr(backend, "topk", None),
                "mask_unread": unread,
                "links": [name for name, tensor in received.items() if tensor is not None],
            },
            about={
                "rounds": [rounds[req.rid] for req in reqs],
                "metadata": meta is not None,  # without it nothing is known of what the recurrent layers got
                "lengths": batch.seq_lens_cpu.tolist() if any(x.dim() == 2 for x in masks.values()) else None,
                "vocab": int(logits.shape[1]),
                # A request's tokens that came from the prefix cache: its prefill began behind them.
                "cached": [int(getattr(req, "cached_tokens", 0) or 0) for req in reqs],
                "rank": rank,
            },
            header=_header(worker, logits.shape[1]) if self._writer is None else {},
            host={name: _copy(tensor) for name, tensor in host.items() if tensor is not None},
            rows={place: self._logits(logits[place * rows : (place + 1) * rows], runner) for place in chosen},
            runner=runner,
            slots=slots if states else {},
            nbytes=cost,
        )
        self._capacity = self._capacity or _capacity(runner)
        taken.ready = _event(logits)
        with self._lock:
            self._pending += cost
        self.counts["taken"] += len(chosen)
        self._taken = taken

    def _logits(self, rows, runner) -> tuple:
        if not self.options.top:
            # SGLang widens what it computed in the model's dtype: narrowing it again takes nothing away.
            wide = getattr(getattr(runner, "server_args", None), "enable_fp32_lm_head", False)
            return (_copy(rows if wide else rows.to(runner.dtype)),)
        top = rows.float().topk(min(self.options.top, rows.shape[1]), dim=-1)
        return _copy(top.indices), _copy(top.values), _copy(rows.float().logsumexp(-1))

    def _accept(self, result) -> None:
        predict, lengths, index = result
        self._taken.host |= {"predict": _copy(predict), "lengths": _copy(lengths), "index": _copy(index)}
        self._taken.ready = _event(index)

    def _close(self, result, scheduler) -> None:
        taken, self._taken = self._taken, None
        if taken.slots:
            # Overlap runs a batch on a stream of its own; behind it the commit is done and the next one not begun.
            stream = getattr(scheduler, "forward_stream_ctx", None) if getattr(scheduler, "enable_overlap", 0) else None
            with stream or contextlib.nullcontext():
                for place, slot in taken.slots.items():
                    taken.states[place] = [_copy(tensor) for tensor in pools.slot_tensors(taken.runner, slot)]
                taken.ready = _event(taken.slots[place])
        taken.result = result if "index" not in taken.host else None
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="ddtree-check", daemon=True)
            self._thread.start()
        self._queue.put(taken)

    def _drop(self, why: str, count: int = 1) -> None:
        with self._lock:
            self.dropped[why] += count

    # In the writer's thread

    def close(self, timeout: float = 30.0) -> None:
        """Wait until what was taken is written; recording ends. A server that is killed loses what still waits."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)
        self.off = self.off or "closed"

    def _write_all(self) -> None:
        last, told, due = False, None, 0.0
        while not last and self.off is None:
            try:
                taken = self._queue.get(timeout=0.05 if self._waiting else 1.0)
                last = taken is None
                self._waiting += [] if last else [taken]
            except queue.Empty:
                pass
            self._guard(self._write_ready, last)
            now = time.monotonic()
            quiet = last or self._queue.empty() or now > due  # a writer that lags says so, once a second
            if self._path is not None and quiet and told != (state := self._summary()):
                told, due = state, now + EVERY
                self._guard(_replace, self._path / "recorder.json", json.dumps(state, indent=1))
        self._waiting.clear()
        with contextlib.suppress(queue.Empty):  # what a stop left behind holds memory
            while True:
                self._queue.get_nowait()
        if self._path is not None:
            with contextlib.suppress(OSError):
                _replace(self._path / "recorder.json", json.dumps(self._summary(), indent=1))

    def _summary(self) -> dict:
        with self._lock:
            told = {"dropped": dict(self.dropped), "stopped": self.off, "capacity": self._capacity}
            return {**self.counts, "server_ms": round(1000 * self._spent, 1), **told}

    def _write_ready(self, last: bool) -> None:
        for taken in self._waiting:
            taken.chosen = self._write(taken, last or time.monotonic() - taken.since > PATIENCE)
            if not taken.chosen:
                with self._lock:
                    self._pending -= taken.nbytes
        self._waiting = [taken for taken in self._waiting if taken.chosen]

    def _write(self, taken: Taken, late: bool) -> list[int]:
        """Write the chosen requests whose text is known by now; return the others."""
        for event in (taken.ready, getattr(taken.result, "copy_done", None)):
            if event is not None:
                event.synchronize()
        taken.ready = None
        if taken.result is not None:
            for name, given in (("chosen_tokens", "next_token_ids"), ("lengths", "accept_lens")):
                array = getattr(taken.result, given, None)
                if hasattr(array, "cpu"):
                    taken.host[name] = array.cpu()
            taken.result = None
        host = taken.host
        left = []
        for place in taken.chosen:
            req = taken.reqs[place]
            length = int(host["seq_lens"][place])
            if len(req.origin_input_ids) + len(req.output_ids) <= length:
                # Overlap runs a step before the one before it is known, and one more after a request's last.
                if late or req.finished():
                    self._drop("run past the end of its request")
                else:
                    left.append(place)
                continue
            self._write_step(taken, place, [*req.origin_input_ids, *req.output_ids], length)
        return left

    def _write_step(self, taken: Taken, place: int, text: Sequence[int], length: int) -> None:
        rows = {name: _row(array, place, taken.width) for name, array in taken.host.items() if name in ROWS}
        tokens, chain = rows["tokens"].tolist(), "next_token" not in rows
        if chain:
            rows["next_token"], rows["next_sibling"] = np.arange(1, taken.width + 1), np.full(taken.width, -1)
            rows["next_token"][-1] = -1
        try:
            tree, nodes = tree_of(tokens, rows["next_token"].tolist(), rows["next_sibling"].tolist())
        except ValueError as error:
            self._drop("links that make no tree")
            log.warning("ddtree-check: request %s, step %d: %s", taken.reqs[place].rid, taken.step, error)
            return
        vocab = taken.about["vocab"]
        if not all(0 <= token < vocab for token in (*text[: length + 1], *tree.tokens)):  # images stand there as hashes
            self._drop("a text of other ids than the vocabulary's")
            return
        path, bonus = _accepted(taken.host, place, taken.width, tree, nodes)
        about = taken.about
        source = taken.source | {
            "place": place,
            "step": taken.step,
            "cached_tokens": about["cached"][place],
            "root_in_text": tokens[0] == text[length],
        }
        if "slots" in taken.host:
            source["slot"] = int(taken.host["slots"][place])
        if f"slot{place}" in taken.host:
            source["own_slot"] = int(taken.host[f"slot{place}"][0])
        lists = {
            "positions": rows["positions"].tolist(),
            **{name: rows[f"received_{name}"].tolist() for name in LINKS[:2] if f"received_{name}" in rows},
        }
        if about["metadata"]:
            lists["parents"] = _received(rows, taken.width)
        mask, cut = taken.host.get(f"mask{place}"), about["lengths"]
        if cut is not None and cut[: len(taken.reqs)] != taken.host["seq_lens"][: len(taken.reqs)].tolist():
            mask = None  # cut by lengths that the host had guessed, as overlap may have it: other rows than these
        if mask is not None:
            mask = np.asarray(mask).reshape(taken.width, -1)[:, -taken.width :].astype(bool)
            source["mask_parents"] = parents_of_mask(mask)
        request, number, writer = str(taken.reqs[place].rid), about["rounds"][place], self._open(taken)
        name = f"{request}/{number}/{taken.step}"
        step = writer.step(name, text[:length], tree.tokens, tree.parents, request=request, round=number, source=source)
        logits, mode = taken.rows[place], "linear" if chain else "tree_forked"
        rows = {"logits": logits[0]} if len(logits) == 1 else {"top": tuple(map(np.asarray, logits))}
        step.add(mode, **rows, nodes=nodes, width=taken.width, mask=mask, **lists)
        if path is not None:
            step.accept(path, bonus)
        if path is not None and place in taken.states:
            layers = taken.runner.req_to_token_pool.mamba_map
            channels = pools.channels(taken.states.pop(place), layers, taken.source["recurrent"])
            step.commit(mode, path, {(layer, name): x for layer, rows in channels.items() for name, x in rows.items()})
        if step.write():
            self.counts["written"] += 1
        else:
            self._drop("the folder is full")
            self.stop(f"{writer.path} has reached {self.options.max_mb:g} MB")

    def _open(self, taken: Taken) -> TraceWriter:
        if self._writer is None:
            folder = Path(self.options.folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = folder / f"rank{taken.about['rank']}-{os.getpid()}"
            bound = int(self.options.max_mb * 2**20)
            self._writer = TraceWriter(self._path, max_bytes=bound, private=True, **taken.header)
            text = "the tokens of users' requests are recorded, %g of all steps, in %s, which only its owner can read"
            log.warning(f"ddtree-check: {text}", self.options.rate, self._path)
        return self._writer


# --- what SGLang's objects say ----------------------------------------------------------------------------------------

ROWS = ("tokens", "positions", "next_token", "next_sibling", *(f"received_{name}" for name in LINKS))


def tree_of(
    tokens: Sequence[int], next_token: Sequence[int], next_sibling: Sequence[int]
) -> tuple[DraftTree, list[int]]:
    """Return the tree that the walk over these links sees, and the node of each row; -1 for one it never reaches.

    Never reached: a row without a link to it, and a later sibling with the token of an earlier one, as padding has it.
    Raises ValueError if the links make no tree.
    """
    rows = len(tokens)
    parents: list[int | None] = [-1] + [None] * (rows - 1)
    for row in range(rows):
        child, steps = next_token[row], 0
        while child != -1:
            if not 0 < child < rows or child <= row or parents[child] is not None or steps > rows:
                raise ValueError(f"row {row} links to row {child}, expected a later row of {rows} with no other parent")
            parents[child], child, steps = row, next_sibling[child], steps + 1
    nodes, kept, taken = [0], [0], set()
    for row in range(1, rows):
        parent = parents[row]
        above = -1 if parent is None else nodes[parent]
        if above < 0 or (above, tokens[row]) in taken:
            nodes.append(-1)
            continue
        taken.add((above, tokens[row]))
        nodes.append(len(kept))
        kept.append(row)
    return DraftTree(tuple(tokens[row] for row in kept), (-1, *(nodes[parents[row]] for row in kept[1:]))), nodes


def parents_of_mask(mask: np.ndarray) -> list[int]:
    """Return the last row before each that it may see, by an ancestor mask [n, n]; -1 if there is none."""
    before = np.tril(mask, -1)
    return [int(row.nonzero()[0][-1]) if row.any() else -1 for row in before]


def _received(rows: Mapping, width: int) -> list[int]:
    """Return the parents that the recurrent layers were told; without links their kernels go from row to row."""
    told = rows.get("received_parent_token", np.arange(-1, width - 1))
    return [-1, *told[1:].tolist()]  # the root's slot is filled, and means nothing


def _accepted(host: Mapping, place: int, width: int, tree: DraftTree, nodes: Sequence[int]):
    """Return the accepted nodes from the root on and the token after them, or None twice if they are not said."""
    if "index" in host:
        index = [int(row) for row in np.asarray(host["index"][place]) if row >= 0]
        local = [row - place * width for row in index]
        if not local or any(not 0 <= row < width or nodes[row] < 0 for row in local):
            return None, None
        return [nodes[row] for row in local], int(host["predict"][index[-1]])
    if "chosen_tokens" not in host or "lengths" not in host:
        return None, None
    length = int(host["lengths"][place])
    tokens = np.asarray(host["chosen_tokens"]).reshape(len(host["lengths"]), -1)[place][:length].tolist()
    drafted = iter(tokens[:-1])
    path = descend(tree, lambda _: next(drafted, None)).path
    return (path, tokens[-1]) if len(path) == len(tokens) else (None, None)


def _row(array, place: int, width: int) -> np.ndarray:
    """Return a request's part of an array of the batch, [b, width] or [b * width]; graphs pad the batch."""
    return np.asarray(array).reshape(-1, width)[place].astype(np.int64)


def _changed(file: str | None) -> int | None:
    try:
        return None if file is None else os.stat(file).st_mtime_ns
    except OSError:
        return None


def _recurrent(backend):
    """Return the backend of the recurrent layers, inside whatever wraps it; None if the model has none."""
    for _ in range(4):
        linear = getattr(backend, "linear_attn_backend", None)
        if linear is not None:
            return linear
        backend = next(
            (inner for name in ("primary", "decode_backend") if (inner := getattr(backend, name, None)) is not None),
            None,
        )
    return None


def _masks(spec, batch, requests: int, rows: int, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the mask among the drafts of each chosen request, as far as its form is known; views, not copies."""
    mask, lengths = getattr(spec, "custom_mask", None), getattr(batch, "seq_lens_cpu", None)
    if mask is None or mask.dim() != 1 or "bool" not in str(mask.dtype):
        return {}
    if mask.numel() == requests * rows * rows:
        return {f"mask{place}": mask.view(requests, -1)[place] for place in chosen}
    if lengths is None:
        return {}
    sizes = [rows * (int(length) + rows) for length in lengths[:requests]]
    if len(sizes) != requests or mask.numel() < sum(sizes):  # graphs append to it
        return {}
    starts = np.cumsum([0, *sizes]).tolist()
    return {f"mask{place}": mask[starts[place] : starts[place + 1]].view(rows, -1)[:, -rows:] for place in chosen}


def _own_slot(runner, req):
    """Return the state slot of a request by the pool's table, a copy [1] on its device; None if there is none.

    What the recurrent layers were given stands in their metadata, and may be another.
    """
    table = getattr(getattr(runner, "req_to_token_pool", None), "req_index_to_mamba_index_mapping", None)
    row = getattr(req, "req_pool_idx", None)
    return None if table is None or row is None else table[int(row) : int(row) + 1].clone()


def _capacity(runner) -> list[dict]:
    """Return needed and reserved by buffer, for as many requests as the server runs, each with a whole draft."""
    args = runner.server_args
    rows, requests = getattr(args, "speculative_num_draft_tokens", None), getattr(args, "max_running_requests", None)
    if not rows or not requests:
        return []
    listed = needs({str(place): int(rows) - 1 for place in range(int(requests))}, pools.reserved(runner))
    return [need.to_json() for need in listed if need.request in (None, "0")]  # all requests alike: one says it


def _header(worker, vocab: int) -> dict:
    import sglang
    import torch

    runner, args = worker.model_runner, worker.model_runner.server_args
    dtype = str(runner.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"the model computes in {dtype}, expected one of {', '.join(DTYPES)}")
    version = getattr(sglang, "__version__", None)
    return {
        "engine": "sglang",
        "engine_version": version,
        "model": str(getattr(args, "served_model_name", None) or getattr(args, "model_path", None) or "unnamed"),
        "dtype": dtype,
        "vocab_size": int(vocab),
        "environment": {
            **{name: _plain(getattr(args, name, None)) for name in FLAGS},
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "sglang": version,
            "model_type": getattr(getattr(runner.model_config, "hf_config", None), "model_type", None),
            **pools.state_dtypes(runner),
            "reserved": pools.reserved(runner),
        },
    }


def _plain(value):
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _copy(tensor):
    """Return a copy in the host's memory that may arrive later: see `_event`."""
    return tensor.detach().to("cpu", non_blocking=True, copy=True)


def _event(tensor):
    """Return when the copies made so far on this stream have arrived; None where there is nothing to wait for."""
    if not tensor.is_cuda:
        return None
    import torch

    return torch.cuda.current_stream().record_event()


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)  # a process with this number may have died in it
    with open(part, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    part.replace(path)
