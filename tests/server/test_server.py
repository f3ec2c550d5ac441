"""Two servers behind their API: what is called a divergence, what a tie, and what a bad server leads to."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import threading
import time

import numpy as np
import pytest

from ddtree_check.base.errors import Unsupported, UsageError
from ddtree_check.cli import main as cli
from ddtree_check.flows import check
from ddtree_check.flows.drafting import stand_in
from ddtree_check.model.wiring import FORKED, UNFORKED
from ddtree_check.report.views import render
from ddtree_check.server.api import Api, Failed, clean_url
from ddtree_check.server.judge import Rule, conclude, verdict
from ddtree_check.server.run import Settings, run_servers
from ddtree_check.tree.accept import greedy_walk
from ddtree_check.tree.case import Prompt
from ddtree_check.tree.drafts.best_first import best_first
from tests.toy_server import Toy, dripping, serving

PROMPTS = [Prompt(f"p{n}", f"hello {'abc'[n % 3] * n}d") for n in range(4)]
SETTINGS = Settings(tokens=20)


def run(server: Toy, reference: Toy | None = None, settings: Settings = SETTINGS, prompts=PROMPTS, **more):
    options = {"retries": 1, "timeout": 5.0, "sleep": lambda _: None} | more.pop("api", {})
    with serving(server) as ours, serving(reference or Toy()) as theirs:
        apis = Api("base-url", ours, **options), Api("reference-url", theirs, **options)
        try:
            return run_servers(*apis, prompts, settings, **more)
        finally:
            for api in apis:
                api.close()


# --- what is judged ---------------------------------------------------------------------------------------------------


def test_equal_servers_pass():
    record = run(Toy(noise=1e-2), Toy(noise=1e-2))
    assert record["exit_code"] == 0 and record["verdict"]["reasons"] == []
    assert record["coverage"]["compared"] == record["coverage"]["tokens"] == 160
    assert 0 < record["band"]["largest"] <= 2e-2  # a token's noise and that of the row's sum
    assert record["coverage"]["control"] > 0
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("force", ["echo", "steps"])
def test_a_wrong_accept_is_a_flip_at_its_place(force):
    """The second likeliest token emitted, its log-probability told rightly."""
    record = run(Toy(wrong={5: 1}), settings=Settings(tokens=12, force=force))
    assert record["exit_code"] == 1
    found = {
        (place, position["verdict"])
        for prompt in record["prompts"]
        for one in prompt["runs"]
        for place, position in enumerate(one["positions"])
        if position["verdict"] != "pass"
    }
    assert found == {(5, "flip")}
    assert {one["first"] for prompt in record["prompts"] for one in prompt["runs"]} == {5}


def test_a_leak_that_keeps_the_tokens_is_seen():
    record = run(Toy(leak=(8, 0.02)))
    verdicts = [p["verdict"] for prompt in record["prompts"] for one in prompt["runs"] for p in one["positions"][:8]]
    assert record["exit_code"] == 1 and record["counts"]["leak"] > 50 and set(verdicts) == {"pass"}


def test_a_leak_below_the_bound_of_a_token_is_seen_in_the_median():
    """Ten large differences of the reference to itself hide every token, and not half of them."""
    position = {"token": "a", "chosen": "a", "delta": 0.05, "regret": 0.0, "margin": 1.0, "cut": False}
    one = {"tokens": 40, "same_text": True, "first": None, "positions": [position] * 40, "ending": None}
    prompt = measured([one], own=[1e-4] * 30 + [0.02] * 10)
    found = conclude([prompt], Rule())
    assert found["counts"]["pass"] == 40 and found["exit_code"] == 1
    assert "half of all tokens are off by 0.05 nats" in found["verdict"]["reasons"][0]
    quiet = one | {"positions": [position | {"delta": 3e-4}] * 40}
    assert conclude([prompt | {"runs": [quiet]}], Rule())["exit_code"] == 0


def measured(runs, own, changed=0):
    """A prompt as `run.measure` leaves it; changed: the reference's own tokens of 40 that are not its first."""
    counts = {"reference": changed, "tokens": 40}
    return {"id": "p", "reason": None, "own": own, "changed": counts, "control": [1e-4], "runs": runs}


def test_one_number_of_the_reference_that_is_far_off_hides_no_flip():
    flip = {"token": "b", "chosen": "a", "delta": 1e-4, "regret": 1.0, "margin": 1.0, "cut": False}
    one = {"tokens": 40, "same_text": False, "first": 0, "positions": [flip] * 40, "ending": None}
    found = conclude([measured([one], [1e-4] * 199 + [0.9])], Rule())
    assert found["exit_code"] == 1 and found["counts"]["flip"] == 40 and found["band"]["largest"] == 0.9
    stray = one | {"positions": [flip | {"regret": 0.0}] * 39 + [flip]}  # as often as the reference strays from itself
    assert conclude([measured([stray], [1e-4] * 199 + [0.9])], Rule())["exit_code"] == 2
    assert conclude([measured([stray], [1e-4] * 200)], Rule())["exit_code"] == 1


def test_ties_are_held_against_those_of_the_reference():
    """The second of two near tokens, each time, is no noise where the reference takes the first each time."""
    tie = {"token": "b", "chosen": "a", "delta": 0.01, "regret": 0.05, "margin": 0.06, "cut": False}
    one = {"tokens": 40, "same_text": False, "first": 0, "positions": [tie] * 40, "ending": None}
    found = conclude([measured([one, one], [0.01] * 40)], Rule())
    assert found["counts"]["tie"] == 80 and found["ties"]["server"] == 40 and found["exit_code"] == 2
    assert "40 ties in 40 tokens, where the reference itself has 0 in 40" in found["verdict"]["reasons"][0]
    assert conclude([measured([one, one], [0.01] * 40, changed=35)], Rule())["exit_code"] == 0


def test_noise_in_which_a_wrong_token_is_a_tie_leaves_nothing_to_judge():
    noisy = {"noise": 0.8}
    record = run(Toy(**noisy, wrong=dict.fromkeys(range(20), 1)), Toy(**noisy))
    assert record["exit_code"] == 2 and "exceeds the reference's median margin" in record["verdict"]["reasons"][0]
    assert run(Toy(noise=1e-3, wrong=dict.fromkeys(range(20), 1)), Toy(noise=1e-3))["exit_code"] == 1


def test_a_near_tie_that_goes_the_other_way_is_a_tie():
    """Exactly equal but for noise: the server decodes as the reference scores."""
    reference, server = Toy(noise=1e-2, near_tie="d"), Toy(noise=1e-2, near_tie="d", wrong={0: 1})
    record = run(server, reference)
    first = [one["positions"][0]["verdict"] for prompt in record["prompts"] for one in prompt["runs"]]
    assert set(first) <= {"tie", "pass"} and "tie" in first
    assert record["counts"]["flip"] == record["counts"]["leak"] == 0 and record["exit_code"] == 0
    assert run(Toy(noise=1e-2, wrong={0: 1}), Toy(noise=1e-2))["exit_code"] == 1  # the twin: no near tie there


def test_an_early_end_is_a_flip():
    record = run(Toy(ends_at=6))
    endings = [one["ending"] for prompt in record["prompts"] for one in prompt["runs"]]
    assert record["exit_code"] == 1 and {ending["verdict"] for ending in endings} == {"flip"}
    assert "end of text" in render(record)
    both = run(Toy(ends_at=6), Toy(ends_at=6))
    assert both["exit_code"] == 0 and both["coverage"]["tokens"] == 48


def test_another_model_is_no_divergence():
    record = run(Toy(seed=1))
    assert record["exit_code"] == 2 and "where nothing is speculated" in record["verdict"]["reasons"][0]


def test_text_that_is_cut_into_other_tokens_is_left_out():
    record = run(Toy(pairs=True), Toy(pairs=True), Settings(tokens=30, repeats=1))
    seen = record["coverage"]
    assert record["exit_code"] == 0 and 0 < seen["compared"] < seen["tokens"]
    stepped = run(Toy(pairs=True), Toy(pairs=True), Settings(tokens=30, repeats=1, force="steps"))
    assert stepped["exit_code"] == 0  # a token later: it is what follows the pair that has another context
    assert seen["compared"] < stepped["coverage"]["compared"] < seen["tokens"]


def test_a_reference_that_differs_from_itself_leaves_nothing_to_judge():
    record = run(Toy(), Toy(leak=(0, 8.0)))
    assert record["exit_code"] == 2 and "the reference differs from itself" in record["verdict"]["reasons"][0]


def test_without_echo_the_reference_scores_step_by_step():
    server, reference = Toy(echo=False), Toy(echo=False)
    record = run(server, reference, Settings(tokens=6))
    assert record["exit_code"] == 0 and record["coverage"]["compared"] == 48 and record["coverage"]["control"] == 0
    assert "none was run (no echo)" in render(record)
    with pytest.raises(Unsupported, match="echo is not supported"):
        run(Toy(), Toy(echo=False), Settings(tokens=6, force="echo"))


def test_nan_and_nothing_are_never_within():
    good = {"delta": 0.1, "regret": 0.0}
    assert verdict(good, 0.2) == "pass" and verdict(good | {"regret": 0.3}, 0.2) == "tie"
    assert verdict(good | {"delta": math.nan}, 0.2) == "leak" and verdict(good | {"delta": None}, 0.2) == "leak"
    assert verdict(good | {"regret": math.nan}, 0.2) == "leak" and verdict(good | {"regret": 0.5}, 0.2) == "flip"


# --- servers that misbehave -------------------------------------------------------------------------------------------

FAULTS = [
    pytest.param((500, b"no"), "status 500", id="500"),
    pytest.param((429, b"later"), "status 429", id="429"),
    pytest.param((200, b"<html>"), "an answer that cannot be used .JSONDecodeError", id="garbage"),
    pytest.param((200, b"{}"), "an answer that cannot be used .KeyError", id="empty-object"),
    pytest.param((200, b"[" * 100_000), "an answer that cannot be used .RecursionError", id="nested"),
    pytest.param(
        (200, b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": []}}]}'),
        "1 tokens, 0 logprobs",
        id="lengths",
    ),
    pytest.param(
        (200, b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [NaN]}}]}'),
        "log-probability nan, expected a number of at most 0",
        id="nan",
    ),
    pytest.param("truncated", "RemoteProtocolError", id="truncated"),
    pytest.param(1.0, "no whole answer within 0.3 s", id="slow"),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS)
def test_a_server_that_stays_bad_is_not_run(fault, said):
    with serving(Toy(fail=lambda _: fault)) as url:
        api = Api("base-url", url, model="toy", timeout=0.3, retries=1, sleep=lambda _: None)
        with pytest.raises(Failed, match=f"{said}.*, 2 times"):
            api.complete("hello", 4, 5)
        api.close()


def test_one_that_recovers_is_asked_again():
    pauses = []
    faults = {1: (500, b""), 2: (200, b"{"), 4: "truncated", 7: (503, b"")}
    server = Toy(fail=faults.get)
    record = run(server, api={"retries": 3, "sleep": pauses.append}, concurrency=1)
    assert record["exit_code"] == 0 and len(pauses) == 4 and server.requests == 3 * 4 + 4
    assert all(0.25 <= pause <= 1.0 for pause in pauses)


def test_pauses_grow_up_to_a_limit():
    pauses = []
    with serving(Toy(fail=lambda _: (500, b""))) as url:
        api = Api("base-url", url, model="toy", retries=9, sleep=pauses.append)
        with pytest.raises(Failed, match="10 times"):
            api.complete("a", 1, 2)
        api.close()
    assert len(pauses) == 9 and pauses[0] <= 0.5 < 8 <= pauses[5] <= 16 and max(pauses) <= 30


def test_a_prompt_that_fails_leaves_the_run_inconclusive_and_a_defect_red():
    """Everything after the 9th request fails: some prompts were run, some not."""
    bad = lambda number: (500, b"") if number > 9 else None  # noqa: E731
    record = run(Toy(fail=bad), concurrency=1)
    assert record["coverage"]["prompts"] == 3 and record["coverage"]["not_run"] == 1 and record["exit_code"] == 2
    assert "p3: not_run: http://" in record["verdict"]["reasons"][-1] and "not_run" in render(record)
    assert run(Toy(fail=bad, wrong={5: 1}), concurrency=1)["exit_code"] == 1
    assert run(Toy(fail=lambda _: (500, b"")))["exit_code"] == 2


def test_concurrency_is_bounded():
    many = [Prompt(f"p{n}", f"hello {n}".replace("1", "a")) for n in range(8)]
    slow = lambda _: 0.02  # noqa: E731
    for most in (1, 3):
        server = Toy(fail=slow)
        run(server, settings=Settings(tokens=2, repeats=1), prompts=many, concurrency=most)
        assert server.most_at_once <= most and (most == 1 or server.most_at_once > 1)


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_after_its_finished_prompts(tmp_path):
    path = str(tmp_path / "run.jsonl")
    server, reference = Toy(), Toy()
    options = {"model": "toy", "retries": 0, "sleep": lambda _: None}
    with serving(server) as ours, serving(reference) as theirs:
        apis = Api("base-url", ours, **options), Api("reference-url", theirs, **options)
        whole = run_servers(*apis, PROMPTS, SETTINGS, journal=path, concurrency=1)
        data = (tmp_path / "run.jsonl").read_bytes()
        lines = data.splitlines(keepends=True)
        assert len(lines) == 5
        (tmp_path / "run.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:30])
        before = server.requests
        again = run_servers(*apis, PROMPTS, SETTINGS, journal=path, concurrency=1)
        assert server.requests - before == 6 and (tmp_path / "run.jsonl").read_bytes() == data  # two prompts, 3 each
        assert again | {"created": 0} == whole | {"created": 0}
        changed = [Prompt("p0", "other text"), *PROMPTS[1:]]
        before = server.requests
        run_servers(*apis, changed, SETTINGS, journal=path)
        assert server.requests - before == 3
        with pytest.raises(UsageError, match="belongs to a run with other settings"):
            run_servers(*apis, PROMPTS, Settings(tokens=21), journal=path)
        for api in apis:
            api.close()


@pytest.mark.parametrize(
    "change", [{"id": 3}, {"own": [None, "a"]}, {"runs": 3}, {"runs": [{}]}, {"reason": None, "changed": {}}], ids=str
)
def test_an_odd_line_of_a_journal_is_named(change, tmp_path):
    path = tmp_path / "run.jsonl"
    run(Toy(), journal=str(path), concurrency=1)
    lines = path.read_text().splitlines()
    where = json.loads(lines[0])["servers"]
    path.write_text("\n".join([lines[0], json.dumps(json.loads(lines[1]) | change), *lines[2:]]) + "\n")
    with serving(Toy()) as ours, serving(Toy()) as theirs:
        path.write_text(path.read_text().replace(where["base_url"], f"{ours}/v1"))
        path.write_text(path.read_text().replace(where["reference_url"], f"{theirs}/v1"))
        apis = [Api(name, url, retries=0) for name, url in (("base-url", ours), ("reference-url", theirs))]
        with pytest.raises(UsageError, match=r"run.jsonl:2: no finished line of this run \("):
            run_servers(*apis, PROMPTS, SETTINGS, journal=str(path))
        for api in apis:
            api.close()


def test_what_was_not_run_is_asked_for_again(tmp_path):
    server = Toy(fail=lambda number: (500, b"") if number <= 2 else None)
    options = {"model": "toy", "retries": 0, "sleep": lambda _: None}
    with serving(server) as ours, serving(Toy()) as theirs:
        apis = Api("base-url", ours, **options), Api("reference-url", theirs, **options)
        path = str(tmp_path / "run.jsonl")
        assert run_servers(*apis, PROMPTS, SETTINGS, journal=path, concurrency=1)["exit_code"] == 2
        assert run_servers(*apis, PROMPTS, SETTINGS, journal=path, concurrency=1)["exit_code"] == 0
        for api in apis:
            api.close()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "text": p.text}) + "\n" for p in PROMPTS))
    return str(path)


def test_the_command_line(prompts, tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    for toy, code in ((Toy(), 0), (Toy(wrong={5: 1}), 1)):
        with serving(toy) as ours, serving(Toy()) as theirs:
            line = ["server", "--base-url", ours, "--reference-url", theirs, "--prompts", prompts, "--tokens", "12"]
            assert cli.main([*line, "--json", str(path)]) == code
        out = capsys.readouterr().out
        assert f"exit code {code}" in out.splitlines()[-1] and "Cannot be seen from here" in out
        record = json.loads(path.read_text())
        assert record["exit_code"] == code and record["command"].startswith("ddtree-check server --base-url http://")
    assert "parts at 5" in out and "reference → server" in out
    assert cli.main(["show", str(path)]) == 0 and capsys.readouterr().out == out
    assert (
        cli.main(["show", str(path), "--format", "csv"]) == 3 and "got csv, expected table" in capsys.readouterr().err
    )
    path.write_text(json.dumps({"schema": record["schema"], "prompts": 3}))
    assert cli.main(["show", str(path)]) == 3 and "environment is nothing" in capsys.readouterr().err


BAD = [
    ("--base-url nowhere", "base-url: got 'nowhere', expected an address such as"),
    ("--base-url http://me:secret@host", "holds a name or password; expected --api-key-env"),
    ("--base-url http://127.0.0.1:1 --retries 0", "base-url: http://127.0.0.1:1/v1/models: ConnectError"),
    ("--base-url {reference}/v1", "reference-url: got .* twice, expected the same model without"),
    ("--tokens 0", "tokens: got 0, expected a number of at least 1"),
    ("--top 1", "top: got 1, expected at least 2"),
    ("--concurrency 0", "concurrency: got 0"),
    ("--timeout 0", "timeout: got 0, expected seconds"),
    ("--retries -1", "retries: got -1"),
    ("--force maybe", "force: got 'maybe', expected one of auto, echo, steps"),
    ("--model gpt", "has no model 'gpt', expected one of toy"),
    ("--api-key-env NOT_SET_HERE", "api-key-env: NOT_SET_HERE is not set"),
    ("--prompts none.jsonl", "none.jsonl: No such file"),
]


@pytest.mark.parametrize(
    ("words", "said"), BAD, ids=[words.split()[0][2:] + str(n) for n, (words, _) in enumerate(BAD)]
)
def test_bad_input_is_one_line(words, said, prompts, capsys):
    with serving(Toy()) as ours, serving(Toy()) as theirs:
        given = words.format(reference=theirs).split()
        line = {"--base-url": ours, "--reference-url": theirs, "--prompts": prompts}
        line |= dict(zip(given[::2], given[1::2], strict=True))
        code = cli.main(["server", *(word for pair in line.items() for word in pair)])
    error = capsys.readouterr().err
    assert code == 3 and error.count("\n") == 1
    assert re.search(said, error), error


def test_a_key_is_sent_and_shown_nowhere(prompts, capsys, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "secret-key")
    with serving(Toy(fail=lambda _: (401, b"no secret-key"))) as ours, serving(Toy()) as theirs:
        line = ["server", "--base-url", ours, "--reference-url", theirs, "--prompts", prompts]
        assert cli.main([*line, "--api-key-env", "TOY_KEY"]) == 3
    error = capsys.readouterr().err
    assert "status 401: no ***" in error and "secret-key" not in error
    assert (
        clean_url("x", "http://host:1/v1/") == "http://host:1/v1"
        and clean_url("x", "https://h/api") == "https://h/api/v1"
    )


DRIPS = {
    "body": ("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", " "),
    "headers": ("HTTP/1.1 200 OK\r\n", "x-a: b\r\n"),
    "one-header": ("HTTP/1.1 200 OK\r\nx-a: ", "b"),
    "hints": ("", "HTTP/1.1 103 Early Hints\r\n\r\n"),
    "chunk-extensions": ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;", "x"),
    "chunks": ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "1\r\n \r\n"),
    "silence": ("", ""),
}


@pytest.mark.parametrize("key", ["secret-key", 'sec"ret\\key'])
def test_a_key_that_comes_back_is_hidden(key, prompts, tmp_path, capsys, monkeypatch):
    """A proxy that shows the header: as an error, in broken JSON, and as a text that escapes it."""
    monkeypatch.setenv("TOY_KEY", key)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    scores = (
        f'{{"tokens": ["{escaped}"], "token_logprobs": [-0.1], "top_logprobs": [{{{json.dumps(key)}: -0.1, "b": -3}}]}}'
    )
    whole = f'{{"choices": [{{"text": "{escaped}", "logprobs": {scores}, "finish_reason": "length"}}]}}'.encode()
    bad = {1: (500, key.encode()), 2: (200, f'["{key}"'.encode()), 3: (200, json.dumps({key: 1}).encode())}
    record, journal = tmp_path / "run.json", tmp_path / "journal.jsonl"
    with serving(Toy(fail=lambda number: bad.get(number, (200, whole)))) as ours, serving(Toy()) as theirs:
        urls = [f"{ours}/?api-key={key}", f"{theirs}/v1#{key}"]
        line = ["server", "--base-url", urls[0], "--reference-url", urls[1], "--prompts", prompts, "--tokens", "4"]
        line += ["--json", str(record), "--journal", str(journal), "--api-key-env", "TOY_KEY", "--retries", "1"]
        assert cli.main([*line, "--force", "steps", "--concurrency", "1"]) in (1, 2)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, record.read_text(), journal.read_text()):
        assert key not in text and json.dumps(key)[1:-1] not in text
    assert "***" in record.read_text() and "***" in shown.out


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a b", "a\x00"])
def test_a_key_that_no_header_can_hold_is_refused_unseen(key, prompts, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"TOY_KEY": key})
    line = ["server", "--base-url", "http://127.0.0.1:1", "--reference-url", "http://127.0.0.1:2"]
    assert cli.main([*line, "--prompts", prompts, "--api-key-env", "TOY_KEY", "--retries", "0"]) == 3
    error = capsys.readouterr().err
    assert "expected printable ASCII" in error and key not in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://me:s3cret@host",
        "http://[bad?s3cret",
        "http://h:99999/?k=s3cret",
        "nowhere?k=s3cret",
        "http://h\n/#s3cret",
    ],
)
def test_an_address_that_cannot_be_used_is_shown_without_its_secrets(url):
    with pytest.raises(UsageError, match="expected an address such as") as error:
        clean_url("base-url", url)
    assert "s3cret" not in str(error.value)


def test_a_model_that_is_no_text_is_one_line(prompts, capsys):
    toy = Toy(models=b'{"data": [{"id": 3}]}')
    with serving(toy) as ours, serving(Toy()) as theirs:
        line = ["server", "--base-url", ours, "--reference-url", theirs, "--prompts", prompts, "--retries", "0"]
        assert cli.main(line) == 3
    assert "model 3, expected a name" in capsys.readouterr().err


@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["at-once", "dripped"])
@pytest.mark.parametrize("kind", DRIPS)
def test_a_drip_is_stopped_in_time(kind, pause):
    with dripping(*map(str.encode, DRIPS[kind]), pause) as url:
        api = Api("base-url", url, model="toy", timeout=0.4, retries=0)
        began = time.monotonic()
        with pytest.raises(Failed):
            api.complete("a", 1, 2)
        assert time.monotonic() - began < 2
        api.close()


def test_a_compressed_answer_is_not_unpacked():
    bomb = gzip.compress(b" " * 2**24)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(bomb)}\r\n\r\n".encode()
    with dripping(head + bomb, b"", 0.1) as url:
        api = Api("base-url", url, model="toy", timeout=5.0, retries=0)
        with pytest.raises(Failed, match="in the encoding 'gzip', expected none"):
            api.complete("a", 1, 2)
        api.close()


def test_who_waits_is_let_go_when_the_run_is_closed():
    """A pause between two attempts, and a request that is under way."""
    for server in (Toy(fail=lambda _: (503, b"")), Toy(fail=lambda _: 5.0)):
        with serving(server) as url:
            api = Api("base-url", url, model="toy", retries=9)
            threading.Timer(0.5, api.close).start()
            began = time.monotonic()
            with pytest.raises(Failed):
                api.complete("a", 1, 2)
            assert time.monotonic() - began < 2


# --- a model behind both servers --------------------------------------------------------------------------------------


ONE = threading.Lock()  # both servers have one engine, which makes one pass at a time


class Speculating(Toy):
    """The embedded model; wiring: that of its tree verify, None for plain decoding."""

    def __init__(self, engine, tokenizer, wiring):
        super().__init__()
        self.engine, self.tokenizer, self.wiring = engine, tokenizer, wiring

    def complete(self, body):
        with ONE:
            return self._complete(body)

    def _complete(self, body):
        ids = self.tokenizer(body["prompt"])["input_ids"]
        found = self.speculate(ids, body["max_tokens"])
        emitted = [token for token, _ in found]
        if body.get("echo"):
            rows = self.engine.forward([ids], len(ids))[0]
            found = [(ids[0], None), *zip(ids[1:], rows[:-1], strict=True), *found]
        tokens, logprobs, tops = [], [], []
        for token, row in found:
            tokens.append(self.tokenizer.decode([token]))
            spread = None if row is None else row.double().log_softmax(-1)
            logprobs.append(None if row is None else float(spread[token]))
            best = [] if row is None else spread.topk(body["logprobs"]).indices.tolist()
            tops.append({self.tokenizer.decode([i]): float(spread[i]) for i in best} or None)
        text = (body["prompt"] if body.get("echo") else "") + self.tokenizer.decode(emitted)
        scores = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}
        choice = {"text": text, "finish_reason": "length", "logprobs": scores}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}

    def speculate(self, ids, count):
        """(token, logits that it was chosen by) of each emitted token."""
        prefix = self.engine.prefill(ids)
        found = [(int(prefix.logits.argmax()), prefix.logits)]
        while len(found) < count:
            root = found[-1][0]
            if self.wiring is None:
                logits, prefix = self.engine.step(prefix, root)
                found.append((int(logits.argmax()), logits))
                continue
            rows, ahead, token = [], prefix, root
            for _ in range(5):
                logits, ahead = self.engine.step(ahead, token)
                rows.append(logits.double().cpu().numpy())
                token = int(logits.argmax())
            table = stand_in(np.stack(rows), check.Settings(), "p", len(found))
            tree = best_first(table, 12, root=root)
            verified = self.engine.verify(prefix, tree, self.wiring)
            walk = greedy_walk(tree, verified.logits.argmax(-1).cpu().numpy())
            chosen = [*tree.path_tokens(walk.path[-1])[1:], walk.bonus]
            found += [(token, verified.logits[node]) for token, node in zip(chosen, walk.path, strict=True)]
            prefix = self.engine.commit(verified, walk.path[-1])
        return found[:count]


@pytest.mark.slow
def test_speculation_without_a_fork_is_seen_from_outside():
    """A forked tree verify passes and an unforked one is a divergence, with nothing but the API to go by."""
    from transformers import AutoTokenizer

    from ddtree_check.base.resources import EMBEDDED, fixtures_dir
    from ddtree_check.engines.transformers.engine import TransformersEngine

    engine = TransformersEngine.load(None, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(fixtures_dir() / "models" / EMBEDDED)
    prompts = [Prompt("a", "def running_median(values):\n"), Prompt("b", "import os\n\nclass Reader:\n")]
    settings = Settings(tokens=40, repeats=1)
    for wiring, code in ((FORKED, 0), (UNFORKED, 1)):
        server, reference = Speculating(engine, tokenizer, wiring), Speculating(engine, tokenizer, None)
        record = run(server, reference, settings, prompts, api={"timeout": 60.0})
        assert record["exit_code"] == code, (record["verdict"], record["band"], record["coverage"])
        assert record["coverage"]["compared"] > 40 and record["band"]["largest"] < 1e-3
        assert record["coverage"]["same_text"] == (2 if code == 0 else 0)
    print(record["band"], record["counts"])
