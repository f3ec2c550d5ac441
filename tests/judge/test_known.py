from types import SimpleNamespace

import pytest

from ddtree_check.judge.known import KnownFailure, excuse, load_known
from ddtree_check.judge.nodes import ModeResult

ENTRY = KnownFailure(
    "x", "transformers", "==5.19.*", ("jamba",), "linear", "linear", "starts from zeros", "run", "4", "state from zeros"
)


def finding(explained: str | None, mode: str = "linear", nodes: int = 3) -> SimpleNamespace:
    return SimpleNamespace(mode=mode, nodes=nodes, explained=explained)


def case(linear):
    return {"linear": ModeResult(linear, ("leak",)), "tree_forked": ModeResult("pass")}


def test_a_known_failure_is_named_and_other_modes_are_left_alone():
    found = excuse([case("fail"), case("pass")], [ENTRY])
    assert [c["linear"].verdict for c in found] == ["known_failure", "pass"]
    assert found[0]["linear"].reason == "x: starts from zeros" and found[0]["linear"].verdicts == ("leak",)
    assert all(c["tree_forked"].verdict == "pass" for c in found)


def test_a_failure_with_other_logits_is_another_one():
    entry, same, other = ENTRY, finding("state from zeros"), finding(None)
    for own in (
        {},
        {"linear": same},
        {"linear": finding(None, "commit after linear")},
        {"linear": finding(None, nodes=0)},
    ):
        assert excuse([case("fail")], [entry], [own])[0]["linear"].verdict == "known_failure", own
    assert excuse([case("fail")], [entry])[0]["linear"].verdict == "known_failure", "nothing was looked into"
    found = excuse([case("fail")] * 2, [entry], [{"linear": same}, {"linear": other}])
    assert [c["linear"].verdict for c in found] == ["known_failure", "fail"], "each case by its own logits"
    assert "not x: its logits are not those" in found[1]["linear"].reason


def test_one_that_stops_failing_is_red():
    found = excuse([case("pass"), case("pass")], [ENTRY])
    assert {c["linear"].verdict for c in found} == {"fail"} and "no longer fails" in found[0]["linear"].reason


def test_what_was_not_judged_neither_fails_nor_stops_failing():
    assert excuse([case("reference_unusable")], [ENTRY])[0]["linear"].verdict == "reference_unusable"
    assert excuse([case("fail")], [])[0]["linear"].verdict == "fail"


@pytest.mark.parametrize(
    ("family", "versions", "covered"),
    [
        ("jamba", {"transformers": "5.19.0"}, True),
        ("jamba", {"transformers": "5.20.0"}, False),
        ("mamba", {"transformers": "5.19.0"}, False),
        ("jamba", {"sglang": "5.19.0"}, False),
    ],
)
def test_an_entry_covers_its_families_and_versions_only(family, versions, covered):
    assert ENTRY.covers(family, versions) == covered


def test_the_file_reads_and_its_ids_are_distinct():
    ids = [entry.id for entry in load_known()]
    assert len(ids) == len(set(ids)) > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mode": "sideways"}, "mode 'sideways'"),
        ({"explained": ""}, "mode linear without explained"),
        ({"versions": "about five"}, "versions 'about five'"),
    ],
)
def test_bad_entries_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        KnownFailure(**vars(ENTRY) | change)


def test_missing_keys_are_named(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('[[failure]]\nid = "x"\n')
    with pytest.raises(ValueError, match="entry 1 has id; expected cause"):
        load_known(path)


def test_a_failure_that_is_not_finite_is_not_excused():
    nan = {"linear": ModeResult("fail", ("flip",), "nan", finite=False), "tree_forked": ModeResult("pass")}
    assert excuse([nan], [ENTRY])[0]["linear"].verdict == "fail"
    assert [c["linear"].verdict for c in excuse([nan, case("fail")], [ENTRY])] == ["fail", "known_failure"]
