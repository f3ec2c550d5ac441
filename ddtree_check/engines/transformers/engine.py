"""transformers as an engine: the model's own code, its recurrent functions swapped for the length of a tree pass."""

from __future__ import annotations

import contextlib
import copy
import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from packaging.version import Version

from ...base.errors import Unsupported, UsageError
from ...model.families import Family, find_family
from ...model.mixers import causal_conv
from ...model.wiring import FORKED, Attention, Layer, Plan, Wiring, reads
from ...tree.draft_tree import DraftTree
from ..contract import BaseEngine, Watched
from ..precision import KeepFloat64, dtype_name, ieee
from . import loading
from .adapters import ADAPTERS, Swap
from .adapters.caches import CACHES
from .passes import Prefix, Verified, visible

if TYPE_CHECKING:
    from .batches import Batches

OLDEST = Version("5.15")  # the common function names, the mask by layer type and the one hybrid cache exist since then
_ONE_ROW = FORKED.plan(DraftTree.chain([0]))  # of a decode step: which token it is changes nothing
_SWAP = threading.RLock()  # swapped functions are module globals: one pass at a time


class TransformersEngine(BaseEngine):
    """Runs one causal language model of transformers. See `Engine` for the contract.

    `mixers` is 'library' (ar and linear run the library's recurrent functions) or 'own' (decode runs ours too).
    Raises Unsupported, naming the layer, for a model that cannot be forked or checked.
    """

    name, default_draft = "transformers", "dflash"

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
        self.exact_control = not any("Experts" in type(module).__name__ for module in model.modules())
        self.vocab_size = self.config.vocab_size
        self.max_length = getattr(self.config, "max_position_embeddings", None)
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self._decoder = model.get_decoder()
        self._module = sys.modules[type(model).__module__]
        self._features: tuple[int, ...] = ()
        self._kinds = self.family.kinds_of(self.config)
        self.caches = CACHES[self.family.keeps](model, self.config)
        if missing := ", ".join(name for name in self._swappable if not hasattr(*self._place(name))):
            raise Unsupported(f"{self._module.__name__} has no {missing}; its recurrent layers cannot be forked")
        attention = self.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise Unsupported(f"attention {attention!r} takes no tree mask; load the model with 'sdpa' or 'eager'")
        if reads(self.layers, Attention) and self.dtype == torch.float64 and attention != "sdpa":
            raise Unsupported("float64 needs attention 'sdpa': the eager softmax is float32")

    @classmethod
    def load(
        cls, model: str | None, *, mixers: str = "library", args: Mapping[str, object] | None = None, **settings
    ) -> TransformersEngine:
        """Load a model by name, path or hub id; see `loading.load_model`. args: mixers and attention by name."""
        options = {"mixers": mixers} | dict(args or {})
        if unknown := options.keys() - {"mixers", "attention"}:
            raise UsageError(f"engine-arg: got {min(unknown)}, expected mixers=own or attention=eager")
        mixers = options.pop("mixers")
        loaded, provenance = loading.load_model(model, **settings, **options)
        return cls(loaded, mixers=mixers, provenance=provenance)

    def exact(self) -> TransformersEngine:
        needed = 8 * sum(weight.numel() for weight in self.model.parameters())
        loading.require_memory("the float64 oracle", needed, self.device)
        model = copy.deepcopy(self.model).double()
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "_experts_implementation", None):
            config._experts_implementation = "eager"  # the grouped products know no float64
        return type(self)(model, mixers="own", provenance=self.provenance)

    def describe(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "engine": self.name,
            "model_type": self.config.model_type,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "threads": torch.get_num_threads(),
            "dtype": dtype_name(self.dtype),
            "state_dtype": "float64" if self.dtype == torch.float64 else "float32",
            "attention": self.config._attn_implementation,
            "experts": getattr(self.config, "_experts_implementation", None),
            "mixers": self.mixers,
            "recurrent_functions": {name: _resolved(getattr(*self._place(name))) for name in self._swappable},
            "float32_matmul": "ieee",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def supports(self, wiring: Wiring | None) -> str | None:
        return None

    def batches(self) -> Batches | str:
        from .batches import Batches, without

        return without(self) or Batches(self)

    # Passes

    def prefill(self, tokens: Sequence[int]) -> Prefix:
        cache = self.caches.new()
        with self._reading() as features:
            logits = self._run([tokens], np.arange(len(tokens))[None], cache, keep=1)
        return Prefix(cache, len(tokens), logits[0, 0], features())

    def step(self, prefix: Prefix, token: int) -> tuple[torch.Tensor, Prefix]:
        cache = self.caches.fork(prefix.cache)
        with self._reading() as features:
            own = self.mixers == "own"
            with self._swapped(_ONE_ROW, None, self.family.calls) if own else contextlib.nullcontext():
                logits = self._run([[token]], np.full((1, 1), prefix.length), cache)[0, 0]
        return logits, Prefix(cache, prefix.length + 1, logits, features())

    def decode(self, prefix: Prefix, tree: DraftTree, *, batched: bool = False) -> torch.Tensor:
        return self._decode_levels(prefix, tree) if batched else super().decode(prefix, tree)

    def verify(self, prefix: Prefix, tree: DraftTree, wiring: Wiring | None) -> Verified:
        plan = (wiring or FORKED).plan(tree)  # mask and positions; the library's own recurrences take no plan
        cache = self.caches.for_rows(prefix.cache)
        verified = Verified(prefix, tree, plan if wiring else None, cache)
        positions = prefix.length + np.array(plan.positions)
        swapped = self._swapped(plan, verified, self._swappable if wiring else self.family.selects)
        with swapped, self._reading() as features:
            logits = self._run([tree.tokens], positions[None], cache, mask=self._mask(plan, prefix))
        verified.logits, verified.features = logits[0], features()
        return verified

    def commit(self, verified: Verified, node: int) -> Prefix:
        prefix, tree = verified.prefix, verified.tree
        path = tree.path(node)
        if verified.plan is None:
            if verified.ends and path == tuple(range(tree.n)):
                settled = self.caches.settle(self.caches.fork(verified.cache))
                return Prefix(settled, prefix.length + len(path), verified.logits[node])
            # The library keeps the state of the last row only, so a shorter accept is run again.
            chain = DraftTree.chain(tree.path_tokens(node))
            return self.commit(self.verify(prefix, chain, None), len(path) - 1)
        stored = verified.plan.commit[node]
        kept = tuple(verified.plan.commit[step] for step in path)
        cache = self.caches.fork(prefix.cache)
        self.caches.keep_rows(cache, verified.cache, kept, tree.n)
        for index in range(len(self.layers)):
            for state, inputs in verified.inputs.get(index, {}).items():
                window = self.caches.windows(cache, index)[state]
                place = verified.plan.windows(window.shape[-1])[stored : stored + 1]
                window.copy_(causal_conv.gather(window, inputs, place)[..., 0, :])
            if index in verified.scans:
                self.caches.state(cache, index).copy_(verified.scans[index].state(stored))
        return Prefix(cache, prefix.length + len(path), verified.logits[node])

    def contents(self, prefix: Prefix) -> tuple[int, list[dict[str, torch.Tensor]]]:
        ops = [{type(op) for branch in layer.branches for op in branch} for layer in self.layers]
        return prefix.length, [self.caches.contents(prefix.cache, layer, kinds) for layer, kinds in enumerate(ops)]

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> torch.Tensor:
        longest = max(map(len, paths))
        if any(len(path) != longest for path in paths):
            raise ValueError("forward: paths of different lengths; pad them on the right first")
        return self._run(paths, np.broadcast_to(np.arange(longest), (len(paths), longest)), None, keep=keep)

    @contextlib.contextmanager
    def watch(self, layers: Sequence[int]) -> Iterator[Watched]:
        watched = Watched()

        def keep(layer: int, output) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            watched.outputs[layer] = rows.detach()[0].flatten(1)  # models with several streams a row: side by side

        def keep_routes(layer: int, args: tuple) -> None:
            chosen = [x for x in args if isinstance(x, torch.Tensor) and not x.is_floating_point()]
            if chosen:
                watched.routes[layer] = chosen[0].detach().flatten(0, -2)

        with contextlib.ExitStack() as undo:
            if -1 in layers:
                hook = self._decoder.layers[0].register_forward_pre_hook(lambda _, args: keep(-1, args[0]))
                undo.callback(hook.remove)
            for index, layer in enumerate(self._decoder.layers):
                if index not in layers:
                    continue
                hook = layer.register_forward_hook(lambda _, __, output, index=index: keep(index, output))
                undo.callback(hook.remove)
                chosen = lambda _, args, named, index=index: keep_routes(index, (*args, *named.values()))  # noqa: E731
                for module in layer.modules():
                    if "Experts" in type(module).__name__:
                        undo.callback(module.register_forward_pre_hook(chosen, with_kwargs=True).remove)
            yield watched

    # For a drafter that reads the target

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def read_features(self, layers: Sequence[int]) -> None:
        self._features = tuple(layers)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        table = self.model.get_input_embeddings().weight
        return torch.nn.functional.embedding(torch.tensor(list(tokens), device=table.device), table)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Callable[[], torch.Tensor | None]]:
        """Give a function that returns the features [rows, d] of the pass made within, None if none are read."""
        if not self._features:
            yield lambda: None
            return
        with self.watch(self._features) as watched:
            yield lambda: torch.cat([watched.outputs[layer].to(self.device) for layer in self._features], dim=-1)

    def _decode_levels(self, prefix: Prefix, tree: DraftTree) -> torch.Tensor:
        cache, logits = self.caches.fork(prefix.cache), [None] * len(tree)
        before: tuple[int, ...] = (-1,)
        for depth, nodes in enumerate(tree.levels):
            index = torch.tensor([before.index(tree.parents[node]) for node in nodes], device=self.device)
            self.caches.reorder(cache, index)
            positions = np.full((len(nodes), 1), prefix.length + depth)
            rows = self._run([[tree.tokens[node]] for node in nodes], positions, cache)[:, 0]
            for node, row in zip(nodes, rows, strict=True):
                logits[node] = row
            before = nodes
        return torch.stack(logits)

    @torch.no_grad()
    def _run(self, tokens, positions: np.ndarray, cache, *, mask=None, keep: int = 0) -> torch.Tensor:
        """Run one forward pass; positions are always explicit. Return logits [batch, kept rows, vocabulary]."""
        lifted = KeepFloat64() if self.dtype == torch.float64 else contextlib.nullcontext()
        with lifted, ieee(), self.caches.running(cache):
            return self.model(
                input_ids=torch.tensor(np.asarray(tokens), dtype=torch.long, device=self.device),
                position_ids=torch.tensor(positions, dtype=torch.long, device=self.device),
                attention_mask=mask,
                use_cache=cache is not None,
                **{self.family.cache: cache},
                logits_to_keep=keep,
            ).logits

    def _mask(self, plan: Plan, prefix: Prefix):
        """Return the attention mask of a tree's rows behind `prefix`, in the form that the family takes."""
        if self.family.mask == "rows":  # a padding mask: what attention sees is chosen by functions that are swapped
            rows = torch.ones(1, plan.tree.n, dtype=torch.bool, device=self.device)
            return dict.fromkeys(("full_attention", "linear_attention", *self.family.layers), rows)
        return self._masks(lambda layer, window: visible(plan, self.caches.kept(prefix.cache, layer), window)[None])

    def _masks(self, view: Callable[[int, int | None], np.ndarray], padding: torch.Tensor | None = None):
        """Return masks by layer type, or the one that the family takes. view(layer, window): bool [b, rows, columns],
        what an attention layer sees; padding: bool [b, rows], False for rows that recurrent layers must pass over."""
        if self.family.mask == "none":
            return padding
        masks = dict.fromkeys(("full_attention", "linear_attention", *self.family.layers))
        for index, (kind, layer) in enumerate(zip(self._kinds, self.layers, strict=True)):
            ops = [op for branch in layer.branches for op in branch if isinstance(op, Attention)]
            if ops and masks[kind] is None:
                masks[kind] = self._as_mask(view(index, ops[0].window))
        if self.family.mask == "plain":
            return next(mask for mask in masks.values() if mask is not None)
        masks = {self.family.masks.get(kind, kind): mask for kind, mask in masks.items()}
        return {kind: padding if mask is None else mask for kind, mask in masks.items()}

    def _as_mask(self, mask: np.ndarray) -> torch.Tensor:
        """Return bool [b, rows, columns] in the form that the model's attention takes, [b, 1, rows, columns]."""
        mask = torch.tensor(mask, device=self.device)[:, None]
        if self.config._attn_implementation == "eager":
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)
        return mask

    # The swap

    @property
    def _swappable(self) -> dict[str, str]:
        return {**self.family.calls, **self.family.selects}

    def _place(self, name: str) -> tuple[Any, str]:
        """Return the module or class that holds a function of the family's tables ('function' or 'Class.method')."""
        owner, _, attribute = name.rpartition(".")
        return (getattr(self._module, owner, None) if owner else self._module), attribute

    @contextlib.contextmanager
    def _swapped(self, plan: Plan, record: Verified | None, names: Mapping[str, str]) -> Iterator[None]:
        """Run functions of the modelling module under `plan`; always put the originals back."""
        with _SWAP, contextlib.ExitStack() as undo:
            originals = {name: getattr(*self._place(name)) for name in names}
            swap = Swap(plan, record, self.caches, originals)
            for index, layer in enumerate(self._decoder.layers):
                undo.callback(layer.register_forward_pre_hook(lambda *_, index=index: swap.enter(index)).remove)
            for name, adapter in names.items():
                undo.callback(setattr, *self._place(name), originals[name])
                # No partial: it would not become a method where it takes a method's place.
                setattr(*self._place(name), lambda *args, run=ADAPTERS[adapter], **named: run(swap, *args, **named))
            yield


def _resolved(function) -> str:
    """Return what a recurrent name really runs: packages such as fla or causal_conv1d take its place without a word."""
    variables = inspect.getclosurevars(
        inspect.unwrap(function, stop=lambda f: "implementation" in f.__code__.co_freevars)
    )
    target = variables.nonlocals.get("implementation", function)
    return f"{target.__module__}.{target.__qualname__}"
