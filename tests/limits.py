"""Bounds of time and memory around a piece of work."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def within(*, seconds: float, mebibytes: int) -> Iterator[None]:
    """Raise TimeoutError or MemoryError in work that takes longer, or that maps so much more than it found."""

    def late(*_):
        raise TimeoutError(f"longer than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (mebibytes << 20), before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
