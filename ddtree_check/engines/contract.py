"""The contract of an engine: each part with its law, and the defaults of what an engine lacks."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from ..base.errors import Unsupported, UsageError
from ..model.wiring import FORKED, Layer, State, Wiring
from ..tree.draft_tree import DraftTree

ASSUMED = (Layer("assumed", ((State("assumed"),),)),)  # one flat state: node i is clean iff depth(i) == i

DECODING = "step, the plain decoding that passes are compared with"


@dataclass(eq=False)
class Watched:
    """What the layers of one pass put out: `outputs` layer -> [rows, d], -1 being what goes into the first one, and
    `routes` layer -> int [rows, k], the experts that each row was sent to."""

    outputs: dict[int, Any] = field(default_factory=dict)
    routes: dict[int, Any] = field(default_factory=dict)


class Engine(Protocol):
    """All that an engine may offer, each part with its law. The bodies are the defaults of `BaseEngine`.

    `prefill` and `verify` are needed. Every other part that an engine lacks costs its own checks and is never a pass:
    its default raises errors.Unsupported with the reason, or gives a reason or None as the value. `step` or `decode`
    is plain decoding (ar), which the comparisons are made with. Logits are tensors of float64, float32, bfloat16 or
    float16 on any device, [nodes, vocabulary]. Prefix and Verified are opaque but for their `logits`, and never
    modified by what follows: any number of passes may start from one Prefix.
    """

    name: str = ""  # the class's own if it is empty
    vocab_size: int | None = None  # None for as many as prefill gives logits
    max_length: int | None = None  # positions the model was made for; None if it does not say
    layers: Sequence[Layer] = ASSUMED  # what each layer reads across rows
    exact_control: bool = False  # clean nodes of two wirings agree bit for bit
    provenance: Mapping[str, Any] = MappingProxyType({})  # whose weights these are: name, weights, parameters
    default_draft: str = "self"  # of the embedded model, unless the caller chooses
    hidden_size: int | None = None  # with `dtype` and `device` of the embeddings, for a drafter that reads features
    dtype: Any = None
    device: Any = None

    @classmethod
    def load(cls, model: str | None, **settings) -> Engine:
        """Return the engine of a model's name, path or hub id. settings: weights, dtype, device, seed and progress, and
        of args, tp and rows those that the signature names. By default the class is called with all of them."""
        return cls(model, **settings)

    @staticmethod
    def load_config(model: str | None, source: str, weights: str) -> Any:
        """Return the model's configuration before its weights are read; see `loading.load_config`."""
        return importlib.import_module("ddtree_check.engines.transformers.loading").load_config(model, source, weights)

    def describe(self) -> dict[str, Any]:
        """Return versions, device, dtype, kernels, flags: all that can change a number, in JSON's types.

        `dtype` is what the engine computes in, `judged_as` a coarser one that bounds it. By default that of the logits.
        """
        logits = self.prefill((0,)).logits
        return {"engine": named(self), "dtype": str(logits.dtype).removeprefix("torch."), "device": str(logits.device)}

    def supports(self, wiring: Wiring | None) -> str | None:
        """Return None, or the reason why a pass under this wiring cannot be made. Asked before each; runs nothing.

        Refusing None takes `linear` and the padded control, refusing FORKED takes `tree_forked` and the chain control.
        """
        return (
            None if wiring in (None, FORKED) else f"engine {named(self)} runs no wiring but its own pass and the tree's"
        )

    @abstractmethod
    def prefill(self, tokens: Sequence[int]) -> Any:
        """Return the Prefix after `tokens` (at least one); its `logits` [vocabulary] are those of the last token."""

    @abstractmethod
    def verify(self, prefix: Any, tree: DraftTree, wiring: Wiring | None) -> Any:
        """Run all rows in one pass: a Verified with `logits`. None is the engine's own multi-token pass, no fork."""

    def decodes(self) -> str | None:
        """Return why there is no plain decoding, or None. Without it the exact checks alone judge."""
        missing = type(self).step is Engine.step and type(self).decode is Engine.decode
        return str(lacks(self, DECODING)) if missing else None

    def step(self, prefix: Any, token: int) -> tuple[Any, Any]:
        """Make one plain decode step: the logits [vocabulary] after `token`, and the Prefix that then stands."""
        raise lacks(self, DECODING)

    def decode(self, prefix: Any, tree: DraftTree, *, batched: bool = False) -> Any:
        """Return logits at every node by plain steps along its path; each node once, alone, or level by level if
        `batched`. By default made of `step`."""
        if batched:
            raise Unsupported(f"engine {named(self)} decodes one node at a time; take --ar strict")
        import torch  # not with the module: a list of engines needs none

        return torch.stack([logits for _, logits, _ in walk(self, prefix, tree)])

    def forward(self, paths: Sequence[Sequence[int]], keep: int) -> Any:
        """Run full forward passes without a cache: the last `keep` rows' logits [paths, keep, vocabulary]. Without it
        the reference is checked by repetition only."""
        raise lacks(self, "forward")

    def commit(self, verified: Any, node: int) -> Any:
        """Return the Prefix after the path to `node`, stored the way the engine and the wiring store it: decoding on
        from it is decoding on from a prefill of the same text. Without it --accept and generate check nothing."""
        raise lacks(self, "commit")

    def contents(self, prefix: Any) -> tuple[int, list[dict[str, Any]]]:
        """Return how many tokens a Prefix stands after, and what each layer carries, as tensors by channel: `keys` and
        `values` [rows, d] and `conv` (`conv.1` ... for more) [inputs, d], the oldest row first; `recurrent` [...].
        Without it --accept and --batch check nothing."""
        raise lacks(self, "contents")

    def batches(self) -> Batches | str:
        """Return the passes over several requests at once, or the reason why there are none."""
        return f"the engine {named(self)} runs one request a pass"

    def processed(self, mode, tree: DraftTree, nodes, logits, sampling, prompt_tokens, made) -> Any:
        """Return what the engine's logit processors make of raw rows [m, vocabulary] of `nodes`: logits or log
        probabilities, -inf for what they cut; None if it has none, then they are processed as `sampling` does.

        mode: ar or one of verdict.MODES; made: the output before the root, which itself is output too."""
        return None

    def chosen(self, mode, tree: DraftTree, nodes, logits) -> Sequence[int] | None:
        """Return the tokens that the engine takes greedily of raw rows [m, vocabulary] of `nodes`, mode ar included;
        None if it does not pick itself, then the lowest id of equals is taken."""
        return None

    def read_features(self, layers: Sequence[int]) -> None:
        """Keep as `features` of every later Prefix of `prefill` and `step`, and of every Verified, the outputs of these
        layers for the tokens that this pass ran, [rows, layers * hidden_size], in row order.

        They come out of the pass itself. None of a commit's: its tokens were run by `verify`. No layers: none are kept.
        """
        raise lacks(self, "hidden features for a drafter (read_features)")

    def embed(self, tokens: Sequence[int]) -> Any:
        """Return rows of the embedding table [tokens, hidden_size], without what the model may do to them."""
        raise lacks(self, "embed")

    def head(self, hidden: Any) -> Any:
        """Run the model's output head alone: [rows, hidden_size] to [rows, vocabulary]."""
        raise lacks(self, "head")

    def watch(self, layers: Sequence[int]) -> AbstractContextManager[Watched]:
        """Let every pass of one request within it leave what these layers put out, in place of what the last one left.
        Without it more is guessed where a fault is looked for (`attribution`)."""
        raise lacks(self, "watch")

    def exact(self) -> Engine:
        """Return this model in float64 throughout: the oracle. Raises UsageError if there is none, or no room."""
        raise UsageError(f"oracle: engine {named(self)} has no float64 of its own (exact); leave --oracle out")

    @property
    def fresh(self) -> Engine:
        """Return the engine that makes the passes: itself, unless it remembers those of another or looks at them."""
        return self

    def close(self) -> None:
        """End what the engine started; no Prefix is of use afterwards."""


class BaseEngine(Engine):
    """An engine of one's own begins here: it has `prefill` and `verify`, and what else it can."""


def named(engine: Engine) -> str:
    """Return the name by which messages call an engine."""
    return engine.name or type(engine).__name__


def lacks(engine: Engine, part: str) -> Unsupported:
    """Return the refusal of an engine without a part of the contract."""
    return Unsupported(f"engine {named(engine)} has no {part}")


def walk(engine: Engine, prefix: Any, tree: DraftTree) -> Iterator[tuple[int, Any, Any]]:
    """Yield every node in flat order with its logits and the Prefix after it, by plain steps; a Prefix is let go after
    its last child."""
    standing = {-1: prefix}
    waiting = [len(children) for children in tree.children]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        logits, standing[node] = engine.step(standing[parent], token)
        yield node, logits, standing[node]
        if not waiting[node]:
            del standing[node]
        if parent >= 0:
            waiting[parent] -= 1
            if not waiting[parent]:
                del standing[parent]


class Batches(Protocol):
    """Passes over several requests at once, each with its own prompt, length and tree, in the order given.

    padding: on which side the shorter ones are filled up, 'left' or 'right'.
    """

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, padding: str = "left", width: int | None = None
    ) -> list[Any]:
        """Return a Prefix for each prompt. width: columns of the batch, the longest prompt's or more."""

    def step(self, prefixes: Sequence[Any], tokens: Sequence[int], *, padding: str = "left") -> list[tuple[Any, Any]]:
        """Make one plain decode step of every request: logits [vocabulary] and the Prefix that then stands."""

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
        """Run one pass over all trees: a Verified for each, that `Engine.commit` takes. rows: rows of every tree, the
        widest's or more; idle: requests that only fill the batch, behind the others."""

    def reorder(self, prefixes: Sequence[Any], order: Sequence[int]) -> list[Any]:
        """Return the requests of one batch in another order, as the engine moves them; some may come twice."""
