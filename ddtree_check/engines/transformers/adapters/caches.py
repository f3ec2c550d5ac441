"""Where a family keeps its keys and its recurrent states, so that the engine can fork, reorder and commit them.

Every class answers the same questions; `CACHES` gives each the name that the family rows use.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache

from ....base.errors import Unsupported
from ....model.wiring import Attention, Conv, State

KEYS = ("keys", "values")


class HybridCaches:
    """The library's one cache for all: a layer holds keys, `conv_states` (windows), `recurrent_states`, or some."""

    def __init__(self, model, config):
        self.model, self.config = model, config

    def new(self):
        cache = DynamicCache(config=self.config)
        for index, layer in enumerate(cache.layers):
            if not any(hasattr(layer, name) for name in ("keys", "conv_states")):
                raise Unsupported(
                    f"layer {index} ({type(layer).__name__}) holds neither keys nor states; its fork cannot be checked"
                )
        return cache

    def fork(self, cache):
        """Return a cache that goes on by itself: states and windows, written in place, are copied; keys are shared,
        because appending to them makes new tensors."""
        fork = copy.copy(cache)
        fork.layers = []
        for layer in cache.layers:
            twin = copy.copy(layer)
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(twin, name, {key: _copied(item) for key, item in value.items()})
            fork.layers.append(twin)
        return fork

    def for_rows(self, cache):
        """Return a fork for a pass over a tree: sliding layers keep every row, for the commit to choose from."""
        fork = self.fork(cache)
        for layer in fork.layers:
            if getattr(layer, "is_sliding", False):
                layer.record_past = True
        return fork

    @contextlib.contextmanager
    def running(self, cache) -> Iterator[None]:
        """Hold for the length of one forward pass on `cache` (None: without a cache)."""
        yield

    def reorder(self, cache, index: torch.Tensor) -> None:
        cache.reorder_cache(index)
        if getattr(cache, "position_ids", None) is not None:  # Qwen4-exp: positions of all keys, [3, batch, keys]
            cache.position_ids = cache.position_ids[:, index]

    def keep_rows(self, cache, full, rows: Sequence[int], count: int) -> None:
        """Append to `cache` the keys of some of the last `count` rows of `full`."""
        for layer, source in zip(cache.layers, full.layers, strict=False):
            if getattr(source, "keys", None) is None or not source.keys.numel():
                continue
            layer.keys, layer.values = (_rows(x, rows, count, -2) for x in (source.keys, source.values))
            if getattr(source, "indexer_keys", None) is not None:
                layer.indexer_keys = _rows(source.indexer_keys, rows, count, 1)
            if getattr(layer, "is_sliding", False):
                layer.cumulative_length += len(rows)
                self.trim(layer)
        if getattr(full, "position_ids", None) is not None:
            cache.position_ids = _rows(full.position_ids, rows, count, -1)

    def trim(self, layer) -> None:
        """Drop the keys that a sliding layer of the library no longer holds between passes."""
        layer.record_past = False
        first = max(0, layer.keys.shape[-2] - layer.sliding_window + 1)
        layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
        for state, width in getattr(layer, "conv_kernel_size", {}).items():
            if layer.conv_states[state] is not None:
                layer.conv_states[state] = layer.conv_states[state][..., -width:]

    def settle(self, cache):
        """Return what a cache that `for_rows` made is once its last row is committed."""
        for layer in cache.layers:
            if getattr(layer, "is_sliding", False) and getattr(layer, "keys", None) is not None:
                self.trim(layer)
        return cache

    def kept(self, cache, layer: int) -> int:
        """Return how many of the committed keys an attention layer still holds."""
        keys = getattr(cache.layers[layer], "keys", None)
        return keys.shape[-2] if keys is not None and keys.numel() else 0

    def join(self, caches: Sequence, padding: str):
        """Return one cache of several requests, made by `for_rows`, and the keys of each, [layers][requests].

        Shorter keys are padded with zeros on the `padding` side, left or right.
        """
        whole, kept = self.for_rows(caches[0]), []
        for index, layer in enumerate(whole.layers):
            layers = [cache.layers[index] for cache in caches]
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    parts = {key: [getattr(other, name)[key] for other in layers] for key in value}
                    setattr(layer, name, {key: _joined(items) for key, items in parts.items()})
            kept.append([self.kept(cache, index) for cache in caches])
            if max(kept[-1]):
                for name in KEYS:
                    padded = [_padded(getattr(other, name), max(kept[-1]), padding) for other in layers]
                    setattr(layer, name, torch.cat(padded))
        return whole, kept

    def part(self, whole, request: int, columns: Sequence[Sequence[int]], length: int):
        """Return one request of a joined cache after `length` tokens; columns [layers][...]: which keys are its."""
        part = self.for_rows(whole)
        for layer, keep in zip(part.layers, columns, strict=True):
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, {key: _of_request(item, request) for key, item in value.items()})
            if getattr(layer, "keys", None) is not None and layer.keys.numel():
                index = torch.tensor(list(keep), dtype=torch.long, device=layer.keys.device)
                for name in KEYS:
                    setattr(layer, name, getattr(layer, name)[request : request + 1].index_select(-2, index))
            if getattr(layer, "is_sliding", False):
                layer.cumulative_length = length
        return part

    def windows(self, cache, layer: int):
        """Return the convolution windows [1, d, c] of a layer by number; they may be written in place."""
        return cache.layers[layer].conv_states

    def state(self, cache, layer: int) -> torch.Tensor:
        """Return the recurrent state of a layer; it may be written in place."""
        return cache.layers[layer].recurrent_states[0]

    def contents(self, cache, layer: int, ops: set[type]) -> dict[str, torch.Tensor]:
        """Return what a layer with these `ops` carries: keys, values [rows, d], windows [columns, d], a state."""
        carried = {}
        if Attention in ops:
            carried |= {name: getattr(cache.layers[layer], name)[0].transpose(0, 1).flatten(1) for name in KEYS}
            if getattr(cache.layers[layer], "indexer_keys", None) is not None:
                carried["indexer_keys"] = cache.layers[layer].indexer_keys[0].flatten(1)
        if Conv in ops:
            for number, x in self.windows(cache, layer).items():
                if x is not None:
                    carried[f"conv.{number}" if number else "conv"] = x[0].movedim(-1, 0).flatten(1)
        if State in ops:
            carried["recurrent"] = self.state(cache, layer)[0]
        return carried


class MiniMaxCaches(HybridCaches):
    """MiniMax: a cache class of its own, with the lightning states in a list beside the layers."""

    def new(self):
        return sys.modules[type(self.model).__module__].MiniMaxCache()

    def fork(self, cache):
        fork = super().fork(cache)
        fork.linear_cache = [_copied(state) for state in cache.linear_cache]
        return fork

    def reorder(self, cache, index: torch.Tensor) -> None:
        super().reorder(cache, index)  # the library's own leaves the lightning states where they are
        states = cache.linear_cache
        cache.linear_cache = [state[index] if isinstance(state, torch.Tensor) else state for state in states]

    def state(self, cache, layer: int) -> torch.Tensor:
        return cache.linear_cache[layer]


class ModuleCaches(HybridCaches):
    """RecurrentGemma: keys in a cache, windows and states on the modules. Here the cache carries them over."""

    def new(self):
        cache = super().new()
        cache.held = {}
        for index, block in self._blocks():
            weight = block.linear_x.weight
            window = weight.new_zeros(1, block.lru_width, block.conv1d_width - 1)
            wide = torch.promote_types(weight.dtype, torch.float32)
            cache.held[index] = {"conv1d_state": window, "state": weight.new_zeros(1, block.lru_width, dtype=wide)}
        return cache

    def fork(self, cache):
        fork = super().fork(cache)
        fork.held = {layer: {name: _copied(x) for name, x in states.items()} for layer, states in cache.held.items()}
        return fork

    @contextlib.contextmanager
    def running(self, cache) -> Iterator[None]:
        states = cache.held if cache is not None else {}
        for index, block in self._blocks():
            mine = states.get(index, {"conv1d_state": None, "state": None})
            block.conv1d_state, block.rg_lru.recurrent_states = mine["conv1d_state"], mine["state"]
        try:
            yield
        finally:
            for index, block in self._blocks():
                if index in states:
                    states[index] = {"conv1d_state": block.conv1d_state, "state": block.rg_lru.recurrent_states}
                block.conv1d_state = block.rg_lru.recurrent_states = None

    def reorder(self, cache, index: torch.Tensor) -> None:
        super().reorder(cache, index)
        cache.held = {layer: {name: x[index] for name, x in states.items()} for layer, states in cache.held.items()}

    def windows(self, cache, layer: int):
        return {0: cache.held[layer]["conv1d_state"]}

    def state(self, cache, layer: int) -> torch.Tensor:
        return cache.held[layer]["state"]

    def _blocks(self):
        layers = ((index, layer.temporal_block) for index, layer in enumerate(self.model.get_decoder().layers))
        return [(index, block) for index, block in layers if hasattr(block, "rg_lru")]


CACHES = {"hybrid": HybridCaches, "minimax": MiniMaxCaches, "modules": ModuleCaches}


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def _joined(items: Sequence):
    return torch.cat(items) if isinstance(items[0], torch.Tensor) else items[0]


def _of_request(item, request: int):
    return item[request : request + 1].clone() if isinstance(item, torch.Tensor) and item.ndim else item


def _padded(keys: torch.Tensor, longest: int, padding: str) -> torch.Tensor:
    blank = keys.new_zeros(*keys.shape[:-2], longest - keys.shape[-2], keys.shape[-1])
    return torch.cat([blank, keys] if padding == "left" else [keys, blank], dim=-2)


def _rows(x: torch.Tensor, rows: Sequence[int], count: int, dim: int) -> torch.Tensor:
    """Return what stood before the last `count` rows, and the rows chosen among them."""
    before = x.shape[dim] - count
    index = torch.cat([torch.arange(before), torch.tensor(list(rows)) + before]).to(x.device)
    return x.index_select(dim, index)
