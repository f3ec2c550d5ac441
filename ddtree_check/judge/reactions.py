"""How far a model reacts to a changed state, by layer kind."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.files import json_number


@dataclass(frozen=True)
class Reaction:
    """What dropping one kind of state did to the next token's logits: the largest centred |difference|, against the
    floor of a pass of one row."""

    kind: str
    moved: float
    floor: float

    @property
    def reacts(self) -> bool:
        return not self.moved <= self.floor  # NaN is no calm

    def __str__(self) -> str:
        return (
            f"insensitive: {self.kind}: without what the prompt left there the logits move by {self.moved:.3g}, "
            f"expected more than {self.floor:.3g}"
        )

    def to_json(self) -> dict:
        return {"kind": self.kind, "moved": json_number(self.moved), "floor": self.floor, "reacts": self.reacts}
