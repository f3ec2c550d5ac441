"""A model's folder, before anything in it is trusted: files, links, weight indexes and the sizes in its config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..base.errors import UsageError

INDEX = "model.safetensors.index.json"
TEMPLATES = "additional_chat_templates"  # the one folder below it that a tokenizer reads
LARGEST_JSON = 1 << 28  # bytes; the largest published tokenizer has a tenth
# By the ending of a key in a config.json. Published models stay below a quarter of each.
LIMITS = (
    (re.compile(r"(layers|layer_types|_blocks|n_layer|depth)$"), 512),
    (re.compile(r"(experts|heads|groups)$"), 1 << 12),
    (re.compile(r"(vocab_size|max_position_embeddings|positions|window|length)$"), 1 << 27),
    (re.compile(r"(size|dim|rank|width|kernel|_cache|_conv|_state|_inner|_model|expand|multiplier)$"), 1 << 20),
)
LARGEST = 1 << 62  # of any other whole number
MODULES = 1 << 17  # layers times experts, heads or groups of each


def check_folder(folder: Path) -> None:
    """Raise UsageError, one line, for a checkpoint folder that holds a link or a weight index that leads out of it, a
    pipe or device, or an adapter, which would load another model.

    A snapshot in a hub's cache links to the files of its repository there.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parents[1]
    for path in _entries(folder):
        _inside(path, root)
        if path.name.endswith(".json") and path.stat().st_size > LARGEST_JSON:
            raise UsageError(f"model: {path} has {path.stat().st_size} bytes, expected at most {LARGEST_JSON}")
        if path.name == "adapter_config.json":
            raise UsageError(f"model: {path} is of an adapter, expected a whole checkpoint; merge it into its model")
        if path.name.endswith(".index.json"):
            for name in indexed(path):
                if (folder / name).exists():
                    _inside(folder / name, root)


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
        if (folder / TEMPLATES).is_dir():
            yield from (folder / TEMPLATES).iterdir()
    except OSError as error:
        raise UsageError(f"model: {error.filename}: {error.strerror}, expected a folder that can be read") from None


def _inside(path: Path, root: Path) -> None:
    target = path.resolve()
    if not target.is_relative_to(root):
        raise UsageError(f"model: {path} leads to {target}, expected a file of the folder itself; copy it there")
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise UsageError(f"model: {path} is a pipe, socket or device, expected a file; take it out of the folder")


def indexed(path: Path) -> list[str]:
    """Return the names of the weight files of an index, each once."""
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
            raise ValueError("a file outside its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"model: {path} is no index of weights ({type(error).__name__}: {error!s:.80}); download it again"
        ) from None
    return names


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checked folder that a loader reads: those of its index, else all."""
    index = folder / INDEX
    return [folder / name for name in indexed(index)] if index.is_file() else sorted(folder.glob("*.safetensors"))


def stored_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the headers of safetensors files; no weight is read. Raises UsageError."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(
                f"model: {path} cannot be loaded: it is corrupt ({error!s:.120}); download it again"
            ) from None
    return shapes


def stored_count(files: list[Path]) -> int:
    """Return how many numbers safetensors files hold."""
    return sum(map(math.prod, stored_shapes(files).values()))


def check_sizes(config: Mapping, where: str, name: str = "") -> None:
    """Raise UsageError, one line, for a whole number in a config.json that no model has: what is built from it would
    take all memory, or no end. name: the key that `config` stands under."""
    largest = {pattern: 1 for pattern, _ in LIMITS}
    for key, value in config.items():
        full = f"{name}.{key}" if name else str(key)
        if isinstance(value, Mapping):
            check_sizes(value, where, full)
        count = len(value) if isinstance(value, list) else value
        pattern, limit = next((row for row in LIMITS if row[0].search(str(key))), (None, LARGEST))
        if isinstance(count, int) and abs(count) > limit:
            raise UsageError(f"model: {where}: {full} is {value!r:.40}, expected at most {limit}")
        if isinstance(count, int) and pattern:
            largest[pattern] = max(largest[pattern], count)
    layers, experts = (largest[pattern] for pattern, _ in LIMITS[:2])
    if layers * experts > MODULES:
        raise UsageError(f"model: {where}: {layers} layers with {experts} parts each, expected at most {MODULES}")
