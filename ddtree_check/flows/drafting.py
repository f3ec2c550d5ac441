"""The trees behind a prompt: given, recorded, or drafted by one of the sources that the settings name."""

from __future__ import annotations

import hashlib

import numpy as np

from ..base.errors import Unsupported, UsageError
from ..judge.sampling.processing import Sampler
from ..tree.case import Case
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import best_first, expected_accepts, published_tree
from ..tree.drafts.marginals import ngram_marginals, self_marginals
from ..tree.drafts.recorded import Marginals, recorded_tree
from .settings import Item, Settings


def draft_cases(engine, prefix, item: Item, settings: Settings) -> list[Case]:
    root = Sampler(settings.sampling, settings.seed, item.tokens).pick(prefix.logits, ())
    source = {"draft": settings.draft, "order": settings.order, "seed": settings.seed}
    if item.tree is not None:
        tree = item.tree if item.tree.tokens[0] is not None else item.tree.with_root(root)
        return [Case(f"{item.id}/tree", item.tokens, tree, {"draft": "file"})]
    if isinstance(item.recorded, DraftTree):
        trees = {len(item.recorded) - 1: recorded_tree(item.recorded, engine.vocab_size, len(item.recorded), root)}
        expected = {}
    else:
        trees, expected = {}, {}
        log_probs = _marginals(engine, prefix, item, settings, root)
        for budget in settings.budgets if settings.shape is None else [settings.shape]:
            trees[budget] = draft_tree(log_probs, settings, budget, root)
            expected[budget] = {"expected": expected_accepts(log_probs, trees[budget])}
    cases = []
    for budget, tree in trees.items():
        if settings.order != "heap":
            tree, _ = tree.reordered(settings.order)
        own = {"budget": budget} if settings.shape is None else {"tree": budget, "budget": len(tree) - 1}
        cases.append(Case(f"{item.id}/{budget}", item.tokens, tree, source | own | expected.get(budget, {})))
    return cases


def draft_tree(log_probs: np.ndarray, settings: Settings, budget: int | str, root: int) -> DraftTree:
    """The tree that the settings make of marginals [L, vocabulary], in heap or breadth-first order."""
    if settings.shape is not None:
        return published_tree(log_probs, settings.shape, root)
    return best_first(log_probs, budget, root=root, candidates=settings.candidates)


def _marginals(engine, prefix, item: Item, settings: Settings, root: int) -> np.ndarray:
    """Draft log probabilities [length, vocabulary] for the positions after the root."""
    if isinstance(item.recorded, Marginals):
        return item.recorded.dense(engine.vocab_size)
    if settings.draft == "ngram":
        return ngram_marginals((*item.tokens, root), settings.length, engine.vocab_size)
    if settings.draft == "dflash":
        return from_drafter(engine, item, prefix.features, root, settings.length)
    # The target's own distributions along its text, with some of its choices moved down: no drafter needed.
    sampler, rows, text = Sampler(settings.sampling, settings.seed, item.tokens), [], [root]
    for _ in range(settings.length):
        logits, prefix = engine.step(prefix, text[-1])
        text.append(sampler.pick(logits, text))
        rows.append(sampler.favour(logits, text[-1]))
    return stand_in(np.stack(rows), settings, item.id)


def from_drafter(engine, item: Item, features, root: int, length: int) -> np.ndarray:
    """The item's drafter's marginals [at most `length`, vocabulary] behind the features of all committed tokens."""
    if item.drafter is None:
        raise UsageError("draft: got dflash without a drafter, expected one that was loaded for this model")
    return item.drafter.marginals(engine, features, root, min(length, item.drafter.length))


def stand_in(rows: np.ndarray, settings: Settings, prompt: str, *place: int) -> np.ndarray:
    """The `self` draft from the target's own logits [L, vocabulary]; its errors are drawn for this prompt and place.

    Raises Unsupported for logits that are not all finite.
    """
    if not np.isfinite(rows).all():
        raise Unsupported(f"prompt {prompt}: the model's logits are not all finite; try another --dtype")
    key = " ".join(map(str, (settings.seed, prompt, *place)))
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    share = settings.acceptance  # a drafter is taken to be as sure as it is right
    return self_marginals(rows, share, int.from_bytes(digest, "big"), sureness=share)
