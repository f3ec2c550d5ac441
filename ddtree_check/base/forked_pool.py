"""The same work on many items, in processes that are forked from this one and so share what it holds, unread."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from .errors import UsageError

_work: Callable[[Any], Any] | None = None  # what the processes find when they are forked: a model is not sent about


def apart(work: Callable[[Any], Any], items: Sequence, workers: int) -> Iterator:
    """Yield `work` of each item, in order; items and results are pickled, `work` is not. What it raises is raised here.

    Only for work without threads or an accelerator of its own, which a forked process does not inherit.
    """
    global _work
    if _work is not None:
        raise RuntimeError("apart: one piece of work at a time")
    _work = work
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, context, _end_with, (os.getpid(),)) as pool:
            try:
                yield from pool.map(_one, items)
            except BaseException:
                for worker in multiprocessing.active_children():
                    worker.kill()  # nobody waits for what they are at
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool:
        raise UsageError(
            f"worker: one of {workers} processes was killed, perhaps for want of memory; expected all to end; "
            "run in one process with OMP_NUM_THREADS=1"
        ) from None
    finally:
        _work = None


def _one(item):
    return _work(item)


def _end_with(parent: int) -> None:
    """Let this process end within a second of its parent, however that ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
