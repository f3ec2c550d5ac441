"""The same fixture, prompts and trees through two engines, each in an environment of its own: plain decoding against
plain decoding.

    python -m benchmarks.two_engines --engine sglang --save ar.npz
    python -m benchmarks.two_engines --engine transformers --device cuda --against ar.npz

Prints, for each tree, the largest difference as a share of the logits' spread, and argmax changes; exit 1 beyond 1e-3.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from ddtree_check.engines.registry import load_engine, load_options
from ddtree_check.tree.drafts.shapes import shape

BOUND = 1e-3  # of the logits' standard deviation, float32 across engines
CASES = [
    (length, name, rows) for length in (5, 37, 150) for name, rows in (("random", 16), ("random", 64), ("comb", 32))
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--save", help="write the logits to this file")
    parser.add_argument("--against", help="compare with the logits in this file")
    given = parser.parse_args()
    engine = load_engine(
        given.engine,
        given.model,
        dtype=given.dtype,
        device=given.device,
        **load_options(given.engine, args={}, tp=1, rows=65),
    )
    found, worst = {}, 0.0
    earlier = np.load(given.against) if given.against else None
    for place, (length, name, rows) in enumerate(CASES):
        rng = np.random.default_rng(place)
        prefix = engine.prefill(rng.integers(3, engine.vocab_size, length).tolist())
        tree = shape(name, rows, vocab=engine.vocab_size, seed=place, root=int(rng.integers(3, engine.vocab_size)))
        key = f"{length}-{name}-{rows}"
        found[key] = engine.decode(prefix, tree).float().cpu().numpy()
        if earlier is None:
            continue
        a, b = (logits - logits.mean(-1, keepdims=True) for logits in (found[key], earlier[key]))
        share = float(np.abs(a - b).max() / a.std(-1).min())
        flips = int((a.argmax(-1) != b.argmax(-1)).sum())
        worst = max(worst, share if np.isfinite(share) else np.inf)
        print(f"{key}: {share:.2e} of the logits' spread, {flips} of {len(a)} argmax changed")
    if given.save:
        np.savez(given.save, **found)
    if earlier is not None:
        print(f"worst {worst:.2e}, bound {BOUND:.0e}: {'agree' if worst <= BOUND else 'DIFFER'}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
