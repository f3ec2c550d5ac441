"""What every set of kernels must show: red under each fault, at the right nodes, with their neighbours green."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from ddtree_check.kernels import check
from ddtree_check.kernels.cases import Case
from ddtree_check.kernels.check import Result, judge
from ddtree_check.kernels.layer import Layer, check_layer
from tests import kernel_faults as faults
from tests.kernel_faults import CHAIN, OTHER, STATES, TREE, case, leaks

WITH_PARENTS = ("conv", *STATES)
SIDE = max(node for node in range(len(TREE)) if node not in TREE.clean and not TREE.children[node])


def nodes(result: Result, part: str, request: int = 0) -> set[int]:
    return {f.node for f in result.findings if f.part == part and f.request == request}


def first(result: Result, request: int = 0):
    """The first wrong node of outputs, windows and states: the one that is explained."""
    parts = ("output", "window", "state")
    return min((f for f in result.findings if f.request == request and f.part in parts), key=lambda f: f.node)


@functools.cache
def unbroken(kernel, made: Case) -> Result:
    """Return what a kernel without a fault comes to: the same for every fault that is tried on a case."""
    return check(kernel, made)


class FaultTests:
    """`kernels`: a module of kernels in the call form. overwrites: its conv puts the last rows into its own slots."""

    kernels: object
    overwrites = False

    def run(self, kind, fault, *trees, **options) -> Result:
        made = case(kind, *trees, **options)
        kernel = getattr(self.kernels, kind)
        assert unbroken(kernel, made).findings == [], "the kernel itself must be right"
        return check(fault(kernel), made)

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_ignored_parents(self, kind):
        result = self.run(kind, faults.ignored_parents, TREE, CHAIN)
        wrong = leaks(kind, TREE)
        assert wrong and nodes(result, "output") == wrong
        assert nodes(result, "window" if kind == "conv" else "state") <= wrong
        assert nodes(result, "output", 1) == nodes(result, "state", 1) == nodes(result, "window", 1) == set()
        start = min(wrong)
        assert f"starts from node {start - 1}'s state, expected node {TREE.parents[start]}'s" in first(result).reads

    def test_window_by_row(self):
        result = self.run("conv", faults.window_by_row, TREE, CHAIN)
        assert {f.part for f in result.findings} == {"window"} and all(f.bound == 0 for f in result.findings)
        assert nodes(result, "window") == leaks("conv", TREE, width=3)  # of three inputs kept
        assert nodes(result, "window", 1) == set()
        assert "slot of the window" in first(result).channel

    @pytest.mark.parametrize("kind", STATES)
    def test_rounded_states(self, kind):
        result = self.run(kind, faults.rounded_states, TREE)
        assert nodes(result, "state") == set(range(len(TREE)))
        assert nodes(result, "output") == set(range(1, len(TREE))), "node 0's output comes before the rounding"
        assert min(f.error / f.bound for f in result.findings if f.part == "state") > 50
        kernel, claimed = getattr(self.kernels, kind), case(kind, TREE, state_dtype="bfloat16")
        assert check(faults.rounded_states(kernel), claimed).findings == [], "where bf16 is what is claimed"

    @pytest.mark.parametrize("kind", STATES)
    def test_parent_behind_the_rows(self, kind):
        leaf = TREE.leaves[-1]
        result = self.run(kind, faults.parent_at(leaf, len(TREE)), TREE)
        assert nodes(result, "output") == nodes(result, "state") == {leaf}

    @pytest.mark.parametrize("kind", STATES)
    def test_parent_that_comes_later(self, kind):
        result = self.run(kind, faults.parent_at(1, len(TREE) - 1), TREE)
        below = {node for node in range(len(TREE)) if 1 in TREE.path(node)}
        assert nodes(result, "output") == below
        assert all(f.error == math.inf for f in result.findings), "what was not written yet is NaN"

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_slots_of_two_requests_swapped(self, kind):
        result = self.run(kind, faults.swapped("slots"), TREE, OTHER)
        assert {0} <= nodes(result, "output") and {0} <= nodes(result, "output", 1)
        assert "starts from request 1's committed state, expected the committed state" in first(result).reads

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_rows_of_two_requests_swapped(self, kind):
        result = self.run(kind, faults.swapped("rows"), TREE, OTHER)
        assert nodes(result, "output") == nodes(result, "output", 1) == set()
        part = "window" if kind == "conv" else "state"
        assert 0 in nodes(result, part) and 0 in nodes(result, part, 1)

    @pytest.mark.parametrize("kind", STATES)
    def test_parents_of_the_call_before(self, kind):
        kernel = faults.stale_parents(getattr(self.kernels, kind))
        assert check(kernel, case(kind, TREE)).findings == []
        assert check(kernel, case(kind, TREE, seed=4)).findings == [], "the same tree again shows nothing"
        wrong = check(kernel, case(kind, OTHER))
        moved = {
            node for node in range(len(OTHER)) if any(OTHER.parents[n] != TREE.parents[n] for n in OTHER.path(node))
        }
        assert nodes(wrong, "output") == moved != set(range(len(OTHER)))

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_dropped_start(self, kind):
        result = self.run(kind, faults.dropped_start, TREE)
        assert first(result).node == 0 and first(result).reads == "starts from zeros, expected the committed state"

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_padding_request_in_a_live_slot(self, kind):
        result = self.run(kind, faults.live_padding, TREE, padded=True)
        parts = {f.part for f in result.findings}
        canary = kind == "conv" and self.overwrites
        assert "buffer" in parts and ("pool" in parts) == canary
        assert nodes(result, "output") == set()
        if canary:
            told = next(f for f in result.findings if f.part == "pool")
            assert told.channel.startswith("slot ") and "of no request in the batch" in told.reads

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    @pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
    def test_one_number_that_is_none(self, kind, value):
        def change(call, out):
            out[0, 4].view(-1)[3] = value

        result = self.run(kind, faults.afterwards(change), TREE)
        assert [(f.part, f.node, f.error) for f in result.findings] == [("output", 4, math.inf)]

    @pytest.mark.parametrize("kind", WITH_PARENTS)
    def test_a_step_behind_the_rows_and_a_foreign_slot(self, kind):
        def change(call, out):
            call.buffer[call.rows[0], call.buffer.shape[1] - 1] = 0
            call.pool[next(slot for slot in range(len(call.pool)) if slot not in call.slots)] += 1

        result = self.run(kind, faults.afterwards(change), TREE)
        assert sorted(f.part for f in result.findings) == ["buffer", "pool"]

    @pytest.mark.parametrize("kind", STATES)
    def test_a_pool_that_should_have_stayed(self, kind):
        def change(call, out):
            call.pool[call.slots[0]] *= 1.5

        result = self.run(kind, faults.afterwards(change), TREE)
        assert [(f.part, f.request) for f in result.findings] == [("pool", 0)]
        assert "request 0's own" in result.findings[0].reads

    def test_commit_by_accepted_length(self):
        trees, kernel = (TREE, CHAIN, TREE), self.kernels.commit
        spine = TREE.clean[-1]
        made = case("commit", *trees, accept=(SIDE, 5, spine))
        assert check(kernel, made).findings == []
        found = check(faults.by_length(trees)(kernel), made).findings
        assert [(f.part, f.request, f.node) for f in found] == [("pool", 0, SIDE)], "first-branch paths pass"
        assert found[0].reads == f"holds node {TREE.depth[SIDE]}'s state, expected node {SIDE}'s"

    def test_a_commit_that_never_happens(self):
        made = case("commit", TREE, CHAIN, accept=(SIDE, -1))
        found = check(lambda call: None, made).findings
        assert [f.request for f in found] == [0] and "holds the state before" in found[0].reads

    # --- a layer --------------------------------------------------------------------------------------------------

    def layer(self, **changes) -> Layer:
        names = {"conv": self.kernels.conv, "delta": self.kernels.gdn, "commit": self.kernels.commit} | changes
        return Layer(**names)

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_layer(self, kind, dtype):
        layer = self.layer(kind=kind, delta=getattr(self.kernels, kind))
        assert check_layer(layer, [TREE, OTHER], [SIDE, 8], dtype=dtype) == []
        assert check_layer(layer, [TREE, CHAIN], [0, 6], dtype=dtype) == []

    def test_unforked_layer_is_wrong_on_a_side_branch_only(self):
        spine = TREE.clean[-1]
        assert check_layer(self.layer(), [TREE], [spine], forked=False) == []
        found = check_layer(self.layer(), [TREE], [SIDE], forked=False)
        assert {"output of the path", "decoded token"} == {f.part for f in found}

    def test_layer_with_a_commit_by_accepted_length(self):
        trees = (TREE, CHAIN)
        layer = self.layer(commit=faults.by_length(trees)(self.kernels.commit))
        found = check_layer(layer, trees, [SIDE, 4])
        assert {(f.part, f.request) for f in found} == {("decoded token", 0)}, "the verify pass itself was right"

    # --- what is refused before a call -----------------------------------------------------------------------------

    def test_a_broken_convention_is_refused_before_the_call(self):
        made = case("gdn", TREE)
        call = made.call()
        call.parents[0, 3] = -1
        result = judge(lambda call: pytest.fail("was called"), call, Result("gdn", made))
        assert result.verdict == "fail" and [p.name for p in result.problems] == ["root-parent"]
        assert torch.isnan(call.buffer).all()
