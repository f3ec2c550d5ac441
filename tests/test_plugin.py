"""The pytest plugin in somebody else's project: pytest in a folder that knows nothing of this one.

It runs in this process, but where the process itself is what is tested: what is imported, and pytest-xdist.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import ddtree_check
from ddtree_check import pytest_plugin
from ddtree_check.pytest_plugin import selects_leakage
from tests import tiny
from tests.tiny import break_forked, hand_record, located

pytest_plugins = ("pytester",)
checkpoint = tiny.checkpoint

# Installed, the plugin is found by its entry point, and naming it too would load it twice.
INSTALLED = "ddtree_check" in entry_points(group="pytest11").names
OURS = () if INSTALLED else ("-p", "ddtree_check.pytest_plugin")

# Stands in for the run of a model: notes its command, answers with the record beside it, and tells what was imported.
STAND_IN = """
import json, sys
from pathlib import Path
import ddtree_check.pytest_plugin as plugin
from ddtree_check.base.errors import Unsupported, UsageError

here = Path(__file__).parent

def run(job):
    with (here / "commands.txt").open("a") as file:
        file.write(job.command() + "\\n")
    if (here / "error.txt").exists():
        raise eval((here / "error.txt").read_text())
    return json.loads((here / "record.json").read_text())

plugin.run = run

def pytest_unconfigure():
    with (here / "heavy.txt").open("a") as file:
        file.write("".join(f" {name}" for name in ("torch", "transformers") if name in sys.modules) + ".")
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A project with a test of its own, two prompts, and a stand-in for the model."""
    monkeypatch.setenv("PYTHONPATH", str(Path(ddtree_check.__file__).parents[1]))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(pytest_plugin, "run", pytest_plugin.run)  # what the stand-in puts in its place, here too
    pytester.makeini("[pytest]\naddopts = --strict-markers\nmarkers = slow\n")
    pytester.makeconftest(STAND_IN)
    pytester.makepyfile(test_own="import pytest\ndef test_own(): pass\n@pytest.mark.leakage\ndef test_marked(): pass\n")
    lines = [{"id": name, "token_ids": [5, 6, 7]} for name in ("code-1", "code 2")]
    pytester.path.joinpath("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pytester.path.joinpath("record.json").write_text(json.dumps(hand_record("code-1/3", "code 2/3")))
    return pytester


def words(*arguments: str, expression: str = "leakage") -> list[str]:
    given = ("--ddtree-prompts=prompts.jsonl", "--ddtree-budget=3", *arguments)
    return [*OURS, "-p", "no:cacheprovider", "-m", expression, *given]


def leakage(project, *arguments: str, expression: str = "leakage"):
    return project.runpytest_inprocess(*words(*arguments, expression=expression))


ITEMS = [
    "leakage::code-1/3::linear",
    "leakage::code-1/3::tree_forked",
    "leakage::code 2/3::linear",
    "leakage::code 2/3::tree_forked",
    "leakage::verdict",
]
EXPRESSIONS = [
    ("leakage", True),
    ("leakage and not slow", True),
    ("slow or leakage", True),
    ("(leakage)", True),
    ("", False),
    ("slow", False),
    ("not slow", False),
    ("not leakage", False),
    ("leakage and slow", False),
    ("leakages", False),
    ("leakage and", False),
]


@pytest.mark.parametrize(("expression", "selected"), EXPRESSIONS)
def test_which_expressions_ask_for_leakage(expression, selected):
    assert selects_leakage(expression) is selected


QUIET = ["", "not slow", "not leakage"]


@pytest.mark.parametrize("expression", QUIET)
def test_nothing_happens_unless_asked(project, expression):
    result = leakage(project, expression=expression)
    result.assert_outcomes(passed=1 if "leakage" in expression else 2, deselected=1 if "leakage" in expression else 0)
    assert not (project.path / "commands.txt").exists()


def test_nothing_heavy_is_imported_for_it(project):
    runs = [words(expression=expression) for expression in QUIET] + [words("--collect-only", "-q")]
    code = f"import pytest; print([int(pytest.main(run)) for run in {runs}])"
    assert project.run(sys.executable, "-c", code).outlines[-1] == "[0, 0, 0, 0]"
    assert (project.path / "heavy.txt").read_text() == "...."
    assert not (project.path / "commands.txt").exists()


def test_items_are_collected_without_a_model(project):
    result = leakage(project, "--collect-only", "-q")
    assert result.outlines[:6] == ["test_own.py::test_marked", *ITEMS]
    assert not (project.path / "commands.txt").exists()


def test_a_run_that_passes(project):
    result = leakage(project)
    result.assert_outcomes(passed=6, deselected=1)
    result.stdout.fnmatch_lines(["collected 7 items / 1 deselected / 6 selected"])
    assert (project.path / "commands.txt").read_text().splitlines() == [
        "ddtree-check compare --prompts prompts.jsonl --budget 3"
    ]


def test_a_failing_case_shows_its_worst_nodes_and_the_command(project):
    record = break_forked(hand_record("code-1/3", "code 2/3"), case=1)
    record["cases"][1]["attribution"] = {mode: located(mode) for mode in ("tree_forked", "linear")}
    (project.path / "record.json").write_text(json.dumps(record))
    result = leakage(project, "--ddtree-dtype=bfloat16")
    result.assert_outcomes(passed=4, failed=2, deselected=1)
    text = result.stdout.str()
    assert "code 2/3: tree_forked: fail: 1 node beyond the floor, first node 3" in text
    assert re.search(r"^code 2/3 +3 +1 +1 +2 +1 +2\.5 +0\.0001 +1\.5 +17 → 'a\|b'$", text, re.MULTILINE)
    shown = text.partition("short test summary")[0]  # which repeats all of it where CI is set
    assert shown.count("Where (tree_forked in code 2/3, 1 beyond): enters at layer 0.") == 2  # the case, the run
    assert shown.count("Where (linear in code 2/3") == 1
    command = "ddtree-check compare --dtype bfloat16 --prompts prompts.jsonl --budget 3"
    assert f"again: {command} --only 'code 2'" in text
    assert "verdict: fail (linear pass, tree_forked fail), exit code 1" in text
    assert "FAILED leakage::code 2/3::tree_forked - code 2/3: tree_forked: fail" in text
    assert "Traceback" not in text and "pytest_plugin.py" not in text


def test_what_cannot_be_judged_fails_and_is_not_skipped(project):
    record = hand_record("code-1/3", "code 2/3")
    for case in record["cases"]:
        case["modes"]["linear"] |= {"verdict": "reference_unusable", "reason": "ar does not repeat itself"}
    record["verdict"] |= {"text": "inconclusive", "reasons": ["linear: reference_unusable"]}
    record["exit_code"] = 2
    (project.path / "record.json").write_text(json.dumps(record))
    result = leakage(project)
    result.assert_outcomes(passed=3, failed=3, deselected=1)
    result.stdout.fnmatch_lines(["code-1/3: linear: reference_unusable: ar does not repeat itself"])


def test_an_insensitive_run_fails_its_verdict_only(project):
    record = hand_record("code-1/3", "code 2/3")
    record["verdict"] |= {"text": "inconclusive", "reasons": ["insensitive: 0 of 4 moved"], "sensitive": False}
    record["exit_code"] = 2
    (project.path / "record.json").write_text(json.dumps(record))
    result = leakage(project)
    result.assert_outcomes(passed=5, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["Because: insensitive: 0 of 4 moved"])


def test_a_model_that_cannot_be_checked_fails_everywhere(project):
    (project.path / "error.txt").write_text("Unsupported('layer 3 is odd')")
    result = leakage(project)
    result.assert_outcomes(passed=1, failed=5, deselected=1)
    assert len((project.path / "commands.txt").read_text().splitlines()) == 1  # asked once


def test_bad_input_is_one_failure_with_one_line(project):
    (project.path / "error.txt").write_text("UsageError('model: no weights for it')")
    result = leakage(project)
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["ddtree-check: model: no weights for it"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--ddtree-budget=0", "ddtree-check: budget: got '0', expected numbers"),
        ("--ddtree-prompts=none.jsonl", "ddtree-check: none.jsonl: No such file"),
        ("--ddtree-limit=0", "ddtree-check: limit: got 0"),
    ],
)
def test_bad_options_stop_pytest_before_it_collects(project, argument, says):
    result = leakage(project, argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if line]) == 1 and result.errlines[0].startswith(f"ERROR: {says}")
    assert leakage(project, argument, expression="not slow").ret == 0  # nobody asked


@pytest.mark.parametrize(
    ("words", "passed", "prompts"),
    [
        ("leakage::code-1/3", 2, " --only code-1"),
        ("linear", 2, ""),
        ("code-1 and linear", 1, " --only code-1"),
        ("verdict", 1, ""),
    ],
)
def test_k_picks_cases_and_only_their_prompts_run(project, words, passed, prompts):
    leakage(project, "-k", words).assert_outcomes(passed=passed, deselected=7 - passed)
    command = "ddtree-check compare --prompts prompts.jsonl --budget 3"
    assert (project.path / "commands.txt").read_text() == command + prompts + "\n"


def test_with_xdist(project):
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    record = break_forked(hand_record("code-1/3", "code 2/3"))
    (project.path / "record.json").write_text(json.dumps(record))
    project.runpytest_subprocess(*words("-n", "2")).assert_outcomes(passed=4, failed=2)
    assert 1 <= len((project.path / "commands.txt").read_text().splitlines()) <= 2  # once in each worker


def test_the_modes_that_the_run_requires_are_the_items(project):
    result = leakage(project, "--ddtree-require=tree_forked", "--collect-only", "-q")
    assert result.outlines[1:4] == [ITEMS[1], ITEMS[3], ITEMS[4]]


@pytest.mark.parametrize(
    ("draft", "ids"),
    [
        (("--ddtree-tree=eagle",), ["code-1/eagle", "code 2/eagle"]),
        (("--ddtree-tree=tree.json",), ["code-1/tree", "code 2/tree"]),
        (("--ddtree-draft=recorded:drafts.jsonl",), ["code-1/2", "code 2/1"]),
    ],
)
def test_items_of_trees_that_are_given(project, draft, ids):
    trees = [{"tokens": [None, 1, 2], "parents": [-1, 0, 0]}, {"tokens": [None, 3], "parents": [-1, 0]}]
    project.path.joinpath("tree.json").write_text(json.dumps(trees[0]))
    project.path.joinpath("drafts.jsonl").write_text("".join(json.dumps({"tree": tree}) + "\n" for tree in trees))
    lines = leakage(project, *draft, "--ddtree-require=linear", "--collect-only", "-q").outlines
    assert lines[1:3] == [f"leakage::{case}::linear" for case in ids]


def test_a_real_model(project, checkpoint):
    (project.path / "conftest.py").unlink()
    (project.path / "tree.json").write_text(json.dumps({"tokens": [None, 1, 2, 9], "parents": [-1, 0, 0, 1]}))
    result = leakage(project, f"--ddtree-model={checkpoint}", "--ddtree-limit=1", "--ddtree-tree=tree.json")
    result.assert_outcomes(passed=4, deselected=1)


@pytest.mark.parametrize("wiring, failed", [("wiring", 0), ("None", 2)])
def test_an_engine_without_plain_decoding_is_judged_in_bits(project, checkpoint, wiring, failed):
    (project.path / "conftest.py").unlink()
    (project.path / "tree.json").write_text(json.dumps({"tokens": [None, 1, 2, 9], "parents": [-1, 0, 0, 1]}))
    source = "from tests.own_engine import Least\nclass Mine(Least):\n    def verify(self, prefix, tree, wiring):\n"
    project.makepyfile(mine_bits=f"{source}        return super().verify(prefix, tree, {wiring})\n")
    options = ("--ddtree-engine=mine_bits:Mine", f"--ddtree-model={checkpoint}", "--ddtree-tree=tree.json")
    result = leakage(project, *options, "--ddtree-limit=1", "--ddtree-require=tree_forked")
    result.assert_outcomes(passed=3 - failed, failed=failed, deselected=1)
    if failed:
        result.stdout.fnmatch_lines(["*verdict: exact: fail, exit code 1*"])
        return
    result = leakage(project, *options, "--ddtree-limit=1")
    result.assert_outcomes(passed=3, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*linear: not judged: engine *Mine* has no step*"])
