"""The passes over one tree: every mode and control that the engine runs, each as its differences to ar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..base.errors import Unsupported
from ..judge.case import Runs
from ..judge.differences import measure, row_hashes
from ..judge.nodes import MODES
from ..judge.sampling.judged import Tracks
from ..judge.sampling.processing import Sampling
from ..judge.ties import TieTrack
from ..model.wiring import FORKED, Conv, State, Wiring, reads
from ..trace.model import COMMITS
from ..tree.case import Case
from .commit import STEPS, commit_runs, flat_contents
from .controls import absolute, chain_run
from .settings import Item, Settings

STORED = ("ar", "forward", "repeat", *MODES, "chain", "own")  # passes over a tree that a trace holds, a row a node


def run_case(engine, prefix, case: Case, reference, exact, settings: Settings, step) -> Runs:
    """Runs all modes and controls of one tree that the engine can run. step: a step of a trace to add them to."""
    tree, control, missing = case.tree, settings.control, {}
    errors = {"ar": absolute(exact, reference)}

    tracks, ties = Tracks(engine, case, reference, settings), TieTrack(engine, tree, reference)

    def keep(mode: str, wiring: str = "engine"):
        add = None
        if step is not None:

            def add(nodes, logits):
                own = _own_rows(engine, mode, case, nodes, logits, settings.sampling)
                step.add(mode, logits, nodes=nodes, width=len(tree), wiring=wiring, **own)

        return tracks.sink(mode, ties.sink(mode, add))

    def chains(forked: bool, limit: int | None, mode: str, **exact_rows):
        sink = keep(mode, "tree_forked" if forked else "engine")
        return chain_run(engine, prefix, tree, reference, forked=forked, limit=limit, sink=sink, **exact_rows)

    def whole(mode: str, wiring: Wiring | None, claim: str):
        logits = engine.verify(prefix, tree, wiring).logits
        if sink := keep(mode, claim):
            sink(range(len(tree)), logits)
        return logits

    found, missing["linear"] = attempt(engine.supports(None), lambda: chains(False, None, "linear", exact=exact))
    linear, _, errors["linear"] = found or (None, None, None)
    # Without a recurrence the engine's own pass and its tree path are the same pass.
    chain = None if linear is None else (linear, np.ones(len(tree), dtype=bool))
    if reads(engine.layers, Conv, State):
        found, _ = attempt(engine.supports(FORKED), lambda: chains(True, settings.controls, "chain"))
        chain = found and found[:2]
    logits, missing["tree_forked"] = attempt(
        engine.supports(FORKED), lambda: whole("tree_forked", FORKED, "tree_forked")
    )
    forked = unforked = library = equal = fingerprints = None
    if logits is not None:
        forked, errors["tree_forked"] = measure(reference, logits), absolute(exact, logits)
        fingerprints = row_hashes(logits, tree)
    claim = settings.wiring or "tree_unforked"
    logits, missing["tree_unforked"] = attempt(engine.supports(control), lambda: whole("tree_unforked", control, claim))
    if logits is not None:
        unforked, errors["tree_unforked"] = measure(reference, logits), absolute(exact, logits)
        if engine.exact_control and fingerprints is not None:
            equal = row_hashes(logits, tree) == fingerprints
        if settings.wiring is None:  # the library's own pass over the rows is the same flat pass
            own, _ = attempt(engine.supports(None), lambda: whole("own", None, "engine"))
            library = None if own is None else float(np.max(measure(logits, own).max_abs))
            del own
    del logits
    linear, forked, unforked = (
        found and ties.choose(mode, found) for mode, found in zip(MODES, (linear, forked, unforked), strict=True)
    )
    accepts = None
    if settings.accept:
        wirings = {"linear": None, "tree_forked": FORKED, "tree_unforked": control}
        wirings = {mode: wiring for mode, wiring in wirings.items() if missing[mode] is None}
        kept = None
        if step is not None:
            kept = lambda mode, path, left, probe, pattern: step.commit(  # noqa: E731
                mode, path, flat_contents(left.contents), position=left.contents[0], probe=probe, logits=left.rows,
                pattern=pattern,
            )  # fmt: skip
        accepts = tuple(
            commit_runs(engine, case.prompt_tokens, prefix, tree, settings.accept, wirings, settings.rule, kept)
        )
    return Runs(
        ar=ties.choose("ar", measure(reference, reference)),
        linear=linear,
        forked=forked,
        unforked=unforked,
        chain=chain,
        missing={mode: ("unsupported", reason) for mode, reason in missing.items() if reason is not None},
        equal=equal,
        exact={mode: error for mode, error in errors.items() if error is not None},
        library=library,
        accepts=accepts,
        sampled=tracks.finish(),
        ties=ties.finish(),
    )


def trace_bytes(engine, items: Sequence[Item], settings: Settings, rows: Sequence[Sequence[int]]) -> int:
    """At most so many bytes, but for what names the nodes, has a trace of a run. rows: of each tree of each item.

    Costs a prefill of the longest prompt, which says how large a row and what a commit leaves are.
    """
    longest = max((item.tokens for item in items), key=len)
    prefix = engine.prefill(longest)
    row, contents = prefix.logits.nbytes, None
    if settings.accept:
        contents, _ = attempt(None, lambda: flat_contents(engine.contents(prefix)))
    left = {channel: x.nbytes for channel, x in (contents or {}).items()}
    token = sum(held for (_, channel), held in left.items() if channel in ("keys", "values")) / len(longest)
    passes = len(STORED) + (len(MODES) if settings.sampling.active else 0)
    total = 0
    for size in (size for sizes in rows for size in sizes):
        paths = sum(size if pattern == "every" else 1 for pattern in settings.accept)
        after = sum(left.values()) + size * token + STEPS * row
        total += passes * size * row + (1 + len(COMMITS) * paths) * after * bool(left)
    return int(total)


def attempt(refusal: str | None, run: Callable):
    """(what `run` returned, None), or (None, why the engine does not run it): it may refuse before or on the way."""
    if refusal is not None:
        return None, refusal
    try:
        return run(), None
    except Unsupported as error:
        return None, str(error)


def _own_rows(engine, mode: str, case: Case, nodes, logits, sampling: Sampling) -> dict:
    """What the engine itself makes of raw rows of a mode, for a trace: processed rows and chosen tokens."""
    if mode not in MODES:
        return {}
    rows = {}
    if (taken := engine.chosen(mode, case.tree, list(nodes), logits)) is not None:
        rows["chosen"] = list(map(int, taken))
    if sampling.active:
        rows["processed"] = engine.processed(mode, case.tree, list(nodes), logits, sampling, case.prompt_tokens, ())
    return rows
