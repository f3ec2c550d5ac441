"""Find what is off in rows of a tree: tokens, parents, links, depths, positions, masks, accepted nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, usage_errors
from ..base.files import parse_json, read_text
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


# --- files ------------------------------------------------------------------------------------------------------------


def _values(path: Path) -> Iterator[tuple[str, object]]:
    with usage_errors():
        text = read_text(path)
        if path.suffix != ".jsonl":
            yield path.name, parse_json(text, str(path))
            return
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        for number, line in lines:
            yield f"{path.name}:{number}", parse_json(line, f"{path}:{number}")
        if not lines:
            raise ValueError(f"{path}: empty, expected one JSON value a line")


def _rows(where: str, value: object) -> Iterator[Rows]:
    """The trees of one JSON value, whichever form it has."""
    if isinstance(value, dict) and isinstance(value.get("tree"), dict):  # a case or a recorded draft
        value = {**value, **value["tree"]}
    if not isinstance(value, dict):
        raise UsageError(f"{where}: got {type(value).__name__}, expected an object with a tree, links or a DDTree dump")
    named = {LINKS.get(name, name): held for name, held in value.items()}
    if "paths" in named:
        yield Rows(where, extra=dict(named))
        return
    if any(name in value for name in DDTREE):
        yield _ddtree(where, value)
    elif "next_token" in named or "next_sibling" in named:
        yield from _link_dump(where, named)
    elif "parents" in named or "tokens" in named:
        yield _plain(where, named)
    else:
        raise UsageError(
            f"{where}: keys {', '.join(map(str, value))[:80]}; expected tokens and parents, node_token_ids and "
            "parents, paths, or retrieve_next_token and retrieve_next_sibling"
        )


def _plain(where: str, named: Mapping) -> Rows:
    rows = Rows(where, extra=dict(named))
    for name in ("tokens", "parents", "depths", "positions", "accepted"):
        setattr(rows, name, _ints(where, name, named.get(name), none=name in ("tokens", "parents")))
    rows.mask = _mask(where, named.get("mask"))
    prompt = named.get("prompt_tokens")
    rows.prefix = _one(where, "prefix", named.get("prefix", len(prompt) if isinstance(prompt, list) else None))
    rows.count = _one(where, "count", named.get("count"))
    return rows


def _ddtree(where: str, value: Mapping) -> Rows:
    rows = Rows(where, extra=dict(value))
    drafted = _ints(where, "node_token_ids", value.get("node_token_ids")) or []
    rows.tokens = [value.get("root_token"), *drafted]
    rows.parents = _ints(where, "parents", value.get("parents"), none=True)
    depth = _ints(where, "node_depths", value.get("node_depths"))
    rows.depths = None if depth is None else [0, *depth]
    rows.accepted = _ints(where, "accepted_indices", value.get("accepted_indices"))
    return rows


def _link_dump(where: str, named: Mapping) -> Iterator[Rows]:
    """One Rows a request: dumps hold [rows] or [requests, rows]."""
    fields = ("tokens", "next_token", "next_sibling", "retrieve_index", "positions", "parents", "accepted")
    shaped = {name: named[name] for name in fields if named.get(name) is not None}
    links = shaped.get("next_token", shaped.get("next_sibling"))
    batched = isinstance(links, list) and bool(links) and isinstance(links[0], list)
    requests = len(links) if batched else 1
    for request in range(requests):
        rows = Rows(f"{where} request {request}" if batched else where, request=request, extra=dict(named))
        for name, held in shaped.items():
            if batched and isinstance(held, list) and held and not isinstance(held[0], list):  # flattened
                size = len(held) // requests
                held = held[request * size : (request + 1) * size]
            elif batched and isinstance(held, list):
                held = held[request] if request < len(held) else None
            setattr(rows, name, _ints(rows.where, name, held, none=name in ("tokens", "parents")))
        for name in ("prefix", "count"):
            held = named.get(name, named.get(name + "s"))
            held = held[request] if isinstance(held, list) and request < len(held) else held
            setattr(rows, name, _one(rows.where, name, held))
        if not batched:
            rows.mask = _mask(rows.where, named.get("mask"), len(links) if isinstance(links, list) else None)
        yield rows


def _ints(where: str, name: str, values: object, *, none: bool = False) -> list | None:
    """A list of integers as it is; with `none`, null may stand in it. Raises UsageError for anything else."""
    if values is None:
        return None
    good = isinstance(values, list) and all(
        (none and value is None) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62)
        for value in values
    )
    if not good:
        raise UsageError(f"{where}: {name} {values!r:.60}, expected a list of integers")
    return values


def _one(where: str, name: str, value: object) -> int | None:
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
    """The findings of one tree, and the tree itself if it is one, or what it was likely meant to be."""
    found: list[Finding] = []

    def say(name: str, text: str) -> None:
        found.append(Finding(name, rows.where, text))

    if "paths" in rows.extra:
        return _lint_paths(rows)
    if rows.parents is None and rows.next_token is not None:
        rows.parents = _parents_of_links(rows, say)
    tree = None if rows.parents is None else _tree(rows, say)
    if tree is None:
        return found, None
    if found:  # positions, masks and links of a tree that had to be guessed at would be guesses too
        return found, tree
    for check in (
        _check_links,
        _check_depths,
        _check_positions,
        _check_mask,
        _check_accepted,
        _check_index,
        _check_ids,
    ):
        check(rows, tree, say)
    return found, tree


def _lint_paths(rows: Rows) -> tuple[list[Finding], DraftTree | None]:
    paths = rows.extra["paths"]
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths):
        raise UsageError(f"{rows.where}: paths {paths!r:.60}, expected a list of lists of token ids")
    paths = [_ints(rows.where, "paths", path) for path in paths]
    firsts = {path[0] for path in paths if path}
    if len(firsts) > 1 and (tree := _from_paths([[None, *path] for path in paths])):
        says = f"the paths begin with {len(firsts)} tokens: likely they leave the root out, expected it first in each"
        return [Finding("root-not-stored", rows.where, says)], tree
    try:
        return [], from_paths(paths)
    except ValueError as error:
        return [Finding("path-within-path", rows.where, str(error))], None


def _from_paths(paths: list) -> DraftTree | None:
    try:
        return from_paths(paths)
    except ValueError:
        return None


def _tree(rows: Rows, say: Callable) -> DraftTree | None:
    parents = list(rows.parents)
    tokens = list(rows.tokens) if rows.tokens is not None else [None, *range(len(parents) - 1)]
    if None in parents:
        if parents[0] is None and None not in parents[1:]:
            say("root-parent", "the root's parent is null, expected -1")
            parents[0] = -1
        else:
            say("parent-missing", f"node {parents.index(None)} has no parent, expected a node")
            return None
    if None in tokens[1:]:
        say("token-missing", f"node {tokens.index(None, 1)} has no token, expected a token id")
        return None
    n = len(parents)
    if not n or not tokens:
        raise UsageError(f"{rows.where}: {n} parents and {len(tokens)} tokens, expected at least the root")
    if len(tokens) != n:
        return _lengths(tokens, parents, say)
    if rows.count is not None and rows.count != n:
        return _counted(rows.count, tokens, parents, say)
    tree = _try(tokens, parents)
    if tree is not None and not _padded(tokens, parents):
        return tree
    return _guess(tokens, parents, rows, say)


def _try(tokens: Sequence, parents: Sequence) -> DraftTree | None:
    try:
        return DraftTree(tuple(tokens), tuple(parents))
    except ValueError:
        return None


def _lengths(tokens: list, parents: list, say: Callable) -> DraftTree | None:
    if len(parents) == len(tokens) + 1 and (tree := _try([None, *tokens], parents)):
        say(
            "root-token-missing",
            f"{len(parents)} parents, {len(tokens)} tokens: the root has a parent and no token; "
            "likely the tokens leave the root out",
        )
        return tree
    rooted = [-1, *parents]
    if len(tokens) == len(parents) + 1 and (tree := _try(tokens, rooted)):
        say(
            "root-parent-missing",
            f"{len(tokens)} tokens, {len(parents)} parents: likely the parents leave the root out, and 0 is the root",
        )
        return tree
    shifted = [-1, *(parent + 1 for parent in parents)]
    if len(tokens) == len(parents) + 1 and (tree := _try(tokens, shifted)):
        say(
            "minus-one-is-root",
            "the parents leave the root out and -1 means the root here; expected 0, and -1 for the root alone",
        )
        return tree
    say("count-mismatch", f"{len(tokens)} tokens and {len(parents)} parents, expected one parent for each token")
    return None


def _counted(count: int, tokens: list, parents: list, say: Callable) -> DraftTree | None:
    n = len(parents)
    if count == n - 1 and not _tail(tokens, parents):
        say("count-without-root", f"count {count} of {n} rows that all hold nodes; likely it leaves the root out")
        return _try(tokens, parents)
    if count == n + 1:
        say("count-with-bonus", f"count {count} of {n} rows; likely it counts the bonus token too")
        return _try(tokens, parents)
    if not 1 <= count <= n:
        say("count-out-of-range", f"count {count}, expected 1..{n}")
        return None
    return _try(tokens[:count], parents[:count]) or _guess(tokens[:count], parents[:count], Rows(""), say)


def _tail(tokens: Sequence, parents: Sequence) -> int:
    """How many rows at the end look like padding: one token, at the root or nowhere, two at least or beside a child."""
    n, size = len(parents), 0
    while size < n - 1 and parents[n - 1 - size] in (0, -1) and tokens[n - 1 - size] == tokens[-1]:
        size += 1
    return size


def _padded(tokens: Sequence, parents: Sequence) -> bool:
    return _tail(tokens, parents) >= 2


def _guess(tokens: list, parents: list, rows: Rows, say: Callable) -> DraftTree | None:
    """Names what is wrong with parents that make no tree; the first reading that makes one is what was likely meant."""
    n, tail = len(parents), _tail(tokens, parents)
    if tail >= 2 and (tree := _try(tokens[:-tail], parents[:-tail])):
        say(
            "padding-rows",
            f"the last {tail} rows are one token {tokens[-1]} at parent {parents[-1]}: likely padding; "
            f"expected them left out, or count {n - tail}",
        )
        return tree
    many = parents.count(-1)
    # Where -1 is the root and the root is not stored, 0 is the first drafted node, which others continue.
    if (
        many >= 2
        and (0 in parents or parents.count(-1) == n)
        and tokens[0] is not None
        and (tree := _try([None, *tokens], [-1, *(parent + 1 for parent in parents)]))
    ):
        say(
            "root-not-stored",
            f"{many} nodes have parent -1: likely -1 means the root, which is not stored; expected "
            "it as node 0, and all parents one higher",
        )
        return tree
    if many >= 2 and (tree := _try(tokens, [-1, *(max(parent, 0) for parent in parents[1:])])):
        say(
            "minus-one-is-root",
            f"{many} nodes have parent -1, the root among them: likely -1 means the root here; expected 0",
        )
        return tree
    own = [node for node in range(1, n) if parents[node] == node]
    if parents[0] == 0 and not own and (tree := _try(tokens, [-1, *parents[1:]])):
        say("root-parent", "the root is its own parent, expected -1")
        return tree
    if parents[0] in (0, -1) and (tree := _try(tokens, [-1, *(parent - 1 for parent in parents[1:])])):
        say("parents-one-based", "every parent is one too high: they count from 1; expected from 0, the root being 0")
        return tree
    if parents[0] == 0 and (tree := _try([None, *tokens], [-1, *parents])):
        say(
            "root-not-stored",
            "node 0 has parent 0 and others are their own parents: likely parents count the root, "
            "which is not stored; expected it as node 0",
        )
        return tree
    odd = [node for node in range(n) if not -1 <= parents[node] < n]
    if odd:
        say(
            "parent-out-of-range",
            f"node {odd[0]} has parent {parents[odd[0]]}, expected -1..{n - 1}; a kernel may "
            "keep its running state there without a word",
        )
        return None
    seen: dict[tuple, int] = {}
    for node in range(1, n):
        twin = seen.setdefault((parents[node], tokens[node]), node)
        if twin != node and tokens[node] is not None:
            say(
                "duplicate-siblings",
                f"nodes {twin} and {node} are both token {tokens[node]} at parent "
                f"{parents[node]}, expected one; a walk takes the first, a mask shows both",
            )
            return None
    late = [node for node in range(n) if parents[node] > node]
    if late and not own:
        cyclic = _cycle(parents)
        if cyclic is not None:
            say("cycle", f"the parents of node {cyclic} lead back to it, expected them to end at the root")
        else:
            say(
                "child-before-parent",
                f"node {late[0]} has parent {parents[late[0]]}, which comes after it; expected "
                "parents first, or a kernel reads a state that is not there yet",
            )
        return None
    if own:
        say("cycle", f"node {own[0]} is its own parent, expected an earlier node")
    elif parents[0] != -1:
        say("root-parent", f"node 0 has parent {parents[0]}, expected -1")
    elif many >= 2:
        say("two-roots", f"{many} nodes have parent -1, expected node 0 alone")
    else:
        say("no-tree", "these tokens and parents make no tree")
    return None


def _cycle(parents: Sequence[int]) -> int | None:
    for start in range(len(parents)):
        node, steps = start, 0
        while 0 <= node < len(parents) and steps <= len(parents):
            node, steps = parents[node], steps + 1
        if steps > len(parents):
            return start
    return None


def _parents_of_links(rows: Rows, say: Callable) -> list | None:
    """Parents by next_token and next_sibling; padding rows are cut off. None, said why, if the links make none."""
    child, sibling = rows.next_token, rows.next_sibling
    if sibling is None or len(child) != len(sibling) or not child:
        say("count-mismatch", f"{len(child)} next_token and {len(sibling or ())} next_sibling, expected as many")
        return None
    n = len(child)
    for name, links in (("next_token", child), ("next_sibling", sibling)):
        for node, target in enumerate(links):
            if target is None or not NONE <= target < n:
                zero = all(link in (0, *range(node, n)) for link in links)
                say(
                    "link-out-of-range",
                    f"row {node} has {name} {target}, expected -1 or a row below {n}"
                    + ("; likely links count from 1" if target == n and zero else ""),
                )
                return None
    if 0 in child or 0 in sibling:
        at = child.index(0) if 0 in child else sibling.index(0)
        say("zero-ends-links", f"row {at} links to row 0, the root: likely 0 ends a link here, expected -1")
        return None
    down = [(node, target) for node, target in enumerate(sibling) if NONE < target <= node]
    if down:
        say(
            "siblings-descending",
            f"row {down[0][0]} has next_sibling {down[0][1]}, which comes before it: siblings are "
            "listed from the last; expected ascending, or a kernel misses all but one",
        )
        return None
    parents: list[int | None] = [-1] + [None] * (n - 1)
    for node in range(n):
        target, steps = child[node], 0
        while target != NONE and steps <= n:
            if parents[target] is not None:
                say(
                    "two-parents",
                    f"row {target} is reached from rows {parents[target]} and {node}, expected one parent",
                )
                return None
            parents[target], target, steps = node, sibling[target], steps + 1
    linked = max((node for node in range(n) if parents[node] is not None), default=0) + 1
    lost = [node for node in range(linked) if parents[node] is None]
    if lost:
        say("not-linked", f"row {lost[0]} is linked from nowhere though later rows are, expected a link to it")
        return None
    if rows.count is not None and rows.count != linked:
        name = {linked - 1: "count-without-root", linked + 1: "count-with-bonus"}.get(rows.count, "count-mismatch")
        say(name, f"count {rows.count}, the links reach {linked} rows with the root")
        rows.count = None
    for name in ("tokens", "positions"):
        held = getattr(rows, name)
        if held is not None and len(held) == n:
            setattr(rows, name, held[:linked])
    if rows.mask is not None and rows.mask.shape[0] == n and linked < n:
        rows.mask = rows.mask[:linked, : rows.mask.shape[1] - (n - linked)]
    rows.extra["rows"] = n
    return parents[:linked]


# --- what goes with a tree --------------------------------------------------------------------------------------------


def _check_links(rows: Rows, tree: DraftTree, say: Callable) -> None:
    if rows.next_token is None or rows.next_sibling is None:
        return
    n = len(rows.next_token)
    if len(rows.next_sibling) != n or n < len(tree):
        say("count-mismatch", f"{n} next_token, {len(rows.next_sibling)} next_sibling, {len(tree)} nodes")
        return
    right = to_links(tree, n)
    if rows.next_token == right.next_token.tolist() and rows.next_sibling == right.next_sibling.tolist():
        return
    down = [node for node, target in enumerate(rows.next_sibling) if NONE < (target or 0) <= node and target]
    if down:
        say("siblings-descending", f"row {down[0]} has next_sibling {rows.next_sibling[down[0]]}, expected ascending")
        return
    wrong = [
        node
        for node in range(len(tree))
        if rows.next_token[node] != right.next_token[node] or rows.next_sibling[node] != right.next_sibling[node]
    ]
    if wrong:
        flat = [*range(1, n), NONE]
        if rows.next_token == flat and not tree.is_chain:
            say("links-are-a-chain", "next_token goes from row to row: the kernel was given a chain, not the tree")
        else:
            say(
                "links-of-another-tree",
                f"the links of row {wrong[0]} are not those of this tree; likely stale, of another step or request",
            )


def _check_depths(rows: Rows, tree: DraftTree, say: Callable) -> None:
    if rows.depths is None:
        return
    got, own = list(rows.depths), list(tree.depth)
    if got == own:
        return
    if len(got) != len(own):
        say("count-mismatch", f"{len(got)} depths with the root, {len(own)} nodes")
    elif got[1:] == [depth - 1 for depth in own[1:]]:
        say("depths-zero-based", "children of the root have depth 0, expected 1")
    elif got[1:] == [depth + 1 for depth in own[1:]]:
        say("depths-off-by-one", "children of the root have depth 2, expected 1")
    else:
        node = next(node for node in range(len(own)) if got[node] != own[node])
        say("depths-of-another-tree", f"node {node} has depth {got[node]}, by its parents {own[node]}")


def _check_positions(rows: Rows, tree: DraftTree, say: Callable) -> None:
    if rows.positions is None:
        return
    got, depth = list(rows.positions), list(tree.depth)
    if len(got) != len(depth):
        say("count-mismatch", f"{len(got)} positions, {len(depth)} nodes")
        return
    base = rows.prefix if rows.prefix is not None else got[0]
    offset = [place - level for place, level in zip(got, depth, strict=True)]
    if got == [base + level for level in depth]:
        return
    if got == [got[0] + node for node in range(len(got))] and not tree.is_chain:
        say("positions-flat", "positions rise by one from row to row: they are the flat index, expected prefix + depth")
    elif len(set(offset)) == 1 and offset[0] == 0:
        say("positions-without-prefix", f"positions are the bare depths, expected {base} more")
    elif len(set(offset)) == 1 and abs(offset[0] - base) == 1:
        say(
            "positions-off-by-one",
            f"the root stands at {got[0]}, expected {base}: the prompt's {base} tokens come before it",
        )
    elif len(set(offset)) == 1:
        say("positions-shifted", f"the root stands at {got[0]}, expected {base}")
    elif len(set(got)) == 1:
        say("positions-constant", f"every row stands at {got[0]}, expected prefix + depth")
    else:
        node = next(node for node in range(len(got)) if got[node] - got[0] != depth[node])
        say(
            "positions-of-another-tree",
            f"node {node} stands at {got[node]}, expected {got[0] + depth[node]}; likely stale, of another step",
        )


def _check_mask(rows: Rows, tree: DraftTree, say: Callable) -> None:
    mask, n = rows.mask, len(tree)
    if mask is None:
        return
    prefix = mask.shape[1] - mask.shape[0]
    if mask.shape[0] != n:
        say("mask-rows", f"the mask has {mask.shape[0]} rows, the tree {n} nodes")
        return
    known = rows.prefix
    if prefix not in (0, known) and known is not None:
        if mask.shape[1] == known:
            say("mask-units", f"the mask has {known} columns, the prefix alone: its rows' own columns are missing")
        elif mask.shape[1] == known + n - 1 or mask.shape[1] == known + n + 1:
            say(
                "mask-columns-off-by-one",
                f"the mask has {mask.shape[1]} columns, expected {known + n}: {known} of the "
                f"prefix and {n} rows; likely the root is counted {'twice' if prefix > known else 'in the prefix'}",
            )
        else:
            say(
                "mask-units",
                f"the mask has {mask.shape[1]} columns, expected {n} rows, or {known + n} tokens with the prefix",
            )
        return
    if prefix < 0:
        say("mask-units", f"the mask is {list(mask.shape)}, expected as many columns as rows, or more")
        return
    block, right = mask[:, prefix:], np.asarray(tree.ancestor_mask)
    if np.array_equal(block, right):
        if prefix and not mask[:, :prefix].all():
            row = int(np.flatnonzero(~mask[:, :prefix].all(1))[0])
            say("mask-hides-prefix", f"row {row} does not see the whole prefix, expected it to")
        return
    if np.array_equal(block, ~right):
        say("mask-inverted", "1 marks what is hidden, expected 1 for what a row sees")
    elif np.array_equal(block.T, right):
        say("mask-transposed", "mask[i, j] tells whether j sees i, expected whether i sees j")
    elif np.array_equal(block, np.tril(np.ones((n, n), dtype=bool))):
        say("mask-causal", "every row sees all rows before it, expected its ancestors and itself")
    elif np.array_equal(block | np.eye(n, dtype=bool), right):
        say("mask-without-self", "rows do not see themselves, expected them to")
    else:
        row = int(np.flatnonzero((block != right).any(1))[0])
        say(
            "mask-of-another-tree",
            f"row {row} sees {np.flatnonzero(block[row]).tolist()[:12]}, expected "
            f"{np.flatnonzero(right[row]).tolist()[:12]}",
        )


def _check_accepted(rows: Rows, tree: DraftTree, say: Callable) -> None:
    got = rows.accepted
    if not got:
        return
    shift = rows.request * int(rows.extra.get("rows", len(tree)))
    path = [node for node in got if node != NONE]
    if rows.request and path and min(path) >= shift:
        path = [node - shift for node in path]
    while len(path) > 1 and path[-1] == 0 and path[-2] != 0:  # padding with zeros is common
        path.pop()
    if not path or any(not 0 <= node < len(tree) for node in path):
        say("accepted-out-of-range", f"accepted {got[:8]}, expected node ids in 0..{len(tree) - 1}")
        return
    if path == list(tree.path(path[-1])):
        return
    if path[0] != 0 and path == list(tree.path(path[-1]))[1:]:
        say("accepted-without-root", f"accepted {path[:8]} begins at a child of the root, expected 0 first")
    elif _along(tree, [node + 1 for node in path]):
        say(
            "accepted-off-by-one",
            f"accepted {path[:8]} is a path when every id is one higher: likely drafted nodes "
            "count from 0; expected node ids, the root being 0",
        )
    elif path == list(range(len(path))):
        say("accepted-by-depth", f"accepted {path[:8]} counts rows, it is no path; likely depths, expected node ids")
    else:
        say("accepted-no-path", f"accepted {path[:8]} is no path of the tree, expected {list(tree.path(path[-1]))[:8]}")


def _along(tree: DraftTree, path: Sequence[int]) -> bool:
    """Whether these nodes are a path below the root."""
    return all(node < len(tree) for node in path) and [0, *path] == list(tree.path(path[-1]))


def _check_index(rows: Rows, tree: DraftTree, say: Callable) -> None:
    if rows.retrieve_index is None:
        return
    got = rows.retrieve_index
    first = rows.request * len(got)
    if got == list(range(first, first + len(got))):
        return
    if rows.request and got == list(range(len(got))):
        say(
            "index-per-request",
            f"retrieve_index of request {rows.request} begins at 0, expected {first}: a place in the whole batch",
        )
    else:
        say("index-wrong", f"retrieve_index {got[:6]}..., expected {first}, {first + 1}, ...")


def _check_ids(rows: Rows, tree: DraftTree, say: Callable) -> None:
    """Rows of a pass were fed the tree's tokens."""
    if rows.input_ids is None:
        return
    nodes = rows.nodes if rows.nodes is not None else list(range(len(rows.input_ids)))
    pairs = [(node, token) for node, token in zip(nodes, rows.input_ids, strict=False) if 0 <= node < len(tree)]
    if all(tree.tokens[node] in (token, None) for node, token in pairs):
        return
    shifted = [(node + 1, token) for node, token in pairs if node + 1 < len(tree)]
    if shifted and all(tree.tokens[node] == token for node, token in shifted):
        say("rows-without-root", "row i was fed the token of node i + 1: the pass leaves the root out; give nodes")
        return
    node, token = next((node, token) for node, token in pairs if tree.tokens[node] != token)
    say("input-ids", f"node {node} was fed token {token}, the tree has {tree.tokens[node]}")


def _skip_padding(rows: Rows) -> None:
    """Links without the rows that compute no node: SGLang's padding hangs below the root, as its last children."""
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


def _equal_trees(seen: Sequence[tuple[str, DraftTree, object]]) -> Iterator[Finding]:
    """Trees that are equal, tokens and all, behind different prompts: a mix-up of requests would not show."""
    first: dict[DraftTree, tuple[str, object]] = {}
    for where, tree, prompt in seen:
        if len(tree) < 3 or prompt is None:
            continue
        other = first.setdefault(tree, (where, prompt))
        if other[1] != prompt:
            yield Finding(
                "equal-trees",
                where,
                f"the tree of {other[0]} again, behind another prompt: likely stale; and "
                "were requests mixed up, nothing would show it",
            )
