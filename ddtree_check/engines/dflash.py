"""DFlash, a block diffusion drafter: one pass over a block of mask tokens gives every position's marginals at once.

A small transformer reads hidden features of chosen layers of the target, for all committed tokens, and the block

    root, mask, mask, ... mask        block_size positions, embedded by the target's own table

and the target's own head turns row i of its output into the marginals of depth i. Source: DFlash, arXiv 2602.06036, and
the checkpoint form of the package `dflash` 0.1.0, whose names of weights and configuration keys are read here. The
package itself is not needed; where it is installed, the tests hold its classes and these against each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import cached_file

from ..base.errors import UsageError, one_line
from ..base.resources import fixtures_dir
from .checkpoint import INDEX, check_folder, check_sizes, indexed, stored_shapes

CLASSES = ("DFlashDraftModel", "DFlash2DraftModel")
SELECTOR = "candidate_selector."  # DFlash2's choice along one path; marginals do without it


# --- what a checkpoint says ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What a drafter's configuration asks of its target; the rest of the configuration is the network's own.

    layers: target layers whose output is read, 0 the first;  convolved: (width, group size) of DFlash2's convolutions
    embedding_scale, output_scale, softcap: factors on the block's embeddings and on the logits, a tanh cap or None
    """

    block_size: int
    mask_token: int
    layers: tuple[int, ...]
    vocab: int
    hidden: int
    target_layers: int | None
    convolved: tuple[int, int] | None = None
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def read(cls, config: Qwen3Config, source: str) -> Spec:
        """Read a configuration in the published form, keys in `dflash_config` or beside it. Raises UsageError."""
        inner = getattr(config, "dflash_config", None) or {}
        demand(isinstance(inner, dict), source, f"dflash_config is {inner!r:.40}", "an object")

        def value(name: str, default=None):
            return inner.get(name, getattr(config, name, default))

        def whole(name: str, got, low: int) -> int:
            good = isinstance(got, int) and not isinstance(got, bool) and got >= low
            demand(good, source, f"{name} is {got!r:.40}", f"a whole number of at least {low}")
            return got

        def number(name: str, default: float) -> float:
            got = default if value(name) is None else value(name)
            good = isinstance(got, int | float) and not isinstance(got, bool) and abs(got) < 1e12
            demand(good, source, f"{name} is {got!r:.40}", "a finite number")
            return float(got)

        named = getattr(config, "architectures", None) or []
        good = isinstance(named, list) and all(isinstance(name, str) for name in named)
        demand(good, source, f"architectures is {named!r:.40}", "a list of names")
        known = set(named) & set(CLASSES)
        demand(known, source, f"its class is {', '.join(named) or 'not named'}", " or ".join(CLASSES))
        total = value("num_target_layers")
        layers = value("target_layer_ids")
        if layers is None:
            layers = spread(whole("num_target_layers", total, 1), config.num_hidden_layers)
        good = isinstance(layers, list | tuple) and layers
        demand(good, source, f"target_layer_ids is {layers!r:.40}", "a list of layer numbers")
        second = CLASSES[1] in named
        return cls(
            block_size=whole("block_size", value("block_size", 16), 2),
            mask_token=whole("mask_token_id", value("mask_token_id"), 0),
            layers=tuple(whole("a target_layer_ids entry", layer, 0) for layer in layers),
            vocab=whole("vocab_size", config.vocab_size, 1),
            hidden=whole("hidden_size", config.hidden_size, 1),
            target_layers=None if total is None else whole("num_target_layers", total, 1),
            convolved=tuple(whole(n, value(n), 1) for n in ("conv_kernel_size", "conv_group_size")) if second else None,
            embedding_scale=number("input_embedding_scale", 1.0),
            output_scale=number("output_multiplier", 1.0),
            softcap=number("final_logit_softcapping", 0.0) or None,
        )

    def fit(self, engine, source: str) -> None:
        """Raise UsageError, one line, where this drafter was not made for the engine's model."""
        hidden, count, most = engine.hidden_size, len(engine.layers), engine.max_length
        demand(self.hidden == hidden, source, f"hidden_size is {self.hidden}", f"the target's {hidden}")
        demand(
            self.vocab == engine.vocab_size, source, f"vocab_size is {self.vocab}", f"the target's {engine.vocab_size}"
        )
        fits = self.target_layers in (None, count)
        demand(fits, source, f"num_target_layers is {self.target_layers}", f"the target's {count}")
        last = max(self.layers)  # behind the target's last layer stands the final norm
        fits = last < count - 1
        demand(fits, source, f"target_layer_ids holds {last}", f"layers but the target's last, 0..{count - 2}")
        fits = self.mask_token < self.vocab
        demand(fits, source, f"mask_token_id is {self.mask_token}", f"a token of the target, 0..{self.vocab - 1}")
        fits = most is None or self.block_size <= most
        demand(fits, source, f"block_size is {self.block_size}", f"at most the target's context {most}")


def demand(good: object, source: str, got: str, expected: str) -> None:
    """Raise UsageError, one line, unless it is good."""
    if not good:
        raise unfit(source, got, expected)


def unfit(source: str, got: str, expected: str) -> UsageError:
    return UsageError(f"draft: {source}: {got}, expected {expected}; give --draft dflash:PATH of a drafter that fits")


def spread(target_layers: int, draft_layers: int) -> list[int]:
    """Return the layers that a checkpoint means when it names none: evenly from layer 1 to the third from the end."""
    if draft_layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + step * (last - first) / (draft_layers - 1)) for step in range(draft_layers)]


# --- the network -----------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """The drafter's transformer, weights named as in the published form. Computes in the dtype of its weights.

    forward(features [b, c, layers * hidden], block [b, m, hidden], positions [1 or b, c + m], seen) -> [b, m, hidden]:
    the block's rows attend to the c features and to each other. seen: bool [b, m, c + m] in place of what the
    configuration says each layer sees; for training, where many blocks share one row of features.
    """

    def __init__(self, config: Qwen3Config, spec: Spec):
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, spec, index) for index in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(spec.layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def forward(self, features, block, positions, seen=None):
        context = self.hidden_norm(self.fc(features))
        cos_sin = self.rotary_emb(block, positions)
        for layer in self.layers:
            block = layer(block, context, cos_sin, seen)
        return self.norm(block)


class Layer(nn.Module):
    """Attention, then a gated MLP, each behind a norm and beside the residual; in DFlash2 between two convolutions."""

    def __init__(self, config: Qwen3Config, spec: Spec, index: int):
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = Convolutions(config.hidden_size, *spec.convolved) if spec.convolved else None
        self.mlp_conv = Convolutions(config.hidden_size, *spec.convolved) if spec.convolved else None

    def forward(self, block, context, cos_sin, seen):
        attend = lambda rows: self.self_attn(rows, context, cos_sin, seen)  # noqa: E731
        block = block + _between(self.attention_conv, self.input_layernorm(block), attend)
        return block + _between(self.mlp_conv, self.post_attention_layernorm(block), self.mlp)


def _between(convolutions: Convolutions | None, rows: torch.Tensor, inner) -> torch.Tensor:
    if convolutions is None:
        return inner(rows)
    before, after = convolutions.weights(rows)
    return convolve(inner(convolve(rows, *before)), *after)


class Attention(nn.Module):
    """The block's queries on keys and values of the context and the block, made by the same projections."""

    def __init__(self, config: Qwen3Config, index: int):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, shared, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, shared * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, shared * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        sliding = (config.layer_types or ["full_attention"] * (index + 1))[index] == "sliding_attention"
        causal = getattr(config, "is_causal", None)
        self.causal = sliding if causal is None else bool(causal)
        self.window = config.sliding_window if sliding else None

    def forward(self, block, context, cos_sin, seen):
        rows = torch.cat([context, block], dim=1)
        query = self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2)
        key = self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2)
        value = self._heads(self.v_proj(rows)).transpose(1, 2)
        cos, sin = (part.unsqueeze(1) for part in cos_sin)
        count = block.shape[1]
        query, key = _turn(query, cos[..., -count:, :], sin[..., -count:, :]), _turn(key, cos, sin)
        seen = self._seen(count, rows.shape[1], block.device) if seen is None else seen[:, None]
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, rows):
        return rows.unflatten(-1, (-1, self.head_dim))

    def _seen(self, rows: int, columns: int, device) -> torch.Tensor | None:
        """Return bool [1, 1, rows, columns]: what the last `rows` of `columns` see; None for everything."""
        if not self.causal and self.window is None:
            return None
        ahead = torch.arange(columns, device=device) - torch.arange(columns - rows, columns, device=device)[:, None]
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (ahead.abs() < self.window)
        return seen[None, None]


def _turn(rows, cos, sin):
    """Apply rotary positions: the two halves of a head as the parts of a complex number."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-second, first], dim=-1) * sin


class Convolutions(nn.Module):
    """DFlash2's pair of causal convolutions over the block, before and after a sub-layer; a fixed kernel for each
    channel plus one for each group of channels that the rows themselves choose."""

    def __init__(self, hidden: int, width: int, group: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, width, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * width * (hidden // group), bias=False)
        self.width = width

    def weights(self, rows):
        """Return (fixed [w, hidden], chosen [b, m, w, groups]) of the first and of the second convolution."""
        chosen = self.kernel_projection(rows).unflatten(-1, (2, self.width, -1))
        return [(self.base_kernel[place].to(rows.dtype), chosen[..., place, :, :]) for place in (0, 1)]


def convolve(rows, fixed, chosen):
    """Return out_i = sum over k < w of (fixed_k + chosen_ik) * rows_(i - k), zeros before the block."""
    out = torch.zeros_like(rows)
    groups = chosen.shape[-1]
    for back in range(len(fixed)):
        earlier = functional.pad(rows, (0, 0, back, 0))[:, : rows.shape[1]]
        kernel = chosen[..., back, :].repeat_interleave(rows.shape[-1] // groups, dim=-1)
        out = out + fixed[back] * earlier + kernel * earlier
    return out


# --- loading ---------------------------------------------------------------------------------------------------------


def load(source: str | None, engine, default: str | None = None) -> Drafter:
    """Return the drafter at `source`, a path or hub id, for the engine's model; None for `default`.

    Its weights take the model's dtype (float32 under float64) and device. Raises UsageError, one line each: no such
    checkpoint, another class, or one that does not fit the model.
    """
    source = source or default
    if not source:
        raise UsageError(
            "draft: got dflash, but this model has no default drafter; expected dflash:PATH, dflash:HUB_ID or self"
        )
    local = fixtures_dir() / "models" / source
    source = str(local) if local.is_dir() else source
    config, name = read_config(source), Path(source).name if Path(source).exists() else source
    spec = Spec.read(config, name)
    spec.fit(engine, name)
    files = _files(source, name)
    try:
        with torch.device("meta"):
            network = Network(config, spec)
    except Exception as error:  # whatever the library and torch find wrong with a value
        cause = f"{type(error).__name__}: {one_line(error):.120}"
        raise unfit(name, f"its config.json makes no network ({cause})", "that of a drafter") from None
    wanted = network.state_dict()
    shapes = {key: shape for key, shape in stored_shapes(files).items() if not key.startswith(SELECTOR)}
    absent, odd = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    if absent or odd:
        what = f"lacks {absent[0]}" if absent else f"holds {odd[0]}"
        raise unfit(name, f"its weights are off: it {what}", f"the {len(wanted)} tensors of a {CLASSES[0]}")
    for key, shape in shapes.items():
        right = tuple(wanted[key].shape)
        demand(shape == right, name, f"{key} is {list(shape)}", f"{list(right)} by its config.json")
    weights = {key: value for path in files for key, value in load_file(path).items() if key in wanted}
    for key, value in weights.items():
        demand(torch.isfinite(value).all(), name, f"{key} is not finite", "numbers")
    network.load_state_dict(weights, assign=True)
    network.rotary_emb = Qwen3RotaryEmbedding(config)  # no weight: still on the meta device
    dtype = torch.float32 if engine.dtype == torch.float64 else engine.dtype
    return Drafter(network.to(engine.device, dtype).eval(), spec, name)


def read_config(source: str) -> Qwen3Config:
    """Return the configuration of a checkpoint; code that a checkpoint brings along is never run. Raises UsageError."""
    if Path(source).is_dir():
        check_folder(Path(source))
    path = _file(source, "config.json")
    if path is None:
        raise UsageError(
            f"draft: no drafter {source!r} here and the hub did not give it; download it (hf download {source}), give "
            "--draft dflash:PATH of its folder, or take --draft self"
        )
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        check_sizes(data, path)
        return Qwen3Config.from_dict(data)
    except UsageError:
        raise
    except Exception as error:  # whatever the library finds wrong with a value
        raise UsageError(
            f"draft: {path} cannot be read ({one_line(error):.160}); expected a drafter's config.json"
        ) from None


def _files(source: str, name: str) -> list[Path]:
    """Return the safetensors files of a drafter. Raises UsageError."""
    index = _file(source, INDEX)
    paths = {file: _file(source, file) for file in (indexed(Path(index)) if index else ["model.safetensors"])}
    if absent := [file for file, path in paths.items() if path is None]:
        raise unfit(name, f"it has no {absent[0]}", "a checkpoint in safetensors files")
    return [Path(path) for path in paths.values()]


def _file(source: str, name: str) -> str | None:
    folder = Path(source)
    if folder.is_dir():
        return str(folder / name) if (folder / name).is_file() else None
    try:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None


# --- drafting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Drafter:
    """A DFlash network bound to a model of the same width and vocabulary. `name` says where it came from."""

    network: Network
    spec: Spec
    name: str

    @property
    def length(self) -> int:
        """Return how many positions it drafts: the block without its first, the root."""
        return self.spec.block_size - 1

    def describe(self) -> dict:
        return {
            "name": self.name,
            "block_size": self.spec.block_size,
            "mask_token": self.spec.mask_token,
            "target_layers": list(self.spec.layers),
            "parameters": sum(weight.numel() for weight in self.network.parameters()),
        }

    def marginals(self, engine, features: torch.Tensor, root: int, length: int) -> np.ndarray:
        """Return log probabilities float32 [length, vocabulary] for the positions after the root.

        features [c, layers * hidden]: the target's, of every committed token before the root, in order. A block of
        length + 1 positions is read, at most the checkpoint's. Raises ValueError for other shapes.
        """
        width = len(self.spec.layers) * self.spec.hidden
        if features is None or features.ndim != 2 or features.shape[1] != width or not len(features):
            got = None if features is None else list(features.shape)
            raise ValueError(f"dflash: features {got}, expected [committed tokens, {width}]")
        if not 1 <= length <= self.length:
            raise ValueError(f"dflash: length {length}, expected 1..{self.length}")
        return self.read(engine, features, [root] + [self.spec.mask_token] * length)[1:]

    @torch.no_grad()
    def read(self, engine, features: torch.Tensor, tokens: Sequence[int]) -> np.ndarray:
        """Return log probabilities float32 [m, vocabulary] at every row of the block `tokens` behind the features."""
        weight = self.network.fc.weight
        block = engine.embed(tokens).to(weight) * self.spec.embedding_scale
        positions = torch.arange(len(features) + len(tokens), device=weight.device)[None]
        hidden = self.network(features.to(weight)[None], block[None], positions)[0]
        logits = engine.head(hidden).float() * self.spec.output_scale
        if self.spec.softcap:
            logits = torch.tanh(logits / self.spec.softcap) * self.spec.softcap
        return torch.log_softmax(logits, dim=-1).cpu().numpy()
