"""Model folders that somebody prepared: nothing of theirs runs, nothing outside is read, no size takes the machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
import time

import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.base.resources import DRAFTER, EMBEDDED, fixtures_dir
from ddtree_check.cli import main as cli
from ddtree_check.engines import dflash
from ddtree_check.engines.checkpoint import check_folder, check_sizes
from ddtree_check.engines.transformers import loading
from ddtree_check.flows.job import Job, _tokenizer
from tests.limits import within

MODEL, DRAFT = (fixtures_dir() / "models" / name for name in (EMBEDDED, DRAFTER))
CODE = "open('ran', 'w').close()\nclass A:\n    pass\n"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def edit(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))
    return folder


def refused(folder, line, load=None, **settings):
    with pytest.raises(UsageError, match=line) as caught:
        (load or loading.load_model)(str(folder), **({} if load else {"device": "cpu"} | settings))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("weights", ["real", "random"])
def test_code_of_a_folder_never_runs_whatever_stdin_says(folder, tmp_path, weights, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.chdir(tmp_path)
    for name in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(CODE)
    mapped = {"AutoConfig": "configuration_x.A", "AutoModelForCausalLM": "modeling_x.A"}
    edit(folder, auto_map=mapped, model_type="x_of_ones_own")
    edit(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.A", None]}, tokenizer_class="A")
    refused(folder, "cannot be read", weights=weights)
    loading.load_tokenizer(str(folder))
    edit(folder, model_type="qwen3_5_text")  # a class that the library has goes before the one that is mapped
    model, _ = loading.load_model(str(folder), weights=weights, device="cpu")
    assert type(model).__module__.startswith("transformers.") and not (tmp_path / "ran").exists()


def outside_link(folder, outside):
    (folder / "model.safetensors").rename(outside / "theirs")
    (folder / "model.safetensors").symlink_to(outside / "theirs")


def outside_index(folder, outside):
    (folder / "model.safetensors").rename(outside / "theirs.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../theirs.safetensors"}})
    )


def absolute_index(folder, outside):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": str(outside / "x")}}))


def linked_shard(folder, outside):
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(outside / "theirs")
    (folder / "shards" / "a.safetensors").symlink_to(outside / "theirs")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shards/a.safetensors"}}))


def pipe(folder, outside):
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def pipe_of_templates(folder, outside):
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "a.jinja")


def device(folder, outside):
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("/dev/zero")


def a_socket(folder, outside):
    here = os.getcwd()
    os.chdir(folder)  # a socket's name is short
    socket.socket(socket.AF_UNIX).bind("s")
    os.chdir(here)


def odd_index(folder, outside):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')


def deep_index(folder, outside):
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


def adapter(folder, outside):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(outside)}))


FOLDERS = [
    (outside_link, "leads to .*/theirs, expected a file of the folder itself"),
    (outside_index, "is no index of weights .ValueError: a file outside its folder"),
    (absolute_index, "is no index of weights .ValueError: a file outside its folder"),
    (linked_shard, "leads to .*/theirs, expected a file of the folder itself"),
    (pipe, "tokenizer.json is a pipe, socket or device"),
    (pipe_of_templates, "a.jinja is a pipe, socket or device"),
    (device, "generation_config.json leads to /dev/zero"),
    (a_socket, "is a pipe, socket or device"),
    (odd_index, "is no index of weights .TypeError"),
    (deep_index, "is no index of weights .RecursionError"),
    (adapter, "is of an adapter, expected a whole checkpoint"),
]


@pytest.mark.parametrize(("damage", "line"), FOLDERS, ids=lambda value: getattr(value, "__name__", ""))
def test_nothing_outside_a_folder_is_read_and_nothing_waits(damage, line, folder, tmp_path):
    damage(folder, tmp_path)
    refused(folder, line)
    refused(folder, line, dflash.read_config)


def test_a_snapshot_of_the_hub_may_link_to_its_own_blobs(folder, tmp_path):
    home = tmp_path / "models--a--b"
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    snapshot = folder.rename(home / "snapshots" / "0123")
    (snapshot / "model.safetensors").rename(home / "blobs" / "feed")
    (snapshot / "model.safetensors").symlink_to("../../blobs/feed")
    check_folder(snapshot)
    (snapshot / "config.json").rename(tmp_path / "theirs")
    (snapshot / "config.json").symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="leads to"):
        check_folder(snapshot)


SIZES = [
    ({"num_hidden_layers": 300_000}, "num_hidden_layers is 300000, expected at most 512"),
    ({"num_hidden_layers": 10**20}, "num_hidden_layers is 100000000000000000000, expected at most 512"),
    ({"layer_types": ["full_attention"] * 300_000}, r"layer_types is \['full_attention', .* expected at most 512"),
    ({"head_dim": 2**32 + 64}, "head_dim is 4294967360, expected at most 1048576"),
    ({"text_config": {"hidden_size": 10**9}}, "text_config.hidden_size is 1000000000"),
    ({"num_hidden_layers": 512, "num_experts": 4096}, "512 layers with 4096 parts each"),
    ({"rope_parameters": {"rope_theta": 2**70}}, "rope_parameters.rope_theta is 1180591620717411303424"),
]


@pytest.mark.parametrize("weights", ["real", "random"])
@pytest.mark.parametrize(("changes", "line"), SIZES, ids=[str(n) for n in range(len(SIZES))])
def test_a_size_that_no_model_has_is_refused_before_anything_is_built(changes, line, weights, folder):
    with within(seconds=5, mebibytes=64):
        refused(edit(folder, **changes), line, weights=weights)


def test_published_sizes_are_within_bounds():
    config = {"num_hidden_layers": 126, "n_routed_experts": 512, "hidden_size": 53248, "vocab_size": 256_000}
    check_sizes(config | {"max_position_embeddings": 10_485_760, "head_dim": 576, "seed": 2**40}, "config.json")


NO_MODEL = [
    {"hidden_size": -128},
    {"hidden_size": 0},
    {"hidden_size": None},
    {"num_attention_heads": "four"},
    {"num_key_value_heads": 0},
    {"dtype": 0.5},
    {"layer_types": ["no_such_layer"] * 8},
    {"hidden_act": "no_such_act"},
    {"rope_parameters": {"rope_type": "no_such_rope"}},
    {"intermediate_size": [1]},
    {"pad_token_id": 10**9},
]


@pytest.mark.parametrize("weights", ["real", "random"])
@pytest.mark.parametrize("changes", NO_MODEL, ids=str)
def test_a_config_that_makes_no_model_is_one_line(changes, weights, folder):
    with within(seconds=10, mebibytes=256):
        refused(edit(folder, **changes), "model: .*expected|model: .*cannot be loaded", weights=weights)


@pytest.mark.parametrize("changes", [{"vocab_size": 2**22}, {"intermediate_size": 2**20}])
def test_weights_are_held_against_the_config_before_anything_is_allocated(changes, folder):
    with within(seconds=10, mebibytes=256):
        refused(edit(folder, **changes), "its weight files hold 2[0-9]*: they lack weights")


DRAFTERS = [
    ({"intermediate_size": 1_000_120}, "is .*, expected .1000120, 128. by its config.json|by its config.json"),
    ({"head_dim": 1_000_064}, "by its config.json"),
    ({"head_dim": 2**40}, "head_dim is 1099511627776, expected at most"),
    ({"num_hidden_layers": 300_000}, "expected at most 512"),
    ({"dflash_config": [-1]}, "dflash_config is .-1., expected an object"),
    ({"architectures": 16}, "architectures is 16, expected a list of names"),
    ({"hidden_act": "not_run"}, "makes no network|cannot be read"),
    ({"num_key_value_heads": 2**64}, "expected at most"),
    ({"num_attention_heads": 0}, "expected"),
    ({"rope_theta": "a"}, "makes no network|cannot be read"),
    ({"head_dim": -2}, "expected"),
    ({"final_logit_softcapping": "a"}, "final_logit_softcapping is 'a', expected a finite number"),
]


class Target:
    hidden_size, vocab_size, layers, max_length, dtype, device = 128, 1024, range(8), None, torch.float32, "cpu"


@pytest.mark.parametrize(("changes", "line"), DRAFTERS, ids=[str(n) for n in range(len(DRAFTERS))])
def test_a_drafters_config_takes_no_memory(changes, line, tmp_path):
    folder = edit(shutil.copytree(DRAFT, tmp_path / "drafter"), **changes)
    with within(seconds=10, mebibytes=256):
        refused(folder, line, lambda source: dflash.load(source, Target()))


ENDS = {  # what loading a tokenizer does
    "panic": "raise type('PanicException', (BaseException,), {})('index out of bounds')",
    "abort": "__import__('faulthandler').disable(); os.abort()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_tokenizer_that_brings_its_process_down_is_one_line(end, folder, tmp_path, monkeypatch, capfd):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a"}\n')
    monkeypatch.setattr(loading, "load_tokenizer", lambda _: exec(ENDS[end]))
    began = time.monotonic()
    assert cli.main(["compare", "--model", str(folder), "--prompts", str(prompts)]) == 3
    error = capfd.readouterr().err
    assert error.startswith("ddtree-check: tokenizer: ") and error.count("\n") == 1 and time.monotonic() - began < 20


def test_random_weights_of_a_built_in_shape_ask_nobody(tmp_path, monkeypatch):
    """Not for a tokenizer either: text is read by the embedded one."""
    asked = []
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: asked.append(source) or str.split)
    chosen = Job(model="qwen3.6-27b", weights="random")
    assert _tokenizer(chosen, loading.resolve(chosen.model), True)[1] == "embedded"
    assert asked == [loading.resolve(None)]


@pytest.mark.parametrize("words", ["--budget 100000000000000000000", "--budget 65537", "--length 10000000000"])
def test_a_budget_that_no_tree_has_is_refused(words, capsys):
    assert cli.main(["compare", *words.split()]) == 3
    assert "at most 65536" in capsys.readouterr().err
