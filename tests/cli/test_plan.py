"""`ddtree-check plan` as a user types it: a table, the buffers that are too small by name, and an exit code."""

from __future__ import annotations

import json

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.cli import main as cli
from ddtree_check.engines.capacity import batches, parse_reserved

BLOCK = "kv_slots=16,state_slots=16,conv_windows=16"  # made for a block of 16


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was asked for")

    monkeypatch.setattr("ddtree_check.flows.job.run", load)


def plan(*words: str) -> int:
    return cli.main(["plan", *words])


@pytest.mark.parametrize("budget", [15, 16, 17, 64, 65])
def test_a_block_of_16_is_too_small_for_a_tree_in_each_of_its_buffers(budget, capfd):
    assert plan("--budget", str(budget), "--reserved", BLOCK) == int(budget > 15)
    out = capfd.readouterr().out
    for buffer in ("kv_slots", "state_slots", "conv_windows"):
        row = next(line.split() for line in out.splitlines() if line.startswith(buffer))
        assert row[1:5] == ["1", "1", str(budget + 1), "16"]
        assert (f"batch of 1: {buffer}: request 1 needs {budget + 1} rows, reserved 16" in out) == (budget > 15)
    assert out.splitlines()[-1].endswith(f"no pass was run, exit code {int(budget > 15)}")


def test_a_full_token_budget_is_short_at_the_boundary_batch_only(capfd):
    assert plan("--budget", "16", "--requests", "1,2,3,4", "--reserved", "tokens=total:64") == 1
    rows = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("tokens ")]
    assert [row[4:8] for row in rows] == [
        ["17", "64", "17", "64"], ["34", "64", "17", "32"], ["51", "64", "17", "21.3333"], ["68", "64", "17", "16"],
    ]  # fmt: skip
    assert [row[8] for row in rows] == ["fits", "fits", "fits", "short"]
    assert plan("--budget", "16", "--requests", "3", "--reserved", "tokens=total:64") == 0
    assert plan("--budget", "16", "--requests", "4", "--reserved", "tokens=total:68") == 0
    capfd.readouterr()
    plan("--budget", "16", "--requests", "4", "--reserved", "tokens=total:64")
    assert "one row short for each request: its root" in capfd.readouterr().out


def test_a_name_that_is_not_known_is_said(capfd):
    assert plan("--budget", "16", "--reserved", "sate=16,kv_slots=17") == 1
    out = capfd.readouterr().out
    assert "Compared as given, though no name of them is known: sate.\n" in out
    assert "Not stated, so not looked at: state, conv, graph.\n" in out
    assert plan("--budget", "16", "--reserved", BLOCK) == 1
    assert "Compared as given" not in capfd.readouterr().out


def test_a_file_says_the_same_and_the_findings_can_be_written(tmp_path, capfd):
    path, found = tmp_path / "engine.json", tmp_path / "plan.json"
    path.write_text(json.dumps({"kv": {"total": 200}, "state": {"per_request": 17}, "graph": {"sizes": [17, 64]}}))
    words = ["--budget", "16,64", "--requests", "3"]
    assert plan(*words, "--reserved", "kv=total:200,state=17,graph=sizes:17/64") == 1
    typed = capfd.readouterr().out
    assert plan(*words, "--reserved", str(path), "--json", str(found)) == 1
    assert capfd.readouterr().out == typed
    data = json.loads(found.read_text())
    short = [(need["buffer"], need["request"]) for need in data["batches"][0]["needs"] if need["short"]]
    assert short == [("state", "2"), ("graph", None)] and data["exit_code"] == 1
    assert plan(*words, "--reserved", str(path), "--quiet") == 1
    assert capfd.readouterr().out == "verdict: fail, 2 of 3 buffers too small, no pass was run, exit code 1\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Missing option '--reserved'"),
        (["--reserved", "state"], "reserved: got 'state', expected BUFFER=ROWS"),
        (["--reserved", "state=-1"], "reserved: got 'state=-1', expected BUFFER=ROWS"),
        (["--reserved", "state=rows:3"], "reserved: got 'state=rows:3'"),
        (["--reserved", "graph=sizes:"], "reserved: got 'graph=sizes:'"),
        (["--reserved", "a=1,a=2"], "reserved: got 'a' twice"),
        (["--reserved", "{in}/none.json"], "none.json: No such file"),
        (["--reserved", "{in}/list.json"], "expected an object with a buffer a key"),
        (["--reserved", "{in}/form.json"], "plan: kv is 16, expected an object with one of per_request"),
        (["--reserved", "a=1", "--budget", "0"], "budget: got '0', expected numbers of at least 1"),
        (["--reserved", "a=1", "--requests", "many"], "requests: got 'many', expected numbers"),
        (["--reserved", "a=1", "--requests", "99999999"], "requests: got 99999999, expected at most 4096"),
        (["--reserved", "a=1", "--json", "{in}/none/plan.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_3(tmp_path, capfd, words, says):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "form.json").write_text('{"kv": 16}')
    assert plan(*[word.replace("{in}", str(tmp_path)) for word in words]) == 3
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("ddtree-check: ") and len(err.splitlines()) == 1 and says in err, err


def test_parts():
    assert parse_reserved("a=3, b=total:4 ,c=sizes:1/2") == {
        "a": {"per_request": 3}, "b": {"total": 4}, "c": {"sizes": [1, 2]},
    }  # fmt: skip
    assert batches((16, 64), (1, 3)) == [{"1": 16}, {"1": 16, "2": 64, "3": 16}]
    with pytest.raises(UsageError, match="reserved"):
        parse_reserved("")
