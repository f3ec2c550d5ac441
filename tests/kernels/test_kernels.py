"""Cases, bounds, lint and checker of verify kernels, on the plain kernels; SGLang's own are in tests/sglang."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.cli.main import main
from ddtree_check.kernels import check, lint, plain, reference, suite
from ddtree_check.kernels.cases import FAMILIES, KINDS, PAIRS
from ddtree_check.kernels.lint import RULES
from tests.kernel_faults import CHAIN, STATES, TREE, case
from tests.kernel_suite import FaultTests, nodes


class TestPlain(FaultTests):
    kernels = plain


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_kernels_hold_the_bounds(kind, pair):
    results = [check(getattr(plain, kind), made) for made in suite([kind], [pair], long=33)]
    wrong = [str(thing) for result in results for thing in (*result.findings, *result.problems)]
    assert wrong == []
    assert all(result.judged for result in results)


def test_cases_are_the_same_every_time_and_full_of_nan():
    for made in suite(KINDS, [("bfloat16", "float32")]):
        one, two = vars(made.call()), vars(made.call())
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8)), name
        assert made.kind == "commit" or one["buffer"].isnan().all()
        assert (one["pool"] != 0).all()


def test_names_and_families():
    names = [made.id for made in suite(long=65)]
    assert len(names) == len(set(names))
    trees = {name: make(12, 1) for name, make in FAMILIES.items()}
    assert len(trees) == 9 and [name for name, tree in trees.items() if tree.is_chain] == ["chain"]
    assert len({tree.parents for tree in trees.values()}) == 9
    assert len(trees["eagle"]) == 26 and max(trees["eagle"].depth) == 5


@pytest.mark.parametrize("kind", STATES)
def test_the_bound_is_no_looser_than_rounding_needs(kind):
    """It holds for a correct kernel with room to spare, and one rounding to bf16 is 20 times as much."""
    made = case(kind, TREE)
    call = made.call()
    right = reference.expected(call, 0, made.sources(0))
    narrow = reference.roundoff(torch.bfloat16) / 20
    assert (right.state_bound <= narrow * right.state.abs().amax()).all()
    assert (right.output_bound <= narrow * right.output.abs().amax()).all()
    assert 0.01 < check(getattr(plain, kind), made).share < 0.7


def test_the_bound_grows_with_the_buffers_dtype_and_the_depth():
    bounds = []
    for dtype in ("float32", "float16", "bfloat16"):
        made = case("gdn", CHAIN, state_dtype=dtype)
        right = reference.expected(made.call(), 0, made.sources(0))
        bounds.append((right.state_bound.amax((1, 2, 3)) / right.state.abs().amax()).tolist())
    assert bounds[0][-1] * 100 < bounds[1][-1] < bounds[2][-1] / 4
    assert bounds[0][0] < bounds[0][-1]


def test_head_groups_mixed_up_show_where_there_are_groups():
    def interleaved(call):
        heads = call.v.shape[2]
        order = torch.arange(heads).reshape(-1, call.q.shape[2]).T.flatten()  # head i goes with i % groups
        parts = {name: getattr(call, name)[:, :, order] for name in ("v", "a", "b")}
        weights = {name: getattr(call, name)[order] for name in ("A_log", "dt_bias")}
        pool, buffer = call.pool[:, order].clone(), call.buffer[:, :, order].clone()
        out = plain.gdn(replace(call, **parts, **weights, pool=pool, buffer=buffer))
        call.buffer.copy_(buffer[:, :, order.argsort()])
        return out[:, :, order.argsort()]

    results = [check(interleaved, made) for made in suite(["gdn"], [("float32", "float32")])]
    assert {r.case.family for r in results if r.verdict == "fail"} == {"grouped heads"}


def test_what_a_kernel_returns_and_raises_is_told():
    made = case("gdn", TREE)
    for kernel, says in (
        (lambda call: None, "returned NoneType, expected torch.float32"),
        (lambda call: plain.gdn(call).double(), "returned torch.float64"),
        (
            lambda call: plain.gdn(call)[:, :3],
            "returned torch.float32 [1, 3, 2, 8], expected torch.float32 [1, 10, 2, 8]",
        ),
        (lambda call: 1 / 0, "raised ZeroDivisionError"),
    ):
        found = check(kernel, made).findings
        assert any(f.part == "call" and says in f.reads for f in found), found

    def refuses(call):
        raise Unsupported("no trees")

    assert check(refuses, made).verdict == "unsupported"


def test_inputs_must_stay_but_for_one_computed_in_place():
    def in_place(call):
        out = plain.conv(call)
        return call.x.copy_(out)

    def scribbles(call):
        out = plain.conv(call)
        call.weight.mul_(2)
        return out

    assert check(in_place, case("conv", TREE)).findings == []
    assert [f.part for f in check(scribbles, case("conv", TREE)).findings] == ["inputs"]


def test_written_parents_are_compared():
    def lies(call):
        out = plain.conv(call)
        call.parents[0, 5] = 0 if TREE.parents[5] else 1
        return out

    result = check(lies, case("conv", TREE, TREE))
    assert nodes(result, "parents") == {5} and nodes(result, "parents", 1) == set()


# --- lint -------------------------------------------------------------------------------------------------------------


def _edit(name: str, place, value):
    def change(call):
        getattr(call, name)[place] = value
        return call

    return change


BROKEN = {  # rule: kind, what is done to a right call of TREE and CHAIN, options
    "short-rows": ("gdn", lambda call: replace(call, buffer=call.buffer[:, :8]), {}),
    "wide-index": ("mamba2", _edit("parents", (0, 4), 99), {}),
    "aliased-slot": ("kda", lambda call: replace(call, slots=call.slots[:1].repeat(2)), {}),
    "aliased-row": ("conv", lambda call: replace(call, rows=call.rows[:1].repeat(2)), {}),
    "overlapping-buffer": (
        "conv",
        lambda call: replace(call, buffer=torch.zeros(2000).as_strided((5, 10, 20, 3), (260, 1, 13, 1))),
        {},
    ),
    "live-padding-slot": ("gdn", lambda call: call, {"padding": (1,)}),
    "root-parent": ("gdn", _edit("parents", (0, 4), -1), {}),
    "late-parent": ("mamba2", _edit("parents", (0, 4), 4), {}),
    "parents-without-buffer": ("gdn", lambda call: replace(call, buffer=None), {}),
    "half-links": ("conv", lambda call: replace(call, next_sibling=None), {}),
    "descending-siblings": ("conv", _edit("next_sibling", (0, 5), 2), {}),
    "broken-links": ("conv", _edit("next_token", (0, 8), 2), {}),
}


@pytest.mark.parametrize("rule", RULES)
def test_lint_names_the_rule(rule):
    kind, change, options = BROKEN[rule]
    call = case(kind, TREE, CHAIN).call()
    counts = [len(TREE), len(CHAIN)]
    assert lint(call, nodes=counts) == []
    broken = change(call)
    if options:
        options = options | {"live": {int(call.slots[1])}}
    found = lint(broken, nodes=counts, **options)
    assert rule in [problem.name for problem in found], found
    assert all(RULES[problem.name] in str(problem) for problem in found)


def test_lint_of_too_many_nodes_and_accepted_nodes():
    call = case("gdn", TREE).call()
    told = lint(call, nodes=[65])
    assert [str(p) for p in told] == [
        "short-rows: request 0: 65 nodes in 10 rows; a tree of budget drafted nodes needs budget + 1 rows and steps: "
        "the root is one"
    ]
    made = case("commit", TREE, accept=(40,))
    assert [p.name for p in check(plain.commit, made).problems] == ["wide-index"]


# --- the command ------------------------------------------------------------------------------------------------------

MINE = """
from ddtree_check.kernels import plain
def conv(call): return plain.conv(call)
def forgets(call):
    from dataclasses import replace
    return plain.gdn(replace(call, parents=None))
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_kernels", "my_broken"):
        sys.modules.pop(name, None)


def test_command_passes_and_fails(mine, capsys):
    assert main(["kernels", "my_kernels", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "exit code 0" in out and "best-first" in out and "gdn" not in out
    assert (
        main(["kernels", "my_kernels:forgets", "--kind", "gdn", "--dtype", "float32", "--family", "braid,chain"]) == 1
    )
    out = capsys.readouterr().out
    assert (
        "verdict: fail (4 cases, 1 failed" in out
        and "gdn on gdn/braid-forked/float32-float32: output request 0 node 2" in out
    )
    assert "starts from node 1's state, expected node 0's" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere cannot be imported"),
        (["my_broken"], "ZeroDivisionError"),
        (["my_kernels", "--kind", "kda"], "has no function kda"),
        (["my_kernels", "--kind", "moe"], "kind: got 'moe'"),
        (["my_kernels:forgets"], "expected --kind"),
        (["plain", "--dtype", "int4"], "'int4', expected one of float32"),
        (["plain", "--size", "vast"], "size 'vast'"),
        (["plain", "--family", "oak"], "family: got 'oak'"),
        (["plain", "--rows", "-1"], "rows: got -1"),
        (["plain", "--device", "toaster"], "device: 'toaster'"),
    ],
)
def test_command_refuses_in_one_line(mine, capsys, words, says):
    assert main(["kernels", *words]) == 3
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_suite_refuses_unknown_names():
    with pytest.raises(UsageError, match="'rwkv', expected one of conv"):
        list(suite(["rwkv"]))
