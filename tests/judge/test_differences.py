import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddtree_check.judge import differences as compare
from ddtree_check.judge.differences import join, measure, measure_any, ulp
from ddtree_check.trace.model import TopLogits


def logits(rows=5, vocab=37, seed=0, dtype=torch.float64):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 3


def by_hand(a, b):
    """The same quantities for one row, by their definitions in numpy."""
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (a, b))
    difference = (b - b.mean()) - (a - a.mean())
    ordered = np.sort(a)[::-1]
    return {
        "max_abs": np.abs(difference).max(),
        "rms": np.sqrt((difference**2).mean()),
        "kl": (p * np.log(p / q)).sum(),
        "tv": 0.5 * np.abs(p - q).sum(),
        "argmax": a.argmax(),
        "run_argmax": b.argmax(),
        "margin": ordered[0] - ordered[1],
        "ar_rank": (b > b[a.argmax()]).sum(),
        "std": a.std(ddof=1),
    }


@pytest.mark.parametrize("chunk", [1, 80, 1 << 19])
def test_quantities_by_their_definitions(monkeypatch, chunk):
    monkeypatch.setattr(compare, "CHUNK", chunk)
    a, b = logits(seed=1), logits(seed=2)
    found = measure(a, b)
    for row in range(len(a)):
        for name, value in by_hand(a[row].numpy(), b[row].numpy()).items():
            assert getattr(found, name)[row] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_equal_rows_differ_by_nothing_and_one_changed_logit_is_found():
    a = logits()
    same = measure(a, a.clone())
    assert not same.max_abs.any() and not same.kl.any() and not same.changed.any() and not same.ar_rank.any()
    b = a.clone()
    b[3, 11] += 0.5
    found = measure(a, b)
    assert np.flatnonzero(found.max_abs > 1e-12).tolist() == [3]
    assert found.max_abs[3] == pytest.approx(0.5 * 36 / 37)


def test_a_shift_of_a_whole_row_is_no_difference():
    a = logits()
    assert measure(a, a + 7.5).max_abs.max() < 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["reference", "run"])
def test_what_is_not_finite_is_never_small(bad, side):
    a, b = logits(), logits()
    (a if side == "reference" else b)[2, 4] = bad
    found = measure(a, b)
    assert np.isnan(found.max_abs[2]) and not (found.max_abs[2] <= 1e9)
    assert np.isfinite(found.max_abs[[0, 1, 3, 4]]).all()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(logits(rows=1), id="a-row-that-would-broadcast"),
        pytest.param(logits(rows=4), id="a-missing-node"),
        pytest.param(logits(dtype=torch.float32), id="another-dtype"),
        pytest.param(logits()[0], id="no-rows"),
    ],
)
def test_shapes_and_dtypes_are_compared_first(run):
    with pytest.raises(ValueError, match=r"expected \[nodes, vocabulary\] twice"):
        measure(logits(), run)


def test_equal_logits_name_the_lowest_id():
    a = torch.zeros(1, 6)
    a[0, [2, 4]] = 1.0
    found = measure(a, a.clone())
    assert (found.argmax[0], found.run_argmax[0], found.margin[0]) == (2, 2, 0)


@pytest.mark.parametrize(
    ("value", "dtype", "spacing"),
    [
        (8.0, torch.bfloat16, 0.0625),
        (15.9, torch.bfloat16, 0.0625),
        (16.0, torch.bfloat16, 0.125),
        (1.0, torch.float32, 2.0**-23),
        (0.75, torch.float16, 2.0**-11),
    ],
)
def test_ulp(value, dtype, spacing):
    assert ulp(torch.tensor([value]), dtype).item() == spacing


def test_join_and_pick_keep_every_field_in_step():
    a, b = logits(seed=1), logits(seed=2)
    whole, parts = measure(a, b), join([measure(a[:2], b[:2]), measure(a[2:], b[2:])])
    for name in ("max_abs", "kl", "argmax", "ulp"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
        assert np.array_equal(getattr(whole[[3, 1]], name), getattr(whole, name)[[3, 1]])


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside it held at any time. A process's own peak depends on its allocator."""

    def __init__(self):
        super().__init__()
        self.live, self.bytes = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize(("work", "below"), [(measure, True), (lambda a, b: (a.double(), b.double()), False)])
def test_memory_stays_below_one_more_array(work, below):
    """Vocabulary 248,320 and 65 nodes: with the two arrays themselves, below three logit arrays."""
    a = torch.randn(65, 248320)
    b = a + 1e-3 * torch.randn(65, 1)
    with Peak() as peak:
        kept = work(a, b)
    assert kept is not None and peak.bytes > 0 and (peak.bytes / a.nbytes < 0.9) is below


def test_rows_of_two_dtypes_and_of_one():
    torch.manual_seed(0)
    rows = torch.randn(3, 50).bfloat16()
    assert measure_any(rows, rows.clone(), torch.bfloat16).max_abs.tolist() == [0, 0, 0]
    assert measure_any(rows, rows.float(), torch.bfloat16).max_abs.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="of one dtype"):
        measure(rows, rows.float())


@pytest.mark.parametrize("large", ["reference", "run"])
def test_the_spacing_of_a_top_k_is_that_of_the_largest_logit_of_either(large):
    rows = {name: TopLogits(torch.tensor([[0, 1]]), torch.tensor([[9.0 if name == large else 1.0, 0.5]]), None)
            for name in ("reference", "run")}  # fmt: skip
    found = measure_any(rows["reference"], rows["run"], torch.float32)
    assert found.ulp[0] == float(ulp(torch.tensor(9.0), torch.float32))


def test_an_id_that_a_top_k_leaves_out_is_at_least_as_far_off_as_its_smallest():
    """Token 2 is 5.0 in the reference; the run's smallest of two is 1.0, so it is off by 4.0 there at least."""
    reference = TopLogits(torch.tensor([[0, 2]]), torch.tensor([[9.0, 5.0]]), torch.tensor([0.0]))
    run = TopLogits(torch.tensor([[0, 1]]), torch.tensor([[9.0, 1.0]]), torch.tensor([0.0]))
    assert measure_any(reference, run, torch.float32).max_abs[0] == pytest.approx(4.0)
    assert measure_any(run, reference, torch.float32).max_abs[0] == pytest.approx(4.0)


def test_what_both_leave_out_is_left_out_and_what_one_leaves_out_is_not():
    row = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]])
    found = measure(row, torch.tensor([[3.0, 1.5, 2.0, -torch.inf]]))
    assert found.max_abs[0] == pytest.approx(1 / 3) and found.argmax[0] == 0  # over the three that there are
    assert np.isnan(measure(row, torch.tensor([[3.0, 1.0, 2.0, 0.0]])).max_abs[0])
