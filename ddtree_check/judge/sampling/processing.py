"""From a node's logits to the distribution that a server samples from, and how far raw noise can move it.

Pure functions of one row. Order, as in vLLM, SGLang and transformers: penalties, temperature, top-k, top-p.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...base.errors import UsageError
from ...base.options import check_options, group, option
from ...tree.draft_tree import DraftTree

DECODING = ("compare", "generate")  # commands that draw tokens


@group("Sampling", later=True, verbs=DECODING)
class Sampling:
    """How a next token is drawn; the names are those of vLLM and SGLang. The defaults are greedy decoding.

    temperature         logits are divided by it; 0 takes the largest logit, the lowest id of equals
    top_k               0 or -1 keeps all; else the k largest and whatever equals the smallest of them
    top_p               the fewest most probable tokens whose mass reaches it; equals are kept or cut together
    repetition_penalty  logits of tokens in prompt or output: divided by it if positive, else multiplied (CTRL,
                        arXiv 1909.05858)
    presence_penalty, frequency_penalty   taken from logits of tokens of the *output*: once, and for each occurrence
    Raises UsageError naming the option.
    """

    temperature: float = option(0.0, "Sample at this temperature; 0 is greedy.", "NUMBER", least=0)
    top_k: int = option(
        0, "Sample from the so many most probable tokens; 0 for all.", "N",
        holds=lambda value: value >= -1, expects="a number of tokens, 0 for all",
    )  # fmt: skip
    top_p: float = option(
        1.0, "Sample from the fewest tokens with this mass.", "SHARE",
        holds=lambda value: 0 < value <= 1, expects="a share above 0, at most 1",
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "Divides the logits of tokens in prompt or output.", "NUMBER",
        holds=lambda value: value > 0, expects="a number above 0",
    )  # fmt: skip
    presence_penalty: float = option(0.0, "Taken from tokens of the output.", "NUMBER")
    frequency_penalty: float = option(0.0, "Taken for each time in the output.", "NUMBER")

    def __post_init__(self):
        check_options(self)
        if not self.temperature and (self.top_k > 1 or self.top_p < 1):
            name = "top-k" if self.top_k > 1 else "top-p"
            raise UsageError(f"{name}: changes nothing at temperature 0, which is greedy; expected --temperature too")

    @property
    def active(self) -> bool:
        """Whether anything but the argmax of the raw logits is asked for."""
        return self.temperature > 0 or self.penalises

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def stretch(self) -> float:
        """How many times larger a difference of raw logits can be after penalties and temperature."""
        return max(self.repetition_penalty, 1 / self.repetition_penalty) / (self.temperature or 1.0)

    @property
    def shifts(self) -> bool:
        """Whether adding one number to a whole row changes the result."""
        return self.repetition_penalty != 1

    @property
    def kept(self) -> int:
        """Tokens that top-k keeps, 0 for all. A temperature of 0 keeps one, as servers have it."""
        return max(0, self.top_k) if self.temperature else 1


# Which nodes of the tree a node's penalties count, after the prompt and the text before the root. `path` is right.
HISTORIES: dict[str, Callable[[DraftTree, int], Sequence[int]]] = {
    "path": lambda tree, node: tree.path(node),
    "prompt": lambda tree, node: (0,),  # what is committed, for all nodes alike
    "parent": lambda tree, node: tree.path(node)[:-1],
    "rows": lambda tree, node: range(node + 1),  # all rows before it in flat order
    "sibling": lambda tree, node: (*tree.path(node)[:-1], _sibling(tree, node)),
    "batch": lambda tree, node: range(len(tree)),  # all rows of the pass
}
NONE = "none"  # no penalties in verify
RULES = (*HISTORIES, NONE)
SAYS = {
    "prompt": "the committed text alone",
    "parent": "the path without the node itself",
    "rows": "all rows before it in flat order",
    "sibling": "its sibling's path",
    "batch": "all rows of the pass",
    NONE: "not applied",
}


def _sibling(tree: DraftTree, node: int) -> int:
    """The child before it, for the first child the next one; a node alone is its own."""
    kids = tree.children[tree.parents[node]] if node else (0,)
    place = kids.index(node)
    return kids[place - 1] if place else kids[min(1, len(kids) - 1)]


@dataclass(frozen=True)
class History:
    """What penalties count: `prompt` token ids, and `made`, the output so far, the root and the node included."""

    prompt: tuple[int, ...]
    made: tuple[int, ...]


def history(rule: str, tree: DraftTree, node: int, prompt: Sequence[int], made: Sequence[int] = ()) -> History | None:
    """A node's history by one of RULES; made: output before the root. None is the rule that applies no penalty."""
    if rule == NONE:
        return None
    return History(tuple(prompt), (*made, *(tree.tokens[row] for row in HISTORIES[rule](tree, node))))


def scaled(row: np.ndarray, sampling: Sampling, past: History | None) -> np.ndarray:
    """Penalised, tempered logits float64 [vocabulary] of a row. past None applies no penalty."""
    z = np.array(row, dtype=np.float64)
    if past is not None and sampling.penalises:
        if sampling.repetition_penalty != 1:
            ids = np.unique(np.array((*past.prompt, *past.made), dtype=np.int64))
            x = z[ids]
            z[ids] = np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty)
        ids, counts = np.unique(np.array(past.made, dtype=np.int64), return_counts=True)
        z[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return z / (sampling.temperature or 1.0)


def usable(z: np.ndarray) -> bool:
    """A row that can be sampled from: -inf leaves a token out, NaN and inf spoil the row."""
    return bool(np.max(z) < np.inf and np.max(z) > -np.inf)  # the maximum of a NaN is NaN, which answers False


def keep(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """bool [vocabulary]: the tokens that top-k and then top-p leave."""
    kept, k = np.isfinite(z), sampling.kept
    if not sampling.temperature:
        kept[:] = False
        kept[np.argmax(z)] = True
        return kept
    if 0 < k < kept.sum():
        kept = z >= np.partition(z, -k)[-k]
    if sampling.top_p < 1:
        kept &= _above(z, kept, 0.0)[0] < sampling.top_p
    return kept


def log_probs(z: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Log probabilities float64 [vocabulary] over the kept tokens, -inf elsewhere."""
    z = np.where(kept, z, -np.inf)
    top = z.max()
    return z - (top + np.log(np.exp(z - top).sum()))


def process(row: np.ndarray, sampling: Sampling, past: History | None) -> np.ndarray:
    """The log probabilities [vocabulary] a token is drawn from; all NaN for a row that nothing can be drawn from."""
    if not usable(row):
        return np.full(len(row), np.nan)
    z = scaled(row, sampling, past)
    return log_probs(z, keep(z, sampling))


def _above(z: np.ndarray, kept: np.ndarray, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Mass [vocabulary] of kept tokens surely and possibly above each, when any two may move by `reach` against each
    other: those more than `reach` above it, and all that are not more than `reach` below it, itself left out."""
    order = np.argsort(-z, kind="stable")
    down = -z[order]  # ascending
    p = np.exp(log_probs(z, kept))
    mass = np.concatenate([[0.0], np.cumsum(p[order])])
    surely = mass[np.searchsorted(down, -z - reach, side="left")]
    possibly = mass[np.searchsorted(down, -z + reach, side="right")] - p
    return surely, possibly


def uncertain(z: np.ndarray, eta: float, sampling: Sampling) -> np.ndarray:
    """bool [vocabulary]: tokens that could be kept or cut otherwise if every value of z moved by up to eta."""
    there = np.isfinite(z)
    k, none = sampling.kept, np.zeros_like(there)
    inside, edge = there, none
    if 0 < k < there.sum():
        inside = z >= np.partition(z, -k)[-k]
        last, first_out = np.partition(z, (-k - 1, -k))[[-k, -k - 1]]
        if last - first_out <= 2 * eta:
            edge = there & (z <= first_out + 2 * eta) & (z >= last - 2 * eta)
    if sampling.top_p == 1 or not sampling.temperature:
        return edge
    moved = _moved(z, inside, edge, eta) + 1e-12  # float64 sums
    surely, possibly = _above(z, inside, 2 * eta)
    out, stays = surely - moved >= sampling.top_p, possibly + moved < sampling.top_p
    return (inside | edge) & ~out & ~(stays & ~edge)


def _moved(z: np.ndarray, kept: np.ndarray, edge: np.ndarray, eta: float) -> float:
    """Largest total variation between the distribution over `kept` and that of any row within eta of z which keeps
    or cuts the tokens of `edge` as it likes: 1 - (1 - m)(1 - tanh(eta / 2)), m the mass that the edge can hold."""
    core = kept & ~edge
    if not core.any():
        return 1.0
    weight = np.exp(np.where(kept | edge, z, -np.inf) - z[kept].max())
    own, rest = weight[edge & kept].sum(), weight[core].sum()
    swollen = np.exp(2 * eta) * weight[edge].sum()
    largest = max(own / (own + rest), swollen / (swollen + rest)) if np.isfinite(swollen) else 1.0
    inner = math.tanh(eta / 2) if core.sum() > 1 else 0.0
    return float(1 - (1 - largest) * (1 - inner))


def tv_bound(z: np.ndarray, eta: float, sampling: Sampling) -> float:
    """Largest total variation of the processed distribution that moving every value of z by up to eta can make."""
    if not (usable(z) and np.isfinite(eta)):
        return math.nan
    return _moved(z, keep(z, sampling), uncertain(z, eta, sampling), eta)


def raw_reach(a: np.ndarray, b: np.ndarray, sampling: Sampling) -> float:
    """How far two raw rows are apart, as far as it can matter: the largest |difference|, of the best shift of one
    against the other unless shifts matter. NaN unless the same tokens are left out (-inf) in both."""
    there = ~(np.isneginf(a) & np.isneginf(b))
    with np.errstate(invalid="ignore"):
        difference = b[there] - a[there]
    if not np.isfinite(difference).all():
        return math.nan
    return float(np.abs(difference).max() if sampling.shifts else np.ptp(difference) / 2)


def distance(log_p: np.ndarray, log_q: np.ndarray) -> tuple[float, float]:
    """Total variation, and KL(p || q) in nats: inf where q cuts what p keeps."""
    if np.isnan(log_p[0]) or np.isnan(log_q[0]):
        return math.nan, math.nan
    p, q = np.exp(log_p), np.exp(log_q)
    held = np.isfinite(log_p)
    kl = float((p[held] * (log_p[held] - log_q[held])).sum())
    return float(np.abs(p - q).sum() / 2), max(kl, 0.0)  # rounding can leave a tiny negative sum


# Shared randomness


def stream(*key: object) -> np.random.Generator:
    """Random numbers that belong to a key (JSON values), the same on every machine."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest, "big")))


def noise(rng: np.random.Generator, *size: int) -> np.ndarray:
    """Gumbel noise: the argmax of log probabilities plus it is a draw from them."""
    return -np.log(-np.log(np.maximum(rng.random(size), np.finfo(float).tiny)))


def choose(log_p: np.ndarray, noise: np.ndarray | None) -> int:
    """The token that this noise draws; the lowest id of equals, -1 where nothing can be drawn. None is no noise."""
    if np.isnan(log_p[0]):
        return -1
    return int(np.argmax(log_p if noise is None else log_p + noise))


@dataclass(frozen=True)
class Sampler:
    """Draws the next token of one prompt's text under shared randomness: the noise belongs to the seed, the prompt's
    `tokens` and the text before the token, whoever asks."""

    sampling: Sampling
    seed: int
    tokens: tuple[int, ...]

    @cached_property
    def _prompt(self) -> str:
        return hashlib.blake2b(json.dumps([int(token) for token in self.tokens]).encode()).hexdigest()

    def noise(self, made: Sequence[int], vocabulary: int) -> np.ndarray | None:
        """Gumbel noise [vocabulary] for the token after `made`, the output so far. None at temperature 0."""
        if not self.sampling.temperature:
            return None
        return noise(stream(self.seed, self._prompt, [int(token) for token in made]), vocabulary)

    def pick(self, logits, made: Sequence[int]) -> int:
        """The token drawn from raw logits (a tensor [vocabulary]) after the output `made`."""
        if not self.sampling.active:
            return int(logits.argmax())
        token = self.draw(process(to_numpy(logits), self.sampling, History(self.tokens, tuple(made))), made)
        return token if token >= 0 else int(logits.argmax())

    def favour(self, logits, token: int) -> np.ndarray:
        """Raw logits as float64, with `token`, the one that was drawn, changed places with the largest."""
        row = to_numpy(logits)
        if self.sampling.active:
            top = int(np.argmax(row))
            row[[top, token]] = row[[token, top]]
        return row

    def draw(self, log_p: np.ndarray, made: Sequence[int]) -> int:
        """The token drawn from log probabilities [vocabulary]; -1 where nothing can be drawn."""
        return choose(log_p, self.noise(made, len(log_p)))


def to_numpy(row) -> np.ndarray:
    """A tensor as float64."""
    return row.detach().double().cpu().numpy()
