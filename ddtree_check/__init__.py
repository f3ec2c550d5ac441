"""ddtree-check: is my tree verify right on a hybrid recurrent model, and if not, where, how badly and why?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engines import Engine
    from .engines.registry import load_engine
    from .flows.check import check
    from .flows.settings import Item, Settings
    from .model.wiring import Wiring
    from .trace.read import read_trace
    from .trace.write import TraceWriter
    from .tree.draft_tree import DraftTree

__version__ = "0.1.0"
__all__ = ["DraftTree", "Engine", "Item", "Settings", "TraceWriter", "Wiring", "check", "load_engine", "read_trace"]
PLACES = {  # of what is public; imported when it is asked for, so that torch is too
    "check": "flows.check:check",
    "Settings": "flows.settings:Settings",
    "Item": "flows.settings:Item",
    "DraftTree": "tree.draft_tree:DraftTree",
    "Wiring": "model.wiring:Wiring",
    "Engine": "engines:Engine",
    "load_engine": "engines.registry:load_engine",
    "TraceWriter": "trace.write:TraceWriter",
    "read_trace": "trace.read:read_trace",
}


def __getattr__(name: str) -> object:
    """Return a public name from the module that owns it. Raises AttributeError for any other."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PLACES[name].partition(":")
    globals()[name] = getattr(importlib.import_module(f".{module}", __name__), attribute)
    return globals()[name]
