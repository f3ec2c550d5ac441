"""How far two right implementations of one model are apart, against the bound C that docs/trace.md judges by when ar is
another engine's: logits of tree passes, and states after commits.

    nice -n 10 python -m benchmarks.across
    python -m benchmarks.across --dtype bfloat16 --prompts 8 --nodes 65

The second implementation has our mixers and the model's own rounded weights, and computes in float64 (float32 for a
float64 model); its logits and states are rounded to the model's dtypes, as another engine's are. Prints a row for each
dtype; exit 1 if a right pass is beyond C, or a contaminated node of an unforked one within it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np
import torch
from tabulate import tabulate

from ddtree_check.engines.registry import load_engine
from ddtree_check.flows.check import Settings
from ddtree_check.flows.commit import gather
from ddtree_check.flows.replay import reference_of
from ddtree_check.judge.commit import Judge, Left
from ddtree_check.judge.differences import measure_any
from ddtree_check.model.wiring import FORKED, UNFORKED, contaminated
from ddtree_check.trace.model import Step
from ddtree_check.tree.accept import accept_nodes
from ddtree_check.tree.drafts.shapes import shape

DTYPES = ("float32", "bfloat16", "float16")
HEADERS = (
    "dtype", "largest error / std", "largest error / C", "C / std", "contaminated nodes beyond C",
    "largest state error / C", "states of other nodes beyond C",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", help="one of them; by default all three")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=33)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, wrong = [], False
    for dtype in (given.dtype,) if given.dtype else DTYPES:
        row, off = measured(dtype, given.model, given.prompts, given.nodes)
        rows.append((dtype, *row))
        wrong |= off
    print(tabulate(rows, HEADERS, tablefmt="github"))
    return int(wrong)


def measured(dtype: str, model: str | None, prompts: int, nodes: int) -> tuple[tuple, bool]:
    """The figures of one dtype, and whether the bound did not hold."""
    live = load_engine("transformers", model, dtype=dtype, device="cpu")
    second, settings, rng = live.exact(), Settings(), np.random.default_rng(0)
    share, ratio, bounds, caught, states, told = [], [], [], [], [], []
    for number in range(prompts):
        prompt = tuple(rng.integers(0, live.vocab_size - 8, 24).tolist())
        tree = shape("random", nodes, vocab=live.vocab_size - 8, seed=number, root=5)
        step = Step("s", None, prompt, tree, ())
        reference = reference_of(step, settings, live, dtype)
        prefix = second.prefill(prompt)
        for wiring in (FORKED, UNFORKED):
            verified = second.verify(prefix, tree, wiring)
            found = measure_any(reference.rows, verified.logits.to(live.dtype), live.dtype)
            bound = reference.across(found)
            if wiring is UNFORKED:
                dirty = sorted(contaminated(wiring.plan(tree), live.layers))
                caught += (~(found.max_abs <= bound))[dirty].tolist()
                continue
            share += (found.max_abs / found.std).tolist()
            ratio += (found.max_abs / bound).tolist()
            bounds += (bound / found.std).tolist()
            (node,) = accept_nodes(tree, ("branch",))
            standard = gather(live, prompt, live.prefill(prompt), tree, node)
            judge = Judge(tree.path(node), replace(standard, probe=()), settings.rule, dtype, across=True)
            states.append(_state(judge, second, verified, node))
            told.append(_state(judge, second, verified, tree.parents[node]) > 1)
    figures = f"{max(share):.2g}", f"{max(ratio):.2g}", f"{min(bounds):.2g} to {max(bounds):.2g}", _of(caught)
    wrong = not (max(ratio) <= 1 and max(states) <= 1 and all(caught) and all(told))
    return (*figures, f"{max(states):.2g}", _of(told)), wrong


def _state(judge: Judge, second, verified, node: int) -> float:
    """The largest error / C of any state or window after a commit of `node`, judged as one of the judge's own path."""
    _, channels = second.contents(second.commit(verified, node))
    like = judge.reference.contents
    kept = [
        {name: x.to(right[name].dtype) for name, x in own.items() if name in ("recurrent", "conv")}
        for own, right in zip(channels, like[1], strict=True)
    ]
    parts, _ = judge._measure(Left((like[0], kept)))
    parts = [part for part in parts if part.channel in ("recurrent", "conv")]
    return max(part.error / floor for part, floor in zip(parts, judge.chain_floors(parts), strict=True))


def _of(flags: list[bool]) -> str:
    return f"{sum(flags)} of {len(flags)}"


if __name__ == "__main__":
    sys.exit(main())
