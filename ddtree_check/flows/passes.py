"""The passes over one tree: every mode and control that the engine runs, each as its differences to ar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..base.errors import Unsupported
from ..judge.case import Runs
from ..judge.commit import STEPS, Accept, flat_contents
from ..judge.differences import Differences, digests, measure
from ..judge.exact import Exact
from ..judge.nodes import CONTROL, MODES
from ..judge.rule import EXACT
from ..judge.sampling.judged import Tracks
from ..judge.sampling.processing import Sampling
from ..judge.ties import TieTrack
from ..model.wiring import Conv, State, Wiring, reads, wirings
from ..trace.model import COMMITS
from ..tree.case import Case
from .commit import commit_runs
from .controls import absolute, chain_run
from .exact import exact_run
from .settings import Item, Settings

STORED = ("ar", "forward", "repeat", *MODES, "chain", "own")  # passes over a tree that a trace holds, a row a node


def run_case(engine, prefix, case: Case, reference, exact, settings: Settings, step, dtype: str) -> Runs:
    """Run all modes and controls of one tree that the engine can run, and its exact checks.

    step: a step of a trace to add them to. dtype: the one whose rules judge.
    """
    tree, wiring = case.tree, wirings(settings.control)
    # Without a recurrence the engine's own pass and its tree path are the same pass.
    twin = "chain" if reads(engine.layers, Conv, State) else "linear"
    watch = Watch(engine, case, reference, settings, step, _in_bits(engine, settings, twin))
    differences, missing, errors = {}, {}, {"ar": absolute(exact, reference)}

    def chains(name: str, limit: int | None = None, oracle=None):
        sink = watch.sink(name, wiring[name])
        return chain_run(engine, prefix, tree, reference, wiring[name], limit=limit, exact=oracle, sink=sink)

    def whole(name: str) -> torch.Tensor:
        logits = engine.verify(prefix, tree, wiring[name]).logits
        watch.sink(name, wiring[name])(range(len(tree)), logits)
        return logits

    def tried(name: str, run: Callable, *given):
        result, reason = attempt(engine.supports(wiring[name]), lambda: run(name, *given))
        if reason is not None and name in MODES:
            missing[name] = ("unsupported", reason)
        return result

    if linear := tried("linear", chains, None, exact):
        differences["linear"], _, errors["linear"] = linear
    chain = tried("chain", chains, settings.controls) if twin == "chain" else linear
    library = None
    for mode in ("tree_forked", CONTROL):
        if (logits := tried(mode, whole)) is None:
            continue
        differences[mode], errors[mode] = measure(reference, logits), absolute(exact, logits)
        # The library's own pass over the rows is the same flat pass.
        if mode == CONTROL and settings.wiring is None and (own := tried("own", whole)) is not None:
            library = float(np.max(measure(logits, own).max_abs))
            del own
        del logits
    return Runs(
        case=case,
        missing=missing,
        chain=chain and chain[:2],
        equal=watch.clean_equal() if engine.exact_control else None,
        bits=_exact(engine, prefix, case, settings, watch.digests, twin, dtype),
        exact={mode: error for mode, error in errors.items() if error is not None},
        library_unforked=library,
        **watch.findings(measure(reference, reference), differences),
    )


def commit_case(engine, prefix, runs: Runs, settings: Settings, step) -> tuple[Accept, ...] | None:
    """Commit the paths that the settings name under each mode that ran, or return None if they name none."""
    if not settings.accept:
        return None
    case, keep = runs.case, None
    if step is not None:

        def keep(mode: str, path, left, probe, pattern: str) -> None:
            step.commit(
                mode, path, flat_contents(left.contents), position=left.contents[0], probe=probe, logits=left.rows,
                pattern=pattern,
            )  # fmt: skip

    wiring = {mode: wiring for mode, wiring in wirings(settings.control).items() if mode in runs.differences}
    accepts = commit_runs(engine, case.prompt_tokens, prefix, case.tree, settings.accept, wiring, settings.rule, keep)
    return tuple(accepts)


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


def _in_bits(engine, settings: Settings, chain: str) -> tuple[str, ...]:
    """Return the passes whose rows are compared in bits. chain: the one that runs the paths as chains."""
    trees = ("tree_forked", CONTROL)
    return (*trees, chain) if settings.exact != "off" else trees if engine.exact_control else ()


def _exact(engine, prefix, case: Case, settings: Settings, rows: dict, chain: str, dtype: str) -> Exact | None:
    """Run the exact checks of one tree, or return None if they are off or there is no forked pass.

    rows: digests by node of the passes that were made;  chain: which of them ran the paths as chains.
    """
    if settings.exact == "off" or "tree_forked" not in rows:
        return None
    forked, unforked = (list(rows[mode].values()) if mode in rows else None for mode in ("tree_forked", CONTROL))
    exact, reason = attempt(
        None,
        lambda: exact_run(
            engine,
            prefix,
            case.tree,
            control=None if unforked is None else settings.control,
            rows=forked,
            control_rows=unforked,
            chains=rows.get(chain),
            prompt=case.prompt_tokens,
            how=settings.exact,
            precise=dtype in EXACT,
            seed=settings.seed,
        ),
    )
    return exact if reason is None else Exact.refused(len(case.tree), reason)


class Watch:
    """What looks at the rows of one tree's passes as they are made: sampling, ties, digests, and a step of a trace.

    in_bits: the passes whose rows get digests.
    """

    def __init__(
        self, engine, case: Case, reference: torch.Tensor, settings: Settings, step=None, in_bits: Sequence[str] = ()
    ):
        self.engine, self.case, self.settings, self.step, self.in_bits = engine, case, settings, step, in_bits
        self.tracks, self.ties = Tracks(engine, case, reference, settings), TieTrack(engine, case.tree, reference)
        self.digests: dict[str, dict[int, int | None]] = {}

    def clean_equal(self) -> bool | None:
        """Return whether the clean nodes of both tree passes agree bit for bit, or None if one was not made."""
        forked, unforked = (self.digests.get(mode) for mode in ("tree_forked", CONTROL))
        return forked and unforked and all(forked[node] == unforked[node] for node in self.case.tree.clean)

    def sink(self, name: str, wiring: Wiring | None = None) -> Callable:
        """Return what takes (nodes, logits) of a pass."""
        claim = wiring.name if wiring else "engine"

        def add(nodes, logits):
            if name in MODES:
                self.tracks.see(name, nodes, logits)
                self.ties.see(name, nodes, logits)
            if name in self.in_bits:
                self.digests.setdefault(name, {}).update(zip(nodes, digests(logits), strict=True))
            if self.step is not None:
                own = _own_rows(self.engine, name, self.case, nodes, logits, self.settings.sampling)
                self.step.add(name, logits, nodes=nodes, width=len(self.case.tree), wiring=claim, **own)

        return add

    def findings(self, ar: Differences, differences: dict[str, Differences]) -> dict:
        """Return the fields of Runs that hold what was seen, the differences with the tokens that the engine took."""
        return {
            "ar": self.ties.choose("ar", ar),
            "differences": {mode: self.ties.choose(mode, own) for mode, own in differences.items()},
            "sampled": self.tracks.finish(),
            "ties": self.ties.ties,
        }


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
