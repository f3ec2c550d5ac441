"""What a fork costs, and what not recomputing prefixes saves: ratios within one run, medians over repeats.

    python benchmarks/pass_times.py                                        the embedded model on this machine
    python benchmarks/pass_times.py --model qwen3.6-27b --weights random --dtype bf16 --prompt 512   a GPU

Measured: one linear pass of 65 rows (the library's own), our unforked and forked passes over as many rows; `ar` strict
and batched; and the reference that scripts use today, a full forward pass from the prompt for every leaf path.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from tabulate import tabulate

from ddtree_check.engines.registry import load_engine
from ddtree_check.judge.differences import measure
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape
from ddtree_check.tree.paths import leaf_paths


def timed(call, device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after one that warms up."""
    found = []
    for repeat in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model")
    arguments.add_argument("--weights", default="real")
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--budget", type=int, default=64)
    arguments.add_argument("--prompt", type=int, default=128, help="tokens")
    arguments.add_argument("--repeats", type=int, default=9)
    given = arguments.parse_args()
    engine = load_engine(
        "transformers", given.model, weights=given.weights, dtype=given.dtype, device=given.device, progress=print
    )
    draw = np.random.default_rng(0)
    prompt = draw.integers(3, engine.vocab_size, given.prompt).tolist()
    prefix = engine.prefill(prompt)
    tree = shape("random", given.budget, vocab=engine.vocab_size, seed=0, root=int(prefix.logits.argmax()))
    chain = DraftTree.chain(tree.tokens)
    rows = len(tree)

    def recompute():
        for path in leaf_paths(tree):
            engine.forward([[*prompt, *(tree.tokens[node] for node in path.nodes)]], len(path.nodes))

    def passes(repeats, **calls):
        return {name: timed(call, engine.device, repeats) for name, call in calls.items()}

    times = passes(
        given.repeats,
        linear=lambda: engine.verify(prefix, chain, None),
        unforked=lambda: engine.verify(prefix, tree, UNFORKED),
        forked=lambda: engine.verify(prefix, tree, FORKED),
        step=lambda: engine.step(prefix, tree.tokens[0]),
    )
    times |= passes(
        max(1, given.repeats // 4),
        ar_strict=lambda: engine.decode(prefix, tree),
        ar_batched=lambda: engine.decode(prefix, tree, batched=True),
        recompute=recompute,
    )
    reference, forked = engine.decode(prefix, tree), engine.verify(prefix, tree, FORKED).logits
    times |= passes(3, compare=lambda: measure(reference, forked))
    described = engine.describe()
    print(
        f"{engine.provenance['name']} ({given.weights} weights), {described['dtype']}, {described['device_name']}, "
        f"{described['threads']} threads, prompt {given.prompt}, {rows} rows, {len(tree.leaves)} leaf paths"
    )
    ratios = [
        ("forked pass / linear pass, same rows", times["forked"] / times["linear"], "<= 1.3"),
        ("forked pass / unforked pass", times["forked"] / times["unforked"], ""),
        (f"ar strict / {rows} single steps", times["ar_strict"] / (rows * times["step"]), "about 1"),
        ("recomputing each path / ar strict", times["recompute"] / times["ar_strict"], ""),
        ("recomputing each path / ar batched", times["recompute"] / times["ar_batched"], ""),
        ("ar strict / ar batched", times["ar_strict"] / times["ar_batched"], ""),
        ("comparing a mode / its forked pass", times["compare"] / times["forked"], ""),
    ]
    print(tabulate([(name, f"{1000 * value:.1f}") for name, value in times.items()], ["call", "median ms"]))
    print(tabulate([(name, f"{value:.2f}", budget) for name, value, budget in ratios], ["ratio", "", "budget"]))
    if engine.device.type == "cuda":
        print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
