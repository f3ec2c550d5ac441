import numpy as np
import pytest

from ddtree_check.compare import Differences
from ddtree_check.tree import DraftTree
from ddtree_check.verdict import (
    Leak,
    ModeResult,
    Rule,
    conclude,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    name_cause,
    reference_problem,
)
from ddtree_check.wiring import Conv, Layer, State

RULE = Rule()


def differences(max_abs, changed=(), *, ulp=1e-6, std=2.0, rms=None):
    size = len(max_abs)
    argmax = np.zeros(size, dtype=int)
    run_argmax = np.array([int(node in changed) for node in range(size)])
    error = np.array(max_abs, dtype=float)
    fill = np.zeros(size)
    return Differences(
        max_abs=error, rms=error / 3 if rms is None else np.array(rms, dtype=float), kl=fill, tv=fill, argmax=argmax,
        run_argmax=run_argmax, margin=fill, ar_rank=argmax, ulp=np.full(size, ulp), std=np.full(size, std),
    )  # fmt: skip


def test_the_four_node_verdicts():
    found = judge(differences([0.1, 0.1, 0.9, 0.9], changed=(1, 3)), np.full(4, 0.5))
    assert found == ("pass", "tie", "leak", "flip")


def test_the_floor_is_factor_times_the_largest_control_plus_ulps():
    floor = RULE.floor([np.array([1e-3, 0.0]), np.array([2e-3, 0.0])], np.array([1e-6, 1e-6]))
    assert floor == pytest.approx([8e-3 + 4e-6, 4e-6])
    assert judge(differences([8.0e-3, 4.1e-6]), floor) == ("pass", "leak")


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_what_is_not_finite_is_beyond_any_floor(error):
    assert judge(differences([error], changed=(0,)), np.array([1e30])) == ("flip",)


def test_a_control_that_is_nan_covers_nothing():
    assert judge(differences([0.0]), RULE.floor([np.array([np.nan])], np.array([1e-6]))) == ("leak",)


def test_plain_rounding_is_a_share_of_the_rows_spread():
    for std in (0.5, 8.0):
        floor = RULE.chain_floor([np.zeros(1)], differences([0.0], std=std, ulp=1e-12), "float32")
        assert floor == pytest.approx([1e-4 * std])


def test_one_bad_node_is_not_hidden_behind_a_large_control_elsewhere():
    floor = RULE.floor([np.array([1.0, 1e-5])], np.array([1e-6, 1e-6]))
    assert judge(differences([0.5, 0.01]), floor) == ("pass", "leak")


@pytest.mark.parametrize(
    ("repeat", "forward", "dtype", "says"),
    [
        pytest.param([0, 0], [1e-5, 1e-5], "float32", None, id="fine"),
        pytest.param([0, 1e-3], [1e-5, 1e-5], "float32", "does not repeat itself", id="does-not-repeat"),
        pytest.param([0, np.nan], [1e-5, 1e-5], "float32", "does not repeat itself", id="repeats-with-nan"),
        pytest.param([0, 0], [1e-5, 3e-4], "float32", "differs from a full forward", id="one-node-off-float32"),
        pytest.param([0, 0], [1e-5, np.nan], "float32", "differs from a full forward", id="nan-in-forward"),
        pytest.param([0, 0, 0], [0.2, 0.2, 9.0], "bfloat16", None, id="one-amplified-row-bf16"),
        pytest.param([0, 0, 0], [2.0, 2.0, 2.0], "bfloat16", "differs from a full forward", id="all-off-bf16"),
    ],
)
def test_what_makes_a_reference_unusable(repeat, forward, dtype, says):
    found = reference_problem(differences(repeat), differences(forward), RULE, dtype)
    assert (found is None) if says is None else (says in found)


def test_linear_is_judged_by_full_forward_passes_of_any_node():
    found = differences([3e-3, 1e-5])
    loose, tight = (RULE.chain_floor([np.array(c)], found, "float32") for c in ([1e-3, 0.0], [1e-5, 0.0]))
    assert judge_linear(found, loose, None).verdict == "pass"
    bad = judge_linear(found, tight, None)
    assert bad.verdict == "fail" and "first node 0" in bad.reason
    assert judge_linear(found, loose, "ar wanders").verdict == "reference_unusable"


def leak(contaminated=(2, 3), near=(2,), moved=(2, 3), equal=True):
    return Leak(frozenset(contaminated), frozenset(near), frozenset(moved), equal)


@pytest.mark.parametrize(
    ("found", "verdict", "says"),
    [
        pytest.param(leak(), "fail", "as predicted", id="leaks"),
        pytest.param(leak((), (), ()), "pass", "nothing to leak", id="chain-or-attention-only"),
        pytest.param(leak(moved=()), "insensitive", "none of 2", id="does-not-move"),
        pytest.param(leak(moved=(1, 2)), "fail", "leak law calls clean", id="outside-the-law"),
        pytest.param(leak(equal=False), "fail", "bit for bit", id="clean-nodes-differ"),
        pytest.param(leak(equal=None), "fail", "as predicted", id="no-exact-control"),
    ],
)
def test_unforked_verdicts(found, verdict, says):
    result = judge_unforked(differences([0, 0, 1, 1]), np.full(4, 1e-3), found, None)
    assert result.verdict == verdict and says in result.reason


def test_forked_without_any_trusted_control_is_not_judged():
    assert judge_forked(differences([0.0]), None, None).verdict == "reference_unusable"
    assert judge_forked(differences([0.0]), np.array([1e-3]), None).verdict == "pass"


def run(linear="pass", forked="pass", unforked="fail"):
    return {
        "linear": ModeResult(linear), "tree_forked": ModeResult(forked), "tree_unforked": ModeResult(unforked),
    }  # fmt: skip


DEFAULT = ("linear", "tree_forked")


@pytest.mark.parametrize(
    ("case", "found", "required", "code"),
    [
        pytest.param(run(), leak(), DEFAULT, 0, id="good"),
        pytest.param(run(forked="fail"), leak(), DEFAULT, 1, id="forked-fails"),
        pytest.param(run(linear="fail"), leak(), DEFAULT, 1, id="linear-fails"),
        pytest.param(run(linear="fail"), leak(), ("tree_forked",), 0, id="linear-fails-but-is-not-required"),
        pytest.param(run(), leak(), ("tree_unforked",), 1, id="unsafe-is-required"),
        pytest.param(run(unforked="pass"), leak((), (), ()), DEFAULT, 0, id="nothing-to-leak"),
        pytest.param(run(unforked="insensitive"), leak(moved=()), DEFAULT, 2, id="insensitive"),
        pytest.param(run(), leak(moved=(1, 2)), DEFAULT, 2, id="control-outside-the-law"),
        pytest.param(run(), leak(equal=False), DEFAULT, 2, id="control-not-exact"),
        pytest.param(run(forked="fail"), leak(moved=()), DEFAULT, 1, id="a-defect-comes-before-insensitive"),
        pytest.param(run("reference_unusable", "reference_unusable"), leak(), DEFAULT, 2, id="reference-unusable"),
        pytest.param(run(forked="unsupported"), leak(), DEFAULT, 2, id="unsupported"),
        pytest.param(run(unforked="unsupported"), leak((), (), ()), DEFAULT, 2, id="no-control"),
    ],
)
def test_exit_codes(case, found, required, code):
    verdict = conclude([case], [found], RULE, "float32", required)
    assert verdict.exit_code == code, verdict
    assert code == 0 or verdict.reasons


def test_no_case_is_not_a_pass():
    verdict = conclude([], [], RULE, "float32", DEFAULT)
    assert verdict.exit_code == 2 and "no case was run" in verdict.reasons


@pytest.mark.parametrize(("dtype", "code"), [("float32", 2), ("bfloat16", 0)])
def test_how_many_near_nodes_must_move_depends_on_the_dtype(dtype, code):
    nodes = range(1, 101)
    found = Leak(frozenset(nodes), frozenset(nodes), frozenset(range(1, 97)), True)  # 96 of 100
    assert conclude([run()], [found], RULE, dtype, DEFAULT).exit_code == code


def test_the_worst_case_speaks_for_its_mode():
    verdict = conclude([run(), run(forked="fail"), run()], [leak()] * 3, RULE, "float32", DEFAULT)
    assert verdict.modes == {"linear": "pass", "tree_forked": "fail", "tree_unforked": "fail"}


def test_only_known_failures_prove_nothing():
    assert conclude([run("known_failure")], [leak()], RULE, "float32", DEFAULT).exit_code == 0
    verdict = conclude([run("known_failure")], [leak()], RULE, "float32", ("linear",))
    assert verdict.exit_code == 2 and "nothing that was proven" in verdict.reasons[-1]


def test_an_unusable_reference_says_nothing_of_the_models_sensitivity():
    case = run("reference_unusable", "reference_unusable", "reference_unusable")
    verdict = conclude([case], [leak(moved=())], RULE, "float32", DEFAULT)
    assert verdict.exit_code == 2 and verdict.sensitive is None
    assert not any("insensitive" in reason for reason in verdict.reasons)


def test_a_failure_that_is_not_finite_says_so():
    assert judge_linear(differences([1.0]), np.array([1e-3]), None).finite
    assert not judge_linear(differences([np.nan]), np.array([1e-3]), None).finite


@pytest.mark.parametrize(
    ("verdict", "bad", "named"),
    [
        ("fail", (2, 3), True),
        ("fail", (3,), False),
        ("fail", (1, 2, 3), False),
        ("fail", (), False),
        ("pass", (2, 3), False),
    ],
)
def test_a_tree_pass_is_called_unforked_if_it_fails_where_flat_rows_would(verdict, bad, named):
    layers = (Layer("gated_delta", ((Conv(4), State("gated_delta")),)),)
    verdicts = tuple("flip" if node in bad else "pass" for node in range(4))
    found = name_cause(ModeResult(verdict, verdicts, "why"), DraftTree((5, 6, 7, 8), (-1, 0, 0, 1)), layers, RULE)
    assert found.reason == ("why; looks unforked: states read in row order" if named else "why")
