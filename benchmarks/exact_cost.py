"""What the exact checks cost: one compare without and with them, in one process, taking turns.

    python benchmarks/exact_cost.py [--dtype bfloat16] [--prompts 2] [--repeats 2]
    python benchmarks/exact_cost.py --engine sglang --model qwen3.6-27b --weights random

Prints Markdown. The first pair of runs warms up and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tabulate import tabulate

from ddtree_check.base.resources import fixtures_dir
from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers.loading import load_tokenizer, resolve
from ddtree_check.flows.check import check
from ddtree_check.flows.job import engine_args, quiet_libraries
from ddtree_check.flows.settings import Item, Settings
from ddtree_check.tree.case import load_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--weights", default="real", choices=["random", "real"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine-arg", action="append", default=[])
    given = parser.parse_args()

    options = {"rows": 65, "args": engine_args(given.engine_arg)} if given.engine == "sglang" else {}
    engine = load_engine(given.engine, given.model, weights=given.weights, dtype=given.dtype, **options)
    tokenizer = load_tokenizer(resolve(None))
    prompts = load_prompts(fixtures_dir() / "prompts" / "code.jsonl")[: given.prompts]
    items = [Item(prompt.id, tuple(tokenizer(prompt.text)["input_ids"])) for prompt in prompts]
    seconds: dict[str, list[float]] = {"off": [], "leaves": []}
    for repeat in range(given.repeats + 1):
        for how, times in seconds.items():
            started = time.perf_counter()
            with quiet_libraries():
                record = check(engine, items, Settings(exact=how))
            times += [time.perf_counter() - started] if repeat else []
    medians = {how: statistics.median(times) for how, times in seconds.items()}
    rows = [(how, f"{value:.1f}", f"{value / medians['off']:.2f} x") for how, value in medians.items()]
    print(f"{engine.provenance['name']}, {given.engine}, {given.dtype}, {len(items)} prompts, budgets 16 and 64\n")
    print(tabulate(rows, ("--exact", "s", "of off"), "github", disable_numparse=True))
    print(f"\n{record['exact']['text']}; verdict {record['verdict']['text']}")
    for case in record["cases"]:
        print(f"{case['id']}: {case['exact']['reason']}; {case['exact']['passes']}")


if __name__ == "__main__":
    main()
