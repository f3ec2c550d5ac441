"""What the README says of support is what the table says."""

from pathlib import Path

import pytest

from ddtree_check.cli import main

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
