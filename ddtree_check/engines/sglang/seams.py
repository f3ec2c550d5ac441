"""Where SGLang's versions differ, as one table, and what each kind of its layers does with a draft tree.

Read from the wheels of the versions named. Imports nothing of SGLang.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import InvalidVersion, Version

from ...base.errors import UsageError

START = ("alloc_memory_pool", "init_attention_backends", "init_cuda_graphs")


@dataclass(frozen=True)
class Seam:
    """What one version wants.

    status     'run': the adapter's tests ran on it; 'untested': read from its wheel, never run
    needs      the torch and transformers that it pins
    ranks      how a model runner is told its place: 'numbers' (tp_rank=...), 'state' (ps=ParallelState), or 'runtime'
               (a parallel runtime that is initialised before it)
    mask       the name under which a verify takes its mask
    start      the model runner's methods that follow its constructor
    """

    status: str
    needs: tuple[str, str]
    ranks: str
    mask: str = "custom_mask"
    start: tuple[str, ...] = START


SEAMS = {
    "0.5.13": Seam("untested", ("2.11.0", "5.8.1"), "numbers", mask="tree_mask", start=()),
    "0.5.14": Seam("untested", ("2.11.0", "5.8.1"), "numbers"),
    "0.5.15": Seam("untested", ("2.11.0", "5.12.1"), "numbers"),
    "0.5.16": Seam("untested", ("2.11.0", "5.12.1"), "state"),
    "0.5.17": Seam("run", ("2.11.0", "5.12.1"), "state"),
    "0.5.23": Seam("untested", ("2.14.1", "5.19.0"), "runtime"),
}

TREES = {  # SGLang's class for a kind of recurrent layer -> what a verify of it does with a tree
    "GDNAttnBackend": "reads the parents",
    "KDAAttnBackend": "reads the parents",
    "Mamba2AttnBackend": "reads the parents",
    "LightningAttentionBackend": "refuses trees",
    "ShortConvAttnBackend": "never looks at parents",
}
NO_CLASS = {  # our kinds of state that no layer of SGLang has
    "mamba1": "SGLang has no Mamba-1 layers",
    "rg_lru": "SGLang has no RG-LRU layers",
    "lightning": "lightning layers of SGLang refuse trees: their kernel takes no parents",
}
LAYER_WORDS = {  # model type -> SGLang's word for a layer type of transformers
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
}
FAMILIES = {  # model types of ours that SGLang 0.5.17 has a model class for; docs/sglang.md says what came of each
    **dict.fromkeys(("qwen3_5_text", "qwen3_next", "llama", "qwen3"), "run"),
    "gemma3_text": "window by row",
    **dict.fromkeys(("qwen3_5_moe_text", "kimi_linear"), "untested"),
    "falcon_h1": "refused: its mixer takes no kernel that keeps the states of a verify",
    **dict.fromkeys(("granitemoehybrid", "nemotron_h"), "refused: Triton attention wants an attention layer first"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "refused: no attention backend here that takes both its layers and a tree"),
}  # fmt: skip


def readable(config):
    """Put a text configuration into transformers' words for its layers, which SGLang's classes do not use; change it
    in place."""
    if hasattr(config, "is_kda_layer"):  # SGLang's KimiLinearConfig, where transformers has none yet
        kinds = ("full_attention", "linear_attention")
        config.layer_types = [kinds[config.is_kda_layer(layer)] for layer in range(config.num_hidden_layers)]
        config.linear_conv_kernel_dim = config.linear_attn_config["short_conv_kernel_size"]
    return config


def installed() -> str:
    """Return SGLang's version. Raises UsageError, with the way on, if it is not installed."""
    if find_spec("sglang") is None:
        raise UsageError(
            "engine: sglang is not installed here; in an environment of its own (it pins torch and transformers), "
            "pip install 'ddtree-check[sglang]' -c constraints-sglang.txt"
        )
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def find_seam(release: str) -> tuple[str, Seam]:
    """Return the row for a version: its own, or that of the newest version before it, then as 'untested'.

    Raises UsageError for one that is older than all rows.
    """
    if release in SEAMS:
        return release, SEAMS[release]
    try:
        older = [name for name in SEAMS if Version(name) <= Version(release)]
    except InvalidVersion:
        older = list(SEAMS)
    if not older:
        raise UsageError(f"engine: sglang {release} is installed, expected {min(SEAMS, key=Version)} or newer")
    name = max(older, key=Version)
    row = SEAMS[name]
    return name, Seam("untested", row.needs, row.ranks, row.mask, row.start)


def place(seam: Seam, args, rank: int, gpu: int, port: int, model_config) -> dict[str, Any]:
    """Return the arguments that tell a model runner its tensor-parallel place; start the runtime where due."""
    size = args.tp_size
    if seam.ranks == "numbers":
        return {"tp_rank": rank, "tp_size": size, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
    if seam.ranks == "state":
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState

        return {
            "ps": ParallelState(
                tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, dp_rank=None, dp_size=1, attn_tp_rank=rank,
                attn_tp_size=size, attn_cp_rank=0, attn_cp_size=1, attn_dp_rank=0, attn_dp_size=1, moe_ep_rank=0,
                moe_ep_size=1, moe_dp_rank=None, moe_dp_size=1, dcp_size=1, gpu_id=gpu,
            )
        }  # fmt: skip
    from sglang.srt.distributed import bootstrap

    bootstrap.init_parallel_runtime(server_args=args, device=args.device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    return {}


def start_mamba(args) -> None:
    """Choose the kernel of Mamba-2's step, as the scheduler does before it captures graphs."""
    for module in ("sglang.kernels.ops.mamba.triton_ops", "sglang.srt.layers.attention.mamba.ops"):
        try:
            start = getattr(importlib.import_module(module), "initialize_mamba_selective_state_update_backend", None)
        except ImportError:
            continue
        if start is not None:
            start(args)
            return
