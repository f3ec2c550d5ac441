"""Options as data: a field of a group says what an option takes, and every door reads it there.

A group is a frozen dataclass that `group` makes. The command line, gate.toml, pytest and Python are the doors; a new
option is one field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import dataclass_transform

from .errors import UsageError
from .words import option as spoken

LARGEST = 1e15  # of a number that is called finite: a whole number may be larger than any float
VERBS = ("compare", "generate", "sweep")  # commands that run a model


@dataclass(frozen=True)
class Kind:
    """How values of a type are told from others, read from a text and written as one. scalar: what a text is first."""

    noun: str
    holds: Callable[[object], bool]
    read: Callable[[str, str], object] | None = None
    write: Callable[[object], str] = str
    scalar: type = str


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _text(value: object) -> bool:
    return isinstance(value, str)


def whole_numbers(what: str, text: str) -> tuple[int, ...]:
    """Return '16,64' as (16, 64), each number once. Raises UsageError for anything but numbers of at least 1."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{what}: got {text!r}, expected numbers of at least 1 such as 16,64")
    return numbers


def split_words(text: str) -> tuple[str, ...]:
    """Return 'a, b' as ('a', 'b'), each word once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def pairs(what: str, text: str) -> dict[str, float]:
    """Return 'bfloat16=0.3,float16=0.2' as a mapping. Raises UsageError for anything else."""
    try:
        return {name: float(number) for name, number in (part.split("=") for part in split_words(text))}
    except ValueError:
        raise UsageError(f"{what}: got {text!r}, expected pairs such as bfloat16=0.25,float16=0.25") from None


def _listed(part: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(part, value))


def _commas(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


KINDS = {  # by the annotation of a field, but for its `| None`
    "str": Kind("a text", lambda value: isinstance(value, str) and bool(value.strip())),
    "int": Kind("a whole number", _whole, scalar=int),
    "float": Kind("a finite number", _finite, write=lambda value: f"{value:g}", scalar=float),
    "bool": Kind("true or false", lambda value: isinstance(value, bool), scalar=bool),
    "tuple[str, ...]": Kind("a list of texts", _listed(_text), lambda _, text: split_words(text), _commas),
    "tuple[int, ...]": Kind("a list of whole numbers", _listed(_whole), whole_numbers, _commas),
    "dict[str, float]": Kind(
        "a table of numbers of at least 0",
        lambda value: isinstance(value, Mapping) and all(_finite(part) and part >= 0 for part in value.values()),
        pairs,
        lambda value: _commas(f"{name}={number:g}" for name, number in value.items()),
    ),
}
KINDS["Path"] = KINDS["str"]  # its door makes a path of it


@dataclass(frozen=True)
class Option:
    """One option, read from the field of its group.

    empty            None is a value: a default that the part owns which uses it
    least, most, choices   bounds of a value, of each value of a list, or of the names of a table
    holds, expects   another such bound, as a test and in words
    later            --help shows it after what matters first
    verbs            commands that offer it
    repeat           the command line takes it once for each value
    argument         it is a place on the command line, and no flag
    short            a second flag
    """

    name: str
    panel: str
    default: object
    kind: Kind
    empty: bool
    help: str
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    choices: Iterable[str] = ()
    holds: Callable[[object], bool] = lambda _: True
    expects: str = ""
    later: bool = False
    verbs: tuple[str, ...] = VERBS
    repeat: bool = False
    argument: bool = False
    short: str | None = None

    @property
    def many(self) -> bool:
        return self.kind.read is not None

    @property
    def help_text(self) -> str:
        """Return the help with the default, where there is one that it does not name itself."""
        silent = self.default is None or self.default is False or self.default == () or "Default:" in self.help
        return self.help if silent else f"{self.help} Default: {self.kind.write(self.default)}."

    def flag(self, verb: str = "compare") -> str:
        """Return the option as the line of a command has it."""
        return "--budgets" if (verb, self.name) == ("sweep", "budgets") else f"--{spoken(self.name)}"

    def problem(self, value: object) -> str | None:
        """Return 'got ..., expected ...' for a value that the option cannot take, or None."""
        if value is None and self.empty:
            return None
        if not self.kind.holds(value):
            return f"got {value!r:.60}, expected {self.kind.noun}"
        wrong = [part for part in (value if self.many else [value]) if not self._bounded(part)]
        if wrong or (self.many and not value and self.default):
            return f"got {wrong[0] if wrong else value!r:.60}, expected {self._bounds()}"
        return None

    def _bounded(self, part: object) -> bool:
        good = (not self.choices or part in self.choices) and (self.least is None or part >= self.least)
        good = good and (self.most is None or part <= self.most)
        return good and self.holds(part)

    def _bounds(self) -> str:
        if self.choices and not self.expects:
            *names, last = self.choices
            return f"some of {', '.join((*names, last))}" if self.many else f"{', '.join(names)} or {last}"
        most = "" if self.most is None else f" and at most {self.most}"
        return self.expects or f"{'numbers' if self.many else 'a number'} of at least {self.least}{most}"

    def read(self, value: object) -> object:
        """Return the value of a text, of a list, or of the value itself. Raises UsageError."""
        if isinstance(value, str) and self.kind.read:
            value = self.kind.read(spoken(self.name), value)
        if problem := self.problem(value):
            raise UsageError(f"{spoken(self.name)}: {problem}")
        return tuple(value) if isinstance(value, list) else value

    def words(self, value: object, verb: str) -> list[str]:
        """Return the words of a command line that choose a value."""
        if isinstance(value, bool):
            return [self.flag(verb) if value else self.flag(verb).replace("--", "--no-", 1)]
        texts = map(str, value) if self.repeat else [self.kind.write(value)]
        return [word for text in texts for word in ((text,) if self.argument else (self.flag(verb), text))]


def option(default, help: str, metavar: str | None = None, **facts) -> Field:
    """Return a dataclass field that is an option; facts: as in `Option`. A callable default makes the default."""
    how = {"default_factory" if callable(default) else "default": default}
    return field(**how, metadata={"help": help, "metavar": metavar, **facts})


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def group(panel: str, **facts) -> Callable[[type], type]:
    """Make a class a group of options. panel: their heading in --help; facts: of every option that says no other."""

    def decorate(cls: type) -> type:
        cls.PANEL, cls.FACTS = panel, facts
        return dataclass(frozen=True)(cls)

    return decorate


@functools.cache
def options(group: type) -> tuple[Option, ...]:
    """Return the options of a group, or of a class that inherits groups, in the order of its fields."""
    return tuple(
        Option(
            entry.name,
            group.PANEL,
            entry.default if entry.default_factory is MISSING else entry.default_factory(),
            KINDS[entry.type.removesuffix(" | None")],
            entry.type.endswith(" | None"),
            **(group.FACTS | entry.metadata),
        )
        for entry in fields(group)
        if entry.metadata
    )


def check_options(group: object) -> None:
    """Raise UsageError for a value of a group that its option cannot take."""
    for each in options(type(group)):
        if problem := each.problem(getattr(group, each.name)):
            raise UsageError(f"{spoken(each.name)}: {problem}")


def offered(verb: str, groups: Iterable[type]) -> tuple[Option, ...]:
    """Return what a command offers of some groups: arguments, what matters first, then the rest."""
    every = [each for group in groups for each in options(group) if verb in each.verbs]
    return tuple(sorted(every, key=lambda each: (not each.argument, each.later)))


def make(group: type, chosen: Mapping[str, object]):
    """Return a group made of chosen values by name; groups within it take theirs. Raises UsageError for other names."""
    left = dict(chosen)
    made = _make(group, left)
    if left:
        raise UsageError(f"{spoken(next(iter(left)))}: no name of {group.__name__}, expected one of its fields")
    return made


def _make(group: type, left: dict[str, object]):
    values = {entry.name: left.pop(entry.name) for entry in fields(group) if entry.name in left}
    for entry in fields(group):
        if is_dataclass(entry.default_factory) and entry.name not in values:
            values[entry.name] = _make(entry.default_factory, left)
    return group(**values)
