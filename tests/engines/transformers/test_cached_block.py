"""A cached block of several tokens that starts from nothing, or whose rows share the first one's gate: linear against
plain decoding says so, and a tree pass that does the same is not judged by it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.selftest.inject import Faulty, altered, gate_of_first_row
from tests.models import engine, prompt, tree


def zero_start(function, args, kwargs):
    return function(*args, **kwargs | {"initial_state": torch.zeros_like(kwargs["initial_state"])})


def library_only(around):
    """The fault in the engine's own pass alone: our tree path is right."""

    def chosen(host, case, wiring):
        return around(host, case, wiring) if wiring is None else contextlib.nullcontext()

    return chosen


FAULTS = [
    pytest.param(zero_start, 0, id="starts-from-zero"),
    pytest.param(gate_of_first_row("g", "beta"), 1, id="gate-of-row-0"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("change", "node"), FAULTS)
def test_linear_fails_from_its_first_wrong_node_and_no_tree_is_judged(change, node, dtype):
    host = Faulty(engine("qwen3_5_text", dtype), around=altered("gated_delta", change))
    record = check(host, [Item("p", prompt(12), tree=tree("random", 12))], Settings())
    modes = record["cases"][0]["modes"]
    assert record["exit_code"] == 1 and modes["linear"]["verdict"] == "fail"
    assert f"first node {node}" in modes["linear"]["reason"]
    assert modes["tree_forked"]["verdict"] == "reference_unusable"
    verdicts = [found["linear"]["verdict"] for found in record["cases"][0]["nodes"]]
    assert verdicts[:node] == ["pass"] * node and verdicts[node] in ("leak", "flip")


@pytest.mark.parametrize(("change", "node"), FAULTS)
def test_a_tree_path_of_its_own_is_judged_by_its_chains(change, node):
    host = Faulty(engine("qwen3_5_text"), around=library_only(altered("gated_delta", change)))
    modes = check(host, [Item("p", prompt(12), tree=tree("random", 12))], Settings())["cases"][0]["modes"]
    assert modes["linear"]["verdict"] == "fail" and f"first node {node}" in modes["linear"]["reason"]
    assert modes["tree_forked"]["verdict"] == "pass"


def test_neighbours_without_the_layer_stay_green():
    host = Faulty(engine("llama"), around=altered("gated_delta", zero_start))
    assert check(host, [Item("p", prompt(12), tree=tree("random", 12))], Settings())["exit_code"] == 0
