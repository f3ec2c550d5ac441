"""A draft tree drawn with characters: which node continues which, what each verdict was, and what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

from .text import plain, token_text

LINES = {False: ("├─ ", "└─ ", "│  ", "   "), True: ("|- ", "`- ", "|  ", "   ")}


def children_of(nodes: Sequence[dict]) -> list[list[int]]:
    """Return the nodes that continue each node of a record's case."""
    children: list[list[int]] = [[] for _ in nodes]
    for node in nodes[1:]:
        children[node["parent"]].append(node["node"])
    return children


def draw_tree(case: dict, mode: str = "tree_unforked", tokens: dict[str, str] | None = None, ascii_only: bool = False):
    """Draw the tree of a record's case. Each node has its id, its token and its verdicts; `*` marks the
    path that ar accepts and `+` the one that `mode` accepts.

    Raises ValueError for a mode that the case does not have.
    """
    if mode not in case["modes"] and mode != "ar":
        raise ValueError(f"mode: got {mode!r}, expected one of ar, {', '.join(case['modes'])}")
    tokens = tokens or {}
    tee, corner, bar, gap = LINES[ascii_only]
    nodes = case["nodes"]
    children = children_of(nodes)
    words = {
        name: "not run" if case["modes"][name]["verdict"] in ("unsupported", "not_run") else "not judged"
        for name in ("tree_forked", "tree_unforked")
    }
    walk = case["acceptance"].get(mode)  # none if it was not run
    ours, theirs = set(case["acceptance"]["ar"]["path"]), set(walk["path"] if walk else ())
    lines = [
        f"case {plain(case['id'])}: node token [forked / unforked]; * accepted by ar, + accepted by {mode}; "
        f"bonus of ar {token_text(case['acceptance']['ar']['bonus'], tokens)}, "
        + (f"of {mode} {token_text(walk['bonus'], tokens)}" if walk else f"{mode} was not run")
    ]
    waiting = [(0, "", "")]  # node, what stands before it, what stands before its children
    while waiting:
        place, before, below = waiting.pop()
        node = nodes[place]
        verdicts = " / ".join(node[name]["verdict"] or word for name, word in words.items())
        marks = " *" * (place in ours) + " +" * (place in theirs)
        lines.append(f"{before}{place} {token_text(node['token'], tokens)} [{verdicts}]{marks}")
        last = children[place][-1:]
        for child in reversed(children[place]):
            end = [child] == last
            waiting.append((child, below + (corner if end else tee), below + (gap if end else bar)))
    text = "\n".join(lines)
    return text.encode("ascii", "backslashreplace").decode() if ascii_only else text
