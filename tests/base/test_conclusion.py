"""Exit codes, which of several decides, and how a record is concluded."""

from __future__ import annotations

import itertools
import json

import pytest

from ddtree_check.base.conclusion import DEFECT, INCONCLUSIVE, PASS, USAGE, Conclusion, ExitCode, combine


def test_codes_and_texts_are_the_documented_ones():
    assert {int(code): code.text for code in ExitCode} == {0: "pass", 1: "fail", 2: "inconclusive", 3: "error"}


@pytest.mark.parametrize("codes", list(itertools.permutations((3, 1, 2, 0))), ids=str)
def test_3_decides_before_1_before_2_before_0(codes):
    for left, decides in (((0, 1, 2, 3), 3), ((0, 1, 2), 1), ((0, 2), 2), ((0,), 0)):
        assert combine(*(code for code in codes if code in left)) == decides


@pytest.mark.parametrize("codes", [(), (0, 4), (-1,)], ids=str)
def test_nothing_and_what_is_no_exit_code_are_refused(codes):
    with pytest.raises(ValueError):
        combine(*codes)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("pass", PASS), ("known_failure", PASS), ("fail", DEFECT), ("unsupported", INCONCLUSIVE), ("new", INCONCLUSIVE)],
)
def test_only_what_passes_leads_to_a_pass(verdict, code):
    assert ExitCode.of(verdict) == code


def test_a_later_reason_never_makes_a_conclusion_milder():
    conclusion = Conclusion()
    for code, expected in ((PASS, 0), (INCONCLUSIVE, 2), (DEFECT, 1), (INCONCLUSIVE, 1), (PASS, 1), (USAGE, 3)):
        conclusion.add(code, f"because of {code.text}")
        assert conclusion.exit_code == expected
    assert len(conclusion.reasons) == 6


def test_a_record_gets_plain_numbers_and_keeps_the_rest():
    record = {"cases": [], "verdict": {"modes": {"linear": "pass"}, "text": "pass", "reasons": ["a"]}, "exit_code": 0}
    conclusion = Conclusion.of(record)
    conclusion.add(DEFECT, "b")
    concluded = conclusion.into(record)
    assert concluded["verdict"] == {"modes": {"linear": "pass"}, "text": "fail", "reasons": ["a", "b"]}
    assert type(concluded["exit_code"]) is int and json.loads(json.dumps(concluded)) == concluded
    assert record["exit_code"] == 0 and record["verdict"]["reasons"] == ["a"]  # what was given is left alone
