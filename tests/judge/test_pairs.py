"""Passes of a trace that show something of each other, bit for bit: pairs, chains in front, and what earns a claim."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from ddtree_check.judge.exact import CERTIFIED, MOVED, OPEN
from ddtree_check.judge.pairs import NULL, RecordedPass, compare
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.variants import front_chain

TREE = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 2, 2))  # rows 2, 3, 4 have foreign rows in front of them
OTHER = DraftTree((9, 5, 2, 3, 4), TREE.parents)  # another token at node 1 alone


def recorded(
    tree: DraftTree, mode: str = "tree_forked", reads=lambda tree, node: tree.path_tokens(node)
) -> RecordedPass:
    """Return a pass whose rows are made of what they read, the path unless told otherwise."""
    return RecordedPass(
        mode, tree, tuple(range(len(tree))), tuple(hash(reads(tree, node)) for node in range(len(tree)))
    )


def leak(tree: DraftTree, node: int):
    """Read the row before, as a state that is not forked does."""
    return tree.tokens[: node + 1]


def chains(count: int = 2, reads=lambda tree, node: tree.path_tokens(node)) -> list[RecordedPass]:
    """Return chains of the longest path, so many with other tokens behind it, and as many that are longer."""
    tails = [DraftTree.chain([9, 2, 3, 20 + draw, 40 + draw]) for draw in range(count)]
    return [
        recorded(tree, reads=reads) for tree in (*tails, *(front_chain(TREE, TREE.path(leaf)) for leaf in (1, 3, 4)))
    ]


def test_a_right_pass_is_certified_and_claims_its_influence():
    own = recorded(TREE)
    exact = compare(own, [own, recorded(OTHER), *chains(4)])
    assert exact.influence.claimed and exact.verdict == "pass"
    assert exact.of(CERTIFIED) == tuple(range(5))
    assert (exact.pairs.count, exact.pairs.of) == (4, exact.pairs.of)  # node 1 against 0, 2, 3 and 4


def test_a_row_that_reads_a_stranger_moves_and_its_children_with_it():
    own = recorded(TREE, reads=leak)
    exact = compare(own, [own, recorded(OTHER, reads=leak), *chains(4)])
    assert exact.of(MOVED) == (2, 3, 4) and exact.verdict == "fail"
    assert [exact.nodes[node].through for node in (2, 3, 4)] == [None, 2, 2]
    assert exact.evidence == ["node 2 moves with foreign tokens in 1 of 1 draws"]


@pytest.mark.parametrize(("passes", "says"), [
    ([recorded(OTHER, reads=leak)], f"0 rows of chains were recorded twice .* expected at least {NULL}"),
    ([recorded(OTHER, reads=leak), *chains(4, reads=lambda tree, node: tree.tokens)], "rows of chains move"),
    ([recorded(TREE), recorded(OTHER, reads=leak), *chains(4)], "3 of 5 rows differ where a pass is made twice"),
    (chains(4), "no second pass over this tree"),
])  # fmt: skip
def test_without_a_null_that_kept_its_bits_nothing_is_claimed_and_nothing_condemned(passes, says):
    own = recorded(TREE, reads=leak)
    exact = compare(own, [own, *passes])
    assert not exact.influence.claimed and not exact.of(MOVED) and exact.verdict == "open"
    assert re.search(says, exact.influence.reason), exact.influence.reason


def test_a_chain_pass_of_the_step_itself_is_a_draw_of_relocation_wherever_its_rows_are_stored():
    own = recorded(TREE)
    stored = RecordedPass("chain", TREE, (3, 4), tuple(own.digests[node] for node in (3, 4)))
    exact = compare(own, [own, stored])
    assert exact.of(CERTIFIED) == (3, 4) and exact.of(OPEN) == (0, 1, 2)
    off = replace(stored, digests=(1, own.digests[4]))
    assert compare(own, [own, off]).of(CERTIFIED) == (4,)


def test_the_control_is_held_against_the_law():
    reach = np.tril(np.ones((5, 5), dtype=bool))  # every row before
    passes = [recorded(TREE), recorded(OTHER), *chains(4)]
    passes += [recorded(tree, "tree_unforked", leak) for tree in (TREE, OTHER)]
    law = compare(passes[0], passes, reach).law
    assert law.kept and law.expected == {2, 3, 4}
    still = [*passes[:-2], *(recorded(tree, "tree_unforked") for tree in (TREE, OTHER))]
    assert compare(still[0], still, reach).law.missed == {2, 3, 4}


def test_a_lone_pass_says_nothing():
    own = recorded(TREE)
    assert compare(own, [own]) is None
