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


def test_a_type_checker_sees_the_same_places():
    module = ast.parse(Path(ddtree_check.__file__).read_text())
    (guarded,) = (node for node in module.body if isinstance(node, ast.If))
    seen = {alias.name: f"{node.module}:{alias.name}" for node in guarded.body for alias in node.names}
    assert seen == ddtree_check.PLACES


def test_torch_is_imported_by_what_needs_it_alone(tmp_path):
    """And check is the function, also where its module was imported before."""
    module = ddtree_check.PLACES["check"].partition(":")[0]
    code = f"import sys; from ddtree_check import {LIGHT}; print('torch' in sys.modules)\n"
    code += f"import ddtree_check.{module}, ddtree_check; print(callable(ddtree_check.check), 'torch' in sys.modules)"
    done = python(code, tmp_path)
    assert done.stdout == "False\nTrue True\n", done.stderr


@pytest.mark.parametrize(
    ("change", "last"),
    [(("", ""), "verdict: pass 0"), (("controls=4", 'controls=4, require=("tree_unforked",)'), "verdict: fail 1")],
    ids=["as it is", "a mode that leaks"],
)
def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys, change, last):
    code = (REPO / "docs" / "python.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert change[0] in code and len(code.splitlines()) <= 12
    assert code.count("budgets=(16,)") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace(*change).replace("(16,)", "(6,)"), "the page", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert [line.split()[0] for line in lines[:-1]] == ["given/tree", "drafted/6"]
