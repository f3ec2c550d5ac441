"""What the README says of support is what the table says."""

from pathlib import Path

import pytest

from ddtree_check.cli.main import main

README = Path(__file__).resolve().parents[1] / "README.md"


def block(text: str) -> str:
    return text.partition("<!-- families -->")[2].partition("<!-- /families -->")[0].strip()


def test_the_support_table_is_the_generated_one(capsys, monkeypatch):
    assert main(["models", "--markdown"]) == 0
    table = capsys.readouterr().out.strip()
    assert block(README.read_text(encoding="utf-8")) == table, "paste the output of: ddtree-check models --markdown"
    assert table.count("\n") > 20


@pytest.mark.parametrize(
    "option", ["--wiring", "--oracle", "--require", "--tree", "--weights", "--budget", "--prompts"]
)
def test_options_that_the_readme_names_exist(option, capsys):
    assert option in README.read_text(encoding="utf-8")
    main(["compare", "--help"])
    assert option in capsys.readouterr().out


def test_the_engine_of_the_guide_goes_red_and_without_its_fault_it_passes(tmp_path, monkeypatch, capsys):
    guide = (README.parent / "docs" / "guide.md").read_text(encoding="utf-8")
    code = guide.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "guided.py").write_text(code, encoding="utf-8")
    (tmp_path / "guided_right.py").write_text(
        code.replace("UNFORKED if wiring == FORKED else wiring", "wiring"), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    line = ["compare", "--limit", "1", "--budget", "8", "--controls", "4"]
    assert main([*line, "--engine", "guided:Forgetful"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "looks unforked: states or windows read in row order" in out and "insensitive" not in out
    assert "enters at layer 0 (gated delta, state and conv)" in out and "engine guided:Forgetful" in out
    assert main([*line, "--engine", "guided_right:Forgetful"]) == 0
