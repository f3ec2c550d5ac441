"""The same work on many items, in processes that are forked from this one and so share what it holds, unread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_work: Callable[[Any], Any] | None = None  # what the processes find when they are forked: a model is not sent about


def apart(work: Callable[[Any], Any], items: Sequence, workers: int) -> Iterator:
    """`work` of each item, in order; items and results are pickled, `work` is not. What it raises is raised here.

    Only for work without threads or an accelerator of its own, which a forked process does not inherit.
    """
    global _work
    if _work is not None:
        raise RuntimeError("apart: one piece of work at a time")
    _work = work
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            try:
                yield from pool.map(_one, items)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        _work = None


def _one(item):
    return _work(item)
