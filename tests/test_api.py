"""The public Python API: what the package shows, where it comes from, and the page about it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_check

REPO = Path(__file__).resolve().parents[1]
LIGHT = "DraftTree, Item, Settings, TraceWriter, Wiring, read_trace"  # without torch


def python(code: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_every_public_name_is_the_one_of_its_module():
    assert sorted(ddtree_check.PLACES) == sorted(ddtree_check.__all__)
    for name in ddtree_check.__all__:
        assert getattr(ddtree_check, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Drafttree'"):
        ddtree_check.Drafttree  # noqa: B018


def test_check_is_the_function_whatever_was_imported_before(tmp_path):
    module = ddtree_check.PLACES["check"].partition(":")[0]
    code = f"import ddtree_check.{module}, ddtree_check; print(callable(ddtree_check.check))"
    done = python(code, tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_a_type_checker_sees_the_same_places():
    module = ast.parse(Path(ddtree_check.__file__).read_text())
    (guarded,) = (node for node in module.body if isinstance(node, ast.If))
    seen = {alias.name: f"{node.module}:{alias.name}" for node in guarded.body for alias in node.names}
    assert seen == ddtree_check.PLACES


@pytest.mark.parametrize(("names", "heavy"), [(LIGHT, "False"), ("check", "True")])
def test_torch_is_imported_by_what_needs_it_alone(tmp_path, names, heavy):
    done = python(f"from ddtree_check import {names}; import sys; print('torch' in sys.modules)", tmp_path)
    assert done.stdout.strip() == heavy, done.stderr


@pytest.mark.parametrize(
    ("change", "last"),
    [(("", ""), "verdict: pass 0"), (("controls=4", 'controls=4, require=("tree_unforked",)'), "verdict: fail 1")],
    ids=["as it is", "a mode that leaks"],
)
def test_the_example_of_the_page_runs(tmp_path, change, last):
    code = (REPO / "docs" / "python.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert change[0] in code and len(code.splitlines()) <= 12
    done = python(code.replace(*change), tmp_path)
    lines = done.stdout.splitlines()
    assert lines[-1] == last, done.stderr
    assert [line.split()[0] for line in lines[:-1]] == ["given/tree", "drafted/16"]
