"""Faults put into a drafter: it then drafts badly, and nothing that is verified may change for it.

Nothing here knows how a fault is found: comparison and verdict may not be imported. Source of the kinds: reports of
drafters that read the wrong layers, whose acceptance fell while the output stayed the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..engines.dflash import Drafter


@dataclass(frozen=True, eq=False)
class Misled(Drafter):
    """A drafter that is handed other features, or whose rows are read elsewhere."""

    features: Callable[[torch.Tensor], torch.Tensor] = lambda features: features
    rows: Callable[[np.ndarray], np.ndarray] = lambda rows: rows[1:]

    def marginals(self, engine, features, root, length):
        table = self.read(engine, self.features(features), [root] + [self.spec.mask_token] * length)
        return self.rows(table)


def wrong_layers(drafter: Drafter) -> Drafter:
    """Each target layer one too early: an offset that was counted with the embedding, or not."""
    layers = tuple(max(0, layer - 1) for layer in drafter.spec.layers)
    return replace(drafter, spec=replace(drafter.spec, layers=layers))


def shifted_block(drafter: Drafter) -> Drafter:
    """Depth d is read from row d - 1."""
    return Misled(drafter.network, drafter.spec, drafter.name, rows=lambda rows: rows[:-1])


def stale_features(drafter: Drafter) -> Drafter:
    """Every token stands where the features of the one before it belong, and the last one's are missing."""
    return Misled(drafter.network, drafter.spec, drafter.name, features=lambda rows: torch.cat([rows[:1], rows[:-1]]))


def wrong_mask(drafter: Drafter) -> Drafter:
    """Another token stands for what is not known."""
    other = (drafter.spec.mask_token + 1) % drafter.spec.vocab
    return replace(drafter, spec=replace(drafter.spec, mask_token=other))


DRAFT_FAULTS = {
    "wrong layers": wrong_layers,
    "shifted block": shifted_block,
    "stale features": stale_features,
    "wrong mask token": wrong_mask,
}
