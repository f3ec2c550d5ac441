"""Words and files ─► what `check` is given. The ways in which they can be wrong are a table in test_cli.py."""

from __future__ import annotations

import json
import shlex

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.base.options import whole_numbers
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.cli import main as cli
from ddtree_check.cli.commands import run as commands
from ddtree_check.flows import job
from ddtree_check.flows.job import Job
from tests import tiny

checkpoint = tiny.checkpoint


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": name, "token_ids": [place + 5, 7, 9]} for place, name in enumerate("abc")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def quick(checkpoint, prompts, **values) -> Job:
    settings = {"budgets": (3,), "length": 3, "controls": 1} | values.pop("settings", {})
    return Job(model=str(checkpoint), prompts=str(prompts), settings=settings, **values)


def test_default_prompts_are_those_of_the_package():
    assert [prompt.id for _, prompt in job.select_prompts(Job())] == [
        json.loads(line)["id"] for line in (fixtures_dir() / "prompts" / "code.jsonl").read_text().splitlines()
    ]
    assert len(job.select_prompts(Job(prompts="humaneval"))) == 164


def test_limit_and_only_keep_the_place_in_the_file(prompts):
    def chosen(**values):
        return [(place, prompt.id) for place, prompt in job.select_prompts(Job(prompts=str(prompts), **values))]

    assert chosen() == [(0, "a"), (1, "b"), (2, "c")]
    assert chosen(limit=2) == [(0, "a"), (1, "b")]
    assert chosen(only=("c", "a")) == [(0, "a"), (2, "c")]
    with pytest.raises(UsageError, match="only: no prompt 'c' among 2"):
        chosen(limit=2, only=("c",))


@pytest.mark.parametrize(("text", "numbers"), [("16", (16,)), ("16,64", (16, 64)), ("4, 2,4", (4, 2))])
def test_numbers(text, numbers):
    assert whole_numbers("budget", text) == numbers


@pytest.mark.parametrize("text", ["", "0", "-1", "4,", "x", "1.5", "4,0"])
def test_what_is_no_number(text):
    with pytest.raises(UsageError, match="budget: got"):
        whole_numbers("budget", text)


def test_a_command_makes_the_job_again(prompts, monkeypatch):
    made = Job(
        model="some model",
        weights="random",
        dtype="bfloat16",
        device="cpu",
        prompts=str(prompts),
        limit=3,
        only=("a", "b c"),
        draft="recorded:it's.jsonl",
        settings={"budgets": (4, 8), "seed": 3, "order": "depth", "require": ("linear",), "ar": "batched"},
    )
    seen = []
    monkeypatch.setattr(commands, "run", lambda job, progress: seen.append(job) or tiny.hand_record("a/3"))
    command, *line = shlex.split(made.command())
    assert command == "ddtree-check" and cli.main(line) == 0
    assert seen == [made]


def test_a_run_is_the_same_alone_or_among_others(checkpoint, prompts):
    """What lets the plugin repeat one case: a prompt's figures do not depend on its neighbours."""
    whole = job.run(quick(checkpoint, prompts))
    alone = job.run(quick(checkpoint, prompts, only=("b",)))
    assert [case["id"] for case in whole["cases"]] == ["a/3", "b/3", "c/3"]
    assert alone["cases"] == [whole["cases"][1]]
    other = job.run(quick(checkpoint, prompts, only=("b",), settings={"seed": 1, "acceptance": 0.0}))
    assert other["cases"][0]["tree"] != alone["cases"][0]["tree"]


def test_case_ids_are_those_of_the_run(checkpoint, prompts):
    found = quick(checkpoint, prompts, limit=2, settings={"budgets": (2, 3)})
    ids = [case["id"] for case in job.run(found)["cases"]]
    assert job.case_ids(found) == {"a": ids[:2], "b": ids[2:]}


def test_recorded_drafts_belong_to_prompts_by_place(checkpoint, prompts, tmp_path):
    drafts = tmp_path / "drafts.jsonl"
    lines = [{"tree": {"tokens": [None, 20 + place], "parents": [-1, 0]}} for place in range(3)]
    drafts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = job.run(quick(checkpoint, prompts, only=("c",), draft=f"recorded:{drafts}"))
    assert record["cases"][0]["tree"]["tokens"][1:] == [22]
    assert record["settings"]["draft"] == "recorded"


def test_one_tree_for_every_prompt(checkpoint, prompts, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text('{"tokens": [4, 1, 2, 3], "parents": [-1, 0, 0, 1]}')
    record = job.run(quick(checkpoint, prompts, limit=2, tree=str(path)))
    assert [case["id"] for case in record["cases"]] == ["a/tree", "b/tree"]
    assert [case["tree"]["tokens"] for case in record["cases"]] == [[4, 1, 2, 3]] * 2


def test_progress_is_told_and_no_text_is_recorded_without_a_tokenizer(checkpoint, prompts):
    told = []
    record = job.run(quick(checkpoint, prompts, limit=1), lambda *step: told.append(step))
    assert told[0] == (0, 1, f"looking for {checkpoint}")
    assert told[1][2].startswith("loading ") and told[-1] == (1, 1, "done")
    assert record["tokens"] == {} and record["model"]["tokenizer"] is None


def test_the_text_of_every_token_is_in_the_record():
    record = job.run(Job(limit=1, settings={"budgets": (4,), "length": 4, "controls": 1}))
    case = record["cases"][0]
    ids = {node["token"] for node in case["nodes"]} | {node["tree_unforked"]["argmax"] for node in case["nodes"]}
    ids |= {node["ar"]["argmax"] for node in case["nodes"]} | {walk["bonus"] for walk in case["acceptance"].values()}
    assert {str(token) for token in ids} <= record["tokens"].keys()
    assert json.loads(json.dumps(record)) == record


def test_the_libraries_talk_again_afterwards(checkpoint, prompts):
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as library

    library.set_verbosity_info()
    before = library.get_verbosity(), hub.get_verbosity(), library.is_progress_bar_enabled()
    try:
        with pytest.raises(UsageError):
            job.run(quick(checkpoint, prompts, dtype="int8"))
        assert (library.get_verbosity(), hub.get_verbosity(), library.is_progress_bar_enabled()) == before
    finally:
        library.set_verbosity_warning()
