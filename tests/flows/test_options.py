"""Options as data: a field of a group is an option at every door, and a value that goes in comes out again."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_check
from ddtree_check.base.errors import UsageError
from ddtree_check.base.options import VERBS, make, offered
from ddtree_check.cli import main as cli
from ddtree_check.cli.commands import run as commands
from ddtree_check.flows.job import DEFAULTS, RUN, Job, Stored, job_of
from ddtree_check.flows.settings import Settings
from ddtree_check.gate.config import SETTINGS, load_config
from ddtree_check.judge.rule import Rule
from ddtree_check.judge.sampling.processing import Sampling
from tests.test_plugin import OURS
from tests.tiny import hand_record

PACKAGE = Path(ddtree_check.__file__).parent
ANCHOR = "    acceptance: float = option(\n"  # a field of settings.Drafting
FIELD = '    colour: str = option("red", "The colour.", "COLOUR", choices=("red", "blue"), later=True)\n'

# What each door says of an option `colour`; the package is the one beside the script.
DOORS = """
import contextlib, io, json, sys
from pathlib import Path
from ddtree_check.cli.main import main
from ddtree_check.base.errors import UsageError
from ddtree_check.gate.config import load_config
from ddtree_check.flows.job import job_of
from ddtree_check.flows.settings import Settings

def asked(call):
    try:
        return call()
    except (UsageError, TypeError) as error:
        return f"refused: {error}"

def help():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["compare", "--help"])
    return text.getvalue()

Path("gate.toml").write_text('[matrix]\\n[settings]\\ncolour = "blue"\\n')
said = {
    "compare": help(),
    "gate": asked(lambda: load_config("gate.toml").cells[0].job.command()),
    "settings": asked(lambda: Settings(colour="blue").to_json()["colour"]),
    "wrong": asked(lambda: Settings(colour="green")),
    "command": job_of("compare", {"colour": "blue"}).command(),
}
Path("said.json").write_text(json.dumps(said))
"""
CONFTEST = """
from pathlib import Path
import ddtree_check.pytest_plugin as plugin

plugin.run = lambda job: Path("commands.txt").write_text(job.command()) and {"exit_code": 0}
"""


def doors(folder: Path, field: str) -> dict:
    """Return what every door of a copy of the package says whose group of drafting has one field more."""
    shutil.copytree(PACKAGE, folder / "ddtree_check", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "fixtures").symlink_to(PACKAGE.parent / "fixtures")
    source = folder / "ddtree_check" / "flows" / "settings.py"
    text = source.read_text()
    assert text.count(ANCHOR) == 1
    source.write_text(text.replace(ANCHOR, field + ANCHOR))
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "doors.py").write_text(DOORS)
    run = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(folder)}, "capture_output": True, "timeout": 120}
    done = subprocess.run([sys.executable, "doors.py"], **run)
    assert done.returncode == 0, done.stderr
    words = ["-m", "leakage", "-k", "verdict", "--ddtree-colour=blue", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *OURS, *words], **run)
    commands = folder / "commands.txt"
    said = commands.read_text() if commands.exists() else (done.stdout + done.stderr).decode()
    return json.loads((folder / "said.json").read_text()) | {"pytest": said}


def test_a_field_is_an_option_at_every_door(tmp_path):
    said = doors(tmp_path, FIELD)
    assert "--colour COLOUR" in said["compare"] and "The colour. Default: red." in said["compare"]
    assert said["settings"] == "blue" and said["wrong"] == "refused: colour: got 'green', expected red or blue"
    assert said["gate"] == "ddtree-check compare --budget 16 --colour blue"
    assert said["command"] == said["pytest"] == "ddtree-check compare --budget 16,64 --colour blue"


def test_without_the_field_no_door_has_it(tmp_path):
    said = doors(tmp_path, "")
    assert "--budget N,..." in said["compare"] and "colour" not in said["compare"]
    assert "unknown key 'colour'" in said["gate"]
    assert "unexpected keyword argument 'colour'" in said["settings"]
    assert "colour" not in said["command"]
    assert "unrecognized arguments: --ddtree-colour=blue" in said["pytest"]


# --- what goes in comes out -------------------------------------------------------------------------------------------


SAMPLES = {
    "draft": "ngram",
    "accept": ("full", "0-1"),
    "wiring": "state=flat",
    "engine_args": ("a=1", "b=c d"),
    "a list of texts": ("a b", "c"),
    "a list of whole numbers": (2, 3),
    "a whole number": 5,
    "a finite number": 0.5,
    "true or false": True,
    "a text": "some text",
}


def sample(each) -> object:
    """Return a value of an option that is not its default."""
    if not each.choices:
        return SAMPLES.get(each.name, SAMPLES[each.kind.noun])
    names = [name for name in each.choices if name != each.default]
    if isinstance(each.default, dict):
        return dict.fromkeys(names, 0.5)
    return tuple(names) if each.many else names[0]


@pytest.mark.parametrize("verb", VERBS)
def test_the_command_of_a_job_makes_the_job_again(verb, monkeypatch):
    """Every option of a verb at once, as a line that a shell splits."""
    every = [each for each in offered(verb, (*RUN, Stored)) if each.name not in ("trace", "tree")]
    values = {each.name: sample(each) for each in every}
    if verb == "generate":
        values["budgets"] = (2,)
    made, seen = job_of(verb, values), []
    assert {**vars(made), **made.settings, **(made.rounds or {})}.items() >= values.items()
    monkeypatch.setattr(commands, "run", lambda job, progress: seen.append(job) or hand_record("a/3"))
    command, *line = shlex.split(made.command())
    assert command == "ddtree-check" and cli.main(line) == 0
    assert seen == [made]


def test_false_goes_through_the_command_line(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "run", lambda job, progress: seen.append(job) or hand_record("a/3"))
    assert cli.main(shlex.split(job_of("compare", {"attribute": False}).command())[1:]) == 0
    assert seen[0].settings["attribute"] is False


def test_every_option_of_compare_is_a_key_of_the_gate(tmp_path):
    """Those that compare alone has are files, which the cases of a gate would share."""
    keys = {each.name for each in offered("compare", RUN)} - {"model", "engine", "prompts", "budgets", "dtype"}
    assert keys - {"weights", "draft"} == set(SETTINGS)
    assert {"batch", "accept", "rounds", "vocab_size", "factor", "temperature"} <= set(SETTINGS)
    path = tmp_path / "gate.toml"
    path.write_text(
        "[matrix]\n[settings]\nbatch = [1, 2]\nvocab_size = 250\naccept = ['full']\nmodes = ['linear']\nfactor = 5\n"
        "attribute = false\nbounds = {bfloat16 = 0.5}\n"
    )
    assert load_config(path).cells[0].job.command() == (
        "ddtree-check compare --budget 16 --accept full --no-attribute --vocab-size 250 --batch 1,2 --modes linear "
        "--factor 5 --bounds bfloat16=0.5"
    )


def test_settings_take_options_flat_and_hold_them_in_groups():
    settings = make(Settings, {"budgets": (4,), "temperature": 0.5, "factor": 3.0, "bounds": {"bfloat16": 0.5}})
    assert settings.sampling == Sampling(temperature=0.5) and settings.rule.factor == 3.0
    assert settings.rule.bounds == Rule().bounds | {"bfloat16": 0.5}
    record = settings.to_json()
    assert record["temperature"] == 0.5 and record["rule"]["factor"] == 3.0 and "sampling" not in record
    with pytest.raises(UsageError, match=r"^temprature: no name of Settings"):
        make(Settings, {"temprature": 1.0})
    with pytest.raises(UsageError, match=r"^temprature: no name of Settings"):
        Job(settings={"temprature": 1.0})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--factor", "-1"], "factor: got -1.0, expected a number of at least 0"),
        (["--bounds", "int8=1"], "bounds: got 'int8', expected some of float64, float32, bfloat16, float16"),
        (["--bounds", "0.5"], "bounds: got '0.5', expected pairs such as bfloat16=0.25"),
        (["--bounds", "bfloat16=nan"], "bounds: got {'bfloat16': nan}, expected a table of numbers of at least 0"),
        (["--pooled-prompts", "0"], "pooled-prompts: got 0, expected a number of at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_rule_that_is_none_is_refused(words, says, capsys):
    assert cli.main(["compare", *words]) == 3
    assert capsys.readouterr().err.startswith(f"ddtree-check: {says}")


def test_generate_takes_one_budget(capsys):
    assert cli.main(["generate", "--budget", "4,8"]) == 3
    assert capsys.readouterr().err == "ddtree-check: budget: got 4, 8, expected one number\n"


def test_help_shows_what_matters_first_and_the_rule_last(capsys):
    assert cli.main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    panels = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels[:6] == ["Arguments", "Model", "Prompts", "Draft trees", "Checks", "Output"]
    assert panels[-2:] == ["Rule of the verdict", "Options"]
    first = [line.split()[0] for line in text.partition("(more)")[0].splitlines() if line.startswith("  -")]
    assert 10 <= len(first) <= 14 and {"--model", "--prompts", "--budget", "--require", "--json"} <= set(first)
    for verb, values in DEFAULTS.items():
        cli.main([verb, "--help"])
        budgets = ",".join(map(str, values["budgets"]))
        assert f"Default: {budgets}." in " ".join(capsys.readouterr().out.split())
