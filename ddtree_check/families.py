"""What is supported, as data: one row a model family, and the short names of checkpoints.

Nothing else in the package knows a model's name. Imports no torch, so that `ddtree-check models` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .errors import Unsupported
from .wiring import Attention, Conv, Layer, State

Branches = tuple[tuple[Conv | State | Attention, ...], ...]

GATED_DELTA_CALLS = MappingProxyType(
    {
        "causal_conv1d_fn": "conv",
        "causal_conv1d_update": "conv_update",
        "torch_chunk_gated_delta_rule": "gated_delta",
        "torch_recurrent_gated_delta_rule": "gated_delta",
    }
)


def _gated_delta(config) -> Branches:
    return ((Conv(config.linear_conv_kernel_dim), State("gated_delta")),)


def _attention(config) -> Branches:
    return ((Attention(),),)


def _optional_rotary(config) -> Branches:
    rotary = getattr(config, "rope_parameters", None) or {}
    return ((Attention(positional=rotary.get("rope_theta") is not None),),)


@dataclass(frozen=True)
class Family:
    """A model type of transformers, and what its layers read across rows.

    layers   layer type (of `config.layer_types`) -> a function of the config that gives its parallel branches
    calls    functions of the modelling module that run the recurrence -> the adapter that stands in for each
    mask     'dict' (one mask a layer type) or 'plain' (one four-dimensional mask)
    """

    model_type: str
    title: str
    layers: Mapping[str, Callable[[object], Branches]]
    calls: Mapping[str, str] = field(default_factory=dict)
    mask: str = "dict"
    examples: tuple[str, ...] = ()

    def describe_layers(self, config) -> tuple[Layer, ...]:
        """The layers of one model. Raises Unsupported naming the first layer that has no row here."""
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        found = []
        for index, kind in enumerate(kinds):
            if kind not in self.layers:
                raise Unsupported(
                    f"layer {index} is {kind!r}; {self.title} is checked with {', '.join(self.layers)} layers only"
                )
            branches = self.layers[kind](config)
            states = [op.kind for branch in branches for op in branch if isinstance(op, State)]
            found.append(Layer(states[0] if states else "attention", branches))
        return tuple(found)


_HYBRID = MappingProxyType({"linear_attention": _gated_delta, "full_attention": _attention})
_OLMO = MappingProxyType({"linear_attention": _gated_delta, "full_attention": _optional_rotary})
_PLAIN = MappingProxyType({"full_attention": _attention})

FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3_5_text", "Qwen3.5 / 3.6 / 3.8", _HYBRID, GATED_DELTA_CALLS, examples=("Qwen/Qwen3.6-27B",)),
        Family("qwen3_5_moe_text", "Qwen3.5 / 3.6 MoE", _HYBRID, GATED_DELTA_CALLS, examples=("Qwen/Qwen3.5-35B-A3B",)),
        Family("qwen3_next", "Qwen3-Next", _HYBRID, GATED_DELTA_CALLS, examples=("Qwen/Qwen3-Next-80B-A3B-Instruct",)),
        Family("olmo_hybrid", "OLMo-Hybrid", _OLMO, GATED_DELTA_CALLS, examples=("allenai/Olmo-Hybrid-7B",)),
        Family("llama", "Llama (attention only: the negative control)", _PLAIN, mask="plain"),
        Family("qwen3", "Qwen3 (attention only: the negative control)", _PLAIN),
    )
}

_QWEN3_6_27B = MappingProxyType(
    {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
)


@dataclass(frozen=True)
class Alias:
    """A short name for a checkpoint. `shape` is its configuration where it is built in, for `--weights random`."""

    hub_id: str
    model_type: str
    shape: Mapping[str, object] | None = None


ALIASES = {
    "qwen3.6-27b": Alias("Qwen/Qwen3.6-27B", "qwen3_5_text", _QWEN3_6_27B),
    "qwen3.5-27b": Alias("Qwen/Qwen3.5-27B", "qwen3_5_text", _QWEN3_6_27B),
    "qwen3.5-9b": Alias("Qwen/Qwen3.5-9B", "qwen3_5_text"),
    "qwen3.5-4b": Alias("Qwen/Qwen3.5-4B", "qwen3_5_text"),
    "qwen3.5-0.8b": Alias("Qwen/Qwen3.5-0.8B", "qwen3_5_text"),
    "qwen3.5-35b-a3b": Alias("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text"),
    "qwen3-next-80b-a3b": Alias("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
    "olmo-hybrid-7b": Alias("allenai/Olmo-Hybrid-7B", "olmo_hybrid"),
}


def find_family(model_type: str) -> Family:
    """The row of a model type. Raises Unsupported with the supported ones."""
    if model_type not in FAMILIES:
        raise Unsupported(f"model type {model_type!r} has no row; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
