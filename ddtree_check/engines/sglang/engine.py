"""SGLang as an engine, in this process: its own DECODE, EXTEND, TARGET_VERIFY and commit, without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...base.errors import Unsupported, UsageError
from ...model.families import find_family
from ...model.wiring import FORKED, Layer, State, Wiring
from ...tree.draft_tree import DraftTree
from ..capacity import needs
from ..contract import BaseEngine, Watched
from ..precision import dtype_name
from ..transformers import loading
from .layers import watching
from .ranks import Group, joined, muted
from .runner import Start, width_for
from .seams import LAYER_WORDS, NO_CLASS, Seam, find_seam, installed, readable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 16384  # key and value slots, unless --engine-arg max_total_tokens says otherwise
TOLD = (  # facts that a record holds as they are
    "sglang", "tp", "dtype", "state_dtype", "conv_dtype", "attention", "recurrent_functions", "graphs", "reserved",
    "capacity", "engine_args",
)  # fmt: skip
OURS = {  # what other options set
    "model_path": "--model",
    "dtype": "--dtype",
    "load_format": "--weights",
    "tp_size": "--tp",
    "device": "--device",
    "random_seed": "--seed",
}


@dataclass(eq=False)
class Handle:
    """Something that every rank keeps by a number, until nothing refers to it any more."""

    group: Group
    number: int

    def __del__(self):
        self.group.drop(self.number)


@dataclass(frozen=True, eq=False)
class Prefix:
    """`length` committed tokens that SGLang holds, and the logits [vocabulary] of the last one."""

    held: Handle
    length: int
    logits: torch.Tensor


@dataclass(frozen=True, eq=False)
class Verified:
    """One TARGET_VERIFY over a tree: logits [n, vocabulary], and what a commit needs."""

    held: Handle
    prefix: Prefix
    tree: DraftTree
    rows: tuple[int, ...]  # which row a commit of each node stores
    logits: torch.Tensor


class SGLangEngine(BaseEngine):
    """Runs one causal language model in SGLang. See `Engine` for the contract; one in a process.

    forked       TARGET_VERIFY with a topk above 1: the recurrent layers get the tree's links
    unforked     TARGET_VERIFY with a topk of 1: they get none and run in row order; attention keeps the tree's mask
    None         the same, for chains: SGLang's own multi-token pass
    """

    name = "sglang"
    _running = False

    def __init__(self, group: Group, config, seam: Seam, *, provenance: dict, facts: dict[str, Any]):
        self.group, self.config, self.seam, self.provenance, self.facts = group, config, seam, provenance, facts
        family = find_family(config.model_type)
        self.layers: tuple[Layer, ...] = family.describe_layers(config)
        self.vocab_size = config.vocab_size
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.dtype = getattr(torch, facts["dtype"])
        # Triton compiles two kernels, with parents and without; their float32 sums differ in the last bits.
        self.exact_control = False

    @classmethod
    def load(
        cls, model: str | None, *, weights: str = "real", dtype: str | None = None, device: str = "auto", seed: int = 0,
        rows: int = 65, tp: int = 1, args: Mapping[str, object] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> SGLangEngine:  # fmt: skip
        """Start SGLang on a model by name, path or hub id; see `loading.load_model`.

        rows: the largest tree, with its root; tp: GPUs; args: SGLang's ServerArgs by name.
        """
        release = installed()
        like, seam = find_seam(release)
        gpu = _gpu(device, tp)
        if cls._running:
            raise UsageError("engine: this process has started SGLang before; one engine a process, start another")
        source = loading.resolve(model)
        config = cls.load_config(model, source, weights)
        text = readable(config.get_text_config(decoder=True))
        for index, layer in enumerate(find_family(text.model_type).describe_layers(text)):
            for op in (op for branch in layer.branches for op in branch if isinstance(op, State)):
                if op.kind in NO_CLASS:
                    raise Unsupported(f"layer {index} ({layer.kind}): {NO_CLASS[op.kind]}")
        wanted = loading.wanted_dtype(model, config, dtype)
        if wanted not in DTYPES:
            raise UsageError(f"dtype: got {dtype}, expected float32, bfloat16 or float16: SGLang has no other")
        parameters = _parameters(text)
        needed = parameters * wanted.itemsize
        loading.require_memory(
            f"{model or loading.EMBEDDED} in {dtype_name(wanted)}", needed // tp, torch.device("cuda", gpu)
        )
        size = f": {parameters / 1e6:,.1f} M parameters, {needed / 2**30:.2f} GiB" if parameters else ""
        chosen = checked_args(args or {}, _server_fields())
        progress(f"starting SGLang {release}{size}")
        with _checkpoint(source, text, weights, wanted) as path:  # what SGLang reads
            settings = server_args(path, weights, wanted, seed, rows, tp) | chosen
            settings |= overrides(text, nested=text is not config and weights == "real", chosen=chosen)
            start = Start(
                seam=seam, args=settings, dtype=dtype_name(wanted), gpu=gpu, environment=_environment(wanted),
                seed=seed if weights == "random" else None,
            )  # fmt: skip
            cls._running = True
            group = Group(start, tp, loud="log_level" in chosen)
        facts = group.runner.facts() | {
            "sglang": release,
            "seam": f"{like}: {seam.status}",
            "dtype": dtype_name(wanted),
            "rows": rows,
            "tp": tp,
            "engine_args": {name: str(value) for name, value in chosen.items()},
        }
        capacity = needs({"tree": rows - 1}, facts["reserved"])
        if short := [str(need) for need in capacity if need.short]:
            group.close()
            raise UsageError(f"capacity: {'; '.join(short)}")
        facts["capacity"] = [need.to_json() for need in capacity]
        parameters = parameters or tp * group.runner.parameters()
        provenance = loading.provenance(model, source, text, weights, seed, parameters, parameters * wanted.itemsize)
        return cls(group, text, seam, provenance=provenance, facts=facts)

    @staticmethod
    def load_config(model: str | None, source: str, weights: str):
        """Do as `loading.load_config`; SGLang has classes of its own for what its transformers does not know yet."""
        try:
            return loading.load_config(model, source, weights)
        except UsageError:
            if not Path(source, "config.json").is_file():
                raise
            with muted(), contextlib.suppress(ImportError):
                importlib.import_module("sglang.srt.utils.hf_transformers.common")  # its import brings them
            return loading.load_config(model, source, weights)

    def describe(self) -> dict[str, Any]:
        facts, device, extends = self.facts, self.group.runner.device, self.group.runner._extends
        return {
            **{name: facts[name] for name in TOLD},
            "engine": self.name,
            "model_type": self.config.model_type,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            "sglang_seam": facts["seam"],
            "triton": _version("triton"),
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device),
            "threads": torch.get_num_threads(),
            "judged_as": _coarsest(facts["dtype"], facts["state_dtype"]),
            "norms_and_rotary": "sgl_kernel" if facts["fused"] else "SGLang's plain ones: the fused round to bfloat16",
            "mixers": "engine",
            "float32_matmul": "ieee",
            "fork": f"topk {facts['topk']}" if facts["topk"] > 1 else "off: topk 1",
            "prefill": "EXTEND" if extends else "DECODE, token by token: EXTEND takes no float32",
            "forward": "EXTEND"
            if extends
            else "TARGET_VERIFY along the text in chunks of one width: EXTEND takes no float32",
            "widths": sorted({min(width_for(rows), facts["rows"]) for rows in range(2, facts["rows"] + 1)}),
        }

    def exact(self):
        raise UsageError("oracle: SGLang has no float64; run the oracle with --engine transformers")

    def close(self) -> None:
        """End SGLang's other ranks and process groups. Prefixes are of no use afterwards."""
        self.group.close()

    def supports(self, wiring: Wiring | None) -> str | None:
        if wiring is None:
            return None
        if wiring.state != wiring.conv:
            return "SGLang hands states and windows one and the same parents, the tree's or none"
        if wiring.state != "flat" and self.facts["topk"] == 1:
            return "SGLang was started with a topk of 1, by which it forks no state"
        return None

    # Passes

    def prefill(self, tokens: Sequence[int]) -> Prefix:
        number, logits = self.group.call("prefill", _ints(tokens))
        return Prefix(Handle(self.group, number), len(tokens), logits)

    def step(self, prefix: Prefix, token: int) -> tuple[torch.Tensor, Prefix]:
        number, logits = self.group.call("step", prefix.held.number, int(token))
        return logits, Prefix(Handle(self.group, number), prefix.length + 1, logits)

    def decode(self, prefix: Prefix, tree: DraftTree, *, batched: bool = False) -> torch.Tensor:
        if batched:
            raise Unsupported("SGLang runs one request here: its decoding is strict, take --ar strict")
        return self.group.call("decode", prefix.held.number, _ints(tree.tokens), tree.parents)

    def verify(self, prefix: Prefix, tree: DraftTree, wiring: Wiring | None) -> Verified:
        if reason := self.supports(wiring):
            raise Unsupported(reason)
        read = (wiring or FORKED).plan(tree)  # mask and positions; None takes no links
        links = None if wiring is None or wiring.state == "flat" else read.state
        if links is not None and min(links) < -1:
            raise Unsupported("SGLang starts every row from its parent's state or from the prefix's")
        number, logits = self.group.call(
            "verify", prefix.held.number, _ints(tree.tokens), links, read.mask, _ints(read.positions)
        )
        return Verified(Handle(self.group, number), prefix, tree, _ints(read.commit), logits)

    def commit(self, verified: Verified, node: int) -> Prefix:
        path = [verified.rows[step] for step in verified.tree.path(node)]
        number = self.group.call("commit", verified.held.number, path[-1], path)
        return Prefix(Handle(self.group, number), verified.prefix.length + len(path), verified.logits[node])

    def contents(self, prefix: Prefix) -> tuple[int, list[dict[str, torch.Tensor]]]:
        return prefix.length, joined(self.group.gather("contents", prefix.held.number))

    @contextlib.contextmanager
    def watch(self, layers: Sequence[int]) -> Iterator[Watched]:
        if self.facts["graphs"] or self.facts["tp"] > 1:
            raise Unsupported("a CUDA graph runs no hooks, and a rank of several has a part of each layer alone")
        with watching(self.group.runner.model_runner.model, len(self.layers), layers) as watched:
            yield watched

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
        return torch.stack([self.group.call("forward", _ints(path), keep) for path in paths])


def server_args(path: str, weights: str, dtype: torch.dtype, seed: int, rows: int, tp: int) -> dict[str, Any]:
    """Return the ServerArgs of a run. NGRAM needs no draft model; it makes SGLang keep the state of every node, and its
    breadth becomes the topk by which states are forked."""
    return {
        "model_path": path,
        "load_format": "dummy" if weights == "random" else "auto",
        "dtype": dtype_name(dtype),
        "tp_size": tp,
        "device": "cuda",
        "random_seed": seed,
        "skip_tokenizer_init": True,
        "log_level": "error",
        "attention_backend": "triton",
        "linear_attn_backend": "triton",
        "sampling_backend": "pytorch",
        "page_size": 1,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": width_for(rows),
        "speculative_ngram_max_bfs_breadth": 8,
        "max_running_requests": 1,
        "max_total_tokens": TOKENS,
        "chunked_prefill_size": 2048,
        "mem_fraction_static": 0.85,
    }


def overrides(text, *, nested: bool, chosen: Mapping[str, object]) -> dict[str, str]:
    """Return what SGLang's configuration classes need and a configuration saved by transformers does not hold.

    SGLang places full attention in Qwen's hybrids by an interval, transformers by a list. Raises Unsupported for a list
    that no interval gives. nested: the checkpoint's text model is a part of it.
    """
    values = chosen.get("json_model_override_args", {})
    values = json.loads(values) if isinstance(values, str) else dict(values)
    kinds = list(getattr(text, "layer_types", None) or ())
    if set(kinds) == {"linear_attention", "full_attention"} and text.model_type.startswith("qwen3"):
        every = kinds.index("full_attention") + 1
        if kinds != ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(len(kinds))]:
            raise Unsupported("SGLang takes one full attention layer in every so many, this model has them elsewhere")
        interval = {"full_attention_interval": every}
        values = ({"text_config": interval} if nested else interval) | values
    return {"json_model_override_args": json.dumps(values)} if values else {}


def checked_args(args: Mapping[str, object], fields: Mapping[str, object] | None) -> dict[str, object]:
    """Return `args` if SGLang has them all. Raises UsageError, naming what comes near, for one that it has not."""
    for name in args:
        if name in OURS:
            raise UsageError(f"engine-arg: got {name}, which {OURS[name]} sets")
        if fields is not None and name not in fields:
            near = [known for known in fields if name in known or known in name][:3]
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise UsageError(f"engine-arg: got {name}, expected the name of one of SGLang's ServerArgs{hint}")
    return dict(args)


def _server_fields() -> Mapping[str, object]:
    from .runner import _reasons

    with _reasons(), muted():
        from sglang.srt.server_args import ServerArgs
    return {field.name: field for field in dataclasses.fields(ServerArgs)}


def _gpu(device: str, tp: int) -> int:
    if device.partition(":")[0] not in ("auto", "cuda"):
        raise UsageError(f"device: got {device!r}, expected auto, cuda or cuda:N: SGLang runs on a GPU")
    if not torch.cuda.is_available():
        raise UsageError("device: SGLang needs a CUDA device, there is none here; --engine transformers runs on a CPU")
    index = torch.device("cuda" if device == "auto" else device).index or 0
    count = torch.cuda.device_count()
    if tp < 1 or index + tp > count:
        raise UsageError(f"tp: got {tp} from device {index} on, expected at most the {count} GPUs that are here")
    return index


def _parameters(text) -> int:
    """Return 0 for an architecture that SGLang alone has: then SGLang itself says what does not fit."""
    try:
        return loading.count_parameters(text)
    except UsageError:
        return 0


def _environment(dtype: torch.dtype) -> dict[str, str]:
    """Return what SGLang and Triton read from the environment alone."""
    variables = {"SGLANG_MAMBA_CONV_DTYPE": dtype_name(dtype), "TOKENIZERS_PARALLELISM": "false"}
    return variables | ({"TRITON_F32_DEFAULT": "ieee"} if dtype == torch.float32 else {})


@contextlib.contextmanager
def _checkpoint(source: str, text, weights: str, dtype: torch.dtype) -> Iterator[str]:
    """Return the folder or hub id that SGLang reads; for random weights one that holds the configuration alone.

    Where SGLang has other words for a family's layer types than transformers, a folder of links with its words.
    """
    folder = loading.snapshot(source) if weights == "real" else None
    words = LAYER_WORDS.get(text.model_type)
    if weights == "real" and (words is None or folder is None):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="ddtree-check-") as place:
        config = Path(folder or source, "config.json")
        data = json.loads(config.read_text()) if config.is_file() else {}
        if folder is None:
            if data.get("model_type") != text.model_type:  # the text model is a part of it, or there is none
                data = text.to_dict()
            data |= {"dtype": dtype_name(dtype), "torch_dtype": dtype_name(dtype)}
            data["architectures"] = data.get("architectures") or [loading.class_name(text)]
        for file in folder.iterdir() if folder else ():
            if file.name != "config.json":
                Path(place, file.name).symlink_to(file.resolve())
        if words:
            data["layer_types"] = [words.get(kind, kind) for kind in data.get("layer_types", ())]
        Path(place, "config.json").write_text(json.dumps(data, default=str))
        yield place


def _coarsest(*dtypes: str | None) -> str:
    """Return the dtype that bounds what can be asked of a run: the one with the fewest digits."""
    return max(filter(None, dtypes), key=lambda name: torch.finfo(getattr(torch, name)).eps)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ints(values) -> tuple[int, ...]:
    return tuple(map(int, values))
