"""Judge an engine that has no plain decoding by its exact checks alone; `exact: pass` is no comparison with decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..base.conclusion import DEFECT, INCONCLUSIVE, PASS, Conclusion
from ..base.errors import UsageError
from ..base.files import record_head
from ..judge.exact import Exact, summary
from ..tree.case import check_vocab
from .drafting import draft_cases
from .exact import exact_run
from .passes import attempt
from .settings import Item, Settings

SCHEMA = "ddtree-check/exact/1"
CODES = {"pass": PASS, "fail": DEFECT, "open": INCONCLUSIVE}


def check_bits(
    engine, items: Sequence[Item], settings: Settings, reason: str, *, model: dict, progress: Callable | None = None
) -> dict:
    """Return the record of the exact checks of every item's trees, schema `ddtree-check/exact/1`.

    reason: why there is no plain decoding. The `self` draft needs it, so that n-grams of the prompt take its place.
    Raises UsageError where the exact checks are off.
    """
    if settings.exact == "off":
        raise UsageError(f"exact: got off, but {reason}; nothing is left to judge by: take --exact leaves")
    settings = replace(settings, draft="ngram") if settings.draft == "self" else settings
    control = settings.control if engine.supports(settings.control) is None else None
    cases, every = [], []
    for place, item in enumerate(items):
        if progress is not None:
            progress(place, len(items), item.id)
        prefix = engine.prefill(item.tokens)
        for case in draft_cases(engine, prefix, item, settings):
            check_vocab(case, engine.vocab_size)
            options = {"control": control, "prompt": item.tokens, "how": settings.exact, "seed": settings.seed}
            exact, refusal = attempt(None, lambda case=case, options=options: exact_run(
                engine, prefix, case.tree, **options  # noqa: B023
            ))  # fmt: skip
            every.append(exact or Exact.refused(len(case.tree), refusal))
            cases.append(case.to_json() | {"exact": every[-1].to_json()})
    conclusion = Conclusion()
    for case, exact in zip(cases, every, strict=True):
        conclusion.add(CODES[exact.verdict], *([] if exact.verdict == "pass" else [f"{case['id']}: {exact.reason}"]))
        if exact.law is not None and not exact.law.kept:
            conclusion.add(DEFECT, f"{case['id']}: the control, with other foreign tokens: {exact.law}")
    head = record_head(SCHEMA, engine.describe())
    return conclusion.into(
        head
        | {"model": model, "settings": settings.to_json(), "reason": reason, "cases": cases, "exact": summary(every)}
    )
