"""Every block of the documentation runs, or says what it needs; what cannot run here is parsed all the same.

    ```console            lines that begin with "$ " run, in a folder of their own like the root of a clone; the
                          lines between them must occur in what is printed; "# exit 1" says which exit code is expected
    ```console slow       the same under the marker slow
    ```console needs=gpu  not run: needs a gpu, a hub, a server, a package index or hours; its options are parsed
    ```python             runs; what stands behind "print(...)  # " must be printed. file=NAME: written, not run
    ```json reader=NAME   is read by that reader of ours (READERS); toml and jsonl likewise. file=NAME writes it as well
    ```text               a drawing, a formula or a list: holds no command

In what is shown "..." stands for anything, lines too that continue a sentence. A number with an exponent is rounding
noise and matches any such number; other numbers with a point must agree within 5 %.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ddtree_check.cli.main import app, main
from ddtree_check.engines.sglang import recorder, scripted
from ddtree_check.gate.config import load_config
from ddtree_check.tree.case import load_prompts, load_tree
from ddtree_check.tree.drafts.recorded import load_recorded
from tests.docs.pages import PAGES, REPO, Block, fenced, indented, name

NEEDS = ("gpu", "hub", "server", "index", "hours")
READERS = {
    "tree": load_tree,
    "prompts": load_prompts,
    "recorded": load_recorded,
    "gate": load_config,
    "recorder": lambda path: recorder.read_options(str(path)),
    "script": scripted.read_script,
}
DATA = ("json", "jsonl", "toml")
KNOWN = {"console": {"needs", "slow"}, "python": {"file", "slow"}, "text": set()} | {
    language: {"reader", "file"} for language in DATA
}
PROGRAMS = ("ddtree-check", "python", "python3.12", "make", "pytest", "pip", ".")
CLONE = ("benchmarks", "docs", "fixtures")  # what a block finds beside itself
NUMBER = r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]\d+"

BLOCKS = [block for page in PAGES for block in fenced(name(page), page.read_text(encoding="utf-8"))]


def commands(block: Block) -> list[tuple[list[str], int, list[str]]]:
    """Return each command of a console block: its words, the exit code to expect, the lines that it shows."""
    entries: list[tuple[list[str], int, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            code = re.search(r"#.*\bexit (\d)", line)
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # the environment, which a server wants
                words.pop(0)
            assert words and words[0] in PROGRAMS, f"{block.id}: {line}: expected one of {', '.join(PROGRAMS)}"
            entries.append((words, int(code[1]) if code else 0, []))
        elif line.strip():
            assert entries, f"{block.id}: {line}: expected '$ ' and a command before what it shows"
            entries[-1][2].append(line.rstrip())
    assert entries, f"{block.id}: no command, expected lines that begin with '$ '"
    return entries


def faulty(block: Block) -> str | None:
    """Return why the form of a block leaves it neither run nor read, or None."""
    if block.language not in KNOWN:
        return f"language {block.language!r}, expected one of {', '.join(KNOWN)}"
    if unknown := block.markers.keys() - KNOWN[block.language]:
        return f"marker {min(unknown)!r}, expected one of {', '.join(sorted(KNOWN[block.language])) or 'none'}"
    needs = block.markers.get("needs")
    if needs is not None and needs not in NEEDS:
        return f"needs={needs}, expected one of {', '.join(NEEDS)}"
    if block.language in DATA and block.markers.get("reader") not in READERS:
        return f"reader {block.markers.get('reader')!r}, expected one of {', '.join(READERS)}"
    if block.language == "text" and re.search(rf"^\s*(\$ |({'|'.join(PROGRAMS[:-1])}) )", block.text, flags=re.M):
        return "a command in a block of text, expected a console block"
    return None


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_is_fenced_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert not indented(text), f"{name(path)}: fence the indented blocks at lines {indented(text)}"
    reasons = [(block.id, faulty(block)) for block in fenced(name(path), text)]
    assert not [reason for reason in reasons if reason[1]]


@pytest.mark.parametrize(
    "opening, reason",
    [
        ("", "language ''"),
        ("sh", "language 'sh'"),
        ("console needs=luck", "needs=luck"),
        ("console skip", "marker 'skip'"),
        ("json", "reader None"),
        ("text", "a command"),
    ],
)
def test_a_block_that_nothing_runs_is_noticed(opening, reason):
    (block,) = fenced("page", f"```{opening}\n$ ddtree-check models\n```\n")
    assert reason in faulty(block)
    assert indented("a\n\n    $ ddtree-check models\n") == [3]


# Parsing


def parse(words: list[str]) -> None:
    """Hold a command against what would take it, without running it. Raises AssertionError."""
    program, *rest = words
    if program == "ddtree-check" and rest and not rest[0].startswith("-"):
        command = typer.main.get_command(app).commands.get(rest[0])
        assert command, f"no command {rest[0]}"
        try:
            command.make_context(rest[0], rest[1:])
        except typer.Exit:  # --help
            pass
        except Exception as error:
            assert not hasattr(error, "format_message"), f"{shlex.join(words)}: {error.format_message()}"
            raise
    elif program == "make":
        target = next(word for word in rest if "=" not in word)
        assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.M), target
    elif program == "python" and rest[0] == "-m" and rest[1].startswith("benchmarks."):
        assert (REPO / f"{rest[1].replace('.', '/')}.py").exists(), rest[1]
    elif program == "python" and rest[0].endswith(".py"):
        assert (REPO / rest[0]).exists(), rest[0]
    elif program == "pytest":
        assert all((REPO / word).exists() for word in rest if word.startswith("tests/")), rest


CONSOLE = [block for block in BLOCKS if block.language == "console" and not faulty(block)]


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.id)
def test_every_command_is_one_that_is_taken(block):
    for words, _, _ in commands(block):
        parse(words)


@pytest.mark.parametrize(
    "line",
    [
        "ddtree-check compare --limits 1",
        "ddtree-check compares",
        "make tests",
        "python benchmarks/gone.py",
        "python -m benchmarks.gone",
        "pytest tests/gone.py",
    ],
)
def test_a_command_that_nothing_takes_is_noticed(line):
    with pytest.raises(AssertionError):
        parse(shlex.split(line))


# Running


def shows(printed: str, lines: list[str]) -> str | None:
    """Return the part of what was to be printed that is missing, or None."""
    pattern, expected = [], []
    for line in lines:
        if line.strip() == "...":
            pattern.append(r"(?:.*\n)*?")
            continue
        row = ""
        for piece in re.split(rf"({NUMBER}|-{{3,}}|\.\.\.|\s+)", line.strip()):
            if re.fullmatch(NUMBER, piece):
                expected.append(piece)
                row += rf"({NUMBER})"
            else:
                row += {"...": r".*?(?:\n  \S.*?)*?"}.get(piece, r"-+" if piece.startswith("---") else re.escape(piece))
                if piece.isspace():
                    row = row.removesuffix(re.escape(piece)) + r"\s+"
        pattern.append(rf"[^\S\n]*{row}[^\S\n]*\n")
    match = re.search("".join(pattern), printed + "\n")
    if match is None:
        return "\n".join(lines)
    for want, got in zip(expected, match.groups(), strict=True):
        noise = "e" in want
        if noise != ("e" in got) or not (noise or abs(float(want) - float(got)) <= 0.05 * abs(float(want))):
            return f"{want}, got {got}"
    return None


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that looks like the root of a clone; modules that a block brings along are forgotten afterwards."""
    for folder in CLONE:
        (tmp_path / folder).symlink_to(REPO / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = set(sys.modules)
    yield tmp_path
    for module in set(sys.modules) - loaded:
        if str(getattr(sys.modules[module], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[module]


def run_console(block: Block, capfd) -> None:
    """Run a console block's commands here. Raises AssertionError for another exit code or other words."""
    for words, code, lines in commands(block):
        capfd.readouterr()
        if words[0] == "ddtree-check":
            got = main(words[1:])
        else:
            starts = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
            got = subprocess.run([*starts[words[0]], *words[1:]], timeout=600).returncode
        out, err = capfd.readouterr()
        assert got == code, f"{block.id}: {shlex.join(words)}: exit {got}, expected {code}\n{out[-2000:]}{err[-2000:]}"
        lost = shows(out + err, lines)
        assert lost is None, f"{block.id}: {shlex.join(words)} does not print\n{lost}\nbut\n{out[-4000:]}{err[-1000:]}"


def run_python(block: Block, capfd) -> None:
    """Run a Python block here. Raises what it raises, and AssertionError if it prints other words than it says."""
    capfd.readouterr()
    exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})
    out = capfd.readouterr().out
    for line in re.findall(r"^\s*print\(.*\)  # (.+)$", block.text, flags=re.M):
        assert shows(out, [line]) is None, f"{block.id}: expected {line!r}, printed\n{out}"


def marks(block: Block):
    return [pytest.mark.slow] if "slow" in block.markers else []


RUN = [block for block in CONSOLE if "needs" not in block.markers]
RUN += [block for block in BLOCKS if block.language == "python" and "file" not in block.markers]
READ = [block for block in BLOCKS if block.language in DATA]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.id, marks=marks(block)) for block in RUN])
def test_blocks_run(block, clone, capfd):
    for other in BLOCKS:
        if other.page == block.page and "file" in other.markers:
            Path(other.markers["file"]).write_text(other.text, encoding="utf-8")
    (run_python if block.language == "python" else run_console)(block, capfd)


@pytest.mark.parametrize("block", READ, ids=lambda block: block.id)
def test_data_is_read(block, tmp_path):
    file = tmp_path / block.markers.get("file", f"block.{block.language}")
    file.write_text(block.text, encoding="utf-8")
    READERS[block.markers["reader"]](file)


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ ddtree-check plan --reserved kv=16 --budget 16\n```",  # exits 1
        "```console\n$ ddtree-check models  # exit 1\n```",
        "```console\n$ ddtree-check models\nno such line\n```",
        "```python\nprint(2)  # 3\n```",
        "```python\nraise AssertionError\n```",
    ],
)
def test_a_block_that_is_wrong_is_noticed(text, clone, capfd):
    (block,) = fenced("page", text)
    with pytest.raises(AssertionError):
        (run_python if block.language == "python" else run_console)(block, capfd)


def test_data_that_a_reader_refuses_is_noticed(tmp_path):
    for reader in READERS:
        file = tmp_path / ("bad.jsonl" if reader == "prompts" else "bad.toml")
        file.write_text("{nothing", encoding="utf-8")
        with pytest.raises(Exception, match=r"bad\.|TOML|JSON|json"):
            READERS[reader](file)


def test_what_is_shown_is_held_to_what_is_printed():
    printed = "name   worst\n----  ------\nab    3.1e-05\n\nverdict: pass, 2.06 nodes\n"
    assert shows(printed, ["name worst", "---- -------", "ab 9.9e-06", "...", "verdict: ... 2.05 nodes"]) is None
    assert shows(printed, ["name worst", "verdict: ..."])
    assert shows(printed, ["ab 3.1"])
    assert shows(printed, ["... 1.5 nodes"]) == "1.5, got 2.06"
    assert shows("a b\n  c\nd", ["a ...", "d"]) is None and shows("a b\nc\nd", ["a ...", "d"])
