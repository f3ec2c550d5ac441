"""Judge an engine without plain decoding by its exact checks alone; its `pass` is no comparison with decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ..base.conclusion import DEFECT, INCONCLUSIVE, PASS, Conclusion
from ..base.errors import UsageError
from ..base.files import record_head
from ..base.words import counted
from ..judge.differences import digests, measure
from ..judge.exact import OPEN, Exact, summary
from ..judge.nodes import judged_as
from ..judge.rule import EXACT
from ..model.wiring import FORKED
from ..tree.case import Case, check_vocab
from ..tree.paths import leaf_paths
from ..tree.variants import front_chain
from .drafting import draft_cases
from .exact import exact_run
from .passes import attempt
from .settings import Item, Settings

SCHEMA = "ddtree-check/exact/1"
CODES = {"pass": PASS, "fail": DEFECT, "open": INCONCLUSIVE}


def needs_decoding(reason: str, parts: Mapping[str, object]) -> None:
    """Raise UsageError naming the first of these options that was given. reason: why there is no plain decoding."""
    for name, value in parts.items():
        if value:
            raise UsageError(f"{name}: is judged by plain decoding, but {reason}; leave it out")


def check_bits(
    engine, items: Sequence[Item], settings: Settings, reason: str, *, model: dict, progress: Callable | None = None
) -> dict:
    """Return the record of the exact checks of every item's trees, schema `ddtree-check/exact/1`.

    In float32 and float64 a row's bits may depend on its place; there a row within the rule's `rounding` of its path
    as a chain is right, and one beyond it is a defect. reason: why there is no plain decoding. The `self` draft needs
    it, so that n-grams of the prompt take its place. Raises UsageError where the exact checks are off.
    """
    if settings.exact == "off":
        raise UsageError(f"exact: got off, but {reason}; nothing is left to judge by: take --exact leaves")
    settings = replace(settings, draft="ngram") if settings.draft == "self" else settings
    described, conclusion, cases, every = engine.describe(), Conclusion(), [], []
    for place, item in enumerate(items):
        if progress is not None:
            progress(place, len(items), item.id)
        prefix = engine.prefill(item.tokens)
        for case in draft_cases(engine, prefix, item, settings):
            check_vocab(case, engine.vocab_size)
            exact, chain = _checked(engine, prefix, case, settings, judged_as(described))
            value, text = _value(exact, chain)
            conclusion.add(CODES[value], *([] if value == "pass" else [f"{case.id}: {text}"]))
            every.append(exact)
            modes = {"tree_forked": {"verdict": "inconclusive" if value == "open" else value, "reason": text}}
            cases.append(case.to_json() | {"exact": exact.to_json(), "chain": chain, "modes": modes, "nodes": []})
    head = record_head(SCHEMA, described) | {"model": model, "settings": settings.to_json(), "reason": reason}
    return conclusion.into(head | {"cases": cases, "exact": summary(every, "not certified")})


def _checked(engine, prefix, case: Case, settings: Settings, dtype: str) -> tuple[Exact, dict]:
    """Return the exact checks of one tree, and how far its rows are from their paths as chains, in a row's std."""
    tree, chains = case.tree, {}
    forked = engine.verify(prefix, tree, FORKED).logits
    for path in (path.nodes for path in leaf_paths(tree)):
        rows = engine.verify(prefix, front_chain(tree, path), FORKED).logits
        chains |= {node: rows[row].clone() for row, node in enumerate(path)}
    chained = torch.stack([chains[node] for node in range(len(tree))])
    apart = measure(chained, forked)
    share = np.divide(apart.max_abs, apart.std, out=np.zeros_like(apart.std), where=apart.max_abs > 0)
    exact, refusal = attempt(None, lambda: exact_run(
        engine, prefix, tree, control=settings.control if engine.supports(settings.control) is None else None,
        rows=digests(forked), chains=dict(enumerate(digests(chained))), prompt=case.prompt_tokens,
        how=settings.exact, precise=dtype in EXACT, seed=settings.seed,
    ))  # fmt: skip
    bound = settings.rule.rounding[dtype] if dtype in EXACT else None
    exact = exact or Exact.refused(len(tree), refusal)
    left = exact.of(OPEN) if bound is not None and exact.influence.claimed else ()
    beyond = [node for node in left if not share[node] <= bound]
    return exact, {
        "bound": bound,
        "largest": float(share.max()) if np.isfinite(share).all() else None,
        "near": len(left) - len(beyond),
        "beyond": beyond,
    }


def _value(exact: Exact, chain: dict) -> tuple[str, str]:
    """Return pass, fail or open of one tree, and its reason."""
    if exact.verdict == "fail":
        return "fail", exact.reason
    if exact.law is not None and not exact.law.kept:
        return "fail", f"the control, with other foreign tokens: {exact.law}"
    if beyond := chain["beyond"]:
        text = f"node {beyond[0]} is further than {chain['bound']:g} of its row's std from its path as a chain"
        return "fail", f"{text}; in all {counted(len(beyond), 'node')}"
    if exact.verdict == "pass" or (chain["near"] and chain["near"] == len(exact.of(OPEN))):
        return "pass", exact.reason
    return "open", exact.reason
