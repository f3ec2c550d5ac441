"""Stand-ins for the library's recurrent functions: same arguments, same rounding, rows read as the plan says.

An adapter is called as the function it stands in for, with the pass's `Swap` in front. One file a recurrence; the table
`ADAPTERS` gives each the name that the family rows use.
"""

from __future__ import annotations

from . import conv, gated_delta, indexers, lightning, mamba1, mamba2, ngram, rg_lru, zaya
from .swap import Swap, training_only

ADAPTERS = {
    "conv": conv.rows,
    "conv_update": conv.one,
    "gated_delta": gated_delta.rows,
    "mamba2": mamba2.rows,
    "mamba2_update": mamba2.one,
    "mamba1": mamba1.rows,
    "mamba1_update": mamba1.one,
    "kda": gated_delta.kda_rows,
    "lightning": lightning.layer,
    "griffin_block": rg_lru.block,
    "rg_lru": rg_lru.rows,
    "ngram": ngram.embed,
    "dilated_conv": ngram.dilated_conv,
    "delayed_value": zaya.project,
    "path_indexer": indexers.along_paths,
    "relative_logits": indexers.relative_logits,
    "training_only": training_only,
}

__all__ = ["ADAPTERS", "Swap"]
