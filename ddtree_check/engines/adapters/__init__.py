"""Stand-ins for the library's recurrent functions: same arguments, same rounding, rows read as the plan says.

An adapter is called as the function it stands in for, with the pass's `Swap` in front. One file a recurrence; the table
`ADAPTERS` gives each the name that the family rows use.
"""

from __future__ import annotations

from . import conv, gated_delta
from .swap import Swap

ADAPTERS = {
    "conv": conv.rows,
    "conv_update": conv.one,
    "gated_delta": gated_delta.rows,
}

__all__ = ["ADAPTERS", "Swap"]
