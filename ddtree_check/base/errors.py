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
    """What is wrong with a part (ValueError) is said with the name of the whole before it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Readers and writers of files say what is wrong with them (ValueError); here it is known to be the caller's."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None
