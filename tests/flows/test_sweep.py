"""The sweep: what its figures count, what is withheld, and what it answers."""

from __future__ import annotations

import functools
import json

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.base.resources import DRAFTER
from ddtree_check.cli.main import main
from ddtree_check.engines.dflash import load
from ddtree_check.flows.check import Item, Settings
from ddtree_check.flows.job import Job, run
from ddtree_check.flows.rounds import Rounds
from ddtree_check.flows.sweep import Meter, answer, sweep
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.sweep import check_plot, says, write_plot
from ddtree_check.report.views import render
from ddtree_check.selftest.inject import Faulty
from tests.engines.test_dflash import prompts, reading, target


def swept(engine=None, budgets=(4, 12), blocks=(8, 16), rounds=2, count=1) -> dict:
    drafter = load(DRAFTER, target())
    reading(drafter)
    items = [Item(name, tokens, drafter=drafter) for name, tokens in prompts()[:count]]
    model = {"name": "tiny", "parameters": 1}
    settings = Settings(draft="dflash", budgets=budgets)
    record = sweep(engine or target(), items, settings, Rounds(rounds=rounds), blocks, model=model)
    return record | {"command": "again"}


@functools.cache
def right() -> dict:
    return swept()


def test_rows_count_what_they_say():
    record = right()
    rows = {(row["block"], row["budget"], row["mode"]): row for row in record["rows"]}
    assert len(rows) == 2 * (1 + 2 * 3)
    for (block, budget, mode), row in rows.items():
        assert row["rounds"] == 2
        assert row["rows"] <= (block if budget is None else budget + 1)
        if mode in ("linear", "tree_forked"):
            assert row["off"] == 0 and row["accepted"] == row["seems"] == row["ar_accepted"]
            assert row["wrong_tokens"] == 0 and row["same_text"] == row["texts"]
            assert row["rows_per_accepted"] is None or row["rows_per_accepted"] >= 1
            assert row["contaminated"] == 0
        else:
            assert row["contaminated"] > 0.3
            assert (row["accepted"] is None) == (row["off"] > 0)
            assert (row["rows_per_accepted"] is None) == (not row["accepted"])  # withheld, or none to divide by
        assert row["pass_ms"] > 0
    for block in (8, 16):
        assert rows[block, None, "linear"]["rows"] == block  # the whole block, not the tree's first branch
        for budget in (4, 12):  # the shadow drafts the same trees as the forked run: both follow plain decoding
            forked, shadow = (rows[block, budget, mode] for mode in ("tree_forked", "shadow"))
            assert forked["rows"] == shadow["rows"] and shadow["agreement"] == 1
            if forked["rounds"] == shadow["rounds"]:
                assert shadow["ar_accepted"] == forked["ar_accepted"]
    assert record["exit_code"] == 0


def test_the_answer_on_paper():
    def row(mode, budget, seems, **more):
        base = {"block": 16, "budget": budget, "mode": mode, "seems": seems, "accepted": seems, "rounds": 4, "off": 0}
        base |= {"wrong_tokens": 0.0, "wrong_accept": 0.0, "wrong_reject": 0.0, "tokens_per_second": 10.0}
        return base | more

    rows = [
        row("linear", None, 1.0, tokens_per_second=20.0),
        row("tree_forked", 8, 1.5, tokens_per_second=25.0),
        row("tree_forked", 16, 2.0),
        row("tree_unforked", 8, 1.0, accepted=None, off=2),
        row("tree_unforked", 16, 1.0, accepted=None, off=3),
        row("shadow", 8, 3.0),
        row("shadow", 16, 3.0, wrong_tokens=1.0, wrong_reject=0.5),
    ]
    found = answer(rows, 16)
    assert (found["budget"], found["gain"], found["fast_budget"], found["faster"]) == (16, 1.0, 8, 1.25)
    assert (found["leak"], found["shadow_right"], found["unforked_off"]) == (0.25, 3.0, 0.75)
    pays, leaks = says(found)
    assert "the tree pays in tokens" in pays and "+50%" in pays and "pays in time here: 1.25 x" in pays
    assert "25% of them are leak" in leaks and "75% of the rounds" in leaks
    rows[0]["accepted"] = None
    assert answer(rows, 16)["gain"] is None and "withheld" in says(answer(rows, 16))[0]


def test_acceptance_and_speed_are_withheld_when_outputs_differ():
    record = swept(Faulty(target(), forked=UNFORKED), budgets=(12,), blocks=(16,))
    (row,) = [row for row in record["rows"] if row["mode"] == "tree_forked"]
    assert row["off"] and row["accepted"] is row["rows_per_accepted"] is row["tokens_per_second"] is None
    assert record["exit_code"] == 1 and "withheld" in record["verdict"]["reasons"][0]
    text = render(record)
    assert "withheld" in text and text.endswith("verdict: fail, exit code 1")


def test_a_control_that_never_fails_is_insensitive():
    record = swept(Faulty(target(), unforked=FORKED), budgets=(12,), blocks=(16,))
    assert record["exit_code"] == 2 and "insensitive" in record["verdict"]["reasons"][0]


def test_the_meter_makes_plain_steps_once_and_verify_passes_always():
    drafter = load(DRAFTER, target())
    meter = Meter(reading(drafter), keep=True)
    one = meter.prefill(prompts()[0][1])
    assert meter.prefill(prompts()[0][1]) is one
    assert meter.step(one, 5)[1] is meter.step(one, 5)[1]
    assert meter.step(one, 6)[1] is not meter.step(one, 5)[1]
    assert Meter(target(), keep=False).prefill(prompts()[0][1]) is not one
    assert meter.prefill(prompts()[1][1]) is not one and meter.prefill(prompts()[0][1]) is not one


@pytest.mark.parametrize("blocks", [(1,), (17,)])
def test_blocks_that_the_drafter_does_not_draft(blocks):
    with pytest.raises(UsageError, match=f"blocks: got {blocks[0]}, expected numbers from 2 to the drafter's block 16"):
        swept(blocks=blocks)


def test_views(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot: pip install 'ddtree-check[plot]'")
    record = right()
    text = render(record)
    assert "Block 16: the tree" in text and "Leak: " in text and text.endswith("verdict: pass, exit code 0")
    assert "polluted features" in text
    assert render(record, quiet=True) == "verdict: pass, exit code 0"
    assert max(map(len, render(record, width=200).splitlines())) <= 200
    for ending in ("png", "svg"):
        path = tmp_path / f"plot.{ending}"
        write_plot(record, str(path))
        assert path.stat().st_size > 5000
    with pytest.raises(UsageError, match="name that ends in"):
        check_plot(str(tmp_path / "plot.txt"))
    json.dumps(record, allow_nan=False)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "sweep.json"
    words = ["sweep", "--limit", "1", "--rounds", "2", "--budgets", "3", "--blocks", "8", "--json", str(file)]
    code = main(words)
    assert code in (0, 2)
    record = json.loads(file.read_text())
    assert record["schema"] == "ddtree-check/sweep/1" and record["settings"]["blocks"] == [8]
    assert record["command"] == "ddtree-check sweep --limit 1 --budgets 3 --blocks 8 --rounds 2"
    shown = capsys.readouterr().out
    assert "Block 8" in shown
    assert main(["show", str(file)]) == 0 and capsys.readouterr().out == shown
    assert main(["show", str(file), "--format", "json"]) == 0 and json.loads(capsys.readouterr().out) == record
    for extra, line in {
        ("--case", "one"): "a record of sweep, which has no cases; show it whole",
        ("--prompt", "one"): "holds no rounds; expected a record of generate or of compare --rounds",
        ("--format", "csv"): "format: got csv, expected table, markdown or json",
    }.items():
        assert main(["show", str(file), *extra]) == 3 and line in capsys.readouterr().err
    file.write_text(json.dumps(record | {"rows": None}))
    assert main(["show", str(file)]) == 3 and "rows is NoneType, expected list" in capsys.readouterr().err
    assert main(["sweep", "--budgets", "0"]) == 3
    assert "budget: got '0'" in capsys.readouterr().err


def test_a_sweep_of_another_draft():
    record = run(Job(verb="sweep", draft="ngram", limit=1, settings={"budgets": (4,)}, rounds={"rounds": 1}))
    assert record["settings"]["blocks"] == [16] and len(record["rows"]) == 4
