"""How often a right engine is called wrong: the whole flow on prompts that share nothing, every node verdict counted.

    python benchmarks/false_alarms.py --dtype bfloat16 --prompts code,humaneval --budget 16,64

A false alarm is a node of `linear` or `tree_forked` beyond its floor. Nodes of one prompt are not independent, so the
bound is exact for prompts: with 0 of n alarmed, the true share is below 1 - 0.05 ** (1 / n) with 95 % confidence.
"""

from __future__ import annotations

import argparse
import time

from ddtree_check.case import load_prompts
from ddtree_check.check import Item, Settings, check
from ddtree_check.engines import load_engine, loading
from ddtree_check.resources import fixtures_dir


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model")
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--prompts", default="code,humaneval", help="files of fixtures/prompts")
    arguments.add_argument("--budget", default="16,64")
    arguments.add_argument("--limit", type=int)
    given = arguments.parse_args()
    settings = Settings(budgets=tuple(map(int, given.budget.split(","))))
    tokenizer = loading.load_tokenizer(loading.resolve(given.model))
    files = [fixtures_dir() / "prompts" / f"{name}.jsonl" for name in given.prompts.split(",")]
    prompts = [prompt for file in files for prompt in load_prompts(file)][: given.limit]
    items = [Item(prompt.id, tuple(tokenizer(prompt.text)["input_ids"])) for prompt in prompts]
    engine = load_engine("transformers", given.model, dtype=given.dtype)
    started = time.perf_counter()
    alarms = {mode: [] for mode in ("linear", "tree_forked")}
    trees = nodes = ties = near = moved = outside = 0
    for item in items:
        record = check(engine, [item], settings)
        for mode, found in alarms.items():
            bad = [case["id"] for case in record["cases"] if case["modes"][mode]["verdict"] != "pass"]
            if bad:
                found.append(item.id)
                print(f"alarm: {mode} {', '.join(bad)}: {record['verdict']['reasons']}", flush=True)
        trees += len(record["cases"])
        nodes += record["coverage"]["nodes"]
        near += record["coverage"]["near"]
        moved += record["coverage"]["near_moved"]
        outside += sum(len(case["leak_law"]["outside"]) for case in record["cases"])
        ties += sum(case["modes"]["tree_forked"]["tie"] for case in record["cases"])
    bound = 1 - 0.05 ** (1 / len(items))
    name = engine.provenance["name"]
    print(f"{name} {given.dtype}: {len(items)} prompts, {trees} trees, {nodes} nodes, budgets {given.budget}")
    for mode, found in alarms.items():
        text = f", true share below {bound:.2%} (95 %)" if not found else ""
        print(f"{mode}: {len(found)} of {len(items)} prompts alarmed{text}")
    print(f"forked ties (argmax changed within noise): {ties} of {nodes} nodes")
    print(f"unforked: {moved} of {near} nodes near a skip edge moved, {outside} moved outside the law")
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
