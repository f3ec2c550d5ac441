"""The gated delta rule and the causal convolution: the closed tree forms against the fold of the formula."""

from functools import partial
from itertools import product

import pytest
import torch

from ddtree_check.model.mixers import causal_conv, decay, gated_delta
from ddtree_check.model.wiring import FORKED, UNFORKED, Plans
from tests.models import BLANK_INSIDE, DROPPED, TREES, WIRINGS, WRONG, farthest, folded, folded_by_head, off, tree

HEADS, K, V, D, W = 3, 8, 6, 5, 4
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}


def delta_inputs(n, dtype, *, decay=0.5):
    draw = torch.Generator().manual_seed(n)
    q, k = torch.randn(2, HEADS, n, K, generator=draw, dtype=torch.float64)
    v = torch.randn(HEADS, n, V, generator=draw, dtype=torch.float64)
    log_decay = -decay * torch.rand(HEADS, n, generator=draw, dtype=torch.float64)
    beta = 2 * torch.rand(HEADS, n, generator=draw, dtype=torch.float64)
    start = torch.randn(HEADS, K, V, generator=draw, dtype=torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1)
    return [x.to(dtype) for x in (start, q, k, v, log_decay, beta)]


def delta_fold(start, q, k, v, log_decay, beta, sources, step=gated_delta.step):
    return folded_by_head(step, start, (q, k, v, log_decay, beta), sources)


def test_closed_form_equals_the_fold():
    wrong = []
    for (name, case), wiring, dtype in product(TREES.items(), WIRINGS, BOUND):
        inputs, sources = delta_inputs(len(case), dtype), wiring.plan(case).state
        scan = gated_delta.tree_form(*inputs, sources)
        states, out = delta_fold(*inputs, sources)
        error = farthest(scan, out, enumerate(states))
        if scan.output.dtype != dtype or not error <= BOUND[dtype]:
            wrong.append(f"{name}, {wiring.name}, {dtype}: off by {error:.2e} in {scan.output.dtype}")
    assert not wrong, "\n".join(wrong)


def test_the_step_is_the_textbook_matrix_form():
    """S_t = a (I - b k k^T) S_{t-1} + b k v^T, written another way than the step is."""
    start, q, k, v, log_decay, beta = (x[0] for x in delta_inputs(1, torch.float64))
    q, k, v, log_decay, beta = q[0], k[0], v[0], log_decay[0], beta[0]
    state, out = gated_delta.step(start, q, k, v, log_decay, beta)
    wanted = log_decay.exp() * (torch.eye(K) - beta * torch.outer(k, k)).double() @ start + beta * torch.outer(k, v)
    torch.testing.assert_close(state, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(out, wanted.T @ q, rtol=0, atol=1e-13)


TWINS = {
    "swapped-beta-and-decay": lambda s, q, k, v, g, b: gated_delta.step(s, q, k, v, b.log(), g.exp()),
    "decay-after-the-update": lambda s, q, k, v, g, b: _late_decay(s, q, k, v, g, b),
    "no-beta": lambda s, q, k, v, g, b: gated_delta.step(s, q, k, v, g, torch.ones_like(b)),
    "output-of-the-old-state": lambda s, q, k, v, g, b: (gated_delta.step(s, q, k, v, g, b)[0], q @ s),
}


def _late_decay(state, q, k, v, log_decay, beta):
    state, _ = gated_delta.step(state, q, k, v, torch.zeros_like(log_decay), beta)
    state = log_decay.exp() * state
    return state, q @ state


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_recurrences_are_told_apart(twin):
    case = tree("random", 16)
    inputs = delta_inputs(len(case), torch.float64)
    scan = gated_delta.tree_form(*inputs, case.parents)
    _, out = delta_fold(*inputs, case.parents, step=TWINS[twin])
    assert (scan.output - out).abs().max() > 1e-2


def test_dropped_start_and_wrong_source_are_told_apart():
    case = tree("random", 16)
    inputs = delta_inputs(len(case), torch.float64)
    right = gated_delta.tree_form(*inputs, case.parents).output
    for wiring in WRONG:
        assert (gated_delta.tree_form(*inputs, wiring.plan(case).state).output - right).abs().max() > 1e-2


def test_fast_decay_keeps_its_precision():
    """Differences of running sums of log decays of -40 a step would lose four digits in float32."""
    case = tree("chain", 64)
    narrow = delta_inputs(len(case), torch.float32)
    wide = [x.double() for x in narrow]
    for inputs in (narrow, wide):
        inputs[4] = inputs[4] * 80  # log decays down to -40
        inputs[4][:, ::2] *= 1e-3
    got, want = (gated_delta.tree_form(*inputs, case.parents).output for inputs in (narrow, wide))
    assert (got.double() - want).abs().max() < 2e-6


def test_decays_of_several_requests_are_those_of_each():
    trees = [tree("random", 16, seed=seed) for seed in (1, 2)]
    logs = -torch.rand(2, HEADS, len(trees[0]), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sources = [FORKED.plan(trees[0]).state, BLANK_INSIDE.plan(trees[1]).state]
    alone = [decay.along(own, source) for own, source in zip(logs, sources, strict=True)]
    both = decay.along(logs, sources)
    for name in ("between", "from_start"):
        assert torch.allclose(getattr(both, name), torch.stack([getattr(one, name) for one in alone]), atol=1e-14)


def test_clean_rows_agree_bit_for_bit():
    wrong = []
    for (name, case), dtype in product(TREES.items(), BOUND):
        inputs, clean = delta_inputs(len(case), dtype), list(case.clean)
        forked, unforked = (gated_delta.tree_form(*inputs, w.plan(case).state).output for w in (FORKED, UNFORKED))
        equal = torch.equal(forked[:, clean], unforked[:, clean]), torch.equal(forked, unforked)
        if equal != (True, case.is_chain):
            wrong.append(f"{name}, {dtype}: clean rows, all rows equal: {equal}")
    assert not wrong, "\n".join(wrong)


def conv_inputs(n, dtype, kept=W):
    draw = torch.Generator().manual_seed(n)
    committed = torch.randn(D, kept, generator=draw, dtype=torch.float64)
    rows = torch.randn(D, n, generator=draw, dtype=torch.float64)
    weight, bias = torch.randn(D, W, generator=draw, dtype=torch.float64), torch.randn(D, generator=draw).double()
    return [x.to(dtype) for x in (committed, rows, weight, bias)]


def test_convolution_over_a_tree_equals_its_fold():
    wrong = []
    for (name, case), wiring, kept in product(TREES.items(), (FORKED, UNFORKED, DROPPED), (0, 1, 3, 4)):
        committed, rows, weight, bias = conv_inputs(len(case), torch.float64, kept)
        plan = wiring.plan(case)
        got = causal_conv.tree_form(committed, rows, weight, bias, plan.windows(W))
        start = torch.cat([torch.zeros(D, W, dtype=torch.float64), committed], 1)[:, -(W - 1) :].T
        step = partial(causal_conv.step, weight=weight, bias=bias)
        _, want = folded(step, start, [rows.T], plan.conv)
        error = off(got, want.T).max()
        if got.dtype != torch.float64 or not error <= 1e-14:
            wrong.append(f"{name}, {wiring.name}, {kept} kept: off by {error:.2e} in {got.dtype}")
    assert not wrong, "\n".join(wrong)


def test_windows_of_several_requests_are_those_of_each():
    plans = [wiring.plan(tree("random", 16, seed=seed)) for seed, wiring in ((1, FORKED), (2, DROPPED))]
    committed, rows, weight, bias = conv_inputs(len(plans[0].tree), torch.float64)
    committed, rows = (torch.stack([x, 2 * x]) for x in (committed, rows))
    together = causal_conv.tree_form(committed, rows, weight, bias, Plans(tuple(plans)).windows(W))
    for request, plan in enumerate(plans):
        alone = causal_conv.tree_form(committed[request], rows[request], weight, bias, plan.windows(W))
        torch.testing.assert_close(together[request], alone, rtol=0, atol=1e-14)


def test_a_shifted_window_is_told_apart():
    case = tree("random", 16)
    committed, rows, weight, bias = conv_inputs(len(case), torch.float64)
    windows = FORKED.plan(case).windows(W)
    right = causal_conv.tree_form(committed, rows, weight, bias, windows)
    for wrong in (windows - 1, UNFORKED.plan(case).windows(W), windows[:, ::-1].copy()):
        assert (causal_conv.tree_form(committed, rows, weight, bias, wrong) - right).abs().max() > 1e-2


def test_bf16_convolution_is_as_exact_as_the_librarys():
    """Summed in float32 and rounded once, like torch's own; summed in bf16 it would be several times noisier."""
    case = tree("chain", 64)
    committed, rows, weight, bias = conv_inputs(len(case), torch.bfloat16, W - 1)
    got = causal_conv.tree_form(committed, rows, weight, bias, FORKED.plan(case).windows(W))
    library = torch.nn.functional.conv1d(torch.cat([committed, rows], 1)[None], weight[:, None], bias, groups=D)[0]
    exact = causal_conv.tree_form(*(x.double() for x in (committed, rows, weight, bias)), FORKED.plan(case).windows(W))
    narrow = torch.zeros_like(rows)
    for slot in range(W):
        narrow += causal_conv.gather(committed, rows, FORKED.plan(case).windows(W))[..., slot] * weight[:, slot, None]
    narrow += bias[:, None]
    ours, theirs, worse = ((x.double() - exact).square().mean().sqrt() for x in (got, library, narrow))
    assert ours <= 1.1 * theirs < worse
