"""Read and write recorded drafts, marginals or trees, and make the tree of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.errors import named
from ...base.files import json_lines
from ..draft_tree import DraftTree
from ..formats import is_tree, tree_from_json
from ..token_ids import at_least, token_ids
from .best_first import LOWEST, ROUNDING, best_first


@dataclass(frozen=True)
class Marginals:
    """A recorded draft distribution: per depth the kept token ids and their log probabilities; all others are -inf."""

    ids: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        if not self.ids or len(self.ids) != len(self.log_probs):
            raise ValueError(
                f"marginals: {len(self.ids)} depths of ids and {len(self.log_probs)} of log_probs; "
                "expected as many of both, and at least one"
            )
        for depth, (ids, values) in enumerate(zip(self.ids, self.log_probs, strict=True), start=1):
            token_ids(f"marginals: depth {depth}", ids)
            if len(set(ids)) != len(ids) or len(ids) != len(values):
                raise ValueError(
                    f"marginals: depth {depth} has {len(ids)} ids ({len(set(ids))} distinct) and {len(values)} "
                    "log_probs; expected distinct ids, one log prob each"
                )
            for token, value in zip(ids, values, strict=True):
                number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
                if not number or not LOWEST <= value <= ROUNDING:
                    raise ValueError(
                        f"marginals: depth {depth} token {token} has log prob {value!r:.40}, expected a float32 <= 0"
                    )

    def dense(self, vocab: int) -> np.ndarray:
        """Return log probabilities float32 [L, vocab]. Raises ValueError naming an id outside the vocabulary."""
        table = np.full((len(self.ids), at_least(1, "marginals: vocab", vocab)), -np.inf, dtype=np.float32)
        for depth, (ids, values) in enumerate(zip(self.ids, self.log_probs, strict=True)):
            table[depth, token_ids(f"marginals: depth {depth + 1}", ids, vocab)] = values
        return table

    @classmethod
    def from_json(cls, data: object) -> Marginals:
        """Read {"ids": [[...] per depth], "log_probs": [[...] per depth]}."""
        columns = [data.get(key) for key in ("ids", "log_probs")] if isinstance(data, dict) else [None]
        if not all(isinstance(column, list) and all(isinstance(row, list) for row in column) for column in columns):
            raise ValueError(f"marginals: got {data!r:.60}, expected 'ids' and 'log_probs', a list per depth each")
        return cls(*(tuple(map(tuple, column)) for column in columns))


Recorded = DraftTree | Marginals | tuple[DraftTree, ...]  # one tree, what to make trees of, or a tree for each round


def load_recorded(path: str | Path) -> list[Recorded]:
    """Read recorded drafts, JSON lines, each {"tree": {"tokens", "parents"}}, {"marginals": {"ids", "log_probs"}} or
    {"trees": [{"tokens", "parents"}, ...]}, a tree for each round; or a round of a DDTree trace, or {"paths": ...}.

    Raises ValueError naming the file and the line.
    """
    drafts: list[Recorded] = []
    for line, data in json_lines(path):
        with named(f"{path}:{line}"):
            drafts.append(recorded_from_json(data))
    return drafts


def recorded_from_json(data: object) -> Recorded:
    """Read one recorded draft; a tree in any form of `formats.tree_from_json`. Raises ValueError."""
    if is_tree(data):  # a round as other tools write it
        return tree_from_json(data)
    kinds = [kind for kind in ("tree", "marginals", "trees") if isinstance(data, dict) and kind in data]
    if len(kinds) != 1:
        raise ValueError(f"got {data!r:.60}, expected an object with 'tree', 'marginals' or 'trees'")
    value = data[kinds[0]]
    if kinds == ["trees"]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"trees: got {value!r:.60}, expected a list of trees, one for each round")
        return tuple(map(tree_from_json, value))
    return (tree_from_json if kinds == ["tree"] else Marginals.from_json)(value)


def recorded_to_json(draft: Recorded) -> dict:
    """Return the inverse of `recorded_from_json`."""
    if isinstance(draft, Marginals):
        columns = {"ids": draft.ids, "log_probs": draft.log_probs}
        return {"marginals": {name: [list(row) for row in rows] for name, rows in columns.items()}}
    if isinstance(draft, DraftTree):
        return {"tree": draft.to_json()}
    return {"trees": [tree.to_json() for tree in draft]}


def recorded_tree(draft: DraftTree | Marginals, vocab: int, budget: int, root: int | None = None) -> DraftTree:
    """Return the tree of one recorded draft, at most `budget` drafted nodes.

    Marginals are expanded best-first. A recorded tree keeps its first `budget` nodes (a tree at every cut, since
    parents come first) and its own root token unless `root` is given.

    Raises ValueError for a budget below 1 and for a node's token outside the vocabulary.
    """
    if isinstance(draft, Marginals):
        return best_first(draft.dense(vocab), budget, root)
    rows = at_least(1, "recorded: budget", budget) + 1
    tree = DraftTree(draft.tokens[:rows], draft.parents[:rows])
    tree = tree if root is None else tree.with_root(root)
    for node, token in enumerate(tree.tokens):
        if token is not None and token >= vocab:
            raise ValueError(f"recorded: node {node} has token {token}, expected 0..{vocab - 1}")
    return tree
