"""The checkpoint that SGLang's own drafters get, the comparison of its blocks with ours, and a defect's cause."""

import json
import shutil
from types import SimpleNamespace as Space

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.sglang_drafts import DRAFTER, MODEL, blocks, checkpoint, marginals
from benchmarks.sglang_server import cause
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.engines import dflash
from ddtree_check.engines.registry import load_engine
from ddtree_check.engines.transformers import loading
from ddtree_check.trace.write import TraceWriter
from tests.models import prompt

LENGTH = 15


@pytest.mark.parametrize("other", [None, 4], ids=["our-own-blocks", "one-token-of-one-block-changed"])
def test_a_block_that_is_not_ours_is_counted(tmp_path, other):
    live = load_engine("transformers", MODEL, dtype="float32")
    drafter = dflash.load(DRAFTER, live)
    with TraceWriter(tmp_path / "t", engine="sglang", model="m", dtype="float32", vocab_size=live.vocab_size) as trace:
        for seed in range(2):
            context = Space(prompt_tokens=prompt(20, seed), tree=Space(tokens=[7]))
            block = marginals(live, drafter, context, LENGTH).argmax(-1).tolist()
            if seed and other is not None:
                block[other] = (block[other] + 1) % live.vocab_size
            step = trace.step(str(seed), context.prompt_tokens, [7, *block], range(-1, LENGTH))
            step.add("linear", np.zeros((LENGTH + 1, live.vocab_size), np.float32))
            step.write()
    out = tmp_path / "blocks.json"
    assert blocks(Space(traces=str(tmp_path), limit=9, out=str(out))) == 0
    (found,) = json.loads(out.read_text()).values()
    changed = other is not None
    assert (found["blocks"], found["equal"], found["other"]) == (2, 2 - changed, int(changed))
    assert (found["tokens"], found["equal_tokens"]) == (2 * LENGTH, 2 * LENGTH - changed)
    assert not changed or found["largest_margin"] > 0


def test_the_multimodal_form_holds_the_same_text_model(tmp_path):
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([{"prompt": prompt(9), "tokens": prompt(6, 1)}]))
    assert checkpoint(Space(texts=str(texts), out=str(tmp_path / "m"), steps=1)) == 0
    right, _ = loading.load_model(MODEL, dtype="float32", device="cpu")
    for folder in (tmp_path / "m", tmp_path / "m" / "text"):
        held = load_file(folder / "model.safetensors")
        layer = {name for name in held if name.startswith("mtp.")}
        assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= layer
        assert len(held) - len(layer) == len(load_file(fixtures_dir() / "models" / MODEL / "model.safetensors"))
        found, _ = loading.load_model(str(folder), dtype="float32", device="cpu")
        ids = torch.tensor([prompt(12)])
        with torch.no_grad():
            assert torch.equal(found(ids).logits, right(ids).logits)


def test_a_request_behind_a_prefix_hit_went_on_from_the_state_one_verify_too_far(tmp_path):
    """`text-only-prefix-cache-with-overlap`, two steps of a real server: off by half a std from the right state, and by
    no more than bf16 rounds from the one that the cached request had after its next verify."""
    folder = tmp_path / "traces" / "rank0-1"
    folder.mkdir(parents=True)
    for name in ("prefix-hit", "prefix-hit-before"):
        shutil.copy(fixtures_dir() / "traces" / "sglang-0.5.17" / f"{name}.safetensors", folder)
    assert cause(Space(name=str(tmp_path), device="cpu")) == 0
    (found,) = json.loads((tmp_path / "cause.json").read_text())
    right, ahead = found["off"]
    assert found["cached"] == 86 and right > 0.4 and ahead < 0.05
