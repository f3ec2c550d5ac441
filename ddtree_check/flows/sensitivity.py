"""Does the model react to its own states? If not, no leak could show, and a pass says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..judge.differences import measure
from ..judge.reactions import Reaction
from ..judge.rule import Rule
from ..model.wiring import BLANK, Conv, Layer, State, Wiring, reads
from ..tree.draft_tree import DraftTree


def react(engine, prefix, rule: Rule, dtype: str) -> tuple[Reaction, ...]:
    """One pass of one row for each kind of recurrent layer, its states behind `prefix` read as zeros.

    Nothing for a model without such layers, or an engine that cannot read zeros.
    """
    kinds = {"state": _states(engine.layers), "conv": "conv" if reads(engine.layers, Conv) else ""}
    root = DraftTree((int(prefix.logits.argmax()),), (-1,))
    wirings = {kind: Wiring(f"no {kind}", **{channel: _zeros}) for channel, kind in kinds.items() if kind}
    whole = Wiring("all states")
    if not wirings or any(engine.supports(wiring) for wiring in (whole, *wirings.values())):
        return ()
    right = engine.verify(prefix, root, whole).logits
    found = []
    for kind, wiring in wirings.items():
        moved = measure(right, engine.verify(prefix, root, wiring).logits)
        floor = rule.chain_floor([np.zeros(1)], moved, dtype)
        found.append(Reaction(kind, float(moved.max_abs[0]), float(floor[0])))
    return tuple(found)


def _states(layers: Sequence[Layer]) -> str:
    """The mixers that carry a state, 'gated_delta' or 'mamba2 + ...'."""
    ops = (op for layer in layers for branch in layer.branches for op in branch)
    return " + ".join(dict.fromkeys(op.kind for op in ops if isinstance(op, State)))


def _zeros(tree: DraftTree) -> tuple[int, ...]:
    return (BLANK, *tree.parents[1:])
