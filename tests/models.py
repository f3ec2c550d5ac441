"""Small models and drawn trees that several test files share."""

from __future__ import annotations

import functools

import numpy as np
import torch
from transformers import AutoConfig

from ddtree_check.draft import shape
from ddtree_check.engines.loading import build_random
from ddtree_check.engines.transformers import TransformersEngine
from ddtree_check.tree import DraftTree

VOCAB = 211
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DELTA = BASE | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CONFIGS = {
    "qwen3_5_text": DELTA | {"head_dim": 32, "attention_bias": True},
    "qwen3_5_moe_text": DELTA | EXPERTS | {"head_dim": 32},
    "qwen3_next": DELTA | EXPERTS | {"head_dim": 32},
    "olmo_hybrid": DELTA | {"pad_token_id": 0, "eos_token_id": 1, "attention_bias": True},
    "llama": BASE | {"attention_bias": True},
    "qwen3": BASE | {"head_dim": 32},
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_engine(family: str, dtype: str = "float32", mixers: str = "library", seed: int = 0, **changes):
    config = AutoConfig.for_model(family, **(CONFIGS[family] | changes))
    extra = {"experts_implementation": "eager"} if dtype == "float64" and "num_experts" in CONFIGS[family] else {}
    model = build_random(config, dtype=DTYPES[dtype], device=torch.device("cpu"), seed=seed, **extra)
    return TransformersEngine(model, mixers=mixers, provenance={"name": f"tiny {family}", "weights": "random"})


engine = functools.cache(make_engine)  # shared: a test that changes its engine makes its own


def tree(name: str = "random", nodes: int = 16, *, order: str = "heap", seed: int = 0, root: int = 5) -> DraftTree:
    return shape(name, nodes, vocab=VOCAB, seed=seed, order=order, root=root)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Largest |difference| of each row; inf where there is a NaN."""
    return torch.nan_to_num((a.double() - b.double()).abs(), nan=torch.inf).amax(-1)
