"""Finds, sizes, builds and loads models: names, paths, hub ids, real or random weights."""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.utils import cached_file

from ...base.errors import UsageError, one_line
from ...base.resources import EMBEDDED, fixtures_dir
from ...model.families import ALIASES, FAMILIES
from ..checkpoint import check_folder, check_sizes, stored_count, weight_files
from ..precision import dtype_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32", "f64": "float64"}


def resolve(name: str | None) -> str:
    """Return what a model name loads: the embedded model's path, an alias' hub id, a path or a hub id."""
    if name is not None and not name.strip():
        raise UsageError(f"model: got {name!r}, expected a name, a path or a hub id")
    if name is None or name == EMBEDDED:
        return str(fixtures_dir() / "models" / EMBEDDED)
    if name.lower() in ALIASES:
        return ALIASES[name.lower()].hub_id
    local = fixtures_dir() / "models" / name
    return str(local) if local.is_dir() else name


def parse_dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    if name is None:
        return default
    full = SHORT.get(name, name)
    if full not in DTYPES:
        raise UsageError(f"dtype: got {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[full]


def pick_device(name: str = "auto") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device: {name!r} cannot be used here ({one_line(error)}); try --device cpu") from error
    return device


def load_model(
    name: str | None, *, weights: str = "real", dtype: str | None = None, device: str = "auto", seed: int = 0,
    attention: str = "sdpa", progress: Callable[[str], None] = lambda _: None,
):  # fmt: skip
    """Return (model, provenance). dtype None means the checkpoint's (float32 for the embedded model).

    Raises UsageError with the ways on: unknown name, missing weights, corrupt files, too little memory.
    """
    if weights not in ("real", "random"):
        raise UsageError(f"weights: got {weights!r}, expected 'real' or 'random'")
    source = resolve(name)
    config = load_config(name, source, weights)
    text = config.get_text_config(decoder=True)
    wanted = wanted_dtype(name, config, dtype)
    where = pick_device(device)
    parameters = count_parameters(text, source)
    if weights == "real":
        _require_weights(source, text, parameters)
    needed = parameters * wanted.itemsize
    spread = (
        weights == "real"
        and where.type == "cuda"
        and device == "auto"
        and needed > 0.9 * _free(where)
        and torch.cuda.device_count() > 1
    )
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if spread else [where]
    require_memory(f"{name or EMBEDDED} in {dtype_name(wanted)}", needed, *devices)
    text.dtype = wanted
    progress(f"loading {name or EMBEDDED}: {parameters / 1e6:,.1f} M parameters, {needed / 2**30:.2f} GiB on {where}")
    if weights == "random":
        model = build_random(text, dtype=wanted, device=where, seed=seed, attention=attention)
    else:
        model = _from_files(name, source, text, wanted, where, spread, attention)
    return model, provenance(name, source, text, weights, seed, parameters, needed)


def wanted_dtype(name: str | None, config, dtype: str | None) -> torch.dtype:
    """Return `dtype`, or the checkpoint's; float32 for the embedded model."""
    stored = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
    return parse_dtype(dtype, torch.float32 if name in (None, EMBEDDED) else stored)


def provenance(name: str | None, source: str, text, weights: str, seed: int, parameters: int, needed: int) -> dict:
    """Return where a model came from, for the record. needed: the bytes of its weights."""
    folder = snapshot(source) if weights == "real" else None
    return {
        "name": name or EMBEDDED,
        "source": source if name and not Path(source).exists() else Path(source).name,
        "model_type": text.model_type,
        "layers": text.num_hidden_layers,
        "parameters": parameters,
        "weights": weights,
        "seed": seed if weights == "random" else None,
        "revision": folder.name if folder and folder.parent.name == "snapshots" else None,
        "fingerprint": fingerprint(folder) if folder else None,
        "bytes": needed,
    }


def attention_for(config, wanted: str) -> str:
    """Return `wanted`, or 'eager' for the classes without attention, which refuse any other word."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return wanted if getattr(classes, "_supports_sdpa", True) else "eager"


def has_experts(config) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def load_config(name: str | None, source: str, weights: str = "real"):
    """Return the model's configuration; for random weights an alias' built-in shape will do."""
    alias = ALIASES.get((name or "").lower())
    if weights == "random" and alias and alias.shape:  # no need to ask the hub
        shape = dict(alias.shape)
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    if Path(source).is_dir():
        check_folder(Path(source))
    try:
        data, _ = PretrainedConfig.get_config_dict(source)
        check_sizes(data, source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if not Path(source).is_dir() and (folder := snapshot(source)):
            check_folder(folder)
        text = config.get_text_config(decoder=True)
        if not all(isinstance(dtype, torch.dtype | None) for dtype in (text.dtype, config.dtype)):
            raise ValueError(f"dtype {text.dtype!r:.40}, expected the name of one")
        return config
    except UsageError:
        raise
    except Exception as error:
        if (Path(source) / "config.json").exists():
            raise UsageError(
                f"model: {source} cannot be read ({one_line(error)}); expected a transformers checkpoint"
            ) from error
        raise missing_weights(name or source, source, error) from error


def missing_weights(name: str, source: str, error: Exception) -> UsageError:
    ways = "give --model the path of a checkpoint folder, or take --weights random"
    if Path(source).is_absolute() or Path(source).exists():
        cause = (
            "is not there" if not Path(source).exists() else "holds no checkpoint (config.json and safetensors files)"
        )
        return UsageError(f"model: {source} {cause}. Three ways on: download one into a folder, {ways}")
    where = f"{name!r}" if source == name else f"{name!r} ({source})"
    cause = "it is neither a name that `ddtree-check models` lists, a folder nor" if source == name else "it is not"
    return UsageError(
        f"model: no weights for {where} here: {cause} in the hub's cache, and the hub did not give it "
        f"({type(error).__name__}). Three ways on: download it (hf download {source}), {ways}"
    )


def load_tokenizer(source: str):
    """Return the tokenizer of a model, or None if it has none that can be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception:  # any of a dozen errors: missing file, missing package, unknown class
        return None
    # Where the files are missing, the library makes one up that knows its special tokens only.
    return tokenizer if len(tokenizer) > len(tokenizer.added_tokens_decoder) else None


def _from_files(name, source, text, dtype, device, spread, attention):
    extra = _expert_kernels(dtype) if has_experts(text) and not getattr(text, "quantization_config", None) else {}
    placement = {"device_map": "auto"} if spread else {}
    if device.type == "cuda" and not spread and find_spec("accelerate"):
        placement = {"device_map": {"": device}}  # straight to the device: no whole copy in the host's memory
    try:
        model, report = _class_for(text).from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=False,
            attn_implementation=attention_for(text, attention),
            output_loading_info=True,
            **placement,
            **extra,
        )
    except SafetensorError as error:
        raise UsageError(
            f"model: {source} holds a corrupt safetensors file ({one_line(error)}); download it again"
        ) from error
    except ImportError as error:
        raise UsageError(f"model: {source} needs a package that is missing: {one_line(error)}") from error
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(f"memory: {source} does not fit on {device}: {one_line(error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        if not Path(source).exists() or "no file named" in str(error):
            raise missing_weights(name or source, source, error) from error
        raise UsageError(f"model: {source} cannot be loaded ({one_line(error)})") from error
    absent = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if absent:
        raise UsageError(
            f"model: {source} lacks {len(absent)} weights, first {absent[0]}; "
            "they would be random: check the checkpoint, or take --weights random for all"
        )
    return model if placement else model.to(device)


def _class_for(text):
    row = FAMILIES.get(text.model_type)
    return AutoModelForImageTextToText if row is not None and row.around else AutoModelForCausalLM


def _whole(text):
    """Return the configuration to build a text model from: its own, or the multimodal one that its class wants."""
    row = FAMILIES.get(text.model_type)
    if row is None or not row.around:
        return text
    shape = dict(row.around)
    return AutoConfig.for_model(shape.pop("model_type"), text_config=text, **shape)


def class_name(text) -> str:
    """Return the name of the library's class for a text model of this configuration."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__


def count_parameters(config, source: str = "config.json") -> int:
    """Return how many parameters a configuration asks for. Nothing is allocated. Raises UsageError."""
    try:
        with torch.device("meta"):
            model = _class_for(config).from_config(_whole(config), trust_remote_code=False)
        if empty := [name for name, weight in model.named_parameters() if not weight.numel()]:
            raise ValueError(f"{empty[0]} is empty")
    except Exception as error:  # whatever the library and torch find wrong with a value
        raise UsageError(
            f"model: {source}: its config.json makes no model ({type(error).__name__}: {one_line(error)}); "
            "expected a transformers checkpoint"
        ) from error
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def _require_weights(source: str, text, parameters: int) -> None:
    """Raise UsageError, before anything is allocated, where a folder's files hold fewer numbers than its config.json
    asks for. Quantised weights are packed, and other forms have no header to ask."""
    folder = snapshot(source)
    files = weight_files(folder) if folder else []
    if not files or getattr(text, "quantization_config", None) or not all(path.is_file() for path in files):
        return  # the loader says what is missing
    if (stored := stored_count(files)) < parameters:
        raise UsageError(
            f"model: {source}: config.json asks for {parameters} parameters, its weight files hold {stored}: they "
            "lack weights, which would be random: check the checkpoint, or take --weights random for all"
        )


def _expert_kernels(dtype: torch.dtype) -> dict[str, str]:
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # the grouped products know no float64


def build_random(config, *, dtype, device, seed, attention="sdpa"):
    """Return a model of this architecture with random weights that are sensitive to its recurrent states.

    The library's own initialisation hides faults: weights of std 0.02 pass little on, and its decay forgets at once.
    Here every matrix keeps the size of its input (std 1 / sqrt(fan-in)), decays are slow (A in 0.02 ... 1, softplus of
    the step near 0.3) and the head gives logits of std about 2.5. Deterministic in (config, seed, device type).
    """
    attention = attention_for(config, attention)
    kernels = {"attn_implementation": attention, **_expert_kernels(dtype)}
    with torch.device("meta"):
        model = _class_for(config).from_config(_whole(config), dtype=dtype, **kernels)
    config = model.config.get_text_config(decoder=True)
    model = model.to_empty(device=device)
    model.tie_weights()
    if dtype.itemsize < 4:  # as a checkpoint is loaded: some weights stay in float32
        kept = set(model._keep_in_fp32_modules_strict or ())
        for name, weight in model.named_parameters():
            if kept & set(name.split(".")):
                weight.data = weight.data.float()
    draw = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        row = FAMILIES.get(config.model_type)
        ranges = {**RANGES, **(row.drawn if row is not None else {})}
        for name, weight in model.named_parameters():
            _randomize(name.rpartition(".")[2], name, weight, draw, ranges)
            weight._is_hf_initialized = True
        _restore_buffers(model, config, attention, dtype)
        head = model.get_output_embeddings().weight
        tied = head is model.get_input_embeddings().weight
        head.normal_(0, 2.5 / math.sqrt(head.shape[-1]), generator=draw)
        if not tied:
            model.get_input_embeddings().weight.normal_(0, 1, generator=draw)
    return model


RANGES = {  # uniform draws, by the parameter's own name
    "A_log": (math.log(0.02), 0.0),
    "dt_bias": (-1.5, -0.5),  # of Mamba's time step too, which calls it dt_proj.bias
    "D": (0.2, 0.8),  # the direct term: below 1, so that what comes through the state is not drowned
    "recurrent_param": (-4.0, -2.0),  # RG-LRU: log decay = -8 softplus of it, times a gate
    # Factors that start at 1, or at a 0 that would switch the layer off (temp).
    **dict.fromkeys(
        ("scale", "global_scale", "hidden_states_scale", "residual_scale", "router_states_scale", "temp"), (0.8, 1.2)
    ),
    "input_hidden_states_scale": (0.8, 1.2),
}
BUFFERS = {  # what the library computes when it makes a module, from (the model's module, its configuration)
    "mup_vector": lambda module, config: module.compute_mup_vector(config),
    "e_score_correction_bias": lambda module, config: torch.linspace(-0.05, 0.05, config.num_local_experts),
    "weight": lambda module, config: 1.0,  # a norm without a scale keeps one for its kernels' sake
}


def _randomize(leaf: str, name: str, weight: torch.Tensor, draw: torch.Generator, ranges: dict) -> None:
    if leaf in ranges or ("dt_proj" in name and leaf in ("bias", "dt_proj_bias")):
        weight.uniform_(*ranges.get(leaf, ranges["dt_bias"]), generator=draw)
    elif ("conv1d" in name and leaf == "weight") or weight.ndim >= 2:
        weight.normal_(0, 1 / math.sqrt(weight.shape[-1]), generator=draw)
    elif leaf == "bias":
        weight.normal_(0, 0.1, generator=draw)
    else:  # norms: some are centred on 0 and some on 1; the class's own start is right, the spread makes them matter
        weight.normal_(0, 0.1, generator=draw)


def _restore_buffers(model, config, attention, dtype) -> None:
    """Fill what `to_empty` left undefined: buffers, and the norm scales' centre, from a small twin of the classes."""
    centred = set()
    for module in model.modules():
        module._is_hf_initialized = False
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        model.initialize_weights()  # fills what is not marked as done: the buffers that a class makes when it is made
    finally:
        torch.set_default_dtype(usual)
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "config"):
            fresh = type(module)(module.config).to(module.inv_freq.device)
            for key, value in fresh.named_buffers(recurse=False):
                module.register_buffer(key, value, persistent=False)
        else:
            for key, value in module.named_buffers(recurse=False):
                if key in BUFFERS:
                    made = BUFFERS[key](sys.modules[type(model).__module__], config)
                    value.copy_(torch.as_tensor(made, dtype=value.dtype))
        scale = getattr(module, "weight", None)
        if isinstance(scale, torch.nn.Parameter) and scale.ndim == 1 and "Norm" in type(module).__name__:
            if id(scale) not in centred:  # layers may share one
                scale.add_(_norm_centre(module))
            centred.add(id(scale))


def _norm_centre(module) -> float:
    """Return 1 for a norm that multiplies by its weight, 0 for one that multiplies by 1 + weight, by running it."""
    twin = copy.deepcopy(module)
    twin.weight.zero_()
    probe = torch.linspace(1, 2, len(twin.weight), dtype=twin.weight.dtype, device=twin.weight.device)[None, None]
    arguments = (probe, probe) if "Gated" in type(module).__name__ else (probe,)
    return 1.0 if not twin(*arguments).any() else 0.0


def snapshot(source: str) -> Path | None:
    """Return the folder that holds a loaded checkpoint: its path, or the hub snapshot, whose name is the revision."""
    if Path(source).is_dir():
        return Path(source)
    file = cached_file(source, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return Path(file).parent if file else None


def fingerprint(folder: Path) -> str:
    """Return the sha256 over every weight file's name, size, header and 64 KiB at 64 even places."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(64):
                file.seek(size * place // 64)
                digest.update(file.read(min(1 << 16, size)))
    return digest.hexdigest()[:16]


def require_memory(what: str, needed: int, *devices: torch.device) -> None:
    """Raise UsageError, before memory is taken, if `needed` bytes are not free on the devices together."""
    free = sum(map(_free, devices))
    if needed > 0.95 * free:
        raise UsageError(
            f"memory: {what} needs {needed / 2**30:.1f} GiB, {', '.join(map(str, devices))} has {free / 2**30:.1f} GiB "
            "free; choose a smaller --dtype, another --device or another model"
        )


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63
