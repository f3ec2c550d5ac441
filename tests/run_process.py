"""A run that is killed at any of its steps: python -m tests.run_process VERB FOLDER FIRST STRIDE

VERB is generate, with a journal, or sweep. A step is an opening or renaming of a file; a kill is SIGKILL just before
it, as in `gate_process`. The record, if there is one, is whole. So is that of the same command run again, which leaves
nothing else behind. Prints {"steps": of a run that is not killed, "killed": how many were, "wrong": [...]}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from ddtree_check.cli.main import main as run
from ddtree_check.report.record import load_record
from tests import own_engine
from tests.gate_process import Steps, forked, fresh

OPTIONS = {
    "generate": ("--rounds", "2", "--budget", "3", "--journal", "{folder}/journal.jsonl"),
    "sweep": ("--rounds", "2", "--budgets", "2", "--blocks", "3"),
}
OF_ONE_RUN = ("created", "command", "pass_ms", "tokens_per_second", "answers")


class Whole(own_engine.Steps):
    """An engine that rounds can be run on."""

    def commit(self, verified, node):
        return self.standing(verified.states[node])


def once(verb: str, folder: Path, last: int | None = None, count: Path | None = None) -> int:
    """Run the command; its steps are counted into a file."""
    words = [verb, "--engine", "tests.run_process:Whole", "--prompts", f"{folder}/p.jsonl"]
    words += ["--json", f"{folder}/r.json"]
    words += [word.format(folder=folder) for word in OPTIONS[verb]]
    steps = Steps(last)
    sys.addaudithook(steps)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = run([*words, "--quiet"])
    seen = steps.count
    if count:
        count.write_text(str(seen))
    return code


def outcome(folder: Path) -> object:
    """Return the record without what differs from run to run."""

    def same(value: object) -> object:
        if isinstance(value, dict):
            return {key: same(inner) for key, inner in value.items() if key not in OF_ONE_RUN}
        return [same(inner) for inner in value] if isinstance(value, list) else value

    assert {path.name for path in folder.iterdir()} <= {"gate.toml", "p.jsonl", "r.json", "journal.jsonl"}
    return same(load_record(folder / "r.json", rounds=True))


def prepared(folder: Path) -> Path:
    lines = [{"id": str(number), "token_ids": [5 + number, 6]} for number in range(3)]
    (fresh(folder) / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def main() -> int:
    verb, root, first, stride = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    code = once(verb, prepared(root / "warm"))  # what is imported late is imported
    whole = prepared(root / "whole")
    assert forked(lambda: once(verb, whole, count=root / "count")) == code
    steps, right, wrong = int((root / "count").read_text()), outcome(whole), []
    todo = range(first, steps + 1, stride)
    for step in todo:
        folder = prepared(root / "killed")
        ended = forked(lambda: once(verb, folder, step))  # noqa: B023
        if ended != -signal.SIGKILL:
            wrong.append(f"step {step}: ended {ended}, expected a kill")
        try:
            if (folder / "r.json").exists():
                load_record(folder / "r.json", rounds=True)
            assert forked(lambda: once(verb, folder)) == code, "run again"  # noqa: B023
            assert outcome(folder) == right, "outcome"
        except Exception as error:
            wrong.append(f"step {step}: {type(error).__name__}: {error}")
    print(json.dumps({"steps": steps, "killed": len(todo), "wrong": wrong}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
