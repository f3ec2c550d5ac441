"""Draft trees from a file in place of a server's own proposals, so that chosen shapes go through its real scheduler.

A script (JSON) holds `trees`, taken in turn by each request, and `texts`: what the server writes after a prompt when
nothing is drafted. A tree says which of its nodes lie on that text; all others get tokens that do not continue it, so
that the walk must end where the script says. See docs/sglang-server.md.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.errors import named, need, usage_errors
from ...base.files import parse_json, read_text
from ...tree.draft_tree import COMMITTED, DraftTree, ancestors
from ...tree.drafts.shapes import shape
from ...tree.variants import varied

ACCEPTS = ("side", "first", "none")
ANY = 1 << 16  # tokens to draw a shape with; they are dealt anew


@dataclass(frozen=True)
class Planned:
    """One tree of a script. tokens: fixed ones, [n], without the root's; else path: the nodes that lie on the text."""

    parents: tuple[int, ...]
    path: tuple[int, ...]
    tokens: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Text:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Script:
    """What a script file holds.

    seed: draws the tokens that do not continue the text. pairs: a prompt that is sent again gets `varied` trees, which
    show together whether the passes are right, bit for bit.
    """

    trees: tuple[Planned, ...]
    texts: tuple[Text, ...] = ()
    seed: int = 0
    pairs: bool = False

    def tree(self, context: Sequence[int], prompt: int, turn: int, vocab: int, earlier: int = 0) -> DraftTree | None:
        """Return the tree behind `context`: its first `prompt` tokens are the prompt, its last one is the root.

        None if the tree of this turn follows a text and the context is on none, or at the end of one. earlier: how
        often this context had a tree before.
        """
        tree = self._tree(context, prompt, turn, vocab)
        if tree is None or not self.pairs:
            return tree
        return varied(tree, earlier, vocab, random.Random(f"{self.seed} {earlier} {len(context)}"))

    def _tree(self, context: Sequence[int], prompt: int, turn: int, vocab: int) -> DraftTree | None:
        text = next((text for text in self.texts if tuple(context[:prompt]) == text.prompt), None)
        start = 0 if text is None else self.texts.index(text)  # requests of one batch get different shapes
        planned = self.trees[(start + turn) % len(self.trees)]
        if planned.tokens is not None:
            return DraftTree((context[-1], *planned.tokens[1:]), planned.parents)
        if text is None:
            return None
        written = tuple(context[prompt:])
        ahead = text.tokens[len(written) : len(written) + len(planned.path)]
        if text.tokens[: len(written)] != written or len(ahead) < len(planned.path):
            return None
        return deal(planned, context[-1], ahead, vocab, self.seed + len(context))


def deal(planned: Planned, root: int, ahead: Sequence[int], vocab: int, seed: int) -> DraftTree:
    """Return tokens for a tree: those of its path continue the text by `ahead` (len(path)), no other node continues it.

    `ahead` has one token more than the path has nodes below the root: the one after it, which no child may be.
    """
    rng, depth = np.random.default_rng(seed), {node: at for at, node in enumerate(planned.path)}
    tokens, used = [root], [{ahead[depth[node]]} if node in depth else set() for node in range(len(planned.parents))]
    for node, parent in enumerate(planned.parents[1:], start=1):
        if node in depth:
            tokens.append(int(ahead[depth[node] - 1]))
            continue
        token = int(rng.integers(vocab))
        while token in used[parent] and len(used[parent]) < vocab:
            token = (token + 1) % vocab
        used[parent].add(token)
        tokens.append(token)
    return DraftTree(tuple(tokens), planned.parents)


def drafts(trees: Sequence[DraftTree | None], tokens: np.ndarray, mask: np.ndarray, rows: int) -> None:
    """Write trees over the drafts of a batch: tokens int [b * rows], mask [b * rows * rows], both in place.

    A row past a tree's last node is a child of the root with token 0, as SGLang itself pads.
    """
    tokens, mask = tokens.reshape(len(trees), rows), mask.reshape(len(trees), rows, rows)
    for place, tree in enumerate(trees):
        if tree is None:
            continue
        if len(tree) > rows:
            raise ValueError(f"script: a tree of {len(tree)} nodes, the server verifies {rows} rows; shorten the tree "
                             "or raise --speculative-num-draft-tokens")  # fmt: skip
        pads = rows - len(tree)
        tokens[place] = (*tree.tokens, *(0,) * pads)
        mask[place] = ancestors((*tree.parents, *(0,) * pads))


# --- the file ---------------------------------------------------------------------------------------------------------


def read_script(path: str | Path) -> Script:
    """Return a script by its file. Raises UsageError, in one line, naming the entry and what was expected."""
    with usage_errors():
        data = parse_json(read_text(path), str(path))
        with named(str(path)):
            return _script(data)


def _script(data: object) -> Script:
    trees = data.get("trees") if isinstance(data, dict) else None
    need(isinstance(trees, list) and trees, 'no "trees":', trees, '{"trees": [...], "texts": [...]}')
    for name in data:
        need(name in ("trees", "texts", "seed", "pairs"), "unknown", name, "trees, texts, seed, pairs")
    texts, seed, pairs = data.get("texts", []), data.get("seed", 0), data.get("pairs", False)
    need(isinstance(pairs, bool), "pairs", pairs, "true or false")
    need(isinstance(texts, list), "texts", texts, "a list")
    need(isinstance(seed, int) and seed >= 0, "seed", seed, "a number of at least 0")
    script = Script(
        tuple(_planned(f"trees[{at}]", entry) for at, entry in enumerate(trees)),
        tuple(_text(f"texts[{at}]", entry) for at, entry in enumerate(texts)),
        seed,
        pairs,
    )
    if not script.texts and any(tree.tokens is None for tree in script.trees):
        raise ValueError('no "texts", expected what the server writes, for trees that say what is to be accepted')
    return script


def _text(where: str, entry: object) -> Text:
    good = isinstance(entry, dict) and entry.keys() == {"prompt", "tokens"}
    need(good, where, entry, "an object with prompt and tokens, lists of token ids")
    return Text(tuple(_ids(f"{where}: prompt", entry["prompt"])), tuple(_ids(f"{where}: tokens", entry["tokens"])))


def _planned(where: str, entry: object) -> Planned:
    good = isinstance(entry, dict) and ("parents" in entry) != ("shape" in entry)
    need(good, where, entry, "an object with either parents or shape")
    keys = ("parents", "tokens", "shape", "nodes", "seed", "order", "accept")
    for name in entry:
        need(name in keys, f"{where}: unknown", name, "parents or shape, and tokens or accept")
    try:
        if "shape" in entry:
            order = {name: entry[name] for name in ("order",) if name in entry}
            bare = shape(entry["shape"], entry.get("nodes", 15), vocab=ANY, seed=entry.get("seed", 0), **order)
        else:
            parents = tuple(_ids("parents", entry["parents"], least=COMMITTED))
            bare = DraftTree((None, *range(1, len(parents))), parents)
        if "tokens" not in entry:
            return Planned(bare.parents, bare.path(_last(bare, entry.get("accept", "side"))))
        if "accept" in entry:
            raise ValueError("tokens and accept, expected one of them")
        tokens = entry["tokens"]
        need(isinstance(tokens, list) and tokens, "tokens", tokens, "one token id for each node")
        tokens = (None, *_ids("tokens", tokens[1:]))
        return Planned(DraftTree(tokens, bare.parents).parents, (), tokens)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _last(tree: DraftTree, accept: object) -> int:
    """Return the node where the walk is to end."""
    if isinstance(accept, int) and not isinstance(accept, bool) and 0 <= accept < len(tree):
        return accept
    if accept not in ACCEPTS:
        raise ValueError(f"accept {accept!r:.40}, expected {', '.join(ACCEPTS)} or a node in 0..{len(tree) - 1}")
    first = {0, *(kids[0] for kids in tree.children if kids)}
    side: set[int] = set()
    for node, parent in enumerate(tree.parents):
        if node not in first or parent in side:
            side.add(node)
    if accept == "none":
        return 0
    among = side if accept == "side" else set(range(len(tree))) - side
    if not among:
        raise ValueError(f"accept {accept!r}, and no node lies off the first branch; expected a tree that branches")
    return max(sorted(among), key=lambda node: tree.depth[node])


def _ids(where: str, values: object, *, least: int = 0) -> list[int]:
    need(isinstance(values, list) and values, where, values, "a list of numbers")
    for value in values:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        need(good, f"{where}:", value, f"numbers of at least {least}")
    return values
