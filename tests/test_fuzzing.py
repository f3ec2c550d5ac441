"""What nobody wrote is read or refused in one line, in time and within memory; runs that are killed at any step."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest

from tests import fuzzing, run_process
from tests.gate_process import forked

TORCH = ("model", "drafter", "tokenizer", "judged")


@pytest.fixture
def found(tmp_path):
    """Return what a module prints as it runs in a fork of this process; before: lines to run in it first."""

    def run(module, *words: object, before: str = "") -> dict:
        def work() -> int:
            sys.argv = [module.__name__, *map(str, words)]
            with (tmp_path / "printed").open("w") as file, contextlib.redirect_stdout(file):
                exec(before, vars(module))
                return module.main()

        assert forked(work) == 0
        return json.loads((tmp_path / "printed").read_text())

    return run


@pytest.mark.parametrize("parser", sorted(fuzzing.PARSERS.keys() - {*TORCH, "pages"}))
def test_some_inputs_are_read_or_refused(parser, found):
    counts = found(fuzzing, parser, 200)
    assert counts["wrong"] == {} and counts["read"] > 0 < counts["refused"]


BROKEN = {  # how a parser fails: what is seen
    "raise KeyError('a')": "KeyError",
    "raise UsageError('two\\nlines')": "no line",
    "import time; time.sleep(60)": "Late",
    "bytearray(1 << 31)": "MemoryError",
    "raise SystemExit(0)": "SystemExit",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_parser_that_fails_is_found_out(broken, found):
    """The twin: a parser of trees that fails on every input but the good ones."""
    before = "SECONDS = 1\ngood = [as_json(x) for x in (TREE, ROUND, PATHS)]\ndef read(path):\n"
    before += f"    if path.read_bytes() not in good:\n        {broken}\n"
    before += "PARSERS['tree'] = (*PARSERS['tree'][:3], read)\n"
    counts = found(fuzzing, "tree", 3, before=before)
    assert counts["wrong"] and {kind.split(",")[0] for kind in counts["wrong"]} == {BROKEN[broken]}


@pytest.mark.slow
@pytest.mark.parametrize("parser", sorted(fuzzing.PARSERS))
def test_20000_inputs_are_read_or_refused(parser, found):
    counts = found(fuzzing, parser, 20_000, 1)
    assert counts["wrong"] == {} and counts["read"] > 0 < counts["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "sweep"])
def test_a_kill_at_every_step_of_a_run_leaves_whole_files_and_the_same_record(verb, tmp_path, found):
    """In the midst of every write; the gate's are in tests/gate."""
    counts = found(run_process, verb, tmp_path, 1, 1)
    assert counts["wrong"] == [] and counts["killed"] == counts["steps"] > 5
