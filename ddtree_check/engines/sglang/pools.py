"""What a model runner of SGLang has set aside: rows by buffer, and what a state slot holds. Imports nothing of SGLang.

Its own adapter and the recorder of a running server read the same attributes, by the names of 0.5.17.
"""

from __future__ import annotations

from typing import Any

KEYED = ("GDNAttnBackend", "KDAAttnBackend")  # keep a state as [heads, value, key]; transformers: [heads, key, value]


def reserved(runner) -> dict[str, dict[str, Any]]:
    """Return rows and slots that SGLang set aside, by buffer, in the form of `plan.plan`; spare rows are left out."""
    buffers_by_name: dict[str, dict[str, Any]] = {}
    requests, cache = getattr(runner, "req_to_token_pool", None), _cache(runner)
    for name, kind, pool in (
        ("key and value slots", "total", getattr(runner, "token_to_kv_pool_allocator", None)),
        ("request rows", "requests", requests),
        ("state slots", "requests", getattr(requests, "mamba_pool", None)),
    ):
        if getattr(pool, "size", None) is not None:
            buffers_by_name[name] = {kind: int(pool.size)}
    buffers = {"states": getattr(cache, "intermediate_ssm", None)}
    for number, window in enumerate(getattr(cache, "intermediate_conv_window", None) or ()):
        buffers["windows" + (f" {number}" if number else "")] = window
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers_by_name[f"intermediate {name}"] = {"per_request": int(buffer.shape[2])}
            buffers_by_name[f"requests with intermediate {name}"] = {"requests": int(buffer.shape[1]) - 1}
    if sizes := graph_rows(runner):
        buffers_by_name["verify graphs"] = {"sizes": sizes}
    return buffers_by_name


def _cache(runner):
    """Return SGLang's `MambaPool.State`, None for a model without recurrent layers."""
    requests = getattr(runner, "req_to_token_pool", None)
    return getattr(getattr(requests, "mamba_pool", None), "mamba_cache", None)


def graph_rows(runner) -> list[int]:
    """Return rows of each batch whose verify was captured as a CUDA graph."""
    batches = getattr(getattr(runner, "decode_cuda_graph_runner", None), "capture_bs", None) or ()
    return [int(batch) * int(runner.server_args.speculative_num_draft_tokens) for batch in batches]


def state_dtypes(runner) -> dict[str, str]:
    """Return state_dtype and conv_dtype; empty for a model without recurrent layers."""
    cache = _cache(runner)
    if cache is None:
        return {}
    names = {"state_dtype": cache.temporal, "conv_dtype": cache.conv[0]}
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in names.items()}


def slot_bytes(runner) -> int:
    """Return the bytes of one state slot over all layers; 0 without recurrent layers."""
    cache = _cache(runner)
    if cache is None:
        return 0
    return sum(x.numel() // x.shape[1] * x.element_size() for x in (*cache.conv, cache.temporal))


def slot_tensors(runner, slot) -> list:
    """Return copies of what a state slot holds, slot an integer tensor [1] of the pool's device: the windows
    [layers, ...] and the state [layers, ...], made on the current stream without waiting for it."""
    cache = _cache(runner)
    return [tensor.index_select(1, slot.long())[:, 0] for tensor in (*cache.conv, cache.temporal)]


def channels(tensors, layers, backend: str | None) -> dict[int, dict[str, Any]]:
    """Return the windows and state of a slot (the last of `tensors`), by layer, in the form of `Engine.contents`.

    layers: layer of the model -> its row in the pool. backend: SGLang's class for the recurrent layers.
    """
    *windows, state = tensors
    by_layer: dict[int, dict[str, Any]] = {}
    for layer, row in layers.items():
        parts = by_layer.setdefault(int(layer), {})
        for number, window in enumerate(windows):
            window = window[row]  # [channels, inputs] but for KDA; a window has few inputs and many channels
            oldest_first = window if window.shape[0] < window.shape[1] else window.transpose(0, 1)
            parts[f"conv.{number}" if number else "conv"] = oldest_first.clone()
        if state.numel():
            parts["recurrent"] = (state[row].transpose(-1, -2) if backend in KEYED else state[row]).clone()
    return by_layer
