from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_check.judge.conclude import conclude
from ddtree_check.judge.differences import Differences
from ddtree_check.judge.nodes import (
    Leak,
    ModeResult,
    Systematic,
    judge,
    judge_forked,
    judge_linear,
    judge_unforked,
    name_cause,
    reference_problem,
    systematic,
)
from ddtree_check.judge.rule import Rule
from ddtree_check.model.wiring import Conv, Layer, State
from ddtree_check.tree.draft_tree import DraftTree

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bound_of_a_reference_is_a_share_of_the_rows_spread(dtype):
    share = RULE.bounds[dtype]
    for std in (0.5, 8.0):
        for error, unusable in ((share * std, False), (1.01 * share * std, True)):
            forward = differences([error], std=std, rms=[error])
            assert (reference_problem(None, forward, RULE, dtype) is not None) is unusable


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


CHAIN = leak((), (), ())


@pytest.mark.parametrize(
    ("leaks", "required", "recurrent", "code"),
    [
        pytest.param([CHAIN], DEFAULT, True, 2, id="chains"),
        pytest.param([CHAIN], ("tree_unforked",), True, 2, id="chains-the-control-required"),
        pytest.param([CHAIN], ("linear",), True, 0, id="chains-a-linear-draft"),
        pytest.param([CHAIN], DEFAULT, False, 0, id="attention-alone"),
        pytest.param([CHAIN, leak()], DEFAULT, True, 0, id="one-tree-branches"),
    ],
)
def test_chains_prove_no_fork_of_a_recurrent_model(leaks, required, recurrent, code):
    cases = [run(unforked="pass" if found is CHAIN else "fail") for found in leaks]
    verdict = conclude(cases, leaks, RULE, "float32", required, recurrent=recurrent)
    assert verdict.exit_code == code and any("no fork was exercised" in why for why in verdict.reasons) == (code == 2)
    defect = conclude([run("fail", unforked="pass")], [CHAIN], RULE, "float32", DEFAULT, recurrent=recurrent)
    assert defect.exit_code == 1


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


BENT = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1))  # nodes 2 and 3 stand in other rows than in a chain


def pooled(errors, controls=(1.0, 1.0, 1.0, 1.0), *, prompts=8, dtype="bfloat16", tree=BENT):
    """`prompts` of them with the same errors of one tree, or with those of a function of the prompt."""
    make = errors if callable(errors) else lambda prompt: errors
    size, own = 0.25, [np.zeros(4), 0.25 * np.array(controls)]  # of what is given
    cases = [(p, tree, differences(size * np.array(make(p))), own) for p in range(prompts)]
    return systematic(cases, RULE, dtype)


@pytest.mark.parametrize(
    ("found", "ratio", "beyond"),
    [
        pytest.param(pooled([1, 1, 1, 1]), 1.0, False, id="as-its-controls"),
        pytest.param(pooled([1, 1, 1.3, 1.3]), 1.3, False, id="near"),
        pytest.param(pooled([1, 1, 1.5, 1.5]), 1.5, True, id="above"),
        pytest.param(pooled([0.1, 0.1, 1.5, 1.5]), 1.5, True, id="clean-nodes-do-not-water-it-down"),
        pytest.param(pooled([9, 9, 1, 1]), 1.0, False, id="clean-nodes-alone"),
        pytest.param(pooled([1, 1, 2, 1]), 2**0.5, True, id="geometric-mean"),
        pytest.param(pooled([1, 1, 9, 0.05]), 1.0, False, id="a-node-counts-for-the-factor-at-most"),
        pytest.param(pooled(lambda p: [1, 1, 9e9, 9e9] if p == 3 else [1] * 4), 4 ** (1 / 8), False, id="one-prompt"),
        pytest.param(pooled([1, 1, 3, 3], prompts=2), 3.0, False, id="too-few-prompts"),
        pytest.param(
            pooled(lambda p: [1, 1, 9, 9] if p else [1] * 4, prompts=3), 4 ** (2 / 3), True, id="two-of-three"
        ),
        pytest.param(
            pooled(lambda p: [1] * 4 if p else [1, 1, 9, 9], prompts=3), 4 ** (1 / 3), False, id="one-of-three"
        ),
        pytest.param(pooled([1, 1, 1.5, 1.5], prompts=4), 1.5, False, id="fewer-prompts-get-more-room"),
        pytest.param(pooled([1, 1, 1.7, 1.7], prompts=4), 1.7, True, id="fewer-prompts"),
        pytest.param(pooled([1, 1, 1.45, 1.45], prompts=80), 1.45, True, id="more-prompts"),
        pytest.param(pooled([1, 1, 1.35, 1.35], prompts=80), 1.35, False, id="more-prompts-get-no-less-room"),
        pytest.param(pooled([0, 0, 9, 1.2], [1, 1, 0, 1]), 1.2, False, id="a-control-that-is-ar-is-no-measure"),
        pytest.param(pooled([0, 0, np.nan, 1]), np.nan, True, id="nan"),
        pytest.param(pooled([9] * 4, [0.0] * 4), np.nan, False, id="no-noise"),
    ],
)
def test_a_tree_pass_can_be_above_noise_over_a_run_and_at_no_node(found, ratio, beyond):
    assert found.ratio == pytest.approx(ratio, rel=2e-3, nan_ok=True) and found.beyond is beyond
    stored = found.to_json()
    assert stored["beyond"] is beyond and stored["judged"] is (found.prompts >= 3)
    assert stored["ratio"] is None if np.isnan(ratio) else stored["ratio"] == found.ratio


def test_the_limit_itself_is_within_it():
    assert not Systematic(1.4, 8, 1.4, 4).beyond and Systematic(1.4, 8, 1.39, 4).beyond
    assert not Systematic(1.4, 3, 1.39, 4).beyond and Systematic(1.4, 4, 1.39, 4).beyond


def test_where_there_is_nothing_to_pool():
    chain = DraftTree.chain((5, 6, 7, 8))
    assert pooled([9] * 4, dtype="float32") is None and pooled([9] * 4, tree=chain) is None
    assert systematic([(0, BENT, differences([9] * 4), [])], RULE, "bfloat16") is None


def test_rows_whose_chains_are_ar_bit_for_bit_are_no_noise_and_say_so():
    cases = lambda late: [  # noqa: E731 - the last two nodes of each are moved; the controls of one or both are exactly 0
        (p, BENT, differences([1, 1, late, 1]), [np.array([1, 1, 0, control])]) for p, control in enumerate([1, 0] * 4)
    ]
    found, right = systematic(cases(1), RULE, "bfloat16"), systematic(cases(0), RULE, "bfloat16")
    assert (found.rows, found.quiet, found.prompts, found.given) == (4, 12, 4, 8) and found.ratio == pytest.approx(1)
    assert not found.judged and not found.beyond, "most of what could be wrong has nothing to be compared with"
    assert right.quiet == 4 and right.judged
    loud = [(p, BENT, differences([1, 1, 9, 9]), [np.array([1, 1, 0, p % 4 == 0])]) for p in range(32)]
    assert (found := systematic(loud, RULE, "bfloat16")).quiet > found.rows and found.beyond, "more than is needed"


def test_a_required_control_that_leaks_has_failed_however_few_nodes_show_it():
    few = leak(contaminated=range(1, 9), near=range(1, 9), moved=(1,))
    verdict = conclude([run()], [few], RULE, "bfloat16", ("tree_unforked",))
    assert verdict.modes["tree_unforked"] == "fail" and verdict.exit_code == 1
    verdict = conclude([run()], [few], RULE, "bfloat16", DEFAULT)
    assert verdict.modes["tree_unforked"] == "insensitive" and verdict.exit_code == 2


def test_two_trees_of_a_prompt_are_one_prompt():
    cases = [(p // 2, BENT, differences([1, 1, 2, 2] if p % 2 else [1] * 4), [np.ones(4)]) for p in range(16)]
    found = systematic(cases, RULE, "bfloat16")
    assert found.prompts == 8 and found.ratio == pytest.approx(2**0.5, rel=2e-3)


def test_what_is_systematically_above_noise_is_a_defect_though_every_case_passed():
    above, within, few = pooled([1, 1, 2, 2]), pooled([1] * 4), pooled([1, 1, 2, 2], prompts=2)
    cases, leaks = [run()] * 8, [leak()] * 8
    verdict = conclude(cases, leaks, RULE, "bfloat16", DEFAULT, above=above)
    assert verdict.exit_code == 1 and verdict.modes["tree_forked"] == "fail"
    assert verdict.reasons == (f"tree_forked: fail ({above})",) and "systematically above noise" in str(above)
    assert conclude(cases, leaks, RULE, "bfloat16", ("linear",), above=above).exit_code == 0
    for quiet in (within, few, None):
        verdict = conclude(cases, leaks, RULE, "bfloat16", DEFAULT, above=quiet)
        assert verdict.exit_code == 0 and verdict.modes["tree_forked"] == "pass"
    for known in ("known_failure", "fail", "unsupported"):  # what a case said of itself stands
        verdict = conclude([run(), run(forked=known)], leaks[:2], RULE, "bfloat16", DEFAULT, above=above)
        assert verdict.modes["tree_forked"] == known
        assert not any("systematically" in reason for reason in verdict.reasons)
    missing = conclude([run(linear="unsupported")], leaks[:1], RULE, "bfloat16", DEFAULT, above=above)
    assert [reason for reason in missing.reasons if "systematically" in reason] == [f"tree_forked: fail ({above})"]


def test_one_node_that_is_not_finite_is_enough():
    floor = np.full(2, 1e-3)
    assert not judge_linear(differences([np.nan, 1.0]), floor, None).finite
    assert judge_linear(differences([2.0, 1.0]), floor, None).finite


def accept(*, expected=(), pattern="full", **modes):
    found = {mode: ModeResult(verdict, reason=f"{mode} stored something") for mode, verdict in modes.items()}
    return SimpleNamespace(path=(0, 1), pattern=pattern, modes=found, expected=frozenset(expected))


@pytest.mark.parametrize(
    ("commits", "code", "says"),
    [
        pytest.param([accept(tree_forked="pass", tree_unforked="pass")], 0, None, id="right"),
        pytest.param([accept(tree_forked="fail")], 1, "commit after tree_forked: fail for 1 of 1", id="wrong"),
        pytest.param([accept(tree_forked="pass"), accept(linear="fail")], 1, "commit after linear: fail", id="one"),
        pytest.param([accept(tree_forked="unsupported")], 2, "tree_forked: unsupported for 1 of 1", id="refused"),
        pytest.param([accept(pattern="state", linear="fail")], 1, "states of linear: fail for 1 of 1", id="state"),
        pytest.param([accept(tree_unforked="fail", expected=("tree_unforked",))], 0, None, id="as-the-law-says"),
        pytest.param([accept(tree_unforked="fail")], 2, "the unforked control is off", id="clean-yet-wrong"),
        pytest.param([accept(linear="pass")], 0, None, id="no-commit-of-the-control"),
    ],
)
def test_what_commits_do_to_the_verdict(commits, code, says):
    verdict = conclude([run()], [leak()], RULE, "float32", DEFAULT, commits)
    assert verdict.exit_code == code
    assert verdict.reasons == () if says is None else says in " ".join(verdict.reasons)


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
    assert found.reason == ("why; looks unforked: states or windows read in row order" if named else "why")
