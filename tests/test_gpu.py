"""The main job on a CUDA device: every dtype, the embedded trained model and drawn trees."""

import pytest
import torch

from ddtree_check.engines.recorded import TraceEngine
from ddtree_check.engines.registry import load_engine
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.replay import judge_trace, record_trace, writer_for
from ddtree_check.model.wiring import UNFORKED
from tests.models import prompt, tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run with -m gpu on a GPU machine"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_forked_passes_and_unforked_fails(dtype):
    host = load_engine("transformers", None, dtype=dtype, device="cuda")
    items = [Item(f"p{seed}", prompt(length, seed)) for seed, length in enumerate((1, 3, 37, 300))]
    record = check(host, items, Settings())
    assert record["exit_code"] == 0, record["verdict"]
    assert record["environment"]["device"].startswith("cuda")
    assert record["floor"]["controls"]["chain"] < {"float64": 1e-9, "float32": 1e-3}.get(dtype, 1.0)


def test_a_trace_is_judged_by_a_model_on_the_gpu(tmp_path):
    """Recorded rows lie on the CPU; the twin, rows in flat order under the tree's name, goes red."""
    host = load_engine("transformers", None, dtype="float32", device="cuda")
    items = [Item("p", prompt(20), tree=tree("random", 16, root=7))]
    record_trace(host, items, Settings(accept=("branch",)), tmp_path / "right")
    found = judge_trace(TraceEngine.load(tmp_path / "right"), Settings(), reference=host)
    assert found["exit_code"] == 0, found["verdict"]
    assert found["cases"][0]["commit"][0]["modes"]["tree_forked"]["verdict"] == "pass"
    writer = writer_for(host, tmp_path / "wrong")
    step = writer.step("p", items[0].tokens, items[0].tree.tokens, items[0].tree.parents)
    step.add("tree_forked", host.verify(host.prefill(items[0].tokens), items[0].tree, UNFORKED).logits)
    step.write()
    settings = Settings(require=("tree_forked",))
    found = judge_trace(TraceEngine.load(tmp_path / "wrong"), settings, reference=host)
    assert found["verdict"]["modes"]["tree_forked"] == "fail" and found["exit_code"] == 1


def test_shapes_in_every_order():
    host = load_engine("transformers", None, dtype="float32", device="cuda")
    items = [
        Item(f"{name}-{order}", prompt(20), tree=tree(name, 64, order=order, root=7))
        for name in ("kary", "comb", "random")
        for order in ("heap", "breadth", "depth")
    ]
    record = check(host, items, Settings())
    assert record["exit_code"] == 0, record["verdict"]
