"""What sampling down a draft tree yields: the exact distribution of its outcomes, draws from it, and a test of them.

An outcome is where a walk ends: the last accepted node and the token drawn there that no child carries (the bonus).
Walking a tree by draws of the target alone is the rule of SGLang's target-only verify with thresholds of 1: a child is
accepted with the target's own probability of its token, and the rest of the distribution gives the bonus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...tree.draft_tree import DraftTree
from .processing import noise

SHARE, LEAST = 0.05, 3.0  # of the draws, and at least so many, that a bin holds under ar; rarer outcomes share one
CHUNK = 1 << 21  # noise values held at a time


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One case and mode. float64: probabilities [bins] of binned outcomes under ar (`expected`) and under the mode's
    own logits (`own`); int64 counts [bins] of the mode's draws.

    tv         total variation between the distributions over whole outcomes, not binned
    accepted   expected accepted tokens of a round, without root and bonus, under the mode;  ar_accepted  under ar
    """

    expected: np.ndarray
    own: np.ndarray
    counts: np.ndarray
    tv: float
    accepted: float
    ar_accepted: float


class Walks:
    """All walks down one tree under ar and under a mode, a node at a time, parents first."""

    def __init__(self, tree: DraftTree, draws: int, rng: np.random.Generator):
        self.tree, self.draws, self.rng = tree, draws, rng
        self.reach = np.zeros((2, len(tree)))  # probability that a walk passes the node: under ar, under the mode
        self.reach[:, 0] = 1
        self.walkers = [draws] + [0] * (len(tree) - 1)
        self._tv = 0.0
        self._bins: list[tuple[float, float, int]] = []
        self._rare = np.zeros(3)

    def see(self, node: int, log_p: np.ndarray, log_q: np.ndarray) -> None:
        """The log probabilities [vocabulary] at a node under ar and under the mode."""
        kids = self.tree.children[node]
        tokens = [self.tree.tokens[kid] for kid in kids]
        p, q = np.exp(log_p) * self.reach[0, node], np.exp(log_q) * self.reach[1, node]
        drawn = self._draw(log_q, self.walkers[node])
        counts = np.bincount(drawn[drawn >= 0], minlength=len(q))
        for kid, token in zip(kids, tokens, strict=True):
            self.reach[:, kid] = p[token], q[token]
            self.walkers[kid] = int(counts[token])
        p[tokens], q[tokens], counts[tokens] = 0, 0, 0
        self._tv += np.abs(p - q).sum() / 2  # NaN stays NaN
        if not self.draws:
            return
        least = max(SHARE, LEAST / self.draws)
        often = np.flatnonzero(p >= least)
        self._bins += zip(p[often], q[often], counts[often], strict=True)
        for values in (p, q, counts):
            values[often] = 0
        rest = np.array([p.sum(), q.sum(), counts.sum() + (drawn < 0).sum()])
        if rest[0] >= least:
            self._bins.append((rest[0], rest[1], int(rest[2])))
        else:
            self._rare += rest

    def _draw(self, log_q: np.ndarray, count: int) -> np.ndarray:
        """Tokens of `count` walks that stand at a node; -1 where nothing can be drawn."""
        if np.isnan(log_q[0]):
            return np.full(count, -1)
        held = np.flatnonzero(np.isfinite(log_q))  # nothing else can win
        step = max(1, CHUNK // len(held))
        parts = [
            held[np.argmax(log_q[held] + noise(self.rng, min(step, count - at), len(held)), axis=1)]
            for at in range(0, count, step)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def finish(self) -> Outcomes:
        bins = [*self._bins, tuple(self._rare)]
        expected, own, counts = (np.array(column) for column in zip(*bins, strict=True))
        accepted = self.reach[:, 1:].sum(axis=1)
        return Outcomes(expected, own, counts.astype(np.int64), float(self._tv), float(accepted[1]), float(accepted[0]))


@dataclass(frozen=True)
class Test:
    """p        of all clusters together;  clusters  p of each, by name
    freedom    degrees of freedom of the summed statistic;  draws  how many in all"""

    p: float
    clusters: dict[str, float]
    freedom: int
    draws: int


def pearson(counts: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Pearson's statistic of counts [..., bins] under p [bins]; inf where p excludes what was seen."""
    expected = p * counts.sum(axis=-1, keepdims=True)
    possible = expected > 0
    off = np.where(possible, (counts - expected) ** 2 / np.where(possible, expected, 1), 0.0).sum(axis=-1)
    return np.where((~possible & (counts > 0)).any(axis=-1), np.inf, off)


def test(cases: Sequence[tuple[str, np.ndarray, np.ndarray]], simulations: int, rng: np.random.Generator) -> Test:
    """Whether counts were drawn from probabilities; cases are (cluster, probabilities [bins], counts [bins]).

    A case's distribution is known, so clusters (prompts) are strata: their statistics add up, and what they would be
    is simulated. p = (1 + simulations at least as far off) / (1 + simulations) is valid at any expected count; no
    chi-square approximation enters. A probability that is not finite gives p = 1 / (1 + simulations).
    """
    seen: dict[str, float] = {}
    drawn: dict[str, np.ndarray] = {}
    freedom = 0
    for cluster, p, counts in cases:
        total = p.sum()
        if np.isfinite(total):
            p = p / total
            seen[cluster] = seen.get(cluster, 0.0) + float(pearson(counts, p))
            draws = pearson(rng.multinomial(int(counts.sum()), p, size=simulations), p)
        else:
            seen[cluster], draws = math.inf, np.zeros(simulations)
        drawn[cluster] = drawn.get(cluster, 0.0) + draws
        freedom += max(0, int((p > 0).sum()) - 1)
    tail = {cluster: _tail(seen[cluster], drawn[cluster]) for cluster in seen}
    both = _tail(sum(seen.values()), sum(drawn.values()))
    return Test(both, tail, freedom, sum(int(counts.sum()) for _, _, counts in cases))


test.__test__ = False  # no test of pytest's


def _tail(seen: float, drawn: np.ndarray) -> float:
    # Sums in another order differ by rounding, and equal counts must count as equal.
    return (1 + int((drawn >= seen * (1 - 1e-9)).sum())) / (1 + len(drawn))


def holm(ps: dict[str, float], level: float) -> list[str]:
    """The names whose p stays significant at `level` with all of them tested (Holm 1979), the smallest p first."""
    found = []
    for rank, name in enumerate(sorted(ps, key=ps.__getitem__)):
        if ps[name] > level / (len(ps) - rank):
            break
        found.append(name)
    return found


def power(draws: int, freedom: int, tv: float, level: float) -> float:
    """Chance that the test sees a total variation `tv` of the binned outcomes in every case.

    The direction that is hardest to see has a noncentrality of 4 n tv^2 (Cauchy-Schwarz), in the chi-square
    approximation.
    """
    from scipy.stats import chi2, ncx2

    if freedom < 1 or draws < 1:
        return 0.0
    return float(ncx2.sf(chi2.isf(level, freedom), freedom, max(4 * draws * tv**2, 1e-12)))


def visible(draws: int, freedom: int, level: float, wanted: float = 0.9) -> float | None:
    """The total variation that the test sees with a chance of `wanted`; None if it sees none."""
    from scipy.optimize import brentq

    if power(draws, freedom, 1.0, level) < wanted:
        return None
    return float(brentq(lambda tv: power(draws, freedom, tv, level) - wanted, 1e-9, 1.0))
