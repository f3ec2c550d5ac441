"""What nobody wrote is read or refused in one line, in time and within memory; runs that are killed at any step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fuzzing

REPO = Path(__file__).resolve().parents[1]
TORCH = ("model", "drafter", "tokenizer", "judged")


def found(module: str, *words: object, before: str = "") -> dict:
    """Return what a module prints as it runs in a process of its own; before: lines to run first."""
    code = f"import sys\nfrom {module} import *\nimport {module} as module\n{before}\nsys.exit(module.main())"
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("parser", sorted(fuzzing.PARSERS.keys() - {*TORCH, "pages"}))
def test_some_inputs_are_read_or_refused(parser):
    counts = found("tests.fuzzing", parser, 200)
    assert counts["wrong"] == {} and counts["read"] > 0 < counts["refused"]


BROKEN = {  # how a parser fails: what is seen
    "raise KeyError('a')": "KeyError",
    "raise UsageError('two\\nlines')": "no line",
    "import time; time.sleep(60)": "Late",
    "bytearray(1 << 31)": "MemoryError",
    "raise SystemExit(0)": "SystemExit",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_parser_that_fails_is_found_out(broken):
    """The twin: a parser of trees that fails on every input but the good ones."""
    before = "module.SECONDS = 1\ngood = [as_json(x) for x in (TREE, ROUND, PATHS)]\ndef read(path):\n"
    before += f"    if path.read_bytes() not in good:\n        {broken}\n"
    before += "PARSERS['tree'] = (*PARSERS['tree'][:3], read)\n"
    counts = found("tests.fuzzing", "tree", 3, before=before)
    assert counts["wrong"] and {kind.split(",")[0] for kind in counts["wrong"]} == {BROKEN[broken]}


@pytest.mark.slow
@pytest.mark.parametrize("parser", sorted(fuzzing.PARSERS))
def test_20000_inputs_are_read_or_refused(parser):
    counts = found("tests.fuzzing", parser, 20_000, 1)
    assert counts["wrong"] == {} and counts["read"] > 0 < counts["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["generate", "sweep"])
def test_a_kill_at_every_step_of_a_run_leaves_whole_files_and_the_same_record(verb, tmp_path):
    """In the midst of every write; the gate's are in tests/gate."""
    counts = found("tests.run_process", verb, tmp_path, 1, 1)
    assert counts["wrong"] == [] and counts["killed"] == counts["steps"] > 5
