"""The pages of the documentation, cut into blocks, prose, links and code spans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
README = REPO / "README.md"
INDEX = REPO / "docs" / "README.md"
DOCS = tuple(sorted((REPO / "docs").glob("*.md")))
PAGES = (README, REPO / "CONTRIBUTING.md", *DOCS)

_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`\w×\d])")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it opens, its language, its markers (a bare word has the value ""), its text."""

    page: str
    line: int
    language: str
    markers: dict[str, str]
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def name(path: Path) -> str:
    """Return a page's name as it is shown, from the root of the repository."""
    return path.relative_to(REPO).as_posix()


def fenced(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order. Raises ValueError for a fence that is never closed."""
    blocks, opened, body = [], None, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = line.lstrip().startswith("```")
        if opened is None and fence:
            opened, body = (number, line.strip().removeprefix("```").split()), []
        elif opened is not None and fence:
            start, words = opened
            pairs = [word.partition("=")[::2] for word in words[1:]]
            blocks.append(Block(page, start, words[0] if words else "", dict(pairs), "\n".join(body) + "\n"))
            opened = None
        elif opened is not None:
            body.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is never closed")
    return blocks


def unfenced(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of all that stands outside of fenced blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def indented(text: str) -> list[int]:
    """Return the lines at which a block of code begins that is indented in place of fenced."""
    lines, before = [], (0, "")
    for number, line in unfenced(text):
        if line.startswith("    ") and (not before[1].strip() or before[0] != number - 1):
            lines.append(number)
        before = (number, line)
    return lines


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, target) of each link and picture."""
    for number, line in unfenced(text):
        for _, target in _LINK.findall(_SPAN.sub("", line)):
            yield number, target


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, formed as GitHub forms them."""
    heads = (line.lstrip("#").strip() for _, line in unfenced(text) if re.match(r"#{1,6} ", line))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, code) of each inline piece of code, those in tables too."""
    for number, line in unfenced(text):
        for code in _SPAN.findall(line):
            yield number, code.replace("\\|", "|")


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, sentence) of the prose: no tables, headings, comments or blocks; inline code is one word."""
    paragraph: list[str] = []
    start = 0

    def flush() -> Iterator[tuple[int, str]]:
        joined = _LINK.sub(r"\1", _SPAN.sub("code", " ".join(paragraph)))
        for sentence in _END.split(joined):
            if sentence.strip():
                yield start, sentence.strip()
        paragraph.clear()

    last = 0
    for number, line in unfenced(text):
        plain = line.strip()
        skipped = not plain or plain.startswith(("#", "|", "<!--", "!["))
        if skipped or _ITEM.match(line) or number != last + 1:
            yield from flush()
        if not skipped:
            if not paragraph:
                start = number
            paragraph.append(_ITEM.sub("", line, count=1).strip() if _ITEM.match(line) else plain)
        last = number
    yield from flush()


def words(sentence: str) -> int:
    """Return how many words a sentence has: runs without a space that hold a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())
