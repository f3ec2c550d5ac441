"""Inputs that nobody wrote, for every parser: python -m tests.fuzzing PARSER COUNT [SEED]

Good inputs are changed at random, as values or as bytes, and read the way the command line reads them. What is wrong:
anything but a result or one line (UsageError, Unsupported), more than SECONDS for one input, more than BYTES of memory.
Prints one JSON object: {"read": how many were good, "refused": how many not, "wrong": {"kind, place": an input}}.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ddtree_check.base.errors import Unsupported, UsageError, usage_errors
from ddtree_check.base.journal import read_journal
from ddtree_check.base.resources import DRAFTER, EMBEDDED, fixtures_dir
from ddtree_check.cli import main as cli
from ddtree_check.cli.commands import views
from ddtree_check.engines.sglang.recorder import read_options
from ddtree_check.engines.sglang.scripted import read_script
from ddtree_check.gate import history
from ddtree_check.gate.baseline import Baseline, Bounds, load_baseline, write_baseline
from ddtree_check.gate.cells import CellResult
from ddtree_check.gate.config import load_config
from ddtree_check.judge.known import load_known
from ddtree_check.server.api import UNUSABLE, _completion, _models
from ddtree_check.server.judge import Rule, conclude, positions
from ddtree_check.trace.lint import lint
from ddtree_check.trace.read import read_trace
from ddtree_check.trace.write import TraceWriter
from ddtree_check.tree.case import load_prompts, load_tree
from ddtree_check.tree.drafts.recorded import load_recorded
from tests.tiny import hand_record

SECONDS, BYTES = 10, 1 << 30
REPO = Path(__file__).resolve().parents[1]
ODD = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "a", "é", "\x00", "\ud800", "not_run", "</script>", "../../etc/passwd", [], {}, [[]], [None],
    {"a": 1}, [1, 2], ["a"], [-1], [1.5], "1" * 5000,
)  # fmt: skip
DEEP = b"[" * 50_000


# --- changes ----------------------------------------------------------------------------------------------------------


def places(value: object) -> list[tuple[object, object]]:
    """Return (container, key) of every value within a JSON value."""
    found, todo = [], [value]
    while todo:
        part = todo.pop()
        keys = part.keys() if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        found += [(part, key) for key in keys]
        todo += [part[key] for key in keys]
    return found


def change(value: object, draw: random.Random) -> object:
    """Return a copy of a JSON value with one to four places changed."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not (found := places(value)):
            return draw.choice(ODD)
        holder, key = draw.choice(found)
        kind, other = draw.randrange(6), draw.choice(found)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]) if draw.random() < 0.5 else draw.choice(ODD))
        elif kind == 2:
            holder[key] = copy.deepcopy(other[0][other[1]])
        elif kind == 3 and isinstance(holder[key], int | float):
            holder[key] = draw.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 10**6))
        elif kind == 4 and isinstance(holder, dict):
            holder[draw.choice(("a", "", "__class__", str(other[1])))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
    return value


def garble(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with some cut out, put in, or changed."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            del data[at : at + draw.randint(1, 20)]
        elif kind == 1:
            data[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 2 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 3:
            data[at:at] = draw.choice((b'"', b"{", b"]", b",", b"1e999", b"\n", b"null", b"\xff", b"9" * 20))
        else:
            data[at:at] = DEEP if draw.random() < 0.02 else data[at : at + 30]
    return bytes(data)


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def as_lines(values: object) -> bytes:
    return b"\n".join(map(as_json, values if isinstance(values, list) else [values]))


def as_toml(tables: object) -> bytes:
    """Return a TOML text of tables of tables; what TOML cannot hold becomes a text."""

    def scalar(value: object) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(scalar, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(str(key))} = {scalar(inner)}" for key, inner in value.items()) + "}"
        return json.dumps(str(value) if value is None else value).replace("NaN", "nan").replace("Infinity", "inf")

    lines = []
    for name, table in tables.items() if isinstance(tables, dict) else ():
        lines.append(f"{json.dumps(str(name))} = {scalar(table)}")
    return "\n".join(lines).encode(errors="replace")


# --- parsers ----------------------------------------------------------------------------------------------------------

TREE = {"tokens": [None, 5, 9, 7], "parents": [-1, 0, 0, 1]}
ROUND = {"accepted_indices": [0, 1], "node_token_ids": [5, 9, 7], "node_depths": [1, 1, 2], "parents": [-1, 0, 0, 1]}
PATHS = {"paths": [[1, 2, 3], [1, 5]]}
MARGINALS = {"marginals": {"ids": [[5, 6], [7, 8]], "log_probs": [[-0.5, -1.5], [-0.4, -2.0]]}}
LINKS = {
    "retrieve_next_token": [1, 3, -1, -1], "retrieve_next_sibling": [-1, 2, -1, -1], "draft_tokens": [4, 5, 9, 7],
    "retrieve_index": [0, 1, 2, 3], "accept_index": [0, 1, -1, -1], "seq_lens": 4, "positions": [4, 5, 5, 6],
    "tree_mask": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
}  # fmt: skip
SCORES = {"tokens": ["a", "b"], "token_logprobs": [-0.1, None], "top_logprobs": [{"a": -0.1, "c": -2.5}, {"b": -0.2}]}
ANSWER = {
    "choices": [{"text": "ab", "logprobs": SCORES, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3},
    "data": [{"id": "toy"}],
}
GATE = {
    "gate": {"name": "n", "timeout": 60, "nights": 3, "factor": 2.0, "baseline": "b.json"},
    "matrix": {"model": ["m"], "budget": [16, [16, 64]], "dtype": ["float32"], "draft": ["self"]},
    "settings": {"limit": 4, "require": ["tree_forked"], "accept": ["full"], "oracle": True, "order": "depth"},
    "case": [{"name": "ours", "weights": "random", "timeout": 5}],
    "exclude": [{"budget": 16}],
}
KNOWN = {
    "failure": [
        {
            "id": "a", "library": "torch", "versions": "==2.*", "families": ["x"], "check": "c", "mode": "linear",
            "cause": "c", "see": "s", "measured": "m", "explained": "tree_unforked",
        }
    ]
}  # fmt: skip
OPTIONS = {
    "folder": "f",
    "rate": 0.5,
    "top": 4,
    "max_mb": 1.5,
    "pending_mb": 2,
    "ranks": "all",
    "seed": 1,
    "states": True,
}
SCRIPT = {
    "trees": [{"shape": "comb", "nodes": 9, "accept": "side"}, {"parents": [-1, 0, 0], "tokens": [None, 17, 23]}],
    "texts": [{"prompt": [5, 9], "tokens": [31, 7, 4]}],
    "seed": 3,
}
PROMPTS = [{"id": "a", "text": "b"}, {"token_ids": [1, 2, 3]}]
CELL = dataclasses.asdict(CellResult("a", "pass", 0, "", 1.5, True))


def server_record() -> dict:
    """A record of two servers, by hand."""
    run = _completion(ANSWER)
    found = [position.to_json() for position in positions(run, [(top, None) for top in run.tops])]
    one = {"tokens": 2, "same_text": True, "first": None, "positions": found, "ending": None}
    prompt = {"id": "p", "reason": None, "own": [0.1], "changed": {"reference": 0, "tokens": 2}, "control": [0.1]}
    where = {name: "x" for name in ("base_url", "model", "reference_url", "reference_model")}
    settings = {"tokens": 2, "top": 2, "repeats": 1, "rule": {"factor": 4.0, "resolution": 1e-3, "inside": 0.95}}
    return {
        "schema": "ddtree-check/server/1",
        "environment": where,
        "settings": settings,
        "cannot_see": ["x"],
        **conclude([prompt | {"runs": [one]}], Rule()),
    }


def trace_bytes() -> bytes:
    """One step of a trace."""
    rows = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    layers = [["linear_attention", [[["state", "toy"]]]]]
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(folder, engine="toy", model="toy", dtype="float32", vocab_size=16, layers=layers)
        step = writer.step("s0", [1, 2, 3], [3, 5, 7, 9], [-1, 0, 0, 1], request="r", round=0, source={"draft": "x"})
        for mode in ("ar", "tree_forked"):
            step.add(mode, rows, positions=[3, 4, 4, 5], mask=np.eye(4, dtype=bool))
        step.accept([0, 1], bonus=9)
        step.commit("tree_forked", [0, 1], {(0, "recurrent"): rows})
        step.write()
        return next(Path(folder).glob("*.safetensors")).read_bytes()


def changed_trace(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes of a trace whose table, header or step is changed as a value."""
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    which = draw.choice(("table", "header", "step", "step"))
    if which == "table":
        table = change(table, draw)
    else:
        table["__metadata__"][which] = json.dumps(change(json.loads(table["__metadata__"][which]), draw))
    head = json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def run(*words: str) -> None:
    """Run a command line; what it refuses is a UsageError, in one line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = cli.main(list(words))
    if "internal error" in said.getvalue():
        raise RuntimeError(" ".join(line.strip() for line in said.getvalue().splitlines()[-4:]))
    if code == 3:
        raise UsageError(said.getvalue().removesuffix("\n"))


def show(path: Path) -> None:
    """Every view of a record."""
    with contextlib.redirect_stdout(io.StringIO()):
        views.show(path)
        record = json.loads(path.read_text())
        for form in views.Format if "cases" in record else ():
            views.show(path, format=form)
        for case in record.get("cases", ())[:1]:
            views.show(path, case=case["id"])
            views.show(path, case=case["id"], node=0)
            views.tree(path, case["id"])
        for prompt in (record.get("rounds") or {"prompts": ()})["prompts"][:1]:
            views.show(path, prompt=prompt["id"])


def render_page(path: Path) -> None:
    views.show(path, html=str(path.with_suffix(".html")))


def answers(path: Path) -> None:
    """As `Api` reads an answer, and as a run judges it."""
    try:
        data = json.loads(path.read_bytes())
        _models(data)
        run = _completion(data)
    except UNUSABLE as error:
        raise UsageError(type(error).__name__) from None
    forced = [(top, value) for top, value in zip(run.tops, run.logprobs, strict=True) if top]
    found = [position.to_json() for position in positions(run, forced)]
    one = {"tokens": len(run.tokens), "same_text": True, "first": None, "positions": found, "ending": None}
    prompt = {"id": "p", "reason": None, "own": [0.1], "changed": {"reference": 0, "tokens": 2}, "control": [0.1]}
    json.dumps(conclude([prompt | {"runs": [one]}], Rule()), allow_nan=False)


def model_config(path: Path) -> None:
    from ddtree_check.engines.transformers import loading

    for weights in ("real", "random"):
        config = loading.load_config(str(path.parent), str(path.parent), weights)
        text = config.get_text_config(decoder=True)
        loading.wanted_dtype("x", config, None)
        loading.count_parameters(text, str(path.parent))


def drafter_config(path: Path) -> None:
    import torch

    from ddtree_check.engines import dflash

    target = types.SimpleNamespace(
        hidden_size=128, vocab_size=1024, layers=range(8), max_length=None, dtype=torch.float32, device="cpu"
    )
    dflash.load(str(path.parent), target)


def tokenizer(path: Path) -> None:
    from ddtree_check.engines.transformers import loading

    loading.load_tokenizer(str(path.parent))


def judged_trace(path: Path) -> None:
    run("compare", "--engine", "trace", str(path), "--html", str(path.with_suffix(".html")))


def nights(path: Path) -> None:
    history.check_history(path)
    history.nights(path, "g", 9)


def lined(read: Callable) -> Callable:
    """Readers of files raise ValueError; the commands make one line of it."""

    def reading(path: Path) -> None:
        with usage_errors():
            read(path)

    return reading


def fixture(model: str, name: str) -> object:
    return json.loads((fixtures_dir() / "models" / model / name).read_text())


def baseline() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "b.json"
        write_baseline(
            path, Baseline("2026-01-01", {"device": "cpu"}, {"a": {"x": Bounds(None, 1.5), "y": Bounds(0.25, 0.5)}})
        )
        return json.loads(path.read_text())


def history_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h.db"
        cell = history.CellNight("pass", "", 0, 1.5, {"x": 0.25, "y": None})
        history.store(path, history.Night("1", "g", "2026-01-01", "f", {"device": "cpu"}, 0, {"a": cell}))
        return path.read_bytes()


def records() -> list:
    rounds = REPO / "tests" / "data"
    return [hand_record("a/3", "b/3"), server_record(), *map(json.loads, map(Path.read_text, rounds.glob("*.json")))]


PARSERS = {  # what is read: (name of the file, how a value is written, good values or bytes, reader)
    "tree": ("t.json", as_json, lambda: [TREE, ROUND, PATHS], lined(load_tree)),
    "recorded": ("t.jsonl", as_lines, lambda: [[TREE, ROUND], [PATHS], [MARGINALS]], lined(load_recorded)),
    "links": ("t.json", as_json, lambda: [LINKS, TREE, ROUND, PATHS], lint),
    "link-lines": ("t.jsonl", as_lines, lambda: [[LINKS, LINKS], [TREE, ROUND], [PATHS]], lint),
    "script": ("s.json", as_json, lambda: [SCRIPT], read_script),
    "prompts": ("p.jsonl", as_lines, lambda: [PROMPTS], lined(load_prompts)),
    "records": ("r.json", as_json, records, show),
    "pages": ("r.json", as_json, lambda: [hand_record("a/3", "b/3")], render_page),
    "gate": ("gate.toml", as_toml, lambda: [GATE], load_config),
    "known": ("known.toml", as_toml, lambda: [KNOWN], lined(load_known)),
    "options": ("o.toml", as_toml, lambda: [OPTIONS], lambda path: read_options(str(path))),
    "baseline": ("b.json", as_json, lambda: [baseline()], load_baseline),
    "journal": ("j.jsonl", as_lines, lambda: [[{"fingerprint": "x"}, CELL]], read_journal),
    "history": ("h.db", None, lambda: [history_bytes()], nights),
    "traces": ("000000.safetensors", None, lambda: [trace_bytes()], lambda path: (lint(path), lined(read_trace)(path))),
    "judged": ("000000.safetensors", None, lambda: [trace_bytes()], judged_trace),
    "answers": ("a.json", as_json, lambda: [ANSWER], answers),
    "model": ("config.json", as_json, lambda: [fixture(EMBEDDED, "config.json")], model_config),
    "drafter": ("config.json", as_json, lambda: [fixture(DRAFTER, "config.json")], drafter_config),
    "tokenizer": ("tokenizer.json", as_json, lambda: [fixture(EMBEDDED, "tokenizer.json")], tokenizer),
}


# --- the run ----------------------------------------------------------------------------------------------------------


class Late(BaseException):
    """An input took too long; no Exception, so that nothing takes it for one of its own."""


def attempt(read: Callable, path: Path) -> str | None:
    """Read one input: None for a result, 'refused: ' and the line, or what is wrong."""

    def late(*_):
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        read(path)
    except (UsageError, Unsupported) as error:
        line = str(error)
        return f"refused: {line}" if "\n" not in line else f"no line: {line[:200]}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "ddtree_check" in frame.filename]
        last = ours[-1] if ours else last
        return f"{type(error).__name__}, {os.path.basename(last.filename)}:{last.lineno}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return None


def attempt_apart(read: Callable, path: Path) -> str | None:
    """Do so in a process of its own, as the product reads tokenizers: their library may end the process."""
    ends = os.pipe()
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(ends[1], (attempt(read, path) or "").encode()[:2000])
        os._exit(0)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    return "refused: it ends its process" if os.waitpid(child, 0)[1] else said or None


def main() -> int:
    name, count = sys.argv[1], int(sys.argv[2])
    draw = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    file, write, good, read = PARSERS[name]
    seeds = good()
    found: dict = {"read": 0, "refused": 0, "wrong": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input" / file
        path.parent.mkdir()
        if name in ("model", "drafter", "tokenizer"):
            for other in (fixtures_dir() / "models" / (DRAFTER if name == "drafter" else EMBEDDED)).iterdir():
                path.with_name(other.name).write_bytes(other.read_bytes())
        for seed in seeds:  # a good input is read, and what is imported late is imported
            path.write_bytes(seed if write is None else write(seed))
            read(path)
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + BYTES, -1))
        for _ in range(count):
            seed = draw.choice(seeds)
            if write is None:
                text = changed_trace(seed, draw) if file.endswith("rs") and draw.random() < 0.7 else garble(seed, draw)
            else:
                text = write(change(seed, draw)) if draw.random() < 0.8 else garble(write(seed), draw)
            path.write_bytes(text)
            said = attempt_apart(read, path) if name == "tokenizer" else attempt(read, path)
            kind = said.partition(": ")[0] if said else "read"
            if kind in ("read", "refused"):
                found[kind] += 1
            else:
                found["wrong"].setdefault(kind, [said, base64.b64encode(text[:4000]).decode()])
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
