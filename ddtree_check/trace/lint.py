"""Convention mistakes in trees and traces that others wrote: found in the data, named, and what was likely meant.

Every check looks at raw values, since what is wrong is often why nothing stricter can read them. A finding judges no
engine: it says that two sides do not speak of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..base.errors import usage_errors
from ..tree.draft_tree import DraftTree
from ..tree.lint import (
    Finding,
    Rows,
    _check_ids,
    _check_links,
    _check_mask,
    _check_positions,
    _equal_trees,
    _ints,
    _plain,
    _rows,
    _skip_padding,
    _values,
    lint_rows,
)
from .model import Header as TraceHeader
from .model import Raw
from .read import is_trace, parse_step, read_raw


def lint(path: str | Path) -> list[Finding]:
    """What is off in a trace, a tree file, a DDTree dump or a dump of links (JSON or JSON lines).

    Raises UsageError for a file that is none of these or cannot be read.
    """
    if is_trace(path):
        with usage_errors():
            return list(_lint_trace(read_raw(path)))
    found: list[Finding] = []
    seen: list[tuple[str, DraftTree, object]] = []
    for where, value in _values(Path(path)):
        for rows in _rows(where, value):
            findings, tree = lint_rows(rows)
            found += findings
            if tree is not None:
                seen.append((where, tree, rows.extra.get("prompt_tokens")))
    return found + list(_equal_trees(seen))


# --- traces -----------------------------------------------------------------------------------------------------------


def _lint_trace(files: Sequence[Raw]) -> Iterator[Finding]:
    seen: list[tuple[str, DraftTree, object]] = []
    before: DraftTree | None = None
    ids: dict[str, str] = {}
    for raw in files:
        name = raw.step.get("id")
        where = f"{raw.file.name} step {name!r:.60}"
        if isinstance(name, str):
            if name in ids:
                yield Finding("duplicate-step", where, f"the id stands in {ids[name]} too, expected its own")
            ids[name] = raw.file.name
        tree_data, prompt = raw.step.get("tree"), raw.step.get("prompt_tokens")
        if not isinstance(tree_data, dict) or not isinstance(raw.step.get("passes"), list):
            yield Finding("unreadable", where, "no tree or no passes, see docs/trace.md")
            continue
        rows = _plain(where, {**raw.step, **tree_data, "mask": None, "positions": None})
        findings, tree = lint_rows(rows)
        yield from findings
        if findings or tree is None:
            continue
        if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1] == tree.tokens[0] and _root_twice(raw, tree):
            yield Finding(
                "root-in-prompt",
                where,
                f"prompt_tokens end with the root's token {prompt[-1]} and positions "
                "count it once: likely the prompt holds the root; expected it in the tree alone",
            )
        strict = True
        for place, entry in enumerate(raw.step["passes"]):
            found = list(_lint_pass(raw, f"{where} pass {place}", place, entry, tree, before))
            strict &= not found
            yield from found
        if strict:
            try:
                parse_step(raw, TraceHeader.from_json(raw.header))
            except ValueError as error:
                yield Finding("unreadable", where, str(error))
        seen.append((where, tree, prompt))
        before = tree
    yield from _equal_trees(seen)


def _root_twice(raw: Raw, tree: DraftTree) -> bool:
    """Some pass puts the root one position before where the prompt ends."""
    passes = [entry for entry in raw.step["passes"] if isinstance(entry, dict)]
    starts = [
        entry["positions"][0] for entry in passes if isinstance(entry.get("positions"), list) and entry["positions"]
    ]
    return bool(starts) and all(start == len(raw.step["prompt_tokens"]) - 1 for start in starts)


def _lint_pass(
    raw: Raw, where: str, place: int, entry: object, tree: DraftTree, before: DraftTree | None
) -> Iterator[Finding]:
    if not isinstance(entry, dict):
        yield Finding("unreadable", where, f"got {type(entry).__name__}, expected an object")
        return
    n = len(tree)
    logits = raw.arrays.get(f"p{place}.logits") or raw.arrays.get(f"p{place}.top_ids")
    stored = logits.shape[0] if logits is not None and logits.shape else None
    nodes = _ints(where, "nodes", entry.get("nodes"))
    whole = entry.get("mode") in ("tree_forked", "tree_unforked", "own")
    if nodes is None and stored is not None and whole and stored != n:
        if stored == n - 1:
            yield Finding(
                "rows-without-root",
                where,
                f"{stored} rows for {n} nodes and no list of nodes: likely the root has no row; give nodes 1, 2, ...",
            )
            return
        if stored > n:
            yield Finding(
                "padding-rows",
                where,
                f"{stored} rows for {n} nodes and no list of nodes: likely padding; give "
                "nodes, -1 for each padding row",
            )
            return
    if nodes is not None and stored is not None and len(nodes) == stored and 0 not in nodes and n in nodes:
        yield Finding("nodes-one-based", where, f"nodes run from {min(nodes)} to {n}, expected 0..{n - 1}")
        return
    chain = entry.get("mode") in ("linear", "chain")
    rows = Rows(where, tokens=list(tree.tokens), prefix=None)
    if isinstance(raw.step.get("prompt_tokens"), list):
        rows.prefix = len(raw.step["prompt_tokens"])
    rows.nodes, rows.input_ids = nodes, _ints(where, "input_ids", entry.get("input_ids"))
    found: list[Finding] = []

    def say(name: str, text: str) -> None:
        found.append(Finding(name, where, text))

    positions = _ints(where, "positions", entry.get("positions"))
    if positions is not None and not chain:
        order = nodes if nodes is not None else list(range(len(positions)))
        by_node = dict(zip(order, positions, strict=False))
        if all(node in by_node for node in range(n)):
            rows.positions = [by_node[node] for node in range(n)]
            _check_positions(rows, tree, say)
    if whole:
        mask = raw.arrays.get(f"p{place}.mask")
        if mask is not None and len(mask.shape) == 2 and mask.shape[0] >= n and mask.dtype in ("BOOL", "U8"):
            held = mask.read().astype(bool)
            extra = mask.shape[0] - n
            rows.mask = held[:n, : held.shape[1] - extra] if extra else held
            _check_mask(rows, tree, say)
        own = _ints(where, "parents", entry.get("parents"))
        if own is not None and tuple(own[:n]) != tree.parents:
            if own[:n] == list(range(-1, n - 1)):
                say("links-are-a-chain", "the kernel was given row - 1 as every parent: a chain, not the tree")
            elif before is not None and tuple(own[: len(before)]) == before.parents:
                say("stale-parents", "the kernel was given the parents of the step before; expected this tree's")
            else:
                node = next((i for i, parent in enumerate(own[:n]) if parent != tree.parents[i]), len(own))
                say("parents-of-another-tree", f"the kernel's parent of row {node} is not the tree's")
        rows.next_token = _ints(where, "next_token", entry.get("next_token"))
        rows.next_sibling = _ints(where, "next_sibling", entry.get("next_sibling"))
        _skip_padding(rows)
        _check_links(rows, tree, say)
    _check_ids(rows, tree, say)
    yield from found
