"""The figures of a run that a night is held against, and the frozen envelope that they must stay in.

A noise (the largest error of a mode or a control) may come to `factor` times the largest that was frozen, and to four
roundings more. A share or a mean may move by one of what it counts, up or down: one node, or one round, that goes the
other way at a tie. Too many accepted tokens are an alarm as well as too few.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import UsageError, usage_errors
from ..base.files import parse_json, read_text, write_text

SCHEMA = "ddtree-check/baseline/1"


@dataclass(frozen=True)
class Metric:
    """A figure of a record. value: None if it is not finite; unit: the smallest step that means anything;
    noise: only more of it is bad."""

    value: float | None
    unit: float
    noise: bool = False


def metrics(record: Mapping) -> dict[str, Metric]:
    """The figures of a record, by name. What the record does not have is left out."""
    cases, found = record["cases"], {}
    nodes = [node for case in cases for node in case["nodes"]]
    for mode in ("linear", "tree_forked"):
        floors = [node[mode]["floor"] for node in nodes if node[mode]["floor"] is not None]
        if floors:  # else nothing was judged
            found[f"{mode}.max_abs"] = Metric(
                _largest(case["modes"][mode]["max_abs"] for case in cases), min(floors), True
            )
            ties = sum(case["modes"][mode]["tie"] for case in cases)
            found[f"{mode}.ties"] = Metric(ties / len(nodes), 1 / len(nodes))
    floors = [node["tree_forked"]["floor"] for node in nodes if node["tree_forked"]["floor"] is not None]
    for name, value in record["floor"]["controls"].items() if floors else ():
        found[f"control.{name}"] = Metric(value, min(floors), True)
    if exact := record.get("exact"):
        found["exact.certified"] = Metric(exact["certified"] / exact["nodes"], 1 / exact["nodes"])
    near, dirty = record["coverage"]["near"], record["leakage"]["contaminated"]
    if near:
        found["unforked.near_moved"] = Metric(record["coverage"]["near_moved"] / near, 1 / near)
    if dirty:
        found["unforked.flipped"] = Metric(record["leakage"]["flipped"] / dirty, 1 / dirty)
    for mode in ("ar", "linear", "tree_forked", "tree_unforked"):
        accepted = [case["acceptance"][mode]["accepted"] for case in cases if mode in case["acceptance"]]
        if accepted:
            found[f"{mode}.accepted"] = Metric(statistics.fmean(accepted), 1 / len(accepted))
    for mode, seen in (record.get("rounds") or {}).get("summary", {}).items():
        if not seen["rounds"]:
            continue
        found[f"rounds.{mode}.off"] = Metric(seen["off"] / seen["rounds"], 1 / seen["rounds"])
        found[f"rounds.{mode}.moved"] = Metric(seen["moved_per_round"], 1 / seen["rounds"])
    return found


def _largest(values) -> float | None:
    """The largest; None, as records write what is not finite, if any of them is None."""
    values = list(values)
    return None if None in values else max(values)


@dataclass(frozen=True)
class Baseline:
    """What was frozen: where, when, and by cell and metric the envelope (low, high), None for no bound."""

    created: str
    environment: Mapping[str, str]
    cells: Mapping[str, Mapping[str, tuple[float | None, float | None]]]


def envelope(metric: Metric, earlier: Sequence[float | None], factor: float) -> tuple[float | None, float]:
    """Bounds from this run's value and those of earlier nights. Raises UsageError for a value that is not finite."""
    values = [metric.value, *earlier]
    if any(value is None or not math.isfinite(value) for value in values):
        raise UsageError("freeze: a metric is not finite, expected figures; look at the run before freezing it")
    if metric.noise:
        return None, factor * max(values) + metric.unit
    return min(values) - metric.unit, max(values) + metric.unit


def outside(metric: Metric, bounds: tuple[float | None, float | None]) -> bool:
    """Whether a value has left its envelope; what is not finite always has."""
    if metric.value is None:
        return True
    low, high = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    step = 1e-9 * max(abs(metric.value), metric.unit)  # a share of rounds is no exact number
    return not low - step <= metric.value <= high + step


def write_baseline(path: str | Path, baseline: Baseline) -> None:
    """Written whole or not at all. Raises UsageError."""
    cells = {
        cell: {name: {"low": low, "high": high} for name, (low, high) in found.items()}
        for cell, found in baseline.cells.items()
    }
    data = {"schema": SCHEMA, "created": baseline.created, "environment": dict(baseline.environment), "cells": cells}
    with usage_errors():
        write_text(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")


def load_baseline(path: str | Path) -> Baseline | None:
    """None if there is no file. Raises UsageError naming what is wrong with it."""
    if not Path(path).exists():
        return None
    with usage_errors():
        data = parse_json(read_text(path), str(path))
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"baseline: {path}: schema {got!r:.60}, expected {SCHEMA!r}; freeze it again")
        try:
            cells = {
                cell: {name: (_bound(bounds["low"]), _bound(bounds["high"])) for name, bounds in found.items()}
                for cell, found in data["cells"].items()
            }
            if not isinstance(data["created"], str) or not isinstance(data["environment"], dict):
                raise ValueError("created or environment is of another kind")
            return Baseline(data["created"], data["environment"], cells)
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"baseline: {path}: no whole baseline ({error}); freeze it again") from None


def _bound(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"bound {value!r:.40}, expected a number or null")
    return float(value)
