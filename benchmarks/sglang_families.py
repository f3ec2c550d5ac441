"""SGLang's own model classes at small shapes with random weights: what its tree verify is worth, family by family.

    python -m benchmarks.sglang_families run --out DIR [FAMILY ...] [--at-once 3]      needs SGLang and a GPU
    python -m benchmarks.sglang_families table DIR                                     the table of docs/sglang.md

Every family is one `ddtree-check compare` in a process of its own. Configurations are written as the hub has them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BASE = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 64, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
CONFIGS = {  # model type: (SGLang's class, configuration)
    "qwen3_5_text": ("Qwen3_5ForCausalLM", BASE | DELTA | ROTARY),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", BASE | EXPERTS | DELTA | ROTARY),
    "qwen3_next": ("Qwen3NextForCausalLM", BASE | EXPERTS | DELTA | {"partial_rotary_factor": 0.25}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        BASE | {
            "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32, "v_head_dim": 64, "mla_use_nope": True, "num_experts": 8,
            "num_experts_per_token": 2, "moe_intermediate_size": 128, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.5, "num_expert_group": 1,
            "topk_group": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "use_grouped_topk": True,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 64,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        BASE | {
            "hybrid_override_pattern": "M-M*M-", "num_hidden_layers": 6, "ssm_state_size": 64, "mamba_num_heads": 8,
            "mamba_head_dim": 64, "n_groups": 2, "conv_kernel": 4, "chunk_size": 128, "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu", "use_bias": False, "mlp_bias": False, "use_conv_bias": True,
            "attention_head_dim": 64, "expand": 2, "layer_norm_epsilon": 1e-5,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        BASE | MAMBA2 | {
            "mamba_d_ssm": 512, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": False,
            "mlp_bias": False, "projectors_bias": False, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [0.9, 1.1], "key_multiplier": 0.8, "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
            "lm_head_multiplier": 0.7, "embedding_multiplier": 1.3,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        BASE | MAMBA2 | {
            "layer_types": ["mamba", "mamba", "attention", "mamba"], "position_embedding_type": "rope",
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 128,
            "attention_multiplier": 0.125, "residual_multiplier": 0.7, "embedding_multiplier": 1.5,
            "logits_scaling": 1.3, "attention_bias": False, "normalization_function": "rmsnorm",
        },
    ),
    "llama": ("LlamaForCausalLM", BASE),
    "qwen3": ("Qwen3ForCausalLM", BASE),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        BASE | {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 64,
        },
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("names", nargs="*", help="run: families, all by default; table: the folder")
    parser.add_argument("--out", default="sglang-families")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget", default="16")
    parser.add_argument("--limit", default="3", help="prompts")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one family")
    given = parser.parse_intermixed_args()  # names may stand behind options
    if given.what == "table":
        return table(Path(given.names[0] if given.names else given.out))
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(lambda name: run(name, given), given.names or CONFIGS))
    return table(Path(given.out))


def run(name: str, given) -> None:
    folder = Path(given.out) / f"{name}-{given.dtype}"
    (folder / "model").mkdir(parents=True, exist_ok=True)
    architecture, config = CONFIGS[name]
    config = config | {"model_type": name, "architectures": [architecture]}
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=1))
    command = [
        sys.executable, "-m", "ddtree_check", "compare", "--engine", "sglang", "--model", str(folder / "model"),
        "--weights", "random", "--dtype", given.dtype, "--budget", given.budget, "--limit", given.limit,
        "--accept", "first,branch", "--json", str(folder / "record.json"),
    ]  # fmt: skip
    begun = time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout)
        code, text = ended.returncode, ended.stdout + ended.stderr
    except subprocess.TimeoutExpired as error:
        code, text = None, f"{error.stdout or ''}{error.stderr or ''}\nno end within {given.timeout:.0f} s"
    (folder / "log.txt").write_text(text)
    lines = [line for line in text.splitlines() if line.startswith(("verdict:", "ddtree-check:"))]
    end = {"family": name, "dtype": given.dtype, "exit_code": code, "last": lines[-1][:400] if lines else ""}
    (folder / "end.json").write_text(json.dumps(end | {"seconds": round(time.monotonic() - begun)}))
    print(name, code, end["last"], flush=True)


def table(folder: Path) -> int:
    print("| family | dtype | layers | linear | forked | unforked | near a skip edge moved | commits | exit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*/end.json")):
        end = json.loads(path.read_text())
        record = path.with_name("record.json")
        if not record.exists():
            print(f"| {end['family']} | {end['dtype']} | | | | | | | {end['exit_code']}: {end['last']} |")
            continue
        held = json.loads(record.read_text())
        worst = {
            mode: max((case["modes"][mode]["max_abs"] or 0 for case in held["cases"]), default=0)
            for mode in held["verdict"]["modes"]
        }
        modes = [f"{verdict}, {worst[mode]:.2g}" for mode, verdict in held["verdict"]["modes"].items()]
        coverage = held["coverage"]
        accepts = [entry["modes"] for case in held["cases"] for entry in case.get("commit") or ()]
        commits = [modes["tree_forked"]["verdict"] for modes in accepts if "tree_forked" in modes]
        right = f"{commits.count('pass')} of {len(commits)}"
        moved = f"{coverage['near_moved']} of {coverage['near']}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in coverage["layers"].items())
        print(
            f"| {end['family']} | {end['dtype']} | {kinds} | {' | '.join(modes)} | {moved} | {right} "
            f"| {end['exit_code']} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
