"""Broken trees and traces are named by their mistake; clean ones are let pass in silence."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_check.base.errors import UsageError
from ddtree_check.cli.main import main
from ddtree_check.trace.lint import _root_twice, lint
from ddtree_check.trace.write import TraceWriter
from ddtree_check.tree.draft_tree import DraftTree
from ddtree_check.tree.drafts.shapes import shape
from ddtree_check.tree.formats import to_batch_links, to_links
from tests.forms import to_mask, to_paths, to_trace

TREE = DraftTree((5, 17, 23, 101, 44, 150, 9), (-1, 0, 0, 1, 2, 4, 1))
TOKENS, PARENTS = list(TREE.tokens), list(TREE.parents)
PROMPT = [3, 1, 4]
VOCAB = 200


def names(path) -> list[str]:
    return [finding.name for finding in lint(path)]


def write(tmp_path, value, name="tree.json"):
    path = tmp_path / name
    path.write_text(json.dumps(value) if not name.endswith("l") else "\n".join(map(json.dumps, value)))
    return path


def tree_file(**changes):
    return {"tokens": TOKENS, "parents": PARENTS} | changes


def mask(tree=TREE, prefix=0):
    return to_mask(tree, prefix).astype(int).tolist()


PLACED = [len(PROMPT) + depth for depth in TREE.depth]
TREES = [
    pytest.param(tree_file(parents=[0, 1, 1, 2, 3, 5, 2]), "parents-one-based", id="parents-one-based"),
    pytest.param(tree_file(parents=[-1, 1, 1, 2, 3, 5, 2]), "parents-one-based", id="parents-one-based-root-right"),
    pytest.param({"tokens": TOKENS[1:], "parents": [-1, -1, 0, 1, 3, 0]}, "root-not-stored", id="minus-one-no-root"),
    pytest.param({"tokens": TOKENS[1:], "parents": [0, 0, 1, 2, 4, 1]}, "root-not-stored", id="zero-no-root"),
    pytest.param(tree_file(parents=[-1, -1, -1, 1, 2, 4, 1]), "minus-one-is-root", id="minus-one-is-root"),
    pytest.param(
        {"tokens": TOKENS, "parents": [-1, -1, 0, 1, 3, 0]}, "minus-one-is-root", id="tokens-with-parents-without-root"
    ),
    pytest.param({"tokens": TOKENS, "parents": PARENTS[1:]}, "root-parent-missing", id="root-has-no-parent"),
    pytest.param({"tokens": TOKENS[1:], "parents": PARENTS}, "root-token-missing", id="root-has-no-token"),
    pytest.param(tree_file(parents=[0, *PARENTS[1:]]), "root-parent", id="root-its-own-parent"),
    pytest.param(tree_file(parents=[-1, 0, 0, 4, 2, 4, 1]), "child-before-parent", id="child-before-parent"),
    pytest.param(tree_file(parents=[-1, 0, 4, 1, 2, 4, 1]), "cycle", id="cycle"),
    pytest.param(tree_file(parents=[-1, 0, 0, 1, 2, 40, 1]), "parent-out-of-range", id="parent-too-high"),
    pytest.param(tree_file(parents=[-1, 0, 0, 1, 2, -3, 1]), "parent-out-of-range", id="parent-negative"),
    pytest.param(tree_file(tokens=[5, 17, 17, 101, 44, 150, 9]), "duplicate-siblings", id="duplicate-siblings"),
    pytest.param(
        {"tokens": [*TOKENS, 0, 0, 0], "parents": [*PARENTS, 0, 0, 0]}, "padding-rows", id="padding-at-the-root"
    ),
    pytest.param(
        {"tokens": [*TOKENS, 0, 0], "parents": [*PARENTS, -1, -1]}, "padding-rows", id="padding-without-parent"
    ),
    pytest.param(tree_file(count=6), "count-without-root", id="count-without-root"),
    pytest.param(tree_file(count=8), "count-with-bonus", id="count-with-bonus"),
    pytest.param({"tokens": TOKENS, "parents": PARENTS[:4]}, "count-mismatch", id="too-few-parents"),
    pytest.param(tree_file(prefix=3, positions=[3, 4, 5, 6, 7, 8, 9]), "positions-flat", id="positions-flat"),
    pytest.param(tree_file(prefix=3, positions=list(TREE.depth)), "positions-without-prefix", id="positions-bare"),
    pytest.param(
        tree_file(prefix=3, positions=[p - 1 for p in PLACED]), "positions-off-by-one", id="positions-one-too-few"
    ),
    pytest.param(
        tree_file(prefix=3, positions=[p + 1 for p in PLACED]), "positions-off-by-one", id="positions-one-too-many"
    ),
    pytest.param(tree_file(prefix=3, positions=[3] * 7), "positions-constant", id="positions-constant"),
    pytest.param(tree_file(mask=np.array(mask()).T.tolist()), "mask-transposed", id="mask-transposed"),
    pytest.param(tree_file(mask=(1 - np.array(mask())).tolist()), "mask-inverted", id="mask-inverted"),
    pytest.param(tree_file(mask=np.tril(np.ones((7, 7), int)).tolist()), "mask-causal", id="mask-causal"),
    pytest.param(
        tree_file(mask=(np.array(mask()) - np.eye(7, dtype=int)).tolist()), "mask-without-self", id="mask-no-self"
    ),
    pytest.param(tree_file(prefix=3, mask=mask(prefix=4)), "mask-columns-off-by-one", id="mask-one-column-more"),
    pytest.param(tree_file(prefix=30, mask=mask(prefix=4)), "mask-units", id="mask-of-another-length"),
    pytest.param(tree_file(prefix=3, mask=[[*row[:2], 0, *row[3:]] for row in mask(prefix=3)]), "mask-hides-prefix",
                 id="mask-hides-prefix"),
    pytest.param(tree_file(accepted=[2, 4, 5]), "accepted-without-root", id="accepted-without-root"),
    pytest.param(tree_file(accepted=[1, 3, 4]), "accepted-off-by-one", id="accepted-from-zero"),
    pytest.param(tree_file(accepted=[0, 1, 2]), "accepted-by-depth", id="accepted-by-depth"),
    pytest.param(tree_file(accepted=[0, 3, 5]), "accepted-no-path", id="accepted-no-path"),
    pytest.param(to_trace(TREE, (0, 2)) | {"node_depths": [d - 1 for d in TREE.depth[1:]]}, "depths-zero-based",
                 id="ddtree-depths-from-zero"),
    pytest.param(to_trace(TREE, (0, 2)) | {"parents": PARENTS[1:]}, "root-parent-missing", id="ddtree-parents-no-root"),
    pytest.param(to_trace(TREE, (0, 2)) | {"accepted_indices": [2, 4]}, "accepted-without-root", id="ddtree-accepted"),
    pytest.param({"paths": [[17, 101], [23, 44]]}, "root-not-stored", id="paths-without-root"),
    pytest.param({"paths": [[5, 17], [5, 17, 101]]}, "path-within-path", id="path-within-path"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "name"), TREES)
def test_a_broken_tree_is_named(tmp_path, value, name):
    assert names(write(tmp_path, value)) == [name]


def link_dump(tree=TREE, rows=None, **changes):
    links = to_links(tree, rows)
    rows = len(links.next_token)
    return {
        "retrieve_next_token": links.next_token.tolist(),
        "retrieve_next_sibling": links.next_sibling.tolist(),
        "retrieve_index": list(range(rows)),
        "draft_tokens": [*tree.tokens, *[0] * (rows - len(tree))],
    } | changes


LINKS = [
    pytest.param(
        link_dump(retrieve_next_token=[2, 6, 4, -1, 5, -1, -1], retrieve_next_sibling=[-1, -1, 1, -1, -1, -1, 3]),
        "siblings-descending", id="siblings-descending",
    ),
    pytest.param(link_dump(retrieve_next_token=[1, 3, 4, 0, 5, 0, 0], retrieve_next_sibling=[0, 2, 0, 6, 0, 0, 0]),
                 "zero-ends-links", id="zero-ends-links"),
    pytest.param(link_dump(retrieve_next_token=[1, 3, 4, -1, 5, -1, 7]), "link-out-of-range", id="link-out-of-range"),
    pytest.param(link_dump(retrieve_next_token=[1, 3, 4, -1, 4, -1, -1]), "two-parents", id="two-parents"),
    pytest.param(link_dump(retrieve_next_sibling=[-1, -1, -1, 6, -1, -1, -1]), "not-linked", id="not-linked"),
    pytest.param(link_dump(retrieve_next_token=[1, 3, 4, -1, 5, -1, -1], parents=[-1, 0, 0, 2, 2, 4, 1]),
                 "links-of-another-tree", id="links-of-another-tree"),
    pytest.param(link_dump(retrieve_next_token=[1, 2, 3, 4, 5, 6, -1], retrieve_next_sibling=[-1] * 7, parents=PARENTS),
                 "links-are-a-chain", id="links-are-a-chain"),
    pytest.param(link_dump(retrieve_index=[1, 2, 3, 4, 5, 6, 7]), "index-wrong", id="index-from-one"),
    pytest.param(link_dump(rows=9, count=6), "count-without-root", id="count-without-root"),
    pytest.param(link_dump(positions=list(range(3, 10)), seq_len=3), "positions-flat", id="positions-flat"),
    pytest.param(link_dump(custom_mask=np.array(mask()).T.ravel().tolist()), "mask-transposed", id="mask-transposed"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "name"), LINKS)
def test_a_broken_dump_of_links_is_named(tmp_path, value, name):
    assert names(write(tmp_path, value)) == [name]


def test_links_of_a_batch_are_named_by_request(tmp_path):
    links = to_batch_links([TREE, TREE.with_root(6)])
    value = {
        "retrieve_next_token": links.next_token.tolist(),
        "retrieve_next_sibling": links.next_sibling.tolist(),
        "retrieve_index": links.retrieve_index.tolist(),
        "draft_token": [*TREE.tokens, *TREE.with_root(6).tokens],
        "positions": [*PLACED, *PLACED],
        "seq_lens": [3, 3],
        "accept_index": [[0, 2, 4, -1], [7, 8, -1, -1]],
    }
    path = write(tmp_path, value)
    assert names(path) == []
    value["retrieve_index"][1] = list(range(7))
    (finding,) = lint(write(tmp_path, value))
    assert finding.name == "index-per-request" and "request 1" in finding.where
    value["retrieve_index"] = links.retrieve_index.tolist()
    value["positions"][7:] = range(3, 10)
    (finding,) = lint(write(tmp_path, value))
    assert finding.name == "positions-flat" and "request 1" in finding.where


CLEAN = [
    pytest.param(tree_file(), id="tree"),
    pytest.param(tree_file(tokens=[None, *TOKENS[1:]]), id="root-token-null"),
    pytest.param(tree_file(prefix=3, positions=PLACED, mask=mask(prefix=3), accepted=[0, 2, 4], count=7), id="all"),
    pytest.param(tree_file(mask=mask(), accepted=[0]), id="accepted-nothing"),
    pytest.param({"tokens": [1, 2, 3], "parents": [-1, 0, 1], "positions": [3, 4, 5], "prefix": 3}, id="chain"),
    pytest.param({"tokens": [1, 2, 3, 4], "parents": [-1, 0, 0, 0]}, id="star"),
    pytest.param({"tokens": [1], "parents": [-1]}, id="root-alone"),
    pytest.param({"tokens": [1, 0, 7], "parents": [-1, 0, 1]}, id="token-zero"),
    pytest.param(to_trace(TREE, (0, 2, 4)), id="ddtree"),
    pytest.param({"paths": [list(path) for path in to_paths(TREE)]}, id="paths"),
    pytest.param(link_dump(), id="links"),
    pytest.param(link_dump(rows=9, count=7, seq_len=3), id="links-padded"),
    pytest.param({"id": "a/1", "prompt_tokens": PROMPT, "tree": tree_file()}, id="case"),
]


@pytest.mark.parametrize("value", CLEAN)
def test_a_clean_file_is_let_pass_in_silence(tmp_path, value):
    assert [str(finding) for finding in lint(write(tmp_path, value))] == []


@pytest.mark.parametrize("name", ["random", "comb", "star", "chain"])
def test_drawn_trees_in_every_form_are_let_pass(tmp_path, name):
    findings = []
    for seed in range(6):
        tree = shape(name, 20, vocab=VOCAB, seed=seed, root=5)
        path = tree.path(len(tree) - 1)
        values = [
            tree.to_json() | {"mask": mask(tree, 2), "prefix": 2, "positions": [2 + depth for depth in tree.depth]},
            to_trace(tree, path),
            link_dump(tree, len(tree) + 3, accept_index=[*path, -1, -1]),
            {"paths": [list(path) for path in to_paths(tree)]},
        ]
        findings += [str(finding) for finding in lint(write(tmp_path, values, f"seed-{seed}.jsonl"))]
    assert findings == []


def test_equal_trees_behind_different_prompts_are_named(tmp_path):
    cases = [{"id": f"c{n}", "prompt_tokens": [n, 2], "tree": tree_file()} for n in range(2)]
    assert names(write(tmp_path, cases, "cases.jsonl")) == ["equal-trees"]
    cases[1]["prompt_tokens"] = cases[0]["prompt_tokens"]
    assert names(write(tmp_path, cases, "cases.jsonl")) == []


# --- traces -----------------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A step of two rounds as a server might dump them, with one thing to change."""

    folder: object

    def write(self, *, prompt=PROMPT, tree=TREE, second=None, rows=None, nodes=None, **changes):
        lists = {"positions": [len(prompt) + depth for depth in tree.depth], "parents": list(tree.parents)}
        lists |= {"input_ids": list(tree.tokens), "mask": to_mask(tree, len(prompt))} | changes
        with TraceWriter(self.folder, engine="x", model="m", dtype="float32", vocab_size=VOCAB) as trace:
            first = DraftTree((4, 7, 8, 9), (-1, 0, 1, 1))
            step = trace.step("r/0", [3, 1], first.tokens, first.parents, request="r", round=0)
            step.add("tree_forked", rng().normal(size=(4, VOCAB)), parents=first.parents)
            assert step.write()
            step = trace.step("r/1", prompt, tree.tokens, tree.parents, request="r", round=1)
            count = len(tree) if rows is None else rows
            step.add("tree_forked", rng().normal(size=(count, VOCAB)), nodes=nodes, **lists)
            assert step.write()
        return self.folder


def rng():
    return np.random.default_rng(0)


CHAIN = [-1, 0, 1, 2, 3, 4, 5]
BROKEN = [
    pytest.param({"positions": list(range(3, 10))}, "positions-flat", id="positions-flat"),
    pytest.param({"positions": list(TREE.depth)}, "positions-without-prefix", id="positions-bare"),
    pytest.param({"positions": [p + 1 for p in PLACED]}, "positions-off-by-one", id="positions-off-by-one"),
    pytest.param({"mask": to_mask(TREE).T}, "mask-transposed", id="mask-transposed"),
    pytest.param({"mask": ~to_mask(TREE)}, "mask-inverted", id="mask-inverted"),
    pytest.param({"mask": np.tril(np.ones((7, 7), bool))}, "mask-causal", id="mask-causal"),
    pytest.param({"parents": [-1, 0, 1, 1, 0, 0, 0]}, "stale-parents", id="stale-parents"),
    pytest.param({"parents": CHAIN}, "links-are-a-chain", id="parents-are-a-chain"),
    pytest.param({"parents": [-1, 0, 0, 1, 2, 3, 1]}, "parents-of-another-tree", id="parents-of-another-tree"),
    pytest.param(
        {"next_token": [1, 2, 3, 4, 5, 6, -1], "next_sibling": [-1] * 7}, "links-are-a-chain", id="links-are-a-chain"
    ),
    pytest.param({"input_ids": [*TOKENS[1:], 9]}, "rows-without-root", id="input-ids-shifted"),
    pytest.param({"input_ids": [*TOKENS[:3], 77, *TOKENS[4:]]}, "input-ids", id="input-ids"),
    pytest.param({"prompt": [3, 1, 5], "positions": [2 + depth for depth in TREE.depth]}, "root-in-prompt",
                 id="root-in-prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "name"), BROKEN)
def test_a_broken_trace_is_named(tmp_path, changes, name):
    found = names(Recorded(tmp_path / "t").write(**changes))
    assert found == [name] if name != "root-in-prompt" else name in found


def test_a_clean_trace_is_let_pass(tmp_path):
    assert [str(finding) for finding in lint(Recorded(tmp_path / "t").write())] == []
    padded = [0, 1, 2, 3, 4, 5, 6, -1, -1]
    folder = Recorded(tmp_path / "padded").write(
        rows=9, nodes=padded, positions=[*PLACED, 3, 3], input_ids=[*TOKENS, 0, 0], mask=to_mask(TREE, 3, 9),
        parents=[*PARENTS, 0, 0],
    )  # fmt: skip
    assert [str(finding) for finding in lint(folder)] == []


def edited(folder, change):
    """A trace whose last step's JSON is changed behind the writer's back."""
    path = sorted(folder.iterdir())[-1]
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    step = json.loads(table["__metadata__"]["step"])
    change(step, table)
    table["__metadata__"]["step"] = json.dumps(step)
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + size :])
    return folder


def _set(**values):
    return lambda step, table: step.update(values)


def _tree(**values):
    return lambda step, table: step["tree"].update(values)


def _nodes(step, table):
    step["passes"][0]["nodes"] = [1, 2, 3, 4, 5, 6, 7]


SPOILT = [
    pytest.param(_tree(parents=[0, 1, 1, 2, 3, 5, 2]), "parents-one-based", id="parents-one-based"),
    pytest.param(_tree(parents=[-1, -1, -1, 1, 2, 4, 1]), "minus-one-is-root", id="minus-one-is-root"),
    pytest.param(_tree(parents=[-1, 0, 0, 4, 2, 4, 1]), "child-before-parent", id="child-before-parent"),
    pytest.param(_tree(parents=[-1, 0, 0, 1, 2, 40, 1]), "parent-out-of-range", id="parent-out-of-range"),
    pytest.param(_tree(tokens=[5, 17, 17, 101, 44, 150, 9]), "duplicate-siblings", id="duplicate-siblings"),
    pytest.param(_tree(tokens=TOKENS[:6], parents=PARENTS[:6]), "padding-rows", id="more-rows-than-nodes"),
    pytest.param(_tree(tokens=[*TOKENS, 8], parents=[*PARENTS, 3]), "rows-without-root", id="fewer-rows-than-nodes"),
    pytest.param(_set(accepted=[2, 4]), "accepted-without-root", id="accepted-without-root"),
    pytest.param(_set(id="r/0"), "duplicate-step", id="duplicate-step"),
    pytest.param(_nodes, "nodes-one-based", id="nodes-one-based"),
    pytest.param(_set(passes=[]), "unreadable", id="nothing-recorded"),
]


@pytest.mark.parametrize(("change", "name"), SPOILT)
def test_a_trace_that_cannot_be_read_is_named_all_the_same(tmp_path, change, name):
    folder = edited(Recorded(tmp_path / "t").write(), change)
    assert name in names(folder)


def test_a_tree_left_over_from_another_request_is_named(tmp_path):
    with TraceWriter(tmp_path / "t", engine="x", model="m", dtype="float32", vocab_size=VOCAB) as trace:
        for request in range(2):
            step = trace.step(f"{request}/0", [request, 2], TREE.tokens, TREE.parents, request=str(request))
            step.add("tree_forked", rng().normal(size=(7, VOCAB)))
            step.write()
    assert names(tmp_path / "t") == ["equal-trees"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_and_exits_1(tmp_path, capsys):
    assert main(["lint", str(write(tmp_path, tree_file(prefix=3, positions=list(range(3, 10)))))]) == 1
    out = capsys.readouterr().out
    assert "positions-flat: positions rise by one" in out and "1 found: positions-flat" in out
    assert main(["lint", str(write(tmp_path, tree_file()))]) == 0
    assert "nothing found" in capsys.readouterr().out


OTHER = [
    pytest.param([1, 2], "expected an object", id="list"),
    pytest.param({"hello": 1}, "keys hello; expected tokens and parents", id="other-keys"),
    pytest.param({"tokens": "abc", "parents": [-1]}, "tokens 'abc', expected a list of integers", id="text"),
    pytest.param({"tokens": [1], "parents": [True]}, "expected a list of integers", id="truth-value"),
    pytest.param(tree_file(mask=[[1], [1, 0]]), "rows of 0 and 1, all of one length", id="ragged-mask"),
    pytest.param(tree_file(prefix="3"), "prefix '3', expected a number", id="prefix-text"),
]


@pytest.mark.parametrize(("value", "message"), OTHER)
def test_what_is_no_tree_is_refused_in_one_line(tmp_path, value, message, capsys):
    path = write(tmp_path, value)
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        lint(path)
    assert main(["lint", str(path)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_name_stands_in_the_documentation():
    repo = Path(__file__).resolve().parents[2]
    source = "".join((repo / "ddtree_check" / folder / "lint.py").read_text() for folder in ("tree", "trace"))
    used = set(re.findall(r'"([a-z]+(?:-[a-z]+)+|cycle|unreadable)"', source))
    told = set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`", (repo / "docs" / "trace.md").read_text().split("## Lint")[1]))
    assert len(used) > 40 and used <= told


ODD = (None, True, -1, 0, 10**30, 1.5, "", "x", [], [[]], {}, [None], [True], ["a"], [10**30], {"a": 1}, [[1, 0], [1]])


@pytest.mark.parametrize("seed", range(2))
def test_spoilt_json_is_named_or_refused_and_nothing_else(tmp_path, seed):
    generator = np.random.default_rng(seed)
    whole = tree_file(prefix=3, positions=PLACED, mask=mask(prefix=3), accepted=[0, 2, 4], count=7)
    sources = [whole, link_dump(rows=9, count=7, seq_len=3), to_trace(TREE, (0, 2)), {"paths": [[5, 1], [5, 2]]},
               {"id": "c", "prompt_tokens": PROMPT, "tree": tree_file()}]  # fmt: skip
    outcomes = set()
    for _ in range(400):
        value = json.loads(json.dumps(sources[generator.integers(len(sources))]))
        for _ in range(generator.integers(1, 3)):
            held = value
            key = list(held)[generator.integers(len(held))]
            if isinstance(held[key], list) and held[key] and generator.random() < 0.6:
                held, key = held[key], int(generator.integers(len(held[key])))
            held[key] = copy.deepcopy(ODD[generator.integers(len(ODD))])
        try:
            outcomes.add("named" if lint(write(tmp_path, value)) else "clean")
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.add("refused")
    assert outcomes >= {"named", "refused"}


@pytest.mark.parametrize("first", [{}, [], None, "a"])
def test_a_position_that_is_no_number_is_no_mistake_of_the_root(first):
    raw = SimpleNamespace(step={"prompt_tokens": [3, 1], "passes": [{"positions": [first]}]})
    assert not _root_twice(raw, TREE)
    raw.step["passes"] = [{"positions": [1]}]
    assert _root_twice(raw, TREE)
