"""`generate` with recorded trees, `show` for what it wrote, and a run that was killed, as a user types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_check.cli import main as cli
from ddtree_check.flows.check import Item, Settings
from ddtree_check.flows.rounds import MODES, Rounds, generate
from ddtree_check.report.record import write_record
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.recorded import Marginals, load_recorded, recorded_from_json, recorded_to_json
from tests import tiny
from tests.models import make_engine, prompt, small, tree
from tests.tiny import VOCAB, hand_record

checkpoint = tiny.checkpoint


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")

    def lines(name, *values):
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))

    lines("prompts.jsonl", {"id": "one", "token_ids": [5, 6, 7]}, {"id": "two", "token_ids": [8]})
    first, second = {"tokens": [None, 1, 2], "parents": [-1, 0, 0]}, {"tokens": [None, 3], "parents": [-1, 0]}
    lines("trees.jsonl", {"trees": [first, second]}, {"trees": [second]})
    lines("one.jsonl", {"tree": first}, {"tree": first})
    lines("none.jsonl", {"trees": []}, {"trees": []})
    lines("token.jsonl", {"trees": [first, {"tokens": [None, VOCAB], "parents": [-1, 0]}]}, {"trees": [first]})
    return folder


def run(checkpoint, files, *words: str) -> int:
    return cli.main(["generate", "--model", str(checkpoint), "--prompts", f"{files}/prompts.jsonl", *words])


@pytest.fixture(scope="module")
def saved(checkpoint, files):
    path = files / "run.json"
    run(checkpoint, files, "--rounds", "3", "--draft", f"recorded:{files}/trees.jsonl", "--json", str(path), "--quiet")
    return path


def test_recorded_trees_are_verified_one_a_round(saved):
    one, two = json.loads(saved.read_text())["rounds"]["prompts"]
    for mode in ("tree_forked", "tree_unforked"):
        trees = [[found["tree"]["tokens"][1:] for found in entry["modes"][mode]["rounds"]] for entry in (one, two)]
        assert trees == [[[1, 2], [3], []], [[3], [], []]]  # and then plain steps, since no more were recorded


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("one.jsonl", "rounds: got one fixed tree, expected a draft that goes on: self, ngram, or recorded lines of "),
        ("none.jsonl", r"none.jsonl:1: trees: got \[\], expected a list of trees, one for each round"),
        ("token.jsonl", "one, round 1: node 1 has token 300, expected 0..299"),
    ],
)
def test_other_recordings_are_refused_in_one_line(checkpoint, files, capfd, draft, says):
    assert run(checkpoint, files, "--draft", f"recorded:{files}/{draft}") == 3
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("ddtree-check: ")
    assert re.search(says, err), err


@pytest.mark.parametrize("require", [(), ("--require", "tree_forked")], ids=["default", "asked"])
def test_a_required_mode_that_is_not_run_is_refused_at_once(checkpoint, files, capfd, monkeypatch, require):
    assert run(checkpoint, files, "--modes", "linear", "--require", "linear", "--rounds", "1") in (0, 2)
    capfd.readouterr()

    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("ddtree_check.engines.registry.load_engine", load)
    assert run(checkpoint, files, "--modes", "linear", *require) == 3
    assert capfd.readouterr().err == (
        "ddtree-check: require: got tree_forked, which is none of --modes linear; run it too, or require others\n"
    )


def test_compare_says_who_takes_trees_by_the_round(checkpoint, files, capfd):
    line = ["compare", "--model", str(checkpoint), "--prompts", f"{files}/prompts.jsonl"]
    assert cli.main([*line, "--draft", f"recorded:{files}/trees.jsonl"]) == 3
    assert "got a recorded tree for each round, which generate takes" in capfd.readouterr().err


def test_recordings_go_to_json_and_back(files):
    drafts = [*load_recorded(files / "trees.jsonl"), *load_recorded(files / "one.jsonl")]
    drafts.append(Marginals(((3, 4), (5,)), ((-0.5, -1.0), (-0.4,))))
    assert [recorded_from_json(json.loads(json.dumps(recorded_to_json(draft)))) for draft in drafts] == drafts


def test_a_recorded_tree_is_cut_to_the_room_that_the_context_has():
    host = make_engine("qwen3_5_text", max_position_embeddings=16)
    item = Item("p", prompt(12), recorded=(tree("comb", 12), tree("chain", 9), tree("random", 8)))
    found = generate(host, [item], Settings(budgets=(12,)), Rounds(9, ("linear", "tree_forked")))
    for mode in ("linear", "tree_forked"):
        result = found["prompts"][0]["modes"][mode]
        assert result["ended"] == "context full" and result["same_text"] and len(result["tokens"]) == 16 - 12 + 1
        deepest = [max(DraftTree.from_json(r["tree"]).depth) + 12 + r["position"] for r in result["rounds"]]
        assert max(deepest) <= 16


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("self", "ngram")), "recorded"])
def test_a_record_holds_what_its_rounds_need(how):
    """Prompts, drafts and settings read back from the record alone give the same rounds again."""
    host = small()
    drafts = Marginals(((3, 4), (5, 6)), ((-0.5, -1.0), (-0.4, -1.2))) if how == "recorded" else None
    items = [Item("one", prompt(1)), Item("two", prompt(9), recorded=drafts)]
    settings, rounds = Settings(budgets=(6,), draft="self" if how == "recorded" else how), Rounds(3, tuple(MODES))
    first = json.loads(json.dumps(generate(host, items, settings, rounds)))
    items = [
        Item(
            entry["id"],
            tuple(entry["prompt_tokens"]),
            recorded=recorded_from_json(entry["recorded"]) if "recorded" in entry else None,
        )
        for entry in first["prompts"]
    ]
    again = Rounds(**{**first["settings"], "modes": tuple(first["settings"]["modes"]), "stop": frozenset()})
    assert json.loads(json.dumps(generate(host, items, settings, again))) == first


# --- show -------------------------------------------------------------------------------------------------------------


def show(path, *words: str) -> int:
    return cli.main(["show", str(path), *words])


def test_the_whole_one_prompt_and_one_round(saved, checkpoint, files, capfd):
    assert show(saved) == 0
    whole = capfd.readouterr().out
    record = json.loads(saved.read_text())
    assert whole.splitlines()[-1] == f"verdict: {record['verdict']['text']}, exit code {record['exit_code']}"
    assert "Rounds against plain decoding" in whole and f"Again: {record['command']}" in re.sub(r" \\\n *", " ", whole)
    assert "(at least 30% and 10%: not exercised)." in " ".join(whole.split())
    assert show(saved, "--prompt", "two") == 0
    out = capfd.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("Prompt two, tree_forked: ")]
    assert sum(line.split()[:2] == ["0", "1"] for line in out.splitlines()) == 3  # round 0 at token 1, in three modes
    assert show(saved, "--prompt", "one", "--round", "0") == 0
    out = capfd.readouterr().out
    assert "Prompt one, round 0, tree_unforked: at token 1, " in out and "ar accepts" in out
    assert show(saved, "--prompt", "one", "--round", "0", "--format", "markdown") == 0
    assert "## Prompt one, round 0, linear" in capfd.readouterr().out
    assert show(saved, "--format", "markdown") == 0
    assert capfd.readouterr().out.startswith("# ddtree-check\n")
    assert show(saved, "--prompt", "one", "--round", "1", "--format", "json") == 0
    assert json.loads(capfd.readouterr().out)["tree_forked"]["round"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "three"], "prompt: got 'three', expected one of one, two"),
        (["--prompt", "one", "--round", "3"], "round: got 3, expected 0..2 of prompt one"),
        (["--prompt", "one", "--round", "-1"], "round: got -1, expected 0..2"),
        (["--round", "1"], "round: got 1 without a prompt, expected --prompt ID too"),
        (["--case", "one"], "a record of generate, which has no cases; show it whole or by --prompt"),
        (["--prompt", "one", "--case", "one"], "prompt: got a case too, expected one of --case and --prompt"),
        (["--format", "csv"], "format: got csv, expected table, markdown or json"),
        (["--html", "x.html"], "a record of generate, which has no cases"),
    ],
)
def test_what_is_not_there_is_one_line(saved, capfd, words, says):
    assert show(saved, *words) == 3
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err, err


def test_a_comparison_without_rounds_has_no_prompts_to_show(tmp_path, capfd):
    write_record(tmp_path / "run.json", hand_record("a/3"))
    assert show(tmp_path / "run.json", "--prompt", "a") == 3
    assert "holds no rounds; expected a record of generate or of compare --rounds" in capfd.readouterr().err


@pytest.mark.parametrize("lost", ["rounds", "verdict", "exit_code"])
def test_a_record_that_lost_a_part_is_refused(saved, tmp_path, capfd, lost):
    record = json.loads(saved.read_text())
    del record[lost]
    write_record(tmp_path / "cut.json", record)
    assert show(tmp_path / "cut.json") == 3
    assert f"cut.json: {lost} is nothing, expected" in capfd.readouterr().err
    record = json.loads(saved.read_text())
    del record["rounds"]["prompts"][0]["modes"]["linear"]["agreement"]
    write_record(tmp_path / "cut.json", record)
    assert show(tmp_path / "cut.json", "--prompt", "one") == 3
    assert "no whole record (KeyError: 'agreement')" in capfd.readouterr().err


# --- a kill -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(checkpoint, tmp_path):
    prompts, journal = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "token_ids": [5 + n, 6]}) + "\n" for n in range(6)))
    code = "import sys; from ddtree_check.cli.main import main; sys.exit(main())"
    line = ["generate", "--model", str(checkpoint), "--prompts", str(prompts), "--rounds", "8", "--budget", "8"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *line, "--journal", str(journal)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") >= 3:  # the head and two prompts
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    kept = journal.read_bytes()
    assert 3 <= kept.count(b"\n") < 7
    resumed, whole = tmp_path / "resumed.json", tmp_path / "whole.json"
    code = cli.main([*line, "--journal", str(journal), "--json", str(resumed), "--quiet"])
    assert cli.main([*line, "--json", str(whole), "--quiet"]) == code
    first, second = (json.loads(path.read_text()) for path in (resumed, whole))
    assert first["rounds"] == second["rounds"]
    assert journal.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
