"""DraftTree: what it refuses, and that its derived views agree with each other."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_check.tree.draft_tree import DraftTree, ancestors, depths, merge

CASES = [  # id, parents, depth, clean nodes: small enough to draw on paper
    pytest.param((-1,), (0,), (0,), id="root-only"),
    pytest.param((-1, 0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3), id="chain"),
    pytest.param((-1, 0, 0), (0, 1, 1), (0, 1), id="two-siblings"),
    pytest.param((-1, 0, 0, 0), (0, 1, 1, 1), (0, 1), id="star"),
    pytest.param((-1, 0, 1, 0, 3), (0, 1, 2, 1, 2), (0, 1, 2), id="chain-first"),
    pytest.param((-1, 0, 0, 1, 2, 4), (0, 1, 1, 2, 2, 3), (0, 1), id="first-child-after-sibling"),
]


def numbered(parents, root=100):
    """A tree whose tokens tell its nodes apart."""
    return DraftTree(tuple(range(root, root + len(parents))), tuple(parents))


@st.composite
def trees(draw, most=12, tokens=6):
    """Any tree of up to `most` nodes; tokens repeat across branches, never among siblings."""
    found, parents, taken = [draw(st.integers(0, tokens - 1))], [-1], set()
    for node in range(1, draw(st.integers(1, most))):
        parent = draw(st.integers(0, node - 1))
        free = [token for token in range(tokens + most) if (parent, token) not in taken]
        found.append(draw(st.sampled_from(free[:tokens])))
        parents.append(parent)
        taken.add((parent, found[-1]))
    return DraftTree(tuple(found), tuple(parents))


@pytest.mark.parametrize(("parents", "depth", "clean"), CASES)
def test_depth_and_clean(parents, depth, clean):
    tree = numbered(parents)
    assert (tree.depth, tree.clean) == (depth, clean)
    assert tree.is_chain == (clean == tuple(range(len(parents))))
    assert tree.leaked == tuple(node - d for node, d in enumerate(depth))
    assert depths(parents) == list(depth)


def test_views_of_the_named_tree():
    tree = numbered((-1, 0, 0, 1, 2, 4))
    assert tree.children == ((1, 2), (3,), (4,), (), (5,), ())
    assert tree.leaves == (3, 5)
    assert tree.levels == ((0,), (1, 2), (3, 4), (5,))
    assert tree.path(5) == (0, 2, 4, 5)
    assert tree.path_tokens(5) == (100, 102, 104, 105)
    depth_first = DraftTree((100, 101, 103, 102, 104, 105), (-1, 0, 1, 0, 3, 4))
    assert tree.reordered("depth") == (depth_first, (0, 1, 3, 2, 4, 5))
    assert tree.reordered("breadth") == (tree, (0, 1, 2, 3, 4, 5))
    assert len(tree) == 6


REFUSED = [
    pytest.param((), (), "no nodes", id="empty"),
    pytest.param((1, 2), (-1,), "2 tokens and 1 parents", id="lengths"),
    pytest.param((1, 2), (0, 0), "node 0 has parent 0, expected -1", id="no-root"),
    pytest.param((1, 2), (-1, -1), "node 1 has parent -1, expected 0..0; only node 0 is a root", id="two-roots"),
    pytest.param((1, 2, 3), (-1, 2, 0), "node 1 has parent 2, expected 0..0", id="parent-after-child"),
    pytest.param((1, 2, 3), (-1, 2, 1), "node 1 has parent 2, expected 0..0", id="cycle"),
    pytest.param((1, 2), (-1, 1), "node 1 has parent 1", id="own-parent"),
    pytest.param((1, 2), (-1, -2), "node 1 has parent -2", id="far-below-root"),
    pytest.param((1, 2, 2), (-1, 0, 0), "nodes 1 and 2 are both token 2 under parent 0", id="twin-siblings"),
    pytest.param((1, -2), (-1, 0), "node 1 has token -2", id="negative-token"),
    pytest.param((1, None), (-1, 0), "node 1 has token None", id="no-token"),
    pytest.param((1, 2.0), (-1, 0), "node 1 has token 2.0", id="float-token"),
    pytest.param((1, True), (-1, 0), "node 1 has token True", id="bool-token"),
    pytest.param((1, "2"), (-1, 0), "node 1 has token '2'", id="text-token"),
    pytest.param((1, 2), (-1, None), "node 1 has parent None", id="no-parent"),
    pytest.param((1, 2), (-1, False), "node 1 has parent False", id="bool-parent"),
]


@pytest.mark.parametrize(("tokens", "parents", "message"), REFUSED)
def test_refused(tokens, parents, message):
    with pytest.raises(ValueError) as caught:
        DraftTree(tokens, parents)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_stands_next_to_the_refused_is_accepted():
    DraftTree((1, 2, 2), (-1, 0, 1))  # the same token under another parent
    DraftTree((None, 0), (-1, 0))  # a root that is not known yet
    tree = DraftTree(np.array([1, 2]), np.array([-1, 0]))
    assert tree == DraftTree((1, 2), (-1, 0)) and {type(token) for token in tree.tokens} == {int}


@given(trees())
def test_views_agree(tree):
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node and len(path) == tree.depth[node] + 1
        assert all(tree.parents[child] == parent for parent, child in pairwise(path))
        assert np.flatnonzero(tree.ancestor_mask[node]).tolist() == sorted(path)
        assert (node in tree.clean) == (path == tuple(range(node + 1)))
    assert sorted(node for level in tree.levels for node in level) == list(range(len(tree)))
    assert tree.leaves == tuple(sorted(set(range(len(tree))) - set(tree.parents)))
    assert pickle.loads(pickle.dumps(tree)) == tree


@given(trees(), st.sampled_from(["breadth", "depth"]))
def test_reordered_keeps_every_path(tree, order):
    again, old = tree.reordered(order)
    assert [again.path_tokens(node) for node in range(len(tree))] == [tree.path_tokens(node) for node in old]
    assert again.reordered(order)[0] == again
    assert again.reordered(np.argsort(old).tolist())[0] == tree
    if order == "breadth":
        assert list(again.depth) == sorted(again.depth)
    else:  # a subtree is one run of nodes
        assert all(np.ptp(np.flatnonzero(column)) < column.sum() for column in again.ancestor_mask.T)


ORDERS_REFUSED = [
    pytest.param("heap", "order 'heap', expected 'breadth', 'depth'", id="name"),
    pytest.param((0, 1), "expected each of 0..2 once", id="short"),
    pytest.param((0, 1, 1), "expected each of 0..2 once", id="twice"),
    pytest.param((0, 2, 1), "list parents before children", id="child-first"),
    pytest.param((1, 0, 2), "node 0 has parent 1, expected -1", id="root-later"),
]


@pytest.mark.parametrize(("order", "message"), ORDERS_REFUSED)
def test_reordered_refuses(order, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        numbered((-1, 0, 1)).reordered(order)


@pytest.mark.parametrize("node", [-1, 3])
def test_path_of_no_node_is_refused(node):
    with pytest.raises(ValueError, match=rf"path of node {node}, expected 0\.\.2"):
        numbered((-1, 0, 0)).path(node)


def test_masks_are_shared_and_read_only():
    tree = numbered((-1, 0, 0))
    assert tree.ancestor_mask is tree.ancestor_mask
    with pytest.raises(ValueError, match="read-only"):
        tree.ancestor_mask[0, 1] = True
    assert ancestors((-1, -1, 1)).tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_chain_and_root():
    tree = DraftTree.chain([None, 4, 4])
    assert tree.parents == (-1, 0, 1) and tree.is_chain
    assert tree.with_root(9) == DraftTree((9, 4, 4), (-1, 0, 1))


@given(trees())
def test_json_round_trip(tree):
    assert DraftTree.from_json(tree.to_json()) == tree


@pytest.mark.parametrize(
    "data",
    [
        pytest.param([1], id="list"),
        pytest.param({"tokens": [1]}, id="no-parents"),
        pytest.param({"tokens": "12", "parents": [-1, 0]}, id="text"),
        pytest.param({"tokens": [1, 2], "parents": {"0": -1}}, id="object"),
    ],
)
def test_json_refused(data):
    with pytest.raises(ValueError, match=r"^tree: .*(expected|must be)"):
        DraftTree.from_json(data)


@settings(max_examples=60)
@given(st.lists(trees(most=8), min_size=1, max_size=4))
def test_merge_holds_each_path_once(drawn):
    drawn = [tree.with_root(3) for tree in drawn]
    merged, places = merge(drawn)
    paths = [merged.path_tokens(node) for node in range(len(merged))]
    assert len(set(paths)) == len(paths)
    for tree, place in zip(drawn, places, strict=True):
        assert [paths[node] for node in place] == [tree.path_tokens(node) for node in range(len(tree))]
    assert set(paths) == {tree.path_tokens(node) for tree in drawn for node in range(len(tree))}


def test_merge_refuses_two_roots():
    with pytest.raises(ValueError, match="root tokens"):
        merge([DraftTree((1, 2), (-1, 0)), DraftTree((2, 2), (-1, 0))])
    with pytest.raises(ValueError, match="root tokens"):
        merge([])
