"""Every form round-trips, and every way in which it can be wrong is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_check.tree.case import load_tree
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.recorded import load_recorded
from ddtree_check.tree.drafts.shapes import shape
from ddtree_check.tree.formats import (
    from_links,
    from_paths,
    from_trace,
    to_batch_links,
    to_links,
)
from tests.forms import to_paths, to_trace

NAMED = DraftTree((None, 1, 2, 1, 3, 1), (-1, 0, 0, 1, 2, 4))


def tree_of(drawn):
    """The tree in which node i + 1 continues node drawn[i] mod i + 1; siblings count down from token 20."""
    parents = (-1, *(number % (node + 1) for node, number in enumerate(drawn)))
    return DraftTree((3, *(20 - parents[1:node].count(parents[node]) for node in range(1, len(parents)))), parents)


TREES = st.lists(st.integers(0, 2), max_size=8).map(tree_of) | st.lists(st.integers(0, 99), max_size=11).map(tree_of)
SPARE = st.integers(0, 3)  # padding rows


def padded(tree, rows):
    return (*tree.tokens, *[0] * (rows - len(tree)))


# --- links ------------------------------------------------------------------------------------------------------------


LINKS = [  # parents, next_token, next_sibling
    pytest.param((-1,), [-1], [-1], id="root-only"),
    pytest.param((-1, 0, 1), [1, 2, -1], [-1, -1, -1], id="chain"),
    pytest.param((-1, 0, 0, 0), [1, -1, -1, -1], [-1, 2, 3, -1], id="star"),
    pytest.param((-1, 0, 0, 1), [1, 3, -1, -1], [-1, 2, -1, -1], id="sglang-example"),
    pytest.param((-1, 0, 0, 1, 2, 4), [1, 3, 4, -1, 5, -1], [-1, 2, -1, -1, -1, -1], id="first-child-after-sibling"),
    pytest.param((-1, 0, 1, 0, 1), [1, 2, -1, -1, -1], [-1, 3, 4, -1, -1], id="siblings-interleaved"),
]


@pytest.mark.parametrize(("parents", "next_token", "next_sibling"), LINKS)
def test_links_on_paper(parents, next_token, next_sibling):
    tree = DraftTree(tuple(range(len(parents))), parents)
    links = to_links(tree)
    assert links.retrieve_index.tolist() == list(range(len(parents)))
    assert (links.next_token.tolist(), links.next_sibling.tolist()) == (next_token, next_sibling)
    assert {array.dtype for array in (links.retrieve_index, links.next_token, links.next_sibling)} == {
        np.dtype("int64")
    }
    assert from_links(next_token, next_sibling, tree.tokens) == tree


@given(TREES, SPARE)
def test_links_round_trip(tree, spare):
    rows = len(tree) + spare
    links = to_links(tree, rows)
    assert from_links(links.next_token, links.next_sibling, padded(tree, rows), count=len(tree)) == tree


@given(TREES, st.data())
def test_any_changed_link_is_refused_or_differs(tree, data):
    links = to_links(tree)
    changed = {"next_token": links.next_token.copy(), "next_sibling": links.next_sibling.copy()}
    name, node = data.draw(st.sampled_from(sorted(changed))), data.draw(st.integers(0, len(tree) - 1))
    value = data.draw(st.integers(-2, len(tree)).filter(lambda value: value != changed[name][node]))
    changed[name][node] = value
    try:
        assert from_links(**changed, tokens=tree.tokens) != tree
    except ValueError as error:
        assert "node" in str(error) and "\n" not in str(error)


@given(st.lists(TREES, min_size=1, max_size=4), SPARE)
def test_batch_links_round_trip(drawn, spare):
    rows = max(map(len, drawn)) + spare
    links = to_batch_links(drawn, rows)
    assert links.retrieve_index.shape == links.next_token.shape == links.next_sibling.shape == (len(drawn), rows)
    for b in range(len(drawn)):
        assert links.retrieve_index[b].tolist() == [b * rows + i for i in range(rows)]
    for b, tree in enumerate(drawn):
        assert from_links(links.next_token[b], links.next_sibling[b], padded(tree, rows), len(tree)) == tree


def test_padding_may_hang_below_the_root():
    """Parents -1 0 0 1, then two padding rows whose parent is 0 by convention."""
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1))
    linked = [1, 3, -1, -1, -1, -1], [-1, 2, 4, -1, 5, -1]
    assert from_links(*linked, padded(tree, 6), count=4) == tree
    assert len(from_links(*linked, (5, 6, 7, 8, 9, 10))) == 6  # without the count they are nodes
    assert from_links([1, -1], [-1, -1], (5, 0), count=1) == DraftTree((5,), (-1,))
    with pytest.raises(ValueError, match="node 3 has next_token 4, a padding row; expected it below the root"):
        from_links([1, 3, -1, 4, -1, -1], [-1, 2, -1, -1, 5, -1], padded(tree, 6), count=4)


LINKS_REFUSED = [  # next_token, next_sibling, message
    pytest.param([1, -1, -1], [-1, -1, -1], "node 2 is not linked", id="unlinked"),
    pytest.param(
        [2, -1, -1],
        [-1, -1, 1],
        "node 2 has next_sibling 1, expected -1 or a later row",
        id="descending-siblings",
    ),
    pytest.param([1, -1, -1, -1], [-1, 3, -1, 2], "node 3 has next_sibling 2", id="descending-siblings-later"),
    pytest.param([1, 2, 1], [-1, -1, -1], "node 2 has next_token 1, expected -1 or a later row", id="cycle"),
    pytest.param([1, 2, 0], [-1, -1, -1], "node 2 has next_token 0", id="cycle-through-the-root"),
    pytest.param([1, 1, -1], [-1, -1, -1], "node 1 has next_token 1", id="own-child"),
    pytest.param([1, -1, -1], [-1, 1, -1], "node 1 has next_sibling 1", id="own-sibling"),
    pytest.param([1, 2, -1], [-1, 2, -1], "node 2 has two parents, 1 and 0", id="two-parents"),
    pytest.param([1, 3, 3, -1], [-1, 2, -1, -1], "node 3 has two parents, 1 and 2", id="two-parents-by-child"),
    pytest.param([2, -1, -1], [1, -1, -1], "node 0 has next_sibling 1, expected -1", id="root-with-sibling"),
    pytest.param([1, 3, -1], [-1, 2, -1], "node 1 has next_token 3, expected -1 or a later row", id="beyond-the-rows"),
    pytest.param([1, -2, -1], [-1, 2, -1], "node 1 has next_token -2", id="below-minus-1"),
]


@pytest.mark.parametrize(("next_token", "next_sibling", "message"), LINKS_REFUSED)
def test_links_refused(next_token, next_sibling, message):
    with pytest.raises(ValueError) as caught:
        from_links(next_token, next_sibling, range(len(next_token)))
    assert message in str(caught.value)


MISSHAPEN = [
    pytest.param(([1, -1], [-1, -1], (1, 2, 3)), {}, "and 3 tokens; expected one of each", id="tokens"),
    pytest.param(([1, -1], [-1], (1, 2)), {}, "expected one of each for every row", id="siblings"),
    pytest.param(([[1, -1]], [[-1, -1]], (1, 2)), {}, "expected one of each", id="a-batch"),
    pytest.param(([1.0, -1.0], [-1, -1], (1, 2)), {}, "next_token is float64", id="float"),
    pytest.param(([1, -1], [-1, -1], (1, 2)), {"count": 3}, "count 3 of 2 rows", id="count-too-large"),
    pytest.param(([1, -1], [-1, -1], (1, 2)), {"count": 0}, "count 0 of 2 rows", id="count-0"),
    pytest.param(([1, -1], [-1, -1], (1, None)), {}, "node 1 has token None", id="no-token"),
]


@pytest.mark.parametrize(("arguments", "more", "message"), MISSHAPEN)
def test_misshapen_links_refused(arguments, more, message):
    with pytest.raises(ValueError, match=message):
        from_links(*arguments, **more)


def test_too_few_rows_are_refused():
    for make in (to_links, lambda tree, rows: to_batch_links([tree], rows)):
        with pytest.raises(ValueError, match="5 rows for 6 nodes"):
            make(NAMED, 5)
    with pytest.raises(ValueError, match="no trees"):
        to_batch_links([])


# --- traces -----------------------------------------------------------------------------------------------------------


def test_trace_on_paper():
    trace = to_trace(NAMED, (0, 2, 4))
    assert trace == {
        "accepted_indices": [0, 2, 4],
        "node_token_ids": [1, 2, 1, 3, 1],
        "node_depths": [1, 1, 2, 2, 3],
        "parents": [-1, 0, 0, 1, 2, 4],
        "root_token": None,
    }
    del trace["root_token"]
    assert from_trace(trace) == (NAMED, (0, 2, 4))


@given(TREES, st.data())
def test_trace_round_trip(tree, data):
    path = tree.path(data.draw(st.integers(0, len(tree) - 1)))
    assert from_trace(json.loads(json.dumps(to_trace(tree, path)))) == (tree, path)


TRACES_REFUSED = [  # what to change, message
    pytest.param({"accepted_indices": [2, 4]}, "begins with node 0", id="no-root-in-path"),
    pytest.param({"accepted_indices": []}, "begins with node 0", id="empty-path"),
    pytest.param({"accepted_indices": [0, 4]}, "accepted node 4 after node 0, expected a child", id="gap"),
    pytest.param({"accepted_indices": [0, 1, 4]}, "accepted node 4 after node 1", id="cousin"),
    pytest.param({"accepted_indices": [0, 9]}, "accepted node 9 after node 0", id="no-node"),
    pytest.param({"accepted_indices": None}, "no list 'accepted_indices'", id="no-path"),
    pytest.param({"node_depths": [0, 0, 1, 1, 2]}, "node 1 has depth 0, expected 1", id="depths-from-0"),
    pytest.param({"node_depths": [1, 1, 2, 2, 2]}, "node 5 has depth 2, expected 3", id="wrong-depth"),
    pytest.param({"node_depths": [1, 1, 2, 2]}, "4 node_depths and 5 node_token_ids", id="short-depths"),
    pytest.param({"parents": [0, 0, 1, 2, 4]}, "6 tokens and 5 parents", id="parents-without-root"),
    pytest.param({"node_token_ids": [1, 1, 1, 3, 1]}, "nodes 1 and 2 are both token 1", id="twin-siblings"),
]


@pytest.mark.parametrize(("change", "message"), TRACES_REFUSED)
def test_trace_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_trace(to_trace(NAMED, (0, 2, 4)) | change)


def test_trace_refuses_what_is_no_round():
    with pytest.raises(ValueError, match="expected lists accepted_indices"):
        from_trace([])


# --- path sets --------------------------------------------------------------------------------------------------------


def test_paths_on_paper():
    assert to_paths(NAMED) == [(None, 1, 1), (None, 2, 3, 1)]
    assert from_paths([(None, 2, 3, 1), (None, 1, 1)]) == DraftTree((None, 2, 3, 1, 1, 1), (-1, 0, 1, 2, 0, 4))
    assert to_paths(DraftTree((7,), (-1,))) == [(7,)]


@given(TREES)
def test_paths_round_trip(tree):
    again = from_paths(to_paths(tree))
    assert again == tree.reordered("depth")[0]
    assert to_paths(again) == to_paths(tree)


PATHS_REFUSED = [
    pytest.param([], "0 paths, expected at least one", id="none"),
    pytest.param([(1, 2), ()], "none of them empty", id="empty-path"),
    pytest.param([(1, 2), (3, 2)], "path 1 begins with 3, expected the root's 1", id="two-roots"),
    pytest.param([(1, 2, 3), (1, 2)], "path 1 lies within another path", id="prefix"),
    pytest.param([(1, 2), (1, 2, 3)], "path 0 lies within another path", id="prefix-first"),
    pytest.param([(1, 2), (1, 3), (1, 2)], "path 2 lies within another path", id="twice"),
    pytest.param([(1, -2)], "node 1 has token -2", id="token"),
]


@pytest.mark.parametrize(("paths", "message"), PATHS_REFUSED)
def test_paths_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        from_paths(paths)


# --- any form as a file -----------------------------------------------------------------------------------------------

FORMS = [
    pytest.param(lambda tree: tree.to_json(), id="tokens-and-parents"),
    pytest.param(lambda tree: to_trace(tree, tree.path(len(tree) - 1)), id="ddtree"),
    pytest.param(lambda tree: {"paths": [list(path) for path in to_paths(tree)]}, id="paths"),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_tree_file_and_a_recorded_draft(tmp_path, form):
    tree = shape("random", 12, vocab=90, seed=3, root=5)
    wanted = tree if "paths" not in form(tree) else tree.reordered("depth")[0]
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(form(tree)))
    assert load_tree(path) == wanted
    path.write_text(
        "\n".join(json.dumps(value) for value in (form(tree), {"tree": form(tree)}, {"trees": [form(tree)]}))
    )
    assert load_recorded(path) == [wanted, wanted, (wanted,)]


BAD_FORMS = [
    pytest.param({"node_token_ids": [1], "node_depths": [2], "parents": [-1, 0]}, "depth 2, expected 1", id="depth"),
    pytest.param({"node_token_ids": [1], "node_depths": [1], "parents": [0]}, "2 tokens and 1 parents", id="parents"),
    pytest.param({"paths": [[1, 2], [3, 4]]}, "path 1 begins with 3", id="roots"),
    pytest.param({"paths": "12"}, "expected a list of lists", id="text"),
]


@pytest.mark.parametrize(("value", "message"), BAD_FORMS)
def test_a_wrong_form_names_file_and_cause(tmp_path, value, message):
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(value))
    for read in (load_tree, load_recorded):
        with pytest.raises(ValueError, match=message) as refused:
            read(path)
        assert str(path) in str(refused.value)
