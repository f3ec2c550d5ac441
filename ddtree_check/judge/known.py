"""Faults of libraries that are known: shown with their cause, not red; red again as soon as they stop failing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..base.errors import named
from ..base.files import parse_toml, read_text
from ..base.resources import fixtures_dir
from .nodes import MODES, ModeResult


@dataclass(frozen=True)
class KnownFailure:
    """One entry of `fixtures/known_failures.toml`; the file's head says what its fields mean."""

    id: str
    library: str
    versions: str
    families: tuple[str, ...]
    check: str
    mode: str
    cause: str
    see: str
    measured: str
    explained: str = ""

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "families" and not isinstance(value, str):
                raise ValueError(f"known failure {self.id!r:.40}: {field.name} {value!r:.40}, expected a text")
        if not self.families or not all(isinstance(family, str) for family in self.families):
            raise ValueError(f"known failure {self.id}: families {self.families!r:.60}, expected model types")
        if self.mode and self.mode not in MODES:
            raise ValueError(f"known failure {self.id}: mode {self.mode!r}, expected '' or one of {', '.join(MODES)}")
        if self.mode and not self.explained:
            raise ValueError(
                f"known failure {self.id}: mode {self.mode} without explained, expected the wiring that its logits have"
            )
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier:
            raise ValueError(
                f"known failure {self.id}: versions {self.versions!r}, expected such as '==5.19.*'"
            ) from None

    def covers(self, model_type: str | None, versions: Mapping) -> bool:
        """True for this family under the library version that `versions` (by library name) holds."""
        version = versions.get(self.library)
        return model_type in self.families and version is not None and version in SpecifierSet(self.versions)


def load_known(path: Path | None = None) -> tuple[KnownFailure, ...]:
    """All entries. Raises ValueError naming the entry and what is wrong with it."""
    path = path or fixtures_dir() / "known_failures.toml"
    names = {field.name for field in fields(KnownFailure)}
    needed = names - {"explained"}
    found = []
    entries = parse_toml(read_text(path), str(path)).get("failure", [])
    if not isinstance(entries, list):
        raise ValueError(f"{path}: failure is {entries!r:.60}, expected [[failure]] entries")
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not needed <= entry.keys() <= names:
            got = ", ".join(entry) if isinstance(entry, dict) else repr(entry)
            raise ValueError(f"{path}: entry {number} has {got}; expected {', '.join(sorted(needed))}")
        if not isinstance(entry["families"], list):
            raise ValueError(f"{path}: entry {number}: families {entry['families']!r:.60}, expected a list")
        with named(f"{path}: entry {number}"):
            found.append(KnownFailure(**entry | {"families": tuple(entry["families"])}))
    return tuple(found)


def known_for(environment: Mapping) -> list[KnownFailure]:
    """Return the entries that cover a run, by what its engine describes."""
    return [entry for entry in load_known() if entry.covers(environment.get("model_type"), environment)]


def excuse(
    cases: Sequence[dict[str, ModeResult]], known: Sequence[KnownFailure], findings: Sequence[Mapping] | None = None
) -> list[dict[str, ModeResult]]:
    """The cases' results with known failures named; one that no longer fails anywhere becomes the failure.

    findings: of each case, `attribution.Finding`s by mode. Where one says that a mode's logits are not those of the
    wiring that the entry is `explained` by, this is another failure, and stays one.
    """
    cases = [dict(case) for case in cases]
    for entry in known:
        held = [(number, case[entry.mode]) for number, case in enumerate(cases) if entry.mode in case]
        fails = [(number, result) for number, result in held if result.verdict == "fail" and result.finite]
        for number, result in fails:
            found = findings[number].get(entry.mode) if entry.explained and findings else None
            if found and found.mode == entry.mode and found.nodes and found.explained != entry.explained:
                reason = f"{result.reason}; not {entry.id}: its logits are not those of {entry.explained}"
                cases[number][entry.mode] = replace(result, reason=reason)
            else:
                reason = f"{entry.id}: {entry.cause}"
                cases[number][entry.mode] = ModeResult("known_failure", result.verdicts, reason)
        for number, result in () if fails else held:
            if result.verdict == "pass":
                reason = f"known failure {entry.id} no longer fails; take it out of known_failures.toml"
                cases[number][entry.mode] = ModeResult("fail", result.verdicts, reason)
    return cases
