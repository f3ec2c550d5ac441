"""How small a fault is found: one wrong edge, in one channel, at one node, for every node of one tree in turn.

    python benchmarks/single_edge.py --dtype bfloat16

Found means: the node that reads wrong is beyond the floor of the right run. Printed per kind of fault: found of tried,
and how often the argmax changed without being found (those would be called ties).
"""

from __future__ import annotations

import argparse

import numpy as np
from tabulate import tabulate

from ddtree_check.case import load_prompts
from ddtree_check.check import Item, Settings, check
from ddtree_check.compare import measure
from ddtree_check.engines import load_engine, loading
from ddtree_check.resources import fixtures_dir
from ddtree_check.tree import DraftTree
from ddtree_check.wiring import FORKED, Wiring


def moved_edge(tree: DraftTree, channel: str, node: int, source: int) -> Wiring:
    """The right wiring but for one node, which continues, sees, or stands at, something else."""
    right = getattr(FORKED.plan(tree), channel)
    if channel == "mask":
        wrong = right.copy()
        wrong[node, source] = not right[node, source]
    else:
        wrong = (*right[:node], source, *right[node + 1 :])
    return Wiring(f"{channel} of node {node}", **{channel: lambda _: wrong})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model")
    arguments.add_argument("--dtype", default="bfloat16")
    arguments.add_argument("--budget", type=int, default=32)
    arguments.add_argument("--prompts", type=int, default=3, help="of the code prompts")
    given = arguments.parse_args()
    engine = load_engine("transformers", given.model, dtype=given.dtype)
    tokenizer = loading.load_tokenizer(loading.resolve(given.model))
    faults = {
        "state of the grandparent": ("state", lambda t, i: t.parents[t.parents[i]] if t.parents[i] >= 0 else None),
        "state of the previous row": ("state", lambda t, i: i - 1 if t.parents[i] != i - 1 else None),
        "window of the grandparent": ("conv", lambda t, i: t.parents[t.parents[i]] if t.parents[i] >= 0 else None),
        "mask misses the parent": ("mask", lambda t, i: t.parents[i]),
        "mask sees one stranger": ("mask", lambda t, i: next((j for j in range(i) if j not in t.path(i)), None)),
        "position one too far": ("positions", lambda t, i: t.depth[i] + 1),
    }
    found = {name: [0, 0, 0] for name in faults}
    for prompt in load_prompts(fixtures_dir() / "prompts" / "code.jsonl")[: given.prompts]:
        tokens = tuple(tokenizer(prompt.text)["input_ids"])
        (case,) = check(engine, [Item(prompt.id, tokens)], Settings(budgets=(given.budget,)))["cases"]
        tree, prefix = DraftTree.from_json(case["tree"]), engine.prefill(tokens)
        floor = np.array([node["tree_forked"]["floor"] for node in case["nodes"]])
        reference = engine.decode(prefix, tree)
        for name, (channel, source) in faults.items():
            for node in range(1, len(tree)):
                wrong = source(tree, node)
                if wrong is None:
                    continue
                seen = measure(reference, engine.verify(prefix, tree, moved_edge(tree, channel, node, wrong)).logits)
                caught = bool(seen.max_abs[node] > floor[node])
                found[name][0] += caught
                found[name][1] += 1
                found[name][2] += bool(seen.changed[node]) and not caught
    rows = [(name, f"{caught} of {tried}", hidden) for name, (caught, tried, hidden) in found.items()]
    print(f"{engine.provenance['name']}, {given.dtype}, {given.prompts} prompts, budget {given.budget}")
    print(tabulate(rows, ["one wrong edge", "found", "argmax changed, called a tie"]))


if __name__ == "__main__":
    main()
