"""What is supported, as data: one row a model family, and the short names of checkpoints.

Nothing else in the package knows a model's name. Imports no torch, so that `ddtree-check models` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..base.errors import Unsupported
from .wiring import Attention, Conv, Layer, State

Branches = tuple[tuple[Conv | State | Attention, ...], ...]

_CONV = {"causal_conv1d_fn": "conv", "causal_conv1d_update": "conv_update"}
_GATED_DELTA = {
    **_CONV,
    "torch_chunk_gated_delta_rule": "gated_delta",
    "torch_recurrent_gated_delta_rule": "gated_delta",
}
_KDA = {**_CONV, "chunk_kimi_delta_attention": "kda", "recurrent_kimi_delta_attention": "kda"}
_MAMBA2 = {
    **_CONV,
    "mamba2_chunk_scan": "mamba2",
    "mamba2_selective_state_update": "mamba2_update",
    "mamba2_split_conv1d_scan_combined": "training_only",
}
_ZAMBA = {**_CONV, "mamba_selective_scan": "mamba1", "mamba_selective_state_update": "mamba1_update"}
_MAMBA1 = {**_ZAMBA, "mamba_inner_fn": "training_only"}


def _recurrent(kind: str, width: str = "mamba_d_conv") -> Callable[[object], Branches]:
    return lambda config: ((Conv(getattr(config, width)), State(kind)),)


_gated_delta = _recurrent("gated_delta", "linear_conv_kernel_dim")
_kda = _recurrent("kda", "linear_conv_kernel_dim")


def _attention(config) -> Branches:
    return ((Attention(),),)


def _optional_rotary(config) -> Branches:
    rotary = getattr(config, "rope_parameters", None) or {}
    return ((Attention(positional=rotary.get("rope_theta") is not None),),)


def _unrotated(config) -> Branches:
    return ((Attention(positional=False),),)


def _granite_attention(config) -> Branches:
    return ((Attention(positional=config.position_embedding_type == "rope"),),)


def _falcon_h1(config) -> Branches:
    """Return attention and Mamba-2 side by side on one input."""
    return ((Attention(),), (Conv(config.mamba_d_conv), State("mamba2")))


def _zamba(kind: str) -> Callable[[object], Branches]:
    """Return a shared attention block whose output is added to the input of the Mamba block behind it."""

    def branches(config) -> Branches:
        attention = Attention(positional=getattr(config, "use_mem_rope", False))
        return ((attention, Conv(config.mamba_d_conv), State(kind)),)

    return branches


def _sliding(config) -> Branches:
    return ((Attention(window=config.sliding_window),),)


def _short_conv(config) -> Branches:
    return ((Conv(config.conv_L_cache),),)


def _lightning(config) -> Branches:
    return ((State("lightning"),),)


def _qwen4(config) -> Branches:
    """Return the delta rule; some layers first add features of the last tokens and convolve them, with gaps."""
    if not config.ple_layer_ids:
        return _gated_delta(config)
    reach = (config.ple_conv_kernel_size - 1) * config.ngram_size + 1
    return ((Conv(config.ngram_size), Conv(reach)), *_gated_delta(config))


def _inkling(window: bool) -> Callable[[object], Branches]:
    """Return convolutions on keys and values, behind attention and behind the feed-forward part."""

    def branches(config) -> Branches:
        conv = Conv(config.conv_kernel_size)
        return ((conv, Attention(window=config.sliding_window if window else None), conv, conv),)

    return branches


def _zaya(window: bool) -> Callable[[object], Branches]:
    """Return two convolutions on queries and keys, and half of the value of the token before, a state."""

    def branches(config) -> Branches:
        attention = Attention(window=config.sliding_window if window else None)
        return (Conv(config.cca_time0 + config.cca_time1 - 1), attention), (State("delayed_value"), attention)

    return branches


def _row_by_row(config) -> Branches:
    return ()


OLDER_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}  # transformers before 5.15


@dataclass(frozen=True)
class Family:
    """A model type of transformers, and what its layers read across rows.

    layers   layer type (of `config.layer_types`) -> a function of the config that gives its parallel branches
    calls    functions of the modelling module that run the recurrence -> the adapter that stands in for each
    mask     'dict' (one mask a layer type), 'plain' (one four-dimensional mask), 'rows' (a padding mask only: functions
             of `selects` choose what a row sees) or 'none' (no attention)
    cache    the argument of the model that takes the cache
    selects  functions that choose by row order what attention sees or where it stands -> their stand-ins; these are
             swapped in the library's own pass over a tree as well
    kinds    the attribute of the config that lists the layer types
    masks    layer type -> the name of its mask, where it is another
    keeps    where keys and states live: a name of `engines.adapters.caches.CACHES`
    around   the configuration that the text model must be wrapped in to be built, if there is no class for it alone
    drawn    parameter name -> the range its random weights are drawn from, where the usual one makes a forgetful model
    """

    model_type: str
    title: str
    layers: Mapping[str, Callable[[object], Branches]]
    calls: Mapping[str, str] = field(default_factory=dict)
    mask: str = "dict"
    cache: str = "past_key_values"
    selects: Mapping[str, str] = field(default_factory=dict)
    kinds: str = "layer_types"
    masks: Mapping[str, str] = field(default_factory=dict)
    keeps: str = "hybrid"
    around: Mapping[str, object] | None = None
    drawn: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    examples: tuple[str, ...] = ()

    def kinds_of(self, config) -> list[str]:
        """Return the type of every layer."""
        kinds = getattr(config, self.kinds, None) or ["full_attention"] * config.num_hidden_layers
        return [kind if kind in self.layers else OLDER_WORDS.get(kind, kind) for kind in kinds]

    def describe_layers(self, config) -> tuple[Layer, ...]:
        """Return the layers of one model. Raises Unsupported naming the first layer that has no row here."""
        layers = []
        for index, kind in enumerate(self.kinds_of(config)):
            if kind not in self.layers:
                raise Unsupported(
                    f"layer {index} is {kind!r}; {self.title} is checked with {', '.join(self.layers)} layers only"
                )
            branches = self.layers[kind](config)
            states = [op.kind for branch in branches for op in branch if isinstance(op, State)]
            attends = any(isinstance(op, Attention) for branch in branches for op in branch)
            named = states[0] if states else "attention" if attends else "short_conv" if branches else kind
            layers.append(Layer(named, branches))
        return tuple(layers)


_HYBRID = {"linear_attention": _gated_delta, "full_attention": _attention}
_LFM2 = {"conv": _short_conv, "full_attention": _attention}
_SLIDING = {"full_attention": _attention, "sliding_attention": _sliding}
_MAMBA1_ALONE = {"linear_attention": _recurrent("mamba1", "conv_kernel")}
_BOTH_IN_ONE = {"masks": {"hybrid": "full_attention"}}
_NO_ATTENTION = {"mask": "none", "cache": "cache_params"}

_ROWS = (
    Family("qwen3_5_text", "Qwen3.5 / 3.6 / 3.8", _HYBRID, _GATED_DELTA, examples=("Qwen/Qwen3.6-27B",)),
    Family("qwen3_5_moe_text", "Qwen3.5 / 3.6 MoE", _HYBRID, _GATED_DELTA, examples=("Qwen/Qwen3.5-35B-A3B",)),
    Family("qwen3_next", "Qwen3-Next", _HYBRID, _GATED_DELTA, examples=("Qwen/Qwen3-Next-80B-A3B-Instruct",)),
    Family(
        "olmo_hybrid", "OLMo-Hybrid", _HYBRID | {"full_attention": _optional_rotary}, _GATED_DELTA,
        examples=("allenai/Olmo-Hybrid-7B",),
    ),
    Family(
        "bamba", "Bamba", {"linear_attention": _recurrent("mamba2"), "full_attention": _attention}, _MAMBA2,
        examples=("ibm-ai-platform/Bamba-9B-v2",),
    ),
    Family(
        "falcon_h1", "Falcon-H1", {"hybrid": _falcon_h1}, _MAMBA2, **_BOTH_IN_ONE,
        examples=("tiiuae/Falcon-H1-34B-Instruct",),
    ),
    Family(
        "granitemoehybrid", "Granite 4 hybrid",
        {"linear_attention": _recurrent("mamba2"), "full_attention": _granite_attention}, _MAMBA2,
        examples=("ibm-granite/granite-4.0-h-small",),
    ),
    Family(
        "nemotron_h", "Nemotron-H",
        {
            "linear_attention": _recurrent("mamba2", "conv_kernel"), "full_attention": _unrotated,
            "mlp": _row_by_row, "moe": _row_by_row,
        },
        _MAMBA2, examples=("nvidia/Nemotron-H-8B-Base-8K",),
    ),
    Family(
        "zamba2", "Zamba2", {"linear_attention": _recurrent("mamba2"), "hybrid": _zamba("mamba2")}, _MAMBA2,
        **_BOTH_IN_ONE, examples=("Zyphra/Zamba2-7B",),
    ),
    Family(
        "mamba2", "Mamba-2", {"linear_attention": _recurrent("mamba2", "conv_kernel")}, _MAMBA2, **_NO_ATTENTION,
        examples=("mistralai/Mamba-Codestral-7B-v0.1",),
    ),
    Family(
        "jamba", "Jamba", {"linear_attention": _recurrent("mamba1"), "full_attention": _unrotated}, _MAMBA1,
        examples=("ai21labs/AI21-Jamba-Mini-1.7",),
    ),
    Family(
        "zamba", "Zamba", {"linear_attention": _recurrent("mamba1"), "hybrid": _zamba("mamba1")}, _ZAMBA,
        **_BOTH_IN_ONE, examples=("Zyphra/Zamba-7B-v1",),
    ),
    Family(
        "falcon_mamba", "Falcon-Mamba", _MAMBA1_ALONE, _MAMBA1, **_NO_ATTENTION, examples=("tiiuae/falcon-mamba-7b",)
    ),
    Family("mamba", "Mamba", _MAMBA1_ALONE, _MAMBA1, **_NO_ATTENTION, examples=("state-spaces/mamba-2.8b-hf",)),
    Family("lfm2", "LFM2", _LFM2, _CONV, examples=("LiquidAI/LFM2-2.6B",)),
    Family("lfm2_moe", "LFM2 MoE", _LFM2, _CONV, examples=("LiquidAI/LFM2-8B-A1B",)),
    Family(
        "kimi_linear", "Kimi Linear", {"linear_attention": _kda, "full_attention": _unrotated}, _KDA,
        examples=("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    ),
    Family(
        "glm5_next_text", "GLM-5-Next", {"linear_attention": _kda, "indexed_attention": _unrotated}, _KDA, mask="rows",
        selects={"Glm5NextTextIndexer.forward": "path_indexer"},
        around={"model_type": "glm5_next", "vision_config": {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
            "projection_intermediate_size": 32,
        }},
        drawn={"A_log": (-0.2, 0.2), "dt_bias": (-4.0, -2.0)},
        examples=("zai-org/GLM-5.3-Flash",),
    ),
    Family(
        "qwen4_exp_text", "Qwen4-Exp", {"linear_attention": _qwen4, "indexed_attention": _attention},
        _GATED_DELTA | {
            "Qwen4ExpTextNGramEmbedding.forward": "ngram", "Qwen4ExpTextPLELayer._short_conv": "dilated_conv",
        },
        examples=("Qwen/Qwen4-Exp",),
    ),
    Family(
        "minimax", "MiniMax-Text-01", {"linear_attention": _lightning, "full_attention": _sliding},
        {"MiniMaxLightningAttention.forward": "lightning"}, keeps="minimax", examples=("MiniMaxAI/MiniMax-Text-01-hf",),
    ),
    Family(
        "recurrent_gemma", "RecurrentGemma", {"recurrent": _recurrent("rg_lru", "conv1d_width"), "attention": _sliding},
        {"RecurrentGemmaRecurrentBlock.forward": "griffin_block", "RecurrentGemmaRglru._rnn_scan": "rg_lru"},
        mask="plain", kinds="layers_block_type", keeps="modules", examples=("google/recurrentgemma-2b",),
    ),
    Family(
        "inkling_text", "Inkling", {"hybrid": _inkling(False), "hybrid_sliding": _inkling(True)}, _CONV,
        selects={"InklingRelativeLogits.forward": "relative_logits"},
        masks={"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"},
        examples=("thinkingmachines/Inkling",),
    ),
    Family(
        "zaya", "ZAYA1", {"hybrid": _zaya(False), "hybrid_sliding": _zaya(True)},
        {"ZayaCCAProjection.forward": "delayed_value"}, examples=("Zyphra/ZAYA1-8B",),
    ),
    Family("llama", "Llama (attention only: the negative control)", {"full_attention": _attention}, mask="plain"),
    Family("qwen3", "Qwen3 (attention only: the negative control)", _SLIDING),
    Family(
        "mistral", "Mistral (sliding attention only: the negative control)", {"full_attention": _sliding}, mask="plain"
    ),
    Family("gemma3_text", "Gemma 3 (sliding attention: the negative control)", _SLIDING),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _ROWS}

_QWEN3_6_27B = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 17408,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Alias:
    """A short name for a checkpoint. `shape` is its configuration where it is built in, for `--weights random`;
    `drafter` the hub id of the DFlash drafter that was published for it."""

    hub_id: str
    model_type: str
    shape: Mapping[str, object] | None = None
    drafter: str | None = None


ALIASES = {
    "qwen3.6-27b": Alias("Qwen/Qwen3.6-27B", "qwen3_5_text", _QWEN3_6_27B, drafter="z-lab/Qwen3.6-27B-DFlash"),
    "qwen3.5-27b": Alias("Qwen/Qwen3.5-27B", "qwen3_5_text", _QWEN3_6_27B),
    "qwen3.5-9b": Alias("Qwen/Qwen3.5-9B", "qwen3_5_text"),
    "qwen3.5-4b": Alias("Qwen/Qwen3.5-4B", "qwen3_5_text"),
    "qwen3.5-0.8b": Alias("Qwen/Qwen3.5-0.8B", "qwen3_5_text"),
    "qwen3.5-35b-a3b": Alias("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text"),
    "qwen3-next-80b-a3b": Alias("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
    "olmo-hybrid-7b": Alias("allenai/Olmo-Hybrid-7B", "olmo_hybrid"),
}


UNSUPPORTED = {  # recurrent text models of transformers that have no row, and why
    "rwkv": "its state is a list of tensors that the model's own code reads and writes in place, its decay of keys is "
    "a running maximum, and it takes neither positions nor a cache object",
    "xlstm": "its mLSTM keeps three states a layer in a cache class of its own that its kernels read as a whole, and "
    "its forward pass takes neither positions nor the number of logits to keep",
}


def find_family(model_type: str) -> Family:
    """Return the row of a model type. Raises Unsupported with the supported ones."""
    if model_type in UNSUPPORTED:
        raise Unsupported(f"model type {model_type!r} cannot be forked: {UNSUPPORTED[model_type]}")
    if model_type not in FAMILIES:
        raise Unsupported(f"model type {model_type!r} has no row; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
