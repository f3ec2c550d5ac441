"""Modules import downwards only, and those that must start fast do so without torch."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_check.base.resources import fixtures_dir

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "ddtree_check"

ORDER = (  # each may import what stands before it; a row is a set of siblings that may not import each other
    ("errors",),
    ("words",),
    ("conclusion",),
    ("figures",),
    ("tree",),
    ("trace",),
    ("plan", "pools"),
    ("files",),
    ("journal",),
    ("resources",),
    ("kinds",),
    ("formats",),
    ("draft",),
    ("scripted",),
    ("recorder",),
    ("case",),
    ("wiring",),
    ("lint",),
    ("mixers",),
    ("kernels",),
    ("accept",),
    ("sampling",),
    ("draws",),
    ("families",),
    ("tiny",),
    ("engines",),
    ("inject",),
    ("dflash",),
    ("draft_faults",),
    ("compare",),
    ("noise",),
    ("verdict",),
    ("ties",),
    ("sampled",),
    ("known",),
    ("commit",),
    ("attribution", "sensitivity"),
    ("outcome",),
    ("apart",),
    ("settings",),
    ("drafting", "judging"),
    ("passes",),
    ("check",),
    ("stored",),
    ("replay",),
    ("batch",),
    ("rounds",),
    ("sweep",),
    ("survey",),
    ("selftest",),
    ("job",),
    ("report",),
    ("history",),
    ("gate",),
    ("server",),
    ("commands",),
    ("cli", "pytest_plugin"),
    ("__main__",),
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}

WITHOUT_TORCH = (
    "",
    "errors",
    "words",
    "conclusion",
    "figures",
    "tree",
    "trace",
    "lint",
    "resources",
    "kinds",
    "draft",
    "formats",
    "case",
    "scripted",
    "plan",
    "pools",
    "recorder",
    "accept",
    "sampling",
    "draws",
    "job",
    "report",
    "journal",
    "history",
    "gate",
    "server",
    "commands",
    "cli",
    "pytest_plugin",
)
HEAVY = ("torch", "transformers", "sglang")


def imported(source: str, module: tuple[str, ...], submodules: set[str], *, is_package: bool = False):
    """(line, top-level module of ours or None for the package itself) of each import, those inside functions too.

    `module` is the importing module's place below the package, such as ("mixers", "gated_delta").
    """
    here = ("ddtree_check", *module) if is_package else ("ddtree_check", *module)[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *filter(None, [node.module])))
            targets = [origin]
            if origin == "ddtree_check":  # its names are modules, but for __version__
                names = [alias.name for alias in node.names if alias.name != "__version__"]
                targets = [f"{origin}.{name}" if name in submodules else origin for name in names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            targets = [str(node.args[0].value)] if name in ("import_module", "__import__") else []
        else:
            continue
        for target in targets:
            top, _, rest = target.partition(".")
            if top == "ddtree_check":
                yield node.lineno, rest.split(".")[0] or None


def upward_imports(package: Path) -> list[str]:
    """One line for each import that does not go downwards, and for each module without a place in the order."""
    found = []
    files = {path: path.relative_to(package).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    submodules = {parts[0] for parts in files.values()} | set(RANK)
    for path, parts in files.items():
        is_package = parts[-1] == "__init__"
        module = parts[:-1] if is_package else parts
        name = path.relative_to(package)
        if not module:  # ddtree_check/__init__.py only shows what the modules hold
            continue
        own = module[0]
        if own not in RANK:
            found.append(f"{name}: no place in the module order; add {own!r} to ORDER in tests/test_imports.py")
            continue
        for line, target in imported(path.read_text(), module, submodules, is_package=is_package):
            if target == own:
                continue
            if target is None:
                found.append(
                    f"{name}:{line} imports from ddtree_check itself; import from the module that owns the name"
                )
            elif RANK.get(target, len(ORDER)) >= RANK[own]:
                found.append(f"{name}:{line} imports {target}, which does not stand before {own}")
    return found


def test_modules_import_downwards():
    assert len(list(PACKAGE.rglob("*.py"))) > 1
    assert upward_imports(PACKAGE) == []


UPWARD = [
    pytest.param("draft.py", "from ddtree_check.flows.check import run", "draft.py:1 imports check", id="from-module"),
    pytest.param("draft.py", "import ddtree_check.flows.check", "draft.py:1 imports check", id="import"),
    pytest.param("draft.py", "from ddtree_check import tree, check", "draft.py:1 imports check", id="from-package"),
    pytest.param(
        "draft.py", "from ddtree_check import run", "draft.py:1 imports from ddtree_check itself", id="facade"
    ),
    pytest.param(
        "draft.py", "def f():\n    from .check import run", "draft.py:2 imports check", id="relative-in-function"
    ),
    pytest.param("draft.py", "def f():\n    from . import check", "draft.py:2 imports check", id="relative-module"),
    pytest.param(
        "draft.py", "importlib.import_module('ddtree_check.flows.check')", "draft.py:1 imports check", id="by-name"
    ),
    pytest.param("mixers/kda.py", "from ..check import run", "mixers/kda.py:1 imports check", id="relative-two-up"),
    pytest.param(
        "mixers/__init__.py", "from ..check import run", "mixers/__init__.py:1 imports check", id="relative-init"
    ),
    pytest.param("cli.py", "from ddtree_check import pytest_plugin", "cli.py:1 imports pytest_plugin", id="sibling"),
    pytest.param("tree.py", "from ddtree_check.helpers import f", "tree.py:1 imports helpers", id="unlisted-target"),
    pytest.param("helpers.py", "", "helpers.py: no place in the module order", id="unlisted-module"),
]


def write(package: Path, name: str, source: str) -> Path:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return package


@pytest.mark.parametrize(("name", "source", "message"), UPWARD)
def test_an_upward_import_is_refused(tmp_path, name, source, message):
    found = upward_imports(write(tmp_path, name, source))
    assert len(found) == 1 and found[0].startswith(message), found


def test_a_downward_import_is_accepted(tmp_path):
    write(tmp_path, "__init__.py", "from ddtree_check.flows.check import run")
    write(tmp_path, "check.py", "import torch\nfrom ddtree_check import __version__, tree\nfrom . import draft\n")
    write(
        tmp_path,
        "cli.py",
        "def f():\n    from ddtree_check.flows.check import run\n    from .engines.sglang import Engine",
    )
    write(
        tmp_path, "mixers/kda.py", "from ..tree import DraftTree\nfrom . import gated_delta\nfrom .gated_delta import f"
    )
    write(tmp_path, "mixers/__init__.py", "from .kda import step\nfrom ..wiring import Wiring")
    assert upward_imports(tmp_path) == []


def heavy_after_import(module: str, path: Path) -> list[str]:
    """Which of HEAVY a fresh interpreter has loaded after importing `module` from `path`."""
    code = f"import {module}, sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.parametrize("name", WITHOUT_TORCH, ids=lambda name: name or "package")
def test_imports_without_torch(name, request):
    if name and not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).is_dir():
        request.applymarker(pytest.mark.xfail(reason=f"ddtree_check/{name}.py is not written yet", strict=True))
    assert heavy_after_import(f"ddtree_check.{name}".rstrip("."), REPO) == []


def test_a_hidden_torch_import_is_seen(tmp_path):
    write(tmp_path, "torch.py", "")  # a stand-in: the real one takes seconds
    write(tmp_path, "outer.py", "import inner")
    write(tmp_path, "inner.py", "import torch")
    assert heavy_after_import("outer", tmp_path) == ["torch"]


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
    source = (
        "from ddtree_check import inject\nfrom ddtree_check.tree.draft_tree import DraftTree, Bush\ninject.keys_alone()"
    )
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
