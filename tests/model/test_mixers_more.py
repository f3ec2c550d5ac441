"""Kimi Delta Attention, lightning attention and RG-LRU: the tree forms against the fold of the formula."""

from itertools import product

import pytest
import torch

from ddtree_check.model.mixers import kda, lightning, rg_lru
from ddtree_check.model.wiring import FORKED, UNFORKED
from tests.models import TREES, WIRINGS, WRONG, farthest, folded, folded_by_head, tree

HEADS, K, V = 3, 8, 6
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5}


def draws(n, *shapes):
    draw = torch.Generator().manual_seed(n)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]


def kda_inputs(n):
    start, q, k, v, g, b = draws(
        n, (HEADS, K, V), (HEADS, n, K), (HEADS, n, K), (HEADS, n, V), (HEADS, n, K), (HEADS, n)
    )
    return start, q, torch.nn.functional.normalize(k, dim=-1), v, -0.5 * g.abs(), 2 * b.sigmoid()


def kda_fold(start, q, k, v, log_decay, beta, sources, step=kda.step):
    return folded_by_head(step, start, (q, k, v, log_decay, beta), sources)


def lightning_inputs(n):
    start, q, k, v = draws(n, (HEADS, K, V), (HEADS, n, K), (HEADS, n, K), (HEADS, n, V))
    return start, q, k, v, -torch.tensor([0.3, 0.02, 1e-5], dtype=torch.float64)


def lightning_fold(start, q, k, v, log_decay, sources, step=lightning.step):
    return folded_by_head(step, start, (q, k, v, log_decay[:, None].expand(q.shape[:2])), sources)


def rg_lru_inputs(n):
    start, x, a = draws(n, (HEADS * K,), (n, HEADS * K), (n, HEADS * K))
    return start, x, a.sigmoid()


def rg_lru_fold(start, x, decay, sources, step=rg_lru.step):
    return folded(step, start, (x, decay), sources)


FORMS = {
    "kda": (kda.tree_form, kda_inputs, kda_fold),
    "lightning": (lightning.tree_form, lightning_inputs, lightning_fold),
    "lightning-folded": (lightning.folded, lightning_inputs, lightning_fold),
    "rg_lru": (rg_lru.tree_form, rg_lru_inputs, rg_lru_fold),
}


@pytest.mark.parametrize("form", FORMS)
def test_tree_form_equals_the_fold(form):
    run, draw_inputs, reference = FORMS[form]
    wrong = []
    for (name, case), wiring, dtype in product(TREES.items(), WIRINGS, BOUND):
        inputs, sources = [x.to(dtype) for x in draw_inputs(len(case))], wiring.plan(case).state
        scan = run(*inputs, sources)
        states, out = reference(*inputs, sources)
        scale = max(1, out.abs().max())
        probed = {0, len(case) // 3, len(case) - 1}
        error = farthest(scan, out, [(node, states[node]) for node in probed])
        if scan.output.dtype != dtype or not error <= BOUND[dtype] * scale:
            wrong.append(
                f"{name}, {wiring.name}, {dtype}: off by {error:.2e} at size {scale:.1f} in {scan.output.dtype}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("form", FORMS)
def test_clean_rows_agree_bit_for_bit(form):
    run, draw_inputs, _ = FORMS[form]
    wrong = []
    for (name, case), dtype in product(TREES.items(), BOUND):
        inputs, clean = [x.to(dtype) for x in draw_inputs(len(case))], list(case.clean)
        forked, unforked = (run(*inputs, w.plan(case).state).output for w in (FORKED, UNFORKED))
        equal = torch.equal(forked[..., clean, :], unforked[..., clean, :]), torch.equal(forked, unforked)
        if equal != (True, case.is_chain):
            wrong.append(f"{name}, {dtype}: clean rows, all rows equal: {equal}")
    assert not wrong, "\n".join(wrong)


def test_the_kda_step_is_the_paper_s_matrix_form():
    """S_t = (I - b k k^T) Diag(a) S_{t-1} + b k v^T, written another way than the step is."""
    start, q, k, v, log_decay, beta = (x[0] for x in kda_inputs(1))
    q, k, v, log_decay, beta = q[0], k[0], v[0], log_decay[0], beta[0]
    state, out = kda.step(start, q, k, v, log_decay, beta)
    erase = torch.eye(K, dtype=torch.float64) - beta * torch.outer(k, k)
    wanted = erase @ torch.diag(log_decay.exp()) @ start + beta * torch.outer(k, v)
    torch.testing.assert_close(state, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(out, wanted.T @ q, rtol=0, atol=1e-13)


def test_kda_with_one_decay_for_all_channels_is_the_gated_delta_rule():
    from ddtree_check.model.mixers import gated_delta

    case = tree("random", 16)
    start, q, k, v, log_decay, beta = kda_inputs(len(case))
    shared = log_decay[..., :1]
    wide = kda.tree_form(start, q, k, v, shared.expand_as(log_decay), beta, case.parents)
    narrow = gated_delta.tree_form(start, q, k, v, shared[..., 0], beta, case.parents)
    assert (wide.output - narrow.output).abs().max() < 1e-12


def test_fast_decay_neither_overflows_nor_loses_digits():
    """exp(g_i) exp(-g_j), as chunked kernels split the decay, is inf at a log decay of -40 a step."""
    case = tree("chain", 64)
    narrow = [x.float() for x in kda_inputs(len(case))]
    narrow[4] = narrow[4] * 80
    narrow[4][..., ::2] *= 1e-3
    want = kda.tree_form(*(x.double() for x in narrow), case.parents).output
    got = kda.tree_form(*narrow, case.parents).output
    assert torch.isfinite(got).all()
    assert (got.double() - want).abs().max() < 5e-6


def test_kda_blocks_of_channels_add_up(monkeypatch):
    case = tree("random", 16)
    inputs = kda_inputs(len(case))
    whole = kda.tree_form(*inputs, case.parents).output
    monkeypatch.setattr(kda, "_BLOCK", 3 * HEADS * 17 * 17)
    assert (kda.tree_form(*inputs, case.parents).output - whole).abs().max() < 1e-13


TWINS = {
    "kda-scalar-decay": ("kda", lambda s, q, k, v, g, b: kda.step(s, q, k, v, g.mean().expand_as(g), b)),
    "kda-decay-of-values": ("kda", lambda s, q, k, v, g, b: kda.step(s, q, k, v, g.flip(0), b)),
    "kda-undecayed-read": ("kda", lambda s, q, k, v, g, b: _undecayed_read(s, q, k, v, g, b)),
    "kda-no-beta": ("kda", lambda s, q, k, v, g, b: kda.step(s, q, k, v, g, torch.ones_like(b))),
    "lightning-decays-its-own-write": ("lightning", lambda s, q, k, v, g: _late_lightning(s, q, k, v, g)),
    "lightning-no-decay": ("lightning", lambda s, q, k, v, g: lightning.step(s, q, k, v, 0 * g)),
    "lightning-old-state": ("lightning", lambda s, q, k, v, g: (lightning.step(s, q, k, v, g)[0], q @ s)),
    "rg-lru-decays-its-input": ("rg_lru", lambda s, x, a: (a * (s + x),) * 2),
    "rg-lru-mixes": ("rg_lru", lambda s, x, a: (a * s + (1 - a) * x,) * 2),
}


def _undecayed_read(state, q, k, v, log_decay, beta):
    read = k @ state
    state = log_decay.exp()[:, None] * state + torch.outer(k, beta * (v - read))
    return state, q @ state


def _late_lightning(state, q, k, v, log_decay):
    state = log_decay.exp() * (state + torch.outer(k, v))
    return state, q @ state


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_recurrences_are_told_apart(twin):
    form, step = TWINS[twin]
    run, inputs, reference = FORMS[form]
    case = tree("random", 16)
    inputs = inputs(len(case))
    assert (run(*inputs, case.parents).output - reference(*inputs, case.parents, step=step)[1]).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_dropped_start_and_wrong_source_are_told_apart(form):
    run, inputs, _ = FORMS[form]
    case = tree("random", 16)
    inputs = inputs(len(case))
    right = run(*inputs, case.parents).output
    for wiring in WRONG:
        assert (run(*inputs, wiring.plan(case).state).output - right).abs().max() > 1e-2, wiring.name


def test_folded_lightning_rounds_like_a_chain():
    """A model in bf16 keeps its state in bf16: the fold gives those very roundings, the closed form does not."""
    case = tree("random", 16)
    start, q, k, v, log_decay = (x.bfloat16() for x in lightning_inputs(len(case)))
    states = {-1: start}
    for node, parent in enumerate(case.parents):
        states[node] = log_decay.exp()[:, None, None] * states[parent] + k[:, node, :, None] @ v[:, node, None, :]
    out = torch.stack([(q[:, i, None] @ states[i])[:, 0] for i in range(len(case))], dim=1)
    exact = lightning.folded(start, q, k, v, log_decay, case.parents)
    closed = lightning.tree_form(start, q, k, v, log_decay, case.parents)
    near = (exact.output - out).abs().float().mean()
    assert near <= 0.1 * (closed.output - out).abs().float().mean()


def test_rg_lru_on_paper():
    """Its tree form folds the very step, so that the two cannot check each other."""
    state, output = rg_lru.step(torch.tensor([2.0, -4.0]), torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.25]))
    assert state.tolist() == output.tolist() == [2.0, 2.0]
