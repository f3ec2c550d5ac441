"""A tensor-parallel group of `Runner`s: rank 0 in this process, the others in their own, all told the same thing."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...base.errors import Unsupported, UsageError
from .runner import Runner, Start

JOIN = 10  # seconds that a rank gets to end by itself
ALONG = {"recurrent": 0}  # the dimension that ranks share a channel by; the last one for all others


class Group:
    """Calls a method of every rank's Runner; the result is rank 0's, or all ranks' for `gather`."""

    def __init__(self, start: Start, ranks: int = 1, *, loud: bool = False):
        if ranks > 1:
            start = replace(start, port=_free_port())
        context = multiprocessing.get_context("spawn")
        self._workers, self.dropped, self._closed = [], [], False
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, start, rank, loud), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))
        atexit.register(self.close)
        try:
            with contextlib.nullcontext() if loud else muted():
                self.runner = Runner(start, 0)
        except BaseException:
            self.close()
            raise
        self._answers("start")

    def call(self, name: str, *args) -> Any:
        self._order(name, args, False)
        result = getattr(self.runner, name)(*args)
        self._answers(name)
        return result

    def gather(self, name: str, *args) -> list[Any]:
        self._order(name, args, True)
        return [getattr(self.runner, name)(*args), *self._answers(name)]

    def drop(self, number: int) -> None:
        """Let go of a text or pass before the next call. Safe at any time, in the midst of a call too."""
        self.dropped.append(number)

    def _order(self, name: str, args: tuple, wanted: bool) -> None:
        dropped, self.dropped = self.dropped, []
        for _, pipe in self._workers:
            pipe.send((name, args, wanted, dropped))
        self.runner.drop(dropped)

    def _answers(self, name: str) -> list[Any]:
        values = []
        for rank, (_, pipe) in enumerate(self._workers, start=1):
            try:
                error, value = pipe.recv()
            except EOFError:
                raise UsageError(f"engine: rank {rank} of SGLang ended during {name}") from None
            if error is not None:
                raise error
            values.append(value)
        return values

    def close(self) -> None:
        """End the other ranks and SGLang's process groups; again does nothing."""
        atexit.unregister(self.close)
        for _, pipe in self._workers:
            with contextlib.suppress(OSError):
                pipe.send(None)
        self._workers, workers = [], self._workers
        if not self._closed:
            self._closed = True
            self.runner = None
            _leave()
        for worker, _ in workers:
            worker.join(JOIN)
            if worker.is_alive():
                worker.terminate()


def joined(parts: list[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """Return the contents of all ranks as those of one, where rank 0 has its own: each holds some of the heads."""
    if len(parts) == 1:
        return parts[0]
    return [
        {
            name: torch.cat([part[layer][name].to(mine.device) for part in parts], dim=ALONG.get(name, -1))
            for name, mine in channels.items()
        }
        for layer, channels in enumerate(parts[0])
    ]


def _serve(pipe, start: Start, rank: int, loud: bool) -> None:
    try:
        with contextlib.nullcontext() if loud else muted():
            runner = Runner(replace(start, gpu=start.gpu + rank), rank)
    except (UsageError, Unsupported) as error:
        pipe.send((error, None))
        return
    pipe.send((None, None))
    while (order := _next(pipe)) is not None:
        name, args, wanted, dropped = order
        runner.drop(dropped)
        try:
            value = getattr(runner, name)(*args)
            pipe.send((None, _on_host(value) if wanted else None))
        except (UsageError, Unsupported) as error:
            pipe.send((error, None))
    del runner
    _leave()


def _next(pipe):
    try:
        return pipe.recv()
    except (EOFError, KeyboardInterrupt):
        return None


def _on_host(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    return {key: _on_host(item) for key, item in value.items()} if isinstance(value, dict) else value


def _leave() -> None:
    """Leave SGLang's process groups, whose libraries would complain at exit."""
    with contextlib.suppress(Exception), muted():
        from sglang.srt.distributed import parallel_state
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        for group in list(vars(parallel_state).values()):
            if getattr(group, "ca_comm", None) is not None:  # waits for the other ranks, which must still be there
                group.ca_comm.close()
                group.ca_comm = None
        destroy_model_parallel()
        destroy_distributed_environment()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Send stdout and stderr of this process into nothing, those of its C++ libraries too; our own lines come later."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in enumerate(kept, start=1):
                os.dup2(copy, fd)
                os.close(copy)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
