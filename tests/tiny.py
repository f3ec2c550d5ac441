"""What several tests need: a random checkpoint of 100 thousand parameters on disk, and a record made by hand.

A test module takes the fixture with `checkpoint = tiny.checkpoint`.
"""

from __future__ import annotations

import copy

import pytest

VOCAB, CONTEXT = 300, 256
QWEN3_5 = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": CONTEXT,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The folder of a Qwen3.5 text model, a Gated DeltaNet layer and one of attention, without a tokenizer."""
    import torch
    from transformers import AutoConfig

    from ddtree_check.engines.transformers.loading import build_random

    folder = tmp_path_factory.mktemp("checkpoint")
    config = AutoConfig.for_model("qwen3_5_text", **QWEN3_5)
    build_random(config, dtype=torch.float32, device=torch.device("cpu"), seed=0).save_pretrained(folder)
    return folder


def _judged(argmax: int, max_abs: float | None, verdict: str | None, floor: float | None = 1e-4) -> dict:
    kl = None if max_abs is None else max_abs / 10
    figures = {"max_abs": max_abs, "rms": max_abs, "kl": kl, "tv": 0.25, "ar_rank": 0}
    return {"argmax": argmax, **figures, "floor": floor, "verdict": verdict}


def _case(name: str) -> dict:
    """Node 1 and 2 continue the root, node 3 continues node 1: nodes 2 and 3 are contaminated when unforked."""
    tokens, parents, depth = [10, 11, 12, 13], [-1, 0, 0, 1], [0, 1, 1, 2]
    nodes = []
    for node in range(4):
        dirty = node > 1
        nodes.append(
            {
                "node": node,
                "token": tokens[node],
                "parent": parents[node],
                "depth": depth[node],
                "leaked": node - depth[node],
                "clean": not dirty,
                "read_from": node - 1,
                "rows_since_skip": 0 if dirty else None,
                "ar": {"argmax": 11 + 2 * node, "margin": 1.5},
                "controls": {"forward": 1e-5, "pad": 1e-5, "chain": 1e-5},
                "linear": _judged(11 + 2 * node, 1e-5, "pass"),
                "tree_forked": _judged(11 + 2 * node, 2e-5, "pass"),
                "tree_unforked": _judged(20 + node, 4.0 + node, "flip") if dirty else _judged(11 + 2 * node, 0, "pass"),
            }
        )
    counts = {"nodes": 4, "pass": 4, "tie": 0, "leak": 0, "flip": 0}
    walk = {"path": [0, 1], "accepted": 1, "bonus": 13, "wrong_accept": [], "wrong_reject": []}
    walk |= {"wrong_bonus": False, "by_tie": False}
    law = {"contaminated": [2, 3], "near": [2, 3], "still": [], "outside": [], "clean_bitwise_equal": True}
    return {
        "id": name,
        "prompt_tokens": [1, 2, 3],
        "tree": {"tokens": tokens, "parents": parents, "source": {"draft": "self", "budget": 3}},
        "nodes": nodes,
        "modes": {
            "linear": {"verdict": "pass", "reason": None, **counts, "max_abs": 1e-5, "median_abs": 1e-5},
            "tree_forked": {"verdict": "pass", "reason": None, **counts, "max_abs": 2e-5, "median_abs": 2e-5},
            "tree_unforked": {
                "verdict": "fail",
                "reason": "leaks as predicted: 2 of 2 contaminated nodes moved",
                **counts | {"pass": 2, "flip": 2},
                "max_abs": 7.0,
                "median_abs": 3.0,
            },
        },
        "acceptance": {mode: copy.deepcopy(walk) for mode in ("ar", "linear", "tree_forked")}
        | {"tree_unforked": walk | {"path": [0, 1, 3], "accepted": 2, "bonus": 23, "wrong_accept": [3]}},
        "leak_law": law,
        "commit": None,
    }


def hand_record(*names: str) -> dict:
    """A record of cases with these ids that passes; every call makes it anew, to be changed at will."""
    cases = [_case(name) for name in names]
    return {
        "schema": "ddtree-check/1",
        "created": "2026-01-01T00:00:00+00:00",
        "environment": {"engine": "transformers", "dtype": "float32", "device": "cpu"},
        "model": {"name": "by-hand", "weights": "real", "tokenizer": "own"},
        "settings": {"seed": 7, "draft": "self", "acceptance": 0.7, "require": ["linear", "tree_forked"]},
        "floor": {
            "rule": "max_abs > factor * max(controls) + ulps * ulp",
            "factor": 4.0,
            "ulps": 4.0,
            "controls": {"forward": 1e-5, "pad": 1e-5, "chain": 1e-5},
            "library_unforked": 1e-5,
        },
        "cases": cases,
        "leakage": {
            "nodes": 4 * len(cases),
            "contaminated": 2 * len(cases),
            "flipped": 2 * len(cases),
            "median_kl": 0.65,
            "wrong_accept_per_round": 1.0,
            "rounds": 1,
            "rounds_changed": 1,
        },
        "coverage": {
            "cases": len(cases),
            "nodes": 4 * len(cases),
            "branch_nodes": len(cases),
            "contaminated": 2 * len(cases),
            "near": 2 * len(cases),
            "near_moved": 2 * len(cases),
            "accepted_two_or_more": 0,
            "side_branch_accepts": 0,
            "rejections": len(cases),
            "layers": {"conv": 3, "gated_delta": 3, "attention": 1},
        },
        "verdict": {
            "text": "pass",
            "modes": {"linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"},
            "reasons": [],
            "sensitive": True,
        },
        "exit_code": 0,
        "command": "ddtree-check compare --limit 1",
        "tokens": {"10": "def", "11": " f", "12": "\n\t", "13": "\x1b[31m", "23": "a|b"},
    }


def located(mode: str = "tree_forked") -> dict:
    """An attribution, as little of it as views rely on."""
    return {"mode": mode, "nodes": 1, "text": "enters at layer 0", "first": {}}


def break_forked(record: dict, case: int = 0) -> dict:
    """The same record with a leak at node 3 of one case under tree_forked."""
    found = record["cases"][case]
    found["nodes"][3]["tree_forked"] = _judged(23, 2.5, "flip")
    found["modes"]["tree_forked"] |= {"verdict": "fail", "reason": "1 node beyond the floor, first node 3"}
    found["modes"]["tree_forked"] |= {"pass": 3, "flip": 1, "max_abs": 2.5}
    record["verdict"] |= {"text": "fail", "reasons": ["tree_forked: fail (1 node beyond the floor, first node 3)"]}
    record["verdict"]["modes"]["tree_forked"] = "fail"
    record["exit_code"] = 1
    return record
