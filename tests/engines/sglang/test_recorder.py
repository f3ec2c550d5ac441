"""The recorder of a running SGLang: the right steps, never in the server's way; a leaky or lying step is judged red."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Space

import numpy as np
import pytest
import torch

from ddtree_check.base.errors import UsageError
from ddtree_check.base.resources import fixtures_dir
from ddtree_check.cli.main import main
from ddtree_check.engines.recorded import TraceEngine
from ddtree_check.engines.sglang import pools
from ddtree_check.engines.sglang import recorder as recording
from ddtree_check.engines.sglang.recorder import (
    DRAFT,
    RUN,
    SAMPLE,
    VARIABLE,
    Options,
    Recorder,
    install,
    parents_of_mask,
    read_options,
    sglang_plugin,
    tree_of,
)
from ddtree_check.engines.sglang.scripted import Planned, Script, Text, deal, read_script
from ddtree_check.flows.check import Settings
from ddtree_check.flows.replay import judge_trace
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.trace.lint import lint
from ddtree_check.trace.read import read_trace
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape
from tests.fake_sglang import VOCAB, Server
from tests.models import prompt, small

REPO = Path(__file__).resolve().parents[3]
SETTINGS = Settings()


@pytest.fixture(autouse=True)
def _sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", Space(__version__="0.0.fake"))


def proposer(seed=0, nodes=9, vocab=VOCAB):
    rng = np.random.default_rng(seed)

    def propose(context):
        return shape("random", nodes, vocab=vocab, seed=int(rng.integers(1 << 30)), root=context[-1])

    return propose


def options(tmp_path, **changes) -> Options:
    return Options(**({"folder": str(tmp_path / "t"), "rate": 1.0, "top": 0} | changes))


def serve(server, steps, reqs=None, propose=None):
    reqs = reqs or [server.begin("a", prompt(6))]
    for _ in range(steps):
        server.step(reqs, propose or proposer(vocab=server.vocab))
    server.settle()
    server.recorder.close()
    return reqs


def folder(tmp_path) -> Path:
    (found,) = (tmp_path / "t").iterdir()
    return found


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_the_owner_can_read_what_is_recorded_and_the_log_says_so_once(tmp_path, caplog, umask):
    before = os.umask(umask)
    try:
        server = Server(options(tmp_path, rate=0.75))
        serve(server, 6)
    finally:
        os.umask(before)
    made = [tmp_path / "t", *(tmp_path / "t").rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {modes[path.name] for path in made if path.is_dir()} == {0o700}
    assert {modes[path.name] for path in made if path.is_file()} == {0o600} and len(modes) > 4
    (said,) = [line.message for line in caplog.records]
    assert said.startswith("ddtree-check: the tokens of users' requests are recorded, 0.75 of all steps, in ")


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["sync", "overlap"])
def test_steps_are_recorded_as_they_were_run(tmp_path, late):
    server = Server(options(tmp_path), late=late)
    reqs = [server.begin(name, prompt(6, seed)) for seed, name in enumerate("ab")]
    seen, propose = [], proposer()
    for _ in range(4):
        server.step(reqs, propose)
        seen.append(server.trees)
    server.settle()
    server.recorder.close()
    trace = read_trace(folder(tmp_path))
    assert server.recorder.off == "closed" and not server.recorder.dropped
    assert (trace.header.engine, trace.header.engine_version, trace.header.vocab_size) == ("sglang", "0.0.fake", VOCAB)
    assert len(trace.steps) == 8
    for step in trace.steps:
        place = "ab".index(step.request)
        req, tree = reqs[place], seen[step.round][place]
        assert step.tree == tree and step.source["batch"] == ["a", "b"] and step.source["root_in_text"]
        assert step.source["slot"] == 3 + place and step.source["gate"] == 8 and not step.source["graph"]
        (one,) = step.passes
        text = (*req.origin_input_ids, *req.output_ids)
        start = len(step.prompt_tokens)
        assert (*step.prompt_tokens, tree.tokens[0]) == text[: start + 1]
        assert step.accepted is not None  # and it is what came out
        out = (*(tree.tokens[node] for node in step.accepted[1:]), step.bonus)
        assert out == text[start + 1 : start + 1 + len(out)]
        assert [node for node in one.nodes if node >= 0] == list(range(len(tree)))
        rows = {node: row for row, node in enumerate(one.nodes)}
        assert [one.lists["positions"][rows[node]] for node in range(len(tree))] == [start + d for d in tree.depth]
        assert tuple(one.lists["parents"][: len(tree)]) == tree.parents
        assert step.source["mask_parents"][: len(tree)] == list(tree.parents)
        assert one.arrays["mask"].shape == (12, 12) and one.width == 12
    assert lint(folder(tmp_path)) == []


def test_logits_are_raw_and_each_its_own(tmp_path, monkeypatch):
    """Before the sampler's penalties, which it adds in place; the twin records after them."""
    rows = []
    server = Server(options(tmp_path))
    whole = server._rows
    monkeypatch.setattr(server, "_rows", lambda *args: rows.append(whole(*args)) or rows[-1].clone())
    serve(server, 2)
    for step, logits in zip(read_trace(folder(tmp_path)).steps, rows, strict=True):
        held = step.passes[0].arrays["logits"].read()
        assert np.array_equal(held, logits.numpy())
        assert not np.array_equal(held, (logits - 100 * (torch.arange(VOCAB) == 0)).numpy())


def test_the_largest_logits_in_place_of_all(tmp_path):
    serve(Server(options(tmp_path, top=5)), 2)
    for step in read_trace(folder(tmp_path)).steps:
        assert step.passes[0].arrays["top_ids"].shape == (12, 5) and step.passes[0].arrays["lse"].shape == (12,)


def test_a_server_with_its_own_sampler_is_read_by_what_it_put_out(tmp_path):
    server = Server(options(tmp_path), missing=(SAMPLE,))
    (req,) = serve(server, 3)
    text = (*req.origin_input_ids, *req.output_ids)
    for step in read_trace(folder(tmp_path)).steps:
        out = (*(step.tree.tokens[node] for node in step.accepted[1:]), step.bonus)
        assert text[len(step.prompt_tokens) + 1 :][: len(out)] == out


def test_only_verifies_and_a_share_of_them(tmp_path):
    server = Server(options(tmp_path, rate=0.25))
    reqs = [server.begin(name, prompt(6, seed)) for seed, name in enumerate("abcd")]
    for at in range(100):
        server.step(reqs, proposer(at), verify=at % 2 == 0)
    server.recorder.close()
    counts = server.recorder.counts
    assert counts["steps"] == 50 and counts["verifies"] == 200 and 30 <= counts["written"] <= 70
    assert json.loads((folder(tmp_path) / "recorder.json").read_text())["written"] == counts["written"]


def test_a_rate_that_is_edited_while_serving(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "EVERY", 0.0)
    file = tmp_path / "record.toml"
    file.write_text(f'folder = "{tmp_path / "t"}"\nrate = 1.0\n')
    server = Server(read_options(str(file)), file=str(file))
    reqs = [server.begin("a", prompt(6))]
    for at, rate in enumerate((None, "0.0", "rate", "1.0")):
        if rate:
            file.write_text(f'folder = "{tmp_path / "t"}"\nrate = {rate}\n')
            os.utime(file, ns=(at, at))
        server.step(reqs, proposer(at))
    server.recorder.close()
    assert server.recorder.counts["written"] == 2
    assert "the rate stays 0" in caplog.text


# --- never in the way -------------------------------------------------------------------------------------------------


def _raise(*_, **__):
    raise RuntimeError("injected")


BROKEN = ["_take", "_accept", "_close", "_write_step", "_open", "_logits"]


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_ours_stops_recording_once_and_serving_goes_on(tmp_path, caplog, monkeypatch, name):
    server, plain = Server(options(tmp_path)), Server(Options(trees="none"))
    monkeypatch.setattr(server.recorder, name, _raise)
    reqs = [server.begin("a", prompt(6))]
    with caplog.at_level(logging.WARNING, "ddtree_check"):
        for at in range(3):
            torch.manual_seed(at)
            server.step(reqs, proposer(at))
            if server.recorder._thread is not None:
                server.recorder._thread.join(0.3)
        server.recorder.close()
    twin = [plain.begin("a", prompt(6))]
    for at in range(3):
        torch.manual_seed(at)
        plain.step(twin, proposer(at))
    assert reqs[0].output_ids == twin[0].output_ids
    said = [line.message for line in caplog.records if "are recorded" not in line.message]
    assert len(said) == 1 and "recording has stopped (RuntimeError: injected); serving goes on" in said[0]
    assert not list((tmp_path).rglob("*.safetensors"))


@pytest.mark.parametrize(("ranks", "written"), [("first", 0), ("all", 2)])
def test_other_ranks_record_when_asked(tmp_path, ranks, written, caplog):
    server = Server(options(tmp_path, ranks=ranks))
    server.worker.ps.tp_rank = 1
    serve(server, 2)
    assert server.recorder.counts["written"] == written and len(caplog.records) == (written > 0)
    assert not written or folder(tmp_path).name.startswith("rank1-")


def test_a_mask_that_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    """A second witness: the step can be judged without it."""
    monkeypatch.setattr(recording, "_masks", _raise)
    serve(Server(options(tmp_path)), 1)
    (step,) = read_trace(folder(tmp_path)).steps
    assert step.source["mask_unread"] == "RuntimeError: injected" and "mask" not in step.passes[0].arrays


def test_a_mask_cut_by_guessed_lengths_is_left_out(tmp_path, monkeypatch):
    """A host that runs ahead knows bounds alone; the lengths that ran are the device's."""
    take = Recorder._take

    def ahead(self, result, worker, batch):
        batch.seq_lens_cpu = batch.seq_lens_cpu - 1
        take(self, result, worker, batch)

    monkeypatch.setattr(Recorder, "_take", ahead)
    serve(Server(options(tmp_path)), 1)
    (step,) = read_trace(folder(tmp_path)).steps
    assert "mask" not in step.passes[0].arrays and "mask_parents" not in step.source


def test_without_its_metadata_nothing_is_said_of_the_recurrent_layers(tmp_path):
    """Not even that they got a chain: a server without recurrent layers, or one whose backend has moved."""
    server = Server(options(tmp_path))
    server.runner.attn_backend = Space()
    serve(server, 1)
    (step,) = read_trace(folder(tmp_path)).steps
    assert "parents" not in step.passes[0].lists and step.source["recurrent"] is None


def test_an_error_of_the_servers_own_passes_through(tmp_path):
    server = Server(options(tmp_path))
    server._rows = _raise
    with pytest.raises(RuntimeError, match="injected"):
        server.step([server.begin("a", prompt(6))], proposer())
    assert server.recorder.off is None


def test_a_disk_that_cannot_be_written_stops_recording(tmp_path, caplog):
    (tmp_path / "t").write_text("a file")
    server = Server(options(tmp_path))
    serve(server, 2)
    assert "NotADirectoryError" in server.recorder.off or "FileExistsError" in server.recorder.off
    assert server.served >= 2 and caplog.text.count("has stopped") == 1


def test_the_folder_is_bounded(tmp_path, caplog):
    server = Server(options(tmp_path, max_mb=0.02))
    serve(server, 20)
    held = sum(file.stat().st_size for file in folder(tmp_path).glob("*.safetensors"))
    assert 0 < held <= 0.02 * 2**20 and "has reached 0.02 MB" in caplog.text and caplog.text.count("stopped") == 1
    assert server.served >= 20


def test_what_the_writer_cannot_keep_up_with_is_dropped(tmp_path, monkeypatch):
    server = Server(options(tmp_path, pending_mb=1.5 * 12 * VOCAB * 4 / 2**20))
    monkeypatch.setattr(server.recorder, "_write_all", lambda: None)
    serve(server, 5)
    assert server.recorder.dropped == {"the writer does not keep up": 4}


def test_a_step_past_the_end_of_its_request_is_dropped(tmp_path):
    server = Server(options(tmp_path), late=True)
    (req,) = [server.begin("a", prompt(6))]
    server.step([req], proposer())
    server.step([req], proposer(1))
    req.done, req.output_ids = True, req.output_ids[:1]
    server.recorder.close()
    assert server.recorder.dropped == {"run past the end of its request": 1} and server.recorder.counts["written"] == 1


def test_a_text_of_foreign_ids_is_dropped(tmp_path):
    """As a server's stand-ins for an image are."""
    server = Server(options(tmp_path))
    server.step([server.begin("a", [5, VOCAB + 7]), server.begin("b", [5, 6])], proposer())
    server.recorder.close()
    assert server.recorder.counts["written"] == 1 and server.recorder.off == "closed"
    assert server.recorder.dropped == {"a text of other ids than the vocabulary's": 1}


def test_logits_of_another_form_and_links_that_make_no_tree_are_counted(tmp_path, caplog):
    server = Server(options(tmp_path))
    server.told = None
    reqs = [server.begin("a", prompt(6))]
    whole = server._rows
    server._rows = lambda *args: torch.cat([whole(*args), torch.randn(1, VOCAB)])
    server.step(reqs, proposer())
    server._rows = whole
    server.recorder.close()
    assert server.recorder.dropped == {"13 rows of logits for 1 requests of 12": 1}


# --- off by default ---------------------------------------------------------------------------------------------------


def test_off_by_default(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import of it would raise
    assert sglang_plugin() is None


def test_the_entry_point_resolves_without_sglang_or_torch():
    group = "sglang.srt.plugins"
    entries = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["entry-points"][group]
    code = (
        "import sys; from importlib.metadata import EntryPoint; "
        f"EntryPoint('ddtree_check', {entries['ddtree_check']!r}, {group!r}).load()(); "
        "bad = {'torch', 'sglang', 'transformers'} & sys.modules.keys(); sys.exit(repr(bad) if bad else 0)"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    found = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert entries.keys() == {"ddtree_check"} and importlib.metadata.EntryPoint


def test_the_plugin_registers_with_sglang(monkeypatch, tmp_path):
    held = {}
    registry = Space(register=lambda target, hook, kind: held.update({target: kind}))
    kinds = Space(AFTER="after", AROUND="around")
    modules = {
        "sglang.srt.plugins.hook_registry": Space(HookRegistry=registry, HookType=kinds),
        "sglang.srt.managers.tp_worker": Space(TpModelWorker=Space(forward_batch_generation=0)),
        "sglang.srt.managers.scheduler": Space(Scheduler=Space(run_batch=0)),
        "sglang.srt.speculative.eagle_utils": Space(),  # 0.5.13 has no eagle_sample
        "sglang.srt.speculative.ngram_worker": Space(NGRAMWorker=Space(_prepare_draft_tokens=0)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "t"))
    sglang_plugin()
    assert held == {RUN: "around", recording.FORWARD: "after"}


@pytest.mark.parametrize(("text", "says"), [
    ("rate = 2.0", "rate: got 2.0, expected a share from 0 to 1"),
    ("rtae = 1.0", "rtae: no name of Options"),
    ("top = 1", "top: got 1, expected 0"),
    ("folder =", "Invalid value"),
    ('trees = "none.json"', "none.json: No such file"),
    ("rate = true", "rate: got True, expected a finite number"),
    ("max_mb = 0", "max-mb: got 0, expected more than 0"),
    ("states = 1", "states: got 1, expected true or false"),
])  # fmt: skip
def test_bad_options_are_one_line_and_nothing_is_hooked(tmp_path, monkeypatch, caplog, text, says):
    file = tmp_path / "record.toml"
    file.write_text(text if text.startswith(("folder", "trees")) else f'folder = "x"\n{text}')
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang_plugin()
    (said,) = [line.message for line in caplog.records]
    assert says in said and "\n" not in said and "serving goes on" in said


def test_an_sglang_without_our_places_is_left_alone(tmp_path, caplog):
    held = []
    install(options(tmp_path), Script((Planned((-1,), (0,)),)), lambda *hook: held.append(hook) is not None)
    assert not held or caplog.text.count("this SGLang has no") == 1


# --- judged -----------------------------------------------------------------------------------------------------------


def judged(tmp_path, steps=3, seed=0, states=False, **server) -> dict:
    """A server with a model of ours, whose trees have the right token on a side branch; judged by the same model."""
    live = small()
    server = Server(options(tmp_path, states=states), engine=live, **server)
    rng = np.random.default_rng(seed)

    def propose(context):
        best = int(live.prefill(context).logits.argmax())
        tree = shape("random", 9, vocab=live.vocab_size, seed=int(rng.integers(1 << 30)), root=context[-1],
                     exclude=[best])  # fmt: skip
        side = next((kids[1] for kids in tree.children[:1] if len(kids) > 1), 1)
        tokens = list(tree.tokens)
        tokens[side] = best
        return DraftTree(tuple(tokens), tree.parents)

    serve(server, steps, propose=propose)
    return judge_trace(TraceEngine.load(folder(tmp_path)), SETTINGS, reference=live)


def forked(record: dict) -> list[dict]:
    return [case["modes"]["tree_forked"] for case in record["cases"]]


def test_a_right_server_passes_and_accepts_side_branches(tmp_path):
    record = judged(tmp_path)
    assert record["verdict"]["modes"]["tree_forked"] == "pass", record["verdict"]
    assert all(found["verdict"] == "pass" for found in forked(record))
    steps = read_trace(folder(tmp_path)).steps
    assert any(len(step.accepted) > 1 for step in steps)


def test_a_leaky_server_is_red_and_looks_unforked(tmp_path):
    """Links right, states in row order: the numbers alone say so. The twin of the test above."""
    found = forked(judged(tmp_path, wiring=UNFORKED))
    assert {one["verdict"] for one in found} == {"fail"}
    assert any("looks unforked" in one["reason"] for one in found)


def test_a_closed_gate_is_red_and_named(tmp_path):
    record = judged(tmp_path, wiring=UNFORKED, gate=1)
    said = [one["reason"] for one in forked(record)]
    assert all("no tree but a chain, row after row, since SGLang's gate, speculative_eagle_topk, is 1" in one
               for one in said)  # fmt: skip


def test_a_wrong_state_names_the_step_that_left_it(tmp_path, monkeypatch):
    """After a wrong commit every row is off, the root too: no verdict on that pass, but the way back to the cause."""
    whole, turns = Server._rows, []

    def rows(self, context, tree):
        turns.append(1)
        return whole(self, context, tree) + (torch.randn(self.rows, self.vocab) if len(turns) > 1 else 0)

    monkeypatch.setattr(Server, "_rows", rows)
    first, second = forked(judged(tmp_path, steps=2, wiring=UNFORKED, gate=1))
    assert first["verdict"] == "fail" and second["verdict"] == "reference_unusable"
    assert "step 'a/0/0' of this request was given another tree and left a wrong state behind" in second["reason"]


def test_a_wrong_parent_is_red_even_where_no_logit_moved(tmp_path):
    """Logits of a right pass, but the recurrent layers were told another parent: data against data."""

    def told(parents):
        parents = parents.copy()
        parents[:, 5] = 0 if parents[0, 5] else 1
        return parents

    record = judged(tmp_path, steps=1, told=told)
    (found,) = forked(record)
    assert found["verdict"] == "fail" and "of node 5, the tree has" in found["reason"]
    assert "no logit moved" in found["reason"] and record["exit_code"] == 1


def test_a_stale_tree_is_red_and_named(tmp_path):
    """A captured graph that goes on with the parents of the step before."""
    held = []

    def told(parents):
        held.append(parents.copy())
        return held[-2] if len(held) > 1 else parents

    found = forked(judged(tmp_path, steps=3, told=told))
    assert found[0]["verdict"] == "pass"
    assert all(one["verdict"] == "fail" and "a stale tree" in one["reason"] for one in found[1:])


def test_parents_come_from_what_the_recurrent_layers_got_not_from_the_mask(tmp_path, monkeypatch):
    """A recorder that read them from the mask would call the closed gate right: that twin is not told of it."""
    assert "no tree but a chain" in forked(judged(tmp_path / "a", steps=1, gate=1))[0]["reason"]
    wrong = lambda own, width: own["next_token"].tolist() and [-1, *own["mask_like"][1:]]  # noqa: E731
    monkeypatch.setattr(recording, "_received", lambda own, width: [-1, *PARENTS[0][1:]] if PARENTS else wrong)
    PARENTS.clear()
    whole = recording.parents_of_mask
    monkeypatch.setattr(recording, "parents_of_mask", lambda mask: PARENTS.append(whole(mask)) or PARENTS[-1])
    live = small()
    server = Server(options(tmp_path / "b"), engine=live, gate=1)
    PARENTS.append([-1, *[0] * 11])
    serve(server, 1, propose=lambda context: shape("star", 11, vocab=live.vocab_size, seed=1, root=context[-1]))
    record = judge_trace(TraceEngine.load(folder(tmp_path / "b")), SETTINGS, reference=live)
    assert forked(record)[0]["verdict"] == "pass"


PARENTS: list = []


def test_a_slot_that_is_not_the_requests_own_is_red(tmp_path):
    """A padding row's slot that is that of a live request: the metadata against the pool's table."""
    (found,) = forked(judged(tmp_path, steps=1, slot=1))
    assert found["verdict"] == "fail" and "given state slot 4, the request's own is 3" in found["reason"]


def test_a_prefix_hit_is_said_where_the_root_is_off(tmp_path, monkeypatch):
    whole, begin = Server._rows, Server.begin

    def hit(self, *args):
        req = begin(self, *args)
        req.cached_tokens = 5
        return req

    monkeypatch.setattr(Server, "begin", hit)
    monkeypatch.setattr(Server, "_rows", lambda self, *args: whole(self, *args) + torch.randn(self.rows, self.vocab))
    (found,) = forked(judged(tmp_path, steps=1))
    assert found["verdict"] == "reference_unusable" and found["reason"].endswith("a prefix hit of 5 tokens")
    (step,) = read_trace(folder(tmp_path)).steps
    assert step.source["cached_tokens"] == 5


# --- what a commit left in the state slot -----------------------------------------------------------------------------


def left(tmp_path, **server) -> tuple[list[dict], dict]:
    """The commits of a server that records them, judged, and the record."""
    server = {"steps": 2, "states": True} | server
    record = judged(tmp_path, **server)
    return [found["modes"]["tree_forked"] for case in record["cases"] for found in case["commit"]], record


@pytest.mark.parametrize("late", [False, True], ids=["sync", "overlap"])
def test_what_a_right_commit_left_passes(tmp_path, late):
    """Side branches are accepted, so that a node's id is not the number of accepted tokens."""
    found, record = left(tmp_path, late=late)
    assert [one["verdict"] for one in found] == ["pass"] * 2 == [one["verdict"] for one in forked(record)], found
    steps = read_trace(folder(tmp_path)).steps
    assert any(step.accepted[-1] != len(step.accepted) - 1 for step in steps)
    for step in steps:
        (one,) = step.commits
        assert one.path == step.accepted and step.source["own_slot"] == 3
        assert {name.split(".")[2] for name in one.arrays} == {"conv", "recurrent"}


@pytest.mark.parametrize(("commit", "says"), [
    pytest.param(lambda path: len(path) - 1, "committed state is node ", id="by-accepted-length"),
    pytest.param(lambda path: None, "state is zero", id="never"),
    pytest.param(lambda path: 0, "committed state is node 0's", id="the-root's"),
])  # fmt: skip
def test_a_wrong_commit_is_red_where_every_logit_is_right(tmp_path, commit, says):
    """The twins of the test above: one step, whose verify itself is right."""
    (found,), record = left(tmp_path, steps=1, commit=commit)
    assert forked(record)[0]["verdict"] == "pass"
    assert found["verdict"] == "fail" and says in found["reason"] and record["exit_code"] == 1, found


def test_a_commit_that_is_missing_leaves_the_state_as_it_was(tmp_path):
    turns = []
    found, _ = left(tmp_path, steps=2, commit=lambda path: turns.append(1) or (path[-1] if len(turns) < 2 else None))
    assert [one["verdict"] for one in found] == ["pass", "fail"]
    assert "state unchanged by the accept" in found[1]["reason"]


def test_states_are_off_by_default_and_count_against_what_may_wait(tmp_path):
    live = small()
    server = Server(options(tmp_path), engine=live)
    serve(server, 1)
    assert not read_trace(folder(tmp_path)).steps[0].commits
    size = pools.slot_bytes(server.runner)
    assert size > 0
    bound = (12 * live.vocab_size * 4 + size - 1) / 2**20
    twin = Server(options(tmp_path, folder=str(tmp_path / "u"), states=True, pending_mb=bound), engine=live)
    serve(twin, 1)
    assert twin.recorder.dropped == {"the writer does not keep up": 1}


# --- a block without a tree -------------------------------------------------------------------------------------------


def chain_of(context, vocab) -> DraftTree:
    rng = np.random.default_rng(len(context))
    return DraftTree.chain([context[-1], *rng.integers(0, vocab, 11).tolist()])


@pytest.mark.parametrize(("rows", "verdict"), [(0.0, "pass"), (3.0, "fail")], ids=["right", "wrong-logits"])
def test_a_block_is_recorded_as_a_chain_and_judged_as_linear(tmp_path, monkeypatch, rows, verdict):
    whole = Server._rows

    def shifted(self, *args):
        found = whole(self, *args)
        found[2:] += rows * torch.randn(found[2:].shape)
        return found

    monkeypatch.setattr(Server, "_rows", shifted)
    live = small()
    server = Server(options(tmp_path, states=True), engine=live, gate=1, block=True, missing=(SAMPLE,))
    serve(server, 2, propose=lambda context: chain_of(context, live.vocab_size))
    steps = read_trace(folder(tmp_path)).steps
    assert [one.mode for step in steps for one in step.passes] == ["linear"] * 2
    assert all(step.tree.is_chain and len(step.tree) == 12 and step.accepted for step in steps)
    assert all(step.passes[0].lists["parents"] == list(range(-1, 11)) for step in steps)
    assert lint(folder(tmp_path)) == []
    settings = Settings(require=("linear",))
    record = judge_trace(TraceEngine.load(folder(tmp_path)), settings, reference=live)
    assert [case["modes"]["linear"]["verdict"] for case in record["cases"]] == [verdict] * 2
    assert all(found["modes"]["linear"]["verdict"] == "pass" for case in record["cases"] for found in case["commit"])


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_capacity_stands_in_the_header_and_beside_the_steps(tmp_path):
    """Four requests of 12 rows: short of key and value slots and of a graph, and long enough in the rest."""
    serve(Server(options(tmp_path), engine=small()), 1)
    found = json.loads((folder(tmp_path) / "recorder.json").read_text())["capacity"]
    assert {one["buffer"]: (one["needed"], one["reserved"], one["short"]) for one in found} == {
        "intermediate states": (12, 12, False),
        "intermediate windows": (12, 12, False),
        "key and value slots": (48, 20, True),
        "request rows": (4, 4, False),
        "state slots": (4, 11, False),
        "requests with intermediate states": (4, 4, False),
        "requests with intermediate windows": (4, 4, False),
        "verify graphs": (48, 24, True),
    }
    where = read_trace(folder(tmp_path)).header.environment
    assert where["reserved"]["intermediate states"] == {"per_request": 12} and where["state_dtype"] == "float32"


# --- steps of SGLang 0.5.17 on an H200, recorded by this plugin (fixtures/traces) -------------------------------


@pytest.mark.parametrize(("name", "code", "says"), [
    pytest.param("defaults", 0, "pass", id="breadth-8-side-branch-accepted"),
    pytest.param("prefix-hit", 2, "began behind a prefix hit of 86 tokens", id="the-sight-of-text-only-prefix-cache"),
    pytest.param("prefix-hit-before", 0, "pass", id="the-request-that-left-it-in-the-cache"),
    pytest.param("breadth1", 1, "speculative_eagle_topk, is 1", id="the-sight-of-ngram-breadth-one-chain"),
])  # fmt: skip
def test_a_recorded_step_of_a_real_server(name, code, says, capsys):
    file = fixtures_dir() / "traces" / "sglang-0.5.17" / f"{name}.safetensors"
    found = main(["compare", "--engine", "trace", str(file), "--model", "tiny-qwen3_5", "--require", "tree_forked"])
    assert (found, says in " ".join(capsys.readouterr().out.split())) == (code, True)
    (step,) = read_trace(file).steps
    assert step.source["graph"]
    assert name.startswith("prefix") or step.accepted[1] != 1, "off the first branch"
    assert {finding.name for finding in lint(file)} == ({"links-are-a-chain"} if code == 1 else set())


# --- links and masks --------------------------------------------------------------------------------------------------


def test_rows_that_the_walk_never_reaches_are_padding():
    #       0
    #     1   2   4(=2)      3 is linked from nowhere, 5 hangs below 4
    tree, nodes = tree_of([9, 1, 2, 7, 2, 5], [1, -1, -1, -1, 5, -1], [-1, 2, 4, -1, -1, -1])
    assert tree == DraftTree((9, 1, 2), (-1, 0, 0)) and nodes == [0, 1, 2, -1, -1, -1]


@pytest.mark.parametrize(("child", "sibling"), [
    ([1, 1, -1], [-1, -1, -1]), ([7, -1, -1], [-1] * 3), ([2, -1, -1], [-1, -1, 1]), ([1, 2, -1], [-1, 2, -1]),
], ids=["self", "range", "descending-under-row-1", "two-parents"])  # fmt: skip
def test_links_that_make_no_tree_are_refused(child, sibling):
    if (child, sibling) == ([2, -1, -1], [-1, -1, 1]):
        assert tree_of([1, 2, 3], child, sibling)[0].parents == (-1, 0, 0)  # descending: the walk still sees a tree
        return
    with pytest.raises(ValueError, match="links to row"):
        tree_of([1, 2, 3], child, sibling)


def test_parents_of_a_mask():
    tree = shape("random", 11, vocab=VOCAB, seed=3, root=1)
    assert parents_of_mask(tree.ancestor_mask) == list(tree.parents)


# --- scripts ----------------------------------------------------------------------------------------------------------


def script_file(tmp_path, data) -> str:
    (tmp_path / "script.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return str(tmp_path / "script.json")


@pytest.mark.parametrize("late", [False, True], ids=["sync", "overlap"])
def test_a_script_forces_side_branch_accepts(tmp_path, late):
    """The right continuation stands on a side branch, as deep as the shape allows, and only there."""
    live = small()
    ids = prompt(6)
    text, context = [], list(ids)
    for _ in range(14):
        text.append(int(live.prefill(context).logits.index_fill(0, torch.tensor([0]), -1e9).argmax()))
        context.append(text[-1])
    data = {"texts": [{"prompt": list(ids), "tokens": text}],
            "trees": [{"shape": "comb", "nodes": 7}, {"parents": [-1, 0, 0, 2, 2], "accept": 4}]}  # fmt: skip
    script = read_script(script_file(tmp_path, data))
    server = Server(options(tmp_path), script, engine=live, late=late)
    req = server.begin("a", ids)
    req.output_ids = text[:1]
    lone = lambda context: DraftTree((context[-1],), (-1,))  # noqa: E731
    for _ in range(3):
        server.step([req], lone)
    server.settle()
    server.recorder.close()
    steps = read_trace(folder(tmp_path)).steps
    assert [step.accepted for step in steps[:2]] == [planned.path for planned in script.trees]
    assert script.trees[1].path == (0, 2, 4)
    assert req.output_ids[: len(text)] == text[: len(req.output_ids)]


def test_a_text_that_the_server_left_is_not_scripted_on():
    script = Script((Planned((-1, 0, 0), (0, 2)),), (Text((1, 2), (3, 4, 5, 6)),))
    assert script.tree([1, 2, 3], 2, 0, VOCAB).tokens[2] == 4
    assert script.tree([1, 2, 9], 2, 0, VOCAB) is None  # another text
    assert script.tree([1, 2, 3, 4, 5], 2, 0, VOCAB) is None  # too near its end
    assert script.tree([7, 3], 1, 0, VOCAB) is None  # another prompt


@pytest.mark.parametrize("seed", range(20))
def test_no_other_node_continues_the_text(seed):
    bare = shape("random", 20, vocab=1 << 16, seed=seed)
    planned = Planned(bare.parents, bare.path(17))
    ahead = list(range(len(planned.path)))
    tree = deal(planned, 5, ahead, 21, seed)  # few tokens, so that chance would hit
    walk = [0]
    for token in ahead:
        child = next((kid for kid in tree.children[walk[-1]] if tree.tokens[kid] == token), None)
        if child is None:
            break
        walk.append(child)
    assert tuple(walk) == planned.path


def test_a_tree_too_large_for_the_server_stops_the_script_in_one_line(tmp_path, caplog):
    data = {"trees": [{"parents": [-1, *range(20)], "tokens": [None, *range(1, 21)]}]}
    server = Server(options(tmp_path), read_script(script_file(tmp_path, data)))
    serve(server, 3)
    (said,) = [line.message for line in caplog.records if "are recorded" not in line.message]
    assert "21 nodes, the server verifies 12 rows" in said and "scripting trees has stopped" in said
    assert server.recorder.counts["written"] == 3


@pytest.mark.parametrize(("data", "says"), [
    ("{", "at character"),
    ([], 'no "trees"'),
    ({"trees": []}, 'no "trees"'),
    ({"trees": [{"parents": [-1, 0, 0]}]}, 'no "texts"'),
    ({"trees": [{"parents": [-1, 2, 0]}], "texts": []}, r"trees\[0\]: tree: node 1 has parent 2"),
    ({"trees": [{"shape": "blob"}]}, r"trees\[0\]: shape: name 'blob'"),
    ({"trees": [{"shape": "comb", "nodes": "7"}]}, r"trees\[0\]: "),
    ({"trees": [{"parents": [-1, 0], "accept": "side"}]}, "no node lies off the first branch"),
    ({"trees": [{"parents": [-1, 0], "accept": 2}]}, r"accept 2, expected side, first, none or a node in 0..1"),
    ({"trees": [{"parents": [-1, 0], "shape": "comb"}]}, "either parents or shape"),
    ({"trees": [{"parents": [-1, 0], "tokens": [None, 4], "accept": 1}]}, "expected one of them"),
    ({"trees": [{"parents": [-1, 0], "tokens": [None, "é"]}]}, "tokens: 'é', expected numbers"),
    ({"trees": [{"parents": [-1, 0, 0], "tokens": [None, 4, 4]}]}, "expected at most one child per token"),
    ({"trees": [{"parents": [-1, 0, 0]}], "texts": [{"prompt": [1]}]}, r"texts\[0\]"),
    ({"trees": [{"parents": [-1, 0, 0]}], "text": []}, "unknown 'text'"),
    ({"trees": [{"parents": [-1, 0], "tokens": [None, 4]}], "pairs": 1}, "pairs 1, expected true or false"),
])  # fmt: skip
def test_a_bad_script_is_one_line(tmp_path, data, says):
    with pytest.raises(UsageError, match=says) as found:
        read_script(script_file(tmp_path, data))
    assert "\n" not in str(found.value) and "script.json" in str(found.value)


def test_scripted_trees_are_what_ran(tmp_path):
    data = {"trees": [{"parents": [-1, 0, 0, 1], "tokens": [None, 5, 6, 7]}]}
    server = Server(options(tmp_path), read_script(script_file(tmp_path, data)))
    assert DRAFT in server.hooks
    serve(server, 1)
    (step,) = read_trace(folder(tmp_path)).steps
    assert step.tree.tokens[1:4] == (5, 6, 7) and step.tree.parents[:4] == (-1, 0, 0, 1)


def play_pairs(tmp_path, wiring=FORKED, rows=10, **changes):
    """Return the recorded steps of a tree of 10 rows, played in pairs, and the record of judging them."""
    data = {"pairs": True, "trees": [{"parents": [-1, 0, 0, 1, 2, 3, 5, 4, 6, 8], "tokens": [None, *range(20, 29)]}]}
    live = small("bfloat16")
    script = read_script(script_file(tmp_path, data))
    server = Server(options(tmp_path, **changes), script, engine=live, wiring=wiring, rows=rows)
    for number in range(7):  # the tree; other tokens off each path, and each path as a chain, twice
        req = server.begin(f"r{number}", prompt(6))
        server.step([req], proposer(vocab=server.vocab))
    server.settle()
    server.recorder.close()
    settings = replace(SETTINGS, exact="leaves", require=("tree_forked",))
    record = judge_trace(TraceEngine.load(folder(tmp_path)), settings, reference=live)
    return read_trace(folder(tmp_path)).steps, record


@pytest.mark.parametrize("wiring", [FORKED, UNFORKED], ids=lambda wiring: wiring.name)
def test_a_prompt_sent_again_plays_the_pairs_that_bits_are_judged_by(tmp_path, wiring):
    steps, record = play_pairs(tmp_path, wiring)
    assert [step.tree.is_chain for step in steps] == [False, False, True, True, False, True, True]
    exact = record["cases"][0]["exact"]
    assert exact["influence"]["claimed"], exact
    tree = steps[0].tree
    if wiring == FORKED:
        assert (exact["verdict"], exact["certified"]) == ("pass", len(tree))
    else:
        assert exact["verdict"] == "fail" and exact["moved"] >= 1 and record["exit_code"] == 1


def test_pairs_that_do_not_fill_the_rows_claim_nothing(tmp_path):
    steps, record = play_pairs(tmp_path, rows=12)
    exact = record["cases"][0]["exact"]
    assert not any(step.tree.is_chain for step in steps)
    assert exact["verdict"] == "open" and not exact["influence"]["claimed"], exact


def test_pairs_recorded_by_their_largest_logits_are_not_judged_in_bits(tmp_path):
    _, record = play_pairs(tmp_path, top=8)
    assert record["cases"][0]["exact"] is None


def test_contexts_of_pairs_are_not_kept_for_ever(tmp_path):
    data = {"pairs": True, "trees": [{"parents": [-1, 0], "tokens": [None, 5]}]}
    server = Server(options(tmp_path), read_script(script_file(tmp_path, data)))
    contexts = server.hooks[DRAFT].__self__.contexts
    contexts.update(range(100_001))
    serve(server, 1)
    assert len(contexts) <= 100_000
