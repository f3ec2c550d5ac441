"""SGLang's own verify kernels in the call form of `forms`, from an unmodified wheel; without a GPU, interpreted.

    pip install --no-deps sglang triton     (make test-kernels does, beside the environment)

On a CPU only the files of the kernels are read: bare packages stand in for `sglang`'s, so that none of their `__init__`
runs, and empty modules for the helpers that ask for a GPU. Elsewhere the installed SGLang is imported as it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
from pathlib import Path

import torch

from ..base.errors import UsageError
from . import interpreter
from .forms import CommitCall, ConvCall, DeltaCall, Mamba2Call

FILES = {  # entry: modules that may hold it, the newest layout first
    "causal_conv1d_update": ("sglang.kernels.ops.mamba.causal_conv1d_triton",),
    "fused_sigmoid_gating_delta_rule_update": (
        "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",  # 0.5.23
        "sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent",  # 0.5.17
    ),
    "selective_state_update": ("sglang.kernels.ops.mamba.triton_ops.mamba_ssm",),
    "extend_attention_fwd": ("sglang.kernels.ops.attention.extend_attention",),
    "fused_mamba_state_scatter_with_mask": ("sglang.kernels.ops.mamba.mamba_state_scatter_triton",),
}
NEEDS = "both: make test-kernels puts them into .kernels (PYTHONPATH=.kernels), or pip install --no-deps sglang triton"


@functools.cache
def missing() -> str | None:
    """Return why SGLang's kernels cannot be run here, or None."""
    absent = [name for name in ("sglang", "triton") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed; expected {NEEDS}" if absent else None


def version() -> str:
    return importlib.metadata.version("sglang")


@functools.cache
def entry(name: str):
    """Return one of the functions of `FILES`. Raises UsageError saying what is missing."""
    _prepare()
    tried = []
    for module in FILES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            tried.append(f"{module}: {error}")
    raise UsageError(f"sglang {version()}: no {name} ({'; '.join(tried)}); expected SGLang 0.5.17 to 0.5.23")


@functools.cache
def _prepare() -> None:
    if (reason := missing()) is not None:
        raise UsageError(f"sglang: {reason}")
    if torch.cuda.is_available() and os.environ.get(interpreter.VARIABLE) != "1":
        return
    interpreter.prepare()
    if getattr(sys.modules.get("sglang"), "__file__", None) is not None:
        raise UsageError("sglang: it was imported before its kernels were asked for; expected a fresh process on a CPU")
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    for name in sorted({parent for files in FILES.values() for file in files for parent in _parents(file)}):
        _stand_in(name, root.parent.joinpath(*name.split(".")))
    _stand_in("sglang.kernels.ops.memory", root / "kernels" / "ops" / "memory")
    no = lambda *_, **__: False  # noqa: E731
    _stand_in("sglang.kernels.jit", is_arch_support_pdl=no)
    _stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=no)
    _stand_in("sglang.srt")
    _stand_in("sglang.srt.environ", envs=None)
    asked = ("is_cuda", "is_hip", "is_npu", "is_xpu", "is_gfx95_supported", "is_gfx1250_supported", "is_sm90_supported")
    platform = dict.fromkeys(asked, no)
    numbers = {"get_device_sm": lambda *_: 0, "get_device_core_count": lambda *_: 1}
    _stand_in("sglang.srt.utils", **platform, **numbers)
    _stand_in("sglang.srt.utils.common", **platform, **numbers)


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _stand_in(name: str, *folders: Path, **names) -> None:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = list(map(str, folders))
    vars(module).update(names)


# --- the kernels, in the call form ------------------------------------------------------------------------------------


def conv(call: ConvCall) -> torch.Tensor:
    """Run `causal_conv1d_update`; it overwrites its own slots, which `forms` allows."""
    out = entry("causal_conv1d_update")(
        call.x.transpose(1, 2),
        call.pool,
        call.weight,
        call.bias,
        "silu" if call.silu else None,
        conv_state_indices=call.slots,
        intermediate_conv_window=call.buffer,
        intermediate_state_indices=call.rows,
        retrieve_next_token=call.next_token,
        retrieve_next_sibling=call.next_sibling,
        retrieve_parent_token=call.parents,
    )
    return out.transpose(1, 2)


def gdn(call: DeltaCall) -> torch.Tensor:
    """Run `fused_sigmoid_gating_delta_rule_update`, with a decay for each head or, for kda, for each key channel."""
    requests, rows, heads = call.v.shape[:3]
    flat = lambda x: x.reshape(1, requests * rows, *x.shape[2:])  # noqa: E731
    out = entry("fused_sigmoid_gating_delta_rule_update")(
        A_log=call.A_log,
        a=call.a.reshape(requests * rows, -1),
        dt_bias=call.dt_bias.reshape(-1),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=flat(call.q),
        k=flat(call.k),
        v=flat(call.v),
        b=call.b.reshape(requests * rows, heads),
        initial_state_source=call.pool,
        initial_state_indices=call.slots,
        scale=call.scale,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=call.q.device),
        is_kda=call.per_channel,
        lower_bound=call.lower_bound,
        disable_state_update=True,
        intermediate_states_buffer=call.buffer,
        intermediate_state_indices=call.rows,
        cache_steps=call.buffer.shape[1],
        retrieve_parent_token=call.parents,
    )
    return out.reshape(call.v.shape)


kda = gdn


def mamba2(call: Mamba2Call) -> torch.Tensor:
    """Run `selective_state_update`; numbers of a head stand in strides of 0, as SGLang's own layer passes them."""
    heads, width, size = call.pool.shape[1:]
    out = torch.empty_like(call.x)
    entry("selective_state_update")(
        call.pool,
        call.x,
        call.dt[..., None].expand(call.x.shape),
        call.A[:, None, None].expand(heads, width, size),
        call.B,
        call.C,
        D=call.D[:, None].expand(heads, width),
        dt_bias=call.dt_bias[:, None].expand(heads, width),
        dt_softplus=True,
        state_batch_indices=call.slots,
        out=out,
        disable_state_update=True,
        intermediate_states_buffer=call.buffer,
        cache_steps=call.buffer.shape[1],
        retrieve_parent_token=call.parents,
        intermediate_state_indices=call.rows,
    )
    return out


class _Claimed(torch.Tensor):
    """A CPU tensor that says it stands on a GPU: the commit's launcher refuses others; its kernel is interpreted."""

    is_cuda = True


def commit(call: CommitCall) -> None:
    """Run `fused_mamba_state_scatter_with_mask` for a layer. 0.5.17 takes row i of the buffer for request i."""
    scatter = entry("fused_mamba_state_scatter_with_mask")
    pool, buffer, rows = call.pool[None], call.buffer[None], (call.rows,)
    if "src_indices_raw" not in inspect.signature(scatter).parameters:
        buffer, rows = buffer[:, call.rows.long()], ()
    if not pool.is_cuda:
        pool, buffer = pool.as_subclass(_Claimed), buffer.as_subclass(_Claimed)
    scatter(pool, buffer, call.slots, call.nodes, *rows)
