"""ddtree-check: is my tree verify right on a hybrid recurrent model, and if not, where, how badly and why?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .check import check
    from .engines import Engine, load_engine
    from .settings import Item, Settings
    from .trace import TraceWriter, read_trace
    from .tree import DraftTree
    from .wiring import Wiring

__version__ = "0.1.0"
__all__ = ["DraftTree", "Engine", "Item", "Settings", "TraceWriter", "Wiring", "check", "load_engine", "read_trace"]
PLACES = {  # of what is public; imported when it is asked for, so that torch is too
    "check": "check:check",
    "Settings": "settings:Settings",
    "Item": "settings:Item",
    "DraftTree": "tree:DraftTree",
    "Wiring": "wiring:Wiring",
    "Engine": "engines:Engine",
    "load_engine": "engines:load_engine",
    "TraceWriter": "trace:TraceWriter",
    "read_trace": "trace:read_trace",
}


def __getattr__(name: str) -> object:
    """Return a public name from the module that owns it. Raises AttributeError for any other."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PLACES[name].partition(":")
    globals()[name] = getattr(importlib.import_module(f".{module}", __name__), attribute)
    return globals()[name]
