"""Measured positions of all prompts ─► band, verdicts, one verdict. Asks no server, prints nothing.

A position is one token that a server chose, held against the reference's log-probabilities after the very same text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..base.conclusion import DEFECT, INCONCLUSIVE, Conclusion
from ..base.words import counted
from .api import Completion

VERDICTS = ("pass", "tie", "leak", "flip")


@dataclass(frozen=True)
class Rule:
    """When a difference of log-probabilities is beyond noise.

    factor      times the band
    inside      the share of the reference's differences to itself, decoded and forced, that the band spans: a few
                numbers that are far off widen nothing
    resolution  nats that are never held against anybody: the bound of the project across engines
    widest      nats; a band above it leaves nothing to judge by
    compared    the share of tokens that must have been compared
    chance      the probability below which the server's share of tokens is not the reference's own
    """

    factor: float = 4.0
    inside: float = 0.95
    resolution: float = 1e-3
    widest: float = 1.0
    compared: float = 0.5
    chance: float = 1e-3

    def bound(self, band: float) -> float:
        return self.factor * band + self.resolution

    def band(self, differences: Sequence[float]) -> float:
        """Return the difference in nats that the share `inside` of all does not exceed; 0 of none."""
        return sorted(differences)[math.ceil(self.inside * len(differences)) - 1] if differences else 0.0

    def usual(self, count: int, of: int, own: int, own_of: int) -> bool:
        """Return whether a share as large as `count` of the server's `of` tokens is likely, where the reference shows
        `own` of `own_of`: Fisher's exact test, one-sided."""
        from scipy.stats import hypergeom

        return not count or bool(hypergeom.sf(count - 1, of + own_of, count + own, of) >= self.chance)


@dataclass(frozen=True)
class Position:
    """delta: the largest |difference| of the log-probabilities that both servers gave; regret: how much likelier the
    reference's first token is than the chosen one, after the same text (at least so much if `cut`); margin: its first
    before its second. Null where there was nothing to compare."""

    token: str
    chosen: str
    delta: float | None
    regret: float
    margin: float | None
    cut: bool = False

    def to_json(self) -> dict:
        return asdict(self)


def positions(run: Completion, forced: Sequence[tuple[dict[str, float], float | None]]) -> list[Position]:
    """Compare the chosen tokens of a run with forced log-probabilities: for each position (top, that of the token)."""
    found = []
    for token, own, top, (reference, of_token) in zip(run.tokens, run.logprobs, run.tops, forced, strict=False):
        first = max(reference, key=reference.get)
        order = sorted(reference.values(), reverse=True)
        known = reference.get(token, of_token)
        shared = [abs(top[word] - reference[word]) for word in top.keys() & reference.keys()]
        if own is not None and known is not None:
            shared.append(abs(own - known))
        found.append(
            Position(
                token,
                first,
                max(shared, default=None),
                max(0.0, order[0] - (order[-1] if known is None else known)),
                order[0] - order[1] if len(order) > 1 else None,
                known is None,
            )
        )
    return found


def verdict(position: Mapping, bound: float) -> str:
    """Return one of VERDICTS. Two rows within the bound of each other can part by twice as much."""
    delta, regret = position["delta"], position["regret"]
    within = delta is not None and delta <= bound and regret <= 2 * bound
    changed = regret > 0
    return ("tie" if changed else "pass") if within else ("flip" if changed else "leak")


def conclude(prompts: Sequence[dict], rule: Rule) -> dict:
    """Return {"band", "prompts", "coverage", "verdict", "exit_code"} of the measured prompts (see `run.measure`).

    Each prompt that was run gets a verdict at every position of every run.
    """
    run = [prompt for prompt in prompts if prompt["reason"] is None]
    own = [delta for prompt in run for delta in prompt["own"] if delta is not None]
    band = rule.band(own)
    bound = rule.bound(band)
    judged, deltas, margins = [], [], []
    counts = dict.fromkeys(VERDICTS, 0)
    ties = {"server": 0, "tokens": 0, "reference": 0, "reference_tokens": 0}  # of texts that differ: none counts twice
    for prompt in prompts:
        runs, texts = [], {}
        for one in prompt["runs"]:
            found = [position | {"verdict": verdict(position, bound)} for position in one["positions"]]
            ending = one["ending"]
            if ending is not None:
                ending = ending | {"verdict": "tie" if ending["regret"] <= 2 * bound else "flip"}
            for position in [*found, *([ending] if ending else [])]:
                counts[position["verdict"]] += 1
            deltas += [position["delta"] for position in found if position["delta"] is not None]
            margins += [position["margin"] for position in found if position["margin"] is not None]
            texts[tuple(position["token"] for position in found)] = [position["verdict"] for position in found]
            runs.append(one | {"positions": found, "ending": ending})
        ties["server"] += sum(verdicts.count("tie") for verdicts in texts.values())
        ties["tokens"] += sum(map(len, texts.values()))
        ties["reference"] += prompt["changed"]["reference"]
        ties["reference_tokens"] += prompt["changed"]["tokens"]
        judged.append(prompt | {"runs": runs})
    control = [value for prompt in run for value in prompt["control"]]
    texts = [one for prompt in run for one in prompt["runs"]]
    measured = {
        "largest": max(own, default=0.0),
        "band": band,
        "bound": bound,
        "beyond": sum(not delta <= bound for delta in own),
        "differences": len(own),
        "median": statistics.median(own) if own else None,
        "median_of_runs": statistics.median(deltas) if deltas else None,
        "margin": statistics.median(margins) if margins else None,
        "control": max(control, default=None),
    }
    coverage = {
        "prompts": len(run),
        "not_run": len(prompts) - len(run),
        "tokens": sum(one["tokens"] for one in texts),
        "compared": sum(len(one["positions"]) for one in texts),
        "same_text": sum(one["same_text"] for one in texts),
        "runs": len(texts),
        "control": len(control),
    }
    conclusion = _conclusion(rule, measured, counts, ties, coverage, control)
    for prompt in prompts:
        if prompt["reason"]:
            conclusion.add(INCONCLUSIVE, f"{prompt['id']}: not_run: {prompt['reason']}")
    return conclusion.into({"band": measured, "prompts": judged, "counts": counts, "ties": ties, "coverage": coverage})


def _conclusion(rule: Rule, measured, counts, ties, coverage, control) -> Conclusion:
    """Conclude from the figures: what leaves nothing to judge by goes before a defect, a defect before gaps."""
    band, bound, largest = measured["band"], measured["bound"], measured["largest"]
    if not coverage["compared"]:
        return Conclusion(INCONCLUSIVE, ("nothing was compared",))
    if band > rule.widest:
        why = (
            f"the reference differs from itself by {band:.3g} nats, expected at most {rule.widest:g}; "
            "ask it one request at a time, or switch its own speculation off"
        )
        return Conclusion(INCONCLUSIVE, (why,))
    if rule.band(control) > bound or max(control, default=0.0) > rule.bound(largest):
        why = (
            f"the servers differ by {max(control):.3g} nats on forced text, where nothing is speculated (expected at "
            f"most {bound:.3g}): another model, dtype or kernel; nothing can be said of speculation"
        )
        return Conclusion(INCONCLUSIVE, (why,))
    beyond = counts["flip"] + counts["leak"]
    usual = rule.usual(beyond, coverage["compared"], measured["beyond"], measured["differences"])
    conclusion = Conclusion()
    if beyond and not (measured["beyond"] and usual):
        conclusion.add(
            DEFECT,
            f"{counted(counts['flip'], 'token')} that the reference would not have chosen and {counts['leak']} whose "
            f"log-probabilities are off, beyond {bound:.3g} nats",
        )
    own, runs = measured["median"], measured["median_of_runs"]
    if own is not None and runs is not None and runs > rule.bound(own):
        conclusion.add(
            DEFECT,
            f"half of all tokens are off by {runs:.3g} nats or more, where the reference is by {own:.3g} from itself",
        )
    if conclusion.reasons:
        return conclusion
    if beyond:
        conclusion.add(
            INCONCLUSIVE,
            f"{counted(beyond, 'token')} of {coverage['compared']} beyond {bound:.3g} nats, and so are "
            f"{measured['beyond']} of the reference's {measured['differences']} differences to itself",
        )
    if measured["margin"] is not None and bound > measured["margin"]:
        conclusion.add(
            INCONCLUSIVE,
            f"the bound of {bound:.3g} nats exceeds the reference's median margin of {measured['margin']:.3g} between "
            "its first two tokens: a wrong token passes for a tie; ask it one request at a time, or in float32",
        )
    if not rule.usual(ties["server"], ties["tokens"], ties["reference"], ties["reference_tokens"]):
        conclusion.add(
            INCONCLUSIVE,
            f"{counted(ties['server'], 'tie')} in {ties['tokens']} tokens, where the reference itself has "
            f"{ties['reference']} in {ties['reference_tokens']}; expected no more than noise explains",
        )
    share = coverage["compared"] / max(1, coverage["tokens"])
    if share < rule.compared:
        why = f"only {share:.0%} of the tokens could be compared, expected {rule.compared:.0%}"
        conclusion.add(INCONCLUSIVE, why)
    return conclusion
