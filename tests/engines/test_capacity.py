"""The plan-time check: each buffer that is too small is named, and one that just fits is not."""

from __future__ import annotations

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.engines.capacity import Need, plan

LINEAR = {name: {"per_request": 16} for name in ("kv_slots", "state_slots", "conv_windows")}  # made for a block of 16


@pytest.mark.parametrize("budget", [16, 17, 64, 65])
def test_a_tree_in_buffers_made_for_a_block_fails_in_each_of_them(budget):
    assert plan({"a": 15}, LINEAR) == []
    found = plan({"a": budget, "b": 15}, LINEAR)
    assert [(p.buffer, p.request, p.needed, p.reserved) for p in found] == [
        (name, "a", budget + 1, 16) for name in LINEAR
    ]
    assert ("its root" in str(found[0])) == (budget == 16)


def test_a_batch_that_fills_the_budget_is_one_row_short_for_each_request():
    reserved = {"token_budget": {"total": 64}}
    assert plan({name: 16 for name in "abc"}, reserved) == []
    (found,) = plan({name: 16 for name in "abcd"}, reserved)
    assert found == Need("token_budget", None, 68, 64, 4) and found.hint == "one row short for each request: its root"
    assert str(found) == (
        "token_budget: the batch needs 68 rows, reserved 64; one row short for each request: its root"
    )


def test_the_largest_captured_size_counts():
    assert plan({"a": 16, "b": 46}, {"graphs": {"sizes": [17, 64, 32]}}) == []
    assert [str(p) for p in plan({"a": 17, "b": 64}, {"graphs": {"sizes": [17, 64, 32]}})] == [
        "graphs: the batch needs 83 rows, reserved 64"
    ]


def test_slots_are_counted_by_requests_whatever_their_trees():
    reserved = {"state slots": {"requests": 2}}
    assert plan({"a": 64, "b": 1}, reserved) == []
    (found,) = plan({"a": 1, "b": 1, "c": 1}, reserved)
    assert str(found) == "state slots: the batch needs 3 slots, reserved 2" and found.hint == ""
    assert found.to_json()["short"] and (found.to_json()["needed"], found.to_json()["reserved"]) == (3, 2)


@pytest.mark.parametrize(
    ("requests", "reserved", "says"),
    [
        ({"a": -1}, {}, "request a: budget is -1"),
        ({"a": True}, {}, "request a: budget is True"),
        ({"a": 1}, {"kv": 16}, "kv is 16, expected an object with one of per_request, total, sizes"),
        ({"a": 1}, {"kv": {"per_request": "x"}}, "kv: per_request is 'x'"),
        ({"a": 1}, {"kv": {"sizes": []}}, "kv: sizes is"),
        ({"a": 1}, {"kv": {"rows": 1}}, "expected an object with one of"),
    ],
)
def test_what_is_no_plan_is_refused(requests, reserved, says):
    with pytest.raises(UsageError, match=says):
        plan(requests, reserved)
