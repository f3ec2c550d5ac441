"""Does a test notice when one operator or index changes? Mutants of the code that decides, each against its own tests.

    python benchmarks/mutants.py run --count 72
    python benchmarks/mutants.py            what the runs so far came to

Every mutant is written into a temporary copy of the tree, never into this one. Its file's own tests run first, then
those of the flow; one that outlives both is a survivor, to be killed by a new test or named in EXCUSED with a reason.
Which sites are changed is drawn with a seed, some from each file. A run that was killed goes on where it was; `--part`
splits it over processes as in calibration.py.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from parts import add_options, append, written
from tabulate import tabulate

REPO = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch", "numpy", "scipy.stats", "transformers", "transformers.models.auto.modeling_auto", "hypothesis",
    "transformers.models.qwen3_5.modeling_qwen3_5", "safetensors.torch", "tokenizers", "typer", "rich.progress",
)  # fmt: skip
LIMIT = 900  # seconds for one mutant's tests; beyond it the mutant counts as killed: it hangs
FLOW = ("tests/flows/test_check.py",)
FLOW_TESTS = "right_engine or wrong_tree_pass or wrong_linear or insensitive or one_bit or nan or attention_only"
FILES = {  # file of the package -> share of the mutants, tests that run first
    "model/wiring.py": (14, ("tests/model/test_wiring.py",)),
    "judge/differences.py": (9, ("tests/judge/test_differences.py",)),
    "judge/rule.py": (5, ("tests/judge/test_verdict.py",)),
    "judge/nodes.py": (5, ("tests/judge/test_verdict.py",)),
    "judge/conclude.py": (4, ("tests/judge/test_verdict.py",)),
    "engines/transformers/engine.py": (14, ("tests/engines/transformers/test_engine.py",)),
    "model/mixers/__init__.py": (3, ("tests/model/test_mixers_mamba.py", "tests/model/test_mixers_more.py")),
    "model/mixers/causal_conv.py": (3, ("tests/model/test_mixers.py",)),
    "model/mixers/decay.py": (4, ("tests/model/test_mixers.py",)),
    "model/mixers/gated_delta.py": (5, ("tests/model/test_mixers.py",)),
    "model/mixers/mamba1.py": (3, ("tests/model/test_mixers_mamba.py",)),
    "model/mixers/mamba2.py": (4, ("tests/model/test_mixers_mamba.py",)),
    "model/mixers/kda.py": (4, ("tests/model/test_mixers_more.py",)),
    "model/mixers/lightning.py": (3, ("tests/model/test_mixers_more.py",)),
    "model/mixers/rg_lru.py": (3, ("tests/model/test_mixers_more.py",)),
}
EXCUSED = {  # a survivor's name without its line -> why it changes no verdict
    "engines/transformers/engine.py: max(map(len, paths)) -> min(map(len, paths))":
        "paths of different lengths are refused in the next line, whichever of them it is held against",
    "engines/transformers/engine.py: parent >= 0 -> parent > 0": "the root's cache is forked once more than needed",
    "model/mixers/causal_conv.py: windows >= 0 -> windows > 0": "row 0 stands at 1 + kept by either branch",
    "model/mixers/kda.py: max(1, n * n * k[..., 0, 0].numel()) -> min(1, n * n * k[..., 0, 0].numel())":
        "the size of a block, which is how much memory it takes",
}  # fmt: skip
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult,
}  # fmt: skip
CALLS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: `before` becomes `after`, the `number`-th site of its file."""

    file: str
    number: int
    line: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def sites(file: str) -> list[tuple[Mutant, ast.Module]]:
    """Every mutant of a file with its whole changed tree, in order of the source."""
    source = (REPO / "ddtree_check" / file).read_text()
    tree = ast.parse(source)
    found = []
    for number, (path, change) in enumerate(_changes(tree)):
        changed = copy.deepcopy(tree)
        node = _at(changed, path)
        before, line = ast.unparse(node), node.lineno
        change(node)
        found.append((Mutant(file, number, line, _short(before), _short(ast.unparse(node))), changed))
    return found


def _short(text: str) -> str:
    return " ".join(text.split())[:100]


def _at(tree: ast.AST, path: tuple) -> ast.AST:
    for name, place in path:
        tree = getattr(tree, name) if place is None else getattr(tree, name)[place]
    return tree


def _changes(tree: ast.AST, path: tuple = ()) -> Iterator:
    """(path to a node, a function that changes it in place). Messages, annotations and defaults of fields are left."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, (ast.Raise, ast.JoinedStr)):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                here = (*path, (name, place))
                yield from ((here, change) for change in _of(child))
                yield from _changes(child, here)


def _of(node: ast.AST) -> Iterator:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield lambda n: n.ops.__setitem__(0, COMPARE[type(n.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _text(node):
        yield lambda n: setattr(n, "op", ARITHMETIC[type(n.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        if isinstance(node.op, ast.Not) or not isinstance(node.operand, ast.Constant):
            yield lambda n: setattr(n, "op", ast.UAdd()) if isinstance(n.op, ast.USub) else _positive(n)
    elif isinstance(node, ast.Call):
        function = node.func
        called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
        if called in CALLS:
            where = "id" if isinstance(function, ast.Name) else "attr"
            yield lambda n: setattr(n.func, where, CALLS[called])
    elif isinstance(node, (ast.Subscript, ast.Slice)):
        for part in ("slice",) if isinstance(node, ast.Subscript) else ("lower", "upper"):
            index = getattr(node, part)
            if isinstance(index, ast.Constant) and type(index.value) is int:
                yield lambda n, part=part: setattr(n, part, ast.Constant(getattr(n, part).value + 1))


def _text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in
               (node.left, node.right))  # fmt: skip


def _positive(node: ast.UnaryOp) -> None:
    """`not x` and `~x` become `x`, spelt so that the node stays what it is."""
    node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)


def draw(count: int, seed: int) -> list[tuple[Mutant, ast.Module]]:
    whole = sum(share for share, _ in FILES.values())
    chosen = []
    for file, (share, _) in FILES.items():
        every = sites(file)
        many = min(len(every), max(1, round(count * share / whole)))
        chosen += sorted(random.Random(f"{seed} {file}").sample(every, many), key=lambda pair: pair[0].number)
    return chosen


def tried(mutant: Mutant, tree: ast.Module) -> dict:
    """Runs the tests on a copy of the tree that holds the mutant."""
    with _copy() as folder:
        (folder / "ddtree_check" / mutant.file).write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
        own = FILES[mutant.file][1]
        for tests in (FLOW, own) if mutant.file.startswith("engines") else (own, FLOW):  # the quicker ones first
            end, seconds = _pytest(folder, tests)
            if end != "passed":
                return {"end": end, "by": " ".join(tests), "seconds": seconds}
    return {"end": "survived", "by": "", "seconds": seconds}


def baseline(files: Sequence[str]) -> None:
    """The tests must pass as they are: a test that fails anyway would kill every mutant."""
    with _copy() as folder:
        for tests in dict.fromkeys([*(FILES[file][1] for file in files), FLOW]):
            end, seconds = _pytest(folder, tests)
            print(f"{end} without a mutant: {' '.join(tests)} ({seconds:.0f} s)", flush=True)
            if end != "passed":
                raise SystemExit("the tests do not pass without a mutant, so that they could kill nothing")


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in ("ddtree_check", "tests"):
            shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPO / "pyproject.toml", tree)
        (tree / "fixtures").symlink_to(REPO / "fixtures")
        yield tree


def _pytest(folder: Path, tests: tuple[str, ...]) -> tuple[str, float]:
    """Runs tests of a copy of the tree in a fork, which has the heavy libraries and none of the package yet."""
    started = time.perf_counter()
    chosen = FLOW_TESTS if tests == FLOW else "not memory"  # how much memory is used is the machine's affair
    child = os.fork()
    if not child:
        code = 70
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            os.chdir(folder)
            sys.path[0] = str(folder)
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *tests]))
        except BaseException:
            code = 4
        finally:
            os._exit(code)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.perf_counter() - started > LIMIT:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timed out", time.perf_counter() - started
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in range(5):  # 2, 4: the tests or the plugin could not be imported any more
        raise SystemExit(f"pytest exited {code} for {tests}")
    return ("passed" if code == 0 else "killed"), time.perf_counter() - started


def warm() -> None:
    """Imports what every run of the tests would import again, but for the package itself."""
    for name in HEAVY:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.set_num_threads(1)  # a fork of a process with threads would hang


def report(done: dict[str, dict]) -> None:
    rows = []
    for file in FILES:
        mine = [found for found in done.values() if found["file"] == file]
        ends = [found["end"] for found in mine]
        alive = [found for found in mine if found["end"] == "survived"]
        named = sum(_excuse(found) is not None for found in alive)
        rows.append((file, len(mine), ends.count("killed"), ends.count("timed out"), len(alive), named))
    rows.append(("all", *(sum(row[place] for row in rows) for place in range(1, 6))))
    headers = ("file", "mutants", "killed", "timed out", "survived", "of them named")
    print(tabulate(rows, headers, "github"))
    for found in done.values():
        if found["end"] == "survived":
            print(f"\nsurvived: {found['name']}")
            print(f"because: {_excuse(found) or 'NOT NAMED'}")


def _excuse(found: dict) -> str | None:
    return EXCUSED.get(found["name"].replace(f":{found['line']}:", ":", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("run", "report"), nargs="?", default="report")
    parser.add_argument("--count", type=int, default=72)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="mutants of these files alone")
    parser.add_argument("--trust", action="store_true", help="the tests were seen to pass without a mutant")
    parser.add_argument("--again", action="store_true", help="run survivors of an earlier run once more")
    add_options(parser, "reports/mutants.jsonl")
    given = parser.parse_args()
    done = {entry["name"]: entry for entry in written(given.out)}
    if given.what == "run":
        todo = [
            (mutant, tree)
            for mutant, tree in draw(given.count, given.seed)
            if (given.only is None or mutant.file in given.only.split(","))
            and given.part()
            and (mutant.name not in done or (given.again and done[mutant.name]["end"] == "survived"))
        ]
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        warm()
        if not given.trust:
            baseline(list(dict.fromkeys(mutant.file for mutant, _ in todo)))
        for mutant, tree in todo:
            entry = {"name": mutant.name, "file": mutant.file, "line": mutant.line} | tried(mutant, tree)
            done[mutant.name] = entry
            append(given.out, entry)
            print(f"{entry['end']}: {mutant.name} ({entry['by']}, {entry['seconds']:.0f} s)", flush=True)
    report(done)


if __name__ == "__main__":
    main()
