"""Traces: what is written is read back, bit for bit; what strangers send is read whole or refused in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ddtree_check.base.errors import UsageError
from ddtree_check.engines.recorded import TraceEngine, tensor
from ddtree_check.trace.lint import lint
from ddtree_check.trace.model import FORMAT, widen
from ddtree_check.trace.read import read_trace
from ddtree_check.trace.write import TraceWriter

VOCAB = 50
PROMPT, TOKENS, PARENTS = [3, 1, 4], [5, 17, 23, 41], [-1, 0, 0, 1]
HEADER = {"engine": "x", "model": "m", "dtype": "float32", "vocab_size": VOCAB}
REPO = Path(__file__).resolve().parents[2]


def rows(count=4, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(count, VOCAB)).astype(dtype)


def write(folder, *, steps=1, **header):
    with TraceWriter(folder, **(HEADER | header)) as trace:
        for number in range(steps):
            step = trace.step(f"s{number}", PROMPT, TOKENS, PARENTS, request="r", round=number, source={"draft": "x"})
            step.add("ar", rows(seed=number))
            step.add("tree_forked", rows(seed=number), positions=[3, 4, 4, 5], mask=np.eye(4, dtype=bool))
            step.add("linear", rows(3), nodes=[0, 1, 3], width=4)
            step.accept([0, 1], bonus=9)
            assert step.write()
    return folder


# --- what is written is read ------------------------------------------------------------------------------------------


def test_a_step_is_read_back_as_it_was_written(tmp_path):
    layers = [["linear_attention", [[["conv", 4], ["state", "gated_delta"]]]], ["full", [[["attention", None, True]]]]]
    trace = read_trace(write(tmp_path / "t", steps=3, layers=layers, environment={"device": "cpu"}, engine_version="1"))
    assert [step.id for step in trace.steps] == ["s0", "s1", "s2"] and trace.header.layers == layers
    step = trace.steps[1]
    assert (step.prompt_tokens, step.tree.tokens, step.tree.parents) == ((3, 1, 4), (5, 17, 23, 41), (-1, 0, 0, 1))
    assert (step.request, step.round, step.accepted, step.bonus, step.source) == ("r", 1, (0, 1), 9, {"draft": "x"})
    assert [found.mode for found in step.passes] == ["ar", "tree_forked", "linear"]
    assert (step.passes[2].nodes, step.passes[2].width, step.passes[0].width) == ((0, 1, 3), 4, 4)
    assert step.passes[1].lists["positions"] == [3, 4, 4, 5] and step.passes[1].wiring == "engine"
    assert np.array_equal(step.passes[0].arrays["logits"].read(), rows(seed=1))
    assert np.array_equal(step.passes[1].arrays["mask"].read(), np.eye(4, dtype=bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_tensors_of_every_dtype_keep_their_bits(tmp_path, dtype):
    logits = torch.from_numpy(rows()).to(dtype)
    logits[0, 0], logits[1, 1], logits[2, 2] = float("nan"), float("inf"), -0.0
    name = str(dtype).removeprefix("torch.")
    with TraceWriter(tmp_path / "t", **(HEADER | {"dtype": name})) as trace:
        step = trace.step("s", PROMPT, torch.tensor(TOKENS), np.array(PARENTS))
        step.add("ar", logits.t().contiguous().t(), states={(2, "recurrent"): logits[:, :6].reshape(4, 2, 3)})
        step.write()
    (step,) = read_trace(tmp_path / "t").steps
    found = tensor(step.passes[0].arrays["logits"])
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), logits.view(torch.uint8))
    assert step.passes[0].arrays["state.2.recurrent"].shape == (4, 2, 3)
    wide = widen(step.passes[0].arrays["logits"].dtype, step.passes[0].arrays["logits"].read())
    assert np.array_equal(wide, logits.double().numpy(), equal_nan=True)


def test_a_step_file_is_plain_safetensors(tmp_path):
    (file,) = write(tmp_path / "t").iterdir()
    with safe_open(file, "np") as held:
        assert held.metadata()["format"] == FORMAT
        assert json.loads(held.metadata()["step"])["id"] == "s0"
        assert np.array_equal(held.get_tensor("p0.logits"), rows())
    assert read_trace(file).steps[0].id == "s0"  # one file is a trace as well


def test_the_largest_k_keep_the_log_sum_exp_of_the_whole_row(tmp_path):
    with TraceWriter(tmp_path / "t", top=5, **HEADER) as trace:
        step = trace.step("s", PROMPT, TOKENS, PARENTS)
        step.add("ar", rows())
        step.add("tree_forked", top=(np.argsort(-rows())[:, :3], -np.sort(-rows())[:, :3]))
        step.write()
    engine = TraceEngine.load(tmp_path / "t")
    found, measured = engine.rows(engine.trace.steps[0], "ar")
    whole = torch.from_numpy(rows())
    assert (
        measured.all()
        and torch.equal(found.values, whole.topk(5).values)
        and torch.equal(found.ids, whole.topk(5).indices)
    )
    assert torch.allclose(found.lse, whole.double().logsumexp(-1), atol=1e-12)
    other, _ = engine.rows(engine.trace.steps[0], "tree_forked")
    assert other.lse is None and other.ids.shape == (4, 3)


def test_rows_of_several_passes_come_together_and_padding_is_left_out(tmp_path):
    with TraceWriter(tmp_path / "t", **HEADER) as trace:
        step = trace.step("s", PROMPT, TOKENS, PARENTS)
        step.add("linear", rows(4, 1), nodes=[0, 1, 3, -1])
        step.add("linear", rows(4, 2), nodes=[0, 2, -1, -1])
        step.write()
    engine = TraceEngine.load(tmp_path / "t")
    found, measured = engine.rows(engine.trace.steps[0], "linear")
    assert measured.all() and engine.rows(engine.trace.steps[0], "ar") is None
    wanted = np.stack([rows(4, 1)[0], rows(4, 1)[1], rows(4, 2)[1], rows(4, 1)[2]])  # node 0 by the first pass
    assert np.array_equal(found.numpy(), wanted)


def test_the_dtype_of_a_trace_is_the_coarsest(tmp_path):
    assert read_trace(write(tmp_path / "a")).dtype == "float32"
    assert read_trace(write(tmp_path / "b", dtype="bfloat16")).dtype == "bfloat16"
    with TraceWriter(tmp_path / "c", **HEADER) as trace:
        step = trace.step("s", PROMPT, TOKENS, PARENTS)
        step.add("ar", rows(dtype=np.float16))
        step.write()
    assert read_trace(tmp_path / "c").dtype == "float16"


# --- the writer -------------------------------------------------------------------------------------------------------


def test_a_folder_is_bounded_and_what_does_not_fit_is_counted(tmp_path):
    size = next(write(tmp_path / "one").iterdir()).stat().st_size
    with TraceWriter(tmp_path / "t", max_bytes=int(2.5 * size), **HEADER) as trace:
        kept = []
        for number in range(4):
            step = trace.step(f"s{number}", PROMPT, TOKENS, PARENTS)
            step.add("ar", rows())
            step.add("tree_forked", rows())
            kept.append(step.write())
    assert trace.dropped == kept.count(False) > 0 and trace.written == kept.count(True) > 0
    assert sum(file.stat().st_size for file in (tmp_path / "t").iterdir()) == trace.bytes <= 2.5 * size
    assert len(read_trace(tmp_path / "t").steps) == trace.written


def test_a_trace_is_continued_and_two_writers_do_not_overwrite_each_other(tmp_path):
    folder = write(tmp_path / "t", steps=2)
    a, b = TraceWriter(folder, **HEADER), TraceWriter(folder, **HEADER)
    for name, trace in (("a", a), ("b", b), ("c", a)):
        step = trace.step(name, PROMPT, TOKENS, PARENTS)
        step.add("ar", rows())
        assert step.write()
    assert [step.id for step in read_trace(folder).steps] == ["s0", "s1", "a", "b", "c"]
    with pytest.raises(ValueError, match="dtype 'bfloat16' and in the first file 'float32'"):
        TraceWriter(folder, **(HEADER | {"dtype": "bfloat16"}))


REFUSED = [
    pytest.param(lambda s: s.add("best", rows()), "mode 'best', expected one of ar, linear", id="mode"),
    pytest.param(lambda s: s.add("ar", rows()[:, :9]), r"expected floats \[rows, 50\]", id="vocabulary"),
    pytest.param(lambda s: s.add("ar", rows().astype(int)), "logits is int64, expected float32", id="integers"),
    pytest.param(lambda s: s.add("ar", rows(5)), "5 rows for 4 nodes; give nodes", id="more-rows"),
    pytest.param(lambda s: s.add("ar", rows(), nodes=[0, 1, 2, 7]), "node 7, expected -1..3", id="node"),
    pytest.param(lambda s: s.add("ar", rows(), nodes=[0, 1, 1, 2]), "stands in two rows", id="node-twice"),
    pytest.param(lambda s: s.add("ar", rows(), nodes=[0, 1]), "2 nodes for 4 stored rows", id="too-few-nodes"),
    pytest.param(lambda s: s.add("ar", rows(), width=2), "width 2, expected", id="width"),
    pytest.param(lambda s: s.add("ar", rows(), positions=[1.5]), "1.5 among", id="position"),
    pytest.param(lambda s: s.add("ar", rows(), place=[1]), "unknown 'place'", id="unknown-list"),
    pytest.param(lambda s: s.add("ar"), "either logits or top", id="nothing"),
    pytest.param(lambda s: s.accept([0, 3]), "expected the path to its last node", id="accepted"),
    pytest.param(lambda s: s.add("ar", rows(), mask=np.eye(3)), r"mask is BOOL \[3, 3\]", id="mask"),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED)
def test_what_could_not_be_read_back_is_not_written(tmp_path, spoil, message):
    trace = TraceWriter(tmp_path / "t", **HEADER)
    step = trace.step("s", PROMPT, TOKENS, PARENTS)
    step.add("tree_forked", rows())
    with pytest.raises(ValueError, match=message):
        spoil(step)
        step.write()
    assert list((tmp_path / "t").iterdir()) == []


def test_bad_steps_and_headers_are_refused(tmp_path):
    trace = TraceWriter(tmp_path / "t", **HEADER)
    for changes, message in (
        ({"tokens": [5, 50, 23, 41]}, "tokens: token 1 is 50, expected a token id in 0..49"),
        ({"parents": [-1, 0, 3, 1]}, "node 2 has parent 3"),
        ({"prompt_tokens": []}, r"prompt_tokens \[\], expected what is committed"),
        ({"id": " "}, "expected a string that is not blank"),
    ):
        step = trace.step(**({"id": "s", "prompt_tokens": PROMPT, "tokens": TOKENS, "parents": PARENTS} | changes))
        step.add("ar", rows())
        with pytest.raises(ValueError, match=message):
            step.write()
    for changes, message in (
        ({"dtype": "int8"}, "dtype 'int8', expected one of float32"),
        ({"vocab_size": 1}, "vocab_size 1"),
        ({"max_bytes": 0}, "max_bytes 0"),
        ({"top": 1}, "top 1"),
        ({"color": 1}, "unknown 'color'"),
        ({"layers": [["a", [[["conv"]]]]]}, r"layers\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            TraceWriter(tmp_path / "u", **(HEADER | changes))


WRITES = """
import sys, numpy as np
from ddtree_check.trace.write import TraceWriter
trace = TraceWriter(sys.argv[1], engine="x", model="m", dtype="float32", vocab_size=50)
assert not {"torch", "transformers"} & set(sys.modules), "the writer needs no torch"
print("ready", flush=True)
for number in range(int(sys.argv[2]), 10**6):
    step = trace.step(f"s{number}", [3, 1, 4], [5, 17, 23, 41], [-1, 0, 0, 1])
    for mode in ("ar", "tree_forked", "tree_unforked"):
        step.add(mode, np.full((4, 50), number, dtype=np.float32))
    step.write()
"""


def test_a_killed_writer_leaves_whole_steps_and_is_continued(tmp_path):
    folder, written = tmp_path / "t", 0
    for run in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(folder), str(10**4 * run)], cwd=REPO, stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        while len(list(folder.glob("*.safetensors"))) <= written:  # however slow the machine, one whole step
            time.sleep(0.001)
        time.sleep(0.017 * run)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        trace = read_trace(folder)
        assert len(trace.steps) > written
        written = len(trace.steps)
        for step in trace.steps:
            number = float(step.id[1:])
            assert len(step.passes) == 3 and all((one.arrays["logits"].read() == number).all() for one in step.passes)
    TraceWriter(folder, **HEADER)
    assert not list(folder.glob(".*.part")) and len(read_trace(folder).steps) == written


# --- files from strangers ---------------------------------------------------------------------------------------------


def parts(file):
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    meta = table["__metadata__"]
    return table, json.loads(meta["header"]), json.loads(meta["step"]), data[8 + size :]


def rewrite(file, change):
    """The file with its tables changed; change(table, header, step) may return other data."""
    table, header, step, data = parts(file)
    changed = change(table, header, step)
    data = data if changed is None else changed
    if isinstance(table.get("__metadata__"), dict):
        table["__metadata__"] |= {"header": json.dumps(header), "step": json.dumps(step)}
    head = json.dumps(table).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + data)


def _entry(**values):
    return lambda table, header, step: table["p0.logits"].update(values)


def _step(**values):
    return lambda table, header, step: step.update(values)


def _header(**values):
    return lambda table, header, step: header.update(values)


def _pass(**values):
    return lambda table, header, step: step["passes"][0].update(values)


def _rename(name):
    def change(table, header, step):
        table[name] = table.pop("p0.logits")

    return change


STRANGE = [
    pytest.param(_entry(shape=[10**6, 10**6]), "needs 4000000000000 bytes, the file holds 800", id="10^12-elements"),
    pytest.param(_entry(shape=[2**62, 2**62, 2**62]), "bytes, the file holds 800", id="overflow"),
    pytest.param(_entry(shape=[-4, -50]), "expected at most 8 numbers of at least 0", id="negative-shape"),
    pytest.param(_entry(shape=[4, True]), "expected at most 8 numbers", id="truth-value"),
    pytest.param(_entry(shape=[4, 50.0]), "expected at most 8 numbers", id="fraction"),
    pytest.param(_entry(shape=[1] * 9), "expected at most 8 numbers", id="many-axes"),
    pytest.param(_entry(dtype="F8_E4M3"), "dtype 'F8_E4M3', expected one of F64", id="dtype"),
    pytest.param(_entry(dtype=["F32"]), "expected one of F64", id="dtype-list"),
    pytest.param(_entry(data_offsets=[0, 10**15]), "expected two within", id="offsets-beyond"),
    pytest.param(_entry(data_offsets=[800, 0]), "expected two within", id="offsets-reversed"),
    pytest.param(_rename("../../etc/passwd"), "belongs to none of 3 passes", id="path"),
    pytest.param(_rename("p7.logits"), "belongs to none of 3 passes", id="no-such-pass"),
    pytest.param(_rename("p0.pickle"), "belongs to none of 3 passes", id="unknown-array"),
    pytest.param(_rename("p1.top_ids"), "holds mask, top_ids, expected|logits, mask|expected logits", id="no-logits"),
    pytest.param(lambda t, h, s: t.update(__metadata__={"format": "other/1"}), "format 'other/1'", id="format"),
    pytest.param(lambda t, h, s: t.pop("__metadata__") and None, "no __metadata__", id="no-metadata"),
    pytest.param(_header(vocab_size=51), r"expected floats \[rows, 51\]", id="vocabulary"),
    pytest.param(_header(vocab_size="50"), "vocab_size '50'", id="vocabulary-text"),
    pytest.param(_header(dtype="float8"), "dtype 'float8'", id="dtype-name"),
    pytest.param(_header(engine=None), "engine None", id="engine"),
    pytest.param(_header(layers=[["x", [[["conv", 10**9]]]]]), r"layers\[0\]", id="layers"),
    pytest.param(_header(layers="all"), "layers", id="layers-text"),
    pytest.param(_header(layers=[["x", 1]]), r"layers\[0\]", id="layers-number"),
    pytest.param(_header(layers=[["x", [1]]]), r"layers\[0\]", id="layers-branch"),
    pytest.param(_step(prompt_tokens="abc"), "prompt_tokens 'abc', expected a list", id="prompt-text"),
    pytest.param(_step(prompt_tokens=[1, None]), "token 1 is None, expected a token id", id="prompt-null"),
    pytest.param(_step(prompt_tokens=[10**30]), "expected a token id in 0..49", id="prompt-huge"),
    pytest.param(_step(tree=[1]), "expected an object with 'tokens' and 'parents'", id="tree"),
    pytest.param(_step(tree={"tokens": [None, 2], "parents": [-1, 0]}), "tokens: token 0 is None", id="root-null"),
    pytest.param(_step(passes={}), "passes {}, expected a list", id="passes"),
    pytest.param(_step(passes=[1, 2, 3]), "mode 1, expected one of", id="pass-number"),
    pytest.param(_step(id=7), "id 7", id="id"),
    pytest.param(_step(accepted=[0, 99]), "accepted", id="accepted"),
    pytest.param(_step(bonus=-1), "bonus", id="bonus"),
    pytest.param(_step(source=[]), "source", id="source"),
    pytest.param(_pass(mode=["ar"]), "mode", id="mode-list"),
    pytest.param(_pass(nodes=[0, 1, 2, 3, 4]), "5 nodes for 4 stored rows", id="nodes"),
    pytest.param(_pass(width=10**40), "width", id="width"),
    pytest.param(_pass(wiring=3), "wiring", id="wiring"),
    pytest.param(_pass(positions=[1]), "1 positions for 4 stored rows", id="positions"),
    pytest.param(lambda t, h, s: b"", "expected two within the 0 bytes", id="no-data"),
    pytest.param(lambda t, h, s: bytes(10**5), "cut or grown", id="more-data"),
]


@pytest.mark.parametrize(("change", "message"), STRANGE)
def test_a_strange_file_is_refused_in_one_line_before_memory_is_taken(tmp_path, change, message):
    (file,) = write(tmp_path / "t").iterdir()
    rewrite(file, change)
    with pytest.raises(UsageError, match=message) as refused:
        read_trace(tmp_path / "t")
    assert str(file) in str(refused.value) and len(str(refused.value).splitlines()) == 1


def _raw(text: bytes, size: int | None = None):
    return (len(text) if size is None else size).to_bytes(8, "little") + text


BYTES = [
    pytest.param(b"", "0 bytes", id="empty"),
    pytest.param(b"\x80\x04\x95pickle", "expected a whole safetensors file", id="pickle"),
    pytest.param(_raw(b"{}", 2**63), "expected a whole safetensors file", id="header-beyond-the-file"),
    pytest.param(_raw(b"[]"), r"got \[\], expected a JSON object", id="list"),
    pytest.param(_raw(b'{"a": NaN}'), "a number is NaN, expected JSON", id="nan"),
    pytest.param(_raw(b'{"a": 1e999}'), "a number is 1e999, expected JSON", id="beyond-any-float"),
    pytest.param(_raw(b'{"a": 1, "a": 2}'), "a key stands twice", id="key-twice"),
    pytest.param(_raw(b"\xff\xfe"), "not UTF-8", id="not-text"),
    pytest.param(_raw(b'{"__metadata__": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), "lists within lists|expected JSON",
                 id="deep"),
    pytest.param(_raw(b'{"a": ' + b"9" * 10**5 + b"}"), "expected JSON|cannot|limit", id="long-number"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BYTES)
def test_what_is_no_safetensors_file_is_refused(tmp_path, data, message):
    file = tmp_path / "t.safetensors"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=message) as refused:
        read_trace(file)
    assert len(str(refused.value).splitlines()) == 1


def test_a_trace_does_not_lead_out_of_its_folder(tmp_path):
    (file,) = write(tmp_path / "elsewhere").iterdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "000000.safetensors").symlink_to(file)
    with pytest.raises(UsageError, match="a link, expected a file"):
        read_trace(tmp_path / "t")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(UsageError, match="not a regular file"):
        read_trace(tmp_path / "pipe.safetensors")
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "nothing")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"no \*.safetensors in it"):
        read_trace(tmp_path / "none")


def test_steps_of_one_trace_have_ids_of_their_own_and_one_header(tmp_path):
    folder = write(tmp_path / "t", steps=2)
    _, second = sorted(folder.iterdir())
    rewrite(second, _step(id="s0"))
    with pytest.raises(UsageError, match="step id 's0' is that of 000000"):
        read_trace(folder)
    rewrite(second, _step(id="s1"))
    assert len(read_trace(folder).steps) == 2
    rewrite(second, _header(model="other"))
    with pytest.raises(UsageError, match="model 'other' and in the first file 'm'"):
        read_trace(folder)


def test_a_file_that_shrinks_after_it_was_checked_is_said_to(tmp_path):
    (file,) = write(tmp_path / "t").iterdir()
    (step,) = read_trace(file).steps
    with file.open("r+b") as held:
        held.truncate(file.stat().st_size - 2000)
    with pytest.raises(UsageError, match="ended early"):
        [one.arrays["logits"].read() for one in step.passes]


def _spoilt(rng, data: bytes) -> bytes:
    """The file with something changed: bytes, its length, a value of its JSON."""
    kind, spoilt = rng.integers(4), bytearray(data)
    size = int.from_bytes(data[:8], "little")
    if kind == 0:  # bytes of the header
        for _ in range(rng.integers(1, 6)):
            spoilt[rng.integers(8 + size)] = rng.integers(256)
        return bytes(spoilt)
    if kind == 1:
        return data[: rng.integers(len(data))]
    if kind == 2:  # digits and letters of the JSON, which then still parses now and then
        for _ in range(rng.integers(1, 4)):
            at = 8 + int(rng.integers(size))
            spoilt[at] = rng.choice(list(b'0123456789-eE.[]{}:,"ntp'))
        return bytes(spoilt)
    table = json.loads(data[8 : 8 + size])
    for name in ("header", "step"):
        held = json.loads(table["__metadata__"][name])
        _poke(rng, held)
        table["__metadata__"][name] = json.dumps(held)
    head = json.dumps(table).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


ODD = (None, True, -1, 0, 1, 2**31, 10**20, 1.5, "", "x", [], [[]], {}, [0, 0], ["a"], {"a": 1}, "\ud800")


def _poke(rng, value) -> None:
    """One value somewhere within, replaced by an odd one, taken out or put in twice."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = keys[rng.integers(len(keys))]
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.7:
            value = value[key]
            continue
        action = rng.integers(3)
        if action == 0:
            value[key] = ODD[rng.integers(len(ODD))]
        elif action == 1:
            del value[key]
        elif isinstance(value, list):
            value.insert(key, value[key])
        return


@pytest.mark.parametrize("seed", range(2))
def test_spoilt_files_are_read_or_refused_and_nothing_else(tmp_path, seed):
    rng = np.random.default_rng(seed)
    (source,) = write(tmp_path / "t", layers=[["x", [[["conv", 4], ["state", "s"]]]]]).iterdir()
    data, file, read = source.read_bytes(), tmp_path / "spoilt.safetensors", 0
    for _ in range(400):
        file.write_bytes(_spoilt(rng, data))
        try:
            engine = TraceEngine.load(file)
            for step in engine.trace.steps:
                for mode in ("ar", "tree_forked", "linear"):
                    engine.rows(step, mode)
            read += 1
        except UsageError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 500
        try:
            lint(file)
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
    assert 0 < read < 400  # both ends are reached
