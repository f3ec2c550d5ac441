"""Check token ids and counts that come from outside."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def token_ids(what: str, values: Iterable, vocab: int | None = None) -> tuple[int, ...]:
    """Return `values` as a tuple of token ids, not empty, 0 or above and below `vocab` if given. Raises ValueError."""
    ids = tuple(values)
    if not ids:
        raise ValueError(f"{what}: no tokens, expected at least one")
    for place, value in enumerate(ids):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < 0 or (vocab is not None and value >= vocab):
            expected = "a token id >= 0" if vocab is None else f"a token id in 0..{vocab - 1}"
            raise ValueError(f"{what}: token {place} is {value!r:.40}, expected {expected}")
    return tuple(map(int, ids))


def at_least(low: int, what: str, value: object) -> int:
    """Return an integer that is not below `low`. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise ValueError(f"{what} {value!r:.40}, expected an integer >= {low}")
    return int(value)
