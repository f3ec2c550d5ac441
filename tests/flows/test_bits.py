"""An engine with prefill and verify alone: the exact checks judge it, and that is no comparison with decoding."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.engines import BaseEngine
from ddtree_check.flows.check import check
from ddtree_check.flows.settings import Item, Settings
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report import html
from ddtree_check.report.views import render
from tests import models
from tests.own_engine import Least

SETTINGS = Settings(budgets=(8,))


class Bare(BaseEngine):
    """The two-layer model without its plain decoding."""

    def __init__(self, dtype: str):
        self.inner = models.small(dtype)
        self.vocab_size, self.layers = self.inner.vocab_size, self.inner.layers

    def prefill(self, tokens):
        return self.inner.prefill(tokens)

    def supports(self, wiring):
        return self.inner.supports(wiring)

    def verify(self, prefix, tree, wiring):
        return self.inner.verify(prefix, tree, wiring)


class Forgetful(Bare):
    """Runs the rows in flat order."""

    def verify(self, prefix, tree, wiring):
        return super().verify(prefix, tree, UNFORKED if wiring == FORKED else wiring)


class Tilted(Bare):
    """Adds a hundredth of its std to the fourth row of whatever is no chain."""

    def verify(self, prefix, tree, wiring):
        verified = super().verify(prefix, tree, wiring)
        if len(tree.leaves) == 1:
            return verified
        verified, logits = copy.copy(verified), verified.logits.clone()
        logits[3] += torch.linspace(0, 1, logits.shape[-1]).to(logits) * logits[3].std() / 100
        object.__setattr__(verified, "logits", logits)
        return verified


def judged(engine, settings: Settings = SETTINGS) -> dict:
    record = check(engine, [Item("p", models.prompt(9))], settings)
    assert json.loads(json.dumps(record)) == record and record["schema"] == "ddtree-check/exact/1"
    return record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_passes_and_a_forgetful_one_fails(dtype):
    record = judged(Bare(dtype))
    assert (record["verdict"]["text"], record["exit_code"]) == ("pass", 0), record["verdict"]
    text = render(record, 80)
    assert "exact: pass, exit code 0" in text and "no comparison with autoregressive decoding" in " ".join(text.split())
    record = judged(Forgetful(dtype))
    assert (record["verdict"]["text"], record["exit_code"]) == ("fail", 1)
    assert "reads node" in record["verdict"]["reasons"][0] and "exact: fail, exit code 1" in html.render(record)


@pytest.mark.parametrize("dtype, code, text", [("float32", 1, "std from its path"), ("bfloat16", 2, "not certified")])
def test_a_row_that_is_off_in_its_place_fails_where_its_chain_bounds_it_and_is_no_pass_elsewhere(dtype, code, text):
    record = judged(Tilted(dtype))
    assert record["exit_code"] == code and text in record["verdict"]["reasons"][0], record["verdict"]
    assert "node 3" in record["verdict"]["reasons"][0]


def test_a_recurrence_in_a_loop_needs_no_more_than_its_rows():
    record = judged(Least())
    assert record["exit_code"] == 0 and record["cases"][0]["exact"]["open"] == 0
    assert record["settings"]["draft"] == "ngram" and "Least has no step" in record["reason"]


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"exact": "off"}, "exact: got off, but engine Least has no step, the plain decoding that passes are compared"),
        ({"accept": ("full",)}, "accept: is judged by plain decoding, but engine Least has no step"),
    ],
)
def test_what_needs_plain_decoding_is_refused(settings, text):
    with pytest.raises(UsageError, match=f"^{text}"):
        judged(Least(), Settings(budgets=(8,), **settings))
