"""Engines: they compute logits for a tree and keep its states. They hold no tolerance, no verdict and no printing."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..base.errors import UsageError
from ..model.wiring import Layer, Wiring
from ..tree.draft_tree import DraftTree

ENGINES = {  # looked up by name, imported on first use
    "transformers": "ddtree_check.engines.transformers.engine:TransformersEngine",
    "trace": "ddtree_check.trace.recorded:TraceEngine",
    "sglang": "ddtree_check.engines.sglang.engine:SGLangEngine",
}


@dataclass(eq=False)
class Watched:
    """What the layers of one pass put out: `outputs` layer -> [rows, d], -1 being what goes into the first one, and
    `routes` layer -> int [rows, k], the experts that each row was sent to."""

    outputs: dict[int, Any] = field(default_factory=dict)
    routes: dict[int, Any] = field(default_factory=dict)


class Engine(Protocol):
    """What `check` needs of an engine. Logits are tensors [nodes, vocabulary] in the model's dtype, on any device.

    `prefill` and `decode` must work: without plain decoding there is nothing to judge by. What else an engine cannot do
    costs that mode or control alone, and is never a pass: `supports` gives a reason, or `verify` or `forward` raises
    errors.Unsupported with one. A refused wiring makes its mode `unsupported`; refusing None takes `linear` and the
    padded control, refusing the forked wiring takes `tree_forked` and the chain control, and without `forward` the
    reference is checked by repetition only.

    Prefix and Verified are opaque and never modified by what follows: any number of passes may start from one Prefix.
    """

    vocab_size: int
    max_length: int | None  # positions the model was made for; None if it does not say
    layers: tuple[Layer, ...]  # what each layer reads across rows
    exact_control: bool  # clean nodes of two wirings agree bit for bit

    def describe(self) -> dict[str, Any]:
        """Versions, device, dtype, kernels, flags: all that can change a number."""

    def supports(self, wiring: Wiring | None) -> str | None:
        """None, or the reason why a pass under this wiring cannot be made. Asked before each; it runs nothing."""

    def prefill(self, tokens: Sequence[int]) -> Any:
        """The Prefix after `tokens` (at least one); its `logits` [vocabulary] are those of the last token."""

    def step(self, prefix: Any, token: int) -> tuple[Any, Any]:
        """One plain decode step: the logits [vocabulary] after `token`, and the Prefix that then stands."""

    def decode(self, prefix: Any, tree: DraftTree, *, batched: bool = False) -> Any:
        """Logits at every node by plain steps along its path; each node once, alone, or level by level if `batched`."""

    def verify(self, prefix: Any, tree: DraftTree, wiring: Wiring | None) -> Any:
        """One pass over all rows: a Verified with `logits`. None is the engine's own multi-token pass, no fork."""

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> Any:
        """Full forward passes without a cache: the last `keep` rows' logits [paths, keep, vocabulary] of each path.
        Raises Unsupported if the engine has no such pass."""

    # Optional; without them nothing that follows a verify pass is checked: --accept, generate and --batch are then
    # unsupported, with that reason. Either may raise Unsupported too.

    def commit(self, verified: Any, node: int) -> Any:
        """The Prefix after the path to `node`, stored the way the engine and the wiring store it."""

    def contents(self, prefix: Any) -> tuple[int, list[dict[str, Any]]]:
        """How many tokens a Prefix stands after, and what each layer carries, as tensors by channel: `keys` and
        `values` [rows, d] and `conv` (`conv.1` ... for more) [inputs, d], the oldest row first; `recurrent` [...]."""

    # Optional, for engines that pick tokens themselves; an engine without them is taken to process rows and to break
    # ties as `sampling` and `ties` do. mode: ar or one of verdict.MODES; logits: raw rows [m, vocabulary] of `nodes`.

    def processed(self, mode, tree: DraftTree, nodes, logits, sampling, prompt_tokens, made) -> Any:
        """What its logit processors make of the rows: logits or log probabilities, -inf for what they cut. made: the
        output before the root."""

    def chosen(self, mode, tree: DraftTree, nodes, logits) -> Sequence[int]:
        """The tokens that it takes greedily."""

    # Optional; an engine without it leaves more to guess where a fault is looked for (`attribution`).

    def watch(self, layers: Sequence[int]) -> AbstractContextManager[Watched]:
        """Within it, every pass of one request leaves what these layers put out, in place of what the last one left."""


NEEDED = (
    *("vocab_size", "max_length", "layers", "exact_control", "describe", "supports"),
    *("prefill", "step", "decode", "verify", "forward"),
)


class Read(Protocol):
    """What a drafter that reads the target's own features needs of an engine besides; see `dflash`. Optional."""

    hidden_size: int
    dtype: Any  # torch's, of the model;  device  likewise, of its embeddings
    device: Any

    def read_features(self, layers: Sequence[int]) -> None:
        """From now on `features` of every Prefix that `prefill` or `step` returns, and of every Verified, are the
        outputs of these layers for the tokens that this pass ran, [rows, layers * hidden_size], in row order. They
        come out of the pass itself. None of a commit's: its tokens were run by `verify`. No layers: none are kept."""

    def embed(self, tokens: Sequence[int]) -> Any:
        """Rows of the model's embedding table [tokens, hidden_size], without what the model may do to them."""

    def head(self, hidden: Any) -> Any:
        """The model's output head alone: [rows, hidden_size] to [rows, vocabulary]."""


class Batches(Protocol):
    """Passes over several requests at once, each with its own prompt, length and tree, in the order given.

    An engine that has them answers `batches()` with these, or with the reason why it has none here; one without that
    method runs one request a pass. padding: on which side the shorter ones are filled up, 'left' or 'right'.
    """

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, padding: str = "left", width: int | None = None
    ) -> list[Any]:
        """A Prefix for each prompt. width: columns of the batch, the longest prompt's or more."""

    def step(self, prefixes: Sequence[Any], tokens: Sequence[int], *, padding: str = "left") -> list[tuple[Any, Any]]:
        """One plain decode step of every request: logits [vocabulary] and the Prefix that then stands."""

    def verify(
        self,
        prefixes: Sequence[Any],
        trees: Sequence[DraftTree],
        wiring: Wiring | None,
        *,
        padding: str = "left",
        rows: int | None = None,
        idle: int = 0,
    ) -> list[Any]:
        """One pass over all trees: a Verified for each, that `Engine.commit` takes. rows: rows of every tree, the
        widest's or more; idle: requests that only fill the batch, behind the others."""

    def reorder(self, prefixes: Sequence[Any], order: Sequence[int]) -> list[Any]:
        """The requests of one batch in another order, moved the way the engine moves them; some may come twice."""


def find_engine(name: str) -> Any:
    """The class of an engine: a name of ENGINES, or a class of one's own as package.module:Class.

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
        found = importlib.import_module(module)
    except Exception as error:  # whatever a stranger's module does as it is imported
        raise UsageError(
            f"engine: {name}: {type(error).__name__}: {error}; expected a module that can be imported here"
        ) from None
    if not callable(getattr(getattr(found, attribute, None), "load", None)):
        raise UsageError(f"engine: {name}: {module} has no {attribute!r} with a load(); expected a class like Engine")
    return getattr(found, attribute)


def load_options(name: str, *, args: Mapping[str, object], tp: int, rows: int) -> dict[str, Any]:
    """Those of the engine's own arguments, tensor-parallel ranks and largest tree (rows) that its `load` takes.

    Raises UsageError if something was asked for that it does not take.
    """
    takes = inspect.signature(find_engine(name).load).parameters
    if args and "args" not in takes:
        raise UsageError(f"engine-arg: got {', '.join(args)}, but engine {name} takes none")
    if tp != 1 and "tp" not in takes:
        raise UsageError(f"tp: got {tp}, but engine {name} runs on one rank; --engine sglang takes more")
    given = {"args": args, "tp": tp, "rows": rows}
    return {key: value for key, value in given.items() if key in takes}


def load_engine(name: str, *args, **settings) -> Engine:
    """An engine by name or path, see `find_engine`. Raises UsageError for one that lacks a part of Engine."""
    engine = find_engine(name).load(*args, **settings)
    lacks = [part for part in NEEDED if not hasattr(engine, part)]
    if lacks:
        raise UsageError(f"engine: {name} lacks {', '.join(lacks)}; expected all of ddtree_check.engines.Engine")
    return engine
