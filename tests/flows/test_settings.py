"""Settings, entries and answers of a wrong kind: one line that says what came and what was expected."""

from __future__ import annotations

import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.flows.batch import batch_runs
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.rounds import Rounds, generate
from ddtree_check.judge.known import load_known
from ddtree_check.selftest.inject import Faulty
from ddtree_check.tree.case import load_prompts
from tests.models import VOCAB, engine, prompt, small


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budgets": ("16",)}, "budget: got ('16',), expected a list of whole numbers"),
        ({"budgets": (16, 0)}, "budget: got 0, expected numbers of at least 1"),
        ({"budgets": ()}, "budget: got (), expected numbers of at least 1"),
        ({"budgets": (True,)}, "budget: got (True,), expected"),
        ({"budgets": 16}, "budget: got 16, expected a list of whole numbers"),
        ({"budgets": (1.5,)}, "budget: got (1.5,), expected"),
        ({"require": "linear"}, "require: got 'linear', expected a list of texts"),
        ({"accept": "full"}, "accept: got 'full', expected a list of texts"),
        ({"seed": -1}, "seed: got -1, expected a number from 0 to 2**63 - 1"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, expected a number"),
        ({"seed": "1"}, "seed: got '1', expected a whole number"),
        ({"length": "15"}, "length: got '15', expected a whole number"),
        ({"acceptance": "all"}, "acceptance: got 'all', expected a finite number"),
        ({"acceptance": float("nan")}, "acceptance: got nan, expected a finite number"),
        ({"acceptance": 1.5}, "acceptance: got 1.5, expected a share from 0 to 1"),
        ({"controls": 0.5}, "controls: got 0.5, expected a whole number"),
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_kind_is_one_line(wrong, says):
    with pytest.raises(UsageError) as error:
        Settings(**wrong)
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"rounds": "3"}, {"rounds": True}, {"plain": 0.5}], ids=str)
def test_rounds_of_the_wrong_kind_are_one_line(wrong):
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: got .*, expected a whole number"):
        Rounds(**wrong)


ENTRY = {
    "id": '"x"', "library": '"transformers"', "versions": '"==5.19.*"', "families": '["jamba"]', "check": '"linear"',
    "mode": '"linear"', "cause": '"c"', "see": '"s"', "measured": '"4"', "explained": '"state from zeros"',
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cause": "4"}, "entry 1: known failure 'x': cause 4, expected a text"),
        ({"id": "7"}, "entry 1: known failure 7: id 7, expected a text"),
        ({"families": '"jamba"'}, "entry 1: families 'jamba', expected a list"),
        ({"families": "[]"}, "entry 1: known failure x: families \\(\\), expected model types"),
        ({"families": "[5]"}, "entry 1: known failure x: families \\(5,\\), expected model types"),
        ({"versions": "519"}, "entry 1: known failure 'x': versions 519, expected a text"),
    ],
)
def test_a_known_failure_of_the_wrong_kind_names_its_entry(tmp_path, change, says):
    path = tmp_path / "known.toml"
    path.write_text("[[failure]]\n" + "".join(f"{name} = {value}\n" for name, value in ENTRY.items()))
    assert [entry.id for entry in load_known(path)] == ["x"]
    path.write_text("[[failure]]\n" + "".join(f"{name} = {value}\n" for name, value in (ENTRY | change).items()))
    with pytest.raises(ValueError, match=f"known.toml: {says}"):
        load_known(path)


@pytest.mark.parametrize(
    ("text", "says"), [("failure = 3", "failure is 3, expected"), ("failure = [1]", "entry 1 has 1"), ("x = ", "TOML")]
)
def test_a_file_that_holds_no_entries_is_refused(tmp_path, text, says):
    (tmp_path / "known.toml").write_text(text)
    with pytest.raises(ValueError, match=f"known.toml: .*{says}"):
        load_known(tmp_path / "known.toml")


def test_line_ends_of_another_system_are_no_part_of_a_prompt(tmp_path):
    for name, ends in (("unix", "\n"), ("dos", "\r\n")):
        (tmp_path / f"{name}.txt").write_bytes(f"def f(x):{ends}    return x{ends}".encode())
    (unix,), (dos,) = (load_prompts(tmp_path / f"{name}.txt") for name in ("unix", "dos"))
    assert dos.text == unix.text == "def f(x):\n    return x"


# --- answers of another shape -----------------------------------------------------------------------------------------


class Odd:
    """An engine one of whose passes answers with another shape."""

    def __init__(self, what: str, cut, wiring: str | None = None):
        self._engine, self._what, self._cut, self._wiring = engine("llama"), what, cut, wiring

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def decode(self, prefix, tree, *, batched=False):
        logits = self._engine.decode(prefix, tree, batched=batched)
        return self._cut(logits) if self._what == "decode" else logits

    def forward(self, paths, keep):
        logits = self._engine.forward(paths, keep)
        return self._cut(logits) if self._what == "forward" else logits

    def prefill(self, tokens):
        prefix = self._engine.prefill(tokens)
        if self._what == "prefill":
            object.__setattr__(prefix, "logits", self._cut(prefix.logits))
        return prefix

    def verify(self, prefix, tree, wiring):
        verified = self._engine.verify(prefix, tree, wiring)
        if self._what == "verify" and (wiring.name if wiring else None) == self._wiring:
            verified.logits = self._cut(verified.logits)
        return verified


def last_row_lost(logits: torch.Tensor) -> torch.Tensor:
    return logits[:-1]


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (Odd("decode", last_row_lost), rf"ar \(decode\) gave logits \[4, {VOCAB}\], expected \[5, {VOCAB}\]"),
        (Odd("decode", lambda x: x[:, :-1]), rf"ar \(decode\) gave logits \[5, {VOCAB - 1}\], expected \[5, {VOCAB}\]"),
        (Odd("verify", last_row_lost), rf"linear \(verify\) gave logits \[4, {VOCAB}\], expected \[5, {VOCAB}\]"),
        (Odd("verify", last_row_lost, "tree_forked"), r"tree_forked \(verify\) gave logits \[4, "),
        (Odd("verify", lambda x: x[None], "tree_unforked"), r"tree_unforked \(verify\) gave logits \[1, 5, "),
        (Odd("forward", lambda x: x[:, 1:]), rf"forward gave logits \[\d, \d, {VOCAB}\], expected \[\d, \d, {VOCAB}\]"),
        (Odd("prefill", lambda x: x[None]), rf"prefill gave logits \[1, {VOCAB}\], expected \[{VOCAB}\]"),
        (Odd("verify", lambda x: x.tolist()), r"linear \(verify\) gave logits list, expected \[5, "),
    ],
)
def test_a_pass_of_another_shape_is_named_with_what_came_and_what_was_expected(host, says):
    item = Item("p", prompt(6))
    with pytest.raises(UsageError, match=f"^engine Odd: {says}"):
        check(host, [item], Settings(budgets=(4,), length=3))


def test_so_it_is_in_rounds_and_batches():
    host, item = Odd("verify", last_row_lost, "tree_forked"), Item("p", prompt(6))
    settings = Settings(budgets=(4,), length=3, require=("tree_forked",))
    with pytest.raises(UsageError, match="tree_forked"):
        generate(host, [item], settings, Rounds(1, ("tree_forked",)))
    with pytest.raises(UsageError, match="tree_forked"):
        batch_runs(host, [item], settings, (1,))


class Breaks:
    """An engine of a caller's own that wraps ours and breaks in one pass."""

    def __init__(self, engine, error):
        self._engine, self._error = engine, error

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def verify(self, prefix, tree, wiring):
        raise self._error


def test_what_an_engine_raises_is_one_line():
    items, settings = [Item("p", prompt(5))], Settings(budgets=(4,), length=3)
    with pytest.raises(UsageError, match="engine Breaks: verify raised RuntimeError: boom; run it alone"):
        check(Breaks(small(), RuntimeError("boom")), items, settings)
    with pytest.raises(UsageError, match="engine transformers: verify raised RuntimeError: boom; run it alone"):
        check(Faulty(small(), linear=_boom), items, settings)


def _boom(logits):
    raise RuntimeError("boom")
