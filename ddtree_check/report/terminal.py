"""The record as text for people: tables through tabulate, sentences wrapped to the width, the verdict last."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from .text import number, plain, size, token_text

BEYOND = ("leak", "flip")
CONTROL = "tree_unforked"
WORST = 10
SHORTEST = 8  # characters of a case that a narrow screen still shows


@dataclass(frozen=True)
class Table:
    """A table to be laid out. `spare` are the columns to leave out, the last first, where the screen is too narrow."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    spare: tuple[str, ...] = ()


def layout(table: Table, width: int | None, style: str = "plain") -> str:
    """Text of a table, no wider than `width` if leaving out spare columns and shortening the first can make it so."""
    headers, rows, spare = list(table.headers), [list(map(str, row)) for row in table.rows], list(table.spare)
    while True:
        columns = list(zip(*rows, strict=True))
        sides = ["left" if _words(column) else "right" for column in columns] or None
        if style == "plain":  # tabulate's own header line makes every column two wider
            rule = ["-" * max(map(len, (name, *column))) for name, column in zip(headers, columns, strict=False)]
            text = tabulate([headers, rule, *rows], tablefmt=style, disable_numparse=True, colalign=sides)
        else:
            text = tabulate(rows, headers, style, disable_numparse=True, colalign=sides)
        over = 0 if width is None else max(map(len, text.splitlines())) - width
        if over > 0 and spare:
            place = headers.index(spare.pop())
            for row in (headers, *rows):
                del row[place]
            continue
        keep = max(map(len, columns[0])) - over if columns else 0
        if over <= 0 or keep < SHORTEST or max(map(len, columns[0])) <= len(headers[0]):
            return text
        for row in rows:  # the end of a name tells more than its beginning
            row[0] = row[0] if len(row[0]) <= keep else "…" + row[0][1 - keep :]


def _words(column: Iterable[str]) -> bool:
    """Whether a column holds words: those go to the left."""
    return any(
        cell and not (cell[0].isdigit() or cell in ("not finite", "inf", "-") or cell[0] == "-") for cell in column
    )


def render(record: dict, width: int | None = None, quiet: bool = False) -> str:
    """The whole view. width: columns of the screen, None if it does not matter. quiet: the verdict alone."""
    if quiet:
        return verdict_line(record)
    parts: list[str] = []
    for block in blocks(record):
        parts.append(titled(block, width) if isinstance(block, Table) else wrap(block, width))
    return "\n\n".join([*parts, verdict_line(record)])


def titled(table: Table, width: int | None) -> str:
    return f"{wrap(table.title, width)}\n{layout(table, width)}"


def wrap(text: str, width: int | None) -> str:
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False) if width else line
        for line in text.splitlines()
    )


def blocks(record: dict) -> list[Table | str]:
    """Tables and paragraphs in reading order, all but the last line. Every format is made from these."""
    found: list[Table | str] = [head(record), case_table(record)]
    found.append(worst_table(record))
    found += leak_tables(record)
    found.append(acceptance_table(record))
    found += commit_blocks(record)
    if record.get("rounds"):
        found += rounds_blocks(record["rounds"])
    found.append(remarks(record))
    return found


def head(record: dict) -> str:
    model, settings, where = record["model"], record["settings"], record["environment"]
    random = model.get("weights") == "random"
    draft = settings["draft"] + (f" (acceptance {settings['acceptance']:g})" if settings["draft"] == "self" else "")
    line = " · ".join(
        plain(word)
        for word in (
            f"model {model.get('name')}",
            f"{'RANDOM' if random else model.get('weights')} weights",
            f"engine {where.get('engine')}",
            where.get("dtype"),
            where.get("device"),
            f"seed {settings['seed']}",
            f"draft {draft}",
        )
    )
    if random:
        line += (
            "\nRANDOM WEIGHTS: a leak shows as well as with real ones, but flips, KL and acceptance say little about "
            "the real model."
        )
    return line


def case_table(record: dict) -> Table:
    rows = []
    for case in record["cases"]:
        rows.append((plain(case["id"]), "ar", "reference", len(case["nodes"]), *[""] * 6))
        for mode, result in case["modes"].items():
            counts = [result[name] for name in ("nodes", "pass", "tie", "leak", "flip")]
            figures = [number(result[name]) for name in ("max_abs", "median_abs")]
            rows.append((plain(case["id"]), mode, mode_verdict(record, case, mode), *counts, *figures))
    headers = ("case", "mode", "verdict", "nodes", "pass", "tie", "leak", "flip", "max |Δ|", "median |Δ|")
    return Table("Cases, against ar at every node", headers, rows, spare=("pass", "nodes", "median |Δ|"))


def mode_verdict(record: dict, case: dict, mode: str) -> str:
    """A mode's verdict in words: the negative control must fail, and says so."""
    verdict = case["modes"][mode]["verdict"]
    if mode != CONTROL or mode in record["settings"]["require"]:
        return verdict
    law = case["leak_law"]
    if verdict == "fail":
        off = law["outside"] or law["clean_bitwise_equal"] is False
        return "fail (NOT as predicted)" if off else "fail (expected: control)"
    return "pass (nothing to leak)" if verdict == "pass" else verdict


def worst_table(record: dict) -> Table | str:
    """The largest differences of the required modes that failed, else of the unforked control."""
    required = record["settings"]["require"]
    failed = [mode for mode in required if any(case["modes"][mode]["verdict"] == "fail" for case in record["cases"])]
    nodes = [found for case in record["cases"] for mode in failed or [CONTROL] for found in worst_nodes(case, mode)]
    modes = ", ".join(failed or [CONTROL])
    if not nodes:
        return f"Worst nodes of {modes}: none is beyond the floor."
    nodes.sort(key=lambda found: size(found[2][found[1]]["max_abs"]), reverse=True)
    note = "" if failed else ", the control that must fail"
    return node_table(f"Worst nodes of {modes}{note}", nodes[:WORST], record.get("tokens", {}))


def worst_nodes(case: dict, mode: str) -> list[tuple[dict, str, dict]]:
    """(case, mode, node) of all nodes beyond the floor, the largest difference first."""
    found = [node for node in case["nodes"] if node[mode]["verdict"] in BEYOND]
    found.sort(key=lambda node: size(node[mode]["max_abs"]), reverse=True)
    return [(case, mode, node) for node in found]


def node_table(title: str, nodes: Sequence[tuple[dict, str, dict]], tokens: dict[str, str]) -> Table:
    rows = []
    for case, mode, node in nodes:
        value = node[mode]
        rows.append(
            (
                plain(case["id"]),
                node["node"],
                node["parent"],
                node["read_from"] if mode == CONTROL else node["parent"],
                node["depth"],
                node["leaked"],
                number(value["max_abs"]),
                _floor(value),
                number(node["ar"]["margin"]),
                f"{token_text(node['ar']['argmax'], tokens)} → {token_text(value['argmax'], tokens)}",
            )
        )
    headers = ("case", "node", "parent", "read from", "depth", "leaked", "|Δ|", "floor", "margin", "ar → mode token")
    return Table(title, headers, rows, spare=("margin", "leaked", "depth"))


def leak_tables(record: dict) -> list[Table | str]:
    """What not forking did, by depth and by the number of foreign tokens absorbed."""
    nodes = [node for case in record["cases"] for node in case["nodes"] if not node["clean"]]
    if not nodes:
        return ["Leak: none of these trees contaminates a node of this model, so there is nothing to leak."]
    title = f"Leak by {{}} ({CONTROL}, contaminated nodes only)"
    return [
        _leak_table(title.format("depth"), "depth", nodes, lambda node: (node["depth"], str(node["depth"]))),
        _leak_table(title.format("foreign tokens absorbed"), "leaked", nodes, lambda node: _span(node["leaked"])),
    ]


def _span(leaked: int) -> tuple[int, str]:
    """The power of two below a count, and the counts that share it."""
    low = 1 << (leaked.bit_length() - 1) if leaked > 0 else 0
    return low, str(low) if low < 2 else f"{low}..{2 * low - 1}"


def _leak_table(title: str, name: str, nodes: Sequence[dict], group: Callable[[dict], tuple[int, str]]) -> Table:
    groups: dict[tuple[int, str], list[dict]] = {}
    for node in nodes:
        groups.setdefault(group(node), []).append(node[CONTROL])
    rows = []
    for (_, label), found in sorted(groups.items()):
        moved = sum(value["verdict"] in BEYOND for value in found)
        rows.append(
            (
                label,
                len(found),
                f"{moved / len(found):.0%}",
                f"{statistics.median(size(value['max_abs']) for value in found):.3g}",
                sum(value["verdict"] == "flip" for value in found),
                f"{statistics.median(size(value['kl']) for value in found):.3g}",
            )
        )
    return Table(title, (name, "contaminated", "beyond floor", "median |Δ|", "flips", "median KL"), rows)


def acceptance_table(record: dict) -> Table:
    rows = []
    for mode in ("ar", *record["cases"][0]["modes"]) if record["cases"] else ():
        walks = [case["acceptance"][mode] for case in record["cases"]]
        rows.append(
            (
                mode,
                f"{statistics.fmean(walk['accepted'] for walk in walks):.2f}",
                *(sum(len(walk[name]) for walk in walks) for name in ("wrong_accept", "wrong_reject")),
                *(sum(bool(walk[name]) for walk in walks) for name in ("wrong_bonus", "by_tie")),
            )
        )
    headers = ("mode", "accepted per round", "wrong accepts", "wrong rejects", "wrong bonus", "by tie")
    rounds = len(record["cases"])
    title = f"Acceptance over {rounds} rounds, greedy (accepted excludes root and bonus; wrong against ar)"
    return Table(title, headers, rows)


def commit_blocks(record: dict) -> list[Table | str]:
    """The paths that were committed by force, a line a case, and what is wrong in the modes that matter."""
    cases = [case for case in record["cases"] if case["commit"] is not None]
    if not cases:
        return []
    modes, rows = list(record["cases"][0]["modes"]), []
    for case in cases:
        aside = sum(accept["aside"] for accept in case["commit"])
        counts = [_commit_count(case["commit"], mode) for mode in modes]
        rows.append((plain(case["id"]), len(case["commit"]), aside, *counts))
    headers = ("case", "paths", "off the first branch", *modes)
    title = f"Commits, against a prefill of the same text ({CONTROL}: wrong where predicted)"
    found: list[Table | str] = [Table(title, headers, rows)]
    wrong = [
        (case, accept, mode)
        for case in cases
        for accept in case["commit"]
        for mode in accept["modes"]
        if accept["modes"][mode]["verdict"] == "fail"
    ]
    required = [item for item in wrong if item[2] in record["settings"]["require"]]
    for case, accept, mode in required[:WORST] or wrong[:1]:
        path = "-".join(map(str, accept["path"]))
        control = "" if required else " (the control that must fail)"
        reason = plain(accept["modes"][mode]["reason"])
        found.append(f"Wrong commit of {mode}{control} in {plain(case['id'])}, path {path}: {reason}")
    return found


def render_rounds(record: dict, width: int | None = None, quiet: bool = False) -> str:
    """The view of a record of rounds alone."""
    last = f"verdict: {record['verdict']['text']}, exit code {record['exit_code']}"
    if quiet:
        return last
    found = [head(record), *rounds_blocks(record["rounds"])]
    found.append("\n".join([f"Because: {plain(reason)}" for reason in record["verdict"]["reasons"]]))
    found.append(f"Again: {plain(record['command'])}")
    parts = [titled(block, width) if isinstance(block, Table) else wrap(block, width) for block in found if block]
    return "\n\n".join([*parts, last])


def rounds_blocks(rounds: dict) -> list[Table | str]:
    """What many rounds came to in each mode, where each first left plain decoding, and what was exercised."""
    rows, first = [], []
    for mode, found in rounds["summary"].items():
        accepted = found["accepted_per_round"]
        drift = found["drift"]
        figures = [f"{found[name]:.2f}" for name in ("ar_accepted_per_round", "moved_per_round")]
        figures += [f"{found[name]:.2f}" for name in ("wrong_accept_per_round", "wrong_reject_per_round")]
        texts = f"{found['same_text']} of {found['texts']}"
        rows.append(
            (
                mode,
                found["rounds"],
                found["off"],
                found["ties"],
                texts,
                f"{found['agreement']:.1%}",
                "withheld" if accepted is None else f"{accepted:.2f}",
                *figures,
                number(drift["largest"]),
            )
        )
        if found["first"]:
            one = found["first"]
            where = [one[name] for name in ("round", "position", "node", "depth")]
            sizes = [number(one[name]) for name in ("margin", "max_abs", "floor")]
            first.append((mode, plain(one["prompt"]), *where, *sizes, found["alarm"]))
    headers = ("mode", "rounds", "off", "ties", "same text", "agreement", "accepted", "ar accepts", "moved")
    headers += ("wrong accepts", "wrong rejects", "drift")
    title = (
        "Rounds against plain decoding of the same text (a round, without root and bonus; accepted is withheld where "
        "the text differs; drift: largest rms error of a state / its rms)"
    )
    blocks: list[Table | str] = [Table(title, headers, rows, spare=("ties", "drift"))]
    if first:
        headers = ("mode", "prompt", "round", "token", "node", "depth", "margin", "|Δ|", "floor", "acceptance")
        blocks.append(Table("First round off", headers, first, spare=("floor", "depth")))
    seen = rounds["coverage"]
    blocks.append(
        f"Coverage: of {seen['rounds']} drafted rounds {seen['accepted_two_or_more']:.0%} accept two nodes or more and "
        f"{seen['side_branch_accepts']:.0%} leave the first branch."
    )
    return blocks


def _commit_count(accepts: Sequence[dict], mode: str) -> str:
    """'4 pass', or how many of how many are not."""
    verdicts = [accept["modes"][mode]["verdict"] for accept in accepts]
    others = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts) if verdict != "pass"}
    return ", ".join(f"{count} of {len(verdicts)} {verdict}" for verdict, count in others.items()) or (
        f"{len(verdicts)} pass" if verdicts else "no such path"
    )


def remarks(record: dict) -> str:
    floor, seen, leak = record["floor"], record["coverage"], record["leakage"]
    controls = ", ".join(f"{name} {number(value)}" for name, value in floor["controls"].items())
    layers = ", ".join(f"{count} {kind}" for kind, count in seen["layers"].items())
    library = floor.get("library_unforked")
    if library is not None:
        controls += f"; the library's own unforked pass is {number(library)} from ours"
    wiring = record["settings"].get("wiring")
    without = f"wired {plain(wiring)}" if wiring else "not forked"
    lines = [
        f"Noise: largest control |Δ|: {controls}. Beyond noise: {floor['rule']}, factor {floor['factor']:g}, "
        f"ulps {floor['ulps']:g}, node by node.",
        f"Coverage: {seen['cases']} cases, {seen['nodes']} nodes, {seen['branch_nodes']} branch nodes, "
        f"{seen['contaminated']} contaminated; {seen['near_moved']} of {seen['near']} near a skip edge moved; rounds "
        f"with two or more accepted {seen['accepted_two_or_more']}, off the first branch "
        f"{seen['side_branch_accepts']}, with a rejection {seen['rejections']}; layers: {layers}.",
        f"Leakage: if the rows were {without}, {leak['contaminated']} of {leak['nodes']} nodes would read foreign "
        f"tokens and {leak['flipped']} would choose another token (median KL {number(leak['median_kl'])} nats); "
        f"{leak['wrong_accept_per_round']:.2f} tokens a round would be accepted wrongly, and "
        f"{leak['rounds_changed']} of {leak['rounds']} rounds would emit other tokens.",
    ]
    if oracle := record.get("oracle"):
        errors = ", ".join(
            f"{mode} {number(oracle[mode]['median_abs'])}" for mode in ("ar", *record["verdict"]["modes"])
        )
        outlier = "; ar is the outlier" if oracle["ar_is_the_outlier"] else ""
        lines.append(f"Against float64, median |Δ|: {errors}{outlier}.")
    lines += [f"Because: {plain(reason)}" for reason in record["verdict"]["reasons"]]
    if record.get("command"):
        lines.append(f"Again: {plain(record['command'])}")
    return "\n".join(lines)


def verdict_line(record: dict) -> str:
    modes = ", ".join(f"{mode} {record['verdict']['modes'][mode]}" for mode in record["settings"]["require"])
    # A pass on a chain, or on a model without a recurrence, says nothing about forking.
    empty = "; nothing to leak here, no fork was exercised" if record["verdict"]["sensitive"] is None else ""
    return f"verdict: {record['verdict']['text']} ({modes}{empty}), exit code {record['exit_code']}"


def find_case(record: dict, name: str) -> dict:
    """A case by its id. Raises ValueError listing what there is."""
    known = {case["id"]: case for case in record["cases"]}
    if name not in known:
        raise ValueError(f"case: got {name!r}, expected one of {', '.join(map(plain, known))}")
    return known[name]


def render_case(record: dict, case: dict, width: int | None = None) -> str:
    """Every node of one case under every mode."""
    tokens, modes = record.get("tokens", {}), list(case["modes"])
    rows = []
    for node in case["nodes"]:
        shown = [f"{number(node[mode]['max_abs'])} {node[mode]['verdict'] or 'not judged'}".strip() for mode in modes]
        rows.append(
            (
                node["node"],
                token_text(node["token"], tokens),
                node["parent"],
                node["read_from"],
                node["depth"],
                node["leaked"],
                token_text(node["ar"]["argmax"], tokens),
                *shown,
            )
        )
    headers = ("node", "token", "parent", "unforked reads", "depth", "leaked", "ar token", *(f"{m} |Δ|" for m in modes))
    table = Table(f"Case {plain(case['id'])}", headers, rows, spare=("leaked", "depth", "unforked reads"))
    reasons = [
        wrap(f"{mode}: {result['verdict']}: {plain(result['reason'])}", width)
        for mode, result in case["modes"].items()
        if result["reason"]
    ]
    return "\n\n".join([titled(table, width), *reasons])


def render_node(record: dict, case: dict, place: int, width: int | None = None) -> str:
    """All figures of one node. Raises ValueError for a node that the case does not have."""
    if not 0 <= place < len(case["nodes"]):
        raise ValueError(f"node: got {place}, expected 0..{len(case['nodes']) - 1} in case {plain(case['id'])}")
    tokens, node = record.get("tokens", {}), case["nodes"][place]
    path = [place]
    while case["nodes"][path[-1]]["parent"] >= 0:
        path.append(case["nodes"][path[-1]]["parent"])
    steps = " ".join(f"{step}:{token_text(case['nodes'][step]['token'], tokens)}" for step in reversed(path))
    after = node["rows_since_skip"]
    facts = [
        f"Case {plain(case['id'])}, node {place}: token {token_text(node['token'], tokens)}, depth {node['depth']}",
        f"path {steps}",
        f"parent {node['parent']}; unforked reads from {node['read_from']}, {node['leaked']} foreign tokens, "
        + ("clean" if node["clean"] else "contaminated")
        + ("" if after is None else f", {after} rows after a skip edge"),
        f"ar chooses {token_text(node['ar']['argmax'], tokens)} by a margin of {number(node['ar']['margin'])}",
        "controls |Δ|: " + ", ".join(f"{name} {number(value)}" for name, value in node["controls"].items()),
    ]
    headers = ("mode", "verdict", "|Δ|", "floor", "rms", "KL", "TV", "rank of ar's", "token")
    rows = []
    for mode in case["modes"]:
        value = node[mode]
        figures = [number(value[name]) for name in ("rms", "kl", "tv")]
        verdict, token = value["verdict"] or "not judged", token_text(value["argmax"], tokens)
        rows.append((mode, verdict, number(value["max_abs"]), _floor(value), *figures, value["ar_rank"], token))
    table = Table("", headers, rows, spare=("rms", "TV"))
    return "\n".join([wrap("\n".join(facts), width), "", layout(table, width)])


def _floor(value: dict) -> str:
    """A mode that could not be judged has none."""
    return "-" if value["floor"] is None else number(value["floor"])
