"""transformers as an engine: the model's own code, with its recurrent functions swapped for the length of a tree pass."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from ..errors import Unsupported, UsageError
from ..families import Family, find_family
from ..mixers import causal_conv
from ..tree import DraftTree
from ..wiring import FORKED, Layer, Plan, Wiring
from . import loading
from .adapters import ADAPTERS, Swap

OLDEST = Version("5.15")  # the common function names, the mask by layer type and the one hybrid cache exist since then
_SWAP = threading.RLock()  # swapped functions are module globals: one pass at a time


@dataclass(frozen=True, eq=False)
class Prefix:
    """A cache after `length` tokens, and the logits [vocabulary] of the last one."""

    cache: DynamicCache
    length: int
    logits: torch.Tensor


@dataclass(eq=False)
class Verified:
    """One pass over a tree: logits [n, vocabulary] and what a commit needs. `plan` is None for the library's own pass."""

    prefix: Prefix
    tree: DraftTree
    plan: Plan | None
    cache: DynamicCache
    logits: torch.Tensor | None = None
    scans: dict[int, Any] = field(default_factory=dict)  # layer -> what gives a node's recurrent state
    inputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # layer -> inputs [1, d, n] of each convolution


class TransformersEngine:
    """Runs one causal language model of transformers. See `Engine` for the contract.

    `mixers` is 'library' (ar and linear run the library's recurrent functions) or 'own' (decode runs ours too).
    Raises Unsupported, naming the layer, for a model that cannot be forked or checked.
    """

    name = "transformers"

    def __init__(self, model, *, mixers: str = "library", provenance: dict | None = None):
        if mixers not in ("library", "own"):
            raise UsageError(f"mixers: got {mixers!r}, expected 'library' or 'own'")
        if Version(transformers.__version__) < OLDEST:
            raise Unsupported(f"transformers {transformers.__version__}: the engine needs {OLDEST} or newer")
        self.model, self.mixers, self.provenance = model.eval(), mixers, provenance or {}
        self.config = model.config.get_text_config(decoder=True)
        self.family: Family = find_family(self.config.model_type)
        self.layers: tuple[Layer, ...] = self.family.describe_layers(self.config)
        # Experts gather the rows that were routed to them: how many there are depends on other rows.
        self.exact_control = getattr(self.config, "num_experts", None) is None
        self.vocab_size = self.config.vocab_size
        self.max_length = getattr(self.config, "max_position_embeddings", None)
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self._decoder = model.get_decoder()
        self._module = sys.modules[type(model).__module__]
        missing = [name for name in self.family.calls if not hasattr(self._module, name)]
        if missing:
            raise Unsupported(
                f"{self._module.__name__} has no {', '.join(missing)}; its recurrent layers cannot be forked"
            )
        attention = self.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise Unsupported(f"attention {attention!r} takes no tree mask; load the model with 'sdpa' or 'eager'")
        if self.dtype == torch.float64 and attention != "sdpa":
            raise Unsupported("float64 needs attention 'sdpa': the eager softmax is float32")

    @classmethod
    def load(cls, model: str | None, *, mixers: str = "library", **settings) -> TransformersEngine:
        """Loads a model by name, path or hub id; see `loading.load_model`."""
        loaded, provenance = loading.load_model(model, **settings)
        return cls(loaded, mixers=mixers, provenance=provenance)

    def describe(self) -> dict[str, Any]:
        state = {torch.float64: "float64"}.get(self.dtype, "float32")
        return {
            "engine": self.name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.machine(),
            "threads": torch.get_num_threads(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "state_dtype": state,
            "attention": self.config._attn_implementation,
            "experts": getattr(self.config, "_experts_implementation", None),
            "mixers": self.mixers,
            "recurrent_functions": {name: _resolved(getattr(self._module, name)) for name in self.family.calls},
            "float32_matmul": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def supports(self, wiring: Wiring | None) -> str | None:
        return None

    # Passes

    def prefill(self, tokens: Sequence[int]) -> Prefix:
        cache = DynamicCache(config=self.config)
        for index, layer in enumerate(cache.layers):
            _forkable(layer, index)
        logits = self._run([tokens], np.arange(len(tokens))[None], cache, keep=1)
        return Prefix(cache, len(tokens), logits[0, 0])

    def step(self, prefix: Prefix, token: int) -> tuple[torch.Tensor, Prefix]:
        cache = _fork(prefix.cache)
        logits = self._advance(cache, prefix.length, token)
        return logits, Prefix(cache, prefix.length + 1, logits)

    def decode(self, prefix: Prefix, tree: DraftTree, *, batched: bool = False) -> torch.Tensor:
        return self._decode_levels(prefix, tree) if batched else self._decode_nodes(prefix, tree)

    def verify(self, prefix: Prefix, tree: DraftTree, wiring: Wiring | None) -> Verified:
        plan = (wiring or FORKED).plan(tree)  # mask and positions; the library's own recurrences take no plan
        cache = _fork(prefix.cache)
        verified = Verified(prefix, tree, plan if wiring else None, cache)
        positions = prefix.length + np.array(plan.positions)
        with self._swapped(plan, verified) if wiring else contextlib.nullcontext():
            logits = self._run([tree.tokens], positions[None], cache, mask=self._mask(plan.mask, prefix.length))
        verified.logits = logits[0]
        return verified

    def commit(self, verified: Verified, node: int) -> Prefix:
        prefix, tree = verified.prefix, verified.tree
        path = tree.path(node)
        if verified.plan is None:
            if path == tuple(range(len(tree))):
                return Prefix(verified.cache, prefix.length + len(path), verified.logits[node])
            # The library keeps the state of the last row only, so a shorter accept is run again.
            return self.commit(
                self.verify(prefix, DraftTree.chain([tree.tokens[i] for i in path]), None), len(path) - 1
            )
        stored = verified.plan.commit[node]
        kept = tuple(verified.plan.commit[step] for step in path)
        cache = _fork(prefix.cache)
        rows = torch.tensor(kept, device=self.device) + prefix.length
        for index, (layer, full) in enumerate(zip(cache.layers, verified.cache.layers, strict=True)):
            if getattr(full, "keys", None) is not None:
                select = torch.cat([torch.arange(prefix.length, device=full.keys.device), rows.to(full.keys.device)])
                layer.keys, layer.values = full.keys[:, :, select], full.values[:, :, select]
            for state, inputs in enumerate(verified.inputs.get(index, ())):
                window = layer.conv_states[state]
                place = verified.plan.windows(window.shape[-1])[stored : stored + 1]
                window.copy_(causal_conv.gather(window, inputs, place)[..., 0, :])
            if index in verified.scans:
                layer.recurrent_states[0].copy_(verified.scans[index].state(stored))
        return Prefix(cache, prefix.length + len(path), verified.logits[node])

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
        longest = max(map(len, paths))
        if any(len(path) != longest for path in paths):
            raise ValueError("forward: paths of different lengths; pad them on the right first")
        return self._run(paths, np.broadcast_to(np.arange(longest), (len(paths), longest)), None, keep=keep)

    def _advance(self, cache: DynamicCache, length: int, token: int) -> torch.Tensor:
        """Decodes one token on `cache`, which moves on in place."""
        own = self.mixers == "own"
        with self._swapped(FORKED.plan(DraftTree.chain([token])), None) if own else contextlib.nullcontext():
            return self._run([[token]], np.full((1, 1), length), cache)[0, 0]

    def _decode_nodes(self, prefix: Prefix, tree: DraftTree) -> torch.Tensor:
        standing = {-1: prefix.cache}
        waiting = [len(children) for children in tree.children]
        logits = None
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent >= 0:
                waiting[parent] -= 1
            # The last child takes its parent's cache over; every other one gets a fork.
            cache = standing.pop(parent) if parent >= 0 and not waiting[parent] else _fork(standing[parent])
            row = self._advance(cache, prefix.length + tree.depth[node], token)
            if logits is None:
                logits = row.new_empty(len(tree), len(row))
            logits[node] = row
            if waiting[node]:
                standing[node] = cache
        return logits

    def _decode_levels(self, prefix: Prefix, tree: DraftTree) -> torch.Tensor:
        cache, logits = _fork(prefix.cache), None
        before: tuple[int, ...] = (-1,)
        for depth, nodes in enumerate(tree.levels):
            index = torch.tensor([before.index(tree.parents[node]) for node in nodes], device=self.device)
            cache.reorder_cache(index)
            positions = np.full((len(nodes), 1), prefix.length + depth)
            rows = self._run([[tree.tokens[node]] for node in nodes], positions, cache)[:, 0]
            if logits is None:
                logits = rows.new_empty(len(tree), rows.shape[-1])
            logits[list(nodes)] = rows
            before = nodes
        return logits

    @torch.no_grad()
    def _run(self, tokens, positions: np.ndarray, cache, *, mask=None, keep: int = 0) -> torch.Tensor:
        """One forward pass; positions are always explicit. Returns logits [batch, kept rows, vocabulary]."""
        lifted = KeepFloat64() if self.dtype == torch.float64 else contextlib.nullcontext()
        with lifted:
            return self.model(
                input_ids=torch.tensor(np.asarray(tokens), dtype=torch.long, device=self.device),
                position_ids=torch.tensor(positions, dtype=torch.long, device=self.device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=keep,
            ).logits

    def _mask(self, rows: np.ndarray, prefix: int):
        """The attention mask of n rows behind `prefix` tokens, in the form that the family takes."""
        n = len(rows)
        seen = torch.ones(1, 1, n, prefix + n, dtype=torch.bool, device=self.device)
        seen[0, 0, :, prefix:] = torch.tensor(rows, device=self.device)
        if self.config._attn_implementation == "eager":
            seen = torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, torch.finfo(self.dtype).min)
        if self.family.mask == "plain":
            return seen
        return {kind: None if kind == "linear_attention" else seen for kind in self.family.layers}

    # The swap

    @contextlib.contextmanager
    def _swapped(self, plan: Plan, record: Verified | None) -> Iterator[None]:
        """Runs the recurrent functions of the modelling module under `plan`; always puts the originals back."""
        swap = Swap(plan, record)
        with _SWAP, contextlib.ExitStack() as undo:
            for index, layer in enumerate(self._decoder.layers):
                undo.callback(layer.register_forward_pre_hook(lambda *_, index=index: swap.enter(index)).remove)
            for name, adapter in self.family.calls.items():
                undo.callback(setattr, self._module, name, getattr(self._module, name))
                setattr(self._module, name, functools.partial(ADAPTERS[adapter], swap))
            yield


class KeepFloat64(TorchFunctionMode):
    """Leaves float64 tensors alone where the library casts to float32 inside norms, gates and softmaxes."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to and torch.float32 in (*args[1:], kwargs.get("dtype")):
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
            elif kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _forkable(layer, index: int) -> None:
    """Refuses a cache layer whose contents `_fork` does not know."""
    known = ("keys", "conv_states")
    if not any(hasattr(layer, name) for name in known):
        raise Unsupported(f"layer {index} ({type(layer).__name__}) holds none of {known}; its fork cannot be checked")


def _fork(cache: DynamicCache) -> DynamicCache:
    """A cache that goes on by itself: recurrent states and windows, written in place, are copied; keys and values are
    shared, because appending to them makes new tensors."""
    fork = copy.copy(cache)
    fork.layers = []
    for layer in cache.layers:
        twin = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                cloned = {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
                setattr(twin, name, cloned)
        fork.layers.append(twin)
    return fork


def _resolved(function) -> str:
    """What a recurrent name really runs: packages such as fla or causal_conv1d take its place without a word."""
    found = inspect.getclosurevars(inspect.unwrap(function, stop=lambda f: "implementation" in f.__code__.co_freevars))
    target = found.nonlocals.get("implementation", function)
    return f"{target.__module__}.{target.__qualname__}"
