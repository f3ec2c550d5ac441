"""The real command line, in this process: what bad input answers, and what a run prints and writes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_check.cli import main as cli
from ddtree_check.cli.commands import run as commands
from ddtree_check.report.record import load_record, write_record
from tests import tiny
from tests.tiny import CONTEXT, VOCAB, break_forked, hand_record

checkpoint = tiny.checkpoint

REPO = Path(__file__).resolve().parents[2]
QUICK = "--limit 1 --length 2 --budget 3 --controls 1"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """An unknown model is looked for in the cache only: asking a hub that is not there takes half a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def files(checkpoint, tmp_path_factory):
    """A folder of inputs, good and bad; names say which."""
    folder = tmp_path_factory.mktemp("inputs")

    def lines(name, *values):
        (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))

    def tree(name, tokens, parents):
        (folder / name).write_text(json.dumps({"tokens": tokens, "parents": parents}))

    lines("good.jsonl", {"id": "one", "token_ids": [5, 6, 7]}, {"id": "two", "token_ids": [8]})
    lines("last-token.jsonl", {"token_ids": [VOCAB - 1]})
    lines("token.jsonl", {"token_ids": [1, VOCAB]})
    lines("fits.jsonl", {"token_ids": [1] * (CONTEXT - 3)})  # and the root, and two drafted tokens
    lines("long.jsonl", {"token_ids": [1] * (CONTEXT - 2)})
    lines("no-ids.jsonl", {"token_ids": []})
    lines("text.jsonl", {"text": "def"})
    lines("bytes.jsonl", {"text": "~Q~"})  # single bytes have low ids in the embedded vocabulary
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.txt").write_text(" \n")
    tree("good.json", [None, 1, 2, VOCAB - 1], [-1, 0, 0, 1])
    tree("cycle.json", [None, 1, 2, 3], [-1, 3, 1, 2])
    tree("two-roots.json", [None, 1, 2], [-1, 0, -1])
    tree("siblings.json", [None, 1, 2, 1], [-1, 0, 0, 0])
    tree("late-parent.json", [None, 1, 2], [-1, 2, 0])
    tree("token.json", [None, 1, VOCAB], [-1, 0, 0])
    (folder / "cut.json").write_text('{"tokens": [')
    lines("drafts.jsonl", {"tree": {"tokens": [None, 1], "parents": [-1, 0]}})
    lines("marginals.jsonl", {"marginals": {"ids": [[1, VOCAB - 1]], "log_probs": [[-0.5, -1.0]]}})
    lines("big-marginals.jsonl", {"marginals": {"ids": [[1, VOCAB]], "log_probs": [[-0.5, -1.0]]}})
    shutil.copytree(checkpoint, folder / "corrupt")
    weights = folder / "corrupt" / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:5000])
    (folder / "unknown-type").mkdir()
    (folder / "unknown-type" / "config.json").write_text('{"model_type": "never-heard-of"}')
    return folder


@pytest.fixture(scope="session")
def exit_code(files, checkpoint):
    """Exit code of a command line that ought to run; each is run once in a session."""
    return functools.cache(lambda line: cli.main(words(line, files, checkpoint)))


def words(line: str, files: Path, checkpoint: Path) -> list[str]:
    """A row of the table as arguments. {in} is the folder of inputs; the tiny model and its prompts are understood."""
    given = line.replace("{in}", str(files)).split()
    default = {"--model": str(checkpoint), "--prompts": str(files / "good.jsonl")}
    default |= dict(zip(QUICK.split()[::2], QUICK.split()[1::2], strict=True))
    rest = [word for name, value in default.items() if name not in given for word in (name, value)]
    return ["compare", *given, *rest]


BAD = [  # id, bad arguments, what the line says, the good neighbour, its exit code
    ("prompts-empty", "--prompts {in}/empty.jsonl", "empty.jsonl: empty, expected one JSON value a line", "", 0),
    ("prompts-blank", "--prompts {in}/blank.txt", "blank.txt: empty, expected the text of a prompt", "", 0),
    ("prompts-no-ids", "--prompts {in}/no-ids.jsonl", "no-ids.jsonl:1: .*no tokens, expected at least one", "", 0),
    ("prompts-missing", "--prompts {in}/none.jsonl", "none.jsonl: No such file", "", 0),
    (
        "prompt-too-long",
        "--prompts {in}/long.jsonl",
        "254 tokens and a tree 2 deep do not fit; the model's context is 256; shorten",
        "--prompts {in}/fits.jsonl",
        0,
    ),
    (
        "prompt-token",
        "--prompts {in}/token.jsonl",
        "prompt token-1: token 1 is 300, expected a token id in 0..299",
        "--prompts {in}/last-token.jsonl",
        0,
    ),
    (
        "prompt-text",
        "--prompts {in}/text.jsonl",
        'has no tokenizer .* lines of {"token_ids"',
        "--prompts {in}/good.jsonl",
        0,
    ),
    ("budget-0", "--budget 0", "budget: got '0', expected numbers of at least 1", "--budget 1", 2),
    ("budget-word", "--budget 16,x", "budget: got '16,x', expected numbers", "--budget 3,3", 0),
    ("limit-0", "--limit 0", "limit: got 0, expected a number of at least 1", "--limit 2", 0),
    ("limit-word", "--limit x", "Invalid value for '--limit'", "--limit 2", 0),
    ("only", "--only three", "only: no prompt 'three' among 1, first 'one'", "--only one", 0),
    ("model-unknown", "--model no/such", "no weights for 'no/such' .*Three ways on: .* --weights random", "", 0),
    ("model-type", "--model {in}/unknown-type", "unknown-type cannot be read .*never-heard-of", "", 0),
    (
        "model-corrupt",
        "--model {in}/corrupt",
        "corrupt holds a corrupt safetensors file .* download it again",
        "--model {in}/corrupt --weights random --tree {in}/good.json",
        0,
    ),
    (
        "tree-cycle",
        "--tree {in}/cycle.json",
        "cycle.json: tree: node 1 has parent 3, expected 0..0; list parents before",
        "--tree {in}/good.json",
        0,
    ),
    (
        "tree-two-roots",
        "--tree {in}/two-roots.json",
        "node 2 has parent -1, expected 0..1; only node 0 is a root",
        "--tree {in}/good.json",
        0,
    ),
    (
        "tree-siblings",
        "--tree {in}/siblings.json",
        "nodes 1 and 3 are both token 1 under parent 0",
        "--tree {in}/good.json",
        0,
    ),
    ("tree-late-parent", "--tree {in}/late-parent.json", "node 1 has parent 2", "--tree {in}/good.json", 0),
    (
        "tree-token",
        "--tree {in}/token.json",
        "node 2 has token 300, expected 0..299",
        "--tree {in}/good.json",
        0,
    ),
    ("tree-cut", "--tree {in}/cut.json", "cut.json: .*expected JSON", "--tree {in}/good.json", 0),
    (
        "draft-too-few",
        "--limit 2 --draft recorded:{in}/drafts.jsonl",
        "holds 1 drafts, expected one for each prompt up to number 2",
        "--draft recorded:{in}/drafts.jsonl",
        2,  # one node, which forks nothing
    ),
    (
        "draft-token",
        "--draft recorded:{in}/big-marginals.jsonl",
        "marginals: depth 1: token 1 is 300",
        "--draft recorded:{in}/marginals.jsonl",
        0,
    ),
    (
        "draft-and-tree",
        "--tree {in}/good.json --draft recorded:{in}/drafts.jsonl",
        "draft: got recorded:.* and the tree .*, expected one of them",
        "--tree {in}/good.json",
        0,
    ),
    ("draft", "--draft guess", "draft: got 'guess', expected self, ngram, recorded:FILE or dflash", "--draft ngram", 0),
    ("dtype", "--dtype int8", "dtype: got 'int8', expected one of float32", "--dtype float64", 0),
    ("device", "--device tpu9", "device: 'tpu9' cannot be used here", "--device cpu", 0),
    ("weights", "--weights fake", "weights: got 'fake', expected real or random", "--weights random", 0),
    ("engine", "--engine steam", "engine: got 'steam', expected one of", "--engine transformers", 0),
    (
        "require",
        "--require forked --tree {in}/good.json",
        "require: got 'forked', expected some of linear, tree_forked, tree_unforked",
        "--require tree_unforked --tree {in}/good.json",
        1,  # and so does the check go red
    ),
    ("require-nothing", "--require=", "require: got '', expected some of linear", "--require linear", 0),
    ("accept", "--accept most", "accept: got 'most', expected zero, full, first, branch, every or a path", "", 0),
    (
        "accept-path",
        "--tree {in}/good.json --accept 0-3",
        "accept: got '0-3', expected the path 0-1-3",
        "--tree {in}/good.json --accept 0-1-3,zero",
        0,
    ),
    ("batch", "--batch 2", "batch: got 2, expected numbers from 1 to 1, the number of prompts", "--batch 1", 0),
    ("seed", "--seed -1", "seed: got -1, expected a number from 0 to", "--seed 1", 0),
    ("rounds", "--rounds 0", "rounds: got 0, expected a number of at least 1", "", 0),
    ("rounds-tree", "--rounds 1 --tree {in}/good.json", "rounds: got one fixed tree, expected a draft", "", 0),
    ("order", "--order up", "order: got 'up', expected heap, breadth or depth", "--order depth", 0),
    ("acceptance", "--acceptance 2", "acceptance: got 2.0, expected a share from 0 to 1", "--acceptance 1", 0),
    ("json-no-folder", "--json {in}/none/run.json", r"none/run.json cannot be written \(No such file", "", 0),
    ("json-folder", "--json {in}", "is not a regular file, expected the name of a file to write", "", 0),
    ("option", "--frobnicate", "No such option: --frobnicate", "", 0),
]


@pytest.mark.parametrize(("bad", "says", "good", "code"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_input_is_one_line_and_exit_3(files, checkpoint, exit_code, capfd, bad, says, good, code):
    assert exit_code(good) == code, capfd.readouterr()
    capfd.readouterr()
    before = sorted(files.iterdir())
    assert cli.main(words(bad, files, checkpoint)) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and err.startswith("ddtree-check: "), err
    assert re.search(says, err), err
    assert sorted(files.iterdir()) == before


def test_big_models_are_not_loaded_before_their_input_is_checked(files, checkpoint, monkeypatch, capfd):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("ddtree_check.engines.registry.load_engine", load)
    for name in ("prompt-too-long", "prompt-token", "tree-token", "draft-token", "json-folder", "require", "dtype"):
        line = next(row[1] for row in BAD if row[0] == name)
        assert cli.main(words(line, files, checkpoint)) == 3
        assert "loaded" not in capfd.readouterr().err
    assert cli.main(words("", files, checkpoint)) == 3
    assert "internal error: AssertionError" in capfd.readouterr().err


def test_a_model_that_cannot_be_checked_is_inconclusive(files, checkpoint, tmp_path, capfd):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": VOCAB})
    )
    assert cli.main(words(f"--model {tmp_path} --weights random", files, checkpoint)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("ddtree-check: unsupported: model type 'gpt2'") and len(err.splitlines()) == 1


# --- runs -------------------------------------------------------------------------------------------------------------


def test_the_embedded_default_end_to_end(tmp_path, capfd):
    """The main job as a user types it: nothing given but where to write."""
    path = tmp_path / "run.json"
    assert cli.main(["compare", "--limit", "1", "--budget", "8,16", "--json", str(path)]) == 0
    out, err = capfd.readouterr()
    assert err == ""  # no bar, no advice of a library
    record = load_record(path)
    assert record["model"]["tokenizer"] == "own" and record["exit_code"] == 0
    assert out.splitlines()[0].startswith("model tiny-qwen3_5 · real weights · engine transformers · float32 · ")
    assert out.splitlines()[-1] == "verdict: pass (linear pass, tree_forked pass), exit code 0"
    case = record["cases"][0]["id"]
    for mode in ("ar", "linear", "tree_forked", "tree_unforked"):
        assert any(line.split()[:2] == [case, mode] for line in out.splitlines()), mode
    assert record["command"] == "ddtree-check compare --limit 1 --budget 8,16"

    assert cli.main(["show", str(path)]) == 0
    assert capfd.readouterr().out == out  # made from the record alone
    assert cli.main(["show", str(path), "--case", case]) == 0
    assert len(capfd.readouterr().out.splitlines()) > 9
    assert cli.main(["show", str(path), "--case", case, "--node", "8"]) == 0
    assert "\npath 0:" in capfd.readouterr().out
    assert cli.main(["show", str(path), "--format", "markdown"]) == 0
    assert "## Cases" in capfd.readouterr().out
    assert cli.main(["tree", str(path), "--case", case]) == 0
    legend, root, *nodes = re.sub(r"\n  (?=\S)", " ", capfd.readouterr().out).splitlines()  # the legend may wrap
    assert legend.startswith(f"case {case}: ") and root.endswith("[pass / pass] * +") and len(nodes) == 8


GENERATE = "--rounds 3 --budget 8 --length 4"


def test_generate_end_to_end(files, checkpoint, tmp_path, capfd):
    """Random weights: the text must be plain decoding's all the same. The journal spares a second run its passes."""
    path, journal = tmp_path / "rounds.json", tmp_path / "rounds.jsonl"
    line = ["generate", "--model", str(checkpoint), "--prompts", f"{files}/good.jsonl", *GENERATE.split()]
    line += ["--modes", "linear,tree_forked,shadow", "--plain", "1", "--journal", str(journal), "--json", str(path)]
    code = cli.main(line)
    out, err = capfd.readouterr()
    record = json.loads(path.read_text())
    assert code == record["exit_code"] and code != 1 and err == ""
    for mode in ("linear", "tree_forked"):
        assert record["rounds"]["summary"][mode]["off"] == 0
        assert any(line.split()[:5] == [mode, "6", "0", "0", "2"] for line in out.splitlines()), out
    assert out.splitlines()[-1] == f"verdict: {record['verdict']['text']}, exit code {code}"
    assert record["command"].startswith("ddtree-check generate --model ") and "--plain 1" in record["command"]
    written = journal.read_bytes()
    assert len(written.splitlines()) == 3
    assert cli.main(line) == code and capfd.readouterr().out == out and journal.read_bytes() == written
    assert cli.main([*line, "--seed", "1"]) == 3
    assert "belongs to a run with other settings" in capfd.readouterr().err
    assert cli.main(["generate", "--modes", "ar"]) == 3
    assert "modes: got 'ar', expected some of linear" in capfd.readouterr().err


def test_compare_with_rounds_and_accepts_has_one_verdict(files, checkpoint, tmp_path, capfd):
    path = tmp_path / "run.json"
    code = cli.main(words(f"--rounds 3 --accept full,branch --json {path} --budget 8 --length 4", files, checkpoint))
    out = capfd.readouterr().out
    record = load_record(path)
    assert code == record["exit_code"] and record["rounds"]["summary"]["tree_forked"]["off"] == 0
    assert [accept["pattern"] for accept in record["cases"][0]["commit"]] == ["full", "branch"]
    assert "Commits, against a prefill" in out and "Rounds against plain decoding" in out
    assert "--rounds 3" in record["command"] and "--accept full,branch" in record["command"]
    assert cli.main(["show", str(path)]) == 0 and capfd.readouterr().out == out


def test_text_prompts_borrow_a_tokenizer_for_random_weights(files, checkpoint, tmp_path, capfd):
    path = tmp_path / "run.json"
    line = f"--prompts {files}/bytes.jsonl --weights random --json {path}"
    assert cli.main(words(line, files, checkpoint)) == 0, capfd.readouterr()
    assert load_record(path)["model"]["tokenizer"] == "embedded"
    assert "RANDOM WEIGHTS: " in capfd.readouterr().out
    assert cli.main(words(line.replace(" --weights random", ""), files, checkpoint)) == 3
    assert "has no tokenizer" in capfd.readouterr().err


def test_quiet_prints_the_verdict_alone(files, checkpoint, capfd):
    assert cli.main(words("--quiet", files, checkpoint)) == 0
    assert capfd.readouterr().out == "verdict: pass (linear pass, tree_forked pass), exit code 0\n"


# --- the other commands, and how a run ends ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, hand_record("a/3"))
    return str(path)


VIEWS = [
    pytest.param(["show", "{path}", "--case", "b"], "case: got 'b', expected one of a/3", id="case"),
    pytest.param(["show", "{path}", "--case", "a/3", "--node", "9"], "node: got 9, expected 0..3", id="node"),
    pytest.param(["show", "{path}", "--node", "1"], "node: got 1 without a case", id="node-alone"),
    pytest.param(["show", "{path}", "--html", "x", "--case", "a/3"], "html: shows the whole", id="html-case"),
    pytest.param(["tree", "{path}", "--case", "a/3", "--mode", "x"], "mode: got 'x', expected one of ar", id="mode"),
    pytest.param(["tree", "{path}"], "Missing option '--case'", id="no-case"),
    pytest.param(["show", "{path}x"], "run.jsonx: No such file", id="missing"),
    pytest.param(["show"], "Missing argument '", id="no-record"),
    pytest.param(["frob"], "No such command 'frob'", id="command"),
    pytest.param([], "no command, expected one of those that ddtree-check --help lists", id="nothing"),
]


@pytest.mark.parametrize(("line", "says"), VIEWS)
def test_views_refuse_in_one_line(saved, capfd, line, says):
    for good in (["show", saved], ["show", saved, "--case", "a/3", "--node", "3"], ["tree", saved, "--case", "a/3"]):
        assert cli.main(good) == 0
    capfd.readouterr()
    assert cli.main([word.format(path=saved) for word in line]) == 3
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("ddtree-check: ") and len(err.splitlines()) == 1 and says in err, err


def test_a_record_without_its_inside_is_refused(saved, tmp_path, capfd):
    data = hand_record("a/3")
    del data["cases"][0]["nodes"][2]["tree_unforked"]
    write_record(tmp_path / "edited.json", data)
    assert cli.main(["show", str(tmp_path / "edited.json")]) == 3
    assert "edited.json: no whole record (KeyError: 'tree_unforked')" in capfd.readouterr().err


def test_the_exit_code_is_the_records(monkeypatch, capfd):
    for record, code in ((hand_record("a/3"), 0), (break_forked(hand_record("a/3")), 1)):
        monkeypatch.setattr(commands, "run", lambda job, progress, record=record: record)
        assert cli.main(["compare"]) == code
        assert capfd.readouterr().out.splitlines()[-1].endswith(f"exit code {code}")


def test_ctrl_c_keeps_the_old_file(saved, monkeypatch, capfd):
    def interrupted(job, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run", interrupted)
    assert cli.main(["compare", "--json", saved]) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "ddtree-check: interrupted"
    assert load_record(saved) == hand_record("a/3")
    assert list(Path(saved).parent.iterdir()) == [Path(saved)]


PIPES = {"capture_output": True, "text": True}
PANIC = type("PanicException", (BaseException,), {})  # as pyo3 names it


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(0), "engine: it ends its process (0), expected it to return or raise"),
        (SystemExit("bye"), "engine: it ends its process ('bye'), expected it to return or raise"),
        (PANIC("index out of bounds"), "library: it panicked (index out of bounds), expected input that it can read"),
        (ImportError("no module x"), "import: no module x, expected libraries as in constraints.txt"),
    ],
    ids=["exit", "exit-word", "panic", "import"],
)
def test_what_is_no_defect_is_one_line(error, line, monkeypatch, capfd):
    def stop(job, progress):
        raise error

    monkeypatch.setattr(commands, "run", stop)
    assert cli.main(["compare"]) == 3 and capfd.readouterr().err == f"ddtree-check: {line}\n"


@pytest.mark.parametrize("library", ["numpy", "typer"])
def test_a_broken_library_is_one_line(library, tmp_path):
    (tmp_path / f"{library}.py").write_text("raise AttributeError('half installed')\n")
    line = [sys.executable, "-m", "ddtree_check", "models"]
    done = subprocess.run(line, cwd=REPO, env=os.environ | {"PYTHONPATH": str(tmp_path)}, **PIPES)
    assert done.returncode == 3 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("ddtree-check: import: AttributeError: half installed")


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_what_was_run_is_shown_where_it_cannot_be_written(option, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(commands, "run", lambda job, progress: hand_record("a/3"))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cli.main(["compare", option, str(tmp_path / "out")]) == 3
    shown = capfd.readouterr()
    assert "verdict: pass" in shown.out and "make room there" in shown.err


def test_our_own_slips_do_not_read_as_a_defect(monkeypatch, capfd):
    def slip(job, progress):
        raise RuntimeError("slip")

    monkeypatch.setattr(commands, "run", slip)
    assert cli.main(["compare"]) == 3
    err = capfd.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("ddtree-check: internal error: RuntimeError; please")


def test_models_lists_every_alias_and_family(capfd):
    from ddtree_check.model.families import ALIASES, FAMILIES, UNSUPPORTED

    assert cli.main(["models"]) == 0
    out = capfd.readouterr().out
    first = {line.split()[0] for line in out.splitlines() if line}
    assert first >= {*ALIASES, *FAMILIES}
    assert all(f"Not supported: {name}: " in out for name in UNSUPPORTED)
    row = next(line for line in out.splitlines() if line.startswith("qwen3.6-27b "))
    assert row.split() == ["qwen3.6-27b", "Qwen/Qwen3.6-27B", "Qwen3.5", "/", "3.6", "/", "3.8", "64", "built", "in"]


def ours(code: str, *arguments: str, **settings) -> subprocess.CompletedProcess:
    """A fresh interpreter that runs `code`, with this clone on its path."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), **settings}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=120)


LIGHT = (
    "import sys; from ddtree_check.cli.main import main; code = main(); print('HEAVY', *(name for name in "
    "('torch', 'transformers', 'numpy.testing', 'rich') if name in sys.modules), file=sys.stderr); sys.exit(code)"
)


@pytest.mark.parametrize("line", [["--help"], ["compare", "--help"], ["models"], ["show", "{path}"], ["--version"]])
def test_help_and_views_start_without_torch(saved, line):
    start = time.perf_counter()
    run = ours(LIGHT, *[word.format(path=saved) for word in line])
    print(f"{' '.join(line)}: {time.perf_counter() - start:.2f} s")
    assert run.returncode == 0 and run.stderr.split() == [b"HEAVY"], run.stderr


def test_a_heavy_import_would_be_seen():
    assert ours(LIGHT.replace("import sys;", "import sys, rich;"), "--version").stderr.split() == [b"HEAVY", b"rich"]


def test_a_reader_that_leaves_is_no_error(saved):
    """As in `ddtree-check show run.json | head -1`; the reader has gone before the first line here."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from ddtree_check.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    try:
        command = [sys.executable, "-c", code, "show", saved]
        run = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, timeout=120)
    finally:
        os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")


def test_a_terminal_without_unicode_gets_escapes(saved):
    code = "import sys; from ddtree_check.cli.main import main; sys.exit(main())"
    for line in (["show", saved], ["tree", saved, "--case", "a/3"]):
        run = ours(code, *line, PYTHONIOENCODING="ascii")
        assert run.returncode == 0 and run.stdout.isascii() and run.stderr == b""
    assert b"|- 1 ' f' [pass / pass] * +" in run.stdout


def test_colour_is_for_terminals_that_want_it(saved, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["show", saved]) == 0
    coloured = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["show", saved]) == 0
    plain = capsys.readouterr().out
    assert "\x1b[" not in plain and ("\x1b[" in coloured)


def test_the_module_is_the_command():
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-m", "ddtree_check", "--version"], capture_output=True, env=environment, timeout=60
    )
    assert run.stdout.startswith(b"ddtree-check ") and run.returncode == 0


def test_words_of_a_file_do_not_steer_the_terminal(capsys):
    from ddtree_check.cli.commands.output import show_text

    show_text("a\x1b]0;title\x07 |Δ| ─►\n\tb\r\x9b2J")
    assert capsys.readouterr().out == "a?]0;title? |Δ| ─►\n\tb??2J\n"


def test_data_come_out_as_they_are(capsys, saved):
    text = "two\u00a0words\u200b"
    record = json.loads(Path(saved).read_text())
    record["tokens"] = {"1": text}
    Path(saved).write_text(json.dumps(record))
    assert cli.main(["show", saved, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == {"1": text}
