"""The figures of a run that a night is held against, and the frozen envelope that they must stay in.

A noise (the largest error of a mode or a control) may come to `factor` times the largest that was frozen, and to four
roundings more. A share or a mean may move by one of what it counts, up or down: one node, or one round, that goes the
other way at a tie. Too many accepted tokens are an alarm as well as too few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..base.errors import UsageError, usage_errors
from ..base.files import parse_json, read_text, write_text
from ..judge.figures import Metric
from .stored import Number, read

SCHEMA = "ddtree-check/baseline/1"


class Bounds(NamedTuple):
    """The envelope of a metric, None for no bound."""

    low: Number | None
    high: Number | None


@dataclass(frozen=True)
class Baseline:
    """What was frozen: where, when, and the envelope by cell and metric."""

    created: str
    environment: dict[str, str]
    cells: dict[str, dict[str, Bounds]]


def envelope(metric: Metric, earlier: Sequence[float | None], factor: float) -> Bounds:
    """Return the bounds from this run's value and earlier ones. Raises UsageError for a value that is not finite."""
    values = [metric.value, *earlier]
    if any(value is None or not math.isfinite(value) for value in values):
        raise UsageError("freeze: a metric is not finite, expected figures; look at the run before freezing it")
    if metric.noise:
        return Bounds(None, factor * max(values) + metric.unit)
    return Bounds(min(values) - metric.unit, max(values) + metric.unit)


def outside(metric: Metric, bounds: Bounds) -> bool:
    """Return whether a value has left its envelope; what is not finite always has."""
    if metric.value is None:
        return True
    low, high = -math.inf if bounds.low is None else bounds.low, math.inf if bounds.high is None else bounds.high
    step = 1e-9 * max(abs(metric.value), metric.unit)  # a share of rounds is no exact number
    return not low - step <= metric.value <= high + step


def write_baseline(path: str | Path, baseline: Baseline) -> None:
    """Write a baseline, whole or not at all. Raises UsageError."""
    cells = {cell: {name: each._asdict() for name, each in bounds.items()} for cell, bounds in baseline.cells.items()}
    data = {"schema": SCHEMA, **vars(baseline), "cells": cells}
    with usage_errors():
        write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def load_baseline(path: str | Path) -> Baseline | None:
    """Return the baseline of a file, None if there is no file. Raises UsageError naming what is wrong with it."""
    if not Path(path).exists():
        return None
    with usage_errors():
        data = parse_json(read_text(path), str(path))
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        if schema != SCHEMA:
            raise ValueError(f"baseline: {path}: schema {schema!r:.60}, expected {SCHEMA!r}; freeze it again")
        try:
            return read(Baseline, data)
        except ValueError as error:
            raise ValueError(f"baseline: {path}: no whole baseline ({error}); freeze it again") from None
