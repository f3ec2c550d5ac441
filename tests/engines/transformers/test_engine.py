"""The transformers engine on the Gated DeltaNet families and on attention-only models, against its own decoding."""

import subprocess
import sys
import textwrap

import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.engines.transformers.adapters import conv
from ddtree_check.engines.transformers.engine import KeepFloat64, TransformersEngine
from ddtree_check.model.mixers import causal_conv
from ddtree_check.model.wiring import BLANK, FORKED, UNFORKED, Attention, State, Wiring, contaminated
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import DELTA, PLAIN, engine, make_engine, off, prompt, tree

# Length of a prompt, and the tree behind it.
DRAFTS = {
    length: tree(name, nodes, order=order, seed=length)
    for length, name, nodes, order in (
        (1, "random", 8, "heap"),
        (3, "kary", 12, "breadth"),
        (37, "random", 24, "heap"),
        (300, "comb", 8, "depth"),
    )
}


def std(logits):
    return logits.double().std(-1)


@pytest.mark.parametrize("family", [*DELTA, *PLAIN])
def test_forked_equals_decoding_in_float32(family, subtests):
    """One forked pass against one-token steps: at most 1e-4 of a row's std off, and the same argmax at every node."""
    host = engine(family)
    for length, case in DRAFTS.items():
        with subtests.test(length=length):
            prefix = host.prefill(prompt(length))
            ar = host.decode(prefix, case)
            forked = host.verify(prefix, case, FORKED).logits
            assert (off(ar, forked) <= 1e-4 * std(ar)).all(), f"{(off(ar, forked) / std(ar)).max():.2e} std"
            assert torch.equal(ar.argmax(-1), forked.argmax(-1))
            # The batched reference is the same reference.
            assert (off(ar, host.decode(prefix, case, batched=True)) <= 1e-4 * std(ar)).all()


@pytest.mark.parametrize("mixers", ["own", "library"])
@pytest.mark.parametrize("family", DELTA)
def test_forked_equals_decoding_in_float64(family, mixers, subtests):
    host = engine(family, "float64", mixers)
    for length, case in DRAFTS.items():
        with subtests.test(length=length):
            prefix = host.prefill(prompt(length))
            ar = host.decode(prefix, case, batched=len(case) > 10)
            assert ar.dtype == torch.float64
            assert off(ar, host.verify(prefix, case, FORKED).logits).max() <= 1e-9


@pytest.mark.parametrize("family", DELTA)
def test_unforked_leaks_where_the_law_says(family, subtests):
    host = engine(family)
    prefix = host.prefill(prompt(37))
    for case in DRAFTS.values():
        with subtests.test(nodes=len(case)):
            ar = host.decode(prefix, case, batched=True)
            run = host.verify(prefix, case, UNFORKED)
            dirty = contaminated(run.plan, host.layers)
            near = {node for node in dirty if run.plan.rows_since_skip[node] <= 2}
            moved = set(torch.nonzero(off(ar, run.logits) > 1e-2).flatten().tolist())
            assert near <= moved <= dirty
            assert dirty == set(range(len(case))) - set(case.clean)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", *PLAIN])
def test_clean_nodes_and_chains_agree_bit_for_bit(family):
    wrong = []
    for dtype in ("float32", "float64", "bfloat16"):
        host = engine(family, dtype)
        assert host.exact_control
        prefix = host.prefill(prompt(7))
        for name in ("chain", "random", "comb"):
            case = tree(name, 16)
            forked, unforked = (host.verify(prefix, case, wiring).logits for wiring in (FORKED, UNFORKED))
            clean = list(case.clean)
            equal = torch.equal(forked[clean], unforked[clean]), torch.equal(forked, unforked)
            if equal != (True, case.is_chain or family in PLAIN):
                wrong.append(f"{dtype}, {name}: clean nodes, all nodes equal: {equal}")
    assert not wrong, "\n".join(wrong)


def test_experts_do_not_claim_bitwise_control():
    assert not engine("qwen3_next").exact_control


@pytest.mark.parametrize("family", PLAIN)
def test_attention_only_models_do_not_leak(family):
    host = engine(family)
    prefix = host.prefill(prompt(37))
    case = tree("random", 64)
    assert contaminated(UNFORKED.plan(case), host.layers) == frozenset()
    assert off(host.decode(prefix, case), host.verify(prefix, case, UNFORKED).logits).max() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_librarys_own_flat_pass_is_our_unforked_pass(dtype):
    """An independent control: what the library computes on tree rows in flat order is what our flat wiring computes."""
    host = engine("qwen3_5_text", dtype)
    prefix = host.prefill(prompt(37))
    case = tree("random", 64)
    ours, library = (host.verify(prefix, case, wiring).logits for wiring in (UNFORKED, None))
    assert off(ours, library).max() <= {"float32": 1e-3, "bfloat16": 0.6}[dtype]
    assert off(library, host.verify(prefix, case, FORKED).logits).max() > 1


FAULTS = {
    "dropped-root-state": Wiring("x", state=lambda t: (BLANK, *t.parents[1:])),
    "state-of-the-previous-row": Wiring.parse("state=flat"),
    "window-of-the-previous-rows": Wiring.parse("conv=flat"),
    "shifted-window": Wiring("x", conv=lambda t: tuple(p - 1 if p < 1 else t.parents[p] for p in t.parents)),
    "positions-by-index": Wiring.parse("positions=flat"),
    "causal-mask": Wiring.parse("mask=flat"),
    "one-sibling-in-the-mask": Wiring("x", mask=lambda t: _sees(t, t.leaves[-1], t.leaves[0])),
    "last-leaf-continues-the-root": Wiring("x", state=lambda t: (*t.parents[:-1], 0)),
}


def _sees(tree, row, column):
    mask = tree.ancestor_mask.copy()
    mask[row, column] = True
    return mask


@pytest.mark.parametrize("family", DELTA)
def test_every_wrong_wiring_moves_the_nodes_it_contaminates(family, subtests):
    host = engine(family)
    case = DraftTree((5, 17, 23, 101, 44, 150, 60, 9), (-1, 0, 0, 1, 2, 4, 5, 3))
    prefix = host.prefill(prompt(12))
    ar = host.decode(prefix, case)
    for fault, wiring in FAULTS.items():
        with subtests.test(fault=fault):
            run = host.verify(prefix, case, wiring)
            dirty = contaminated(run.plan, host.layers)
            error = off(ar, run.logits) / std(ar)
            clean = set(range(len(case))) - dirty
            assert all(error[node] <= 1e-4 for node in clean)
            assert dirty and max(error[node] for node in dirty) > 1e-2


def test_wrong_positions_do_not_matter_without_a_position_embedding():
    """The released OLMo-Hybrid has none."""
    host = make_engine("olmo_hybrid", rope_parameters={"rope_theta": None, "rope_type": "default"})
    case, prefix = tree("random", 16), host.prefill(prompt(12))
    run = host.verify(prefix, case, FAULTS["positions-by-index"])
    assert contaminated(run.plan, host.layers) == frozenset()
    assert torch.equal(run.logits, host.verify(prefix, case, FORKED).logits)
    assert all(op.positional for op in _attentions(engine("qwen3_5_text")))


def _attentions(host):
    return [op for layer in host.layers for branch in layer.branches for op in branch if isinstance(op, Attention)]


@pytest.mark.parametrize("family", [*DELTA, "llama"])
def test_commit_goes_on_like_a_prefill_of_the_path(family, subtests):
    """Every node after the shortest prompt, every fourth after others."""
    host, probe = engine(family), DraftTree.chain([3, 77])
    for length, stride in ((1, 1), (3, 4), (5, 4), (37, 4)):
        with subtests.test(length=length):
            prefix = host.prefill(prompt(length))
            case = tree("random", 10, seed=length)
            verified, flat = (host.verify(prefix, case, wiring) for wiring in (FORKED, UNFORKED))
            gaps = {}
            for node in range(0, len(case), stride):
                fresh = host.prefill([*prompt(length), *case.path_tokens(node)])
                expected = host.decode(fresh, probe)
                assert (off(host.decode(host.commit(verified, node), probe), expected) <= 1e-4 * std(expected)).all()
                gaps[node] = off(host.decode(host.commit(flat, node), probe), expected).max().item()
            if family != "llama":  # the twin: a flat run commits a polluted state
                assert max(gaps.values()) > 0.1 and all(gaps[node] < 1e-3 for node in gaps if node in case.clean)


@pytest.mark.parametrize("node", [1, 2])
def test_a_chain_of_the_library_commits_whole_and_in_part(node):
    host = engine("qwen3_5_text")
    prefix = host.prefill(prompt(9))
    chain = DraftTree.chain([5, 9, 40])
    after = host.commit(host.verify(prefix, chain, None), node)
    expected = host.decode(host.prefill([*prompt(9), *chain.tokens[: node + 1]]), DraftTree.chain([8, 1]))
    assert off(host.decode(after, DraftTree.chain([8, 1])), expected).max() < 1e-3


def test_nothing_that_runs_changes_a_prefix():
    """A-B-A: the same pass before and after passes of another tree, decoding and commits."""
    host = engine("qwen3_5_text")
    prefix = host.prefill(prompt(20))
    a, b = tree("random", 16, seed=1), tree("comb", 32, seed=2)
    before = [host.verify(prefix, a, w).logits for w in (FORKED, UNFORKED, None)] + [host.decode(prefix, a)]
    host.decode(prefix, b)
    host.decode(prefix, b, batched=True)
    host.decode(host.commit(host.verify(prefix, b, FORKED), 7), a)
    host.step(prefix, 3)
    after = [host.verify(prefix, a, w).logits for w in (FORKED, UNFORKED, None)] + [host.decode(prefix, a)]
    assert all(map(torch.equal, before, after))


def test_swapped_functions_are_put_back_even_after_an_error():
    host = engine("qwen3_5_text")
    originals = {name: getattr(host._module, name) for name in host.family.calls}
    hooks = [len(layer._forward_pre_hooks) for layer in host._decoder.layers]
    prefix = host.prefill(prompt(4))
    swapped = host._swapped(FORKED.plan(tree("random", 4)), None, host.family.calls)
    with pytest.raises(RuntimeError, match="stop here"), swapped:
        assert host._module.causal_conv1d_fn is not originals["causal_conv1d_fn"]
        raise RuntimeError("stop here")
    host.verify(prefix, tree("random", 4), FORKED)
    assert {name: getattr(host._module, name) for name in host.family.calls} == originals
    assert [len(layer._forward_pre_hooks) for layer in host._decoder.layers] == hooks


@pytest.mark.parametrize("family", DELTA)
def test_every_recurrent_layer_moves_the_logits(family):
    """A synthetic model whose states do not matter would hide every fault: 100 times the noise is the least."""
    host = engine(family)
    prefix = host.prefill(prompt(37))
    case = tree("chain", 2)
    right = host.decode(prefix, case)
    noise = off(right, host.verify(prefix, case, FORKED).logits).max()
    recurrent = [
        i for i, layer in enumerate(host.layers) if any(isinstance(op, State) for b in layer.branches for op in b)
    ]
    assert len(recurrent) >= 2
    for index in recurrent:
        cache = host.caches.fork(prefix.cache)
        cache.layers[index].recurrent_states[0].mul_(0.5)
        touched = type(prefix)(cache, prefix.length, prefix.logits)
        assert off(right, host.decode(touched, case)).max() >= 100 * noise


def _late_rounding(swap, committed, rows, weight, bias, activation):
    wide = [x if x is None else x.float() for x in (committed, rows, weight, bias)]
    out = causal_conv.tree_form(*wide, swap.plan.windows(weight.shape[-1]))
    return torch.nn.functional.silu(out).to(rows.dtype)


def test_bf16_rounds_where_the_model_rounds(monkeypatch):
    """On chains a forked pass stays close to the library's own: the same roundings at the same places."""
    host = engine("qwen3_5_text", "bfloat16")

    def apart():
        found = []
        for seed in range(4):
            case, prefix = DraftTree.chain(prompt(33, seed + 100)), host.prefill(prompt(20, seed))
            forked, linear = (host.verify(prefix, case, wiring).logits.float() for wiring in (FORKED, None))
            found.append((forked - linear).square().mean())
        return torch.stack(found).mean().sqrt().item()

    right = apart()
    monkeypatch.setattr(conv, "_convolve", _late_rounding)
    late = apart()
    assert late > 2 * right, f"{late:.4f} against {right:.4f}"


def test_a_layer_without_a_row_is_named():
    host = make_engine("qwen3")
    host.config.layer_types[1] = "striped_attention"
    with pytest.raises(Unsupported, match=r"layer 1 is 'striped_attention'"):
        TransformersEngine(host.model)


def test_unknown_families_and_settings_are_refused():
    host = make_engine("llama")
    with pytest.raises(UsageError, match="'theirs'"):
        TransformersEngine(host.model, mixers="theirs")
    host.model.config.model_type = "gpt_neox"
    with pytest.raises(Unsupported, match="'gpt_neox' has no row"):
        TransformersEngine(host.model)


@pytest.mark.parametrize("family", [*DELTA, "llama"])
def test_the_oracle_is_the_same_model_in_float64(family):
    host = engine(family, "bfloat16")
    exact = host.exact()
    assert exact.dtype == torch.float64 and exact.mixers == "own" and host.dtype == torch.bfloat16
    twins = zip(host.model.parameters(), exact.model.parameters(), strict=True)
    assert all(torch.equal(a.double(), b) for a, b in twins)
    case = tree("random", 16)
    want = exact.decode(exact.prefill(prompt(20)), case)
    prefix = host.prefill(prompt(20))
    forked, unforked = (off(want, host.verify(prefix, case, wiring).logits).median() for wiring in (FORKED, UNFORKED))
    assert forked < 0.3 and (family == "llama" or unforked > 1)
    assert off(want, exact.verify(exact.prefill(prompt(20)), case, FORKED).logits).max() < 1e-9


def test_casts_to_float32_leave_float64_alone_and_other_casts_do_not():
    x = torch.rand(3, 3, dtype=torch.float64)
    with KeepFloat64():
        kept = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32)]
        kept += [x.softmax(-1, dtype=torch.float32), x @ torch.eye(3)]
        cast = [x.to(torch.float16), x.type(torch.float16), x.half(), torch.eye(3).type(torch.float32)]
    assert {y.dtype for y in kept} == {torch.float64}
    assert [y.dtype for y in cast] == [torch.float16] * 3 + [torch.float32]


def test_a_step_goes_on_where_the_one_before_it_ended():
    host, chain = engine("qwen3_5_text"), DraftTree.chain([5, 9, 40])
    prefix = host.prefill(prompt(9))
    rows = host.decode(prefix, chain)
    for place, token in enumerate(chain.tokens, start=1):
        logits, prefix = host.step(prefix, token)
        assert torch.equal(logits, rows[place - 1]) and prefix.length == host.contents(prefix)[0] == 9 + place


def test_a_pass_that_is_watched_shows_its_rows_and_the_experts_that_they_went_to():
    host, case = engine("qwen3_5_moe_text"), tree("random", 6)
    prefix = host.prefill(prompt(9))
    with host.watch(range(-1, len(host.layers))) as seen:
        host.verify(prefix, case, FORKED)
    assert seen.outputs.keys() == set(range(-1, len(host.layers)))
    assert torch.equal(seen.outputs[-1], host.model.get_input_embeddings()(torch.tensor(case.tokens)))
    assert seen.routes.keys() == set(range(len(host.layers)))
    for chosen in seen.routes.values():
        assert not chosen.is_floating_point() and chosen.shape == (len(case), 2) and chosen.max() < 4


def test_loading_takes_mixers_and_attention_by_name():
    path = str(fixtures_dir() / "models" / "tiny-qwen3_5")
    host = TransformersEngine.load(path, dtype="float32", device="cpu", args={"mixers": "own", "attention": "eager"})
    assert host.mixers == "own" and host.model.config._attn_implementation == "eager"
    assert TransformersEngine.load(path, mixers="own", dtype="float32", device="cpu").mixers == "own"
    with pytest.raises(UsageError, match="engine-arg: got speed"):
        TransformersEngine.load(path, args={"speed": "high"})


def test_describe_names_the_functions_that_really_run(tmp_path):
    """A package called causal_conv1d silently takes the place of the library's own functions."""
    package = tmp_path / "causal_conv1d"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent("""
            def causal_conv1d_fn(x, weight, bias=None, activation=None): return x
            def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None): return x
        """)
    )
    code = "from tests.models import engine; print(engine('qwen3_5_text').describe()['recurrent_functions'])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{__file__.rpartition('/tests/')[0]}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'causal_conv1d.causal_conv1d_fn'" in out.stdout
    here = str(engine("qwen3_5_text").describe()["recurrent_functions"])
    assert "modeling_qwen3_5.causal_conv1d_fn'" in here and "'causal_conv1d.causal_conv1d_fn'" not in here


def test_float32_is_ieee_in_every_pass_and_the_callers_choice_is_put_back(monkeypatch):
    host, seen = engine("llama"), []
    forward = type(host.model).forward

    def spy(self, *args, **kwargs):
        seen.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(host.model), "forward", spy)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        host.prefill(prompt(4))
        assert seen == [(False, "highest")]
        assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
