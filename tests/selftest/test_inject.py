"""Injectors change what they say and nothing else, put everything back, and know nothing of verdicts."""

from __future__ import annotations

import pytest
import torch

from ddtree_check.base.errors import Unsupported
from ddtree_check.engines.transformers.adapters import ADAPTERS
from ddtree_check.model.wiring import FORKED, UNFORKED, Wiring
from ddtree_check.selftest import inject
from ddtree_check.selftest.inject import Faulty, FaultyBatches, Remembered
from tests.models import make_engine, off, prompt, small, tree
from tests.test_imports import PACKAGE, imported

TREE = tree("random", 12, seed=4)
JUDGES = ("judge", "flows", "selftest.run")


def judges(source: str) -> set[str]:
    """Return the modules of `source`, an injector's, that it may not know."""
    modules = imported(source, ("selftest", "inject"), {"judge", "flows", "selftest.run"})
    return {target for _, target in modules if target.startswith(JUDGES)} - {"judge.sampling.processing"}


def test_injectors_cannot_know_how_a_fault_is_found():
    assert judges((PACKAGE / "selftest" / "inject.py").read_text()) == set()
    source = "from ..judge.rule import Rule\ndef f():\n    from .. import flows\n    from .run import FAULTS"
    assert judges(source) == {"judge.rule", "flows", "selftest.run"}


@pytest.fixture(scope="module")
def host():
    return small()


@pytest.fixture(scope="module")
def prefix(host):
    return host.prefill(prompt(12))


def test_what_is_remembered_is_the_same_and_is_made_once(host, prefix, monkeypatch):
    remembered, calls = Remembered(host), []
    run = type(host)._run
    monkeypatch.setattr(type(host), "_run", lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    for _ in range(2):
        mine = remembered.prefill(prompt(12))
        assert torch.equal(remembered.verify(mine, TREE, UNFORKED).logits, host.verify(prefix, TREE, UNFORKED).logits)
        assert torch.equal(remembered.decode(mine, TREE), remembered.decode(mine, TREE))
    assert len(calls) == 1 + 1 + len(TREE) + 2  # a prefill, a pass, the nodes; the engine's own two passes
    with remembered.watch([0]) as seen:
        remembered.verify(mine, TREE, UNFORKED)
    assert seen.outputs[0].shape[0] == len(TREE)  # a remembered pass would have shown nothing


@pytest.mark.parametrize("channel", ["state", "conv", "mask"])
def test_a_share_goes_from_right_to_the_whole_wiring(host, prefix, channel):
    wrong = Wiring.parse(f"{channel}=flat")
    right, whole = (host.verify(prefix, TREE, wiring).logits for wiring in (FORKED, wrong))
    found = {
        share: Faulty(host, around=inject.blended(wrong, share)).verify(prefix, TREE, FORKED).logits
        for share in (0.0, 0.01, 0.5, 1.0)
    }
    assert off(found[0.0], right).max() < 1e-4 and off(found[1.0], whole).max() < 1e-3
    sizes = [float(off(logits, right).max()) for logits in found.values()]
    assert sizes == sorted(sizes) and sizes[1] > 1e-4
    assert torch.equal(host.verify(prefix, TREE, FORKED).logits, right)  # all put back


def test_a_share_of_one_layer_and_of_positions(host, prefix):
    right = host.verify(prefix, TREE, FORKED).logits
    around = inject.blended(Wiring.parse("state=flat"), layer=99)
    assert off(Faulty(host, around=around).verify(prefix, TREE, FORKED).logits, right).max() < 1e-4
    with pytest.raises(ValueError, match="positions cannot be mixed"):
        inject.blended(Wiring.parse("positions=flat"), 0.5)


def test_what_was_swapped_is_put_back_after_an_error(host, prefix):
    before = dict(ADAPTERS), host._module.torch_chunk_gated_delta_rule

    def breaks(function, args, kwargs):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Faulty(host, around=inject.altered("gated_delta", breaks)).verify(prefix, TREE, FORKED)
    with pytest.raises(RuntimeError, match="broken"):
        Faulty(host, around=inject.altered("gated_delta", breaks)).verify(prefix, TREE, None)
    assert (dict(ADAPTERS), host._module.torch_chunk_gated_delta_rule) == before and "_mask" not in vars(host)


def test_a_captured_step_is_right_once_and_for_each_size(host, prefix):
    for channels in (("state", "conv"), ("mask",), ("positions",)):
        wrong, other = inject.captured(host, *channels), tree("random", 12, seed=9)
        for case, same in ((TREE, True), (other, False), (TREE, True), (tree("random", 13, seed=9), True)):
            right = host.verify(prefix, case, FORKED).logits
            assert torch.equal(wrong.verify(prefix, case, FORKED).logits, right) == same, (channels, case)
    wrong, later = inject.captured(host, "slots"), host.prefill(prompt(9, 1))
    assert torch.equal(wrong.verify(prefix, TREE, FORKED).logits, host.verify(prefix, TREE, FORKED).logits)
    assert not torch.equal(wrong.verify(later, TREE, FORKED).logits, host.verify(later, TREE, FORKED).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_order_of_sums_is_noise_and_nothing_more(dtype):
    host = small(dtype)
    prefix = host.prefill(prompt(12))
    right, scale = host.verify(prefix, TREE, FORKED).logits, {"float32": 1e-4, "bfloat16": 0.5}[dtype]
    for around in (inject.other_order, inject.noisy(1e-7 if dtype == "float32" else 1e-3)):
        found = Faulty(host, around=around).verify(prefix, TREE, FORKED).logits
        assert off(found, right).max() < scale
        assert off(found, right).max() > 0 or (dtype == "bfloat16" and around is inject.other_order)  # rounded away
    loud = Faulty(host, around=inject.branching(inject.noisy(0.1, modes=(FORKED,))))
    assert off(loud.verify(prefix, TREE, FORKED).logits, right).max() > scale
    chain = tree("chain", 4)
    assert torch.equal(loud.verify(prefix, chain, FORKED).logits, host.verify(prefix, chain, FORKED).logits)


def test_one_edge_is_moved_in_trees_that_branch(host):
    wiring = inject.moved_edge("state", 5, 0)
    plan, right = wiring.plan(TREE), FORKED.plan(TREE)
    assert plan.state[5] == 0 and [*plan.state[:5], *plan.state[6:]] == [*right.state[:5], *right.state[6:]]
    assert wiring.plan(tree("chain", 8)).state == FORKED.plan(tree("chain", 8)).state
    seen = inject.moved_edge("mask", 5, 3).plan(TREE).mask ^ right.mask
    assert list(zip(*seen.nonzero(), strict=True)) == [(5, 3)]


def test_a_hook_needs_a_module(host, prefix):
    around = inject.hooked(lambda name, module: name.endswith("no_such_module"), lambda *_: None)
    with pytest.raises(Unsupported, match="no such module"):
        Faulty(host, around=around).verify(prefix, TREE, FORKED)


def test_batches_change_where_they_are_asked_to():
    host = make_engine("qwen3_5_text")
    right = host.batches()
    prefixes = [host.prefill(prompt(5, seed)) for seed in range(2)]
    wrong = FaultyBatches(right, reorder=inject.left_behind(host, "recurrent", "conv"))
    (a, b), (c, d) = (batches.reorder(prefixes, (1, 0)) for batches in (right, wrong))
    assert torch.equal(a.cache.layers[3].keys, c.cache.layers[3].keys)
    assert torch.equal(host.caches.state(c.cache, 0), host.caches.state(prefixes[0].cache, 0))
    assert not torch.equal(host.caches.state(a.cache, 0), host.caches.state(c.cache, 0))
    assert wrong.step is not None and torch.equal(b.logits, d.logits)
