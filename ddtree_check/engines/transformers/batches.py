"""Several requests in one pass of the transformers engine: each row of the batch has its own prompt and tree."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...model.wiring import FORKED, Plans, Wiring
from ...tree.draft_tree import DraftTree
from .passes import Prefix, Verified, visible

STANDS_IN = ("conv", "conv_update", "gated_delta", "mamba2", "mamba2_update", "training_only")  # take several requests
IDLE = 0  # the token of rows and requests that only fill a batch


def without(engine) -> str | None:
    """Return why an engine has no passes over several requests, or None."""
    single = sorted({*engine.family.calls.values(), *engine.family.selects.values()} - set(STANDS_IN))
    if single:
        return f"{engine.family.title}: the stand-in for {', '.join(single)} takes one request at a time"
    if engine.family.keeps != "hybrid":
        return f"{engine.family.title} keeps its states outside of the common cache, which cannot be joined"
    return "our mixers throughout take one request at a time" if engine.mixers == "own" else None


@dataclass(frozen=True, eq=False)
class Row:
    """One request's share of what a layer's scan gives, with the batch of 1 that a commit expects."""

    scan: Any
    request: int

    def state(self, node: int) -> torch.Tensor:
        return self.scan.state(node)[self.request : self.request + 1]


class Batches:
    """Passes over several requests, each as the engine's own of one; see `contract.Batches`."""

    def __init__(self, engine):
        self.engine, self.caches = engine, engine.caches

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, padding: str = "left", width: int | None = None
    ) -> list[Prefix]:
        # Left: the library's own pass, with the mask that tells its recurrent layers which columns to pass over. Right:
        # its recurrences would run on through the padding, so after each first token our mixers take over, and the
        # states at each prompt's own last row are kept.
        longest = max(width or 0, *map(len, prompts))
        if padding == "right":
            return self._prefill_right(prompts, longest)
        engine, blank = self.engine, [longest - len(prompt) for prompt in prompts]
        tokens = [[IDLE] * gap + list(prompt) for gap, prompt in zip(blank, prompts, strict=True)]
        positions = np.stack([np.maximum(np.arange(longest) - gap, 0) for gap in blank])
        real = np.stack([np.arange(longest) >= gap for gap in blank])
        within = np.arange(longest)[:, None] - np.arange(longest)

        def seen(_, window):
            before = (within >= 0) & (within < (window or longest))
            return before & real[:, None, :] | np.eye(longest, dtype=bool)  # a row that sees nothing would be NaN

        mask = torch.tensor(real, device=engine.device) if not real.all() else None
        whole = self.caches.new()
        logits = engine._run(tokens, positions, whole, mask=engine._masks(seen, mask), keep=1)
        made, kept = [], [self.caches.kept(whole, layer) for layer in range(len(whole.layers))]
        for request, prompt in enumerate(prompts):
            columns = [range(max(0, keys - len(prompt)), keys) for keys in kept]
            part = self.caches.settle(self.caches.part(whole, request, columns, len(prompt)))
            made.append(Prefix(part, len(prompt), logits[request, 0]))
        return made

    def _prefill_right(self, prompts: Sequence[Sequence[int]], longest: int) -> list[Prefix]:
        made = self.prefill([prompt[:1] for prompt in prompts])
        chains = {request: DraftTree.chain(prompt[1:]) for request, prompt in enumerate(prompts) if len(prompt) > 1}
        if chains:
            before = [made[request] for request in chains]
            passes = self.verify(before, list(chains.values()), FORKED, padding="right", rows=longest - 1)
            for (request, chain), verified in zip(chains.items(), passes, strict=True):
                made[request] = self.engine.commit(verified, len(chain) - 1)
        return made

    def step(
        self, prefixes: Sequence[Prefix], tokens: Sequence[int], *, padding: str = "left"
    ) -> list[tuple[torch.Tensor, Prefix]]:
        chains = [DraftTree.chain([token]) for token in tokens]
        passes = self.verify(prefixes, chains, None, padding=padding)
        return [(verified.logits[0], self.engine.commit(verified, 0)) for verified in passes]

    def verify(
        self,
        prefixes: Sequence[Prefix],
        trees: Sequence[DraftTree],
        wiring: Wiring | None,
        *,
        padding: str = "left",
        rows: int | None = None,
        idle: int = 0,
    ) -> list[Verified]:
        engine, count = self.engine, max(rows or 0, *map(len, trees))
        filled = [_filled(tree, count) for tree in trees]
        starts = list(prefixes)
        if idle:
            filled += [DraftTree.chain([IDLE] * count)] * idle
            starts += [engine.prefill([IDLE])] * idle
        plans = Plans(tuple((wiring or FORKED).plan(tree) for tree in filled))
        whole, kept = self.caches.join([prefix.cache for prefix in starts], padding)
        record = Verified(starts[0], filled[0], None, whole)
        positions = np.stack(
            [start.length + np.array(plan.positions) for start, plan in zip(starts, plans.requests, strict=True)]
        )

        def seen(layer, window):
            longest = max(kept[layer])
            made = np.zeros((len(filled), count, longest + count), dtype=bool)
            for request, (plan, keys) in enumerate(zip(plans.requests, kept[layer], strict=True)):
                made[request][:, _columns(longest, keys, count, padding)] = visible(plan, keys, window)
            return made

        names = engine._swappable if wiring else engine.family.selects
        with engine._swapped(plans, record, names) if names else contextlib.nullcontext():
            logits = engine._run([tree.tokens for tree in filled], positions, whole, mask=engine._masks(seen))
        made = []
        for request, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
            n = tree.n
            columns = [_columns(max(keys), keys[request], n, padding) for keys in kept]
            inputs = {
                layer: {number: x[request : request + 1, :, :n] for number, x in rows_by_number.items()}
                for layer, rows_by_number in record.inputs.items()
            }
            cache = self.caches.part(whole, request, columns, prefix.length + n)
            plan = wiring.plan(tree) if wiring else None
            scans = {layer: Row(scan, request) for layer, scan in record.scans.items()}
            made.append(Verified(prefix, tree, plan, cache, logits[request, :n], scans, inputs, ends=n == count))
        return made

    def reorder(self, prefixes: Sequence[Prefix], order: Sequence[int]) -> list[Prefix]:
        """Return the requests of one joined cache in another order, by the library's own permutation."""
        whole, kept = self.caches.join([prefix.cache for prefix in prefixes], "left")
        self.caches.reorder(whole, torch.tensor(list(order), device=self.engine.device))
        moved = []
        for place, request in enumerate(order):
            before = prefixes[request]
            columns = [_columns(max(keys), keys[request], 0, "left") for keys in kept]
            part = self.caches.settle(self.caches.part(whole, place, columns, before.length))
            moved.append(Prefix(part, before.length, before.logits))
        return moved


def _filled(tree: DraftTree, rows: int) -> DraftTree:
    """Return the tree with a chain of its last token behind its last node, up to so many rows."""
    more = rows - tree.n
    return DraftTree((*tree.tokens, *tree.tokens[-1:] * more), (*tree.parents, *range(tree.n - 1, rows - 1)))


def _columns(longest: int, kept: int, rows: int, padding: str) -> list[int]:
    """Return the columns of a joined cache that hold `kept` keys of a request, and `rows` rows behind them."""
    first = longest - kept if padding == "left" else 0
    return [*range(first, first + kept), *range(longest, longest + rows)]
