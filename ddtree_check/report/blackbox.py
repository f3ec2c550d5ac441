"""The record of two servers as text: what was compared, what is off and by how much, and what cannot be seen."""

from __future__ import annotations

from ..base.words import counted
from .layout import Table
from .terminal import BEYOND, MOST, ending
from .text import number, plain, size

SHOWN = 24  # characters of a token


def blocks(record: dict) -> list[Table | str]:
    """Return the whole view of two servers."""
    return [_head(record), _prompts(record), _worst(record), _remarks(record), *ending(record)]


def _head(record: dict) -> str:
    where, settings = record["environment"], record["settings"]
    return (
        f"server {plain(where['base_url'])} ({plain(where['model'])}) · reference {plain(where['reference_url'])} "
        f"({plain(where['reference_model'])}) · {settings['tokens']} tokens a prompt, top {settings['top']}, "
        f"{settings['repeats']} times"
    )


def _prompts(record: dict) -> Table:
    rows = []
    for prompt in record["prompts"]:
        if prompt["reason"] is not None:
            rows.append((plain(prompt["id"]), "not_run", *[""] * 8))
        for place, run in enumerate(prompt["runs"], start=1):
            verdicts = [position["verdict"] for position in run["positions"]]
            if run["ending"]:
                verdicts.append(run["ending"]["verdict"])
            found = [position["delta"] for position in run["positions"] if position["delta"] is not None]
            largest = number(max(found)) if found else "-"
            text = "same" if run["same_text"] else f"parts at {run['first']}"
            counts = [verdicts.count(name) for name in ("pass", "tie", "leak", "flip")]
            rows.append((plain(prompt["id"]), place, run["tokens"], len(run["positions"]), text, *counts, largest))
    headers = ("prompt", "run", "tokens", "compared", "text", "pass", "tie", "leak", "flip", "max |Δ|")
    title = "Emitted tokens, against the reference after the same text (|Δ| of log-probabilities, nats)"
    return Table(title, headers, rows, spare=("pass", "compared"))


def _worst(record: dict) -> Table | str:
    found = []
    for prompt in record["prompts"]:
        for run_number, run in enumerate(prompt["runs"], start=1):
            places = [*enumerate(run["positions"])]
            places += [(run["tokens"], run["ending"])] if run["ending"] else []
            found += [(prompt["id"], run_number, at, p) for at, p in places if p["verdict"] in BEYOND]
    if not found:
        return "No token is beyond the band."
    found.sort(key=lambda entry: (entry[3]["verdict"] != "flip", -entry[3]["regret"], -size(entry[3]["delta"])))
    rows = []
    for name, run, at, p in found[:MOST]:
        delta, margin = ("-" if p[key] is None else number(p[key]) for key in ("delta", "margin"))
        regret = ("at least " if p["cut"] else "") + number(p["regret"])
        change = f"{_token(p['chosen'])} → {'end of text' if p['token'] is None else _token(p['token'])}"
        rows.append((plain(name), run, at, p["verdict"], delta, regret, margin, change))
    headers = ("prompt", "run", "token", "verdict", "|Δ|", "regret", "margin", "reference → server")
    return Table(f"Worst of {counted(len(found), 'token')} beyond the band", headers, rows, spare=("margin",))


def _token(text: str) -> str:
    shown = repr(text)
    return plain(shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 2]}…{shown[-1]}")


def _remarks(record: dict) -> str:
    band, seen = record["band"], record["coverage"]
    rule = record["settings"]["rule"]
    control = "none was run (no echo)" if band["control"] is None else f"{number(band['control'])} nats"
    wide = f"by at most {number(band['largest'])} nats"
    if "band" in band:  # an older record has none
        wide += f", {rule['inside']:.0%} of the differences by {number(band['band'])}"
    beyond = f"more than {rule['factor']:g} times that and {rule['resolution']:g}, {number(band['bound'])} nats"
    return "\n".join(
        [
            f"Band: the reference differs from itself {wide}; beyond it: {beyond}. "
            f"Both servers on forced text, without speculation: {control}.",
            f"Coverage: {counted(seen['prompts'], 'prompt')}, {seen['not_run']} not run; "
            f"{seen['compared']} of {seen['tokens']} tokens compared; "
            f"{seen['same_text']} of {seen['runs']} texts are the reference's.",
            "Cannot be seen from here: " + "; ".join(map(plain, record["cannot_see"])) + ".",
        ]
    )
