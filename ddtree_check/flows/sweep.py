"""Does the tree pay, and how much of what it seems to gain is leak: linear drafts against trees, budget by budget.

Every configuration decodes the same prompts for as many rounds (`rounds.generate`), each mode with its own drafts,
commits and text. Beside each tree runs its shadow: plain decoding writes the text, and what an unforked verify would
have accepted of the same trees is only noted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..base.conclusion import DEFECT, INCONCLUSIVE, PASS, Conclusion
from ..base.errors import Unsupported, UsageError
from ..base.files import record_head
from ..engines.checked import Checked, complete
from ..judge.nodes import CONTROL
from ..model.wiring import Conv, State, Wiring, contaminated, reads
from ..tree.draft_tree import DraftTree
from .rounds import INSENSITIVE, MODES, SHADOW, Rounds, generate, summarise
from .settings import Item, Settings

SCHEMA = "ddtree-check/sweep/1"
TREES = ("tree_forked", CONTROL, SHADOW)
REQUIRED = ("linear", "tree_forked")
SMALL = 100_000_000  # parameters below which the Prefix behind every token of a prompt's text is kept


class Meter(Checked):
    """An engine that notes each verify pass: the tree, the wiring and the seconds. Plain steps of one prompt are made
    once, if `keep`: most configurations follow the same text."""

    def __init__(self, engine, keep: bool):
        super().__init__(engine)
        self._keep = keep
        self.passes: list[tuple[DraftTree, Wiring | None, float]] = []
        self._prompt: tuple[int, ...] | None = None
        self._known: dict = {}

    def prefill(self, tokens: Sequence[int]):
        if self._prompt != tuple(tokens):
            self._prompt = tuple(tokens)
            self._known = {}
        return self._once("prefill", lambda: super(Meter, self).prefill(tokens))

    def step(self, prefix, token: int):
        # The key holds the Prefix itself, not its id, which another could get after it.
        return self._once((prefix, token), lambda: super(Meter, self).step(prefix, token))

    def verify(self, prefix, tree: DraftTree, wiring: Wiring | None):
        started = time.perf_counter()
        verified = super().verify(prefix, tree, wiring)
        verified.logits[-1, -1].item()  # waits for the device
        self.passes.append((tree, wiring, time.perf_counter() - started))
        return verified

    def _once(self, key, run: Callable):
        if not self._keep:
            return run()
        if key not in self._known:
            self._known[key] = run()
        return self._known[key]


@dataclass(frozen=True)
class Setting:
    """One configuration: `budget` is None for the linear draft, the most probable token of each position."""

    block: int
    budget: int | None
    modes: tuple[str, ...]

    def settings(self, base: Settings) -> Settings:
        length = self.block - 1
        if self.budget is None:
            return replace(base, length=length, budgets=(length,), candidates=1)
        return replace(base, length=length, budgets=(self.budget,))


def sweep(
    engine, items: Sequence[Item], settings: Settings, rounds: Rounds, blocks: Sequence[int], *,
    model: dict | None = None, progress: Callable | None = None,
) -> dict:  # fmt: skip
    """Run all prompts with every block size and budget and return the record.

    settings: its budgets, draft, order, seed and rule are used; rounds: how many of each prompt. blocks: positions of a
    draft block, the root's included. Raises UsageError for a block that the drafter does not draft.
    """
    for block in blocks:
        longest = min((item.drafter.length + 1 for item in items if item.drafter is not None), default=None)
        if block < 2 or (longest is not None and block > longest):
            raise UsageError(f"blocks: got {block}, expected numbers from 2 to the drafter's block {longest or '...'}")
    engine = complete(engine, settings.vocab_size)
    meter = Meter(engine, keep=int((model or {}).get("parameters", SMALL)) < SMALL)
    plan = [Setting(block, None, ("linear",)) for block in blocks]
    plan += [Setting(block, budget, TREES) for block in blocks for budget in settings.budgets]
    runs: dict[tuple[Setting, str], list[dict]] = {}
    passes: dict[tuple[Setting, str], list] = {}
    show, total = progress or (lambda *_: None), len(items) * len(plan)
    for place, item in enumerate(items):  # prompt by prompt, because plain steps are kept for one
        for number, setting in enumerate(plan):
            show(place * len(plan) + number, total, f"{item.id}, block {setting.block}, {_draft(setting.budget)}")
            for mode in setting.modes:
                meter.passes.clear()
                result = generate(meter, [item], setting.settings(settings), replace(rounds, modes=(mode,)))
                for refused, reason in result["unsupported"].items():
                    raise Unsupported(f"{refused}: {reason}")
                runs.setdefault((setting, mode), []).append(result["prompts"][0])
                wiring = MODES[mode].verify
                mine = [(tree, seconds) for tree, ran, seconds in meter.passes if ran == wiring]
                passes.setdefault((setting, mode), []).extend(mine)
    show(total, total, "done")
    rows = [_row(*key, prompts, passes[key], engine.layers) for key, prompts in runs.items()]
    record = record_head(SCHEMA, engine.describe()) | {
        "model": model or engine.provenance,
        "settings": settings.to_json() | {"blocks": list(blocks)},
        "rounds": rounds.to_json(),
        "rows": rows,
        "answers": [answer(rows, block) for block in blocks],
    }
    return _conclusion(rows, reads(engine.layers, Conv, State)).into(record)


def _draft(budget: int | None) -> str:
    return "linear" if budget is None else f"budget {budget}"


def _row(setting: Setting, mode: str, prompts: Sequence[dict], passes: Sequence, layers) -> dict:
    """Return the figures of one mode of one configuration; docs/drafting.md says what each one counts."""
    summary = summarise([{"id": prompt["id"]} | prompt["modes"][mode] for prompt in prompts])
    wiring, right = MODES[mode].verify, summary["off"] == 0
    dirty = 0 if wiring is None else sum(len(contaminated(wiring.plan(tree), layers)) for tree, _ in passes)
    drafted = [r for prompt in prompts for r in prompt["modes"][mode]["rounds"] if not r["plain"]]
    accepted, rounds = sum(r["accepted"] for r in drafted), max(1, len(drafted))
    rows, seconds = sum(len(tree) for tree, _ in passes), [seconds for _, seconds in passes]
    nodes = rows - len(passes)
    return {
        "block": setting.block,
        "budget": setting.budget,
        "mode": mode,
        **{name: summary[name] for name in ("rounds", "off", "ties", "agreement", "same_text", "texts", "drafter")},
        "accepted": accepted / rounds if right else None,
        "seems": accepted / rounds,
        "ar_accepted": summary["ar_accepted_per_round"],
        "wrong_accept": summary["wrong_accept_per_round"],
        "wrong_reject": summary["wrong_reject_per_round"],
        # A round that is off emits at least one token that plain decoding would not: its bonus.
        "wrong_tokens": summary["wrong_accept_per_round"] + summary["off"] / rounds,
        "contaminated": dirty / nodes if nodes else 0.0,
        "rows": rows / max(1, len(passes)),
        "rows_per_accepted": rows / accepted if right and accepted else None,
        "pass_ms": 1e3 * statistics.median(seconds) if seconds else None,
        "tokens_per_second": (accepted + len(drafted)) / sum(seconds) if right and sum(seconds) else None,
    }


def answer(rows: Sequence[dict], block: int) -> dict:
    """Compare the best budget of the forked tree with the linear draft, and with an unforked verify of the same trees.

    gain: accepted nodes a round, best forked budget over linear; faster: tokens a second of verify passes, the best
    budget of that over linear. Both None where outputs differ from plain decoding's. leak: of the tokens a round
    (accepted and bonus) that unforked seems to make of that budget's trees in the shadow, the share that plain decoding
    would not emit; lost: nodes that it rejects wrongly.
    """
    rows = [row for row in rows if row["block"] == block]
    linear = next(row for row in rows if row["mode"] == "linear")
    forked = [row for row in rows if row["mode"] == "tree_forked"]
    best = max(forked, key=lambda row: (row["seems"], -row["budget"]))
    fast = max(forked, key=lambda row: row["tokens_per_second"] or 0.0)
    at = {row["mode"]: row for row in rows if row["budget"] == best["budget"]}
    shadow, unforked = at[SHADOW], at[CONTROL]
    sound = linear["accepted"] is not None and best["accepted"] is not None
    timed = linear["tokens_per_second"] and fast["tokens_per_second"]
    return {
        "block": block,
        "budget": best["budget"],
        "linear": linear["accepted"],
        "forked": best["accepted"],
        "gain": best["accepted"] - linear["accepted"] if sound else None,
        "fast_budget": fast["budget"],
        "faster": fast["tokens_per_second"] / linear["tokens_per_second"] if timed else None,
        "unforked_seems": unforked["seems"],
        "unforked_off": unforked["off"] / max(1, unforked["rounds"]),
        "shadow_seems": shadow["seems"],
        "shadow_right": shadow["seems"] + 1 - shadow["wrong_tokens"],
        "leak": shadow["wrong_tokens"] / (shadow["seems"] + 1),
        "lost": shadow["wrong_reject"],
    }


def _conclusion(rows: Sequence[dict], recurrent: bool) -> Conclusion:
    conclusion = Conclusion()
    for row in rows:
        if row["mode"] in REQUIRED and row["off"]:
            conclusion.add(
                DEFECT,
                f"{row['mode']}: fail ({row['off']} of {row['rounds']} rounds left plain decoding at block "
                f"{row['block']}, {_draft(row['budget'])}); its acceptance and speed are withheld",
            )
    if conclusion.exit_code == PASS and recurrent and not any(row["off"] for row in rows if row["mode"] == CONTROL):
        conclusion.add(INCONCLUSIVE, INSENSITIVE)
    return conclusion
