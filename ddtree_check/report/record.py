"""record.json: written whole or not at all, and checked when it is read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from ..base import files
from ..base.conclusion import PASS
from ..base.errors import UsageError, usage_errors
from ..base.files import parse_json, read_text, write_text
from ..base.words import counted
from ..tree.draft_tree import DraftTree
from .text import GREEN

READABLE = ("ddtree-check/1",)
ROUNDS = "ddtree-check/rounds/1"  # what generate writes
SERVER = "ddtree-check/server/1"  # what server writes
SWEEP = "ddtree-check/sweep/1"  # what sweep writes
BITS = "ddtree-check/exact/1"  # what compare writes of an engine without plain decoding
SELFTEST = "ddtree-check/selftest/1"  # what selftest writes
KINDS = {  # schema -> the command that writes it, and what is needed of it
    READABLE[0]: ("compare", "record"),
    ROUNDS: ("generate", "rounds"),
    SERVER: ("server", "server"),
    SWEEP: ("sweep", "sweep"),
    BITS: ("compare", "exact"),
}
NEEDED = {  # keys that the views rely on
    "record": {
        "environment": dict,
        "model": dict,
        "settings": dict,
        "floor": dict,
        "cases": list,
        "leakage": dict,
        "coverage": dict,
        "verdict": dict,
        "exit_code": int,
    },
    "rounds": {"environment": dict, "model": dict, "settings": dict, "rounds": dict, "verdict": dict, "exit_code": int},
    "server": {"environment": dict, "settings": dict, "prompts": list, "band": dict, "coverage": dict, "verdict": dict},
    "sweep": {"environment": dict, "model": dict, "settings": dict, "rows": list, "answers": list, "verdict": dict},
    "exact": {"environment": dict, "model": dict, "settings": dict, "cases": list, "exact": dict, "verdict": dict},
    "found": {"prompts": list, "summary": dict, "coverage": dict},
    "prompt": {"id": str, "prompt_tokens": list, "modes": dict},
    "case": {"id": str, "tree": dict, "nodes": list, "modes": dict, "acceptance": dict, "leak_law": dict},
    "node": {"node": int, "token": int, "parent": int, "depth": int, "leaked": int, "clean": bool, "ar": dict},
}


def write_record(path: str | Path, record: dict) -> None:
    """Write the record as JSON, whole or not at all. Raises UsageError if the file cannot be written."""
    with usage_errors():
        write_text(path, json.dumps(record, allow_nan=False) + "\n")


def check_writable(path: str | Path) -> None:
    """Raise UsageError, before a long run, if `write_record` could not write there."""
    with usage_errors():
        files.check_writable(path)


def load_record(path: str | Path, *, rounds: bool = False) -> dict:
    """Read a record; with `rounds`, one of rounds, a sweep or two servers as well. Raises UsageError naming the file
    and what is missing from it."""
    with usage_errors():
        record = parse_json(read_text(path), str(path))
    with viewing(path):
        _check(record, str(path), rounds)
    return record


@contextlib.contextmanager
def viewing(path: str | Path) -> Iterator[None]:
    """Say in one line what a view misses in a record: a name that the caller gave, or a part that somebody edited."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UsageError(f"{path}: no whole record ({type(error).__name__}: {error!s:.100}); make it again") from None


def _check(record: object, path: str, rounds: bool) -> None:
    schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
    verb, kind = KINDS.get(schema, (None, None)) if isinstance(schema, str) else (None, None)
    if kind is None or not isinstance(record, dict):
        raise ValueError(f"{path}: schema {schema!r:.60}, expected {READABLE[0]!r}, a record of ddtree-check")
    if kind != "record" and not rounds:
        by = " or by --prompt" if kind == "rounds" else ""
        what = (
            "an engine without plain decoding, which has no nodes" if kind == "exact" else f"{verb}, which has no cases"
        )
        raise ValueError(f"{path}: a record of {what}; show it whole{by}")
    _needs(record, kind, path)
    if kind == "rounds":
        _needs(record["rounds"], "found", f"{path}: rounds")
        for index, prompt in enumerate(record["rounds"]["prompts"]):
            _needs(prompt, "prompt", f"{path}: rounds.prompts[{index}]")
    if kind != "record":
        return
    for index, case in enumerate(record["cases"]):
        _needs(case, "case", f"{path}: cases[{index}]")
        for place, node in enumerate(case["nodes"]):
            _needs(node, "node", f"{path}: case {case['id']}: nodes[{place}]")
        try:
            _same_nodes(case["nodes"], DraftTree.from_json(case["tree"]))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: case {case['id']}: {error}; make the record again") from None
    _follows(record, path)


def _same_nodes(nodes: list[dict], tree: DraftTree) -> None:
    """Raise ValueError for nodes that are not the tree's, each in its place."""
    if len(nodes) != len(tree):
        raise ValueError(f"got {counted(len(nodes), 'node')}, its tree has {len(tree)}")
    for place, node in enumerate(nodes):
        got, wanted = (node["node"], node["parent"], node["token"]), (place, tree.parents[place], tree.tokens[place])
        if got != wanted:
            raise ValueError(f"nodes[{place}] is node, parent and token {got}, its tree has {wanted}")


def _follows(record: dict, where: str) -> None:
    """Refuse a pass that the record's own cases do not bear out, as one that somebody edited."""
    if record["exit_code"] != PASS:
        return
    required = record["settings"].get("require", ())
    if not record["cases"]:
        raise ValueError(f"{where}: a pass of no case; make the record again")
    above = record["floor"].get("systematic") or {"beyond": False}
    if not isinstance(above, dict) or not isinstance(above.get("beyond"), bool):
        raise ValueError(f"{where}: floor.systematic is {above!r:.60}, expected an object with 'beyond'")
    ratio, limit = above.get("ratio"), above.get("limit")
    high = above.get("judged") and all(isinstance(x, (int, float)) for x in (ratio, limit)) and ratio > limit
    if (above["beyond"] or high) and "tree_forked" in required:
        raise ValueError(f"{where}: a pass, though tree_forked is systematically above noise; make the record again")
    for case in record["cases"]:
        for mode in required:
            found = case["modes"].get(mode, {}).get("verdict")
            if found not in GREEN:
                raise ValueError(f"{where}: a pass, though case {case['id']} has {mode} {found}; make the record again")


def _needs(data: object, what: str, where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: got {type(data).__name__}, expected an object")
    for key, kind in NEEDED[what].items():
        if not isinstance(data.get(key), kind):
            got = type(data[key]).__name__ if key in data else "nothing"
            raise ValueError(f"{where}: {key} is {got}, expected {kind.__name__}")
