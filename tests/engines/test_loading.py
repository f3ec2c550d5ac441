"""Names, paths and hub ids: checkpoints in the forms in which they are published, and what is wrong with bad ones."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from ddtree_check.base.errors import UsageError
from ddtree_check.engines.transformers import loading
from ddtree_check.model.families import ALIASES
from ddtree_check.model.small_shapes import SHAPES
from ddtree_check.model.wiring import FORKED
from tests.models import off, prompt, tree

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A tiny Qwen3.5 checkpoint as it is published: a vision tower, shards, multi-token-prediction keys."""
    folder = tmp_path_factory.mktemp("multimodal")
    text = {key: value for key, value in SHAPES["qwen3_5_text"].items()}
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = sorted(set(index["weight_map"].values()))[-1]
    weights = load_file(folder / shard) | {"mtp.layers.0.input_layernorm.weight": torch.ones(64)}
    save_file(weights, folder / shard, metadata={"format": "pt"})
    index["weight_map"]["mtp.layers.0.input_layernorm.weight"] = shard
    index_file.write_text(json.dumps(index))
    assert len(set(index["weight_map"].values())) > 2
    return folder, Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def hub(multimodal, tmp_path, monkeypatch):
    """A hub cache that holds it under the id of the alias, and no way out."""
    folder, _ = multimodal
    home = tmp_path / "hub" / "models--Qwen--Qwen3.6-27B"
    shutil.copytree(folder, home / "snapshots" / REVISION)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("by", ["alias", "hub-id", "path"])
def test_a_multimodal_checkpoint_loads_as_its_text_model(multimodal, hub, by):
    folder, whole = multimodal
    name = {"alias": "qwen3.6-27b", "hub-id": "Qwen/Qwen3.6-27B", "path": str(folder)}[by]
    model, provenance = loading.load_model(name, dtype="float32", device="cpu")
    assert isinstance(model, Qwen3_5ForCausalLM) and model.dtype == torch.float32
    assert provenance["model_type"] == "qwen3_5_text" and provenance["weights"] == "real"
    assert provenance["parameters"] == sum(p.numel() for p in model.parameters())
    assert provenance["fingerprint"] == loading.fingerprint(folder)
    assert provenance["revision"] == (None if by == "path" else REVISION)
    tokens = torch.tensor([prompt(12)])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)


def test_the_text_model_inside_a_multimodal_checkpoint_passes(multimodal):
    from ddtree_check.engines.transformers.engine import TransformersEngine

    model, _ = loading.load_model(str(multimodal[0]), dtype="float32", device="cpu")
    host, case = TransformersEngine(model), tree("random", 16)
    prefix = host.prefill(prompt(9))
    ar = host.decode(prefix, case)
    assert (off(ar, host.verify(prefix, case, FORKED).logits) <= 1e-4 * ar.std(-1)).all()


def test_the_fingerprint_tells_checkpoints_apart(multimodal, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(multimodal[0], folder)
    before = loading.fingerprint(folder)
    assert before == loading.fingerprint(multimodal[0])
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert loading.fingerprint(folder) != before


def damage_truncated(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])


def damage_header(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(b"\xff" * 64)


def damage_config(folder):
    (folder / "config.json").write_text("{not json")


def damage_type(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_seventeen"}))


def damage_missing_key(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(key for key in index["weight_map"] if key.endswith("in_proj_qkv.weight"))
    shard = folder / index["weight_map"].pop(name)
    weights = load_file(shard)
    del weights[name]
    save_file(weights, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_no_weights(folder):
    for path in folder.glob("model*"):
        path.unlink()


def damage_quantised(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_truncated, "corrupt safetensors|cannot be loaded"),
        (damage_header, "corrupt safetensors|cannot be loaded"),
        (damage_config, "cannot be read"),
        (damage_type, "gpt_seventeen"),
        (damage_missing_key, "lacks 1 weights, first .*in_proj_qkv"),
        (damage_no_weights, "Three ways on"),
        (damage_quantised, "bitsandbytes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_checkpoint_is_one_clear_line(multimodal, tmp_path, damage, says):
    folder = tmp_path / "bad"
    shutil.copytree(multimodal[0], folder)
    damage(folder)
    with pytest.raises(UsageError, match=says) as caught:
        loading.load_model(str(folder), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3.6-27b", "no/such-model", "no-such-model", "/no/such/folder"])
def test_missing_weights_name_three_ways_on(monkeypatch, tmp_path, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        loading.load_model(name)
    text = str(caught.value)
    assert all(way in text for way in ("download", "--model", "--weights random")) and "\n" not in text


def test_random_weights_at_the_alias_shape_need_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = loading.load_config("qwen3.6-27b", loading.resolve("qwen3.6-27b"), "random")
    assert (config.num_hidden_layers, config.layer_types.count("linear_attention"), config.vocab_size) == (
        64,
        48,
        248320,
    )
    assert 26.5e9 < loading.count_parameters(config) < 28e9
    with pytest.raises(UsageError, match=r"memory: qwen3.6-27b in float32 needs 10\d\.\d GiB"):
        loading.load_model("qwen3.6-27b", weights="random", dtype="float32", device="cpu")


def test_random_models_depend_on_the_seed_and_on_nothing_else():
    config = AutoConfig.for_model("qwen3_5_text", **SHAPES["qwen3_5_text"])

    def build(seed):
        return loading.build_random(config, dtype=torch.float32, device=torch.device("cpu"), seed=seed).state_dict()

    torch.manual_seed(1)
    one = build(3)
    torch.manual_seed(2)
    again, other = build(3), build(4)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_aliases_are_resolved_in_any_case_and_paths_win_nothing():
    assert loading.resolve("Qwen3.6-27B") == ALIASES["qwen3.6-27b"].hub_id == "Qwen/Qwen3.6-27B"
    assert loading.resolve(None) == loading.resolve("tiny-qwen3_5")
    assert loading.resolve("some/other") == "some/other"


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", torch.bfloat16), ("float64", torch.float64), ("fp16", torch.float16), (None, torch.float32)],
)
def test_dtypes_by_name(given, dtype):
    assert loading.parse_dtype(given, torch.float32) == dtype


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: loading.parse_dtype("int8", torch.float32), "dtype: got 'int8'"),
        (lambda: loading.pick_device("cuda:99"), "device: 'cuda:99' cannot be used"),
        (lambda: loading.load_model(None, weights="mine"), "weights: got 'mine'"),
    ],
)
def test_bad_settings(call, says):
    with pytest.raises(UsageError, match=says):
        call()


def test_a_built_in_shape_asks_nobody(monkeypatch):
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_: pytest.fail("asked for a file"))
    assert loading.load_config("qwen3.6-27b", "Qwen/Qwen3.6-27B", "random").hidden_size == 5120


def test_an_empty_name_is_no_name():
    with pytest.raises(UsageError, match="expected a name, a path or a hub id"):
        loading.resolve(" ")
