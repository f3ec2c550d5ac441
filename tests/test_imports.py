"""Folders import downwards only, and those that must start fast do so without torch."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_check.base.resources import fixtures_dir

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "ddtree_check"

FOLDERS = (  # each may import what stands before it
    *("base", "tree", "model", "trace", "engines", "judge", "flows", "report", "server", "kernels", "gate"),
    *("selftest", "cli", "pytest_plugin", "__main__"),
)
RANK = {name: rank for rank, name in enumerate(FOLDERS)}

WITHOUT_TORCH = (  # a folder stands for all its modules
    "",
    "base",
    "tree",
    "trace",
    "model.wiring",
    "model.families",
    "engines",
    "engines.capacity",
    "engines.sglang.pools",
    "engines.sglang.recorder",
    "engines.sglang.scripted",
    "judge.rule",
    "judge.figures",
    "judge.exact",
    "judge.pairs",
    "judge.conclude",
    "judge.sampling.processing",
    "judge.sampling.draws",
    "flows.settings",
    "flows.job",
    "report",
    "server",
    "gate",
    "selftest.kinds",
    "cli",
    "pytest_plugin",
)
HEAVY = ("torch", "transformers", "sglang")


def imported(source: str, module: tuple[str, ...], modules: set[str], *, is_package: bool = False):
    """Yield (line, module of ours below the package, "" for the package itself) of each import, in functions too.

    module: the importing module's place below the package, such as ("model", "wiring"). modules: all of ours, dotted.
    """
    here = ("ddtree_check", *module) if is_package else ("ddtree_check", *module)[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *filter(None, [node.module])))
            names = [alias.name for alias in node.names if (origin, alias.name) != ("ddtree_check", "__version__")]
            below = {name: f"{origin}.{name}".removeprefix("ddtree_check.") in modules for name in names}
            targets = [f"{origin}.{name}" if below[name] else origin for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            targets = [str(node.args[0].value)] if name in ("import_module", "__import__") else []
        else:
            continue
        for target in dict.fromkeys(targets):
            top, _, rest = target.partition(".")
            if top == "ddtree_check":
                yield node.lineno, rest


def modules_of(package: Path) -> dict[str, tuple[Path, bool]]:
    """Map each module below a package, dotted, to its file and whether it is a package."""
    parts = {path: path.relative_to(package).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    held = {path: (names[:-1] if names[-1] == "__init__" else names) for path, names in parts.items()}
    return {".".join(names): (path, path.stem == "__init__") for path, names in held.items() if names}


def upward_imports(package: Path) -> list[str]:
    """Return a line for each import that does not go downwards, and for each module without a place in the order."""
    lines, modules = [], modules_of(package)
    known = {*modules, *RANK}
    for module, (path, is_package) in modules.items():
        name, folder = path.relative_to(package), module.split(".")[0]
        if folder not in RANK:
            lines.append(f"{name}: no place in the order; move it into a folder of FOLDERS in tests/test_imports.py")
            continue
        for line, target in imported(path.read_text(), tuple(module.split(".")), known, is_package=is_package):
            other = target.split(".")[0]
            if not target:
                lines.append(
                    f"{name}:{line} imports from ddtree_check itself; import from the module that owns the name"
                )
            elif other != folder and RANK.get(other, len(RANK)) >= RANK[folder]:
                lines.append(f"{name}:{line} imports {other}, which does not stand before {folder}")
    return lines


def cycle(package: Path) -> list[str]:
    """Return modules that import one another in a circle, in functions too, or an empty list."""
    modules = modules_of(package)
    graph = {}
    for module, (path, is_package) in modules.items():
        targets = imported(path.read_text(), tuple(module.split(".")), set(modules), is_package=is_package)
        graph[module] = {target for _, target in targets if target in modules and target != module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_modules_import_downwards():
    assert len(list(PACKAGE.rglob("*.py"))) > 1
    assert upward_imports(PACKAGE) == []
    assert cycle(PACKAGE) == []


UPWARD = [
    pytest.param("tree/draft.py", "from ddtree_check.flows.check import run", "imports flows", id="from-module"),
    pytest.param("tree/draft.py", "import ddtree_check.flows.check", "imports flows", id="import"),
    pytest.param("tree/draft.py", "from ddtree_check import base, flows", "imports flows", id="from-package"),
    pytest.param("tree/draft.py", "from ddtree_check import run", "imports from ddtree_check itself", id="facade"),
    pytest.param("tree/draft.py", "\n\nfrom ..flows.check import run", "imports flows", id="relative"),
    pytest.param("tree/draft.py", "def f():\n    from .. import flows", "imports flows", id="relative-folder"),
    pytest.param("tree/draft.py", "importlib.import_module('ddtree_check.flows.check')", "imports flows", id="by-name"),
    pytest.param("model/mixers/kda.py", "from ...judge.rule import Rule", "imports judge", id="relative-three-up"),
    pytest.param("model/mixers/__init__.py", "from ...judge.rule import Rule", "imports judge", id="relative-init"),
    pytest.param("tree/draft.py", "from ddtree_check.helpers import f", "imports helpers", id="unlisted-target"),
    pytest.param("helpers.py", "", "no place in the order", id="unlisted-module"),
]


def write(package: Path, name: str, source: str) -> Path:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return package


@pytest.mark.parametrize(("name", "source", "message"), UPWARD)
def test_an_upward_import_is_refused(tmp_path, name, source, message):
    lines = upward_imports(write(tmp_path, name, source))
    assert len(lines) == 1 and lines[0].startswith(name) and message in lines[0], lines


def test_a_downward_import_is_accepted(tmp_path):
    write(tmp_path, "__init__.py", "from ddtree_check.flows.check import run")
    write(tmp_path, "flows/check.py", "import torch\nfrom ddtree_check import __version__, tree\nfrom . import draft\n")
    write(
        tmp_path, "cli/main.py", "def f():\n    from ddtree_check.flows.check import run\n    from ..engines.x import E"
    )
    write(tmp_path, "model/mixers/kda.py", "from ...tree import DraftTree\nfrom .gated_delta import f")
    write(tmp_path, "model/mixers/__init__.py", "from ..wiring import Wiring\nfrom .kda import step")
    assert upward_imports(tmp_path) == [] and cycle(tmp_path) == []


def test_a_circle_inside_a_folder_is_seen(tmp_path):
    write(tmp_path, "tree/a.py", "from .b import f")
    write(tmp_path, "tree/b.py", "def f():\n    from . import c")
    assert cycle(write(tmp_path, "tree/c.py", "")) == []
    assert set(cycle(write(tmp_path, "tree/c.py", "from ddtree_check.tree import a"))) == {"tree.a", "tree.b", "tree.c"}


def heavy_after_import(groups: dict[str, list[str]], path: Path) -> dict[str, list[str]]:
    """Return by group those of HEAVY that a fresh interpreter has loaded after importing its modules from `path`.

    One interpreter imports group after group, and forgets what of HEAVY a group has loaded.
    """
    code = f"""
import importlib, json, sys
loaded = {{}}
for group, modules in {groups!r}.items():
    for module in modules:
        importlib.import_module(module)
    loaded[group] = [name for name in {HEAVY!r} if sys.modules.pop(name, None)]
print(json.dumps(loaded))
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def with_modules_below(name: str) -> list[str]:
    folder = name in RANK and (PACKAGE / name).is_dir() and name != "engines"  # of engines, only the contract
    held = [module for module in modules_of(PACKAGE) if folder and module.startswith(name + ".")]
    held = [module for module in held if not module.endswith("__main__")]  # which runs
    return [f"ddtree_check.{module}".rstrip(".") for module in (name, *held)]


def test_imports_without_torch():
    loaded = heavy_after_import({name: with_modules_below(name) for name in WITHOUT_TORCH}, REPO)
    assert loaded == {name: [] for name in WITHOUT_TORCH}


def test_a_hidden_torch_import_is_seen(tmp_path):
    write(tmp_path, "torch.py", "")  # a stand-in: the real one takes seconds
    write(tmp_path, "outer.py", "import inner")
    write(tmp_path, "inner.py", "import torch")
    write(tmp_path, "later.py", "import torch")
    loaded = heavy_after_import({"a": ["json"], "b": ["outer"], "c": ["later"], "d": ["inner"]}, tmp_path)
    assert loaded == {"a": [], "b": ["torch"], "c": ["torch"], "d": []}


def unknown_names(source: str) -> list[str]:
    """What a script takes from the package and the package does not have; only the modules it names are imported."""
    tree, modules, missing = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ddtree_check":
            held = importlib.import_module(node.module)
            for alias in node.names:
                with contextlib.suppress(ImportError):
                    modules[alias.asname or alias.name] = importlib.import_module(f"{node.module}.{alias.name}")
                    continue
                missing += [f"{node.module}.{alias.name}"] if not hasattr(held, alias.name) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            held = modules[node.value.id]
            missing += [f"{held.__name__}.{node.attr}"] if not hasattr(held, node.attr) else []
    return missing


SCRIPTS = sorted([*(REPO / "benchmarks").glob("*.py"), *(REPO / "fixtures" / "scripts").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_that_no_test_runs_name_what_there_is(script):
    assert unknown_names(script.read_text()) == []


def test_a_name_that_was_changed_is_seen():
    source = "from ddtree_check.selftest import inject\nfrom ddtree_check.tree.draft_tree import DraftTree, Bush\n"
    source += "inject.keys_alone()"
    assert unknown_names(source) == ["ddtree_check.tree.draft_tree.Bush", "ddtree_check.selftest.inject.keys_alone"]


def test_fixtures_are_found_in_a_wheel_and_in_a_clone(tmp_path):
    package = tmp_path / "ddtree_check"
    (tmp_path / "fixtures").mkdir()  # somebody else's: no models/
    with pytest.raises(FileNotFoundError, match=r"fixtures: no models/ folder in .*_fixtures or .*fixtures; expected"):
        fixtures_dir(package)
    (tmp_path / "fixtures" / "models").mkdir()
    assert fixtures_dir(package) == tmp_path / "fixtures"
    (package / "_fixtures" / "models").mkdir(parents=True)
    assert fixtures_dir(package) == package / "_fixtures"
    assert fixtures_dir() == REPO / "fixtures"
