"""Every family at a small shape with random weights: what the support table claims, run and measured."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig

from ..engines.transformers.engine import TransformersEngine
from ..engines.transformers.loading import build_random, parse_dtype, pick_device
from ..judge.differences import measure
from ..model.small_shapes import SHAPES, VOCAB
from ..model.wiring import Wiring, contaminated
from ..tree.drafts.shapes import shape
from .check import check
from .settings import Item, Settings

CHANNELS = ("state", "conv", "mask", "positions")


def survey(
    model_type: str, *, nodes: int = 64, prompt: int = 37, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> dict:
    """One family on one drawn tree behind a drawn prompt (`nodes` and `prompt` in tokens).

    Returns layers by kind, the verdict of each mode, the largest |Δ| of the forked and of the unforked pass, the
    unforked pass's flips, the exit code, and `channels`: the ones that move a node beyond its floor when they alone
    read in row order.
    """
    wanted = parse_dtype(dtype, torch.float32)
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    model = build_random(config, dtype=wanted, device=pick_device(device), seed=seed)
    engine = TransformersEngine(model, provenance={"name": f"tiny {model_type}", "weights": "random"})
    tokens = tuple(np.random.default_rng(seed).integers(0, VOCAB, prompt).tolist())
    prefix = engine.prefill(tokens)
    tree = shape("random", nodes, vocab=VOCAB, seed=seed, root=int(prefix.logits.argmax()))
    record = check(engine, [Item("drawn", tokens, tree)], Settings())
    (case,) = record["cases"]
    reference = engine.decode(prefix, tree)
    floor = np.array([node["tree_forked"]["floor"] or np.inf for node in case["nodes"]])
    channels = []
    for channel in CHANNELS:
        wiring = Wiring.parse(f"{channel}=flat")
        dirty = contaminated(wiring.plan(tree), engine.layers)
        if dirty:
            error = measure(reference, engine.verify(prefix, tree, wiring).logits).max_abs
            if (error > floor)[sorted(dirty)].any():
                channels.append(channel)
    return {
        "family": model_type,
        "layers": record["coverage"]["layers"],
        "modes": record["verdict"]["modes"],
        "forked": case["modes"]["tree_forked"]["max_abs"],
        "unforked": case["modes"]["tree_unforked"]["max_abs"],
        "flips": case["modes"]["tree_unforked"]["flip"],
        "nodes": len(tree),
        "channels": channels,
        "exit_code": record["exit_code"],
    }
