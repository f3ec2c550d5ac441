"""Views of many rounds: one prompt, round by round in each mode, and one round, node by node."""

from __future__ import annotations

from ..base.words import counted
from .layout import Table
from .terminal import ending, head, judged_as, rounds_blocks
from .text import number, plain, token_text


def blocks(record: dict) -> list[Table | str]:
    """Return the whole view of a record of rounds alone."""
    parts, dtype = [head(record), *rounds_blocks(record["rounds"])], judged_as(record)
    if dtype in ("bfloat16", "float16"):
        parts.append(
            f"In {dtype} wrong positions and masks of attention may hide below the floor of a round: compare looks for "
            "them over a whole run, and --dtype float32 shows them in every round."
        )
    return [*parts, *ending(record)]


def find_prompt(rounds: dict, name: str) -> dict:
    """Return a prompt's rounds by its id. Raises ValueError listing what there is."""
    known = {prompt["id"]: prompt for prompt in rounds["prompts"]}
    if name not in known:
        raise ValueError(f"prompt: got {name!r:.60}, expected one of {', '.join(map(plain, known))}")
    return known[name]


def find_round(prompt: dict, place: int) -> dict[str, dict]:
    """Return one round in each mode that came so far. Raises ValueError if none did."""
    found = {mode: run["rounds"][place] for mode, run in prompt["modes"].items() if 0 <= place < len(run["rounds"])}
    if not found:
        most = max(len(run["rounds"]) for run in prompt["modes"].values())
        raise ValueError(f"round: got {place}, expected 0..{most - 1} of prompt {plain(prompt['id'])}")
    return found


def prompt_blocks(prompt: dict) -> list[Table | str]:
    """Return every round of one prompt under every mode."""
    headers = ("round", "token", "drafted", "accepted", "ar accepts", "emitted", "off", "node", "margin", "|Δ|")
    blocks: list[Table | str] = []
    for mode, run in prompt["modes"].items():
        rows = []
        for found in run["rounds"]:
            parted = found["parted"]
            off = "" if parted is None else "tie" if parted["tie"] else "off"
            where = ("", "", "") if parted is None else (
                parted["node"], number(parted["margin"]), number(parted["max_abs"]),
            )  # fmt: skip
            drafted = "plain step" if found["plain"] else found["nodes"]
            counts = [found[name] for name in ("accepted", "ar_accepted", "emitted")]
            rows.append((found["round"], found["position"], drafted, *counts, off, *where, number(found["drift"])))
        title = (
            f"Prompt {plain(prompt['id'])}, {mode}: {counted(len(run['tokens']), 'token')}, ended by {run['ended']}, "
            f"{run['agreement']:.1%} of them plain decoding's"
        )
        blocks.append(Table(title, (*headers, "drift"), rows, spare=("drift", "margin")))
    return blocks


def round_blocks(prompt: dict, place: int, tokens: dict[str, str]) -> list[Table | str]:
    """Return one round under every mode: its tree, what was accepted, and what plain decoding would accept of it."""
    blocks: list[Table | str] = []
    for mode, found in find_round(prompt, place).items():
        tree, parted = found["tree"], found["parted"]
        rows = [
            (
                node,
                token_text(token, tokens),
                parent,
                "yes" if node in found["path"] else "",
                "yes" if node in found["ar_path"] else "",
            )
            for node, (token, parent) in enumerate(zip(tree["tokens"], tree["parents"], strict=True))
        ]
        title = (
            f"Prompt {plain(prompt['id'])}, round {place}, {mode}: at token {found['position']}, "
            f"{found['accepted']} accepted, plain decoding {found['ar_accepted']}, {found['emitted']} emitted"
        )
        blocks.append(Table(title, ("node", "token", "parent", "accepted", "ar accepts"), rows))
        if parted is not None:
            what = "a tie" if parted["tie"] else "off"
            blocks.append(
                f"Left plain decoding at node {parted['node']} (depth {parted['depth']}), {what}: margin "
                f"{number(parted['margin'])}, |Δ| {number(parted['max_abs'])}, floor {number(parted['floor'])}; "
                f"{parted['wrong_accept']} accepted wrongly, {parted['wrong_reject']} rejected wrongly."
            )
    return blocks
