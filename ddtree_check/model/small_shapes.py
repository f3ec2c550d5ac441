"""A small shape of every family: what a change is tried on, and what `ddtree-check models --run` measures.

Two groups where there are groups, unequal key and value heads, biases on, two recurrent layers or more, no multiplier
at 1: a mistake that a symmetric shape would hide has nowhere to hide. Configuration values only; imports no torch.
"""

from __future__ import annotations

VOCAB = 211
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
DELTA = BASE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_DELTA_SHAPES = {
    "qwen3_5_text": DELTA | {"head_dim": 32, "attention_bias": True},
    "qwen3_5_moe_text": DELTA | EXPERTS | {"head_dim": 32},
    "qwen3_next": DELTA | EXPERTS | {"head_dim": 32},
    "olmo_hybrid": DELTA | {"pad_token_id": 0, "eos_token_id": 1, "attention_bias": True},
    "llama": BASE | {"attention_bias": True},
    "qwen3": BASE | {"head_dim": 32},
}  # fmt: skip
BIASES = {"mamba_conv_bias": True, "mamba_proj_bias": True}
MAMBA2 = (
    BASE
    | {"hidden_size": 48}
    | BIASES
    | {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
)
MAMBA1 = BASE | {"hidden_size": 48} | BIASES | {"mamba_d_state": 8, "mamba_dt_rank": 4}
PURE = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "use_bias": True, "use_conv_bias": True}
TWO_SHARED = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_MAMBA_SHAPES = {
    "bamba": MAMBA2 | {"attn_layer_indices": [2], "attention_bias": True, "mlp_bias": True},
    "falcon_h1": MAMBA2 | {
        "num_hidden_layers": 3, "mamba_d_ssm": 96, "mamba_rms_norm": True, "projectors_bias": True,
        "attention_bias": True, "mlp_bias": True, "lm_head_multiplier": 0.7, "embedding_multiplier": 1.3,
        "mlp_multipliers": [0.9, 1.1], "key_multiplier": 0.8, "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
    },
    "granitemoehybrid": MAMBA2 | {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope", "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64, "attention_bias": True, "attention_multiplier": 0.25,
        "residual_multiplier": 0.7, "embedding_multiplier": 1.5, "logits_scaling": 1.3,
    },
    "nemotron_h": {name: value for name, value in BASE.items() if name != "num_hidden_layers"}
    | {
        "layers_block_type": [
            "linear_attention", "mlp", "full_attention", "linear_attention", "moe", "linear_attention",
        ],
        "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
        "chunk_size": 16, "use_bias": True, "mlp_bias": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 24,
    },
    "zamba2": BASE | {
        "hidden_size": 64, "layers_block_type": TWO_SHARED, "n_mamba_heads": 8, "mamba_ngroups": 2,
        "mamba_d_state": 16, "chunk_size": 16, "add_bias_linear": True, "num_mem_blocks": 1, "adapter_rank": 8,
        "use_mem_rope": True,
    },
    "mamba2": PURE | {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "jamba": MAMBA1 | {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "zamba": MAMBA1 | {"layers_block_type": TWO_SHARED, "n_mamba_heads": 2},
    "falcon_mamba": PURE | {"state_size": 8, "time_step_rank": 4},
    "mamba": PURE | {"state_size": 8, "time_step_rank": 4},
}  # fmt: skip
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 24, "v_head_dim": 24, "qk_nope_head_dim": 16}
KDA = {"linear_head_dim": 16, "linear_num_heads": 4}
WINDOW = 20  # less than a prompt of 37 tokens; less than a prompt of 3 and a deep tree
CONV_LAYERS = ["conv", "conv", "full_attention", "conv"]
SLIDING = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_OTHER_SHAPES = {
    "lfm2": BASE | {"conv_bias": True, "layer_types": CONV_LAYERS, "block_multiple_of": 32},
    "lfm2_moe": BASE | _FEW | {"conv_bias": True, "layer_types": CONV_LAYERS, "num_dense_layers": 1},
    "kimi_linear": BASE | _FEW | MLA | KDA | {
        "qk_rope_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "attention_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "glm5_next_text": BASE | MLA | KDA | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 32,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_topk": 12,  # fewer than there are tokens: the indexer chooses
        "index_head_dim": 16,
        "index_n_heads": 16,  # a score is exactly 0 if no head likes a pool, and a tie of zeros is cut at random
        "index_kpool": 4, "hc_mult": 2, "attention_bias": True, "pad_token_id": 0,
    },
    "qwen4_exp_text": DELTA | _FEW | {
        "shared_expert_intermediate_size": 32, "head_dim": 32, "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [2],
        "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 200,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "eos_token_id": 1, "indexer_n_heads": 2,
        "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 12, "indexer_compress_ratio": 4,
        "attention_bias": True,
    },
    "minimax": BASE | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "block_size": 16, "linear_attn_alpha_factor": 1.1, "mlp_beta_factor": 0.9,
    },
    "recurrent_gemma": BASE
    | {"num_hidden_layers": 5, "lru_width": 96, "attention_window_size": WINDOW, "attention_bias": True},
    "inkling_text": BASE | {
        "head_dim": 16, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 16,
        "sliding_window_size": WINDOW, "d_rel": 8, "rel_extent": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 2, "route_scale": 2.0,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3, "logits_mup_width_multiplier": 1.0,
    },
    "zaya": BASE | {
        "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "router_hidden_size": 16,
        "num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": WINDOW,
        "attention_bias": True, "cca_time0": 3,
    },
    "mistral": BASE | {"head_dim": 16, "sliding_window": WINDOW},
    "gemma3_text": BASE | SLIDING | {"attention_bias": True},
    "qwen3": BASE | SLIDING | {"use_sliding_window": True, "attention_bias": True},
}  # fmt: skip

SHAPES = _DELTA_SHAPES | _MAMBA_SHAPES | _OTHER_SHAPES
