"""Runs that are equal to autoregressive decoding by construction: what they differ by is noise, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ..judge.differences import Differences, join, measure
from ..model.wiring import Wiring
from ..tree.draft_tree import DraftTree
from ..tree.paths import Path, leaf_paths, padded_chain

FORWARD_TOKENS = 8192  # tokens in one batch of full forward passes


def spread(paths: Sequence[Path], parts: Sequence[Differences], nodes: int):
    """Parts (one a path, its owned nodes) back in node order, which nodes were measured, bool [nodes], and where in the
    parts each node stands, int [nodes]."""
    order = [path.nodes[place] for path in paths for place in path.owned]
    joined = join(parts)
    where = np.zeros(nodes, dtype=int)
    where[order] = np.arange(len(order))
    measured = np.zeros(nodes, dtype=bool)
    measured[order] = True
    return joined[where], measured, where


def chain_run(
    engine,
    prefix,
    tree: DraftTree,
    reference: torch.Tensor,
    wiring: Wiring | None,
    *,
    limit: int | None = None,
    exact=None,
    sink: Callable | None = None,
) -> tuple[Differences, np.ndarray, np.ndarray | None]:
    """Every root-to-leaf path as a chain as wide as the tree, against `reference` [n, vocabulary].

    wiring None: the engine's own multi-token pass (mode `linear`, control E_pad); FORKED: its tree path (E_chain).
    limit: run so many paths only. exact: an oracle's logits [n, vocabulary]. sink(nodes, logits) is given every row.
    Returns (Differences [n], measured bool [n], absolute errors [n] or None); a node that was not measured holds
    another node's figures.
    """
    paths = leaf_paths(tree, limit)
    parts, errors = [], []
    for path in paths:
        chain = padded_chain(tree, path.nodes, tree.n)
        logits = engine.verify(prefix, chain, wiring).logits[list(path.owned)]
        nodes = [path.nodes[place] for place in path.owned]
        if sink:
            sink(nodes, logits)
        parts.append(measure(reference[nodes], logits))
        errors.append(absolute(None if exact is None else exact[nodes], logits))
    found, measured, where = spread(paths, parts, len(tree))
    return found, measured, None if exact is None else np.concatenate(errors)[where]


def absolute(exact: torch.Tensor | None, logits: torch.Tensor) -> np.ndarray | None:
    """Largest centred |difference| [n] of logits to an oracle's, which may be wider; None without an oracle."""
    return None if exact is None else measure(exact, logits.to(exact)).max_abs


def forward_run(
    engine,
    prompt: Sequence[int],
    tree: DraftTree,
    reference: torch.Tensor,
    *,
    limit: int | None = None,
    sink: Callable | None = None,
) -> Differences:
    """Every root-to-leaf path, or `limit` of them, by a full forward pass without a cache, in batches padded on the
    right. A node that was not measured holds another node's figures."""
    paths = leaf_paths(tree, limit)
    parts = []
    for batch in _batches(paths, len(prompt)):
        longest = max(len(path.nodes) for path in batch)
        tokens = []
        for path in batch:
            own = [tree.tokens[node] for node in path.nodes]
            tokens.append([*prompt, *own, *own[-1:] * (longest - len(own))])
        logits = engine.forward(tokens, longest)
        for path, rows in zip(batch, logits, strict=True):
            owned = list(path.owned)
            nodes = [path.nodes[place] for place in owned]
            if sink:
                sink(nodes, rows[owned])
            parts.append(measure(reference[nodes], rows[owned]))
    return spread(paths, parts, len(tree))[0]


def repeat_run(
    engine, prefix, tree: DraftTree, reference: torch.Tensor, *, batched: bool = False, sink: Callable | None = None
) -> Differences:
    """Decoding once more, which must give the same: the path to the deepest node, or all nodes if `batched`."""
    if batched:
        again = engine.decode(prefix, tree, batched=True)
        if sink:
            sink(range(len(tree)), again)
        return measure(reference, again)
    return strict_run(engine, prefix, tree, reference, sink=sink)


def strict_run(
    engine, prefix, tree: DraftTree, reference: torch.Tensor, *, sink: Callable | None = None
) -> Differences:
    """The path to the deepest node by one-token steps at batch 1, nodes in path order."""
    path = list(tree.path(max(range(len(tree)), key=lambda node: tree.depth[node])))
    again = engine.decode(prefix, padded_chain(tree, path))
    if sink:
        sink(path, again)
    return measure(reference[path], again)


def _batches(paths: Sequence[Path], prompt: int) -> Iterator[list[Path]]:
    batch: list[Path] = []
    for path in paths:
        longest = max(len(held.nodes) for held in [*batch, path])
        if batch and (prompt + longest) * (len(batch) + 1) > FORWARD_TOKENS:
            yield batch
            batch = []
        batch.append(path)
    yield batch
