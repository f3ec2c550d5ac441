"""Every row of the support table, run at its small shape: the table must not claim what does not hold."""

import pytest

from ddtree_check.base.errors import Unsupported
from ddtree_check.cli.main import main
from ddtree_check.flows.survey import survey
from ddtree_check.model.families import FAMILIES, UNSUPPORTED, find_family
from ddtree_check.model.small_shapes import SHAPES
from ddtree_check.model.wiring import FORKED, UNFORKED, contaminated
from tests.models import engine, off, prompt, tree


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_forked_and_leaks_unforked(family):
    row = survey(family, nodes=6, prompt=6)
    recurrent = set(row["layers"]) - {"attention"}
    assert row["exit_code"] == 0 and row["modes"]["tree_forked"] == "pass"
    assert row["modes"]["tree_unforked"] == ("fail" if recurrent else "pass")
    assert row["forked"] < 1e-4 and (row["unforked"] > 0.1 if recurrent else row["unforked"] < 1e-4)
    assert ("conv" in row["channels"]) == ("conv" in recurrent or family == "zaya")
    assert "mask" in row["channels"] or "attention" not in row["layers"]


def test_every_family_has_a_shape_and_no_family_is_claimed_and_refused():
    assert set(SHAPES) == set(FAMILIES) and not set(FAMILIES) & set(UNSUPPORTED)
    for name in UNSUPPORTED:
        with pytest.raises(Unsupported, match=name):
            find_family(name)


def test_the_command_prints_a_row_and_its_exit_code(capsys, monkeypatch):
    assert main(["models", "--run", "--family", "lfm2"]) == 0
    out = capsys.readouterr().out
    assert "lfm2" in out and "3 conv, 1 attention" in out and "conv, mask, positions" in out


def test_an_unknown_family_is_refused(capsys):
    assert main(["models", "--run", "--family", "gpt2"]) == 3
    assert "family: got 'gpt2'" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_knows_every_family(family):
    """Against float64 through our mixers ar and forked are off by rounding, unforked by more."""
    host = engine(family)
    exact, case, tokens = host.exact(), tree("random", 6), prompt(6)
    want = exact.decode(exact.prefill(tokens), case)
    prefix = host.prefill(tokens)
    spread = want.std(-1)
    assert (off(want, host.decode(prefix, case)) <= 1e-4 * spread).all()
    assert (off(want, host.verify(prefix, case, FORKED).logits) <= 1e-4 * spread).all()
    assert off(want, exact.verify(exact.prefill(tokens), case, FORKED).logits).max() <= 1e-9
    dirty = contaminated(UNFORKED.plan(case), host.layers)
    assert not dirty or off(want, host.verify(prefix, case, UNFORKED).logits)[sorted(dirty)].max() > 0.1
