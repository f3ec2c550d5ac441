"""Work shared by forked processes: the same results in the same order, the same errors, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.base.forked_pool import apart
from ddtree_check.flows.check import Item, Settings, check
from ddtree_check.flows.job import processes
from ddtree_check.model.wiring import UNFORKED
from ddtree_check.selftest.inject import Faulty
from tests.models import prompt, small

ITEMS = [Item(name, prompt(length)) for name, length in (("a", 5), ("b", 9), ("c", 7))]
SETTINGS = Settings(budgets=(6,), length=4, draft="self")


def test_results_come_in_order_from_other_processes():
    found = list(apart(lambda item: (item, os.getpid()), range(6), 2))
    assert [item for item, _ in found] == list(range(6))
    assert os.getpid() not in {process for _, process in found}
    assert not multiprocessing.active_children()


def test_what_the_work_raises_is_raised_here_and_leaves_nothing():
    def work(item):
        if item == 1:
            raise UsageError("prompt 1: no")
        return item

    with pytest.raises(UsageError, match="prompt 1: no"):
        list(apart(work, range(4), 2))
    assert not multiprocessing.active_children()
    assert list(apart(str, range(2), 2)) == ["0", "1"]  # and the next work is free to start


def test_a_worker_that_is_killed_is_one_line():
    with pytest.raises(UsageError, match=r"worker: one of 2 processes was killed, .* OMP_NUM_THREADS=1"):
        list(apart(lambda item: os.kill(os.getpid(), signal.SIGKILL), range(2), 2))
    assert list(apart(str, range(2), 2)) == ["0", "1"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


KILLED = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from ddtree_check.base.forked_pool import apart
def work(item):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece
    time.sleep(60)
list(apart(work, range(2), 2))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_no_worker(how):
    run = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    workers = [int(run.stdout.readline()) for _ in range(2)]
    run.send_signal(how)
    deadline = time.monotonic() + 10
    while (run.poll() is None or any(map(alive, workers))) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left and run.poll() is not None


@pytest.mark.parametrize("fault", [{}, {"forked": UNFORKED}], ids=["right", "forked-is-not"])
def test_a_record_does_not_tell_how_many_processes_made_it(fault):
    steps = []
    host = Faulty(small(), **fault)
    alone = check(host, ITEMS, SETTINGS)
    shared = check(host, ITEMS, SETTINGS, workers=2, progress=lambda *step: steps.append(step))
    assert alone["exit_code"] == (1 if fault else 0)
    assert {**shared, "created": None} == {**alone, "created": None}
    assert [step[0] for step in steps] == [0, 1, 2, 3] and steps[0][2] == "a" and steps[-1][2] == "done"


def test_who_chose_threads_gets_no_processes(monkeypatch):
    small, big, cpu = {"parameters": 1000}, {"parameters": 10**10}, {"device": "cpu"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert processes(small, cpu) == 2
    assert processes(big, cpu) == processes({}, cpu) == processes(small, {"device": "cuda:0"}) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert processes(small, cpu) == 1
