"""The record on disk, and views made from a record by hand. Views of a real run: test_cli.py."""

from __future__ import annotations

import json
import os
import re

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.report import markdown, record, terminal, views
from ddtree_check.report.columns import mode_verdict
from ddtree_check.report.drawing import draw_tree
from ddtree_check.report.layout import laid_out
from ddtree_check.report.text import plain, token_text
from tests.tiny import break_forked, hand_record

# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    data = hand_record("a/3", "b/3")
    data["cases"][0]["id"] = "\ud800 \u00e9"  # half of a surrogate pair, which is not UTF-8, is a JSON string
    record.check_writable(path)
    assert list(tmp_path.iterdir()) == []
    record.write_record(path, data)
    assert record.load_record(path) == data


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_write_that_stops_leaves_the_old_file(tmp_path, monkeypatch, error):
    path = tmp_path / "run.json"
    record.write_record(path, hand_record("old/3"))

    def stop(_):
        raise error

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        record.write_record(path, hand_record("new/3"))
    assert record.load_record(path)["cases"][0]["id"] == "old/3"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_but_a_file_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    record.write_record(tmp_path / "link", hand_record("a/3"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "run.json").is_file()
    for target in (tmp_path, tmp_path / "none" / "run.json", os.devnull):
        with pytest.raises(UsageError, match="output: "):
            record.check_writable(target)


def test_the_reader_knows_the_schema_that_is_written():
    from ddtree_check.judge.record import SCHEMA

    assert SCHEMA in record.READABLE


BAD = [  # id, how to spoil a good record, what the refusal says
    pytest.param(lambda data: data.update(schema="ddtree-check/9"), "schema 'ddtree-check/9', expected", id="schema"),
    pytest.param(lambda data: data.pop("cases"), "cases is nothing, expected list", id="no-cases"),
    pytest.param(lambda data: data.update(verdict="pass"), "verdict is str, expected dict", id="verdict"),
    pytest.param(lambda data: data["cases"][0].pop("modes"), r"cases\[0\]: modes is nothing", id="case"),
    pytest.param(lambda data: data["cases"].append(7), r"cases\[1\]: got int, expected an object", id="case-number"),
    pytest.param(lambda data: data["cases"][0]["nodes"][2].pop("ar"), r"case a/3: nodes\[2\]: ar is", id="node"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD)
def test_a_bad_record_is_refused(tmp_path, spoil, message):
    path = tmp_path / "run.json"
    data = hand_record("a/3")
    path.write_text(json.dumps(data))
    assert record.load_record(path) == data
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=message):
        record.load_record(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"], ids=["empty", "list", "cut", "null"])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"run\.json: .*expected"):
        record.load_record(path)
    with pytest.raises(UsageError, match="No such file"):
        record.load_record(tmp_path / "none.json")


# --- text -------------------------------------------------------------------------------------------------------------


def test_nothing_that_a_terminal_obeys_gets_through():
    assert plain("a\x1b[31m\nb\u202e\u00e9\u4e2d") == "a\\x1b[31m\\nb\\u202e\u00e9\u4e2d"
    assert token_text(1, {"1": "\n\t"}) == "'\\n\\t'"
    assert token_text(2, {}) == "2"
    assert len(token_text(1, {"1": "x" * 99})) <= 18
    data = hand_record("a\x1b[2J/3")
    data["model"]["name"] = "m\nm"
    for text in (
        views.render(data),
        draw_tree(data["cases"][0], tokens=data["tokens"]),
        markdown.render(views.blocks(data)),
    ):
        assert "\x1b" not in text and "m\nm" not in text


# --- the view ---------------------------------------------------------------------------------------------------------


def test_the_whole_view_of_a_run_that_passes():
    text = views.render(hand_record("a/3", "b/3"))
    lines = text.splitlines()
    assert lines[0] == (
        "model by-hand · real weights · engine transformers · float32 · cpu · seed 7 · draft self (acceptance 0.7)"
    )
    assert [line.split()[:3] for line in lines if line.startswith("a/3  ")][:4] == [
        ["a/3", "ar", "reference"],
        ["a/3", "linear", "pass"],
        ["a/3", "tree_forked", "pass"],
        ["a/3", "tree_unforked", "fail"],
    ]
    assert "fail (expected: control)" in text
    assert "Worst nodes of tree_unforked, the control that must fail" in text
    worst = next(line for line in lines if line.split()[:2] == ["a/3", "3"])
    assert worst.split(maxsplit=9) == ["a/3", "3", "1", "2", "2", "1", "7", "0.0001", "1.5", "17 → 'a|b'"]
    # by depth: node 2 at depth 1, node 3 at depth 2, twice each; both absorbed one foreign token
    tables = [line.split() for line in lines if "%" in line and line.split()[0].isdigit()]
    assert tables == [
        ["1", "2", "100%", "6", "2", "0.6"],
        ["2", "2", "100%", "7", "2", "0.7"],
        ["1", "4", "100%", "6.5", "4", "0.65"],
    ]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("ar ", "tree_unforked  "))}
    assert rows["ar"] == ["ar", "1.00", "0", "0", "0", "0"]
    assert rows["tree_unforked"] == ["tree_unforked", "2.00", "2", "0", "0", "0"]
    assert "accepted excludes root and bonus" in text
    assert "4 of 8 nodes would read foreign tokens and 4 would choose another token (median KL 0.65 nats)" in text
    assert "RANDOM" not in text and "Because" not in text
    assert lines[-1] == "verdict: pass (linear pass, tree_forked pass), exit code 0"


def test_the_view_of_a_leak_in_a_required_mode():
    text = views.render(break_forked(hand_record("a/3", "b/3"), case=1))
    assert "Worst nodes of tree_forked\n" in text
    worst = [line for line in text.splitlines() if line.startswith("b/3") and "→" in line]
    # a forked node reads from its parent
    assert [line.split()[:5] for line in worst] == [["b/3", "3", "1", "1", "2"]]
    assert "Because: tree_forked: fail (1 node beyond the floor, first node 3)" in text
    assert text.splitlines()[-1] == "verdict: fail (linear pass, tree_forked fail), exit code 1"


def test_the_control_is_named_as_such_only_while_it_is_one():
    data = hand_record("a/3")
    case = data["cases"][0]
    assert mode_verdict(data, case, "tree_unforked") == "fail (expected: control)"
    case["leak_law"]["outside"] = [1]
    assert mode_verdict(data, case, "tree_unforked") == "fail (NOT as predicted)"
    case["leak_law"] |= {"outside": [], "clean_bitwise_equal": False}
    assert mode_verdict(data, case, "tree_unforked") == "fail (NOT as predicted)"
    data["settings"]["require"] = ["tree_unforked"]
    assert mode_verdict(data, case, "tree_unforked") == "fail"
    data["settings"]["require"] = ["linear"]
    case["modes"]["tree_unforked"]["verdict"] = "pass"
    assert mode_verdict(data, case, "tree_unforked") == "pass (nothing to leak)"


def test_random_weights_are_loud():
    data = hand_record("a/3")
    data["model"]["weights"] = "random"
    for text in (views.render(data), markdown.render(views.blocks(data))):
        assert "RANDOM WEIGHTS: " in text and "say little about" in text


def test_what_was_not_judged_and_what_is_not_finite_can_be_shown():
    data = hand_record("a/3")
    case = data["cases"][0]
    for node in case["nodes"]:
        node["tree_forked"] |= {"verdict": None, "floor": None}
        node["tree_unforked"] |= {"max_abs": None, "kl": None}
    case["modes"]["tree_forked"] |= {"verdict": "reference_unusable", "reason": "ar does not repeat itself"}
    case["modes"]["tree_unforked"]["max_abs"] = None
    text = views.render(data)
    assert "reference_unusable" in text and "not finite" in text and "inf" in text
    assert "not judged" in laid_out(terminal.case_blocks(data, case), None)
    assert "not judged" in laid_out(terminal.node_blocks(data, case, 2), None) and "not finite" in laid_out(
        terminal.node_blocks(data, case, 2), None
    )
    assert "not judged" in draw_tree(case)


def test_without_contaminated_nodes_there_is_nothing_to_leak():
    data = hand_record("a/3")
    for node in data["cases"][0]["nodes"]:
        node["clean"] = True
        node["tree_unforked"]["verdict"] = "pass"
    text = views.render(data)
    assert "nothing to leak" in text and "none is beyond the floor" in text


def test_what_a_draft_expected_stands_beside_what_plain_decoding_accepts():
    data = hand_record("a/3", "b/3")
    data["settings"]["draft"], data["model"]["drafter"] = "dflash", {"name": "small"}
    assert "Draft " not in views.render(data)  # trees that were given
    for case, expected in zip(data["cases"], (1.0, 0.5), strict=True):
        case["tree"]["source"] = {"expected": expected}
    assert data["cases"][0]["acceptance"]["ar"]["accepted"] == 1
    line = "Draft small: expected 0.75 nodes a round, plain decoding accepts 1.00 of its drafts."
    assert line in views.render(data)
    data["cases"][1]["tree"]["source"]["expected"] = 2.0
    assert "expected 1.50 nodes a round, plain decoding accepts 1.00 of its drafts; what is" in views.render(data)
    data["settings"]["draft"] = "self"
    assert "Draft small" not in views.render(data)


def test_a_narrow_screen_wraps_cells_drops_columns_shortens_names_and_wraps_sentences():
    data = hand_record("code/a-rather-long-name-of-a-prompt/3")
    wide, narrow = views.render(data), views.render(data, 80)
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert "median |Δ|" in wide.splitlines()[3] and "median |Δ|" not in narrow.splitlines()[4]
    assert "\ncode/a-rather-long-name-of-a-prompt/3  ar " in wide
    assert "prompt/3  ar " in narrow and "\ncode/a-rather-long-name-of-a-prompt/3  ar " not in narrow
    assert "fail (expected: control)" in wide and {"(expected:", "control)"} <= set(map(str.strip, narrow.splitlines()))
    assert "Again: ddtree-check compare --limit 1\n" in narrow
    assert narrow.splitlines()[-1] == wide.splitlines()[-1]
    views.render(data, 1)  # no screen is too narrow to end


def test_quiet_is_the_last_line():
    assert views.render(hand_record("a/3"), quiet=True) == views.render(hand_record("a/3")).splitlines()[-1]


def test_names_of_an_edited_record_are_text_and_no_links():
    data = break_forked(hand_record("a/3"))
    case, name = data["cases"][0], "[free](http://x.test) www `a` <b> |"
    case["id"] = name
    case["modes"]["tree_forked"]["reason"] = name
    data["verdict"]["modes"] = {name: "pass"} | data["verdict"]["modes"]
    data["model"]["name"] = name
    text = markdown.render(views.blocks(data))
    assert "free" in text and not re.search(r"(?<!\\)\[free|://|<b>|(?<!\\)`a", text)


def test_markdown_has_the_same_tables():
    text = markdown.render(views.blocks(break_forked(hand_record("a/3"))))
    assert text.count("\n## ") == 5 and "## Cases, against ar at every node" in text
    assert "max \\|Δ\\|" in text and "'a\\|b'" in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| a/3")}
    assert widths == {12, 11}  # eleven columns and ten: a bar inside a cell makes no column
    assert text.splitlines()[-1] == "**verdict: fail (linear pass, tree_forked fail), exit code 1**"


# --- one case, one node, one tree -------------------------------------------------------------------------------------


def test_one_case_and_one_node():
    data = hand_record("a/3")
    case = terminal.find_case(data, "a/3")
    text = laid_out(terminal.case_blocks(data, case), None)
    assert len([line for line in text.splitlines() if line.strip()[:1].isdigit()]) == 4
    assert "tree_unforked: fail: leaks as predicted" in text
    text = laid_out(terminal.node_blocks(data, case, 3), None)
    assert "path 0:'def' 1:' f' 3:'\\x1b[31m'" in text
    assert "parent 1; unforked reads from 2, 1 foreign token, contaminated, 0 rows after a skip edge" in text
    with pytest.raises(ValueError, match=r"node: got 4, expected 0\.\.3"):
        laid_out(terminal.node_blocks(data, case, 4), None)
    with pytest.raises(ValueError, match="case: got 'b/3', expected one of a/3"):
        terminal.find_case(data, "b/3")


def test_a_tree_drawing():
    data = hand_record("a/3")
    assert draw_tree(data["cases"][0], tokens=data["tokens"]).splitlines()[1:] == [
        "0 'def' [pass / pass] * +",
        "├─ 1 ' f' [pass / pass] * +",
        "│  └─ 3 '\\x1b[31m' [pass / flip] +",
        "└─ 2 '\\n\\t' [pass / flip]",
    ]
    drawn = draw_tree(data["cases"][0], "linear", {"10": "\u00e9"}, ascii_only=True)
    assert drawn.isascii()
    assert drawn.splitlines()[1:] == [
        "0 '\\xe9' [pass / pass] * +",
        "|- 1 11 [pass / pass] * +",
        "|  `- 3 13 [pass / flip]",
        "`- 2 12 [pass / flip]",
    ]
    with pytest.raises(ValueError, match="mode: got 'x', expected one of ar, linear"):
        draw_tree(data["cases"][0], "x")


def test_a_deep_tree_is_drawn_without_recursion():
    case = hand_record("a/3")["cases"][0]
    node = case["nodes"][1]
    case["nodes"] = [case["nodes"][0]] + [node | {"node": i, "parent": i - 1} for i in range(1, 3000)]
    assert len(draw_tree(case).splitlines()) == 3001


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data["cases"].clear(), "a pass of no case"),
        (
            lambda data: data["cases"][0]["modes"]["tree_forked"].update(verdict="fail"),
            "a pass, though case a/3 has tree_forked fail",
        ),
        (
            lambda data: data["floor"].update(systematic={"beyond": True}),
            "a pass, though tree_forked is systematically above noise",
        ),
        (
            lambda data: data["floor"].update(systematic={"beyond": False, "judged": True, "ratio": 9.0, "limit": 1.4}),
            "a pass, though tree_forked is systematically above noise",
        ),
        (lambda data: data["floor"].update(systematic="no"), "floor.systematic is 'no', expected an object"),
        (lambda data: data["cases"][0]["tree"].update(parents=[5, 5, 5, 5]), "case a/3: "),
        (lambda data: data["cases"][0].pop("tree"), "tree is nothing, expected dict"),
        (lambda data: data["cases"][0]["nodes"].pop(2), "case a/3: got 3 nodes, its tree has 4; make the record again"),
        (
            lambda data: data["cases"][0]["nodes"].reverse(),
            "case a/3: nodes[0] is node, parent and token (3, 1, 13), its tree has (0, -1, 10)",
        ),
    ],
    ids=[
        "no-cases",
        "forged",
        "systematic",
        "its-ratio",
        "its-form",
        "no-tree-shape",
        "no-tree",
        "a-node-less",
        "nodes-reversed",
    ],
)
def test_a_record_that_does_not_bear_out_its_verdict_is_refused(tmp_path, edit, says):
    data, path = hand_record("a/3"), tmp_path / "r.json"
    record.write_record(path, data)
    assert record.load_record(path) == data
    edit(data)
    record.write_record(path, data)
    with pytest.raises(UsageError, match=re.escape(says)):
        record.load_record(path)
