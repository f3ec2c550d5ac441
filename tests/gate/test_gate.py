"""The nightly gate: its configuration, baseline, history and reports, and what a kill leaves behind."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.cli import main as cli
from ddtree_check.engines.registry import find_engine
from ddtree_check.flows.job import Job
from ddtree_check.gate import cells as gate_cells
from ddtree_check.gate import history
from ddtree_check.gate.baseline import Baseline, Bounds, envelope, load_baseline, outside, write_baseline
from ddtree_check.gate.cells import CellResult, run_cell, slug
from ddtree_check.gate.config import Cell, fingerprint, load_config, validate
from ddtree_check.gate.run import run_gate
from ddtree_check.judge.figures import Metric, metrics
from ddtree_check.report.record import write_record
from tests import tiny
from tests.gate_process import run_by_hand
from tests.tiny import break_forked, hand_record, located

REPO = Path(__file__).resolve().parents[2]
checkpoint = tiny.checkpoint


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every gate writes below the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


def configured(text: str, name: str = "gate.toml"):
    Path(name).write_text(text)
    return load_config(name)


TWO = '[gate]\nbaseline = "baseline.json"\n[matrix]\nbudget = [2, 3]\n'


# --- the configuration ------------------------------------------------------------------------------------------------


def test_a_matrix_is_every_combination_but_the_excluded():
    config = configured(
        """
        [gate]
        name = "nightly"
        timeout = 60
        [matrix]
        model = ["tiny-qwen3_5", "/models/other"]
        budget = [16, [16, 64]]
        dtype = ["float32", "bfloat16"]
        [settings]
        limit = 4
        require = ["tree_forked"]
        rounds = 5
        [[exclude]]
        model = "/models/other"
        dtype = "bfloat16"
        [[case]]
        name = "ours"
        weights = "random"
        seed = 3
        timeout = 5
        """
    )
    assert [cell.name for cell in config.cells] == [
        "tiny-qwen3_5/code/16/float32",
        "tiny-qwen3_5/code/16/bfloat16",
        "tiny-qwen3_5/code/16+64/float32",
        "tiny-qwen3_5/code/16+64/bfloat16",
        "other/code/16/float32",
        "other/code/16+64/float32",
        "ours",
    ]
    assert [cell.timeout for cell in config.cells] == [60] * 6 + [5]
    assert config.cells[2].job.command() == (
        "ddtree-check compare --model tiny-qwen3_5 --dtype float32 --limit 4 --budget 16,64 --require tree_forked "
        "--rounds 5"
    )
    assert config.cells[-1].job.settings == {"budgets": (16, 64), "require": ("tree_forked",), "seed": 3}


BAD = [
    ("", "nothing to run, expected a [matrix] or a [[case]]"),
    ("[gate", "expected TOML"),
    ("[matricks]", "unknown key 'matricks'; did you mean 'matrix'?"),
    ('[matrix]\nbugdet = ["x"]', "matrix: unknown key 'bugdet'; did you mean 'budget'?"),
    ("[matrix]\nzzz = 1", "matrix: unknown key 'zzz'; expected one of model, engine"),
    ('[matrix]\nbudget = ["x"]', "matrix.budget: got ['x'], expected a list of whole numbers"),
    ("[matrix]\nbudget = [0]", "matrix.budget: got 0, expected numbers of at least 1"),
    ("[matrix]\nbudget = [true]", "matrix.budget: got [True], expected a list of whole numbers"),
    ("[matrix]\nbudget = 16", "matrix.budget: got 16, expected a list"),
    ("[matrix]\nmodel = []", "matrix.model: got [], expected a list with at least one value"),
    ("[matrix]\nmodel = [7]", "matrix.model: got 7, expected a text"),
    ("matrix = 3", "matrix: got 3, expected a table"),
    ("case = 3", "case: got 3, expected tables, each beginning with [[case]]"),
    ('[gate]\nname = ""\n[matrix]', "gate.name: got '', expected a text"),
    ('[gate]\nnights = "7"\n[matrix]', "gate.nights: got '7', expected a whole number"),
    ("[gate]\nnights = 0\n[matrix]", "gate.nights: got 0, expected a number of at least 1"),
    ("[gate]\ntimeout = 0\n[matrix]", "gate.timeout: got 0, expected a number of seconds, more than 0"),
    ("[gate]\ntimeout = nan\n[matrix]", "gate.timeout: got nan, expected a finite number"),
    ("[gate]\ntimeout = inf\n[matrix]", "gate.timeout: got inf, expected a finite number"),
    ("[gate]\nfactor = nan\n[matrix]", "gate.factor: got nan, expected a finite number"),
    ("[gate]\nfactor = 0.5\n[matrix]", "gate.factor: got 0.5, expected a number of at least 1"),
    ("[matrix]\n[settings]\nlimits = 4", "settings: unknown key 'limits'; did you mean 'limit'?"),
    ('[matrix]\n[settings]\nlimit = "4"', "settings.limit: got '4', expected a whole number"),
    ('[matrix]\n[settings]\noracle = "yes"', "settings.oracle: got 'yes', expected true or false"),
    ("[[exclude]]\nbudget = 1", "exclude: nothing to leave out, expected a [matrix] too"),
    ("[matrix]\n[[exclude]]\nbudget = 1", "exclude 1: {'budget': 1} is no combination of the matrix"),
    ("[matrix]\n[[exclude]]", "exclude 1: got {}, expected some of model"),
    ('[[case]]\nmodell = "x"', "case 1: unknown key 'modell'; did you mean 'model'?"),
    ("[[case]]\n[[case]]", "two cases are named 'tiny-qwen3_5/code/16+64'; give a [[case]] a name"),
    ('[matrix]\n[settings]\norder = "heep"', "settings.order: got 'heep', expected heap, breadth or depth"),
    ('[matrix]\nweights = ["reel"]', "matrix.weights: got 'reel', expected real or random"),
    ('[matrix]\ndraft = ["elf"]', "matrix.draft: got 'elf', expected self, ngram"),
    ('[matrix]\n[settings]\nrequire = ["tree"]', "settings.require: got 'tree', expected some of linear"),
    ("[matrix]\n[settings]\ntop_k = 5", "case tiny-qwen3_5/code/16: top-k: changes nothing at temperature 0"),
    ("[matrix]\n[settings]\nbounds = {int8 = 0.1}", "settings.bounds: got 'int8', expected some of float64"),
    ("[[case]]\ntimeout = -1", "case 1.timeout: got -1, expected a number of seconds"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=[f"{n}" for n in range(len(BAD))])
def test_a_slip_in_the_configuration_is_named(text, said):
    with pytest.raises(UsageError) as error:
        configured(text)
    assert said in str(error.value) and str(error.value).startswith("gate.toml: ")


DEEP = [
    ('[matrix]\ndtype = ["float31"]', "float31"),
    ('[matrix]\nengine = ["tranformers"]', "engine: got 'tranformers', expected one of transformers"),
    ('[matrix]\nengine = ["not_there:Engine"]', "engine: not_there:Engine: ModuleNotFoundError"),
    ('[matrix]\nprompts = ["none.jsonl"]', "none.jsonl: No such file"),
]


@pytest.mark.parametrize(("text", "said"), DEEP, ids=[f"{n}" for n in range(len(DEEP))])
def test_what_a_run_would_refuse_is_refused_before_any_runs(text, said):
    with pytest.raises(UsageError) as error:
        validate(configured(text))
    assert said in str(error.value) and "gate.toml: case tiny-qwen3_5/" in str(error.value)


def test_the_example_is_a_configuration():
    config = load_config(REPO / "docs" / "examples" / "gate.toml")
    validate(config)
    assert [cell.name for cell in config.cells][-1] == "rounds" and len(config.cells) == 4


def test_a_missing_configuration_is_one_line(capsys):
    assert cli.main(["gate", "--config", "none.toml"]) == 3
    assert "none.toml: No such file" in capsys.readouterr().err


def test_the_fingerprint_follows_configuration_code_and_input_files():
    Path("prompts.jsonl").write_text('{"text": "a"}\n')
    Path("my_engine.py").write_text("class Engine: load = print\n")
    text = '[matrix]\nprompts = ["prompts.jsonl"]\nengine = ["my_engine:Engine"]\nbudget = [{}]\n'
    seen = [fingerprint(configured(text.format(4)))]
    assert fingerprint(configured(text.format(4))) == seen[0]
    seen.append(fingerprint(configured(text.format(5))))
    Path("prompts.jsonl").write_text('{"text": "b"}\n')
    seen.append(fingerprint(configured(text.format(5))))
    Path("my_engine.py").write_text("class Engine: load = repr\n")
    seen.append(fingerprint(configured(text.format(5))))
    assert len(set(seen)) == 4


# --- engines of one's own ---------------------------------------------------------------------------------------------


def test_an_engine_of_ones_own_is_found_in_the_current_directory():
    Path("own_engine_a.py").write_text(
        "class Engine:\n    @staticmethod\n    def load(*a, **k): return 7\nnumber = 3\n"
    )
    assert find_engine("own_engine_a:Engine").load() == 7
    for name, said in {
        "own_engine_a:Motor": "own_engine_a has no 'Motor' with a load",
        "own_engine_a:number": "has no 'number' with a load",
        "own_engine_b:Engine": "ModuleNotFoundError: No module named 'own_engine_b'",
        "nothing": "expected one of transformers",
    }.items():
        with pytest.raises(UsageError, match=said):
            find_engine(name)
    Path("own_engine_c.py").write_text("1 / 0\n")
    Path("own_engine_d.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UsageError, match=r"engine: own_engine_d:Engine: SystemExit: 0; expected a module"):
        validate(configured('[matrix]\nengine = ["own_engine_d:Engine"]\n'))
    with pytest.raises(UsageError, match="own_engine_c:Engine: ZeroDivisionError: division by zero; expected a module"):
        find_engine("own_engine_c:Engine")


# --- the baseline -----------------------------------------------------------------------------------------------------


def test_an_envelope_widens_noise_upwards_and_shares_by_one():
    noise, share = Metric(2e-5, 1e-6, True), Metric(0.5, 0.1)
    assert envelope(noise, [3e-5], 2.0) == (None, pytest.approx(6.1e-5))
    assert envelope(share, [0.6], 2.0) == (pytest.approx(0.4), pytest.approx(0.7))
    bounds = envelope(share, [], 2.0)
    assert [outside(Metric(value, 0.1), bounds) for value in (0.4, 0.6, 0.39, 0.61, None)] == [0, 0, 1, 1, 1]
    bounds = envelope(noise, [], 2.0)
    assert [outside(Metric(value, 1e-6), bounds) for value in (0.0, 4.1e-5, 4.2e-5, None)] == [0, 0, 1, 1]
    assert envelope(Metric(0.0, 1e-6, True), [], 2.0) == (None, 1e-6)  # a floor of 0 would make every bit a drift
    with pytest.raises(UsageError, match="not finite"):
        envelope(Metric(None, 1.0), [], 2.0)


def test_the_figures_of_a_record():
    found = metrics(hand_record("a/3", "b/3"))
    assert found["tree_forked.max_abs"] == Metric(2e-5, 1e-4, True)
    assert found["linear.ties"] == Metric(0.0, 1 / 8) and found["unforked.near_moved"] == Metric(1.0, 1 / 4)
    assert found["tree_unforked.accepted"] == Metric(2.0, 1 / 2) and found["ar.accepted"] == Metric(1.0, 1 / 2)
    broken = hand_record("a/3")
    broken["cases"][0]["modes"]["tree_forked"]["max_abs"] = None
    assert metrics(broken)["tree_forked.max_abs"].value is None
    for node in broken["cases"][0]["nodes"]:  # a mode that was not run
        node["linear"] = dict.fromkeys(node["linear"])
    del broken["cases"][0]["acceptance"]["linear"]
    assert not [name for name in metrics(broken) if name.startswith("linear")]


def test_a_baseline_comes_back_as_it_was():
    baseline = Baseline("2026-01-01", {"device": "cpu"}, {"a": {"x": Bounds(None, 1.5), "y": Bounds(0.25, 0.5)}})
    assert load_baseline("baseline.json") is None
    write_baseline("baseline.json", baseline)
    assert load_baseline("baseline.json") == baseline
    good = Path("baseline.json").read_text()
    for bad, said in {
        good.replace("baseline/1", "baseline/9"): "schema",
        good.replace("1.5", '"x"'): "no whole baseline",
        good.replace("1.5", "NaN"): "no whole baseline",
        "[]": "schema 'list'",
        good[:40]: "expected JSON",
    }.items():
        Path("baseline.json").write_text(bad)
        with pytest.raises(UsageError, match=said):
            load_baseline("baseline.json")


# --- nights -----------------------------------------------------------------------------------------------------------


def by_hand(changes=None):
    """A runner whose records are made by hand; changes: budget -> what to do to its record, or a CellResult."""

    def run(cell, record, log):
        budget = cell.job.settings["budgets"][0]
        change = (changes or {}).get(budget)
        if isinstance(change, tuple):
            return CellResult(cell.name, *change, 1.0, False)
        data = hand_record(f"a/{budget}")
        if change:
            change(data)
        write_record(record, data)
        reason = "; ".join(data["verdict"]["reasons"])
        return CellResult(cell.name, data["verdict"]["text"], data["exit_code"], reason, 1.0, True)

    return run


def night(text: str = TWO, changes=None, **more):
    """Exit code, gate.json and what was said."""
    said: list[str] = []
    code = run_gate(configured(text), run=by_hand(changes), say=said.append, **more)
    return code, json.loads(Path("reports/gate/gate.json").read_text()), said


def louder(data):
    """Within every floor, and ten times what was frozen."""
    for node in data["cases"][0]["nodes"]:
        node["tree_forked"]["max_abs"] = 9e-5
    data["cases"][0]["modes"]["tree_forked"]["max_abs"] = 2e-3


def test_a_frozen_night_passes_again_and_a_defect_turns_it_red():
    code, _, said = night(freeze=True)
    assert code == 0 and said[-1] == "gate gate: pass, 2 cases: 2 pass, exit code 0"
    assert "freeze: baseline.json holds 2 cases" in said
    assert night()[0] == 0
    code, _, said = night(changes={3: break_forked})
    assert (
        code == 1 and said[-1] == "gate gate: fail, 2 cases: 1 pass, 1 fail; 1 metric outside the baseline, exit code 1"
    )
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    assert {(test.get("classname"), test.get("name")) for test in xml.iter("testcase") if len(test)} == {
        ("tiny-qwen3_5/code/3", "a/3"),
        ("tiny-qwen3_5/code/3", "verdict"),
        ("tiny-qwen3_5/code/3", "baseline"),
    }
    assert "first node 3" in xml.find(".//failure").get("message")
    nights = history.nights("reports/history.db", "gate", 9)
    assert [one.exit_code for one in nights] == [0, 0, 1]
    assert [one.cells["tiny-qwen3_5/code/3"].verdict for one in nights] == ["pass", "pass", "fail"]
    page = Path("reports/gate/report.html").read_text()
    assert '<h1 class="bad">gate gate: fail' in page and "pass pass" in page and 'data-figure="nights"' in page
    summary = Path("reports/gate/summary.md").read_text()
    assert summary.startswith("# gate gate: fail") and "What is not green" in summary
    assert "pass pass fail" in summary and "tree_forked: fail (1 node beyond the floor, first node 3)" in summary


def test_noise_that_left_its_envelope_is_a_drift():
    night(freeze=True)
    code, found, said = night(changes={2: louder})
    assert code == 1 and found["cells"][0]["verdict"] == "drift" and found["cells"][1]["verdict"] == "pass"
    assert [drift["metric"] for drift in found["cells"][0]["drifts"]] == ["tree_forked.max_abs"]
    assert "drift: tiny-qwen3_5/code/2: tree_forked.max_abs 0.002, frozen at most 0.00014" in said
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    assert [test.get("name") for test in xml.iter("testcase") if test.find("failure") is not None] == ["baseline"]
    assert night(changes={2: louder}, freeze=True)[0] == 0 and night(changes={2: louder})[0] == 0  # frozen anew


def test_a_metric_that_is_gone_is_a_drift():
    night(freeze=True)
    code, found, _ = night(changes={2: lambda data: data["coverage"].update(near=0)})
    assert code == 1 and found["cells"][0]["drifts"][0] | {"low": 0, "high": 0} == {
        "metric": "unforked.near_moved", "value": None, "low": 0, "high": 0, "gone": True,
    }  # fmt: skip


def test_what_was_not_frozen_is_inconclusive_and_says_so():
    code, found, said = night()
    assert code == 2 and "baseline: baseline.json is not there; freeze one with gate --freeze" in said
    assert {cell["verdict"] for cell in found["cells"]} == {"inconclusive"}
    assert night("[matrix]\nbudget = [2]\n")[0] == 0  # none is asked for
    night(freeze=True)
    code, found, said = night(TWO.replace("3]", "4]"))
    assert code == 2 and [cell["verdict"] for cell in found["cells"]] == ["pass", "inconclusive"]
    assert "baseline: not in it: 1 case, the first tiny-qwen3_5/code/4; freeze it again" in said
    assert "baseline: frozen and not run any more: 1 case, the first tiny-qwen3_5/code/3" in said


def test_a_red_run_freezes_nothing():
    night(freeze=True)
    before = Path("baseline.json").read_bytes()
    code, _, said = night(changes={2: break_forked}, freeze=True)
    assert code == 1 and Path("baseline.json").read_bytes() == before
    assert "freeze: the run ended fail, expected pass; baseline.json is unchanged" in said
    with pytest.raises(UsageError, match=r"gate\.baseline: got nothing, expected a file to freeze into"):
        night("[matrix]\n", freeze=True)


CODES = [
    ({}, 0),
    ({2: ("not_run", 2, "stopped after 1 s")}, 2),
    ({2: ("unsupported", 2, "no")}, 2),
    ({2: break_forked, 3: ("not_run", 2, "")}, 1),
    ({2: break_forked, 3: ("error", 3, "model: no weights")}, 3),
]


@pytest.mark.parametrize(("changes", "code"), CODES, ids=[str(n) for n in range(len(CODES))])
def test_exit_codes_and_what_was_not_run_is_no_skip(changes, code):
    text = "[matrix]\nbudget = [2, 3]\n"
    got, found, said = night(text, changes)
    assert got == code == found["exit_code"] and said[-1].endswith(f"exit code {code}")
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    tests = list(xml.iter("testcase"))
    assert int(xml.get("tests")) == len(tests)
    for kind in ("failure", "error"):
        count = sum(test.find(kind) is not None for test in tests)
        assert int(xml.get(f"{kind}s")) == count == sum(int(suite.get(f"{kind}s")) for suite in xml.iter("testsuite"))
    broken = [result for result in changes.values() if isinstance(result, tuple)]
    assert int(xml.get("errors")) == len(broken) and {suite.get("skipped") for suite in xml.iter("testsuite")} == {"0"}
    for place, suite in enumerate(xml.iter("testsuite")):
        assert suite.find("properties") is not None and float(suite.get("time")) == 1.0, place


def test_trend_and_the_page_of_a_step():
    text = "[gate]\nnights = 2\n[matrix]\nbudget = [2]\n"

    def at(value):
        def change(data):
            data["cases"][0]["modes"]["tree_forked"]["max_abs"] = value

        return {2: change}

    for value in (9e-5, 2e-5, 3e-5):
        night(text, at(value))
    os.environ["GITHUB_STEP_SUMMARY"] = "step.md"
    try:
        _, found, _ = night(text, at(5e-5))
    finally:
        del os.environ["GITHUB_STEP_SUMMARY"]
    metric = found["cells"][0]["metrics"]["tree_forked.max_abs"]
    assert metric == {
        "value": 5e-5,
        "unit": 1e-4,
        "nights": 2,
        "median": 2.5e-5,
        "low": 2e-5,
        "high": 3e-5,
        "new": "high",
    }
    summary = Path("step.md").read_text()
    assert "5e-05 (2.5e-05) new high" in summary and summary == Path("reports/gate/summary.md").read_text()


def test_where_a_fault_enters_stands_beside_the_verdict():
    def change(data):
        break_forked(data)["cases"][0]["attribution"] = {"tree_forked": located()}

    night("[matrix]\nbudget = [2]\n", {2: change})
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    says = {test.get("name"): test.find("failure").get("message") for test in xml.iter("testcase")}
    assert len(says) == 2 and all(text.endswith("1 beyond): enters at layer 0.") for text in says.values()), says
    assert "1 beyond): enters at layer 0." in Path("reports/gate/summary.md").read_text()
    page = Path("reports/gate/report.html").read_text()
    assert "1 beyond): enters at layer 0." in page[page.index("Cases of the gate") : page.index("<h3>")]


def test_what_strangers_wrote_breaks_no_report():
    def nasty(data):
        data["cases"][0]["id"] = "<script>alert(1)</script>\x00\x1b]]>|"
        data["cases"][0]["modes"]["tree_forked"] |= {"verdict": "fail", "reason": "a\x0bb <b> | \ud800"}
        data["verdict"] |= {"text": "fail", "reasons": ["<img src=x> \x07 & |"]}
        data["exit_code"] = 1

    code, _, _ = night("[matrix]\nbudget = [2]\n", {2: nasty})
    assert code == 1
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    assert any("<script>alert(1)</script>" in test.get("name") for test in xml.iter("testcase"))
    page = Path("reports/gate/report.html").read_text()
    assert "<script>alert" not in page and "<img" not in page and "&lt;script&gt;alert" in page
    summary = Path("reports/gate/summary.md").read_text()
    assert "<img" not in summary


# --- resuming ---------------------------------------------------------------------------------------------------------


def stopping(after: int, ran: list[str]):
    """A runner that is interrupted before cell number `after`."""

    def run(cell, record, log):
        if len(ran) == after:
            raise KeyboardInterrupt
        ran.append(cell.name)
        return run_by_hand(cell, record, log)

    return run


def test_a_run_that_was_stopped_goes_on_and_a_changed_one_starts_afresh():
    text = "[matrix]\nbudget = [2, 3, 4]\n"
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_gate(configured(text), run=stopping(2, ran), say=str)
    assert len(ran) == 2 and not Path("reports/gate/gate.json").exists()
    said: list[str] = []
    assert run_gate(configured(text), run=stopping(9, ran), say=said.append) == 0
    assert [name[-1] for name in ran] == ["2", "3", "4"] and sum("(finished before)" in line for line in said) == 2
    run_gate(configured(text), run=stopping(9, ran), say=str)
    assert len(ran) == 6  # the last one was finished: this is a new night
    with pytest.raises(KeyboardInterrupt):
        run_gate(configured(text), run=stopping(7, ran), say=str)
    run_gate(configured(text + "[settings]\nseed = 1\n"), run=stopping(99, ran), say=str)
    assert len(ran) == 10  # another configuration: all three again
    assert len(history.nights("reports/history.db", "gate", 9)) == 3


def stopped_gate(text: str) -> dict:
    """The head of the journal of a gate that was stopped before the second of its cells."""
    with pytest.raises(KeyboardInterrupt):
        run_gate(configured(text), run=stopping(1, []), say=str)
    return json.loads(Path("reports/gate/journal.jsonl").read_text().splitlines()[0])


def test_every_report_says_what_was_not_run_tonight():
    _, found, said = night(TWO)
    assert [cell["ran"] for cell in found["cells"]] == [True, True] and "not run tonight" not in said[-1]
    stopped_gate(TWO)
    code, found, said = night(TWO, freeze=True)
    assert code == 0 and [cell["ran"] for cell in found["cells"]] == [False, True]
    assert said[-1] == "gate gate: pass, 2 cases: 2 pass; 1 not run tonight, exit code 0"
    for name in ("gate.json", "summary.md", "report.html"):
        assert "not run tonight: 1 case, the first" in Path("reports/gate", name).read_text(), name
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    ran = [p.get("value") for p in xml.iter("property") if p.get("name") == "ran_tonight"]
    assert ran == ["false", "true"]


@pytest.mark.parametrize("hours", [-25, 25, 24 * 30])
def test_a_journal_expires(hours):
    head = stopped_gate(TWO)
    journal = Path("reports/gate/journal.jsonl")
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=hours)
    journal.write_text(journal.read_text().replace(head["started"], then.isoformat()))
    ran: list[str] = []
    run_gate(configured(TWO), run=stopping(9, ran), say=str)
    assert len(ran) == 2


def test_a_finished_cell_whose_record_is_gone_is_run_again():
    stopped_gate(TWO)
    for record in Path("reports/gate/records").iterdir():
        record.unlink()
    ran: list[str] = []
    run_gate(configured(TWO), run=stopping(9, ran), say=str)
    assert len(ran) == 2


def test_files_of_others_stay_in_the_folder():
    ours = [Path("reports/gate", name) for name in (".notes.7", "records/.mine.2024", ".x.ddtree-check-part")]
    left = Path("reports/gate/.gate.json.4194304999.ddtree-check-part")  # no process has this number
    left.parent.joinpath("records").mkdir(parents=True)
    for path in (*ours, left):
        path.write_text("theirs")
    night()
    assert all(path.read_text() == "theirs" for path in ours) and not left.exists()


def test_no_file_of_the_current_directory_stands_before_the_package(here, monkeypatch):
    (here / "json.py").write_text("raise SystemExit(0)\n")
    (here / "ddtree_check.py").write_text("raise SystemExit(0)\n")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    result = run_cell(Cell("x", Job(prompts="none.jsonl"), 120.0), here / "record.json", here / "log")
    assert (result.verdict, result.exit_code) == ("error", 3) and "none.jsonl: No such file" in result.reason


def test_a_broken_journal_starts_afresh():
    text = "[matrix]\nbudget = [2]\n"
    Path("reports/gate").mkdir(parents=True)
    head = stopped_gate(text.replace("[2]", "[2, 3]"))
    head |= {"fingerprint": fingerprint(configured(text))}
    cell = {"cell": "tiny-qwen3_5/code/2", "verdict": "pass", "exit_code": 0, "reason": "", "seconds": 1.0}
    changes = ({"seconds": [2]}, {"seconds": float("nan")}, {"verdict": [1, 2]}, {"exit_code": 9}, {"cell": 3})
    odd = [json.dumps(head) + "\n" + json.dumps(cell | {"record": True} | change) + "\n" for change in changes]
    odd += [json.dumps(head | {"started": when}) + "\n" for when in (3, "r", "2026-01-01")]
    for broken in ("\xff\n", "{}\n", "[]\n", '{"fingerprint": 3}\n{"cell": 1}\n', "no json\n", *odd):
        Path("reports/gate/journal.jsonl").write_bytes(broken.encode("latin-1"))
        ran: list[str] = []
        assert run_gate(configured(text), run=stopping(9, ran), say=str) == 0 and len(ran) == 1, broken


def test_one_gate_at_a_time_in_a_folder():
    text = "[matrix]\nbudget = [2]\n"

    def second(cell, record, log):
        with pytest.raises(UsageError, match=rf"in use by a gate that runs \(process {os.getpid()}\)"):
            run_gate(configured(text), run=run_by_hand, say=str)
        return run_by_hand(cell, record, log)

    assert run_gate(configured(text), run=second, say=str) == 0


def kills(folder: Path, first: int, stride: int, *words: str, broken: str = "") -> dict:
    """What `tests.gate_process` prints; broken: lines to run before it."""
    script = f"{broken}\nfrom tests.gate_process import main\nmain()"
    command = [sys.executable, "-c", script, str(folder), str(first), str(stride), *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_leaves_whole_files_and_the_same_result(here):
    found = kills(here, 5, 16)
    assert found["wrong"] == [] and found["killed"] > 8


def test_a_history_without_transactions_is_found_out(here):
    """The twin: statements that stand one by one."""
    broken = "import contextlib, ddtree_check.gate.history as h; h._transaction = lambda db: contextlib.nullcontext()"
    assert kills(here, 7, 4, "sql", broken=broken)["wrong"] != []
    assert kills(here, 7, 4, "sql")["wrong"] == []


@pytest.mark.slow
def test_a_kill_at_every_step_leaves_whole_files_and_the_same_result(here):
    """In the midst of every write, every statement of the history's commit, and the freeze."""
    found = kills(here, 1, 1)
    assert found["wrong"] == [] and found["killed"] == found["steps"] > 100


# --- cells ------------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


SLEEPER = """
from ddtree_check.gate.cells import end_with_parent
end_with_parent()
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path("pids.part").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(1000)
"""


def test_a_cell_whose_time_is_up_is_stopped_with_all_it_started(here, monkeypatch):
    monkeypatch.setattr(gate_cells, "CHILD", SLEEPER)
    result = run_cell(Cell("slow", Job(), 2.0), here / "record.json", here / "log")
    assert (result.verdict, result.exit_code) == ("not_run", 2) and "stopped after 2 s, the time limit" in result.reason
    assert gone(map(int, Path("pids").read_text().split()))


def test_a_cell_ends_with_its_gate(here):
    script = f"from pathlib import Path; from ddtree_check.gate import cells; cells.CHILD = {SLEEPER!r}; "
    script += "from ddtree_check.flows.job import Job; "
    script += "cells.run_cell(cells.Cell('x', Job(), 900.0), Path('r'), Path('l'))"
    gate = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 30
    while not Path("pids").exists() and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(word) for word in Path("pids").read_text().split()]
    assert all(map(alive, pids))
    gate.kill()
    gate.wait()
    assert gone(pids)


ENDS = [  # what the child does, verdict, exit code, reason
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "not_run", 2, "ended by SIGSEGV, see"),
    ("import sys; sys.exit('ddtree-check: unsupported: layer 3 is new')", "error", 3, "unsupported: layer 3"),
    (
        "import sys; print('ddtree-check: unsupported: layer 3', file=sys.stderr); sys.exit(2)",
        "unsupported",
        2,
        "layer 3",
    ),
    ("import sys; print('ddtree-check: model: no', file=sys.stderr); sys.exit(3)", "error", 3, "model: no"),
    ("pass", "error", 3, "it ended with exit code 0 and without a record"),
    ("import sys; open(sys.argv[-2], 'w').write('{}')", "error", 3, "schema None"),
]


@pytest.mark.parametrize(("code", "verdict", "exit_code", "reason"), ENDS, ids=[str(n) for n in range(len(ENDS))])
def test_how_a_cell_can_end(code, verdict, exit_code, reason, here, monkeypatch):
    monkeypatch.setattr(gate_cells, "CHILD", code)
    (here / "record.json").write_text(
        json.dumps(hand_record("old/3"))
    )  # an earlier night's is not taken for this one's
    result = run_cell(Cell("x", Job(), 60.0), here / "record.json", here / "log")
    assert (result.verdict, result.exit_code) == (verdict, exit_code) and reason in result.reason


def test_a_cell_has_a_file_name_of_its_own():
    assert slug(3, "a/b: c\n../é") == "003-a-b-c-..-" and slug(1, "a/b") != slug(2, "a-b")
    assert len(slug(1, "x" * 500)) < 100


# --- the history ------------------------------------------------------------------------------------------------------


def one_night(run: str, started: str = "2026-01-01T00:00:00", verdict: str = "pass") -> history.Night:
    cell = history.CellNight(verdict, "", 0, 1.5, {"x": 0.25, "y": None})
    return history.Night(run, "g", started, "f", {"device": "cpu"}, 0, {"a": cell, "b": cell})


def test_nights_come_back_as_they_were_and_once():
    first, second = one_night("1"), one_night("2", "2026-01-02T00:00:00", "fail")
    for night_ in (second, first, first):
        history.store("h.db", night_)
    assert history.nights("h.db", "g", 9) == [first, second] and history.nights("h.db", "g", 1) == [second]
    assert history.nights("h.db", "g", 9, but="2") == [first] and history.nights("h.db", "other", 9) == []
    assert history.nights("none.db", "g", 9) == [] and not Path("none.db").exists()


def test_a_store_that_fails_leaves_nothing_of_the_night():
    cell = history.CellNight("pass", "", 0, 1.5, {"x": 0.5})
    bad = history.CellNight("pass", "", 0, 1.5, {})
    object.__setattr__(bad, "reason", None)  # NOT NULL: fails in the midst of the transaction
    night_ = one_night("1")
    with pytest.raises(UsageError, match=r"history: h\.db: "):
        history.store("h.db", history.Night("2", "g", "t", "f", {}, 0, {"a": cell, "b": bad}))
    history.store("h.db", night_)
    assert history.nights("h.db", "g", 9) == [night_]


def test_an_older_history_is_migrated_and_a_newer_one_refused(monkeypatch):
    history.store("h.db", one_night("1"))
    newer = (*history.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'old'",))
    with monkeypatch.context() as later:
        later.setattr(history, "MIGRATIONS", newer)
        history.check_history("h.db")
    with contextlib.closing(sqlite3.connect("h.db")) as db:
        assert db.execute("SELECT note FROM runs").fetchall() == [("old",)]
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    with pytest.raises(UsageError, match="has version 2, this ddtree-check knows up to 1; take a newer"):
        history.check_history("h.db")


def test_other_files_are_refused_and_left_as_they_are(here):
    with contextlib.closing(sqlite3.connect("theirs.db")) as db:
        db.execute("CREATE TABLE t (x)")
        db.commit()
    Path("text.db").write_text("not a database, and long enough to be read as one " * 40)
    for name, said in {
        "theirs.db": "another program's database",
        "text.db": "not a database",
        "none/h.db": "unable",
    }.items():
        before = Path(name).read_bytes() if Path(name).exists() else None
        with pytest.raises(UsageError, match=said):
            history.store(name, one_night("1"))
        assert before is None or Path(name).read_bytes() == before


WRITER = """
import sys
from ddtree_check.gate.history import CellNight, Night, store
for n in range(15):
    cell = CellNight("pass", "", 0, 1.5, {{"x": 0.25}})
    store("h.db", Night(f"{name}-{{n}}", "g", "2026-01-01", "f", {{}}, 0, {{"a": cell, "b": cell}}))
"""


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE metrics SET value = 'much'",
        "UPDATE cells SET seconds = 9e999",
        "UPDATE cells SET exit_code = 'x'",
        "UPDATE cells SET verdict = x'ff00'",
        "UPDATE runs SET environment = '{'",
    ],
)
def test_an_odd_value_of_a_history_is_one_line(change):
    history.store("h.db", one_night("1"))
    with contextlib.closing(sqlite3.connect("h.db")) as db:
        db.execute(change)
        db.commit()
    with pytest.raises(UsageError, match=r"history: h\.db: .*move it away to begin a new one"):
        history.nights("h.db", "g", 9)


def test_two_runs_at_once_share_a_history():
    """Both make the file, both migrate it, both write: nothing is lost, nobody is told that it is locked."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER.format(name=name)], stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for writer in writers:
        assert writer.communicate(timeout=120)[1] == ""
    nights = history.nights("h.db", "g", 99)
    assert len(nights) == 30 and all(len(one.cells) == 2 for one in nights)


# --- the whole of it, on a model --------------------------------------------------------------------------------------

ENGINE = """
from ddtree_check.engines.transformers.engine import TransformersEngine
from ddtree_check.selftest.inject import Faulty
from ddtree_check.model.wiring import FORKED, UNFORKED


class Engine:
    @staticmethod
    def load(*args, **settings):
        return Faulty(TransformersEngine.load(*args, **settings), forked={wiring})
"""

REAL = """
[gate]
name = "fixtures"
baseline = "baseline.json"
timeout = 300
[matrix]
model = ["{model}"]
engine = ["night_engine:Engine"]
prompts = ["prompts.jsonl"]
budget = [{budgets}]
[settings]
length = 2
controls = 1
"""


def real_gate(checkpoint: Path, budgets: str, *words: str) -> int:
    Path("prompts.jsonl").write_text('{"id": "one", "token_ids": [5, 6, 7]}\n')
    Path("gate.toml").write_text(REAL.format(model=checkpoint, budgets=budgets))
    return cli.main(["gate", "--config", "gate.toml", *words])


@pytest.fixture
def alone(monkeypatch):
    """What the cells, which are processes of their own, must know."""
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow  # four processes that import torch; by hand: test_a_frozen_night_passes_again_...
def test_a_gate_on_a_model_turns_red_when_a_fault_is_injected(checkpoint, alone, capsys):
    Path("night_engine.py").write_text(ENGINE.format(wiring="FORKED"))
    assert real_gate(checkpoint, "3", "--freeze") == 0, capsys.readouterr()
    Path("night_engine.py").write_text(ENGINE.format(wiring="UNFORKED"))
    assert real_gate(checkpoint, "3") == 1, capsys.readouterr()
    assert capsys.readouterr().out.splitlines()[-1].startswith("gate fixtures: fail, 1 case: 1 fail")
    xml = ElementTree.parse("reports/gate/junit.xml").getroot()
    assert "one/3" in {test.get("name") for test in xml.iter("testcase") if test.find("failure") is not None}
    assert [one.exit_code for one in history.nights("reports/history.db", "fixtures", 9)] == [0, 1]
    assert "tree_forked: fail" in Path("reports/gate/report.html").read_text()


@pytest.mark.slow
def test_a_gate_on_a_model_killed_20_times_at_random_ends_as_one_that_was_not(checkpoint, alone):
    """SIGKILL at random moments of real cells, again and again in one folder, until it has been killed 20 times."""
    Path("night_engine.py").write_text(ENGINE.format(wiring="FORKED"))
    budgets = "2, 3, 4"
    began = time.monotonic()
    assert real_gate(checkpoint, budgets, "--freeze") == 0
    took = time.monotonic() - began
    whole = json.loads(Path("reports/gate/gate.json").read_text())
    draw, kills = random.Random(7), 0
    command = [sys.executable, "-m", "ddtree_check", "gate", "--config", "gate.toml"]
    while kills < 20:
        gate = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = gate.wait(draw.uniform(0.2, 0.6) * took)
            assert code == 0  # it had less to do than was left to it
        except subprocess.TimeoutExpired:
            gate.kill()
            gate.wait()
            kills += 1
    assert real_gate(checkpoint, budgets) == 0
    found = json.loads(Path("reports/gate/gate.json").read_text())
    assert [(c["name"], c["verdict"], c["cases"]) for c in found["cells"]] == [
        (c["name"], c["verdict"], c["cases"]) for c in whole["cells"]
    ]
    values = [{k: m["value"] for k, m in c["metrics"].items()} for c in found["cells"]]
    assert values == [{k: m["value"] for k, m in c["metrics"].items()} for c in whole["cells"]]
    assert not found["cells"][0]["drifts"] and not Path("reports/gate/journal.jsonl").exists()
    with contextlib.closing(sqlite3.connect("reports/history.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
