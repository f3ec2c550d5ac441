"""The SGLang engine: its own logic on fakes, and, with -m "gpu and sglang", SGLang itself on the embedded model."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.engines.capacity import plan
from ddtree_check.engines.registry import load_options
from ddtree_check.engines.sglang import engine as sglang
from ddtree_check.engines.sglang import pools
from ddtree_check.engines.sglang import ranks as sglang_ranks
from ddtree_check.engines.sglang import runner as sglang_runner
from ddtree_check.engines.sglang import seams as sglang_seams
from ddtree_check.engines.transformers import loading
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.job import Job, engine_args
from ddtree_check.judge.nodes import judged_as
from ddtree_check.model.wiring import FORKED, UNFORKED, Wiring
from ddtree_check.tree.draft_tree import DraftTree
from tests.models import engine as tiny_engine
from tests.models import prompt, tree

FAMILY = "qwen3_5_text"
REPO = Path(__file__).resolve().parents[3]


# --- The engine over a stand-in for SGLang ----------------------------------------------------------------------------


class StandIn:
    """Runner's methods by the transformers engine, so that what the adapter hands over decides what comes out.

    deaf: it forks nothing, whatever links it is given;  off: rows that a commit is away from the one asked for.
    """

    device = torch.device("cpu")
    _extends = True

    def __init__(self, *, deaf: bool = False, off: int = 0):
        self.engine, self.deaf, self.off, self.kept, self.calls = tiny_engine(FAMILY), deaf, off, {}, []
        self.model_runner = SimpleNamespace(model=self.engine.model)

    def facts(self):
        return {
            "attention": "stand-in", "recurrent_functions": {}, "topk": 8, "fused": True, "graphs": [],
            "reserved": {}, "state_dtype": "float32", "conv_dtype": "float32", "sglang": "0", "seam": "none",
            "dtype": "float32", "rows": 65, "tp": 1, "engine_args": {},
        }  # fmt: skip

    def _keep(self, value):
        self.kept[len(self.calls)] = value
        self.calls.append(value)
        return len(self.calls) - 1

    def prefill(self, tokens):
        prefix = self.engine.prefill(tokens)
        return self._keep(prefix), prefix.logits

    def step(self, text, token):
        logits, prefix = self.engine.step(self.kept[text], token)
        return self._keep(prefix), logits

    def decode(self, text, tokens, parents):
        return self.engine.decode(self.kept[text], DraftTree(tokens, parents))

    def verify(self, text, tokens, links, mask, positions):
        flat = tuple(range(-1, len(tokens) - 1))
        read = flat if links is None or self.deaf else links
        wiring = Wiring(
            "handed over", state=lambda _: read, conv=lambda _: read, mask=lambda _: mask, positions=lambda _: positions
        )
        parents = tuple(max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(tokens)))
        verified = self.engine.verify(self.kept[text], DraftTree(tokens, parents), wiring)
        return self._keep(verified), verified.logits

    def commit(self, number, node, path):
        verified = self.kept[number]
        if self.off:
            plan = Wiring("late", commit=lambda tree: tuple(max(0, i - self.off) for i in range(len(tree))))
            verified.plan = SimpleNamespace(
                commit=plan.plan(verified.tree).commit, windows=verified.plan.windows, mask=verified.plan.mask
            )
        assert path[-1] == node
        return self._keep(self.engine.commit(verified, node))

    def contents(self, text):
        return self.engine.contents(self.kept[text])[1]

    def forward(self, tokens, keep):
        return self.engine.forward([tokens], keep)[0]

    def drop(self, numbers):
        for number in numbers:
            self.kept.pop(number, None)


def make_engine(**faults) -> sglang.SGLangEngine:
    runner = StandIn(**faults)
    group = object.__new__(sglang_ranks.Group)
    group.runner, group._workers, group.dropped, group._closed = runner, [], [], True
    host = sglang.SGLangEngine(
        group, runner.engine.config, sglang_seams.SEAMS["0.5.17"], provenance={"name": "stand-in"}, facts=runner.facts()
    )
    host.describe = lambda: {"engine": "sglang", "dtype": "float32", "state_dtype": "float32"}
    return host


def run(host, **settings) -> dict:
    return check(host, [Item("p", prompt(11))], Settings(budgets=(8, 16), **settings))


def test_what_the_adapter_hands_over_is_right_in_every_mode():
    host = make_engine()
    record = run(host, accept=("zero", "full", "branch"))
    assert record["verdict"]["modes"] == {"linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"}
    assert record["exit_code"] == 0 and record["coverage"]["near_moved"] == record["coverage"]["near"] > 0
    assert not [law for case in record["cases"] if (law := case["leak_law"]["outside"])]


def test_an_engine_that_forks_nothing_goes_red():
    record = run(make_engine(deaf=True))
    assert record["verdict"]["modes"]["tree_forked"] == "fail" and record["exit_code"] == 1


def test_a_commit_of_another_row_goes_red():
    record = run(make_engine(off=1), accept=("branch",))
    assert record["exit_code"] == 1 and any("commit" in reason for reason in record["verdict"]["reasons"])


def test_prefixes_are_reusable_and_let_go():
    host = make_engine()
    before, shape = host.prefill(prompt(9)), tree(nodes=8)
    first = host.verify(before, shape, FORKED).logits
    host.commit(host.verify(before, shape, UNFORKED), 3)
    host.step(before, 4)
    assert torch.equal(host.verify(before, shape, FORKED).logits, first)
    host.step(before, 4)  # what was let go is dropped with the next call
    assert len(host.group.runner.kept) <= 2  # the prefix, and the last step's text


def test_batched_decoding_and_an_oracle_are_refused_in_one_line():
    host = make_engine()
    with pytest.raises(Unsupported, match="--ar strict"):
        host.decode(host.prefill((3, 4)), tree(nodes=4), batched=True)
    with pytest.raises(UsageError, match="--engine transformers"):
        host.exact()


@pytest.mark.parametrize(
    ("wiring", "reason"),
    [
        pytest.param(None, None, id="own"),
        pytest.param(FORKED, None, id="forked"),
        pytest.param(UNFORKED, None, id="unforked"),
        pytest.param(Wiring("m", mask="flat", positions="flat"), None, id="mask-and-positions-are-inputs"),
        pytest.param(Wiring("c", conv="flat"), "one and the same parents", id="conv-alone"),
        pytest.param(Wiring("s", state=lambda t: t.parents, conv=lambda t: t.parents), "the same parents", id="a-rule"),
    ],
)
def test_supports(wiring, reason):
    host = make_engine()
    got = host.supports(wiring)
    assert got is None if reason is None else reason in got
    if reason is not None:
        with pytest.raises(Unsupported, match="parents"):
            host.verify(host.prefill((3, 4)), tree(nodes=4), wiring)


def test_a_topk_of_1_cannot_fork():
    host = make_engine()
    host.facts["topk"] = 1
    assert "topk of 1" in host.supports(FORKED) and host.supports(UNFORKED) is None
    record = run(host)
    assert record["verdict"]["modes"]["tree_forked"] == "unsupported" and record["exit_code"] == 2


# --- One rank over a fake model runner --------------------------------------------------------------------------------


class Allocator:
    """SGLang's allocator of key and value slots, as far as it is asked."""

    def __init__(self, size):
        self.size, self.free_slots = size, list(range(1, size + 1))

    def alloc(self, count):
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken)

    def free(self, index):
        self.free_slots += index.tolist()

    def available_size(self):
        return len(self.free_slots)


def test_slots_come_back_once_nothing_refers_to_them():
    allocator = Allocator(8)
    held = sglang_runner.Slots(allocator, 5)
    text = sglang_runner.Text(held.index, (held,), ())
    del held
    assert allocator.available_size() == 3
    with pytest.raises(UsageError, match=r"reserved 8 key and value slots, 4 more are needed and 3 are free"):
        sglang_runner.Slots(allocator, 4)
    del text
    assert allocator.available_size() == 8


@pytest.fixture
def rank(monkeypatch):
    """A Runner on fakes; `seen` holds what each forward pass was given."""
    seen = []

    def fake(name, **held):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(held)

    for parent in ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.model_executor"):
        fake(parent)
    fake("sglang.srt.speculative.ngram_info", NgramVerifyInput=lambda **given: SimpleNamespace(**given))
    fake(
        "sglang.srt.model_executor.forward_batch_info",
        CaptureHiddenMode=SimpleNamespace(NULL=0),
        ForwardMode=SimpleNamespace(DECODE="DECODE", EXTEND="EXTEND", TARGET_VERIFY="TARGET_VERIFY"),
        ForwardBatch=lambda **given: SimpleNamespace(**given),
    )

    class ModelRunner:
        spec_algorithm = None
        decode_cuda_graph_runner = SimpleNamespace(capture_bs=[1])
        refuses = None

        def forward(self, batch):
            if self.refuses:
                raise self.refuses
            seen.append((batch, runner.recurrent.topk, self.decode_cuda_graph_runner is not None))
            rows = len(batch.input_ids)
            cache.conv[0][:, 1] += 1  # as a verify does, in place
            return SimpleNamespace(next_token_logits=torch.arange(rows)[:, None] + torch.zeros(rows, 7))

    cache = SimpleNamespace(
        conv=[torch.zeros(2, 3, 4, 3)], temporal=torch.zeros(2, 3, 2, 2, 2),
        intermediate_ssm=torch.zeros(2, 2, 33, 2, 2, 2), intermediate_conv_window=[torch.zeros(2, 2, 33, 4, 3)],
    )  # fmt: skip
    runner = object.__new__(sglang_runner.Runner)
    runner.start = SimpleNamespace(seam=sglang_seams.SEAMS["0.5.17"])
    runner.kept, runner._next, runner._latest = {}, 0, None
    runner.dtype, runner.device, runner.rows, runner.mrope = torch.bfloat16, torch.device("cpu"), 33, True
    runner.args = SimpleNamespace(enable_fp32_lm_head=False, speculative_num_draft_tokens=33)
    runner.model_runner = ModelRunner()
    runner.allocator = Allocator(200)
    runner.requests = SimpleNamespace(req_to_token=torch.zeros(2, 300, dtype=torch.int32))
    runner.recurrent, runner.topk, runner.row, runner.slot = SimpleNamespace(topk=8), 8, 0, 1
    runner.pool = SimpleNamespace(mamba_cache=cache, size=2)
    vars(runner.requests).update(mamba_pool=runner.pool, size=1)
    vars(runner.model_runner).update(
        req_to_token_pool=runner.requests, token_to_kv_pool_allocator=runner.allocator, server_args=runner.args
    )
    runner.backend = SimpleNamespace()
    runner._blank = tuple(torch.zeros_like(state) for state in runner._save())
    text = runner._keep(
        sglang_runner.Text((held := sglang_runner.Slots(runner.allocator, 5)).index, (held,), runner._save())
    )
    return SimpleNamespace(runner=runner, seen=seen, text=text, cache=cache)


def test_a_verify_is_padded_masked_and_gated(rank):
    drafted = DraftTree((7, 8, 9, 5), (-1, 0, 0, 1))
    plan_ = FORKED.plan(drafted)
    for links, topk in ((drafted.parents, 8), (None, 1)):
        _, logits = rank.runner.verify(rank.text, drafted.tokens, links, plan_.mask, plan_.positions)
        batch, gate, graph = rank.seen[-1]
        assert logits.shape == (4, 7) and logits.dtype == torch.bfloat16
        assert gate == topk and rank.runner.recurrent.topk == 8 and graph == (links is not None)
        assert len(batch.input_ids) == 9 and batch.seq_lens.tolist() == [5] and batch.mrope_positions.shape == (3, 9)
        assert batch.positions.tolist() == [5, 6, 6, 7, 5, 5, 5, 5, 5]
        shown = batch.spec_info.custom_mask.view(9, 14)
        assert shown[:, :5].all() and np.array_equal(shown[:4, 5:9].numpy(), plan_.mask)
        assert not shown[:4, 9:].any() and torch.equal(shown[4:, 9:], torch.eye(5, dtype=torch.bool))
        first, sibling = (
            getattr(batch.spec_info, f"retrieve_next_{name}")[0].tolist() for name in ("token", "sibling")
        )
        assert (first, sibling) == (
            ([1, 3, -1, -1, -1, -1, -1, -1, -1], [-1, 2, -1, -1, -1, -1, -1, -1, -1]) if links else ([-1] * 9, [-1] * 9)
        )
    assert rank.runner.model_runner.decode_cuda_graph_runner is not None


def test_a_pass_starts_from_its_text_whatever_ran_before(rank):
    for _ in range(3):
        rank.runner.step(rank.text, 4)
        assert float(rank.cache.conv[0][:, 1].max()) == 1.0  # one pass on top of the text's own state
    assert rank.seen[-1][0].seq_lens.tolist() == [6] and rank.seen[-1][2] is False  # a decode never replays a graph


def test_too_many_rows_and_refusals_are_one_line(rank):
    rows = DraftTree.chain(range(40))
    with pytest.raises(UsageError, match=r"a pass of 40 rows, SGLang reserved 33 .* speculative_num_draft_tokens"):
        rank.runner.verify(rank.text, rows.tokens, None, np.tril(np.ones((40, 40), bool)), range(40))
    rank.runner.model_runner.refuses = NotImplementedError("no trees here\nat all")
    with pytest.raises(Unsupported, match="SGLang refuses DECODE of 1 rows: no trees here at all"):
        rank.runner.step(rank.text, 4)
    rank.runner.model_runner.refuses = torch.cuda.OutOfMemoryError("tried to allocate")
    with pytest.raises(UsageError, match="memory: no room for DECODE of 1 rows"):
        rank.runner.step(rank.text, 4)


def test_what_was_reserved_is_held_against_the_tree(rank):
    reserved = pools.reserved(rank.runner.model_runner)
    assert reserved == {
        "key and value slots": {"total": 200},
        "request rows": {"requests": 1},
        "state slots": {"requests": 2},
        "intermediate states": {"per_request": 33},
        "requests with intermediate states": {"requests": 1},
        "intermediate windows": {"per_request": 33},
        "requests with intermediate windows": {"requests": 1},
        "verify graphs": {"sizes": [33]},
    }
    assert not plan({"tree": 32}, reserved)
    rows = ["intermediate states", "intermediate windows", "verify graphs"]
    assert [problem.buffer for problem in plan({"tree": 33}, reserved)] == rows
    short = {str(problem) for problem in plan({"a": 3, "b": 3, "c": 3}, reserved)}
    assert "state slots: the batch needs 3 slots, reserved 2" in short
    assert "requests with intermediate states: the batch needs 3 slots, reserved 1" in short


@pytest.mark.parametrize("nodes", [1, 2, 9, 33])
def test_links_hold_the_parents(nodes):
    drafted = tree(nodes=nodes)
    first, sibling = sglang_runner.child_links(drafted.parents, len(drafted) + 3)
    found = {}
    for node, child in enumerate(first):
        while child >= 0:
            found[child] = node
            assert sibling[child] == -1 or sibling[child] > child  # SGLang's kernel needs them to ascend
            child = sibling[child]
    assert [found.get(node, -1) for node in range(len(drafted))] == list(drafted.parents)
    assert first[len(drafted) :] == sibling[len(drafted) :] == [-1] * 3


def test_widths_are_few():
    assert {sglang_runner.width_for(rows) for rows in range(2, 66)} == {9, 17, 33, 65}
    assert sglang_runner.width_for(5000) == 5000


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        pytest.param(
            NotImplementedError("no topk > 1"), Unsupported, "refuses this model: no topk > 1", id="lightning"
        ),
        pytest.param(
            ValueError("Model architectures ['X'] are not supported for now."), Unsupported, "X", id="no-class"
        ),
        pytest.param(AssertionError("X does not support triton"), Unsupported, "triton", id="backend"),
        pytest.param(torch.cuda.OutOfMemoryError("CUDA out of memory"), UsageError, "memory: ", id="memory"),
        pytest.param(RuntimeError("Not enough memory. Please"), UsageError, "--tp", id="pool"),
        pytest.param(ImportError("no sgl_kernel"), UsageError, "constraints-sglang.txt", id="import"),
        pytest.param(KeyError("x"), UsageError, "does not start (KeyError", id="other"),
    ],
)
def test_why_sglang_did_not_start(raised, kind, words):
    with pytest.raises(kind) as caught, sglang_runner._reasons():
        raise raised
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_random_weights_follow_the_rules_of_the_suite():
    class GemmaNorm(torch.nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(d))
            self.register_buffer("gemma_weight", torch.ones(d))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens, self.lm_head = torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False)
            self.norm, self.gate_norm = GemmaNorm(64), torch.nn.RMSNorm(64)
            self.A_log, self.dt_bias = (torch.nn.Parameter(torch.zeros(400)) for _ in range(2))

    one, two, other = Net(), Net(), Net()
    for net, seed in ((one, 3), (two, 3), (other, 4)):
        sglang_runner.randomize(net, seed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(one.norm.gemma_weight, one.norm.weight + 1) and abs(float(one.norm.weight.detach().mean())) < 0.1
    assert abs(float(one.gate_norm.weight.detach().mean()) - 1) < 0.1
    assert float(one.A_log.detach().max()) <= 0 and float(one.dt_bias.detach().min()) >= -1.5
    assert abs(float(one.lm_head.weight.detach().std()) * 8 - 2.5) < 0.2  # logits of std about 2.5 from inputs of std 1
    with pytest.raises(UsageError, match="quantised"):
        narrow = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), False)])
        sglang_runner.randomize(narrow, 0)


def test_the_last_rows_of_an_extend_are_read_and_the_processor_is_put_back():
    class Processor(torch.nn.Module):
        def _get_pruned_states(self, hidden, *rest):
            return hidden[-1:], None, "rest"

    model = torch.nn.Sequential(Processor())
    hidden = torch.arange(6)[:, None]
    with sglang_runner._last_rows(model, 3):
        assert model[0]._get_pruned_states(hidden)[0].flatten().tolist() == [3, 4, 5]
        assert model[0]._get_pruned_states(hidden)[1:] == (None, "rest")
    assert model[0]._get_pruned_states(hidden)[0].flatten().tolist() == [5]
    with pytest.raises(Unsupported, match="logits processor"), sglang_runner._last_rows(torch.nn.Linear(1, 1), 2):
        pass


def test_contents_of_ranks_are_joined_by_heads():
    parts = [[{"keys": torch.full((3, 2), r), "recurrent": torch.full((2, 4, 4), r)}] for r in (0, 1)]
    (layer,) = sglang_ranks.joined(parts)
    assert layer["keys"].shape == (3, 4) and layer["recurrent"].shape == (4, 4, 4)
    # Rank 0 has its part on its GPU, the others come through a pipe on the host.
    (layer,) = sglang_ranks.joined([[{"keys": torch.zeros(3, 2, device="meta")}], [{"keys": torch.zeros(3, 2)}]])
    assert layer["keys"].shape == (3, 4) and layer["keys"].device.type == "meta"


# --- What is refused before anything runs -----------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """As if SGLang and a GPU were here."""
    monkeypatch.setattr(sglang, "installed", lambda: "0.5.17")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(loading, "_free", lambda device: 2**40)


def test_a_missing_extra(monkeypatch):
    monkeypatch.setattr(sglang_seams, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"sglang is not installed here; .*pip install 'ddtree-check\[sglang\]'"):
        sglang.SGLangEngine.load(None)


@pytest.mark.parametrize(
    ("device", "tp", "words"),
    [("cpu", 1, "SGLang runs on a GPU"), ("cuda", 2, "at most the 1 GPUs"), ("cuda:1", 1, "at most the 1 GPUs")],
)
def test_devices(installed, device, tp, words):
    with pytest.raises(UsageError, match=words):
        sglang.SGLangEngine.load(None, device=device, tp=tp)


def test_no_gpu(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="SGLang needs a CUDA device, there is none here"):
        sglang.SGLangEngine.load(None)


def test_too_little_memory_is_seen_before_anything_is_taken(installed, monkeypatch):
    monkeypatch.setattr(loading, "_free", lambda device: 2**30)
    with pytest.raises(UsageError, match=r"memory: qwen3.6-27b in bfloat16 needs 50\.\d GiB"):
        sglang.SGLangEngine.load("qwen3.6-27b", weights="random")


def test_float64_is_refused(installed):
    with pytest.raises(UsageError, match="expected float32, bfloat16 or float16"):
        sglang.SGLangEngine.load(None, dtype="float64")


@pytest.mark.parametrize(
    ("family", "words"), [("minimax", "layer 0 .*refuse trees"), ("jamba", "Mamba-1"), ("recurrent_gemma", "RG-LRU")]
)
def test_layers_that_sglang_cannot_fork(installed, tmp_path, family, words):
    from transformers import AutoConfig

    from ddtree_check.model.small_shapes import SHAPES

    AutoConfig.for_model(family, **SHAPES[family]).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=words):
        sglang.SGLangEngine.load(str(tmp_path), weights="random")


def test_layers_in_the_words_of_older_configurations_and_of_sglangs_own():
    from ddtree_check.model.families import find_family

    granite = SimpleNamespace(
        layer_types=["mamba", "attention"],
        mamba_d_conv=4,
        position_embedding_type="rope",
        model_type="granitemoehybrid",
    )
    kinds = lambda config: [layer.kind for layer in find_family(config.model_type).describe_layers(config)]  # noqa: E731
    assert kinds(sglang_seams.readable(granite)) == ["mamba2", "attention"]
    kimi = SimpleNamespace(
        model_type="kimi_linear", num_hidden_layers=3, is_kda_layer=lambda layer: layer != 1,
        linear_attn_config={"short_conv_kernel_size": 4},
    )  # fmt: skip
    assert kinds(kimi) == ["attention"] * 3, "read as it is, its recurrent layers would go unseen"
    assert kinds(sglang_seams.readable(kimi)) == ["kda", "attention", "kda"]


def test_random_weights_keep_the_configuration_of_a_folder_in_its_own_words(tmp_path):
    own = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "linear_attn_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    text = SimpleNamespace(model_type="kimi_linear")
    with sglang._checkpoint(str(tmp_path), text, "random", torch.bfloat16) as folder:
        assert json.loads(Path(folder, "config.json").read_text()).items() >= own.items()


def test_engine_args():
    fields = {"mamba_ssm_dtype": 0, "max_total_tokens": 0, "model_path": 0}
    assert sglang.checked_args({"max_total_tokens": 9}, fields) == {"max_total_tokens": 9}
    with pytest.raises(UsageError, match=r"got ssm_dtype, expected .* near it: mamba_ssm_dtype"):
        sglang.checked_args({"ssm_dtype": "float32"}, fields)
    with pytest.raises(UsageError, match="got model_path, which --model sets"):
        sglang.checked_args({"model_path": "x"}, fields)
    assert load_options("sglang", args={"a": 1}, tp=2, rows=9) == {"args": {"a": 1}, "tp": 2, "rows": 9}
    assert load_options("transformers", args={"a": 1}, tp=1, rows=9) == {"args": {"a": 1}}
    with pytest.raises(UsageError, match="tp: got 2, but engine transformers"):
        load_options("transformers", args={}, tp=2, rows=9)


def test_engine_args_come_from_the_command_line_and_go_back_to_it():
    pairs = ("mamba_ssm_dtype=bfloat16", "max_total_tokens=4096", "disable_cuda_graph=false", 'x={"a": 1}')
    assert engine_args(pairs) == {
        "mamba_ssm_dtype": "bfloat16", "max_total_tokens": 4096, "disable_cuda_graph": False, "x": {"a": 1},
    }  # fmt: skip
    line = shlex.split(Job(engine="sglang", tp=2, engine_args=pairs).command())
    assert line[:6] == ["ddtree-check", "compare", "--engine", "sglang", "--tp", "2"]
    assert [value for flag, value in itertools.pairwise(line) if flag == "--engine-arg"] == list(pairs)
    for wrong in ("x", "=3", "a b=3"):
        with pytest.raises(UsageError, match="expected NAME=VALUE"):
            engine_args((wrong,))


def test_the_interval_of_full_attention_is_handed_on():
    text = SimpleNamespace(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2, model_type=FAMILY)
    assert sglang.overrides(text, nested=False, chosen={}) == {
        "json_model_override_args": '{"full_attention_interval": 4}'
    }
    nested = sglang.overrides(text, nested=True, chosen={"json_model_override_args": {"x": 1}})
    assert json.loads(nested["json_model_override_args"]) == {"text_config": {"full_attention_interval": 4}, "x": 1}
    text.layer_types[0] = "full_attention"
    with pytest.raises(Unsupported, match="full attention"):
        sglang.overrides(text, nested=False, chosen={})


@pytest.mark.parametrize(
    ("version", "row", "status"),
    [
        ("0.5.17", "0.5.17", "run"),
        ("0.5.13", "0.5.13", "untested"),
        ("0.5.17.post1", "0.5.17", "untested"),
        ("0.5.20", "0.5.17", "untested"),
        ("0.6.0", "0.5.23", "untested"),
    ],
)
def test_seams(version, row, status):
    name, seam = sglang_seams.find_seam(version)
    assert (name, seam.status) == (row, status)


def test_an_older_sglang_is_refused():
    with pytest.raises(UsageError, match=r"sglang 0\.4\.9 is installed, expected 0\.5\.13 or newer"):
        sglang_seams.find_seam("0.4.9")


def test_the_coarsest_dtype_judges():
    assert sglang._coarsest("float32", "bfloat16") == "bfloat16" == sglang._coarsest("bfloat16", "float32")
    assert sglang._coarsest("float32", None) == "float32"
    assert judged_as({"dtype": "float32", "judged_as": "bfloat16"}) == "bfloat16"
    assert judged_as({"dtype": "float32"}) == "float32"


# --- SGLang itself ----------------------------------------------------------------------------------------------------

real = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and find_spec("sglang")),
        reason='needs a CUDA device and sglang: run with -m "gpu and sglang" in its environment',
    ),
]


def command(*args: str, expect: int, path: Path | None = None):
    """Runs the command line in a process of its own, as one holds one engine; its record, or its words."""
    args = [*args, "--engine", "sglang", *(["--json", str(path)] if path else [])]
    ran = subprocess.run([sys.executable, "-m", "ddtree_check", *args], cwd=REPO, capture_output=True, text=True)
    assert ran.returncode == expect, f"exit {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return json.loads(path.read_text()) if path else ran


REAL = [
    pytest.param(("--dtype", "float32"), "float32", id="float32"),
    pytest.param(("--dtype", "bfloat16"), "bfloat16", id="bfloat16"),
    pytest.param(("--dtype", "float32", "--engine-arg", "mamba_ssm_dtype=bfloat16"), "bfloat16", id="bf16-state"),
]


class TestReal:
    pytestmark = real

    @pytest.mark.parametrize(("args", "judged"), REAL)
    def test_forked_passes_and_unforked_fails_where_the_law_says(self, tmp_path, args, judged):
        record = command(
            "compare", *args, "--limit", "3", "--accept", "first,branch", expect=0, path=tmp_path / "record.json"
        )
        assert record["verdict"]["modes"] == {"linear": "pass", "tree_forked": "pass", "tree_unforked": "fail"}
        assert {case["modes"][mode]["verdict"] for case in record["cases"] for mode in ("linear", "tree_forked")} == {
            "pass"
        }
        assert not [case["id"] for case in record["cases"] if case["leak_law"]["outside"]]
        coverage, where = record["coverage"], record["environment"]
        assert coverage["cases"] == 6 and coverage["near_moved"] >= 0.95 * coverage["near"] > 60
        assert coverage["commits_aside"] >= 6
        assert where["judged_as"] == judged and where["sglang_seam"].endswith("run") == (where["sglang"] == "0.5.17")
        if "--engine-arg" not in args and judged == "float32":
            share = max(node["tree_forked"]["max_abs"] for case in record["cases"] for node in case["nodes"])
            assert share < 1e-3, f"float32 forked off by {share}"

    def test_a_requirement_that_unforked_passes_goes_red(self, tmp_path):
        args = ("compare", "--limit", "1", "--budget", "16", "--dtype", "bfloat16", "--require", "tree_unforked")
        record = command(*args, expect=1, path=tmp_path / "record.json")
        assert record["verdict"]["modes"]["tree_unforked"] == "fail"

    def test_rounds(self, tmp_path):
        # Fewer would not be conclusive: of these 96 rounds 14 % leave the first branch, at least 10 % must.
        args = ("generate", "--limit", "8", "--rounds", "12", "--budget", "16", "--dtype", "float32")
        record = command(*args, expect=0, path=tmp_path / "record.json")
        assert record["exit_code"] == 0

    def test_short_buffers_are_named(self):
        ran = command("compare", "--budget", "64", "--engine-arg", "speculative_num_draft_tokens=16", expect=3)
        assert ran.stdout == "" and ran.stderr.count("\n") == 1
        assert "capacity: intermediate states: request tree needs 65 rows, reserved 16" in ran.stderr

    def test_an_unknown_argument_is_one_line(self):
        ran = command("compare", "--engine-arg", "no_such_argument=1", expect=3)
        assert ran.stdout == "" and "got no_such_argument" in ran.stderr
