"""Equal logits and padding of a vocabulary: explained where they are no fault, and red where they are one."""

from __future__ import annotations

import json
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.engines.checked import Checked
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.judge.differences import measure
from ddtree_check.judge.sampling.processing import Sampling
from ddtree_check.selftest.inject import Faulty
from tests.models import VOCAB, make_engine, make_small, prompt, small, tree

ITEM = Item("p", prompt(12), tree=tree("random", 8, seed=4))
SETTINGS = Settings()


def last(logits) -> list[int]:
    """The largest logit, the last id of equals."""
    return [int(torch.nonzero(row == row.max()).max()) for row in logits]


def first(logits) -> list[int]:
    return logits.argmax(-1).tolist()


def twin_head(dtype: str = "float32"):
    """A model with two equal rows in its output head, at the token that ar chooses most often; and both ids."""
    host = make_engine("qwen3_5_text", dtype, tie_word_embeddings=False)
    prefix = host.prefill(ITEM.tokens)
    chosen = torch.bincount(host.decode(prefix, ITEM.tree).argmax(-1), minlength=VOCAB).argmax().item()
    twin = (chosen + 7) % VOCAB
    with torch.no_grad():
        host.model.lm_head.weight[twin] = host.model.lm_head.weight[chosen]
    return host, tuple(sorted((chosen, twin)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b25_two_equal_rows_in_the_head_are_a_tie_and_never_a_leak(dtype):
    host, ids = twin_head(dtype)
    record = check(host, [ITEM], SETTINGS)
    case = record["cases"][0]
    tied = [node for node, found in case["ties"]["equal"].items() if tuple(found) == ids]
    assert tied and case["ties"]["rules"] == {} and record["exit_code"] == 0
    for node in map(int, tied):
        assert case["nodes"][node]["ar"]["margin"] == 0
        assert {case["nodes"][node][mode]["verdict"] for mode in ("linear", "tree_forked")} <= {"pass", "tie"}


def test_b25_a_leak_at_a_tied_node_is_still_seen():
    host, _ = twin_head()
    case = check(host, [ITEM], SETTINGS)["cases"][0]
    moved = [node for node in case["nodes"] if node["ar"]["margin"] == 0 and not node["clean"]]
    assert moved and all(node["tree_unforked"]["verdict"] in ("leak", "flip") for node in moved)


def rule_of(*modes: str):
    """An engine that takes the last of equal logits in these modes, and the first in the others."""
    return lambda mode, tree, nodes, logits: (last if mode in modes else first)(logits)


@pytest.mark.parametrize("side", ["tree_forked", "ar"])
def test_b27_another_rule_for_equal_logits_is_a_tie_with_its_ids(side):
    host, ids = twin_head()
    record = check(Faulty(host, chosen=rule_of(side)), [ITEM], SETTINGS)
    case = record["cases"][0]
    rules = case["ties"]["rules"]["tree_forked"]
    nodes = [int(node) for node, found in case["ties"]["equal"].items() if tuple(found) == ids]
    assert [found["node"] for found in rules] == nodes and record["exit_code"] == 0
    mine, theirs = ids if side == "tree_forked" else ids[::-1]
    assert all((found["ar"], found["mode"]) == (mine, theirs) for found in rules)
    assert all(case["nodes"][node]["tree_forked"]["verdict"] == "tie" for node in nodes)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_b27_the_same_rule_on_both_sides_says_nothing():
    host, _ = twin_head()
    record = check(Faulty(host, chosen=rule_of("ar", "linear", "tree_forked", "tree_unforked")), [ITEM], SETTINGS)
    assert "tree_forked" not in record["cases"][0]["ties"]["rules"] and record["exit_code"] == 0


def test_a_token_that_the_logits_do_not_put_first_is_no_tie():
    """The twin: logits as equal as before, but the engine takes the second best."""
    host = small()

    def second(mode, tree, nodes, logits):
        return logits.topk(2).indices[:, int(mode == "tree_forked")].tolist()

    record = check(Faulty(host, chosen=second), [ITEM], SETTINGS)
    result = record["cases"][0]["modes"]["tree_forked"]
    assert record["exit_code"] == 1 and result["reason"].startswith("raw pass, it chose token")
    assert (
        "at node 0, its own logits put" in result["reason"]
        and record["cases"][0]["modes"]["linear"]["verdict"] == "pass"
    )


# --- padding of a vocabulary ----------------------------------------------------------------------------------


def widened(value: float, *kinds: str, columns: int = 16):
    """An engine whose logits have `columns` more in these kinds of pass, all of one value."""

    def wide(logits, *_):
        return torch.nn.functional.pad(logits, (0, columns), value=value)

    return Faulty(make_small(), **{{"verify": "logits"}.get(kind, kind): wide for kind in kinds})


@pytest.mark.parametrize("value", [0.0, -torch.inf, 1e4], ids=["zero", "left-out", "large"])
@pytest.mark.parametrize("kinds", [("verify",), ("decode",), ("verify", "decode", "forward")], ids="-".join)
def test_columns_after_the_vocabulary_are_padding(value, kinds):
    record = check(widened(value, *kinds), [ITEM], SETTINGS)
    assert record["exit_code"] == 0 and record["verdict"]["modes"]["tree_forked"] == "pass"


def masked(value_of):
    """Logits of the last 24 ids replaced: value_of(kind of pass)."""

    def put(kind):
        def change(logits, *_):
            logits = logits.clone()
            logits[..., VOCAB - 24 :] = value_of(kind)
            return logits

        return change

    return Faulty(make_small(), logits=put("verify"), decode=put("decode"), forward=put("forward"))


SMALL = Item("p", tuple(token % (VOCAB - 24) for token in prompt(12)), tree=tree("random", 8, seed=4))
SMALL = Item(
    "p", SMALL.tokens, tree=type(SMALL.tree)(tuple(t % (VOCAB - 24) for t in SMALL.tree.tokens), SMALL.tree.parents)
)


def test_ids_left_out_on_both_sides_make_no_nan():
    record = check(masked(lambda kind: -torch.inf), [SMALL], SETTINGS)
    assert record["exit_code"] == 0
    assert all(node["tree_forked"][name] is not None for node in record["cases"][0]["nodes"] for name in ("kl", "tv"))
    warm = check(masked(lambda kind: -torch.inf), [SMALL], Settings(sampling=Sampling(temperature=0.4), draws=200))
    assert warm["exit_code"] == 0 and warm["sampling"]["modes"]["tree_forked"]["max_tv"] < 1e-4


def test_padding_that_only_one_side_leaves_out_is_named_and_can_be_left_out():
    host = masked(lambda kind: -torch.inf if kind == "verify" else 0.0)
    record = check(host, [SMALL], SETTINGS)
    reason = record["cases"][0]["modes"]["linear"]["reason"]
    assert record["exit_code"] == 1 and f"ids from {VOCAB - 24} on are left out (-inf) in one run alone" in reason
    assert f"--vocab-size {VOCAB - 24}" in reason
    assert check(host, [SMALL], Settings(vocab_size=VOCAB - 24))["exit_code"] == 0


def test_a_real_token_that_only_one_side_leaves_out_is_a_fault():
    def hole(logits):
        logits = logits.clone()
        logits[:, 3] = -torch.inf
        return logits

    record = check(Faulty(small(), linear=hole), [ITEM], SETTINGS)
    assert record["exit_code"] == 1 and "vocab-size" not in record["cases"][0]["modes"]["linear"]["reason"]


def test_a_vocabulary_larger_than_the_models_is_refused():
    with pytest.raises(UsageError, match=f"vocab-size: got {VOCAB + 1}, expected at most the model's {VOCAB}"):
        check(small(), [ITEM], Settings(vocab_size=VOCAB + 1))
    with pytest.raises(UsageError, match="vocab-size: got 1"):
        Settings(vocab_size=1)


def test_rows_without_padding_are_handed_on_as_they_are():
    host = small()
    prefix = Checked(host, VOCAB).prefill(ITEM.tokens)
    assert Checked(host, VOCAB).commit(host.verify(prefix, ITEM.tree, None), 0).logits.shape == (VOCAB,)
    assert Checked(host, 9).prefill(ITEM.tokens).logits.shape == (9,)


def test_rows_of_a_pass_that_may_not_be_changed_are_cut_too():
    host, read_only = small(), make_dataclass("ReadOnly", ["logits"], frozen=True)
    prefix = host.prefill(ITEM.tokens)
    sealed = Faulty(host, verify=lambda *args: read_only(host.verify(*args).logits))
    assert Checked(sealed, 9).verify(prefix, ITEM.tree, None).logits.shape == (len(ITEM.tree), 9)


def test_measuring_with_tokens_left_out_is_measuring_the_others():
    a = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    b = a + 0.1 * torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    there = [token for token in range(40) if token % 3]
    plain = measure(a[:, there], b[:, there])
    for row in (a, b):
        row[:, ::3] = -torch.inf
    found = measure(a, b)
    for name in ("max_abs", "rms", "kl", "tv", "margin", "ulp", "std", "ar_rank"):
        assert np.allclose(getattr(found, name), getattr(plain, name)), name
    assert found.argmax.tolist() == [there[place] for place in plain.argmax]
    assert found.run_argmax.tolist() == [there[place] for place in plain.run_argmax]
    b[2, 0] = 1.0  # left out in one alone
    b[3], a[3] = -torch.inf, -torch.inf  # nothing left
    assert np.isnan(measure(a, b).max_abs).tolist() == [False, False, True, True, False]
