"""The main job on a CUDA device: every dtype, the embedded trained model and drawn trees."""

import pytest
import torch

from ddtree_check.check import Item, Settings, check
from ddtree_check.engines import load_engine
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


def test_shapes_in_every_order():
    host = load_engine("transformers", None, dtype="float32", device="cuda")
    items = [
        Item(f"{name}-{order}", prompt(20), tree=tree(name, 64, order=order, root=7))
        for name in ("kary", "comb", "random")
        for order in ("heap", "breadth", "depth")
    ]
    record = check(host, items, Settings())
    assert record["exit_code"] == 0, record["verdict"]
