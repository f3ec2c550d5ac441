"""The record of a sweep as text and as a plot."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..base.errors import UsageError
from ..base.words import counted
from .layout import Table
from .record import check_writable
from .terminal import ending, head
from .text import number, plain

TITLE = (
    "Linear drafts against trees (a round; accepted excludes the root and the bonus token, so that tokens a round are "
    "accepted + 1; withheld where a mode's text is not plain decoding's, then `seems` says what it claims; shadow: "
    "plain decoding writes the text, an unforked verify of the same trees is only noted; leak: the share of "
    "accepted and bonus tokens that plain decoding would not emit there)"
)
HEADERS = (
    "block", "budget", "mode", "rounds", "off", "agreement", "accepted", "seems", "ar accepts", "wrong accepts",
    "wrong rejects", "leak", "contaminated", "rows", "rows per accepted", "pass ms",
)  # fmt: skip
SPARE = ("wrong accepts", "wrong rejects", "contaminated", "rounds", "ar accepts", "rows", "agreement")


def blocks(record: dict) -> list[Table | str]:
    """Return the table of a sweep, what it answers, and the ending."""
    table = Table(TITLE, HEADERS, [_cells(row) for row in record["rows"]], SPARE)
    lines = [text for found in record["answers"] for text in says(found)]
    polluted = [row["drafter"]["polluted"] for row in record["rows"] if row["drafter"]]
    if any(polluted):
        many = counted(sum(polluted), "round")
        lines.append(f"Drafted from polluted features, those that a leaked verify left: {many}.")
    low = {row["drafter"]["says"] for row in record["rows"] if row["drafter"] and row["mode"] == "linear"} - {None}
    lines += [f"Drafter in linear: {text}." for text in sorted(low)]
    return [head(record), table, "\n".join(lines), *ending(record)]


def _cells(row: dict) -> tuple:
    budget = "linear" if row["budget"] is None else row["budget"]
    accepted = "withheld" if row["accepted"] is None else f"{row['accepted']:.2f}"
    figures = [f"{row[name]:.2f}" for name in ("seems", "ar_accepted", "wrong_accept", "wrong_reject")]
    shares = f"{row['wrong_tokens'] / (row['seems'] + 1):.0%}", f"{row['contaminated']:.0%}"
    cost = "-" if row["rows_per_accepted"] is None else f"{row['rows_per_accepted']:.1f}"
    counts = row["mode"], row["rounds"], row["off"], f"{row['agreement']:.0%}"
    return (
        row["block"],
        budget,
        *counts,
        accepted,
        *figures,
        *shares,
        f"{row['rows']:.1f}",
        cost,
        number(row["pass_ms"]),
    )


def says(found: dict) -> list[str]:
    """Return the two answers of one block size, in words."""
    return [f"Block {found['block']}: {_pays(found)}", f"Leak: {_leaks(found)}"]


def _pays(found: dict) -> str:
    if found["gain"] is None:
        return "whether the tree pays is withheld, for linear or tree_forked left plain decoding's text."
    gain, of = found["gain"], found["linear"]
    verb = "pays" if gain > 0 else "does not pay"
    text = (
        f"the tree {verb} in tokens: at budget {found['budget']} tree_forked accepts {found['forked']:.2f} nodes a "
        f"round where linear accepts {of:.2f} ({gain / (of + 1):+.0%} tokens)"
    )
    if found["faster"] is None:
        return text + "."
    verb = "pays" if found["faster"] > 1 else "does not pay"
    return (
        f"{text}; it {verb} in time here: {found['faster']:.2f} x the tokens per second of verify passes at its best "
        f"budget for that, {found['fast_budget']}."
    )


def _leaks(found: dict) -> str:
    seems, leak = found["shadow_seems"] + 1, found["leak"]
    before = "" if found["linear"] is None else f" where linear makes {found['linear'] + 1:.2f}"
    return (
        f"an unforked verify of the same trees seems to make {seems:.2f} tokens a round{before}; {leak:.0%} of them "
        f"are leak, {found['shadow_right']:.2f} are right, and {found['lost']:.2f} right ones are rejected. Writing "
        f"its own text it leaves plain decoding in {found['unforked_off']:.0%} of the rounds."
    )


def check_plot(path: str) -> None:
    """Raise UsageError for a place that no plot can be written to, before anything is run."""
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"plot: got {path!r}, expected a name that ends in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise UsageError("plot: matplotlib is not installed; expected the extra plot: pip install 'ddtree-check[plot]'")
    check_writable(path)


def write_plot(record: dict, path: str) -> None:
    """Draw the sweep; the ending of `path` says in which form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    blocks = record["settings"]["blocks"]
    figure, axes = pyplot.subplots(len(blocks), 2, figsize=(11, 4.2 * len(blocks)), squeeze=False)
    for (left, right), found in zip(axes, record["answers"], strict=True):
        _plot_block(left, right, [row for row in record["rows"] if row["block"] == found["block"]], found)
    figure.suptitle(plain(f"{record['model'].get('name')}, draft {record['settings']['draft']}"))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_block(left, right, rows: list[dict], found: dict) -> None:
    by_mode: dict[str, list[dict]] = {}
    for row in rows:
        by_mode.setdefault(row["mode"], []).append(row)
    linear, shadow, forked = by_mode["linear"][0], by_mode["shadow"], by_mode["tree_forked"]
    budgets = [row["budget"] for row in forked]
    places = range(len(budgets))
    right_ones = [row["seems"] + 1 - row["wrong_tokens"] for row in shadow]
    wrong = [row["wrong_tokens"] for row in shadow]
    left.bar(places, right_ones, color="0.8", width=0.6, label="unforked, of the same trees: right")
    left.bar(places, wrong, bottom=right_ones, color="tab:red", width=0.6, label="unforked: leak")
    tokens = [row["seems"] + 1 for row in forked]
    left.plot(places, tokens, "o-", color="tab:green", label=_label(forked, "tree_forked"))
    left.axhline(linear["seems"] + 1, color="tab:blue", linestyle="--", label=_label([linear], "linear"))
    left.set_ylabel("tokens a round (accepted and bonus)")
    left.set_title(f"block {found['block']}: does the tree pay?")
    left.set_ylim(0, 1.45 * max(linear["seems"] + 1, *(row["seems"] + 1 for row in (*forked, *shadow))))
    left.legend(fontsize=8, loc="upper left", ncols=2)
    cost = [(row["rows_per_accepted"] or float("nan")) for row in forked]
    right.plot(places, cost, "o-", color="tab:green", label="tree_forked: rows per accepted node")
    if linear["rows_per_accepted"]:
        right.axhline(linear["rows_per_accepted"], color="tab:blue", linestyle="--", label="linear: likewise")
    right.set_ylim(0)
    right.set_ylabel("rows verified per accepted node")
    share = right.twinx()
    dirty = [100 * row["contaminated"] for row in shadow]
    share.plot(places, dirty, "s:", color="tab:red", label="nodes contaminated, unforked")
    share.set_ylim(0, 125)
    share.set_yticks(range(0, 101, 20))
    share.set_ylabel("% of nodes")
    right.set_title("what it costs, and what is at stake")
    lines = [*right.get_legend_handles_labels()[0], *share.get_legend_handles_labels()[0]]
    right.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="upper left")
    for axis in (left, right):
        axis.set_xticks(list(places), list(map(str, budgets)))
        axis.set_xlabel("draft budget")


def _label(rows: list[dict], mode: str) -> str:
    return f"{mode} (WITHHELD: not plain decoding's text)" if any(row["accepted"] is None for row in rows) else mode
