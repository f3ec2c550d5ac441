"""Mamba-2 and Mamba: the tree forms against the fold of the formula, and wrong recurrences told apart."""

from itertools import product

import pytest
import torch

from ddtree_check.model.mixers import mamba1, mamba2
from ddtree_check.model.wiring import FORKED, UNFORKED
from tests.models import TREES, WIRINGS, WRONG, farthest, folded, folded_by_head, tree

HEADS, P, S = 3, 5, 6
BOUND = {torch.float64: 1e-12, torch.float32: 1e-4}  # float32: sums of up to 65 terms of size 1, decays near 1


def draws(n, dtype):
    draw = torch.Generator().manual_seed(n)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def uniform(*shape, low, high):
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64)

    return (lambda *shape: normal(*shape).to(dtype)), (lambda *shape, **edges: uniform(*shape, **edges).to(dtype))


def mamba2_inputs(n, dtype=torch.float64):
    """initial, x, dt, a, b, c, d as `mamba2.tree_form` takes them, for HEADS heads."""
    normal, uniform = draws(n, dtype)
    return [
        normal(HEADS, P, S), normal(HEADS, n, P), uniform(HEADS, n, low=0.05, high=0.8),
        uniform(HEADS, low=-1, high=-0.02), normal(HEADS, n, S), normal(HEADS, n, S), normal(HEADS),
    ]  # fmt: skip


def mamba1_inputs(n, dtype=torch.float64):
    """initial, x, dt, a, b, c, d as `mamba1.tree_form` takes them."""
    normal, uniform = draws(n, dtype)
    return [
        normal(P, S), normal(n, P), uniform(n, P, low=0.05, high=0.8), uniform(P, S, low=-1, high=-0.02),
        normal(n, S), normal(n, S), normal(P),
    ]  # fmt: skip


def mamba2_fold(initial, x, dt, a, b, c, d, sources, step=mamba2.step):
    a, d = (values[:, None].expand_as(dt) for values in (a, d))
    return folded_by_head(step, initial, (x, dt, a, b, c, d), sources)


def mamba1_fold(initial, x, dt, a, b, c, d, sources, step=mamba1.step):
    return folded(lambda s, x, dt, b, c: step(s, x, dt, a, b, c, d), initial, [x, dt, b, c], sources)


MIXERS = {
    "mamba2": (mamba2_inputs, mamba2.tree_form, mamba2_fold, mamba2.step),
    "mamba1": (mamba1_inputs, mamba1.tree_form, mamba1_fold, mamba1.step),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_tree_form_equals_the_fold_of_the_step(mixer):
    draw_inputs, tree_form, folded, _ = MIXERS[mixer]
    wrong = []
    for (name, case), wiring, dtype in product(TREES.items(), WIRINGS, BOUND):
        inputs, sources = draw_inputs(len(case), dtype), wiring.plan(case).state
        scan = tree_form(*inputs, sources)
        states, out = folded(*inputs, sources)
        forms = scan.output.dtype, scan.state(0).dtype, scan.state(0).shape
        error = farthest(scan, out, enumerate(states))
        if forms != (dtype, dtype, inputs[0].shape) or not error <= BOUND[dtype]:
            wrong.append(f"{name}, {wiring.name}, {dtype}: off by {error:.2e} in {forms}")
    assert not wrong, "\n".join(wrong)


def test_the_steps_are_the_formulas_entry_by_entry():
    initial, x, dt, a, b, c, d = mamba1_inputs(1)
    state, out = mamba1.step(initial, x[0], dt[0], a, b[0], c[0], d)
    for i in range(P):
        for j in range(S):
            wanted = torch.exp(dt[0, i] * a[i, j]) * initial[i, j] + dt[0, i] * b[0, j] * x[0, i]
            torch.testing.assert_close(state[i, j], wanted, rtol=0, atol=1e-14)
        torch.testing.assert_close(
            out[i], sum(state[i, j] * c[0, j] for j in range(S)) + d[i] * x[0, i], rtol=0, atol=1e-13
        )
    # Mamba-2 is Mamba with one decay and one time step for the whole head.
    head, rate, skip = dt[0, 0], a[0, 0], d[0]
    for got, wanted in zip(
        mamba2.step(initial, x[0], head, rate, b[0], c[0], skip),
        mamba1.step(initial, x[0], head.expand(P), rate.expand(P, S), b[0], c[0], skip.expand(P)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)


def swapped_decay(step):
    """Decays by the other factor of the pair (dt, a): A alone, without the time step."""
    return lambda s, x, dt, a, b, c, d: step(s, x, dt, a / dt if dt.dim() == 0 else a / dt[:, None], b, c, d)


TWINS = {
    "swapped-b-and-c": lambda step: lambda s, x, dt, a, b, c, d: step(s, x, dt, a, c, b, d),
    "decay-without-the-time-step": swapped_decay,
    "input-without-the-time-step": lambda step: lambda s, x, dt, a, b, c, d: step(s, x / dt, dt, a, b, c, d * dt),
    "no-direct-term": lambda step: lambda s, x, dt, a, b, c, d: step(s, x, dt, a, b, c, torch.zeros_like(d)),
    "growth-instead-of-decay": lambda step: lambda s, x, dt, a, b, c, d: step(s, x, dt, -a, b, c, d),
    "output-of-the-old-state": lambda step: lambda s, x, dt, a, b, c, d: (step(s, x, dt, a, b, c, d)[0], s @ c + d * x),
}


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_wrong_recurrences_are_told_apart(mixer, twin):
    inputs, tree_form, folded, step = MIXERS[mixer]
    case = tree("random", 16)
    drawn = inputs(len(case))
    _, out = folded(*drawn, case.parents, step=TWINS[twin](step))
    assert (tree_form(*drawn, case.parents).output - out).abs().max() > 1e-2


@pytest.mark.parametrize("mixer", MIXERS)
def test_dropped_starts_and_wrong_sources_are_told_apart(mixer):
    draw_inputs, tree_form, *_ = MIXERS[mixer]
    case = tree("random", 16)
    inputs = draw_inputs(len(case))
    right = tree_form(*inputs, FORKED.plan(case).state)
    for wiring in WRONG:
        wrong = tree_form(*inputs, wiring.plan(case).state)
        assert (wrong.output - right.output).abs().max() > 1e-2, wiring.name
        states = max((wrong.state(node) - right.state(node)).abs().max() for node in range(len(case)))
        assert states > 1e-2, wiring.name


@pytest.mark.parametrize("mixer", MIXERS)
def test_clean_rows_agree_bit_for_bit(mixer):
    """A level of the fold holds other rows under another wiring; a row must not notice."""
    draw_inputs, tree_form, *_ = MIXERS[mixer]
    wrong = []
    for (name, case), dtype in product(TREES.items(), (*BOUND, torch.bfloat16)):
        inputs, clean = draw_inputs(len(case), dtype), list(case.clean)
        forked, unforked = (tree_form(*inputs, w.plan(case).state) for w in (FORKED, UNFORKED))
        outputs = torch.equal(forked.output[..., clean, :], unforked.output[..., clean, :])
        states = all(torch.equal(forked.state(node), unforked.state(node)) for node in clean)
        equal = outputs, states, torch.equal(forked.output, unforked.output)
        if equal != (True, True, case.is_chain):
            wrong.append(f"{name}, {dtype}: clean outputs, clean states, all outputs equal: {equal}")
    assert not wrong, "\n".join(wrong)


def test_fast_decay_keeps_its_precision():
    """Differences of running sums of log decays of -40 a step would lose four digits in float32."""
    case = tree("chain", 64)
    narrow = mamba2_inputs(len(case), torch.float32)
    narrow[2] = narrow[2] * 50
    narrow[2][:, ::2] *= 1e-3
    narrow[1] = narrow[1] / narrow[2][..., None]  # so that every node writes as much
    narrow[6] = torch.zeros_like(narrow[6])
    got, want = (mamba2.tree_form(*x, case.parents).output for x in (narrow, [x.double() for x in narrow]))
    assert (got.double() - want).abs().max() < 2e-6 * want.abs().max()


def test_a_narrower_readout_rounds_the_states_as_they_are_read():
    case = tree("random", 16)
    initial, x, dt, a, b, c, d = mamba1_inputs(len(case), torch.float32)
    got = mamba1.tree_form(initial, x, dt, a, b, c.bfloat16(), d, case.parents)
    assert got.states.dtype == torch.float32
    read = torch.stack([state.bfloat16() @ row for state, row in zip(got.states, c.bfloat16(), strict=True)])
    torch.testing.assert_close(got.output, read.float() + d * x, rtol=0.02, atol=0.02)
