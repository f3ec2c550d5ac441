"""What SGLang's pools hold, in the form that traces and commits are compared in."""

from types import SimpleNamespace as Space

import pytest
import torch

from ddtree_check.engines.sglang import pools

HEADS, KEY, VALUE, CHANNELS, WINDOW = 2, 3, 5, 7, 3


@pytest.mark.parametrize(
    ("backend", "state", "window"),
    [
        pytest.param("GDNAttnBackend", (HEADS, VALUE, KEY), (CHANNELS, WINDOW), id="delta-rule"),
        pytest.param("KDAAttnBackend", (HEADS, VALUE, KEY), (WINDOW, CHANNELS), id="kda-has-its-window-the-other-way"),
        pytest.param("Mamba2AttnBackend", (HEADS, KEY, VALUE), (CHANNELS, WINDOW), id="mamba2-as-it-is"),
    ],
)
def test_a_slot_reads_as_transformers_has_it(backend, state, window):
    layers, slots = 2, 4
    temporal, conv = torch.randn(layers, slots, *state), torch.randn(layers, slots, *window)
    runner = Space(
        req_to_token_pool=Space(mamba_pool=Space(mamba_cache=Space(conv=[conv], temporal=temporal), size=slots - 1)),
        token_to_kv_pool_allocator=Space(size=9),
    )
    tensors = pools.slot_tensors(runner, torch.tensor([2], dtype=torch.int32))
    conv[:, 2], temporal[:, 2] = 0, 0  # what goes on in the slot does not reach the copies
    found = pools.channels(tensors, {1: 0, 5: 1}, backend)
    assert list(found) == [1, 5]
    for row, own in enumerate(found.values()):
        assert own["recurrent"].shape == (HEADS, KEY, VALUE) and own["conv"].shape == (WINDOW, CHANNELS)
        right = tensors[1][row] if backend == "Mamba2AttnBackend" else tensors[1][row].mT
        assert torch.equal(own["recurrent"], right)
        assert torch.equal(own["conv"], tensors[0][row] if backend == "KDAAttnBackend" else tensors[0][row].T)
    assert pools.slot_bytes(runner) == layers * (HEADS * KEY * VALUE + CHANNELS * WINDOW) * 4
    assert pools.state_dtypes(runner) == {"state_dtype": "float32", "conv_dtype": "float32"}


def test_a_model_without_recurrent_layers_has_no_states():
    runner = Space(req_to_token_pool=Space(size=4), token_to_kv_pool_allocator=Space(size=9))
    assert pools.slot_bytes(runner) == 0 and pools.state_dtypes(runner) == {}
    assert pools.reserved(runner) == {"key and value slots": {"total": 9}, "request rows": {"requests": 4}}
