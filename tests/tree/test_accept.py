"""The greedy walk against a search over whole paths, and the difference of two walks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_check.tree.accept import Accepted, compare_walks, greedy_walk
from ddtree_check.tree.draft_tree import DraftTree

# 0 ─┬─ 1 (11) ── 3 (13)
#    └─ 2 (12) ── 4 (14) ── 5 (15)
TREE = DraftTree((10, 11, 12, 13, 14, 15), (-1, 0, 0, 1, 2, 4))


def tree_of(drawn):
    """The tree in which node i + 1 continues node drawn[i] mod i + 1; siblings count down from token 4."""
    parents = (-1, *(number % (node + 1) for node, number in enumerate(drawn)))
    return DraftTree((3, *(4 - parents[1:node].count(parents[node]) for node in range(1, len(parents)))), parents)


TREES = st.lists(st.integers(0, 2), max_size=4).map(tree_of) | st.lists(st.integers(0, 9), max_size=5).map(tree_of)

WALKS = [  # argmax, path, bonus
    pytest.param((99, 0, 0, 0, 0, 0), (0,), 99, id="nothing-accepted"),
    pytest.param((11, 13, 0, 7, 0, 0), (0, 1, 3), 7, id="first-branch"),
    pytest.param((12, 0, 14, 0, 15, 8), (0, 2, 4, 5), 8, id="other-branch"),
    pytest.param((12, 0, 13, 0, 15, 8), (0, 2), 13, id="cousin's-token-is-no-child"),
    pytest.param((10, 0, 0, 0, 0, 0), (0,), 10, id="root's-own-token"),
]


@pytest.mark.parametrize(("argmax", "path", "bonus"), WALKS)
def test_greedy_walk(argmax, path, bonus):
    walk = greedy_walk(TREE, argmax)
    assert walk == Accepted(path, bonus)
    assert walk.accepted == len(path) - 1


def agreed(tree, argmax):
    """The deepest node whose whole path the target agrees with."""
    nodes = [
        node
        for node in range(len(tree))
        if all(argmax[tree.parents[step]] == tree.tokens[step] for step in tree.path(node)[1:])
    ]
    return max(nodes, key=lambda node: tree.depth[node])


@given(TREES, st.data())
def test_walk_ends_at_the_deepest_agreed_node(tree, data):
    argmax = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(tree), max_size=len(tree))))
    walk = greedy_walk(tree, argmax)
    end = agreed(tree, argmax)
    assert walk == Accepted(tree.path(end), argmax[end])
    assert walk.bonus not in [tree.tokens[child] for child in tree.children[end]]


@pytest.mark.parametrize(
    "argmax",
    [
        pytest.param((1, 2), id="short"),
        pytest.param((1,) * 7, id="long"),
        pytest.param((1.0,) * 6, id="float"),
        pytest.param(((1,) * 6,), id="two-dimensional"),
    ],
)
def test_walk_refuses(argmax):
    with pytest.raises(ValueError, match=r"expected integers \[6\]"):
        greedy_walk(TREE, argmax)


FIRST, OTHER = Accepted((0, 1, 3), 7), Accepted((0, 2, 4), 9)
COMPARED = [  # reference, other, tie nodes, what differs
    pytest.param(FIRST, FIRST, (0, 3), ([], [], False, False), id="same"),
    pytest.param(FIRST, OTHER, (), ([2, 4], [1, 3], False, False), id="another-branch"),
    pytest.param(FIRST, OTHER, (0,), ([2, 4], [1, 3], False, True), id="another-branch-by-tie"),
    pytest.param(FIRST, OTHER, (1, 2), ([2, 4], [1, 3], False, False), id="tie-elsewhere"),
    pytest.param(FIRST, Accepted((0, 1), 8), (1,), ([], [3], False, True), id="stops-early-by-tie"),
    pytest.param(Accepted((0, 1), 8), FIRST, (3,), ([3], [], False, False), id="goes-on"),
    pytest.param(FIRST, Accepted((0, 1, 3), 8), (), ([], [], True, False), id="bonus"),
    pytest.param(FIRST, Accepted((0, 1, 3), 8), (3,), ([], [], True, True), id="bonus-by-tie"),
    pytest.param(FIRST, Accepted((0,), 7), (), ([], [1, 3], False, False), id="rejects-all-same-bonus"),
]


@pytest.mark.parametrize(("reference", "other", "ties", "expected"), COMPARED)
def test_compare_walks(reference, other, ties, expected):
    found = compare_walks(TREE, reference, other, ties)
    assert list(found) == ["path", "accepted", "bonus", "wrong_accept", "wrong_reject", "wrong_bonus", "by_tie"]
    assert tuple(found[key] for key in list(found)[3:]) == expected
    assert (found["path"], found["accepted"], found["bonus"]) == (list(other.path), len(other.path) - 1, other.bonus)
    json.dumps(found)


@given(TREES, st.data())
def test_walks_part_where_the_argmax_changed(tree, data):
    """One changed argmax: the walks differ iff the reference passes there, and by_tie names exactly that node."""
    argmax = data.draw(st.lists(st.integers(0, 5), min_size=len(tree), max_size=len(tree)))
    node = data.draw(st.integers(0, len(tree) - 1))
    changed = [*argmax[:node], argmax[node] + 1, *argmax[node + 1 :]]
    reference, other = greedy_walk(tree, argmax), greedy_walk(tree, changed)
    assert (reference != other) == (node in reference.path)
    assert compare_walks(tree, reference, other, {node})["by_tie"] == (reference != other)
    assert not compare_walks(tree, reference, other, set(range(len(tree))) - {node})["by_tie"]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param((), id="empty"),
        pytest.param((1, 3), id="no-root"),
        pytest.param((0, 3), id="gap"),
        pytest.param((0, 1, 4), id="cousin"),
        pytest.param((0, 6), id="no-node"),
        pytest.param((0, -1), id="negative"),
    ],
)
def test_compare_refuses_a_path_of_another_tree(path):
    with pytest.raises(ValueError, match=r"other path .* expected nodes from the root on"):
        compare_walks(TREE, FIRST, Accepted(path, 1))
    with pytest.raises(ValueError, match="reference path"):
        compare_walks(TREE, Accepted(path, 1), FIRST)
