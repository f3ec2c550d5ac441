"""Make draft marginals from n-grams or from the target's own logits, and judge how well a draft knows itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..token_ids import at_least, token_ids
from .best_first import LOWEST, _table, _top

SURPRISED = 3.0  # standard deviations beyond which a draft is wrong about itself: once in 700 runs by chance


def surprise(log_probs, tokens: Sequence[int]) -> tuple[float, float]:
    """Return how much less probable than it expects a draft finds what followed, in nats, and the variance of that.

        sum over depths of (-log p_d(token) - entropy of p_d),  variance of log p_d under p_d

    log_probs [L, V] in nats; tokens: those behind the root, at most L of them. A draft that is right about itself gets
    0 on average, also where the tokens end at the first one that was not drafted.
    """
    excess = variance = 0.0
    for row, token in zip(np.asarray(log_probs, dtype=np.float64), tokens, strict=False):
        shown = row[row > -np.inf]
        share = np.exp(shown)
        mean = float((share * shown).sum())
        excess += mean - float(max(row[token], LOWEST))
        variance += float((share * shown**2).sum()) - mean**2
    return excess, variance


def drafter_says(surprised: float, accepted: float, ngram: float | None) -> str | None:
    """Return what a drafter's acceptance says where the verify passed, so that none was lost there; None for nothing.

    surprised: `surprise` over all rounds, in standard deviations; accepted: nodes a round by plain decoding, and ngram:
    those of an n-gram draft in the same places. A drafter that is surprised by more than SURPRISED reads something
    wrong, or was not made for such text.
    """
    if surprised > SURPRISED:
        return f"low acceptance is drafter-side (what followed surprises the drafter by {surprised:.1f} sigma)"
    if ngram is not None and accepted < ngram:
        return "an n-gram draft would do better in the same places"
    return None


def ngram_marginals(
    context: Sequence[int], length: int, vocab: int, *, order: int = 3, smoothing: float = 1.0
) -> np.ndarray:
    """Return log probabilities float32 [length, vocab] of a draft that only looks things up in the context itself.

    Depth d: take the longest suffix of `context`, at most `order` tokens, that also ends somewhere at least d tokens
    before the end; count what came d tokens after each such place; add `smoothing` tokens' worth of the context's own
    token frequencies. Computed in float64. `context` ends with the root's token; a token it lacks has -inf.

    Raises ValueError for an empty context, ids outside the vocabulary, a length or order below 1, smoothing of 0.
    """
    length, vocab = at_least(1, "ngram: length", length), at_least(1, "ngram: vocab", vocab)
    order = at_least(1, "ngram: order", order)
    context = np.array(token_ids("ngram: context", context, vocab))
    if not 0 < smoothing < np.inf:
        raise ValueError(f"ngram: smoothing {smoothing}, expected a finite number above 0")
    unigram = np.bincount(context, minlength=vocab) / len(context)
    # ends[n - 1]: where an earlier copy of the last n tokens ends
    ends = [np.flatnonzero(context[:-1] == context[-1])]
    for back in range(1, min(order, len(context) - 1)):
        last = ends[-1]
        ends.append(last[(last >= back) & (context[last - back] == context[-1 - back])])
    rows = []
    for ahead in range(1, length + 1):
        usable = ([end + ahead for end in places if end + ahead < len(context)] for places in reversed(ends))
        followers = context[next(filter(None, usable), [])]
        counts = np.bincount(followers, minlength=vocab) + smoothing * unigram
        rows.append(counts / (len(followers) + smoothing))
    with np.errstate(divide="ignore"):
        return np.log(np.stack(rows)).astype(np.float32)


def self_marginals(logits, acceptance: float, seed: int, sureness: float | None = None) -> np.ndarray:
    """Return log probabilities float32 [L, V] of a draft that knows the target and errs at a chosen rate.

    logits [L, V], finite, read as float32: the target's own along its greedy continuation. With a `sureness`, one
    temperature for all depths makes the first choices' probabilities average it (kept within 0.05 ... 0.95), so that
    flat and peaked targets give trees of alike shapes.

    Each depth, with probability 1 - acceptance, swaps the target's first choice (of equal logits the lower id) with its
    choice of a rank drawn from 2..8. The chosen token leads its row strictly, equals are lowered by one float32 step:
    the chance that the draft's first choice is the target's is exactly `acceptance`. A higher acceptance under one seed
    only adds hits.

    Raises ValueError for logits of another shape or not finite, fewer than 2 tokens, an acceptance outside [0, 1].
    """
    table = _table("self_marginals: logits", logits)
    depths, vocab = table.shape
    if vocab < 2 or not np.isfinite(table).all():
        raise ValueError(f"self_marginals: logits {list(table.shape)}, expected 2 tokens or more, all finite")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"self_marginals: acceptance {acceptance}, expected 0..1")
    rng = np.random.default_rng(at_least(0, "self_marginals: seed", seed))
    miss = rng.random(depths) >= acceptance
    ranks = rng.integers(1, min(8, vocab), size=depths)

    shifted = table.astype(np.float64) - table.max(axis=1, keepdims=True)
    if sureness is not None:
        shifted *= _sharpness(shifted, min(max(sureness, 0.05), 0.95))
    rows = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    for row, values, missed, rank in zip(rows, table, miss, ranks, strict=True):
        choices = [token for token, _ in _top(values, 8)]
        first, other = choices[0], choices[rank]
        leader = first
        if missed:
            row[[first, other]] = row[[other, first]]
            leader = other
        equal = row >= row[leader]
        equal[leader] = False
        row[equal] = np.nextafter(row[leader], np.float32(-np.inf))
    return rows


def _sharpness(shifted: np.ndarray, sureness: float) -> float:
    """Return the factor (1 / temperature) at which first choices of rows of maximum 0 average `sureness`.

    It is kept within 1e-8 ... 1e8, for rows with ties at the top or of two tokens.
    """
    from scipy.optimize import brentq

    def missed(exponent: float) -> float:
        return float(np.mean(1 / np.exp(shifted * 10**exponent).sum(axis=1))) - sureness

    if missed(-8.0) >= 0:
        return 1e-8
    return 10 ** brentq(missed, -8.0, 8.0, xtol=1e-14) if missed(8.0) > 0 else 1e8
