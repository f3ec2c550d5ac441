"""Engines by name: looked up, imported on first use, loaded and wrapped once."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import Unsupported, UsageError
from .contract import Engine

if TYPE_CHECKING:
    from .checked import Checked

ENGINES = {  # looked up by name, imported on first use
    "transformers": "ddtree_check.engines.transformers.engine:TransformersEngine",
    "trace": "ddtree_check.engines.recorded:TraceEngine",
    "sglang": "ddtree_check.engines.sglang.engine:SGLangEngine",
}
REPLAYED = ("trace",)  # run nothing: they give back passes that were recorded


def find_engine(name: str) -> Any:
    """Return the class of an engine: a name of ENGINES, or a class of one's own as package.module:Class.

    A module of one's own is looked for in the current directory too, after everything that is installed. Raises
    UsageError in one line for a name that leads to no class with a `load`.
    """
    if name not in ENGINES and ":" not in name:
        raise UsageError(f"engine: got {name!r}, expected one of {', '.join(ENGINES)}, or package.module:Class")
    module, _, attribute = ENGINES.get(name, name).partition(":")
    if name in ENGINES:
        return getattr(importlib.import_module(module), attribute)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        home = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a stranger's module does as it is imported
        raise UsageError(
            f"engine: {name}: {type(error).__name__}: {error}; expected a module that can be imported here"
        ) from None
    if not callable(getattr(getattr(home, attribute, None), "load", None)):
        raise UsageError(f"engine: {name}: {module} has no {attribute!r} with a load(); expected a class like Engine")
    return getattr(home, attribute)


def of_class(name: str, part: str) -> Any:
    """Return a part of an engine's class that needs no engine, or the contract's default."""
    return getattr(find_engine(name), part, getattr(Engine, part))


def load_options(name: str, *, args: Mapping[str, object], tp: int, rows: int) -> dict[str, Any]:
    """Return those of the engine's own arguments, tensor-parallel ranks and largest tree (rows) that its `load` takes.

    Raises UsageError if something was asked for that it does not take.
    """
    takes = _signature(name).parameters
    if args and "args" not in takes:
        raise UsageError(f"engine-arg: got {', '.join(args)}, but engine {name} takes none")
    if tp != 1 and "tp" not in takes:
        raise UsageError(f"tp: got {tp}, but engine {name} runs on one rank; --engine sglang takes more")
    given = {"args": args, "tp": tp, "rows": rows}
    return {key: value for key, value in given.items() if key in takes}


def load_engine(name: str, *args, vocab_size: int | None = None, **settings) -> Checked:
    """Return an engine by name or path, see `find_engine`, complete and looked at as it is used.

    vocab_size: tokens of its vocabulary, None for all. Raises UsageError in one line for whatever its `load` raises.
    """
    from .checked import Checked, told

    try:
        _signature(name).bind(*args, **settings)
    except TypeError as error:
        raise UsageError(
            f"engine {name}: load: {error}; expected load(model, *, weights, dtype, device, seed, progress)"
        ) from None
    try:
        engine = find_engine(name).load(*args, **settings)
    except (UsageError, Unsupported):
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"engine {name}: load {told(error)}") from error
    return Checked(engine, vocab_size, name)


def _signature(name: str) -> inspect.Signature:
    try:
        return inspect.signature(find_engine(name).load)
    except ValueError as error:  # some functions that are not written in Python
        raise UsageError(f"engine {name}: load: {error}; expected a function of Python") from None
