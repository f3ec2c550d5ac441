"""How values of a record are written: everything on one line, nothing that a terminal would obey."""

from __future__ import annotations

import math

WIDEST_TOKEN = 18
GREEN = ("pass", "known_failure")  # verdicts of a mode that leave a run green


def plain(text: object) -> str:
    """Return text with escapes for what is not printable: line breaks, escape sequences, marks of direction."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in str(text)
    )


def number(value: float | None) -> str:
    """Return a number with three digits; a record holds null for what is not finite."""
    return "not finite" if value is None else f"{value:.3g}"


def size(value: float | None) -> float:
    """Return a difference to sort or to average by: what is not finite is larger than anything."""
    return math.inf if value is None else value


def token_text(token: int | None, tokens: dict[str, str]) -> str:
    """Return a token in quotes, shortened, or its id where the record holds no text."""
    text = tokens.get(str(token))
    if text is None:
        return str(token)
    shown = repr(text)
    return shown if len(shown) <= WIDEST_TOKEN else f"{shown[: WIDEST_TOKEN - 2]}…{shown[-1]}"
