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
    check_rows,
    equal_trees,
    integers,
    lint_rows,
    plain_rows,
    rows_of,
    skip_padding,
    values_of,
)
from .model import Header as TraceHeader
from .model import Raw
from .read import is_trace, parse_step, read_raw


def lint(path: str | Path) -> list[Finding]:
    """Return what is off in a trace, a tree file, a DDTree dump or a dump of links (JSON or JSON lines).

    Raises UsageError for a file that is none of these or cannot be read.
    """
    if is_trace(path):
        with usage_errors():
            return list(_lint_trace(read_raw(path)))
    findings_of_all: list[Finding] = []
    trees: list[tuple[str, DraftTree, object]] = []
    for where, value in values_of(Path(path)):
        for rows in rows_of(where, value):
            findings, tree = lint_rows(rows)
            findings_of_all += findings
            if tree is not None:
                trees.append((where, tree, rows.extra.get("prompt_tokens")))
    return findings_of_all + list(equal_trees(trees))


# --- traces -----------------------------------------------------------------------------------------------------------


def _lint_trace(files: Sequence[Raw]) -> Iterator[Finding]:
    trees: list[tuple[str, DraftTree, object]] = []
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
        rows = plain_rows(where, {**raw.step, **tree_data, "mask": None, "positions": None})
        findings, tree = lint_rows(rows)
        yield from findings
        if findings or tree is None:
            continue
        if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1] == tree.tokens[0] and _root_twice(raw, tree):
            says = f"prompt_tokens end with the root's token {prompt[-1]}, and positions count it once"
            yield Finding("root-in-prompt", where, f"{says}; expected it in the tree alone")
        strict = True
        for place, entry in enumerate(raw.step["passes"]):
            mistakes = _lint_pass(raw, f"{where} pass {place}", place, entry, tree, before)
            strict &= not mistakes
            yield from mistakes
        if strict:
            try:
                parse_step(raw, TraceHeader.from_json(raw.header))
            except ValueError as error:
                yield Finding("unreadable", where, str(error))
        trees.append((where, tree, prompt))
        before = tree
    yield from equal_trees(trees)


def _root_twice(raw: Raw, tree: DraftTree) -> bool:
    """Return whether all passes put the root one position before where the prompt ends."""
    lists = [entry.get("positions") for entry in raw.step["passes"] if isinstance(entry, dict)]
    starts = [positions[0] for positions in lists if isinstance(positions, list) and positions]
    return bool(starts) and all(start == len(raw.step["prompt_tokens"]) - 1 for start in starts)


def _lint_pass(
    raw: Raw, where: str, place: int, entry: object, tree: DraftTree, before: DraftTree | None
) -> list[Finding]:
    rows, n = Rows(where, tokens=list(tree.tokens)), tree.n
    if not isinstance(entry, dict):
        return rows.findings(("unreadable", f"got {type(entry).__name__}, expected an object"))
    logits = raw.arrays.get(f"p{place}.logits") or raw.arrays.get(f"p{place}.top_ids")
    stored = logits.shape[0] if logits is not None and logits.shape else None
    lists = ("nodes", "input_ids", "positions", "parents", "next_token", "next_sibling")
    given = {name: integers(where, name, entry.get(name)) for name in lists}
    nodes, positions, parents = given["nodes"], given["positions"], given["parents"]
    whole = entry.get("mode") in ("tree_forked", "tree_unforked", "own")
    if nodes is None and stored is not None and whole and (stored == n - 1 or stored > n):
        name, likely = (
            ("padding-rows", "padding; give -1 for it") if stored > n else ("rows-without-root", "no root row")
        )
        return rows.findings((name, f"{stored} rows for {n} nodes and no list of nodes: likely {likely}"))
    if nodes is not None and len(nodes) == stored and 0 not in nodes and n in nodes:
        return rows.findings(("nodes-one-based", f"nodes run from {min(nodes)} to {n}, expected 0..{n - 1}"))
    if isinstance(raw.step.get("prompt_tokens"), list):
        rows.prefix = len(raw.step["prompt_tokens"])
    rows.nodes, rows.input_ids = nodes, given["input_ids"]
    if positions is not None and entry.get("mode") not in ("linear", "chain"):
        by_node = dict(zip(nodes if nodes is not None else range(len(positions)), positions, strict=False))
        if all(node in by_node for node in range(n)):
            rows.positions = [by_node[node] for node in range(n)]
    mistake = None
    if whole:
        mask = raw.arrays.get(f"p{place}.mask")
        if mask is not None and len(mask.shape) == 2 and mask.shape[0] >= n and mask.dtype in ("BOOL", "U8"):
            rows.mask = mask.read().astype(bool)[:n, : mask.shape[1] - (mask.shape[0] - n)]
        if parents is not None and tuple(parents[:n]) != tree.parents:
            mistake = _other_parents(parents, tree, before)
        rows.next_token, rows.next_sibling = given["next_token"], given["next_sibling"]
        skip_padding(rows)
    return rows.findings(mistake) + check_rows(rows, tree)


def _other_parents(parents: list[int], tree: DraftTree, before: DraftTree | None) -> tuple[str, str]:
    """Return what parents that a kernel was given are instead of the tree's."""
    if parents[: tree.n] == list(range(-1, tree.n - 1)):
        return "links-are-a-chain", "the kernel was given row - 1 as every parent: a chain, not the tree"
    if before is not None and tuple(parents[: before.n]) == before.parents:
        return "stale-parents", "the kernel was given the parents of the step before; expected this tree's"
    pairs = enumerate(zip(parents, tree.parents, strict=False))
    node = next((node for node, (parent, right) in pairs if parent != right), len(parents))
    return "parents-of-another-tree", f"the kernel's parent of row {node} is not the tree's"
