"""Find what is off in rows of a tree: tokens, parents, links, depths, positions, masks, accepted nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, usage_errors
from ..base.files import json_lines, parse_json, read_text
from .draft_tree import DraftTree
from .formats import NONE, from_paths, to_links

DDTREE = ("node_token_ids", "node_depths", "accepted_indices")
LINKS = {  # names in dumps of SGLang, and ours
    "retrieve_next_token": "next_token",
    "retrive_next_token": "next_token",
    "retrieve_next_sibling": "next_sibling",
    "retrive_next_sibling": "next_sibling",
    "retrive_index": "retrieve_index",
    "draft_tokens": "tokens",
    "draft_token": "tokens",
    "custom_mask": "mask",
    "tree_mask": "mask",
    "accept_index": "accepted",
    "accepted_indices": "accepted",
    "seq_lens": "prefix",
    "seq_len": "prefix",
}


Mistake = tuple[str, str]  # its name, and in words what is there and what was likely meant


@dataclass(frozen=True)
class Finding:
    """A mistake: its name, where it stands, and in words what is there and what was likely meant."""

    name: str
    where: str
    says: str

    def __str__(self) -> str:
        return f"{self.where}: {self.name}: {self.says}"


@dataclass
class Rows:
    """Raw lists of one tree, as they were found; None for what was not. prefix: tokens before the root."""

    where: str
    tokens: list | None = None
    parents: list | None = None
    depths: list | None = None
    positions: list | None = None
    mask: np.ndarray | None = None
    next_token: list | None = None
    next_sibling: list | None = None
    retrieve_index: list | None = None
    accepted: list | None = None
    count: int | None = None
    prefix: int | None = None
    request: int = 0
    nodes: list | None = None
    input_ids: list | None = None
    extra: dict = field(default_factory=dict)

    def findings(self, *mistakes: Mistake | None) -> list[Finding]:
        """Return the mistakes that are some, with the place of these rows."""
        return [Finding(name, self.where, says) for name, says in filter(None, mistakes)]


# --- files ------------------------------------------------------------------------------------------------------------


def values_of(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the JSON values of a file with the place of each. Raises UsageError."""
    with usage_errors():
        if path.suffix != ".jsonl":
            yield path.name, parse_json(read_text(path), str(path))
            return
        for number, value in json_lines(path):
            yield f"{path.name}:{number}", value


def rows_of(where: str, value: object) -> Iterator[Rows]:
    """Yield the trees of one JSON value, whichever form it has. Raises UsageError for what is no tree."""
    if isinstance(value, dict) and isinstance(value.get("tree"), dict):  # a case or a recorded draft
        value = {**value, **value["tree"]}
    if not isinstance(value, dict):
        raise UsageError(f"{where}: got {type(value).__name__}, expected an object with a tree, links or a DDTree dump")
    named = {LINKS.get(name, name): part for name, part in value.items()}
    if "paths" in named:
        yield Rows(where, extra=named)
    elif any(name in value for name in DDTREE):
        rows = Rows(where, extra=named)
        lists = {**named, "tokens": value.get("node_token_ids"), "depths": value.get("node_depths")}
        _fill(rows, lists, "tokens", "depths", "parents", "accepted")
        rows.tokens = [value.get("root_token"), *(rows.tokens or [])]
        rows.depths = None if rows.depths is None else [0, *rows.depths]
        yield rows
    elif "next_token" in named or "next_sibling" in named:
        yield from _link_dump(where, named)
    elif "parents" in named or "tokens" in named:
        yield plain_rows(where, named)
    else:
        raise UsageError(
            f"{where}: keys {', '.join(map(str, value))[:80]}; expected tokens and parents, node_token_ids and "
            "parents, paths, or retrieve_next_token and retrieve_next_sibling"
        )


def plain_rows(where: str, named: Mapping) -> Rows:
    """Return the rows of an object with tokens or parents. Raises UsageError."""
    rows = Rows(where, extra=dict(named), mask=_mask(where, named.get("mask")))
    _fill(rows, named, "tokens", "parents", "depths", "positions", "accepted")
    prompt = named.get("prompt_tokens")
    rows.prefix = _size(where, "prefix", named.get("prefix", len(prompt) if isinstance(prompt, list) else None))
    rows.count = _size(where, "count", named.get("count"))
    return rows


def _link_dump(where: str, named: Mapping) -> Iterator[Rows]:
    """Yield one Rows a request: dumps hold [rows] or [requests, rows]."""
    fields = ("tokens", "next_token", "next_sibling", "retrieve_index", "positions", "parents", "accepted")
    links = named["next_token"] if named.get("next_token") is not None else named.get("next_sibling")
    batched = isinstance(links, list) and bool(links) and isinstance(links[0], list)
    requests = len(links) if batched else 1

    def share(values: object, request: int) -> object:
        if not batched or not isinstance(values, list):
            return values
        if values and not isinstance(values[0], list):  # flattened
            size = len(values) // requests
            return values[request * size : (request + 1) * size]
        return values[request] if request < len(values) else None

    for request in range(requests):
        rows = Rows(f"{where} request {request}" if batched else where, request=request, extra=dict(named))
        _fill(rows, {name: share(named.get(name), request) for name in fields}, *fields)
        for name in ("prefix", "count"):
            sizes = named.get(name, named.get(name + "s"))
            size = sizes[request] if isinstance(sizes, list) and request < len(sizes) else sizes
            setattr(rows, name, _size(rows.where, name, size))
        if not batched:
            rows.mask = _mask(rows.where, named.get("mask"), len(links) if isinstance(links, list) else None)
        yield rows


def _fill(rows: Rows, values: Mapping, *names: str) -> None:
    for name in names:
        setattr(rows, name, integers(rows.where, name, values.get(name), none=name in ("tokens", "parents")))


def integers(where: str, name: str, values: object, *, none: bool = False) -> list | None:
    """Return a list of integers as it is; with `none`, null may stand in it. Raises UsageError for anything else."""
    good = isinstance(values, list) and all(
        (none and value is None) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62)
        for value in values
    )
    if values is not None and not good:
        raise UsageError(f"{where}: {name} {values!r:.60}, expected a list of integers")
    return values


def _size(where: str, name: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62):
        return value
    raise UsageError(f"{where}: {name} {value!r:.60}, expected a number of at least 0")


def _mask(where: str, value: object, rows: int | None = None) -> np.ndarray | None:
    if value is None:
        return None
    if rows and isinstance(value, list) and value and not isinstance(value[0], list) and len(value) % rows == 0:
        value = [value[at : at + len(value) // rows] for at in range(0, len(value), len(value) // rows)]
    good = isinstance(value, list) and all(
        isinstance(row, list) and len(row) == len(value[0]) and all(cell in (0, 1) for cell in row) for row in value
    )
    if not good or not value:
        raise UsageError(f"{where}: mask {value!r:.40}, expected rows of 0 and 1, all of one length")
    return np.array(value, dtype=bool).reshape(len(value), -1)


# --- one tree ---------------------------------------------------------------------------------------------------------


def lint_rows(rows: Rows) -> tuple[list[Finding], DraftTree | None]:
    """Return the findings of one tree, and the tree itself if it is one, or what it was likely meant to be."""
    if "paths" in rows.extra:
        tree, mistake = _tree_of_paths(rows)
        return rows.findings(mistake), tree
    findings: list[Finding] = []
    if rows.parents is None and rows.next_token is not None:
        findings = rows.findings(*_read_links(rows))
    if rows.parents is None:
        return findings, None
    tree, mistake = _tree(rows)
    findings += rows.findings(mistake)
    if (
        tree is not None and not findings
    ):  # positions, masks and links of a tree that was guessed at would be guesses too
        findings = check_rows(rows, tree)
    return findings, tree


def check_rows(rows: Rows, tree: DraftTree) -> list[Finding]:
    """Return what is off in the lists that go with a tree; those that are None are not looked at."""
    return rows.findings(*(mistake for check in CHECKS for mistake in check(rows, tree)))


def _tree_of_paths(rows: Rows) -> tuple[DraftTree | None, Mistake | None]:
    paths = rows.extra["paths"]
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise UsageError(f"{rows.where}: paths {paths!r:.60}, expected a list of lists of token ids")
    paths = [integers(rows.where, "paths", path) for path in paths]
    firsts = {path[0] for path in paths if path}
    if len(firsts) > 1:
        with contextlib.suppress(ValueError):
            says = f"the paths begin with {len(firsts)} tokens: likely without the root, expected it first in each"
            return from_paths([[None, *path] for path in paths]), ("root-not-stored", says)
    try:
        return from_paths(paths), None
    except ValueError as error:
        return None, ("path-within-path", str(error))


def _tree(rows: Rows) -> tuple[DraftTree | None, Mistake | None]:
    """Return the tree of tokens and parents and no mistake, or what was likely meant and the mistake."""
    parents = list(rows.parents)
    tokens = list(rows.tokens) if rows.tokens is not None else [None, *range(len(parents) - 1)]
    n, count = len(parents), rows.count
    if None in parents[1:]:
        return None, ("parent-missing", f"node {parents.index(None, 1)} has no parent, expected a node")
    if None in tokens[1:]:
        return None, ("token-missing", f"node {tokens.index(None, 1)} has no token, expected a token id")
    if not n or not tokens:
        raise UsageError(f"{rows.where}: {n} parents and {len(tokens)} tokens, expected at least the root")
    if parents[0] is None:
        return _try(tokens, [-1, *parents[1:]]), ("root-parent", "the root's parent is null, expected -1")
    if len(tokens) == n and count not in (None, n):
        if count == n - 1 and not _tail(tokens, parents):
            says = f"count {count} of {n} rows that all hold nodes; likely it leaves the root out"
            return _try(tokens, parents), ("count-without-root", says)
        if count == n + 1:
            return _try(tokens, parents), ("count-with-bonus", f"count {count} of {n} rows; likely it counts the bonus")
        if not 1 <= count <= n:
            return None, ("count-out-of-range", f"count {count}, expected 1..{n}")
        tokens, parents = tokens[:count], parents[:count]
    tree = _try(tokens, parents)
    if tree is not None and (_tail(tokens, parents) < 2 or count not in (None, n)):
        return tree, None
    for name, says, *meant in _readings(tokens, parents):
        if tree := _try(*meant):
            return tree, (name, says)
    return None, _flaw(tokens, parents)


def _try(tokens: Sequence, parents: Sequence) -> DraftTree | None:
    try:
        return DraftTree(tuple(tokens), tuple(parents))
    except ValueError:
        return None


def _tail(tokens: Sequence, parents: Sequence) -> int:
    """Return how many rows at the end look like padding: one token, at the root or nowhere."""
    n, size = len(parents), 0
    while size < n - 1 and parents[n - 1 - size] in (0, -1) and tokens[n - 1 - size] == tokens[-1]:
        size += 1
    return size


def _readings(tokens: list, parents: list) -> Iterator[tuple[str, str, list, list]]:
    """Yield what lists that make no tree may mean, the likeliest first: a mistake, and tokens and parents as meant."""
    n, rest, higher = len(parents), parents[1:], [-1, *(parent + 1 for parent in parents)]
    if n == len(tokens) + 1:
        says = f"{n} parents, {n - 1} tokens: likely the tokens leave the root out"
        yield "root-token-missing", says, [None, *tokens], parents
    if len(tokens) == n + 1:
        says = f"{n + 1} tokens, {n} parents: likely the parents leave the root out, and 0 is the root"
        yield "root-parent-missing", says, tokens, [-1, *parents]
        says = "the parents leave the root out and -1 means the root; expected 0, and -1 for the root alone"
        yield "minus-one-is-root", says, tokens, higher
    if len(tokens) != n:
        return
    tail, many, loops = _tail(tokens, parents), parents.count(-1), _own_parents(parents)
    if tail >= 2:
        says = f"the last {tail} rows are one token {tokens[-1]} at parent {parents[-1]}: likely padding; omit them"
        yield "padding-rows", says, tokens[:-tail], parents[:-tail]
    # Where -1 is the root and the root is not stored, 0 is the first drafted node, which others continue.
    if many >= 2 and (0 in parents or many == n) and tokens[0] is not None:
        says = f"{many} nodes have parent -1: likely the root, which is not stored; expected it as node 0"
        yield "root-not-stored", says, [None, *tokens], higher
    if many >= 2:
        says = f"{many} nodes have parent -1, the root among them: likely -1 means the root here; expected 0"
        yield "minus-one-is-root", says, tokens, [-1, *(max(parent, 0) for parent in rest)]
    if parents[0] == 0 and not loops:
        yield "root-parent", "the root is its own parent, expected -1", tokens, [-1, *rest]
    if parents[0] in (0, -1):
        says = "every parent is one too high: they count from 1; expected from 0, the root being 0"
        yield "parents-one-based", says, tokens, [-1, *(parent - 1 for parent in rest)]
    if parents[0] == 0:
        says = "node 0 has parent 0 and others are their own: likely parents count the root, which is not stored"
        yield "root-not-stored", says, [None, *tokens], [-1, *parents]


def _own_parents(parents: Sequence[int]) -> list[int]:
    return [node for node, parent in enumerate(parents) if node and parent == node]


def _flaw(tokens: list, parents: list) -> Mistake:
    """Return what is wrong with lists that no reading makes a tree."""
    n, loops, many = len(parents), _own_parents(parents), parents.count(-1)
    if len(tokens) != n:
        return "count-mismatch", f"{len(tokens)} tokens and {n} parents, expected one parent for each token"
    for node, parent in enumerate(parents):
        if not -1 <= parent < n:
            says = f"node {node} has parent {parent}, expected -1..{n - 1}; a kernel may keep its state there"
            return "parent-out-of-range", says
    first: dict[tuple, int] = {}
    for node in range(1, n):
        twin = first.setdefault((parents[node], tokens[node]), node)
        if twin != node and tokens[node] is not None:
            says = f"nodes {twin} and {node} are both token {tokens[node]} at parent {parents[node]}, expected one"
            return "duplicate-siblings", f"{says}; a walk takes the first, a mask shows both"
    if loops:
        return "cycle", f"node {loops[0]} is its own parent, expected an earlier node"
    late = [node for node in range(n) if parents[node] > node]
    if late:
        cyclic = next((node for node in range(n) if _is_cyclic(parents, node)), None)
        if cyclic is not None:
            return "cycle", f"the parents of node {cyclic} lead back to it, expected them to end at the root"
        says = f"node {late[0]} has parent {parents[late[0]]}, which comes after it; expected parents first"
        return "child-before-parent", f"{says}, or a kernel reads a state that is not there yet"
    if parents[0] != -1:
        return "root-parent", f"node 0 has parent {parents[0]}, expected -1"
    if many >= 2:
        return "two-roots", f"{many} nodes have parent -1, expected node 0 alone"
    return "no-tree", "these tokens and parents make no tree"


def _is_cyclic(parents: Sequence[int], node: int) -> bool:
    for _ in parents:
        if not 0 <= node < len(parents):
            return False
        node = parents[node]
    return 0 <= node < len(parents)


def _read_links(rows: Rows) -> Iterator[Mistake]:
    """Give rows the parents of next_token and next_sibling, padding rows cut off; yield why the links make none."""
    child, sibling = rows.next_token, rows.next_sibling
    n = len(child)
    if sibling is None or n != len(sibling) or not child:
        yield "count-mismatch", f"{n} next_token and {len(sibling or ())} next_sibling, expected as many"
        return
    for name, links in (("next_token", child), ("next_sibling", sibling)):
        for row, target in enumerate(links):
            if not NONE <= target < n:
                from_one = target == n and all(link in (0, *range(row, n)) for link in links)
                says = f"row {row} has {name} {target}, expected -1 or a row below {n}"
                yield "link-out-of-range", says + "; likely links count from 1" * from_one
                return
    if 0 in child or 0 in sibling:
        row = child.index(0) if 0 in child else sibling.index(0)
        yield "zero-ends-links", f"row {row} links to row 0, the root: likely 0 ends a link here, expected -1"
        return
    if mistake := _descending(sibling):
        yield mistake
        return
    parents: list[int | None] = [-1] + [None] * (n - 1)
    for node in range(n):
        target = child[node]
        while target != NONE:
            if parents[target] is not None:
                says = f"row {target} is reached from rows {parents[target]} and {node}, expected one parent"
                yield "two-parents", says
                return
            parents[target], target = node, sibling[target]
    linked = max((node for node in range(n) if parents[node] is not None), default=0) + 1
    if None in parents[:linked]:
        says = f"row {parents.index(None)} is linked from nowhere though later rows are, expected a link to it"
        yield "not-linked", says
        return
    if rows.count not in (None, linked):
        name = {linked - 1: "count-without-root", linked + 1: "count-with-bonus"}.get(rows.count, "count-mismatch")
        yield name, f"count {rows.count}, the links reach {linked} rows with the root"
        rows.count = None
    for name in ("tokens", "positions"):
        values = getattr(rows, name)
        if values is not None and len(values) == n:
            setattr(rows, name, values[:linked])
    if rows.mask is not None and rows.mask.shape[0] == n and linked < n:
        rows.mask = rows.mask[:linked, : rows.mask.shape[1] - (n - linked)]
    rows.extra["rows"], rows.parents = n, parents[:linked]


def _descending(sibling: Sequence[int]) -> Mistake | None:
    for row, target in enumerate(sibling):
        if NONE < target <= row and target:
            says = f"row {row} has next_sibling {target}, which comes before it; expected ascending"
            return "siblings-descending", f"{says}, or a kernel misses all siblings but one"
    return None


# --- what goes with a tree --------------------------------------------------------------------------------------------


def _check_links(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    child, sibling = rows.next_token, rows.next_sibling
    if child is None or sibling is None:
        return
    n = len(child)
    if len(sibling) != n or n < tree.n:
        yield "count-mismatch", f"{n} next_token, {len(sibling)} next_sibling, {tree.n} nodes"
        return
    right = to_links(tree, n)
    wrong = (np.array(child) != right.next_token) | (np.array(sibling) != right.next_sibling)
    if not wrong.any():
        return
    if mistake := _descending(sibling):
        yield mistake
    elif wrong[: tree.n].any():
        if child == [*range(1, n), NONE] and not tree.is_chain:
            yield "links-are-a-chain", "next_token goes from row to row: the kernel was given a chain, not the tree"
        else:
            says = f"the links of row {wrong.argmax()} are not those of this tree; likely stale, of another step"
            yield "links-of-another-tree", says


def _check_depths(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    if rows.depths is None:
        return
    got, right = rows.depths, list(tree.depth)
    if len(got) != tree.n:
        yield "count-mismatch", f"{len(got)} depths with the root, {tree.n} nodes"
    elif got != right and got[1:] == [depth - 1 for depth in right[1:]]:
        yield "depths-zero-based", "children of the root have depth 0, expected 1"
    elif got != right and got[1:] == [depth + 1 for depth in right[1:]]:
        yield "depths-off-by-one", "children of the root have depth 2, expected 1"
    elif got != right:
        node = next(node for node in range(tree.n) if got[node] != right[node])
        yield "depths-of-another-tree", f"node {node} has depth {got[node]}, by its parents {right[node]}"


def _check_positions(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    got, depth = rows.positions, tree.depth
    if got is None:
        return
    if len(got) != tree.n:
        yield "count-mismatch", f"{len(got)} positions, {tree.n} nodes"
        return
    root = got[0]
    base = rows.prefix if rows.prefix is not None else root
    shifts = {place - level for place, level in zip(got, depth, strict=True)}
    if shifts == {base}:
        return
    if got == [root + node for node in range(tree.n)] and not tree.is_chain:
        yield "positions-flat", "positions rise by one from row to row: the flat index, expected prefix + depth"
    elif shifts == {0}:
        yield "positions-without-prefix", f"positions are the bare depths, expected {base} more"
    elif len(shifts) == 1:
        name = "positions-off-by-one" if abs(root - base) == 1 else "positions-shifted"
        yield name, f"the root stands at {root}, expected {base}: the prompt's {base} tokens come before it"
    elif len(set(got)) == 1:
        yield "positions-constant", f"every row stands at {root}, expected prefix + depth"
    else:
        node = next(node for node in range(tree.n) if got[node] - root != depth[node])
        says = f"node {node} stands at {got[node]}, expected {root + depth[node]}; likely stale, of another step"
        yield "positions-of-another-tree", says


def _check_mask(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    mask, n, known = rows.mask, tree.n, rows.prefix
    if mask is None:
        return
    height, columns = mask.shape
    prefix = columns - height
    if height != n:
        yield "mask-rows", f"the mask has {height} rows, the tree {n} nodes"
    elif known is not None and prefix not in (0, known):
        says = f"the mask has {columns} columns, expected {n} rows, or {known + n} tokens with the prefix"
        if abs(prefix - known) == 1 and columns != known:
            place = "twice" if prefix > known else "in the prefix"
            yield "mask-columns-off-by-one", f"{says}; likely the root is counted {place}"
        else:
            yield "mask-units", says + "; likely the rows' own columns are missing" * (columns == known)
    elif prefix < 0:
        yield "mask-units", f"the mask is {list(mask.shape)}, expected as many columns as rows, or more"
    else:
        block, right, diagonal = mask[:, prefix:], tree.ancestor_mask, np.eye(n, dtype=bool)
        blind = ~mask[:, :prefix].all(1)
        looks = (
            (~right, "mask-inverted", "1 marks what is hidden, expected 1 for what a row sees"),
            (right.T, "mask-transposed", "mask[i, j] tells whether j sees i, expected whether i sees j"),
            (np.tril(np.ones_like(block)), "mask-causal", "every row sees all rows before it, expected its path"),
            (np.where(diagonal, block, right), "mask-without-self", "rows do not see themselves, expected them to"),
        )
        if np.array_equal(block, right):
            if blind.any():
                yield "mask-hides-prefix", f"row {blind.argmax()} does not see the whole prefix, expected it to"
            return
        for wrong, name, says in looks:
            if np.array_equal(block, wrong):
                yield name, says
                return
        row = int((block != right).any(1).argmax())
        got, expected = (np.flatnonzero(view[row]).tolist()[:12] for view in (block, right))
        yield "mask-of-another-tree", f"row {row} sees {got}, expected {expected}"


def _check_accepted(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    got = rows.accepted
    if not got:
        return
    shift = rows.request * int(rows.extra.get("rows", tree.n))
    path = [node for node in got if node != NONE]
    if rows.request and path and min(path) >= shift:
        path = [node - shift for node in path]
    while len(path) > 1 and path[-1] == 0 and path[-2] != 0:  # padding with zeros is common
        path.pop()
    if not path or any(not 0 <= node < tree.n for node in path):
        yield "accepted-out-of-range", f"accepted {got[:8]}, expected node ids in 0..{tree.n - 1}"
        return
    right, higher = list(tree.path(path[-1])), [node + 1 for node in path]
    if path == right:
        return
    if path == right[1:]:
        yield "accepted-without-root", f"accepted {path[:8]} begins at a child of the root, expected 0 first"
    elif max(higher) < tree.n and [0, *higher] == list(tree.path(higher[-1])):
        says = f"accepted {path[:8]} is a path when every id is one higher: likely drafted nodes count from 0"
        yield "accepted-off-by-one", f"{says}; expected node ids, the root being 0"
    elif path == list(range(len(path))):
        yield "accepted-by-depth", f"accepted {path[:8]} is no path; likely depths, expected node ids"
    else:
        yield "accepted-no-path", f"accepted {path[:8]} is no path of the tree, expected {right[:8]}"


def _check_index(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    got = rows.retrieve_index
    if got is None:
        return
    first = rows.request * len(got)
    if got == list(range(first, first + len(got))):
        return
    if rows.request and got == list(range(len(got))):
        says = f"retrieve_index of request {rows.request} begins at 0, expected {first}: a place in the whole batch"
        yield "index-per-request", says
    else:
        yield "index-wrong", f"retrieve_index {got[:6]}..., expected {first}, {first + 1}, ..."


def _check_ids(rows: Rows, tree: DraftTree) -> Iterator[Mistake]:
    """Yield a mistake where rows of a pass were fed other tokens than the tree's."""
    if rows.input_ids is None:
        return
    nodes = rows.nodes if rows.nodes is not None else range(len(rows.input_ids))
    pairs = [(node, token) for node, token in zip(nodes, rows.input_ids, strict=False) if 0 <= node < tree.n]
    wrong = [(node, token) for node, token in pairs if tree.tokens[node] not in (token, None)]
    shifted = [tree.tokens[node + 1] == token for node, token in pairs if node + 1 < tree.n]
    if wrong and shifted and all(shifted):
        yield "rows-without-root", "row i was fed the token of node i + 1: the pass leaves the root out; give nodes"
    elif wrong:
        node, token = wrong[0]
        yield "input-ids", f"node {node} was fed token {token}, the tree has {tree.tokens[node]}"


CHECKS = (_check_links, _check_depths, _check_positions, _check_mask, _check_accepted, _check_index, _check_ids)


def skip_padding(rows: Rows) -> None:
    """Take the rows that compute no node out of links: SGLang's padding hangs below the root, as its last children."""
    child, sibling, nodes = rows.next_token, rows.next_sibling, rows.nodes
    if child is None or sibling is None or nodes is None or not len(child) == len(sibling) == len(nodes):
        return
    n = len(nodes)

    def kept(target: int) -> int:
        for _ in range(n):
            if not 0 <= target < n or nodes[target] >= 0:
                break
            target = sibling[target]
        return target

    rows.next_token = [kept(target) if node >= 0 else NONE for target, node in zip(child, nodes, strict=True)]
    rows.next_sibling = [kept(target) if node >= 0 else NONE for target, node in zip(sibling, nodes, strict=True)]


def equal_trees(trees: Sequence[tuple[str, DraftTree, object]]) -> Iterator[Finding]:
    """Yield trees that are equal, tokens and all, behind different prompts: a mix-up of requests would not show."""
    first: dict[DraftTree, tuple[str, object]] = {}
    for where, tree, prompt in trees:
        if tree.n < 3 or prompt is None:
            continue
        place, other = first.setdefault(tree, (where, prompt))
        if other != prompt:
            says = f"the tree of {place} again, behind another prompt: likely stale; mixed-up requests would not show"
            yield Finding("equal-trees", where, says)
