"""A benchmark in several processes: each runs its share of the items and writes a file of its own."""

from __future__ import annotations

import argparse
import glob
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--part", type=turns, default="1/1", metavar="I/N", help="every N-th item from the I-th on")
    parser.add_argument("--out", default=out, help="where lines are appended; report: several, by commas or a pattern")


def turns(part: str) -> Callable[[], bool]:
    """For '2/8' a function that answers, item by item, whether it is this process's. Raises ValueError for no part."""
    number, of = map(int, part.split("/"))
    if not 1 <= number <= of:
        raise ValueError(part)
    count = itertools.count(1)
    return lambda: (next(count) - number) % of == 0


def written(out: str) -> Iterator[dict]:
    """The lines of all files that --out names, one file after another."""
    for pattern in out.split(","):
        for path in sorted(glob.glob(pattern)):
            yield from map(json.loads, Path(path).read_text().splitlines())


def append(out: str, entry: dict) -> None:
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
