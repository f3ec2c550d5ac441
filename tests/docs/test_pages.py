"""The pages hold together: sizes, the index, links, the names of files and options, the length of sentences."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import typer

from ddtree_check.cli.main import app, main
from ddtree_check.pytest_plugin import OPTIONS
from tests.docs.pages import DOCS, INDEX, PAGES, README, REPO, anchors, links, name, sentences, spans, words

MOST_WORDS = 25
UNFINISHED: tuple[str, ...] = ()  # pages whose sentences are still too long; one that is no longer must leave
FOLDERS = ("benchmarks", "ddtree_check", "docs", "fixtures", "reports", "tests")
FOREIGN = {  # options of other programs that the pages name
    "--speculative-num-draft-tokens", "--mamba-radix-cache-strategy", "--disable-overlap-schedule",
    "--disable-radix-cache", "--no-deps", "--part",
}  # fmt: skip


def page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=name)


# Size and index


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 8000, "move what is not needed at first to docs/"


def listed(index: str) -> list[str]:
    """Return the pages that the list of an index names, one line each."""
    return re.findall(r"^- \[[^\]]+\]\(([\w-]+\.md)\): \S.*$", index, flags=re.M)


def test_the_index_has_one_line_for_each_page():
    assert sorted(listed(page(INDEX))) == sorted(path.name for path in DOCS if path != INDEX)


def test_the_readme_leads_to_the_index_and_a_page_without_a_line_is_noticed():
    assert "docs/README.md" in [target for _, target in links(page(README))]
    assert listed("- [a](a.md): what\n- [b](b.md)\ntext [c](c.md): what\n") == ["a.md"]


# Links and names


def broken(where: Path, text: str) -> list[str]:
    """Return a line for each link that leads to no file, or to no heading of it."""
    lines = []
    for number, target in links(text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        leads = where if not file else where.parent / file
        if not leads.exists():
            lines.append(f"{name(where)}:{number}: no file {target}")
        elif anchor and anchor not in anchors(text if not file else page(leads)):
            lines.append(f"{name(where)}:{number}: no heading for #{anchor}")
    return lines


@each([*PAGES, REPO / "CHANGELOG.md"])
def test_links_lead_somewhere(path):
    assert not broken(path, page(path))


def test_a_broken_link_is_noticed():
    text = "# Two words\n[a](#two-words) [b](#three-words) [c](docs/none.md) [d](docs/gate.md#nope) `[e](no.md)`\n"
    assert [line.rpartition(" ")[2] for line in broken(README, text)] == ["#three-words", "docs/none.md", "#nope"]


def missing(text: str) -> list[str]:
    """Return the paths of this repository, given as inline code, that do not exist."""
    paths = (code.rstrip("/") for _, code in spans(text))
    named = (code for code in paths if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+", code))
    kept = (code for code in named if not code.startswith("reports/") or "sample" in code)  # the rest: written by runs
    return [code for code in kept if not (REPO / code).exists()]


@each(PAGES)
def test_files_that_a_page_names_exist(path):
    assert not missing(page(path))


def test_a_file_that_is_gone_is_noticed():
    assert missing("`docs/gate.md`, `docs/gone.md`, `ddtree_check/`") == ["docs/gone.md"]


def test_pages_that_the_code_names_exist():
    for file in (REPO / "ddtree_check").rglob("*.py"):
        for target in re.findall(r"\bdocs/[\w-]+\.md", file.read_text(encoding="utf-8")):
            assert (REPO / target).exists(), f"{name(file)} names {target}"


@functools.cache
def options() -> frozenset[str]:
    """Return every option of every command, and those of the pytest plugin."""
    commands = typer.main.get_command(app).commands.values()
    own = {option for command in commands for parameter in command.params for option in parameter.opts}
    return frozenset(own | {"--help", "--version"} | {each.flag().replace("--", "--ddtree-", 1) for each in OPTIONS})


def unknown_options(text: str) -> list[str]:
    """Return the options that inline code names and nothing here takes: ours only, not those of a script."""
    found = []
    for _, code in spans(text):
        if code.startswith(("--", "ddtree-check ", "compare ", "generate ", "sweep ", "server ", "selftest ")):
            found += [word for word in re.findall(r"--[a-z][\w-]*", code) if word not in options() | FOREIGN]
    return found


@each(PAGES)
def test_options_that_a_page_names_exist(path):
    assert not unknown_options(page(path))


def test_an_option_that_is_gone_is_noticed():
    assert unknown_options("`--wiring`, `--wirings flat`, `compare --limits 1`, `other --gone`") == [
        "--wirings",
        "--limits",
    ]


# Tables that the program prints


def block(text: str, what: str) -> str:
    return text.partition(f"<!-- {what} -->")[2].partition(f"<!-- /{what} -->")[0].strip()


def test_the_table_of_families_is_the_generated_one(capsys):
    assert main(["models", "--markdown"]) == 0
    table = capsys.readouterr().out.strip()
    families = block(page(REPO / "docs" / "families.md"), "families")
    assert families == table, "paste the output of: ddtree-check models --markdown"
    types = table.count("\n") - 1
    assert f"{types} model types are supported" in page(README)


# Sentences


def long(where: str, text: str) -> list[str]:
    """Return a line for each sentence that is too long: where it begins, how long it is, how it begins."""
    measured = ((line, words(sentence), sentence) for line, sentence in sentences(text))
    return [
        f"{where}:{line}: {count} words, at most {MOST_WORDS}: {sentence[:90]}"
        for line, count, sentence in measured
        if count > MOST_WORDS
    ]


@each([README, *DOCS])
def test_sentences_are_short(path):
    lines = long(name(path), page(path))
    if name(path) in UNFINISHED:
        assert lines, f"{name(path)} is short enough now: take it out of UNFINISHED"
    else:
        assert not lines, "\n".join(["split these sentences:", *lines])


def test_a_long_sentence_is_noticed_and_code_tables_and_headings_are_not_counted():
    many = "word " * MOST_WORDS
    text = (
        f"# {many} heading\n\n| {many} cell |\n\n```text\n{many} code\n```\n\n"
        f"{many}`a b c`.\n\n- Short. {many.strip()}.\n- {many}\n  more.\n"
    )
    lines = long("page", text)
    assert [line.partition(" words")[0] for line in lines] == ["page:9: 26", "page:12: 26"]
