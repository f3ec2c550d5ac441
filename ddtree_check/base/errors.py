"""The two ways a run can end without a verdict."""

import contextlib
from collections.abc import Iterator


class UsageError(Exception):
    """Bad input or a missing piece of the environment: one line (what, got, expected, next step), exit code 3."""


class Broken(UsageError):
    """A pass of an engine raised, or answered with something else than what it is for; one line, as of UsageError."""


class Unsupported(Exception):
    """The engine or the model cannot be checked this way; the reason names the layer. Never shown as a pass."""


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Prefix each ValueError within with the name of the object it concerns."""
    try:
        yield
    except (ValueError, RecursionError) as error:  # a value of lists within lists without end, which has no text
        raise ValueError(f"{where}: {error}") from None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn each ValueError within, such as of a reader of files, into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def need(good: object, what: str, got: object, expected: str) -> None:
    """Raise ValueError, in one line what came and what was expected, unless it is good."""
    if not good:
        raise ValueError(f"{what} {got!r:.60}, expected {expected}")


def need_text(what: str, value: object) -> None:
    """Raise ValueError for anything but a text that is not blank and that UTF-8 can hold."""
    need(isinstance(value, str) and value.strip(), what, value, "a string that is not blank")
    half = any("\ud800" <= letter <= "\udfff" for letter in value)
    need(not half, what, value, "text that UTF-8 can hold, not half a surrogate pair")


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line of at most 240 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."
