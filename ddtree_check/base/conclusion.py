"""Reasons ─► one exit code and its text. Every part of the tool that ends a run concludes with these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """How a run ends: the number that the process returns, and `text` for people."""

    PASS = 0, "pass"
    DEFECT = 1, "fail"
    INCONCLUSIVE = 2, "inconclusive"
    USAGE = 3, "error"  # bad input or environment, which never reads as a defect of the engine

    text: str

    def __new__(cls, value: int, text: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_, code.text = value, text
        return code

    @classmethod
    def of(cls, verdict: str) -> ExitCode:
        """Return what the verdict of a mode or a finding leads to; one that neither passes nor fails proves nothing."""
        return {"pass": PASS, "known_failure": PASS, "fail": DEFECT}.get(verdict, INCONCLUSIVE)


PASS, DEFECT, INCONCLUSIVE, USAGE = ExitCode
_MILDEST_FIRST = (PASS, INCONCLUSIVE, DEFECT, USAGE)


def combine(*codes: int) -> ExitCode:
    """Return the code that decides of several: 3 before 1 before 2 before 0. Raises ValueError for none or another."""
    return max(map(ExitCode, codes), key=_MILDEST_FIRST.index)


@dataclass
class Conclusion:
    """The end of a run: an exit code, and the reasons for it in the order they were found."""

    exit_code: ExitCode = PASS
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping) -> Conclusion:
        """Read the conclusion of a record, or of a section that has one."""
        return cls(ExitCode(record["exit_code"]), tuple(record["verdict"]["reasons"]))

    def add(self, code: int, *reasons: str) -> None:
        """Add reasons that alone lead to `code`."""
        self.exit_code = combine(self.exit_code, code)
        self.reasons += reasons

    def into(self, record: Mapping) -> dict:
        """Return the record with this conclusion as its `verdict` and `exit_code`; what else its verdict says stays."""
        verdict = {**record.get("verdict", {}), "text": self.exit_code.text, "reasons": list(self.reasons)}
        return {**record, "verdict": verdict, "exit_code": int(self.exit_code)}
