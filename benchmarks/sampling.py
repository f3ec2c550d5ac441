"""How often the test of draws calls a right sampler off, and how often it sees a leak or a wrong sampler.

    python benchmarks/sampling.py [--runs 500] [--draws 200] [--temperature 0.8] [--top-p 0.95]

Embedded model, its 8 code prompts, budget 16. The model runs once; each run draws anew, with a seed of its own, and is
tested against ar's exact distribution with 499 simulations.
"""

from __future__ import annotations

import argparse

import numpy as np

from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers import loading
from ddtree_check.flows.drafting import draft_cases
from ddtree_check.flows.job import Job, select_prompts
from ddtree_check.flows.settings import Item, Settings
from ddtree_check.judge.sampling.draws import Walks, power, test
from ddtree_check.judge.sampling.processing import Sampling, history, noise, process, stream, to_numpy
from ddtree_check.model.wiring import FORKED, UNFORKED

LEVELS = (0.05, 0.01)
SIMULATIONS = 499


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    sampling = Sampling(args.temperature, top_p=args.top_p)
    settings = Settings(budgets=(16,), sampling=sampling)
    engine = load_engine("transformers", None, dtype=args.dtype, device="cpu")
    tokenizer = loading.load_tokenizer(loading.resolve(None))
    cases = []
    for _, prompt in select_prompts(Job()):
        item = Item(prompt.id, tuple(tokenizer(prompt.text)["input_ids"]))
        prefix = engine.prefill(item.tokens)
        (case,) = draft_cases(engine, prefix, item, settings)

        def rows(logits, tree=case.tree, tokens=item.tokens):
            pasts = [history("path", tree, node, tokens) for node in range(len(tree))]
            return [process(to_numpy(row), sampling, past) for row, past in zip(logits, pasts, strict=True)]

        modes = {
            "tree_forked": engine.verify(prefix, case.tree, FORKED).logits,
            "tree_unforked": engine.verify(prefix, case.tree, UNFORKED).logits,
        }
        cases.append((case, rows(engine.decode(prefix, case.tree)), {mode: rows(x) for mode, x in modes.items()}))

    def run(mode: str, seed: int, flatten: float = 1.0):
        found = []
        for case, ar, others in cases:
            walks = Walks(case.tree, args.draws, stream(seed, case.id, mode))
            if flatten != 1:  # a sampler whose noise is too small
                walks._draw = lambda log_q, count, rng=walks.rng: np.argmax(
                    log_q + flatten * noise(rng, count, len(log_q)), axis=1
                )
            for node in range(len(case.tree)):
                walks.see(node, ar[node], others[mode][node])
            found.append((case.id, walks.finish()))
        held = [(name, outcomes.expected, outcomes.counts) for name, outcomes in found]
        return test(held, SIMULATIONS, stream(seed, mode, "simulations")), [outcomes.tv for _, outcomes in found]

    print(f"{args.runs} runs of {len(cases)} prompts x {args.draws} draws, {args.dtype}, {sampling}")
    for name, mode, flatten, runs in (
        ("tree_forked", "tree_forked", 1.0, args.runs),
        ("tree_unforked", "tree_unforked", 1.0, max(1, args.runs // 10)),
        ("forked, noise x 0.8", "tree_forked", 0.8, max(1, args.runs // 10)),
    ):
        results = [run(mode, seed, flatten) for seed in range(runs)]
        shares = ", ".join(f"{sum(r.p <= level for r, _ in results)} of {runs} at {level:g}" for level in LEVELS)
        freedom, draws = results[0][0].freedom, results[0][0].draws
        print(
            f"{name}: off in {shares}; total variation of the outcomes {np.mean(results[0][1]):.2g} on average, "
            f"{np.max(results[0][1]):.2g} at most; power for 0.05 in every case: "
            + ", ".join(f"{power(draws, freedom, 0.05, level):.2f} at {level:g}" for level in LEVELS)
        )


if __name__ == "__main__":
    main()
