"""Inputs for verify kernels: trees, numbers that bite, and buffers full of NaN. A case is made the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..base.errors import UsageError
from ..tree.draft_tree import DraftTree
from ..tree.drafts.best_first import best_first, published_tree
from ..tree.drafts.shapes import shape
from ..tree.formats import to_batch_links
from .forms import FORMS, Call, CommitCall, ConvCall, DeltaCall, Mamba2Call

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = tuple(FORMS)
VOCAB = 1000


@dataclass(frozen=True)
class Size:
    """Channels of the convolution, its width; key and value heads and widths; groups. Unequal where they may be."""

    channels: int = 20
    width: int = 4
    key_heads: int = 1
    heads: int = 2
    key: int = 16
    value: int = 8
    groups: int = 1

    def but(self, **changes: int) -> Size:
        return replace(self, **changes)


SIZES = {"small": Size(), "large": Size(256, 4, 2, 4, 128, 128, 2)}


@dataclass(frozen=True)
class Case:
    """One call of a kernel of `kind`: trees (one a request), row count, wiring, dtypes, inputs.

    dtype: of the inputs and outputs; state_dtype: of pool and buffer (a convolution's have the inputs' dtype). forked
    False: no links and parents, rows in order. inputs: a name of INPUTS. padded: a further request without a slot.
    accept: of a commit, the last accepted node of each request.
    """

    id: str
    kind: str
    family: str
    trees: tuple[DraftTree, ...]
    steps: int
    forked: bool = True
    dtype: str = "float32"
    state_dtype: str = "float32"
    inputs: str = "plain"
    size: Size = SIZES["small"]
    padded: bool = False
    lower_bound: float | None = None
    accept: tuple[int, ...] = ()
    seed: int = 0

    @property
    def requests(self) -> int:
        return len(self.trees) + self.padded

    def sources(self, request: int) -> tuple[int, ...]:
        """Return which row each row of a request continues, -1 for the committed state; one number for each node."""
        parents = self.trees[request].parents
        return parents if self.forked else tuple(range(-1, len(parents) - 1))

    def call(self, device: str | torch.device = "cpu") -> Call:
        """Return the call, with fresh buffers: the same numbers every time and on every device."""
        made = _MAKERS[self.kind](self, _Draw(self))
        moved = {name: value.to(device) for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
        return replace(made, **moved)


# --- families ---------------------------------------------------------------------------------------------------------


def _shape(name: str, **options) -> Callable[[int, int], DraftTree]:
    return lambda nodes, seed: shape(name, nodes, vocab=VOCAB, seed=seed, root=0, **options)


def _braid(nodes: int, seed: int) -> DraftTree:
    """Make two chains, row by row in turn: no row but the first continues the row before it."""
    return DraftTree(tuple(range(nodes + 1)), (-1, *(max(0, node - 2) for node in range(1, nodes + 1))))


def _best_first(nodes: int, seed: int) -> DraftTree:
    logits = np.random.default_rng(seed).normal(scale=3, size=(15, 50))
    return best_first(logits - np.log(np.exp(logits).sum(1, keepdims=True)), nodes, root=0)


def _eagle(nodes: int, seed: int) -> DraftTree:
    return published_tree(np.tile(-np.arange(10.0), (5, 1)), "eagle", root=0)


FAMILIES: dict[str, Callable[[int, int], DraftTree]] = {  # (drafted nodes, seed) -> tree
    "chain": _shape("chain"),
    "binary": _shape("kary", order="breadth"),
    "ternary": _shape("kary", branching=3, order="depth"),
    "comb": _shape("comb", order="breadth"),
    "star": _shape("star"),
    "braid": _braid,
    "random": _shape("random"),
    "best-first": _best_first,
    "eagle": _eagle,
}

# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """How drawn numbers are bent: `scale` of activations, `state` of committed states, `gate` added to raw gates,
    `beta` to the raw beta; `mixed`: channels from 1/16 to 16; `blank`: every second row zeros."""

    scale: float = 1.0
    state: float = 1.0
    gate: float = -2.0
    beta: float = 0.0
    mixed: bool = False
    blank: bool = False


INPUTS = {
    "plain": Inputs(),
    "fast decay": Inputs(gate=12.0),
    "no decay": Inputs(gate=-30.0, beta=12.0),
    "steep gate": Inputs(gate=25.0),  # behind softplus's threshold of 20
    "shut": Inputs(beta=-30.0),
    "huge": Inputs(scale=64.0, state=64.0),
    "tiny": Inputs(scale=2.0**-14, state=2.0**-14),
    "mixed": Inputs(mixed=True),
    "blank rows": Inputs(blank=True),
    "large state": Inputs(state=512.0),
}


class _Draw:
    """Numbers of a case, in the dtypes that its call has; drawn in float64, so that dtypes differ by rounding alone."""

    def __init__(self, case: Case):
        self.case, self.inputs = case, INPUTS[case.inputs]
        self._generator = torch.Generator().manual_seed(case.seed)
        self.dtype, self.state_dtype = DTYPES[case.dtype], DTYPES[case.state_dtype]

    def numbers(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._generator, dtype=torch.float64)

    def rows(self, *size: int) -> torch.Tensor:
        """Draw activations [b, t, *size]."""
        values = self.numbers(self.case.requests, self.case.steps, *size) * self.inputs.scale
        if self.inputs.mixed:
            values = values * 2.0 ** torch.linspace(-4, 4, size[-1], dtype=torch.float64)
        if self.inputs.blank:
            values[:, 1::2] = 0
        return values.to(self.dtype)

    def gates(self, shift: float, *size: int) -> torch.Tensor:
        return (self.numbers(self.case.requests, self.case.steps, *size) + shift).to(self.dtype)

    def common(self, *state: int, dtype: torch.dtype | None = None) -> dict:
        """Make pool, slots, buffer and rows: more of each than requests, in no order, one step more than rows."""
        case, dtype = self.case, dtype or self.state_dtype
        places = len(case.trees) + 3
        order = torch.randperm(places, generator=self._generator)
        other = torch.randperm(places, generator=self._generator)
        count, padding = len(case.trees), [-1] * case.padded
        return {
            "pool": (self.numbers(places, *state) * self.inputs.state).to(dtype),
            "slots": torch.tensor(order[:count].tolist() + padding, dtype=torch.int32),
            "buffer": torch.full((places, case.steps + 1, *state), torch.nan, dtype=dtype),
            "rows": torch.tensor(other[:count].tolist() + padding, dtype=torch.int32),
        }

    def parents(self) -> torch.Tensor | None:
        """Return int64 [b, t]: as SGLang's conv kernel leaves them, 0 for the root and for padding rows."""
        case = self.case
        if not case.forked:
            return None
        parents = torch.zeros(case.requests, case.steps, dtype=torch.int64)
        for request, tree in enumerate(case.trees):
            parents[request, 1 : len(tree)] = torch.tensor(tree.parents[1:])
        return parents


def _conv(case: Case, draw: _Draw) -> ConvCall:
    size = case.size
    links = dict.fromkeys(("next_token", "next_sibling", "parents"))
    if case.forked:
        made = to_batch_links(case.trees, case.steps)
        for name in ("next_token", "next_sibling"):
            links[name] = torch.full((case.requests, case.steps), -1, dtype=torch.int64)
            links[name][: len(case.trees)] = torch.from_numpy(getattr(made, name))
        links["parents"] = torch.full((case.requests, case.steps), -(2**40), dtype=torch.int64)  # what no kernel writes
    return ConvCall(
        **draw.common(size.channels, size.width - 1, dtype=draw.dtype),
        x=draw.rows(size.channels),
        weight=draw.numbers(size.channels, size.width).to(draw.dtype),
        bias=draw.numbers(size.channels).to(draw.dtype),
        silu=True,
        **links,
    )


def _delta(case: Case, draw: _Draw) -> DeltaCall:
    size, channel = case.size, case.kind == "kda"
    gate = (size.heads, size.key) if channel else (size.heads,)
    return DeltaCall(
        **draw.common(size.heads, size.value, size.key),
        q=draw.rows(size.key_heads, size.key),
        k=draw.rows(size.key_heads, size.key),
        v=draw.rows(size.heads, size.value),
        a=draw.gates(draw.inputs.gate, *gate),
        b=draw.gates(draw.inputs.beta, size.heads),
        A_log=draw.numbers(size.heads).float(),
        dt_bias=draw.numbers(*gate).float(),
        scale=size.key**-0.5,
        lower_bound=case.lower_bound,
        parents=draw.parents(),
    )


def _mamba2(case: Case, draw: _Draw) -> Mamba2Call:
    size = case.size
    return Mamba2Call(
        **draw.common(size.heads, size.value, size.key),
        x=draw.rows(size.heads, size.value),
        dt=draw.gates(draw.inputs.gate, size.heads),
        A=-draw.numbers(size.heads).exp().float(),
        B=draw.rows(size.groups, size.key),
        C=draw.rows(size.groups, size.key),
        D=draw.numbers(size.heads).float(),
        dt_bias=draw.numbers(size.heads).float(),
        parents=draw.parents(),
    )


def _commit(case: Case, draw: _Draw) -> CommitCall:
    size = case.size
    common = draw.common(size.heads, size.value, size.key)
    common["buffer"] = draw.numbers(*common["buffer"].shape).to(draw.state_dtype)
    accept = (*case.accept, *[-1] * case.padded)
    return CommitCall(**common, nodes=torch.tensor(accept, dtype=torch.int64))


_MAKERS = {"conv": _conv, "gdn": _delta, "kda": _delta, "mamba2": _mamba2, "commit": _commit}

# --- the suite --------------------------------------------------------------------------------------------------------

PAIRS = (  # inputs, state
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
)


def suite(
    kinds: Sequence[str] = KINDS, pairs: Sequence[tuple[str, str]] = PAIRS, *, size: str = "small", long: int = 0
) -> Iterator[Case]:
    """Yield the cases for kernels of these kinds: every family forked, of 12 drafted nodes (EAGLE's has 25); a batch
    of four trees, all different, with a padding request and padding rows; unforked on a chain and on a tree (as a chain
    then); every kind of inputs; with `long`, a chain and a tree of that many rows. For conv also the other widths, for
    kda the bounded gate. A commit accepts the last node of each tree, the root, nothing.

    Raises UsageError for an unknown kind, dtype or size.
    """
    for name, table in [(kind, KINDS) for kind in kinds] + [(dtype, DTYPES) for pair in pairs for dtype in pair]:
        if name not in table:
            raise UsageError(f"kernels: {name!r}, expected one of {', '.join(table)}")
    if size not in SIZES:
        raise UsageError(f"kernels: size {size!r}, expected one of {', '.join(SIZES)}")
    for kind in kinds:
        done = set()
        for dtype, state in pairs:
            if kind == "conv":
                state = dtype  # a window holds inputs
            if kind == "commit":
                dtype = state  # nothing is computed
            if (dtype, state) in done:
                continue
            done.add((dtype, state))
            yield from _of_kind(kind, dtype, state, SIZES[size], long)


def _of_kind(kind: str, dtype: str, state: str, size: Size, long: int) -> Iterator[Case]:
    numbered = itertools.count(1)

    def case(family: str, trees: Sequence[DraftTree], **options) -> Case:
        steps = max(map(len, trees)) + options.pop("spare", 0)
        number = next(numbered)
        words = [family.replace(" ", "-"), "forked" if options.get("forked", True) else "unforked"]
        name = f"{kind}/{'-'.join(words)}/{dtype}-{state}"
        return Case(
            name, kind, family, tuple(trees), steps, dtype=dtype, state_dtype=state, seed=number,
            **{"size": size} | options,
        )  # fmt: skip

    names = list(FAMILIES)
    if kind == "commit":
        for place, family in enumerate(names):
            trees = [FAMILIES[family](12, 1), FAMILIES[names[(place + 3) % len(names)]](12, 2)]
            yield case(family, trees, accept=tuple(len(tree) - 1 for tree in trees), padded=True)
        trees = [FAMILIES[name](12, 3) for name in ("binary", "comb", "best-first", "random")]
        yield case("batch", trees, accept=(0, 1, -1, 7))
        return
    for family in names:
        yield case(family, [FAMILIES[family](12, 1)])
    for family in ("chain", "braid"):
        yield case(family, [FAMILIES[family](12, 1)], forked=False)
    batch = [FAMILIES[name](nodes, nodes) for name, nodes in (("random", 9), ("star", 4), ("comb", 1), ("braid", 7))]
    yield case("batch", batch, padded=True, spare=1)
    if kind != "conv":
        grouped = size.but(key_heads=2, heads=4, groups=2)
        yield case("grouped heads", [FAMILIES["best-first"](8, 2)], size=grouped)
    for name in INPUTS:
        if name == "plain" or (kind == "conv" and name in ("fast decay", "no decay", "steep gate", "shut")):
            continue
        if kind == "mamba2" and (name == "shut" or (name == "huge" and "float16" in (dtype, state))):
            continue  # it has no beta; products of three huge inputs do not fit into float16
        yield case(name, [FAMILIES["best-first"](12, 4)], inputs=name)
    if kind == "conv":
        for width in (2, 3):
            yield case(f"width {width}", [FAMILIES["random"](12, 5)], size=size.but(width=width))
    if kind == "kda":
        yield case("bounded gate", [FAMILIES["random"](12, 5)], lower_bound=-5.0)
    if long:
        yield case(f"{long} rows", [FAMILIES["best-first"](long - 1, 6)])
        yield case(f"{long} rows, chain", [FAMILIES["chain"](long - 1, 6)])
