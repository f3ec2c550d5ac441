"""Exact checks of kernels: one bit that moves with what a row must not read is found, whatever the bound allows."""

from __future__ import annotations

import pytest
import torch

from ddtree_check.kernels import plain
from ddtree_check.kernels.cases import FAMILIES
from ddtree_check.kernels.check import check
from ddtree_check.kernels.exact import exact
from tests.kernel_faults import case

KINDS = ("conv", "gdn", "kda", "mamba2")
TREE, OTHER = FAMILIES["braid"](9, 1), FAMILIES["binary"](6, 1)


def made(kind: str, dtype: str = "float32"):
    return case(kind, TREE, OTHER, dtype=dtype, padded=True)


def rows_of(call) -> torch.Tensor:
    return (call.v if hasattr(call, "v") else call.x).flatten(2).float()


def nudged(kind: str, pick):
    """Return the plain kernel with the last bit of outputs set by `pick(call)`, bool [b, t]."""

    def run(call):
        chosen = pick(call)
        out = getattr(plain, kind)(call)
        bits = out.view(torch.int32 if out.dtype == torch.float32 else torch.int16)
        bits.flatten(2)[..., 0] = bits.flatten(2)[..., 0] & ~1 | chosen.to(bits.dtype)
        return out

    return run


def of_row(request: int, row: int, node: int):
    """Let row `node` of request 0 read the sign of another row."""

    def pick(call):
        chosen = torch.zeros(rows_of(call).shape[:2], dtype=torch.bool)
        chosen[0, node] = rows_of(call)[request, row].sum() > 0
        return chosen

    return pick


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_kernels_are_claimed_and_certified(kind, dtype):
    result = check(getattr(plain, kind), made(kind, dtype), in_bits=True)
    assert result.findings == [] and result.bits.influence.claimed and result.bits.moved == ()
    assert result.bits.certified.count == result.bits.certified.of >= len(TREE)


def moved_in(wrong, *trees, kind: str = "gdn", **options) -> set:
    """Return what moved in a few cases: one bit that reads a sign moves in half of them."""
    every = [exact(wrong, case(kind, *trees, seed=seed, **options)) for seed in range(8)]
    return {moved for bits in every for moved in bits.moved}


@pytest.mark.parametrize("request_, row, source", [(0, 3, "rows of other nodes"), (1, 2, "other requests")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_reads_one_it_must_not_is_named_with_what_it_reads(kind, request_, row, source):
    """TREE's node 4 continues node 2; node 3 is on the other chain."""
    wrong = nudged(kind, of_row(request_, row, 4))
    assert moved_in(wrong, TREE, OTHER, kind=kind, padded=True) == {(0, 4, source)}
    results = [check(wrong, case(kind, TREE, OTHER, seed=seed), in_bits=True) for seed in range(8)]
    texts = [str(finding) for result in results for finding in result.findings]
    assert texts and all(f"bits request 0 node 4; moves with {source}" in text for text in texts)
    assert check(wrong, made(kind)).findings == [], "its bound sees nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_of_no_request_must_not_be_read(kind):
    def reads(call):
        unused = next(slot for slot in range(len(call.pool)) if slot not in call.slots.tolist())
        out = getattr(plain, kind)(call)
        out[0] += 0 * call.pool[unused].float().sum().to(out.dtype)
        return out

    result = check(reads, made(kind), in_bits=True)
    assert {finding.reads for finding in result.findings} == {"moves with slots of no request"}


def test_a_row_behind_the_tree_must_not_be_read():
    wrong = nudged("gdn", of_row(0, len(OTHER), 1))  # the first request has rows to spare
    assert {source for *_, source in moved_in(wrong, OTHER, TREE)} == {"rows behind the tree"}


def test_rows_that_share_a_number_claim_nothing():
    def coupled(call):
        return torch.full(rows_of(call).shape[:2], bool(rows_of(call).sum() > 0))

    every = [exact(nudged("gdn", coupled), case("gdn", TREE, OTHER, seed=seed)) for seed in range(8)]
    unclaimed = [bits for bits in every if not bits.influence.claimed]
    assert unclaimed and all(bits.moved == () for bits in unclaimed)
    assert "rows of chains move" in unclaimed[0].influence.reason


def test_right_for_the_first_rows_alone_is_not_certified():
    def late(call):
        chosen = torch.zeros(rows_of(call).shape[:2], dtype=torch.bool)
        out = plain.gdn(call.clone())
        last = out.view(torch.int32).flatten(2)[..., 0] & 1
        chosen[:] = last.bool()
        chosen[:, 6:] = ~chosen[:, 6:]
        return chosen

    found = exact(nudged("gdn", late), made("gdn"))
    assert found.moved == () and found.certified.count < found.certified.of


def test_commits_and_rows_in_order_have_checks_of_their_own():
    assert exact(plain.commit, case("commit", TREE, accept=(2,))) is None
    assert exact(plain.gdn, case("gdn", TREE, forked=False)) is None
