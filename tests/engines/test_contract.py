"""One contract for engines: what is missing costs its own checks, what breaks is one line with its name."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest
import torch

from ddtree_check.base.errors import Broken, Unsupported, UsageError
from ddtree_check.cli import main as cli
from ddtree_check.engines import BaseEngine, Engine
from ddtree_check.engines.checked import Checked, complete
from ddtree_check.engines.registry import ENGINES, load_engine
from ddtree_check.flows.batch import batch_runs
from ddtree_check.flows.check import check
from ddtree_check.flows.replay import record_trace
from ddtree_check.flows.rounds import Rounds, generate
from ddtree_check.flows.settings import Item, Settings
from ddtree_check.flows.sweep import sweep
from ddtree_check.model.families import FAMILIES
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.selftest.inject import Faulty, Remembered
from ddtree_check.tree.draft_tree import DraftTree
from tests import tiny
from tests.models import VOCAB, make_engine, make_small, prompt, tree
from tests.own_engine import Duck, Steps, Unforked
from tests.test_imports import PACKAGE

checkpoint = tiny.checkpoint

TREE = tree("random", 8, seed=3)
ITEM = Item("p", prompt(6), tree=TREE)
SETTINGS = Settings(budgets=(4,), length=3)

# --- nobody asks an engine what it has or who it is -------------------------------------------------------------------

HOLDERS = ("engine", "_engine", "live", "oracle", "host", "meter", "reference")
NAMES = {*ENGINES, *FAMILIES}


def guesses(source: str) -> list[str]:
    """The lines of a module that ask an engine for an attribute by name, or tell engines or models by theirs."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr") and node.args:
            held = node.args[0].func if isinstance(node.args[0], ast.Call) else node.args[0]
            if _last(held) in (*HOLDERS, "find_engine", "load_engine"):
                lines.append(f"{node.lineno}: {node.func.id} of {_last(held)}")
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            asked = {_last(side) for side in sides} & {"engine", "model_type", "engine_name"}
            if asked and texts & NAMES:
                lines.append(f"{node.lineno}: {asked.pop()} compared with {(texts & NAMES).pop()}")
    return lines


def _last(node: ast.AST) -> str | None:
    """The last name of an expression such as job.engine or described["engine"]."""
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return getattr(node, "attr", getattr(node, "id", None))


def test_no_module_outside_engines_guesses_at_one():
    asking = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("engines", "families.py", "tiny.py")
        and (lines := guesses(path.read_text()))
    }
    assert asking == {}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def f(engine):\n    return getattr(engine, 'chosen', None)", "2: getattr of engine"),
        ("if hasattr(self._engine, 'watch'): pass", "1: hasattr of _engine"),
        ("read = getattr(find_engine(name), 'load_config', None)", "1: getattr of find_engine"),
        ("x = job.engine == 'transformers'", "1: engine compared with transformers"),
        ("x = described['engine'] in ('sglang', 'vllm')", "1: engine compared with sglang"),
        ("x = config.model_type != 'llama'", "1: model_type compared with llama"),
    ],
)
def test_a_guess_is_seen(source, line):
    assert guesses(source) == [line]


def test_every_part_of_the_contract_has_its_law():
    parts = {name: part for name, part in vars(Engine).items() if not name.startswith("_") and callable(part)}
    assert {"prefill", "verify", "step", "decode", "forward", "commit", "contents", "batches", "exact"} <= parts.keys()
    assert all(inspect.getdoc(part) for part in parts.values())


# --- what is missing costs its own checks -----------------------------------------------------------------------------


def modes(host, settings=SETTINGS) -> dict[str, str]:
    return check(host, [ITEM], settings)["verdict"]["modes"]


@pytest.mark.parametrize("host", [Steps, Duck])
def test_prefill_step_and_verify_are_enough_to_compare(host):
    record = check(host(), [ITEM], SETTINGS)
    assert record["verdict"]["modes"] == {"linear": "pass", "tree_forked": "pass", "tree_unforked": "unsupported"}
    assert record["environment"]["dtype"] == "float32" and record["environment"]["engine"] == host.__name__
    assert record["coverage"]["layers"] == {"assumed": 1} and record["exit_code"] == 2
    assert json.loads(json.dumps(record)) == record


def test_and_a_fault_is_seen_that_way():
    assert modes(Unforked())["tree_forked"] == "fail" and modes(Unforked())["linear"] == "pass"


def test_decoding_by_default_is_a_step_a_node():
    host, before = Steps(), Steps().prefill(ITEM.tokens)
    rows = complete(host).decode(before, TREE)
    for node in range(len(TREE)):
        state = before
        for token in TREE.path_tokens(node):
            logits, state = host.step(state, token)
        assert torch.equal(rows[node], logits)
    with pytest.raises(Unsupported, match="take --ar strict"):
        complete(host).decode(before, TREE, batched=True)


class Parts(Steps):
    """Everything but one part, which is the default's again."""

    def __init__(self, without: str | None = None):
        super().__init__()
        self.without = without

    def commit(self, verified, node):
        if self.without == "commit":
            return BaseEngine.commit(self, verified, node)
        return self.standing(verified.states[node])

    def contents(self, prefix):
        if self.without == "contents":
            return BaseEngine.contents(self, prefix)
        return 1, [{"recurrent": prefix.state}]

    def supports(self, wiring):
        return None if wiring in (None, FORKED, UNFORKED) else "none but those"


@pytest.mark.parametrize("part", ["commit", "contents"])
def test_a_missing_part_costs_what_needs_it_alone(part):
    settings = Settings(budgets=(4,), length=3, accept=("full",))
    assert check(Parts(), [ITEM], settings)["exit_code"] == 0  # the twin: nothing is missing
    record = check(Parts(part), [ITEM], settings)
    assert record["verdict"]["modes"]["tree_forked"] == "pass" and record["exit_code"] == 2
    reasons = {commit["reason"] for accept in record["cases"][0]["commit"] for commit in accept["modes"].values()}
    assert reasons == {f"engine Parts has no {part}"}
    assert check(Parts(part), [ITEM], SETTINGS)["exit_code"] == 0


def test_rounds_and_batches_say_what_they_lack():
    rounds = Rounds(2, ("tree_forked",))
    draft = Settings(budgets=(4,), length=3, require=("tree_forked",))
    item = Item("p", prompt(6))
    found = generate(Parts("commit"), [item], draft, rounds)
    assert found["unsupported"] == {"tree_forked": "engine Parts has no commit"} and found["exit_code"] == 2
    assert "tree_forked" in generate(Parts(), [item], draft, rounds)["summary"]
    assert batch_runs(Parts(), [item], draft, (1,))["not_run"] == "the engine Parts runs one request a pass"
    host = make_small()
    host.contents = lambda prefix: BaseEngine.contents(host, prefix)
    assert batch_runs(host, [item], draft, (1,))["not_run"] == "engine transformers has no contents"


def test_an_oracle_that_is_not_there_is_one_line():
    with pytest.raises(
        UsageError, match=r"oracle: engine Duck has no float64 of its own \(exact\); leave --oracle out"
    ):
        complete(Duck()).exact()
    oracle = complete(make_engine("llama")).exact()
    assert isinstance(oracle, Checked) and oracle.describe()["dtype"] == "float64"


# --- wrapped once -----------------------------------------------------------------------------------------------------


def test_an_engine_is_wrapped_once():
    host = Steps()
    once = complete(host)
    assert complete(once) is once and complete(once, VOCAB) is once
    assert Checked(once, 9)._engine is host and Checked(once, 9).vocab_size == 9
    faulty = Faulty(once)
    assert once.fresh is Remembered(once).fresh is host and Remembered(faulty).fresh is complete(faulty).fresh is faulty
    assert complete(complete(host, 9), 9).prefill((1,)).logits.shape == (9,)


def test_batches_and_sweeps_leave_out_what_is_no_token(tmp_path):
    """What stands behind the vocabulary is made NaN: whoever looks at it goes red."""
    host, size = make_small(), VOCAB - 24
    run = host._run
    host._run = lambda *args, **how: run(*args, **how).index_fill(-1, torch.arange(size, VOCAB), torch.nan)
    case = DraftTree((5, 7, 9, 11), (-1, 0, 0, 1))
    items = [Item(name, tuple(t % size for t in prompt(5, place)), tree=case) for place, name in enumerate("ab")]
    small = Settings(budgets=(4,), length=3, require=("tree_forked",), vocab_size=size)
    assert batch_runs(host, items, small, (2,))["exit_code"] == 0
    assert check(host, items[:1], small)["exit_code"] == 0
    assert sweep(host, [Item("a", items[0].tokens)], small, Rounds(2), (4,))["exit_code"] != 1
    whole = Settings(budgets=(4,), length=3, require=("tree_forked",))
    assert batch_runs(host, items, whole, (2,))["exit_code"] == 1  # the twin
    record_trace(host, items[:1], small, tmp_path / "t")


# --- what an engine says of itself ------------------------------------------------------------------------------------


class Says(Steps):
    def __init__(self, described):
        super().__init__()
        self.described = described

    def describe(self):
        return self.described


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_dtype_that_has_rules_is_taken(dtype):
    assert complete(Says({"dtype": dtype, "judged_as": None})).describe()["engine"] == "Says"


@pytest.mark.parametrize(
    ("described", "line"),
    [
        (None, "describe() gave None, expected a dict with a dtype"),
        ("float32", "describe() gave 'float32', expected a dict with a dtype"),
        ({}, "describe() gave dtype None, expected one of float64, float32, bfloat16, float16"),
        ({"dtype": None}, "describe() gave dtype None, expected one of"),
        ({"dtype": "bf16"}, "describe() gave dtype 'bf16', expected one of"),
        ({"dtype": torch.float32}, "describe() gave dtype torch.float32, expected one of"),
        ({"dtype": ["float32"]}, "describe() gave dtype ['float32'], expected one of"),
        ({"dtype": "float32", "judged_as": "fp8"}, "describe() gave judged_as 'fp8', expected one of"),
        ({"dtype": "float32", "device": object}, "describe(): Object of type type is not JSON serializable, expected"),
    ],
)
def test_what_cannot_be_judged_by_is_one_line(described, line):
    with pytest.raises(UsageError) as told:
        check(Says(described), [ITEM], SETTINGS)
    assert str(told.value).startswith(f"engine Says: {line}") and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("claim", "value", "line"),
    [
        ("layers", (), "layers (), expected a Layer of ddtree_check.model.wiring each"),
        ("layers", ("mamba",), "layers ('mamba',), expected a Layer"),
        ("layers", 4, "layers 4, expected a Layer"),
        ("vocab_size", "211", "vocab_size '211', expected a number of at least 2"),
        ("vocab_size", True, "vocab_size True, expected"),
        ("provenance", "mine", "provenance 'mine', expected a mapping"),
        ("verify", None, "has no verify, expected prefill and verify at least"),
    ],
)
def test_a_claim_that_cannot_be_is_one_line(claim, value, line):
    host = Steps()
    complete(host)
    setattr(host, claim, value)
    with pytest.raises(UsageError) as told:
        complete(host)
    assert str(told.value).startswith(f"engine Steps: {line}")


@pytest.mark.parametrize("answer", [True, False, "", 3])
def test_supports_answers_none_or_a_reason(answer):
    host = Steps()
    host.supports = lambda wiring: answer
    with pytest.raises(
        UsageError, match=f"engine Steps: supports gave {answer!r}, expected None or the reason as text"
    ):
        check(host, [ITEM], SETTINGS)
    host.supports = lambda wiring: "not this one" if wiring == UNFORKED else None
    assert modes(host)["tree_unforked"] == "unsupported"


# --- what an engine answers -------------------------------------------------------------------------------------------


def answering(part: str, change) -> Steps:
    """An engine whose logits of one kind of pass are changed."""
    host = Steps()
    right = getattr(host, part)

    def wrong(*args):
        answer = right(*args)
        if part == "step":
            return change(answer[0]), answer[1]
        answer.logits = change(answer.logits)
        return answer

    setattr(host, part, wrong)
    return host


@pytest.mark.parametrize("part", ["prefill", "step", "verify"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.numpy(), "ndarray"),
        (lambda x: x.int(), "of int32 on cpu"),
        (lambda x: x.to(torch.float8_e4m3fn), "of float8_e4m3fn on cpu"),
        (lambda x: x.to("meta"), "of float32 on meta"),
        (lambda x: None, "NoneType"),
    ],
)
def test_logits_of_another_kind_are_one_line(part, change, says):
    host = answering(part, change)
    host.vocab_size, host.describe = VOCAB, lambda: {"dtype": "float32"}
    with pytest.raises(
        UsageError, match=rf"^engine Steps: .*{part}.* gave logits {says}, expected \[.*{VOCAB}\]: rows"
    ):
        check(host, [ITEM], SETTINGS)


@pytest.mark.parametrize("part", ["prefill", "step", "verify"])
def test_logits_with_a_gradient_are_detached(part):
    host = answering(part, lambda x: x.requires_grad_())
    assert modes(host) == modes(Steps())
    prefix = complete(answering("prefill", lambda x: x.requires_grad_())).prefill((1, 2))
    assert not prefix.logits.requires_grad


@pytest.mark.parametrize(
    ("part", "answer", "line"),
    [
        ("prefill", None, "prefill gave NoneType, expected logits in it"),
        ("verify", 3, "linear (verify) gave int, expected logits in it"),
        ("step", None, "step gave NoneType, expected (logits, Prefix)"),
        ("contents", (1, [None]), "contents gave tuple, expected (tokens, a dict of tensors for each layer)"),
        ("contents", [1], "contents gave list, expected (tokens, a dict of tensors for each layer)"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(part, answer, line):
    host = Parts()
    host.vocab_size, host.describe = VOCAB, lambda: {"dtype": "float32"}
    setattr(host, part, lambda *args: answer)
    with pytest.raises(UsageError) as told:
        check(host, [ITEM], Settings(budgets=(4,), length=3, accept=("full",)))
    assert str(told.value).startswith(f"engine Parts: {line}")


# --- what an engine raises --------------------------------------------------------------------------------------------

PASSES = ("describe", "supports", "prefill", "step", "verify", "decode", "forward", "commit", "contents", "chosen")


class CompilationError(Exception):
    """As Triton's: many lines, and a class of its own."""


ERRORS = [
    *(RuntimeError("boom"), CompilationError("at 3:4:\n  tl.dot(a, b)\n  ^"), KeyError("x"), MemoryError()),
    SystemExit(1),
]


@pytest.mark.parametrize("part", PASSES)
@pytest.mark.parametrize("error", ERRORS)
def test_what_a_pass_raises_is_one_line_with_engine_and_pass(part, error):
    host = Parts()

    def broken(*args, **how):
        raise error

    settings = Settings(budgets=(4,), length=3, accept=("full",))
    assert check(host, [ITEM], settings)["exit_code"] == 0
    setattr(host, part, broken)
    with pytest.raises(UsageError) as told:
        check(host, [ITEM], settings)
    text = str(told.value)
    assert text.startswith(f"engine Parts: {part} raised {type(error).__name__}: ") and "\n" not in text
    assert isinstance(told.value, Broken) != isinstance(error, SystemExit)


@pytest.mark.parametrize("part", ["_run", "commit", "contents"])
def test_so_it_is_for_engines_of_ours(part):
    host, settings = make_small(), Settings(budgets=(4,), length=3, accept=("full",))

    def broken(*args, **how):
        raise RuntimeError("out of everything")

    setattr(host, part, broken)
    with pytest.raises(UsageError, match=r"^engine transformers: .* raised RuntimeError: out of everything"):
        check(host, [ITEM], settings)


def test_a_refusal_is_no_breakdown():
    host = Parts()

    def refuses(prefix, tree, wiring):
        if wiring == FORKED:
            raise Unsupported("no trees today")
        return Steps.verify(host, prefix, tree, wiring)

    host.verify = refuses
    assert modes(host) == {"linear": "pass", "tree_forked": "unsupported", "tree_unforked": "fail"}


# --- from the command line --------------------------------------------------------------------------------------------

OWN = "from tests.own_engine import *\nimport torch\n"


def compare(checkpoint, folder: Path, monkeypatch, capfd, source: str, *words: str) -> tuple[int, str]:
    """The exit code and the errors of a run of an engine that stands in the current directory."""
    name = f"own_{abs(hash(source)):x}"
    (folder / f"{name}.py").write_text(OWN + source)
    (folder / "prompts.jsonl").write_text('{"id": "a", "token_ids": [5, 7, 9]}\n')
    monkeypatch.chdir(folder)
    line = ["--model", str(checkpoint), "--prompts", "prompts.jsonl", "--budget", "4", "--length", "3"]
    code = cli.main(["compare", "--engine", f"{name}:Mine", *line, *words])
    return code, capfd.readouterr().err.replace(name, "own")


LINES = {
    "steps": ("class Mine(Steps): pass", 2, ""),
    "forks": ("class Mine(Unforked): pass", 1, ""),
    "least": ("class Mine(Least): pass", 0, ""),
    "signature": (
        "class Mine(Steps):\n    @classmethod\n    def load(cls, path): return cls()",
        3,
        "engine own:Mine: load: got an unexpected keyword argument 'weights'; expected load(model, *, weights, dtype,",
    ),
    "init": ("class Mine(Steps):\n    def __init__(self): pass", 3, "engine own:Mine: load raised TypeError: "),
    "abstract": (
        "class Mine(BaseEngine):\n    def __init__(self, model, **settings): pass",
        3,
        "engine own:Mine: load raised TypeError: Can't instantiate abstract class Mine",
    ),
    "load": ("class Mine(Steps):\n    load = lambda *_, **__: {}[3]", 3, "engine own:Mine: load raised KeyError: 3"),
    "exits": ("class Mine(Steps):\n    load = lambda *_, **__: exit(0)", 3, "engine own:Mine: load raised SystemExit:"),
    "import": ("raise SystemExit(0)", 3, "engine: own:Mine: SystemExit: 0; expected a module that can"),
    "nothing": (
        "class Mine:\n    load = classmethod(lambda *_, **__: None)",
        3,
        "engine own:Mine: has no prefill, expected prefill and verify at least",
    ),
    "pass": (
        "class Mine(Steps):\n    def verify(self, *_): exit(0)", 3, "engine own:Mine: verify raised SystemExit: 0"
    ),
    "compiles": (
        "class Mine(Steps):\n    def verify(self, *_): raise RuntimeError('a\\nb')",
        3,
        "engine own:Mine: verify raised RuntimeError: a b; run it alone to see where",
    ),
    "half": (
        "class Mine(Steps):\n    def describe(self): return {'dtype': 'bf16'}",
        3,
        "engine own:Mine: describe() gave dtype 'bf16', expected one of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_an_engine_of_ones_own_ends_in_one_line(name, checkpoint, tmp_path, monkeypatch, capfd):
    source, code, says = LINES[name]
    if "BaseEngine" in source:
        source = f"from ddtree_check.engines import BaseEngine\n{source}"
    got, err = compare(checkpoint, tmp_path, monkeypatch, capfd, source)
    assert got == code and err.startswith(f"ddtree-check: {says}" if says else ""), err
    assert len(err.splitlines()) == bool(says) and "internal error" not in err


def test_an_oracle_and_a_batch_that_an_engine_lacks(checkpoint, tmp_path, monkeypatch, capfd):
    mine = "class Mine(Steps): pass"
    code, err = compare(checkpoint, tmp_path, monkeypatch, capfd, mine, "--oracle")
    assert (
        code == 3
        and err == "ddtree-check: oracle: engine own:Mine has no float64 of its own (exact); leave --oracle out\n"
    )
    code, err = compare(checkpoint, tmp_path, monkeypatch, capfd, mine, "--batch", "1")
    assert code == 2 and err == ""


def test_a_drafter_needs_an_engine_that_shows_features(checkpoint, tmp_path, monkeypatch, capfd):
    code, err = compare(checkpoint, tmp_path, monkeypatch, capfd, "class Mine(Steps): pass", "--draft", "dflash")
    assert code == 2
    assert err == (
        "ddtree-check: unsupported: draft: engine own:Mine has no hidden features for a drafter (read_features); "
        "take --draft self\n"
    )


def test_engines_by_name_are_complete():
    host = load_engine("transformers", None, dtype="float32", device="cpu", vocab_size=100)
    assert isinstance(host, Checked) and host.vocab_size == 100 and host.name == "transformers"
    assert host.prefill((1, 2)).logits.shape == (100,)
    with pytest.raises(UsageError, match="vocab-size: got 999999999, expected at most the model's"):
        load_engine("transformers", None, dtype="float32", device="cpu", vocab_size=999_999_999)
