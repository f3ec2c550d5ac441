"""Small models and drawn trees that several test files share."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import AutoConfig

from ddtree_check.engines.transformers.engine import TransformersEngine
from ddtree_check.engines.transformers.loading import build_random
from ddtree_check.model.small_shapes import SHAPES, VOCAB
from ddtree_check.model.wiring import BLANK, FORKED, UNFORKED, Wiring
from ddtree_check.selftest import inject
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid")
PLAIN = ("llama", "qwen3")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_engine(family: str, dtype: str = "float32", mixers: str = "library", seed: int = 0, **changes):
    # A configuration keeps the very lists it is given.
    config = AutoConfig.for_model(family, **copy.deepcopy(SHAPES[family] | changes))
    model = build_random(config, dtype=DTYPES[dtype], device=torch.device("cpu"), seed=seed)
    return TransformersEngine(model, mixers=mixers, provenance={"name": f"tiny {family}", "weights": "random"})


def engine(family: str, dtype: str = "float32", mixers: str = "library", **changes) -> TransformersEngine:
    """Return an engine that all tests share: one that changes its engine makes its own."""
    return _shared(family, dtype, mixers, repr(changes))


def small(dtype: str = "float32") -> TransformersEngine:
    """Return the shared engine of two layers, Gated DeltaNet and attention: half the cost where any hybrid will do."""
    return engine("qwen3_5_text", dtype, **SMALL)


SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def make_small(dtype: str = "float32") -> TransformersEngine:
    return make_engine("qwen3_5_text", dtype, **SMALL)


@functools.cache
def _shared(family: str, dtype: str, mixers: str, changes: str) -> TransformersEngine:
    return make_engine(family, dtype, mixers, **ast.literal_eval(changes))


def states_of_next(host, *channels: str, layer: int):
    """Return a change of `verify` for `inject.batched`: every request starts from the next one's states in a layer."""

    def change(right, prefixes, *args, **kwargs):
        pairs = zip(prefixes, (*prefixes[1:], *prefixes[:1]), strict=True)
        wrong = [inject.mixed(host, prefix, other, channels, layer=layer) for prefix, other in pairs]
        return right(wrong, *args, **kwargs)

    return change


def tree(name: str = "random", nodes: int = 16, *, order: str = "heap", seed: int = 0, root: int = 5) -> DraftTree:
    return shape(name, nodes, vocab=VOCAB, seed=seed, order=order, root=root)


# What mixers are held to: every shape, size and order, and a state that comes from anywhere before a row.
TREES = {
    f"{name}-{nodes}-{order}": tree(name, nodes, order=order, seed=3)
    for name, nodes, order in (
        ("chain", 1, "heap"),
        ("chain", 64, "heap"),
        ("star", 16, "heap"),
        ("kary", 16, "depth"),
        ("kary", 64, "breadth"),
        ("comb", 16, "heap"),
        ("comb", 64, "depth"),
        ("random", 16, "breadth"),
        ("random", 64, "heap"),
        ("random", 64, "depth"),
    )
}


def _dropped(tree: DraftTree) -> tuple[int, ...]:
    return (BLANK, *tree.parents[1:])


def _drawn(tree: DraftTree) -> tuple[int, ...]:
    return tuple((node * 7919) % (node + 1) - 1 for node in range(len(tree)))


def _blank_inside(tree: DraftTree) -> tuple[int, ...]:
    return tuple(BLANK if node == len(tree) // 2 else parent for node, parent in enumerate(tree.parents))


DROPPED = Wiring("dropped start", state=_dropped, conv=_dropped)
BLANK_INSIDE = Wiring("blank inside", state=_blank_inside)
WRONG = (UNFORKED, DROPPED, BLANK_INSIDE, Wiring("drawn", state=_drawn))
WIRINGS = (FORKED, *WRONG)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def nan_at_the_root(logits: torch.Tensor, tree: DraftTree, wiring) -> torch.Tensor:
    """For `Faulty(engine, logits=...)`."""
    return torch.cat([torch.full_like(logits[:1], torch.nan), logits[1:]])


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest |difference| of each row; inf where there is a NaN."""
    return torch.nan_to_num((a.double() - b.double()).abs(), nan=torch.inf).amax(-1)


def folded(step, start: torch.Tensor, rows: Sequence[torch.Tensor], sources: Sequence[int]):
    """Run a step over the nodes of a wiring, one after the other, and return states and outputs, each [n, ...].

    start: the state that -1 means. rows: tensors with one row a node, in the order that `step` takes them.
    """
    states, outputs = [], []
    for node, source in enumerate(sources):
        before = torch.zeros_like(start) if source == BLANK else states[source] if source >= 0 else start
        state, output = step(before, *(row[node] for row in rows))
        states.append(state)
        outputs.append(output)
    return torch.stack(states), torch.stack(outputs)


def folded_by_head(step, start: torch.Tensor, rows: Sequence[torch.Tensor], sources: Sequence[int]):
    """Run `folded` for every head: start [h, ...], rows [h, n, ...] give states [n, h, ...] and outputs [h, n, ...]."""
    heads = [folded(step, first, inputs, sources) for first, *inputs in zip(start, *rows, strict=True)]
    states, outputs = zip(*heads, strict=True)
    return torch.stack(states, dim=1), torch.stack(outputs)


def farthest(scan, output: torch.Tensor, states: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Largest |difference| of a scan's output and of its states at these nodes; inf where there is a NaN."""
    return max(off(scan.output, output).max(), *(off(scan.state(node), state).max() for node, state in states))
