"""The self-test: whole kinds of fault, and that it goes red itself for what is missed or misplaced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_check.cli.main import main
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.sensitivity import react
from ddtree_check.judge.rule import Rule
from ddtree_check.model.wiring import Wiring
from ddtree_check.report.selftest import markdown
from ddtree_check.report.views import render
from ddtree_check.selftest import inject
from ddtree_check.selftest import run as selftest
from ddtree_check.selftest.inject import Faulty, keeps
from ddtree_check.selftest.kinds import KINDS
from ddtree_check.selftest.run import FAULTS, FORK, LINEAR, SIDE, Fault, Where, run
from tests.models import engine, make_engine, prompt, tree

REPO = Path(__file__).resolve().parents[2]
SMALL = "qwen3_5_text"
FLAT = Fault(
    "K3", "rows in order", lambda e: Faulty(e, forked=Wiring.parse("state=flat")), {FORK: "fail"},
    Where(SIDE, 0, "state"), model=SMALL,
)  # fmt: skip


def reasons(*faults: Fault) -> list[str]:
    record = run(faults, clean=False)
    assert record["exit_code"] == (1 if record["verdict"]["reasons"] else 0)
    return record["verdict"]["reasons"]


def test_a_fault_is_caught_in_its_place_and_the_run_without_it_is_green():
    record = run([FLAT])
    fault, clean = record["results"]
    assert record["exit_code"] == 0 and fault["caught"] and fault["by"] == FORK
    assert (fault["node"], fault["layer"], fault["channel"]) == (SIDE, 0, "state")
    assert fault["neighbours"] == [LINEAR, "control", "sensitivity of gated_delta", "sensitivity of conv"]
    assert clean["kind"] == "clean" and clean["as_expected"] and not clean["expected"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param(replace(FLAT, make=lambda e: e), "missed by tree_forked", id="missed"),
        pytest.param(replace(FLAT, red={}, where=Where()), "tree_forked came to fail", id="red-neighbour"),
        pytest.param(replace(FLAT, where=Where(layer=2)), "seen by tree_forked at layer 0, expected 2", id="layer"),
        pytest.param(replace(FLAT, where=Where(node=3)), "at node 4, expected 3", id="node"),
        pytest.param(replace(FLAT, where=Where(channel="conv")), "channel 'state', expected 'conv'", id="channel"),
        pytest.param(replace(FLAT, where=Where(says="lost")), "expected 'lost' in it", id="words"),
        pytest.param(replace(FLAT, red={"no such check": "fail"}), "missed by no such check", id="no-such-check"),
        pytest.param(replace(FLAT, trees=("drawn", "drawn")), "tree_forked, case 1 came to fail", id="earlier-case"),
    ],
)
def test_the_self_test_goes_red_for_what_is_not_as_expected(fault, says):
    (reason,) = reasons(fault)
    assert says in reason and reason.startswith("K3 rows in order (qwen3_5_text, float32): ")


def test_a_fault_in_the_clean_run_is_seen(monkeypatch):
    wrong = Faulty(make_engine(SMALL), forked=Wiring.parse("conv=flat"))
    monkeypatch.setattr(selftest._Hosts, "_build", lambda self, *_: wrong)
    record = run([FLAT])
    assert record["exit_code"] == 1 and not record["results"][-1]["as_expected"]


def test_the_table_has_every_kind_in_several_forms():
    assert len(FAULTS) == len({(f.kind, f.name, f.model, f.dtype, f.trees) for f in FAULTS})
    counts = Counter(fault.kind for fault in FAULTS)
    assert counts.keys() == KINDS.keys() and all(counts[f"K{kind}"] >= 3 for kind in range(1, 14))
    assert {fault.dtype for fault in FAULTS} == {"float32", "bfloat16"} and len({f.model for f in FAULTS}) >= 8


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in ("K6",) else pytest.mark.slow) for k in KINDS])
def test_every_kind_comes_out_as_the_table_says(kind):
    assert reasons(*(fault for fault in FAULTS if fault.kind == kind)) == []


def test_the_command_prints_a_table_and_writes_a_record(tmp_path, capsys):
    file = tmp_path / "self.json"
    assert main(["selftest", "--kind", "K6", "--json", str(file)]) == 0
    text, record = capsys.readouterr().out, json.loads(file.read_text())
    assert record["schema"] == "ddtree-check/selftest/1" and len(record["results"]) == 3
    assert text.splitlines()[-1].startswith("verdict: pass (3 of 3 as expected, ")
    assert "budgets of 17 to 65 in buffers for 16" in text and "K6    capacity" in text


def test_an_unknown_kind_is_refused_before_anything_heavy_is_imported():
    code = (
        "import sys; from ddtree_check.cli.main import main; "
        "print(main(['selftest', '--kind', 'K6,K99']), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert ran.stdout == "3 False\n" and "kind: got 'K99', expected some of K1, K2" in ran.stderr, ran


def test_the_views_say_what_was_missed():
    record = run([replace(FLAT, make=lambda e: e)], clean=False)
    text = render(record)
    assert "NOT as expected" in text and "0 of 1" in text and "Because: K3 rows in order" in text
    assert text.splitlines()[-1].startswith("verdict: fail (0 of 1 as expected, ")
    assert markdown(record).splitlines()[-1].startswith("| K3") and render(record, quiet=True) == text.splitlines()[-1]


# --- sensitivity ------------------------------------------------------------------------------------------------------


def reaction(host) -> dict[str, bool]:
    return {found.kind: found.reacts for found in react(host, host.prefill(prompt(12)), Rule(), "float32")}


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        (SMALL, {"gated_delta", "conv"}),
        ("bamba", {"mamba2", "conv"}),
        ("lfm2", {"conv"}),
        ("minimax", {"lightning"}),
        ("llama", set()),
    ],
)
def test_a_model_reacts_to_each_kind_of_state_that_it_has(family, kinds):
    assert reaction(engine(family)) == dict.fromkeys(kinds, True)


def test_a_deaf_kind_is_insensitive_by_name_and_the_run_inconclusive():
    host = make_engine(SMALL)
    selftest._deaf("conv")(host)
    assert reaction(host) == {"gated_delta": True, "conv": False}
    record = check(host, [Item("p", prompt(12), tree=tree("random", 12))], Settings())
    assert record["exit_code"] == 2 and record["verdict"]["sensitive"] is False
    (calm,) = [kind for kind in record["sensitivity"] if not kind["reacts"]]
    assert calm["kind"] == "conv" and calm["moved"] <= calm["floor"]
    assert any(reason.startswith("insensitive: conv: ") for reason in record["verdict"]["reasons"])


def test_an_engine_that_cannot_read_zeros_is_not_called_insensitive():
    host = Faulty(engine(SMALL), supports=lambda wiring: None if wiring is None else "no")
    assert react(host, host.prefill(prompt(5)), Rule(), "float32") == ()


# --- states that are kept in another dtype ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "code"), [({"state_dtype": "bfloat16"}, 0), ({}, 1), ({"state_dtype": "float16"}, 1)]
)
def test_a_rounded_state_is_explained_if_the_engine_says_so(claims, code):
    host = engine(SMALL)
    rounded = Faulty(
        host, commit=keeps(inject.rounded, "recurrent"), describe=lambda: type(host).describe(host) | claims
    )
    item = Item("p", prompt(12), tree=tree("random", 8))
    record = check(rounded, [item], Settings(accept=("full",), controls=1, attribute=False))
    found = record["cases"][0]["commit"][0]["modes"]["tree_forked"]
    assert record["exit_code"] == code and found["bad"][0]["says"] == "state is rounded to bfloat16"
    assert ("explained: state is rounded to bfloat16" in (found["reason"] or "")) == (code == 0)
