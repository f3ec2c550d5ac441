"""SGLang's own verify kernels, from the unmodified wheel, under Triton's interpreter: `make test-kernels`."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from ddtree_check.kernels import check, interpreter, sglang, suite
from ddtree_check.kernels.cases import FAMILIES, KINDS
from ddtree_check.tree.draft_tree import DraftTree
from tests import kernel_faults as faults
from tests.forms import to_mask
from tests.kernel_faults import STATES, TREE, case, descending_law
from tests.kernel_suite import FaultTests, nodes

WHY = sglang.missing() or (
    None
    if os.environ.get(interpreter.VARIABLE) == "1"
    else f"{interpreter.VARIABLE}=1 is not set; run make test-kernels"
)
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # exp(-x) of SiLU's far tail
]
CALLS = list(dict.fromkeys((made.kind, made.dtype, made.state_dtype) for made in suite(KINDS)))
FEW = ("batch", "best-first", "braid")
LONG = [
    made
    for kind in ("conv", *STATES)
    for made in suite([kind], [("float32", "float32")], long=129 if kind == "conv" else 65)
    if "rows" in made.family and made.family[0].isdigit() and (kind != "conv" or "chain" not in made.family)
]
# Largest |error| of outputs and of states on plain float32 inputs, twice what these very cases showed: far inside the
# bounds, so that a kernel that loses digits shows before it crosses them. The figures are those of docs/kernels.md.
MEASURED = {
    "conv": (1.7e-6, 0),
    "gdn": (3.4e-7, 1.7e-6),
    "kda": (3.4e-7, 1.7e-6),
    "mamba2": (6.2e-6, 2.2e-6),
    "commit": (0, 0),
    "attention": (7.6e-7, 0),
}


class TestSGLang(FaultTests):
    kernels = sglang
    overwrites = True

    def test_descending_siblings(self):
        """Parents come out right and outputs wrong: they are handed out as the rows go by."""
        result = self.run("conv", faults.descending_siblings, TREE, FAMILIES["star"](6, 1))
        wrong = descending_law(TREE)
        assert wrong and nodes(result, "output") == wrong
        assert nodes(result, "output", 1) == set(), "children of the root are handed 0 in any order"
        assert nodes(result, "parents") == set(), "what it writes down in the end is right"

    @pytest.mark.parametrize("kind", STATES)
    def test_parent_minus_one_below_the_root(self, kind):
        """No error: the delta rule reads another request's row of the buffer, Mamba-2 goes on from the row before."""
        leaf = max(node for node in TREE.leaves if TREE.parents[node] != node - 1)
        result = self.run(kind, faults.parent_at(leaf, -1), TREE)
        assert nodes(result, "output") == {leaf}
        goes_on = any(f"starts from node {leaf - 1}'s state" in f.reads for f in result.findings)
        assert goes_on == (kind == "mamba2")

    @pytest.mark.parametrize("kind", ["gdn", "kda"])
    def test_parents_without_a_buffer_are_a_chain(self, kind):
        """Silently so, which is why the lint refuses such a call."""
        call = case(kind, TREE).call()
        alone = sglang.entry("fused_sigmoid_gating_delta_rule_update")
        with_links = self._bufferless(alone, call, call.parents)
        assert torch.equal(with_links, self._bufferless(alone, call, None))

    @staticmethod
    def _bufferless(kernel, call, parents):
        rows, heads = call.v.shape[1:3]
        return kernel(
            A_log=call.A_log,
            a=call.a.reshape(rows, -1),
            dt_bias=call.dt_bias.reshape(-1),
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=call.q,
            k=call.k,
            v=call.v,
            b=call.b.reshape(rows, heads),
            initial_state_source=call.pool,
            initial_state_indices=call.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor([0, rows], dtype=torch.int32),
            is_kda=call.per_channel,
            disable_state_update=True,
            retrieve_parent_token=parents,
        )

    @pytest.mark.parametrize("kind", STATES)
    def test_forked_over_a_chain_is_the_chain_bit_for_bit(self, kind):
        """With a float32 buffer; a bf16 one rounds at every hop."""
        made = case(kind, FAMILIES["chain"](9, 1))
        kernel, outputs = getattr(sglang, kind), []
        for call in (made.call(), replace(made.call(), parents=None)):
            outputs.append(kernel(call).clone())
        assert torch.equal(*outputs)


def chosen(made) -> bool:
    """Every tree in float32, every kind of numbers in bfloat16 too; how a tree is walked does not hang on the dtype."""
    if made.dtype == made.state_dtype == "bfloat16":
        return made.family not in FAMILIES or made.family in FEW or not made.forked
    return made.dtype == made.state_dtype == "float32" or made.family in FEW


@pytest.mark.parametrize(("kind", "dtype", "state_dtype"), CALLS)
def test_sglang_kernels_hold_the_bounds(kind, dtype, state_dtype):
    cases = [made for made in suite([kind], [(dtype, state_dtype)]) if chosen(made)]
    assert cases
    wrong = []
    for made in cases:
        result = check(getattr(sglang, kind), made)
        wrong += [str(thing) for thing in (*result.problems, *result.findings)]
        if not result.judged:
            wrong.append(f"{made.id}: not judged")
        if made.inputs == "plain" and dtype == state_dtype == "float32":
            output, state = MEASURED[kind]
            worst = (
                result.worst.get("output", 0),
                max(result.worst.get(part, 0) for part in ("state", "window", "pool")),
            )
            if not (worst[0] <= output and worst[1] <= state):
                wrong.append(f"{made.id}: outputs and states off by {worst}, measured {(output, state)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("made", LONG, ids=lambda made: made.id)
def test_long_trees(made):
    result = check(getattr(sglang, made.kind), made)
    assert [str(thing) for thing in (*result.problems, *result.findings)] == []


def test_bfloat16_is_computed_in_float32_and_rounded_to_even():
    """What the interpreter is mended to do, against torch."""
    numbers = torch.cat([torch.randn(4000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3e38, 1e-40, 0.0])])
    bits = interpreter.narrowed(numbers.numpy())
    assert torch.equal(torch.from_numpy(interpreter.widen(bits)), numbers.bfloat16().float())
    assert torch.isnan(
        torch.from_numpy(interpreter.widen(interpreter.narrowed(torch.tensor([torch.nan]).numpy())))
    ).all()


# --- attention under a sliding window ---------------------------------------------------------------------------------

COMMITTED, WINDOW, HEADS, WIDTH = 40, 8, 2, 32
BRANCHED = {  # the last node of the first is a child of the root; behind row 8 the star's nodes lose the root too
    "late child": DraftTree(tuple(range(9)), (*range(-1, 7), 0)),
    "best-first": TREE,
    "star": FAMILIES["star"](17, 1),
}


@pytest.fixture
def extend_attention():
    """SGLang's verify runs its Triton attention by it."""
    return sglang.entry("extend_attention_fwd")


class Verify:
    """A tree behind COMMITTED tokens, one key head for HEADS queries; called as TritonAttnBackend calls a verify.

    window: how many tokens behind its own a node may see, None for all; the backend hands over just as many slots.
    """

    def __init__(self, kernel, tree: DraftTree, window: int | None):
        draw = torch.Generator().manual_seed(0)
        many, self.tree, self.window = len(tree), tree, window
        self.q, k, v = (torch.randn(many, heads, WIDTH, generator=draw) for heads in (HEADS, 1, 1))
        keys, values = (torch.randn(COMMITTED + 9, 1, WIDTH, generator=draw) for _ in range(2))
        slots = torch.randperm(len(keys), generator=draw)[:COMMITTED]
        self.mask = torch.from_numpy(to_mask(tree, COMMITTED))
        self.k, self.v = torch.cat([keys[slots], k])[:, 0].double(), torch.cat([values[slots], v])[:, 0].double()
        self.out = torch.full_like(self.q, torch.nan)
        skipped = 0 if window is None else COMMITTED - window
        numbers = lambda *these: torch.tensor(these, dtype=torch.int32)  # noqa: E731
        kernel(
            *(self.q, k, v, self.out, keys, values),
            *(numbers(0, many), numbers(0, COMMITTED - skipped), slots[skipped:]),
            *(self.mask.flatten(), True, numbers(0, self.mask.numel()), many, 1.0, 1.0),
            sliding_window_size=-1 if window is None else window,
            window_kv_offsets=numbers(skipped),
        )

    def wrong(self, places) -> set[int]:
        """Nodes that float64 attention contradicts if node i stands `places[i]` behind the root."""
        at, seen = torch.tensor([*range(-COMMITTED, 0), *places]), self.mask
        if self.window is not None:
            seen = seen & (at[COMMITTED:, None] - at <= self.window)
        scores = torch.einsum("nhd,md->nhm", self.q.double(), self.k) / WIDTH**0.5
        right = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ self.v
        error = (self.out.double() - right).abs().amax((1, 2))
        return {node for node, off in enumerate(error.tolist()) if not off <= MEASURED["attention"][0]}


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # rows that fill a block
class TestAttention:
    def test_a_chain_is_right_with_a_window_and_without(self, extend_attention):
        for window in (None, WINDOW):
            assert Verify(extend_attention, FAMILIES["chain"](9, 1), window).wrong(range(10)) == set()

    @pytest.mark.parametrize("tree", BRANCHED.values(), ids=BRANCHED)
    def test_a_tree_is_right_without_a_window(self, extend_attention, tree):
        assert Verify(extend_attention, tree, None).wrong(tree.depth) == set()

    @pytest.mark.parametrize("tree", BRANCHED.values(), ids=BRANCHED)
    def test_window_by_row(self, extend_attention, tree):
        """The sight of `sglang-window-by-row`; one that is mended: take it out of known_failures.toml."""
        verify, rows = Verify(extend_attention, tree, WINDOW), range(len(tree))
        late = {node for node in rows if tree.depth[node] != node}
        assert late and verify.wrong(tree.depth) == late
        assert verify.wrong(rows) == set(), "nothing else is wrong: the window ends where the row says"
