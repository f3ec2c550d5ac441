"""One rank of SGLang: its model runner and pools, without its scheduler, and the passes that `SGLangEngine` is made of.

Arguments and results are plain data, so that the ranks of a tensor-parallel group can be told the same thing: a text
that a rank holds (its key and value slots, its recurrent state) goes by a number, the same on every rank.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...base.errors import Unsupported, UsageError, one_line
from ..precision import dtype_name, ieee
from . import pools
from .seams import TREES, Seam, place, start_mamba

PLAIN = (  # module, class, fused method, the plain one that it stands for
    ("sglang.srt.layers.layernorm", "GemmaRMSNorm", "forward_cuda", "forward_native"),
    ("sglang.srt.layers.layernorm", "RMSNorm", "forward_cuda", "forward_native"),
    (
        "sglang.srt.models.qwen3_5",
        "Qwen3_5AttentionDecoderLayer",
        "forward_prepare_cuda_fused",
        "forward_prepare_native",
    ),
)
WIDTHS = tuple(1 + 2**power for power in range(3, 13))  # rows of a verify: a kernel is compiled for each number of them


def width_for(rows: int) -> int:
    """Return the number of rows that a pass over `rows` rows is padded to: 9, 17, 33, 65 ..."""
    return next((width for width in WIDTHS if width >= rows), rows)


@dataclass(frozen=True)
class Start:
    """What a rank is started with. `args` are ServerArgs'; seed: draw random weights; port: of the process group."""

    seam: Seam
    args: Mapping[str, Any]
    dtype: str
    gpu: int
    environment: Mapping[str, str]
    seed: int | None = None
    port: int | None = None


class Slots:
    """Key and value slots, given back to SGLang's allocator once nothing refers to them."""

    def __init__(self, allocator, count: int):
        self.index = allocator.alloc(count)
        if self.index is None:
            raise UsageError(
                f"memory: SGLang reserved {allocator.size} key and value slots, {count} more are needed and "
                f"{allocator.available_size()} are free; give --engine-arg max_total_tokens=N, or a shorter prompt"
            )
        self._free = allocator.free

    def __del__(self):
        if getattr(self, "index", None) is not None and getattr(self, "_free", None) is not None:
            with contextlib.suppress(Exception):  # the interpreter may be on its way out
                self._free(self.index)


@dataclass(frozen=True, eq=False)
class Text:
    """Committed tokens: where their keys and values lie, int64 [length], and the recurrent state after them."""

    index: torch.Tensor
    held: tuple[Slots, ...]
    state: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Pass:
    """A verify that was run: its text, its rows (padded) and what a commit needs to find or to run it again."""

    text: Text
    slots: Slots
    inputs: tuple


@dataclass(eq=False)
class Runner:
    """Starts SGLang in this process, with one request. Raises UsageError or Unsupported, in one line, if it cannot."""

    start: Start
    rank: int = 0
    kept: dict[int, Text | Pass] = field(default_factory=dict)

    def __post_init__(self):
        os.environ.update(self.start.environment)
        self._next, self._latest = 0, None
        with _reasons():
            self._load()

    def _load(self) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.dtype = getattr(torch, self.start.dtype)
        torch.cuda.set_device(self.start.gpu)
        self.device = torch.device("cuda", self.start.gpu)
        self.args = ServerArgs(**self.start.args)
        config = ModelConfig.from_server_args(self.args)
        if self.dtype == torch.float32:
            _plain_layers()
        port = self.start.port or PortArgs.init_new(self.args).nccl_port
        with ieee():
            self.model_runner = ModelRunner(
                model_config=config,
                mem_fraction_static=self.args.mem_fraction_static,
                gpu_id=self.start.gpu,
                nccl_port=port,
                server_args=self.args,
                **place(self.start.seam, self.args, self.rank, self.start.gpu, port, config),
            )
            if self.start.seed is not None:  # before anything that a graph could have captured
                randomize(self.model_runner.model, self.start.seed)
            start_mamba(self.args)
            for step in self.start.seam.start:
                getattr(self.model_runner, step)()
        self.rows = int(self.args.speculative_num_draft_tokens)
        self.mrope = bool(getattr(config, "model_is_mrope", False))
        self.requests = self.model_runner.req_to_token_pool
        self.allocator = self.model_runner.token_to_kv_pool_allocator
        self.backend = self.model_runner.attn_backend
        self.recurrent = getattr(self.backend, "linear_attn_backend", None)
        self.topk = self.recurrent.topk if self.recurrent is not None else 0
        self.pool = getattr(self.requests, "mamba_pool", None)
        request = SimpleNamespace(
            req_pool_idx=None, mamba_pool_idx=None, inflight_middle_chunks=0, kv_committed_len=0,
            mamba_needs_clear=False, mamba_ping_pong_track_buffer=None, is_dllm=lambda: False, is_chunked=0,
        )  # fmt: skip
        self.row = int(self.requests.alloc([request])[0])
        if self.pool is not None:
            self.slot = int(self.requests.req_index_to_mamba_index_mapping[self.row])
            self._blank = tuple(torch.zeros_like(state) for state in self._save())

    # What was started

    def facts(self) -> dict[str, Any]:
        """Return what can change a number and is known once SGLang is up."""
        kind = type(self.recurrent).__name__ if self.recurrent is not None else None
        facts = {
            "attention": f"sglang {type(getattr(self.backend, 'full_attn_backend', self.backend)).__name__}",
            "recurrent_functions": {} if kind is None else {kind: TREES.get(kind, "not known")},
            "topk": self.topk,
            "fused": self.dtype != torch.float32,
            "graphs": pools.graph_rows(self.model_runner),
            "reserved": pools.reserved(self.model_runner),
            "state_dtype": None,
            "conv_dtype": None,
        } | pools.state_dtypes(self.model_runner)
        if self.pool is not None:
            dispatcher = getattr(self.recurrent, "kernel_dispatcher", None)
            for role in ("decode", "extend", "verify", "tree_verify"):
                kernel = getattr(dispatcher, f"{role}_kernel", None)
                if kernel is not None:
                    facts["recurrent_functions"][role] = type(kernel).__name__
        return facts

    def parameters(self) -> int:
        """Return how many this rank holds."""
        return sum(weight.numel() for weight in self.model_runner.model.parameters())

    # Passes

    def prefill(self, tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Prefill tokens from nothing: a text's number and the logits [vocabulary] of the last one."""
        slots = Slots(self.allocator, len(tokens))
        logits = self._extend(tokens, slots, keep=1) if self._extends else self._one_by_one(tokens, slots)
        return self._keep(Text(slots.index, (slots,), self._save())), logits[-1]

    def forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """Return the logits [keep, vocabulary] of the last rows of a pass that keeps nothing."""
        slots = Slots(self.allocator, len(tokens))
        return self._extend(tokens, slots, keep) if self._extends else self._in_chunks(tokens, slots, keep)

    def step(self, text: int, token: int) -> tuple[int, torch.Tensor]:
        """Make one decode step behind a text: the new text's number and the logits [vocabulary]."""
        before, slots = self.kept[text], Slots(self.allocator, 1)
        index = torch.cat([before.index, slots.index])
        self._restore(before.state)
        logits = self._decode(token, index)
        return self._keep(Text(index, (*before.held, slots), self._save())), logits

    def decode(self, text: int, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Return logits [n, vocabulary] of a tree's nodes, each by one decode step from its parent's state."""
        before, slots = self.kept[text], Slots(self.allocator, len(tokens))
        waiting = [parents.count(node) for node in range(len(parents))]
        paths: list[list[int]] = []
        states: dict[int, tuple] = {}
        logits = None
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
            self._restore(states[parent] if parent >= 0 else before.state)
            row = self._decode(token, torch.cat([before.index, slots.index[paths[node]]]))
            if logits is None:
                logits = row.new_empty(len(tokens), len(row))
            logits[node] = row
            if parent >= 0:
                waiting[parent] -= 1
                if not waiting[parent]:
                    del states[parent]
            if waiting[node]:
                states[node] = self._save()
        return logits

    def verify(self, text, tokens, links, mask: np.ndarray, positions) -> tuple[int, torch.Tensor]:
        """Run TARGET_VERIFY over rows behind a text: a pass's number and the logits [n, vocabulary].

        links: the node that each one continues (-1 the text), by which states and windows are forked; None: they run
        in row order. mask bool [n, n]; positions [n] from the end of the text.
        """
        before, n = self.kept[text], len(tokens)
        inputs = (tuple(tokens), links, mask, tuple(positions))
        slots = Slots(self.allocator, self._width(n))
        logits = self._verify(before, slots, *inputs)
        number = self._keep(Pass(before, slots, inputs))
        return number, logits[:n]

    def commit(self, number: int, node: int, path: Sequence[int]) -> int:
        """Run SGLang's own commit of an accepted path after a verify: the new text's number.

        The state and windows of row `node` are scattered into the request's slot, and the keys and values of the rows
        in `path` are moved behind those of the text.
        """
        ran = self.kept[number]
        if self._latest is not ran.slots:  # another pass has written SGLang's buffers since
            self._verify(ran.text, ran.slots, *ran.inputs)
        if self.pool is not None:
            self.backend.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=torch.tensor([node], dtype=torch.int64, device=self.device),
                mamba_track_indices=None,
                mamba_steps_to_track=None,
                model=self.model_runner.model,
            )
        slots = Slots(self.allocator, len(path))
        self.allocator.get_kvcache().move_kv_cache(slots.index, ran.slots.index[list(path)])
        text = Text(torch.cat([ran.text.index, slots.index]), (*ran.text.held, slots), self._save())
        return self._keep(text)

    def contents(self, text: int) -> list[dict[str, torch.Tensor]]:
        """Return what each layer of the model holds after a text, on this rank: keys and values [length, d], windows
        [inputs, d] with the oldest first, a recurrent state."""
        kept = self.kept[text]
        keys = self.allocator.get_kvcache()
        recurrent = {}
        if kept.state:
            recurrent = pools.channels(kept.state, self.requests.mamba_map, type(self.recurrent).__name__)
        layers = []
        for layer in range(self.model_runner.model_config.num_hidden_layers):
            if layer in recurrent:
                layers.append(recurrent[layer])
                continue
            read = {"keys": keys.get_key_buffer, "values": keys.get_value_buffer}
            layers.append({name: buffer(layer)[kept.index].flatten(1) for name, buffer in read.items()})
        return layers

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.kept.pop(number, None)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    # One forward pass

    @property
    def _extends(self) -> bool:
        """Return whether EXTEND runs: its chunked delta rule takes no float32."""
        return self.dtype != torch.float32 or self.pool is None

    def _width(self, rows: int) -> int:
        if rows > self.rows:
            raise UsageError(
                f"capacity: a pass of {rows} rows, SGLang reserved {self.rows} for each request; "
                "give --engine-arg speculative_num_draft_tokens=N"
            )
        return min(width_for(rows), self.rows)

    def _keep(self, value: Text | Pass) -> int:
        self._next += 1
        self.kept[self._next] = value
        return self._next

    def _save(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the request's windows [layers, d, inputs] and recurrent state [layers, ...]."""
        if self.pool is None:
            return ()
        cache = self.pool.mamba_cache
        return tuple(tensor[:, self.slot].clone() for tensor in (*cache.conv, cache.temporal))

    def _restore(self, state: tuple[torch.Tensor, ...] | None) -> None:
        if self.pool is None:
            return
        cache = self.pool.mamba_cache
        for tensor, saved in zip((*cache.conv, cache.temporal), state or self._blank, strict=True):
            tensor[:, self.slot] = saved

    def _decode(self, token: int, index: torch.Tensor) -> torch.Tensor:
        """Run DECODE of one token, whose slot is the last of `index`."""
        length = len(index)
        self.requests.req_to_token[self.row, :length] = index.to(torch.int32)
        return self._run("DECODE", [token], [length - 1], length, index[-1:])[0]

    def _one_by_one(self, tokens: Sequence[int], slots: Slots) -> torch.Tensor:
        self._restore(None)
        for length, token in enumerate(tokens, start=1):
            logits = self._decode(token, slots.index[:length])
        return logits[None]

    def _extend(self, tokens: Sequence[int], slots: Slots, keep: int) -> torch.Tensor:
        n = len(tokens)
        self._restore(None)
        self.requests.req_to_token[self.row, :n] = slots.index.to(torch.int32)
        number = {"dtype": torch.int32, "device": self.device}
        extra = {
            "extend_num_tokens": n,
            "extend_seq_lens": torch.tensor([n], **number),
            "extend_prefix_lens": torch.tensor([0], **number),
            "extend_start_loc": torch.tensor([0], **number),
            "extend_prefix_lens_cpu": [0],
            "extend_seq_lens_cpu": [n],
            "extend_logprob_start_lens_cpu": [n],
        }
        with _last_rows(self.model_runner.model, keep):
            return self._run("EXTEND", tokens, range(n), n, slots.index, **extra)

    def _in_chunks(self, tokens: Sequence[int], slots: Slots, keep: int) -> torch.Tensor:
        """Run one DECODE, then TARGET_VERIFY along the text in chunks of one width, each committed whole."""
        self._restore(None)
        parts = [self._decode(tokens[0], slots.index[:1])[None]]
        chunk = self.rows
        text = Text(slots.index[:1], (), self._save())
        for at in range(1, len(tokens), chunk):
            part = tokens[at : at + chunk]
            n = len(part)
            lent = Slots(self.allocator, chunk)
            mask = np.tril(np.ones((n, n), dtype=bool))
            logits = self._verify(text, lent, tuple(part), None, mask, tuple(range(n)))
            parts.append(logits[:n])
            if at + chunk < len(tokens):
                number = self._keep(Pass(text, lent, (tuple(part), None, mask, tuple(range(n)))))
                text = self.kept[key := self.commit(number, n - 1, range(n))]
                self.drop((number, key))
        return torch.cat(parts)[-keep:]

    def _verify(self, text: Text, slots: Slots, tokens, links, mask, positions) -> torch.Tensor:
        """Return logits [width, vocabulary]; rows past the tree's are read by none of its rows."""
        n, width, length = len(tokens), len(slots.index), len(text.index)
        shown = np.zeros((width, length + width), dtype=bool)
        shown[:, :length] = True
        shown[:n, length : length + n] = mask
        shown[range(n, width), range(length + n, length + width)] = True
        tokens = [*tokens, *tokens[-1:] * (width - n)]
        places = [length + position for position in positions] + [length] * (width - n)
        first, sibling = child_links(links, width) if links is not None else ([-1] * width, [-1] * width)
        self._restore(text.state)
        self.requests.req_to_token[self.row, : length + width] = torch.cat([text.index, slots.index]).to(torch.int32)
        number = {"dtype": torch.int64, "device": self.device}
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        verify = NgramVerifyInput(
            draft_token=torch.tensor(tokens, **number),
            positions=torch.tensor(places, **number),
            retrieve_index=torch.arange(width, device=self.device)[None],
            retrieve_next_token=torch.tensor([first], **number),
            retrieve_next_sibling=torch.tensor([sibling], **number),
            draft_token_num=width,
            **{self.start.seam.mask: torch.from_numpy(shown).flatten().to(self.device)},
        )
        with self._forking(links is not None, width):
            logits = self._run("TARGET_VERIFY", tokens, places, length, slots.index, spec_info=verify)
        self._latest = slots
        return logits

    @contextlib.contextmanager
    def _forking(self, on: bool, width: int) -> Iterator[None]:
        """Set SGLang's gate: with a topk of 1 recurrent layers get no links. A graph replays what it captured."""
        runner = getattr(self.model_runner, "decode_cuda_graph_runner", None)
        fits = self.recurrent is None or on == (self.topk > 1)
        if self.recurrent is not None:
            self.recurrent.topk = self.topk if on else 1
        if runner is not None and not fits:
            self.model_runner.decode_cuda_graph_runner = None
        try:
            yield
        finally:
            if self.recurrent is not None:
                self.recurrent.topk = self.topk
            if runner is not None:
                self.model_runner.decode_cuda_graph_runner = runner

    @torch.no_grad()
    def _run(self, mode: str, tokens, positions, length: int, out: torch.Tensor, **extra) -> torch.Tensor:
        """Run one forward pass of the one request, `length` as SGLang counts it. Return logits [rows, vocabulary]."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        where = {"device": self.device}
        places = torch.tensor(list(positions), dtype=torch.int64, **where)
        batch = ForwardBatch(
            forward_mode=getattr(ForwardMode, mode),
            batch_size=1,
            input_ids=torch.tensor(list(tokens), dtype=torch.int64, **where),
            req_pool_indices=torch.tensor([self.row], dtype=torch.int64, **where),
            seq_lens=torch.tensor([length], dtype=torch.int64, **where),
            seq_lens_cpu=torch.tensor([length], dtype=torch.int64),
            orig_seq_lens=torch.tensor([length], dtype=torch.int32, **where),
            out_cache_loc=out.to(torch.int64),
            seq_lens_sum=length,
            positions=places,
            spec_algorithm=self.model_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **extra,
        )
        batch.num_token_non_padded_cpu = len(places)
        if self.mrope:
            batch.mrope_positions = places[None].repeat(3, 1)
        runner = getattr(self.model_runner, "decode_cuda_graph_runner", None)
        if mode != "TARGET_VERIFY" and runner is not None:  # its graphs are verifies
            self.model_runner.decode_cuda_graph_runner = None
        try:
            with ieee():
                output = self.model_runner.forward(batch)
        except torch.cuda.OutOfMemoryError as error:
            raise UsageError(f"memory: no room for {mode} of {len(places)} rows ({one_line(error)})") from error
        except (NotImplementedError, AssertionError, RuntimeError, ValueError) as error:  # whatever kernels object to
            words = (
                "refuses"
                if isinstance(error, NotImplementedError)
                else f"does not get through ({type(error).__name__})"
            )
            raise Unsupported(f"SGLang {words} {mode} of {len(places)} rows: {one_line(error)}") from error
        finally:
            if mode != "TARGET_VERIFY" and runner is not None:
                self.model_runner.decode_cuda_graph_runner = runner
        output = getattr(output, "logits_output", output[0] if isinstance(output, tuple) else output)
        # SGLang widens the logits it computed in the model's dtype: this takes nothing away.
        wide = getattr(self.args, "enable_fp32_lm_head", False)
        return output.next_token_logits.to(torch.float32 if wide else self.dtype, copy=True)


def child_links(parents: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
    """Return SGLang's form of a tree: each node's first child and next sibling, -1 for none; siblings ascend."""
    first, sibling, last = [-1] * rows, [-1] * rows, {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in last:
            sibling[last[parent]] = node
        else:
            first[parent] = node
        last[parent] = node
    return first, sibling


# Random weights


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Redraw SGLang's dummy weights by the rules of `loading.build_random`: sensitive to the recurrent states."""
    from ..transformers.loading import RANGES, _randomize

    draw = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    norms = {
        id(module.weight): 0.0 if "Gemma" in type(module).__name__ else 1.0  # those multiply by 1 + weight
        for module in model.modules()
        if "Norm" in type(module).__name__ and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or weight.dtype.itemsize < 2:
                raise UsageError(
                    f"weights: {name} is {dtype_name(weight.dtype)}; expected a model that is not quantised"
                )
            _randomize(name.rpartition(".")[2], name, weight, draw, RANGES)
            weight.add_(norms.get(id(weight), 0.0))
        head = getattr(getattr(model, "lm_head", None), "weight", None)
        inputs = [
            module.weight
            for name, module in model.named_modules()
            if name.endswith("embed_tokens") and getattr(module, "weight", None) is not None
        ]
        for table in inputs:
            table.normal_(0, 1, generator=draw)
        for table in [head] if head is not None else inputs:  # a tied table is the head's
            table.normal_(0, 2.5 / math.sqrt(table.shape[-1]), generator=draw)
        for module in model.modules():
            if isinstance(getattr(module, "gemma_weight", None), torch.Tensor):
                torch.add(module.weight.data, 1.0, out=module.gemma_weight)


# Around SGLang


def _plain_layers() -> None:
    """Put SGLang's own plain code in place of its fused kernels, in this whole process, for float32.

    The fused norms take half precision only, and the kernel that normalises and rotates queries and keys rounds them to
    bfloat16 whatever the model's dtype (seen in 0.5.17).
    """
    for module, name, fused, plain in PLAIN:
        try:
            owner = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if hasattr(owner, fused) and hasattr(owner, plain):
            setattr(owner, fused, getattr(owner, plain))


@contextlib.contextmanager
def _last_rows(model: torch.nn.Module, keep: int) -> Iterator[None]:
    """Let EXTEND compute the logits of the last `keep` rows of its one request, and not of the last alone."""
    processor = next((m for m in model.modules() if hasattr(m, "_get_pruned_states")), None)
    if keep == 1 or processor is None:
        if keep != 1:
            raise Unsupported(f"{type(model).__name__} has no logits processor; full forward passes cannot be read")
        yield
        return
    whole: Callable = processor._get_pruned_states

    def pruned(hidden, *rest, **named):
        return (hidden[-keep:], *whole(hidden, *rest, **named)[1:])

    processor._get_pruned_states = pruned
    try:
        yield
    finally:
        del processor._get_pruned_states


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Turn what SGLang raises while it starts into one line, of the kind that decides the exit code."""
    try:
        yield
    except (UsageError, Unsupported):
        raise
    except NotImplementedError as error:
        raise Unsupported(f"SGLang refuses this model: {one_line(error)}") from error
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(f"memory: SGLang does not fit on the GPU ({one_line(error)}); {SMALLER}") from error
    except ImportError as error:
        raise UsageError(
            f"engine: sglang cannot be imported ({one_line(error)}); see constraints-sglang.txt"
        ) from error
    except Exception as error:
        text = one_line(error)
        if "not enough memory" in text.lower() or "out of memory" in text.lower():
            raise UsageError(f"memory: SGLang does not fit on the GPU ({text}); {SMALLER}") from error
        if any(words in text.lower() for words in REFUSALS):
            raise Unsupported(f"SGLang refuses this model: {text}") from error
        raise UsageError(f"engine: SGLang does not start ({type(error).__name__}: {text})") from error


REFUSALS = ("not supported for now", "is not supported", "does not support", "not in full attention layers")
SMALLER = "take a smaller --budget, --dtype or model, or --tp over several GPUs"
