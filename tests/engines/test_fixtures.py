"""What comes with the package: the trained models are small, better than their baselines, and sensitive."""

import json

import pytest
import torch

from ddtree_check.base.resources import EMBEDDED, fixtures_dir
from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers import loading
from ddtree_check.engines.transformers.passes import Prefix
from ddtree_check.model.wiring import FORKED
from ddtree_check.tree.case import load_prompts
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import off

MODELS = ("tiny-qwen3_5", "tiny-mamba2-hybrid", "tiny-lfm2")


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    return request.param, load_engine("transformers", str(fixtures_dir() / "models" / request.param), dtype="float32")


def test_the_embedded_model_is_one_of_them():
    assert EMBEDDED in MODELS and loading.resolve(None).endswith(EMBEDDED)


def test_it_is_small_and_beats_the_counting_models(trained):
    folder = fixtures_dir() / "models" / trained[0]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 5_000_000
    found = json.loads((folder / "TRAINING.json").read_text())["evaluation"]
    assert found["loss_bfloat16"] < 0.6 * found["interpolated_trigram_loss"] < found["unigram_loss"]
    assert trained[1].model.config.dtype == torch.float32 and trained[1].vocab_size == 1024


def test_its_text_is_plainly_python(trained):
    """Greedy text after a class header: an indented body with definitions, not noise."""
    name, host = trained
    tokenizer = loading.load_tokenizer(str(fixtures_dir() / "models" / name))
    prefix = host.prefill(
        tokenizer("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def ")["input_ids"]
    )
    token, written = int(prefix.logits.argmax()), []
    for _ in range(40):
        written.append(token)
        logits, prefix = host.step(prefix, token)
        token = int(logits.argmax())
    text = tokenizer.decode(written)
    assert "(self" in text and "):\n        " in text, text


def test_every_recurrent_layer_moves_the_logits(trained):
    """Perturbing the window or the state of any one layer moves the logits well above the floor."""
    name, host = trained
    tokenizer = loading.load_tokenizer(str(fixtures_dir() / "models" / name))
    prompt = load_prompts(fixtures_dir() / "prompts" / "code.jsonl")[0]
    prefix = host.prefill(tokenizer(prompt.text)["input_ids"])
    probe = DraftTree.chain([int(prefix.logits.argmax()), 300, 17])
    right = host.decode(prefix, probe)
    noise = off(right, host.verify(prefix, probe, FORKED).logits).max()
    touched = 0
    for index, layer in enumerate(prefix.cache.layers):
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            for number, state in states.items():
                if state is None:
                    continue
                cache = host.caches.fork(prefix.cache)
                kind = "conv_states" if states is layer.conv_states else "recurrent_states"
                getattr(cache.layers[index], kind)[number].mul_(0.5)
                moved = off(right, host.decode(Prefix(cache, prefix.length, prefix.logits), probe)).max()
                assert moved >= 100 * noise, f"layer {index} {kind}: {moved:.2e}, noise {noise:.2e}"
                touched += 1
    assert touched >= 6


def test_prompts_are_there_and_distinct():
    code, human = (load_prompts(fixtures_dir() / "prompts" / f"{name}.jsonl") for name in ("code", "humaneval"))
    assert (len(code), len(human)) == (8, 164)
    assert len({prompt.text for prompt in code + human}) == 172
