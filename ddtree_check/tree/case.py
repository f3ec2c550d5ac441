"""A case: one prompt, one draft tree, and where both came from; and the files that hold cases, trees and prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import named, need_text
from ..base.files import json_lines, parse_json, read_text
from .draft_tree import DraftTree
from .formats import tree_from_json
from .token_ids import token_ids


@dataclass(frozen=True)
class Case:
    """id: a name to type after -k. prompt_tokens: what is committed before the root, at least one token id.

    tree: its root's token follows prompt_tokens and may be None until a target has chosen it. source: JSON values that
    say where the tree came from (draft, budget, seed, order ...). Raises ValueError naming the field.
    """

    id: str
    prompt_tokens: tuple[int, ...]
    tree: DraftTree
    source: dict

    def __post_init__(self):
        need_text("case: id", self.id)
        object.__setattr__(self, "prompt_tokens", token_ids(f"case {self.id}: prompt_tokens", self.prompt_tokens))
        if not isinstance(self.source, dict):
            raise ValueError(f"case {self.id}: source {self.source!r:.60}, expected a dict")
        try:  # a copy of our own, as it will be read back
            object.__setattr__(self, "source", json.loads(json.dumps(self.source, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"case {self.id}: source holds no JSON ({error})") from None

    def to_json(self) -> dict:
        """Return {"id", "prompt_tokens", "tree": {"tokens", "parents", "source"}}, as in record.json."""
        tree = self.tree.to_json() | {"source": self.source}
        return {"id": self.id, "prompt_tokens": list(self.prompt_tokens), "tree": tree}


def check_vocab(case: Case, vocab_size: int) -> None:
    """Raise ValueError naming the first prompt token or node whose token id is not below `vocab_size`."""
    token_ids(f"case {case.id}: prompt", case.prompt_tokens, vocab_size)
    for node, token in enumerate(case.tree.tokens):
        if token is not None and token >= vocab_size:
            raise ValueError(f"case {case.id}: node {node} has token {token}, expected 0..{vocab_size - 1}")


def load_tree(path: str | Path) -> DraftTree:
    """Return the tree of a JSON file, {"tokens": [...], "parents": [...]} or another form of `formats.tree_from_json`.

    Raises ValueError naming the file and the node.
    """
    data = parse_json(read_text(path), str(path))
    with named(str(path)):
        return tree_from_json(data)


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, to be tokenised by the target, or as token ids; exactly one of the two is given."""

    id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self):
        need_text("prompt: id", self.id)
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"prompt {self.id}: expected either 'text' or 'token_ids'")
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", token_ids(f"prompt {self.id}: token_ids", self.token_ids))
        else:
            need_text(f"prompt {self.id}: text", self.text)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Return the prompts of a file: JSON lines if its name ends in .jsonl, else all of it is the text of one prompt.

    A line holds {"text": ...} or {"token_ids": [...]} and may hold an "id", else it is named after file and line. CR LF
    in a text file is read as LF, and one newline at its end is dropped. Raises ValueError naming the file and the line.
    """
    path = Path(path)
    if path.suffix != ".jsonl":
        text = read_text(path).replace("\r\n", "\n").removesuffix("\n")
        if not text.strip():
            raise ValueError(f"{path}: empty, expected the text of a prompt")
        return [Prompt(path.stem, text)]
    prompts, ids = [], set()
    for line, data in json_lines(path):
        with named(f"{path}:{line}"):
            prompt = _prompt(data, f"{path.stem}-{line}")
            if prompt.id in ids:
                raise ValueError(f"id {prompt.id!r:.60} twice, expected an id for each")
            ids.add(prompt.id)
            prompts.append(prompt)
    return prompts


def _prompt(data: object, name: str) -> Prompt:
    if not isinstance(data, dict) or not {"text", "token_ids"} & data.keys():
        raise ValueError(f"prompt: got {data!r:.60}, expected an object with 'text' or 'token_ids'")
    if not isinstance(data.get("token_ids", []), list):
        raise ValueError(f"prompt: token_ids {data['token_ids']!r:.60}, expected a list of token ids")
    return Prompt(data.get("id", name), data.get("text"), data.get("token_ids"))
