"""Cases, trees and prompts in files: what comes back, and what is refused with its place."""

from __future__ import annotations

import json

import pytest

from ddtree_check.tree.case import Case, Prompt, check_vocab, load_prompts, load_tree
from ddtree_check.tree.draft_tree import DraftTree
from tests.limits import within

NAMED = DraftTree((None, 1, 2, 1, 3, 1), (-1, 0, 0, 1, 2, 4))
CASE = Case("named", (5, 6), NAMED, {"draft": "ngram", "budget": 5, "seed": None, "order": "heap"})


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- cases ------------------------------------------------------------------------------------------------------------


def test_case_json_is_the_records():
    assert CASE.to_json() == {
        "id": "named",
        "prompt_tokens": [5, 6],
        "tree": {"tokens": [None, 1, 2, 1, 3, 1], "parents": [-1, 0, 0, 1, 2, 4], "source": CASE.source},
    }


def test_source_is_a_copy_of_json_values():
    source = {"path": (1, 2)}
    case = Case("a", (1,), NAMED, source)
    source["path"] = None
    assert case.source == {"path": [1, 2]}


CASES_REFUSED = [
    pytest.param({"prompt_tokens": ()}, "prompt_tokens: no tokens", id="empty-prompt"),
    pytest.param({"prompt_tokens": (1, -1)}, "prompt_tokens: token 1 is -1", id="negative-token"),
    pytest.param({"prompt_tokens": (1.0,)}, "token 0 is 1.0", id="float-token"),
    pytest.param({"prompt_tokens": (True,)}, "token 0 is True", id="bool-token"),
    pytest.param({"prompt_tokens": "ab"}, "token 0 is 'a'", id="text-prompt"),
    pytest.param({"id": ""}, "id '', expected", id="empty-id"),
    pytest.param({"id": 3}, "id 3, expected", id="number-id"),
    pytest.param({"source": None}, "source None, expected a dict", id="no-source"),
    pytest.param({"source": {"a": object()}}, "source holds no JSON", id="object-in-source"),
    pytest.param({"source": {"a": float("nan")}}, "source holds no JSON", id="nan-in-source"),
]


@pytest.mark.parametrize(("change", "message"), CASES_REFUSED)
def test_case_refused(change, message):
    with pytest.raises(ValueError) as caught:
        Case(**{"id": "a", "prompt_tokens": (1,), "tree": NAMED, "source": {}, **change})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_check_vocab():
    check_vocab(CASE, 7)
    with pytest.raises(ValueError, match=r"case named: prompt: token 1 is 6, expected a token id in 0\.\.5"):
        check_vocab(CASE, 6)
    with pytest.raises(ValueError, match=r"case a: node 4 has token 3, expected 0\.\.2"):
        check_vocab(Case("a", (1,), NAMED, {}), 3)
    with pytest.raises(ValueError, match="node 0 has token 9"):
        check_vocab(Case("a", (1,), NAMED.with_root(9), {}), 9)


# --- trees ------------------------------------------------------------------------------------------------------------


def test_load_tree(tmp_path):
    assert load_tree(write(tmp_path / "t.json", NAMED.to_json() | {"note": "named"})) == NAMED


TREES_REFUSED = [
    pytest.param('{"tokens": [1, 2]', "expected JSON", id="bad-json"),
    pytest.param("", "expected JSON", id="empty"),
    pytest.param([1, 2], "expected an object with 'tokens' and 'parents'", id="list"),
    pytest.param({"tokens": [1, 2]}, "expected an object with 'tokens' and 'parents'", id="no-parents"),
    pytest.param({"tokens": 1, "parents": [-1]}, "must be lists of integers", id="number"),
    pytest.param(
        {"tokens": [1, "2"], "parents": [-1, 0]}, "node 1 has token '2', expected an integer", id="text-token"
    ),
    pytest.param({"tokens": [1, 2], "parents": [-1, 0.0]}, "node 1 has parent 0.0, expected an integer", id="float"),
    pytest.param({"tokens": [], "parents": []}, "no nodes", id="no-nodes"),
    pytest.param({"tokens": [1, 2], "parents": [-1]}, "2 tokens and 1 parents", id="lengths"),
    pytest.param({"tokens": [1, 2, 3], "parents": [-1, 2, 1]}, "node 1 has parent 2", id="cycle"),
    pytest.param({"tokens": [1, 2], "parents": [-1, -1]}, "only node 0 is a root", id="two-roots"),
    pytest.param({"tokens": [1, 2, 2], "parents": [-1, 0, 0]}, "nodes 1 and 2 are both token 2", id="twin-siblings"),
    pytest.param({"tokens": [1, 2, 3], "parents": [-1, 2, 0]}, "list parents before children", id="parent-after-child"),
]


@pytest.mark.parametrize(("content", "message"), TREES_REFUSED)
def test_a_bad_tree_file_is_named(tmp_path, content, message):
    path = write(tmp_path / "t.json", content)
    with pytest.raises(ValueError) as caught:
        load_tree(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_prompt(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_bytes('\ufeffOnce,\r\n{"text": 1}\n\n'.encode())
    assert load_prompts(path) == [Prompt("tale", 'Once,\n{"text": 1}\n')]


def test_json_lines_are_many_prompts(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"text": "Once"}\n\n{"token_ids": [3, 1], "id": "ids"}\n{"text": " é\\n"}')
    assert load_prompts(path) == [Prompt("p-1", "Once"), Prompt("ids", None, (3, 1)), Prompt("p-4", " é\n")]


BAD_PROMPTS = [
    pytest.param("{", "expected JSON", id="bad-json"),
    pytest.param('"Once"', "expected an object with 'text' or 'token_ids'", id="bare-text"),
    pytest.param('{"prompt": "Once"}', "expected an object with 'text' or 'token_ids'", id="another-key"),
    pytest.param('{"text": "Once", "token_ids": [1]}', "expected either 'text' or 'token_ids'", id="both"),
    pytest.param('{"text": null}', "expected either 'text' or 'token_ids'", id="null"),
    pytest.param('{"text": ""}', "expected a string that is not blank", id="empty-text"),
    pytest.param('{"text": " \\n"}', "expected a string that is not blank", id="blank-text"),
    pytest.param('{"text": 3}', "text 3, expected a string", id="number"),
    pytest.param('{"text": "\\ud83d"}', "half a surrogate pair", id="surrogate"),
    pytest.param('{"token_ids": []}', "no tokens", id="no-ids"),
    pytest.param('{"token_ids": [1, -1]}', "token 1 is -1", id="negative-id"),
    pytest.param('{"token_ids": [1.5]}', "token 0 is 1.5", id="float-id"),
    pytest.param('{"token_ids": "12"}', "expected a list of token ids", id="text-ids"),
    pytest.param('{"text": "Once", "id": ""}', "id '', expected", id="empty-id"),
    pytest.param('{"text": "Once", "id": "first"}', "id 'first' twice", id="id-twice"),
]


@pytest.mark.parametrize(("line", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_named_by_its_line(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", f'{{"text": "Once", "id": "first"}}\n{line}\n')
    with pytest.raises(ValueError) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b" \n\n", "empty", id="blank"),
        pytest.param(b"\xff\xfe", "byte 0 is not UTF-8", id="not-utf-8"),
    ],
)
def test_a_bad_prompt_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["nowhere.txt", "nowhere.jsonl", "."])
def test_a_missing_prompt_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match="expected a readable file"):
        load_prompts(tmp_path / name)


def test_an_id_is_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a\\ud800b", "token_ids": [5]}', encoding="utf-8")
    with pytest.raises(ValueError, match="half a surrogate pair"):
        load_prompts(path)


def test_many_prompts_are_read_in_time(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"text": "{n}"}}\n' for n in range(20_000)))
    with within(seconds=10, mebibytes=256):
        assert len(load_prompts(path)) == 20_000
