"""Equal largest logits, who takes which, and padding left out in one run alone: what looks like a fault and is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..base.words import counted
from ..tree.draft_tree import DraftTree
from .differences import Differences
from .nodes import ModeResult

MOST = 16  # ids of one tie that are listed


@dataclass(frozen=True)
class Ties:
    """Of one case. equal: node -> the ids that share ar's largest logit, where there are several.

    rules    mode -> node -> (ar's token, the mode's): both have the largest logit in both rows, so that the rule for
             equal logits differs and nothing else
    misread  mode -> node -> (the token that the engine took, the one that its own logits put first)
    absent   mode -> the first id from which on every token has a logit of -inf in one run alone, as padding has
    """

    equal: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rules: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    misread: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)

    def judge(self, mode: str, result: ModeResult) -> ModeResult:
        """Return a mode's result with what its own choices add: a token that its logits do not put first is no tie."""
        if mode in self.absent and result.verdict == "fail":
            first = self.absent[mode]
            why = f"ids from {first} on are left out (-inf) in one run alone, as padding of a vocabulary is"
            result = replace(result, reason=f"{result.reason}; {why}: give --vocab-size {first} to compare the others")
        wrong = self.misread.get(mode)
        if not wrong or result.verdict not in ("pass", "fail"):
            return result
        node = min(wrong)
        text = f"it chose token {wrong[node][0]} at node {node}, its own logits put {wrong[node][1]} first"
        text += f" ({counted(len(wrong), 'such node')})"
        reason = f"raw pass, {text}" if result.verdict == "pass" else f"{result.reason}; {text}"
        return ModeResult("fail", result.verdicts, reason, finite=False)

    def to_json(self) -> dict:
        return {
            "equal": {str(node): list(ids) for node, ids in self.equal.items()},
            "rules": {
                mode: [{"node": node, "ar": ours, "mode": theirs} for node, (ours, theirs) in nodes.items()]
                for mode, nodes in self.rules.items()
            },
        }


class TieTrack:
    """Watches the rows of every mode of one case.

    The lowest id of equals is taken throughout by an engine that does not say what it has `chosen`.
    """

    def __init__(self, engine, tree: DraftTree, reference: torch.Tensor):
        self.engine, self.tree, self.reference = engine, tree, reference
        self.ties = Ties()
        self.choices: dict[str, np.ndarray] = {}
        best = reference.amax(-1, keepdim=True)
        for node in torch.nonzero((reference == best).sum(-1) > 1).flatten().tolist():
            ids = torch.nonzero(reference[node] == best[node]).flatten().tolist()
            self.ties.equal[node] = tuple(ids[:MOST])
        self.see("ar", range(len(tree)), reference)

    def see(self, mode: str, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """Take in rows of ar or a mode: logits [len(nodes), vocabulary]."""
        nodes = list(nodes)
        if mode != "ar":
            self._padding(mode, self.reference[nodes], logits)
        chosen = self.engine.chosen(mode, self.tree, nodes, logits)
        if chosen is None:
            return
        taken = self.choices.setdefault(mode, np.zeros(len(self.tree), dtype=np.int64))
        for node, row, token in zip(nodes, logits, chosen, strict=True):
            taken[node] = token = int(token)
            if row[token] != row.max():
                self.ties.misread.setdefault(mode, {})[node] = (token, int(row.argmax()))
            elif mode != "ar":
                ours, reference = int(self.choices["ar"][node]), self.reference[node]
                if ours != token and row[ours] == row[token] and reference[ours] == reference[token]:
                    self.ties.rules.setdefault(mode, {})[node] = (ours, token)

    def _padding(self, mode: str, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Note tail columns that are -inf in exactly one of the two."""
        if (
            reference.shape != logits.shape
            or not ((reference[:, -1] == -torch.inf) ^ (logits[:, -1] == -torch.inf)).all()
        ):
            return
        alone = ((reference == -torch.inf) ^ (logits == -torch.inf)).all(0)
        first = len(alone) - int(alone.flip(0).int().cumprod(0).sum())
        if first < len(alone) and not alone[:first].any():
            self.ties.absent[mode] = first

    def choose(self, mode: str, differences: Differences) -> Differences:
        """Return the differences with the tokens that the engine took of the mode's rows and of ar's, if it says so."""
        if mode not in self.choices:
            return differences
        return replace(differences, argmax=self.choices["ar"], run_argmax=self.choices[mode])
