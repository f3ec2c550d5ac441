"""What SGLang's passes cost at the 27B shape (random weights) against reading the weights once, and a compare's time
split into engine and suite.

    python -m benchmarks.sglang_times [--model qwen3.6-27b] [--prompts 2] [--engine-arg disable_cuda_graph=false]

Prints Markdown. `forking` is a tree pass with the states forked over the same pass without.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch

from ddtree_check.base.resources import fixtures_dir
from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers.loading import load_tokenizer, resolve
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.job import engine_args
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.record import write_record
from ddtree_check.tree.case import load_prompts
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape

PASSES = ("prefill", "step", "decode", "verify", "commit", "contents", "forward")


class Timed:
    """An engine whose passes add their time, up to the end of the GPU's work, to `seconds`."""

    def __init__(self, engine):
        self.engine, self.seconds, self.calls = engine, dict.fromkeys(PASSES, 0.0), dict.fromkeys(PASSES, 0)

    def __getattr__(self, name):
        found = getattr(self.engine, name)
        if name not in PASSES:
            return found

        def timed(*args, **named):
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = found(*args, **named)
            torch.cuda.synchronize()
            self.seconds[name] += time.perf_counter() - start
            self.calls[name] += 1
            return result

        return timed


def milliseconds(run, repeats: int) -> float:
    """The median time of one run after two that warm up (the first compiles)."""
    run(), run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def read_speed(gib: float = 4.0) -> float:
    """Bytes a second that this GPU copies, read and written together, at its best of ten."""
    x = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y.copy_(x)
        torch.cuda.synchronize()
        best = max(best, 2 * x.numel() / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.6-27b")
    parser.add_argument("--weights", default="random", choices=["random", "real"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of the compare that is timed; 0 for none")
    parser.add_argument("--source", default="humaneval", choices=["code", "humaneval"], help="whose prompts")
    parser.add_argument("--record", help="write the record of the compare to this file")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()

    started = time.perf_counter()
    engine = load_engine(
        "sglang", given.model, weights=given.weights, dtype=given.dtype, rows=65, args=engine_args(given.engine_arg)
    )
    load = time.perf_counter() - started
    facts = engine.describe()
    rng = np.random.default_rng(0)
    prefix = engine.prefill(rng.integers(0, engine.vocab_size, 100).tolist())
    root = int(prefix.logits.argmax())
    times: dict[str, float] = {"ar step": milliseconds(lambda: engine.step(prefix, root), given.repeats)}
    for rows in (16, 65):
        chain = DraftTree.chain([root, *rng.integers(0, engine.vocab_size, rows - 1).tolist()])
        times[f"linear {rows}"] = milliseconds(lambda chain=chain: engine.verify(prefix, chain, None), given.repeats)
    for rows in (17, 65):
        tree = shape("random", rows - 1, vocab=engine.vocab_size, seed=rows, root=root)
        for name, wiring in (("forked", FORKED), ("unforked", UNFORKED)):
            if engine.supports(wiring) is None:
                times[f"tree {rows} {name}"] = milliseconds(
                    lambda tree=tree, wiring=wiring: engine.verify(prefix, tree, wiring), given.repeats
                )
    speed = read_speed()
    floor = 1e3 * engine.provenance["bytes"] / speed
    versions = (
        f"SGLang {facts['sglang']}, torch {facts['torch']}, {facts['device_name']}, Python {platform.python_version()}"
    )
    print(f"{engine.provenance['name']} shape, {facts['dtype']}, state {facts['state_dtype']}, {versions}")
    peak, size = torch.cuda.max_memory_allocated() / 2**30, engine.provenance["bytes"] / 2**30
    print(f"engine up in {load:.1f} s; graphs {facts['graphs'] or 'off'}; peak {peak:.1f} GiB")
    print(f"weights {size:.1f} GiB; this GPU copies {speed / 1e12:.2f} TB/s: floor {floor:.1f} ms\n")
    print("| pass | ms | x floor |\n|---|---:|---:|")
    for name, value in times.items():
        print(f"| {name} | {value:.1f} | {value / floor:.1f} |")
    for rows in (17, 65):
        pair = [times.get(f"tree {rows} {name}") for name in ("forked", "unforked")]
        if all(pair):
            print(f"| forking, tree {rows} | {pair[0] / pair[1]:.3f} x | |")
    figures = {"environment": facts, "milliseconds": times, "floor_ms": floor, "load_s": load}
    if given.prompts:
        tokenizer = load_tokenizer(resolve(None))
        prompts = load_prompts(fixtures_dir() / "prompts" / f"{given.source}.jsonl")[: given.prompts]
        items = [Item(prompt.id, tuple(tokenizer(prompt.text)["input_ids"])) for prompt in prompts]
        timed = Timed(engine)
        started = time.perf_counter()
        record = check(timed, items, Settings(), model=engine.provenance)
        if given.record:
            write_record(given.record, record)
        whole, own = time.perf_counter() - started, sum(timed.seconds.values())
        print(
            f"\ncompare, {len(items)} prompts, budgets 16 and 64: {whole:.1f} s, engine {own:.1f} s, "
            f"suite {whole - own:.1f} s, {100 * (whole - own) / own:.1f} % of the engine's; {record['verdict']['text']}"
        )
        print("\n| engine call | calls | s |\n|---|---:|---:|")
        for name in PASSES:
            if timed.calls[name]:
                print(f"| {name} | {timed.calls[name]} | {timed.seconds[name]:.1f} |")
        figures |= {"compare_s": whole, "engine_s": timed.seconds, "modes": record["verdict"]["modes"]}
    if given.json:
        with open(given.json, "w") as file:
            json.dump(figures, file, indent=1, default=str)
    engine.close()


if __name__ == "__main__":
    main()
