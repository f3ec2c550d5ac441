import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_check.model.wiring import (
    BLANK,
    FORKED,
    UNFORKED,
    Attention,
    Conv,
    Layer,
    Plans,
    State,
    Wiring,
    contaminated,
)
from ddtree_check.tree.draft_tree import DraftTree

DELTA = Layer("gated_delta", ((Conv(4), State("gated_delta")),))
ATTENTION = Layer("attention", ((Attention(),),))
HYBRID = (DELTA, DELTA, DELTA, ATTENTION)
NAMED = (-1, 0, 0, 1, 2, 4)  # node 5: the first child of a first child, and yet it leaks


def tree_of(parents) -> DraftTree:
    return DraftTree(tuple(range(len(parents))), tuple(parents))


@st.composite
def trees(draw, most=24):
    size = draw(st.integers(1, most))
    return tree_of([-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)])


@pytest.mark.parametrize(
    ("parents", "dirty"),
    [
        pytest.param((-1, 0, 1, 2), set(), id="chain"),
        pytest.param((-1, 0, 0), {2}, id="two-siblings"),
        pytest.param(NAMED, {2, 3, 4, 5}, id="first-child-of-a-first-child"),
        pytest.param((-1, 0, 1, 0, 3), {3, 4}, id="depth-first"),
    ],
)
def test_leak_law_by_hand(parents, dirty):
    assert contaminated(UNFORKED.plan(tree_of(parents)), HYBRID) == dirty


@given(trees())
def test_flat_states_reduce_to_the_leak_law(tree):
    clean = set(range(len(tree))) - contaminated(UNFORKED.plan(tree), HYBRID)
    assert clean == {node for node in range(len(tree)) if tree.depth[node] == node}


@given(trees())
def test_right_wiring_contaminates_nothing(tree):
    assert contaminated(FORKED.plan(tree), HYBRID) == frozenset()


@given(trees(), st.integers(2, 4), st.integers(1, 4))
def test_convolutions_alone_reach_as_far_as_their_windows(tree, width, layers):
    """n convolutions and nothing after them: a node is dirty iff one of its last n (w - 1) edges skips."""
    plan = UNFORKED.plan(tree)
    skips = {node for node in range(1, len(tree)) if tree.parents[node] != node - 1}
    expected = {node for node in range(len(tree)) if skips & set(tree.path(node)[-layers * (width - 1) :])}
    assert contaminated(plan, [Layer("short_conv", ((Conv(width),),))] * layers) == expected
    # The twin: attention above them carries it on to every descendant.
    carried = contaminated(plan, [Layer("short_conv", ((Conv(width),),))] * layers + [ATTENTION])
    assert carried == {node for node in range(len(tree)) if skips & set(tree.path(node))}


def test_attention_only_has_nothing_to_leak():
    assert contaminated(UNFORKED.plan(tree_of(NAMED)), (ATTENTION,) * 4) == frozenset()


@pytest.mark.parametrize(
    ("wiring", "layers", "dirty"),
    [
        pytest.param(Wiring.parse("state=flat"), HYBRID, {2, 3, 4, 5}, id="state"),
        pytest.param(Wiring.parse("conv=flat"), HYBRID, {2, 3, 4, 5}, id="conv"),
        pytest.param(Wiring.parse("conv=flat"), (ATTENTION,), set(), id="conv-without-a-convolution"),
        pytest.param(Wiring.parse("mask=flat"), HYBRID, {2, 3, 4, 5}, id="mask"),
        pytest.param(Wiring.parse("mask=flat"), (DELTA,), set(), id="mask-without-attention"),
        pytest.param(Wiring.parse("positions=flat"), HYBRID, {2, 3, 4, 5}, id="positions"),
        pytest.param(
            Wiring.parse("positions=flat"), (DELTA, Layer("attention", ((Attention(positional=False),),))), set(),
            id="positions-without-rotary",
        ),
        pytest.param(Wiring("drop", state=lambda t: (BLANK, *t.parents[1:])), (DELTA,), set(range(6)), id="no-start"),
        pytest.param(Wiring("one", mask=lambda t: _one_edge(t, 5, 3)), (ATTENTION,), {5}, id="one-mask-edge"),
    ],
)  # fmt: skip
def test_each_channel_by_hand(wiring, layers, dirty):
    assert contaminated(wiring.plan(tree_of(NAMED)), layers) == dirty


def _one_edge(tree, row, column):
    mask = tree.ancestor_mask.copy()
    mask[row, column] = True
    return mask


def test_parallel_branches_read_the_same_input():
    """Attention beside a convolution does not see what that convolution did; behind it, it does."""
    tree = tree_of((-1, 0, 0, 2, 3, 4))
    beside = Layer("parallel", ((Conv(2),), (Attention(),)))
    behind = (Layer("short_conv", ((Conv(2),),)), ATTENTION)
    assert contaminated(UNFORKED.plan(tree), [beside]) == {2}
    assert contaminated(UNFORKED.plan(tree), behind) == {2, 3, 4, 5}


def test_sliding_window_forgets_what_lies_too_far_back():
    tree = tree_of((-1, 0, 0, 2, 3, 4))
    layers = (Layer("short_conv", ((Conv(2),),)), Layer("attention", ((Attention(window=2),),)))
    assert contaminated(UNFORKED.plan(tree), layers) == {2, 3}


def test_windows_follow_the_path_and_then_the_committed_inputs():
    plan = FORKED.plan(tree_of(NAMED))
    assert plan.windows(4).tolist()[5] == [0, 2, 4, 5]
    assert plan.windows(4).tolist()[1] == [-2, -1, 0, 1]
    assert UNFORKED.plan(tree_of(NAMED)).windows(4).tolist()[5] == [2, 3, 4, 5]


def test_rows_since_skip():
    plan = UNFORKED.plan(tree_of((-1, 0, 0, 2, 3, 1)))
    assert [plan.rows_since_skip[node] for node in range(6)] == [None, None, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda: Wiring("x", state="sideways"), "state='sideways'", id="rule"),
        pytest.param(lambda: Wiring.parse("stat=flat"), "'stat=flat'", id="channel"),
        pytest.param(lambda: Wiring.parse("state"), "'state'", id="no-rule"),
        pytest.param(
            lambda: Wiring("x", state=lambda t: (-1, 0, 2, 1, 2, 4)).plan(tree_of(NAMED)),
            "node 2 reads node 2",
            id="later-row",
        ),
    ],
)
def test_bad_wirings_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_parsed_wiring_equals_the_named_mode():
    tree = tree_of(NAMED)
    parsed, named = Wiring.parse("state=flat,conv=flat").plan(tree), UNFORKED.plan(tree)
    assert (parsed.state, parsed.conv, parsed.positions) == (named.state, named.conv, named.positions)
    assert np.array_equal(parsed.mask, named.mask)


def test_one_wrong_position_reaches_every_row_that_sees_it():
    case = tree_of((-1, 0, 0, 1, 2))
    wrong = Wiring("one late", positions=lambda tree: (0, 2, *tree.depth[2:]))
    assert contaminated(wrong.plan(case), (ATTENTION,)) == {1, 3}


def test_the_tree_of_several_requests_is_the_first_ones():
    first, second = DraftTree((5, 6, 7), (-1, 0, 0)), DraftTree((8, 9, 4), (-1, 0, 1))
    plans = Plans((FORKED.plan(first), FORKED.plan(second)))
    assert plans.tree is first and plans.state == (first.parents, second.parents)
