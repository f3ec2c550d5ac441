"""Commit paths by force on an engine, and judge what each commit left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch

from ..base.errors import Unsupported
from ..engines.contract import walk
from ..judge.commit import STEPS, Accept, Commit, Judge, Left, Part, Standard, words
from ..judge.nodes import judged_as
from ..judge.rule import Rule
from ..model.wiring import Wiring, contaminated, wirings
from ..tree.accept import accept_nodes
from ..tree.draft_tree import DraftTree
from ..tree.paths import leaf_paths, leaves_first_branch, padded_chain

# Runs


def commit_runs(
    engine, prompt: Sequence[int], prefix, tree: DraftTree, patterns, wirings: Mapping[str, Wiring | None], rule: Rule,
    sink: Callable | None = None,
) -> list[Accept]:  # fmt: skip
    """Commits the paths that `patterns` name under each wiring (None: the engine's own pass along a chain).

    The reference of each is `prefill(prompt + path)`; noise comes from plain steps along the path and from the same
    commit along a chain as wide as the tree. What the engine refuses is `unsupported` with its reason, for that mode
    alone. sink(mode, path, left, probe, pattern) is given all that was stored, mode of trace.COMMITS. Raises UsageError
    for a path that the tree does not have.
    """
    described, nodes = engine.describe(), accept_nodes(tree, patterns)
    dtype = judged_as(described)
    verified = {mode: engine.verify(prefix, tree, wiring) for mode, wiring in wirings.items() if wiring is not None}
    dirty = {mode: contaminated(w.plan(tree), engine.layers) for mode, w in wirings.items() if w is not None}
    accepts, keep = [], sink or (lambda *_: None)
    if nodes and sink:
        with contextlib.suppress(Unsupported):
            keep("prefill", (), Left(engine.contents(prefix)), (), "before")
    for node, pattern in nodes.items():
        path = tree.path(node)
        expected = frozenset(mode for mode, found in dirty.items() if node in found)
        try:
            standard = gather(engine, prompt, prefix, tree, node)
        except Unsupported as error:
            modes = {mode: Commit("unsupported", str(error)) for mode in wirings}
        else:
            for name, left in (("prefill", standard.reference), ("ar", standard.steps), *standard.chains.items()):
                keep(name, path, left, standard.probe, pattern)
            judge_path = Judge(path, standard, rule, dtype, kept=described.get("state_dtype"))
            modes = {}
            for mode in wirings:
                try:
                    left = _left(engine, verified.get(mode), node, mode, standard)
                except Unsupported as error:
                    modes[mode] = Commit("unsupported", str(error))
                    continue
                if mode in verified:
                    keep(mode, path, left, standard.probe, pattern)
                modes[mode] = judge_path.commit(
                    left, own=mode not in verified, expected=mode in expected, search=_searcher(engine, prefix, tree)
                )
        aside = leaves_first_branch(tree, path)
        accepts.append(Accept(pattern, node, path, aside, modes, expected))
    return accepts


def _left(engine, verified, node: int, mode: str, standard: Standard) -> Left:
    """What a mode's commit left; verified: its tree pass, None for the engine's own along the chain."""
    if verified is not None:
        return _probed(engine, engine.commit(verified, node), standard.probe)
    if mode in standard.refused:
        raise Unsupported(standard.refused[mode])
    return standard.chains[mode]


def gather(
    engine, prompt: Sequence[int], prefix, tree: DraftTree, node: int, probe: Sequence[int] | None = None
) -> Standard:
    """What commits of the path to a node are judged by, from a live engine. prefix: after `prompt`. probe: tokens to
    feed after each; None for what plain decoding says. Raises Unsupported for an engine that shows no contents."""
    path, rows = tree.path(node), len(tree)
    fresh = engine.prefill([*prompt, *tree.path_tokens(node)])
    contents = engine.contents(fresh)
    if probe is None:
        tokens, logits, stepped = [], fresh.logits, fresh
        for place in range(STEPS):
            tokens.append(int(logits.argmax()))
            if place < STEPS - 1:
                logits, stepped = engine.step(stepped, tokens[-1])
        probe = tuple(tokens)
    stepped = prefix
    for token in tree.path_tokens(node):
        _, stepped = engine.step(stepped, token)
    chains, refused = {}, {}
    for name in ("linear", "chain"):
        wiring = wirings()[name]
        try:
            if reason := engine.supports(wiring):
                raise Unsupported(reason)
            nodes, wide = path, rows
            if wiring is None:  # by the engine's own pass over a leaf path
                nodes = next(found.nodes for found in leaf_paths(tree) if node in found.nodes)
                wide = len(nodes)
            run = engine.verify(prefix, padded_chain(tree, nodes, wide), wiring)
            chains[name] = _probed(engine, engine.commit(run, len(path) - 1), probe)
        except Unsupported as error:
            refused[name] = str(error)
    reference = Left(contents, _rows(engine, fresh, probe))
    return Standard(reference, _probed(engine, stepped, probe), chains, refused, tuple(probe))


def _probed(engine, prefix, probe: Sequence[int]) -> Left:
    return Left(engine.contents(prefix), _rows(engine, prefix, probe))


def _rows(engine, prefix, probe: Sequence[int]) -> torch.Tensor | None:
    rows = []
    for token in probe:
        logits, prefix = engine.step(prefix, token)
        rows.append(logits)
    return torch.stack(rows) if rows else None


def _searcher(engine, prefix, tree: DraftTree) -> Callable:
    """Words for each part that is off. Costs a decode step a node, so it is only done for what failed."""

    def search(judge: Judge, found: Left, bad) -> tuple[tuple[Part, float, str], ...]:
        standing = ((node, engine.contents(after)) for node, _, after in walk(engine, prefix, tree))
        return words(judge, engine.contents(prefix), found, bad, standing)

    return search
