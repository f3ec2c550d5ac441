"""The record as text for people: tables through tabulate, sentences wrapped to the width, the verdict last."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ..base.conclusion import DEFECT
from ..base.words import counted
from ..judge import figures
from ..judge.figures import CASE, CASES, NODE, WORST, Look
from ..judge.sampling.processing import Sampling
from .columns import CONTROL, NONE, Place, cells, looks, phrases
from .layout import COMMAND, Table
from .text import GREEN, number, plain, size, token_text

BEYOND = ("leak", "flip")
MOST = 10  # rows of a table that names the worst
NOT_RUN = ("unsupported", "not_run")
EVIDENCE = 3  # nodes of a case that are told one by one


def blocks(record: dict) -> list[Table | str]:
    """Return the tables and paragraphs of a comparison in reading order. Every format is made from these."""
    parts = [head(record), case_table(record), worst_table(record), *leak_tables(record), acceptance_table(record)]
    parts += sampling_blocks(record) if record.get("sampling") else []
    parts += commit_blocks(record)
    parts += rounds_blocks(record["rounds"]) if record.get("rounds") else []
    parts += batch_blocks(record["batch"]) if record.get("batch") else []
    return [*parts, remarks(record), verdict_line(record)]


def _picked(entry: dict, *names: str) -> list[str]:
    """Return some values of an entry as cells, null as an empty one."""
    return ["" if entry[name] is None else plain(entry[name]) for name in names]


def _decimals(entry: dict, *names: str) -> list[str]:
    """Return some means of an entry as cells; one that is withheld is null."""
    return ["withheld" if entry[name] is None else f"{entry[name]:.2f}" for name in names]


def head(record: dict) -> str:
    """Return what was run: model, weights, engine, dtype, device, seed, draft and sampling."""
    model, settings, where = record["model"], record["settings"], record["environment"]
    random = model.get("weights") == "random"
    words = [f"model {model.get('name')}", f"{'RANDOM' if random else model.get('weights')} weights"]
    words += [f"engine {where.get('engine')}", where.get("dtype"), where.get("device"), f"seed {settings['seed']}"]
    draft = settings["draft"] + (f" (acceptance {settings['acceptance']:g})" if settings["draft"] == "self" else "")
    line = " · ".join(map(plain, [*words, f"draft {draft}", *sampling_words(settings)]))
    if random:
        line += (
            "\nRANDOM WEIGHTS: a leak shows as well as with real ones, but flips, KL and acceptance say little about "
            "the real model."
        )
    return line


def case_table(record: dict) -> Table:
    rows, shown = [], looks(CASES, figures.RESULTS)
    blank = [""] * (len(shown) - 2)
    for case in record["cases"]:
        rows.append((plain(case["id"]), "ar", "reference", len(case["nodes"]), *blank))
        for mode, result in case["modes"].items():
            row = cells(CASES, figures.RESULTS, result, Place(record, case, mode=mode))
            rows.append((plain(case["id"]), mode, *([*row[:2], *blank] if result["verdict"] in NOT_RUN else row)))
    return _looking("Cases, against ar at every node", ("case", "mode"), shown, rows)


def _looking(title: str, first: tuple[str, ...], shown: Sequence[Look], rows: Sequence) -> Table:
    """Return a table whose columns after the first are columns of `figures`."""
    spare = sorted((look for look in shown if look.spare), key=lambda look: look.spare)
    return Table(title, (*first, *(look.header for look in shown)), rows, tuple(look.header for look in spare))


def worst_table(record: dict) -> Table | str:
    """Return the largest differences of the required modes that failed, else of the unforked control."""
    cases = record["cases"]
    failed = [
        mode
        for mode in record["settings"]["require"]
        if any(case["modes"][mode]["verdict"] == "fail" for case in cases)
    ]
    modes = failed or [CONTROL]
    nodes = [entry for case in cases for mode in modes for entry in worst_nodes(case, mode)]
    title = f"Worst nodes of {', '.join(modes)}"
    if all(case["modes"][CONTROL]["verdict"] in NOT_RUN for case in cases) and not failed:
        return f"{title}: it was not run."
    if not nodes:
        return f"{title}: none is beyond the floor."
    nodes.sort(key=_error, reverse=True)
    return node_table(f"{title}{'' if failed else ', the control that must fail'}", nodes[:MOST], record)


def _error(entry: tuple[dict, str, dict]) -> float:
    _, mode, node = entry
    return size(node[mode]["max_abs"])


def worst_nodes(case: dict, mode: str) -> list[tuple[dict, str, dict]]:
    """Return (case, mode, node) of all nodes beyond the floor, the largest difference first."""
    entries = [(case, mode, node) for node in case["nodes"] if node[mode]["verdict"] in BEYOND]
    return sorted(entries, key=_error, reverse=True)


def node_table(title: str, nodes: Sequence[tuple[dict, str, dict]], record: dict) -> Table:
    rows = []
    for case, mode, node in nodes:
        place = Place(record, case, node, mode)
        facts, values = cells(WORST, figures.FACTS, node, place), cells(WORST, figures.FIGURES, node[mode], place)
        rows.append((plain(case["id"]), *facts, *values))
    return _looking(title, ("case",), looks(WORST, figures.FACTS) + looks(WORST, figures.FIGURES), rows)


def leak_tables(record: dict) -> list[Table | str]:
    """Return what not forking did, by depth and by the number of foreign tokens absorbed."""
    nodes = [node for case in record["cases"] for node in case["nodes"] if not node["clean"]]
    if not nodes:
        return ["Leak: none of these trees contaminates a node of this model, so there is nothing to leak."]
    nodes = [node for node in nodes if node[CONTROL]["argmax"] is not None]
    if not nodes:
        return [f"Leak: {CONTROL} was not run, so that what not forking would do here was not seen."]
    return [
        _leak_table("depth", "depth", nodes, lambda node: (node["depth"], str(node["depth"]))),
        _leak_table("foreign tokens absorbed", "leaked", nodes, lambda node: _span(node["leaked"])),
    ]


def _span(leaked: int) -> tuple[int, str]:
    """Return the power of two below a count, and the counts that share it."""
    low = 1 << (leaked.bit_length() - 1) if leaked > 0 else 0
    return low, str(low) if low < 2 else f"{low}..{2 * low - 1}"


def _leak_table(what: str, name: str, nodes: Sequence[dict], group: Callable[[dict], tuple[int, str]]) -> Table:
    groups: dict[tuple[int, str], list[dict]] = {}
    for node in nodes:
        groups.setdefault(group(node), []).append(node[CONTROL])
    rows = []
    for (_, label), values in sorted(groups.items()):
        moved = sum(value["verdict"] in BEYOND for value in values) / len(values)
        median = statistics.median(size(value["max_abs"]) for value in values)
        flips = sum(value["verdict"] == "flip" for value in values)
        rows.append((label, len(values), f"{moved:.0%}", f"{median:.3g}", flips, _median_kl(values)))
    headers = (name, "contaminated", "beyond floor", "median |Δ|", "flips", "median KL")
    return Table(f"Leak by {what} ({CONTROL}, contaminated nodes only)", headers, rows)


WRONG = ("wrong accepts", "wrong rejects", "wrong bonus", "by tie")


def _wrongs(walks: Sequence[dict]) -> list[int]:
    """Return the cells of WRONG."""
    counts = [sum(len(walk[name]) for walk in walks) for name in ("wrong_accept", "wrong_reject")]
    return counts + [sum(bool(walk[name]) for walk in walks) for name in ("wrong_bonus", "by_tie")]


def acceptance_table(record: dict) -> Table:
    """Return what each mode accepts, and what of it ar would not."""
    rows = []
    for mode in ("ar", *record["cases"][0]["modes"]) if record["cases"] else ():
        walks = [case["acceptance"][mode] for case in record["cases"] if mode in case["acceptance"]]
        mean = f"{statistics.fmean(walk['accepted'] for walk in walks):.2f}" if walks else "not run"
        rows.append((mode, mean, *(_wrongs(walks) if walks else [""] * len(WRONG))))
    rounds = counted(len(record["cases"]), "round")
    title = f"Acceptance over {rounds}, greedy (accepted excludes root and bonus; wrong against ar)"
    return Table(title, ("mode", "accepted per round", *WRONG), rows)


SAMPLING = {**vars(Sampling()), "history": "path"}  # settings, and the value that changes nothing


def sampling_words(settings: dict) -> list[str]:
    """Return how tokens are drawn, in one phrase, or nothing for greedy decoding."""
    chosen = {name: settings.get(name, plain_) for name, plain_ in SAMPLING.items()}
    words = [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else format(value, 'g')}"
        for name, value in chosen.items()
        if value != SAMPLING[name]
    ]
    return [", ".join(words)] if words else []


def sampling_blocks(record: dict) -> list[Table | str]:
    """Return what temperature, cuts and penalties make of each mode, the walks under shared noise, and the draws."""
    sampling = record["sampling"]
    rows, walks, notes = [], [], []
    for mode, result in sampling["modes"].items():
        draws = result["draws"]
        rows.append(
            (
                mode,
                number(result["median_tv"]),
                number(result["max_tv"]),
                NONE if result["max_kl"] is None else number(result["max_kl"]),
                result["cut"],
                result["wrong"],
                "withheld" if result["alarm"] else f"{result['expected_accepted']:.3f}",
                number(result["ar_expected_accepted"]),
                NONE if result["moved"] is None else f"{round(result['moved'], 3) + 0.0:+.3f}",
                *((NONE, NONE) if draws is None else (f"{draws['p']:.2g}", f"{draws['p_own']:.2g}")),
            )
        )
        taken = [case["modes"][mode].get("sampled") for case in record["cases"]]
        taken = [result["acceptance"] for result in taken if result]
        mine = statistics.fmean(walk["accepted"] for walk in taken)
        change = statistics.fmean(len(walk["wrong_reject"]) - len(walk["wrong_accept"]) for walk in taken)
        walks.append((mode, f"{mine:.2f}", f"{mine + change:.2f}", *_wrongs(taken)))
        notes += [f"{mode} {result['alarm']}"] if result["alarm"] else []
    title = (
        "Sampling: processed distributions against ar's (cut: nodes where only one keeps some token, KL then has no "
        "limit; wrong: nodes whose processing is not their own path's; accepted: expected in a round)"
    )
    headers = ("mode", "median TV", "largest TV", "largest KL", "cut", "wrong", "accepted", "ar accepts", "moved")
    table = Table(title, (*headers, "draws p", "own p"), rows, spare=("largest KL", "own p", "cut"))
    title = f"Acceptance over {counted(len(record['cases']), 'round')} under shared noise"
    lines = [f"Acceptance: {'; '.join(notes)}."] if notes else []
    if draws := next((result["draws"] for result in sampling["modes"].values() if result["draws"]), None):
        visible = "" if draws["visible"] is None else f", {draws['visible']:.2g} with 90%"
        lines.append(
            f"Draws: {counted(draws['count'], 'walk')} behind {counted(draws['prompts'], 'prompt')} a mode, against "
            f"ar's exact distribution and the mode's own; level {sampling['level']:g} over all modes. A total "
            f"variation of {sampling['effect']:g} in the outcomes of every case is seen with a chance of "
            f"{draws['power']:.0%}{visible}."
        )
    parts = [table, Table(title, ("mode", "accepted", "ar accepted", *WRONG), walks)]
    return [*parts, "\n".join(lines)] if lines else parts


def commit_blocks(record: dict) -> list[Table | str]:
    """Return the paths that were committed by force, a line a case, and what is wrong in the modes that matter."""
    cases = [case for case in record["cases"] if case["commit"] is not None]
    if not cases:
        return []
    modes, found = list(record["cases"][0]["modes"]), []
    for what, first, kind in (("Commits", "paths", False), ("Recorded states", "nodes", True)):
        rows = []
        for case in cases:
            own = [accept for accept in case["commit"] if (accept["pattern"] == "state") == kind]
            if own:
                counts = [_commit_count([a for a in own if mode in a["modes"]] or own, mode) for mode in modes]
                rows.append((plain(case["id"]), len(own), sum(accept["aside"] for accept in own), *counts))
            elif not kind:
                rows.append((plain(case["id"]), 0, 0, *["no such path"] * len(modes)))
        states = any(accept["pattern"] == "state" for case in cases for accept in case["commit"])
        if rows and (kind or not states or any(row[1] for row in rows)):
            title = f"{what}, against a prefill of the same text ({CONTROL}: wrong where predicted)"
            found.append(Table(title, ("case", first, "off the first branch", *modes), rows))
    wrong = [
        (case, accept, mode)
        for case in cases
        for accept in case["commit"]
        for mode in accept["modes"]
        if accept["modes"][mode]["verdict"] == "fail"
    ]
    required = [item for item in wrong if item[2] in record["settings"]["require"]]
    for case, accept, mode in required[:MOST] or wrong[:1]:
        path = "-".join(map(str, accept["path"]))
        control = "" if required else " (the control that must fail)"
        reason = plain(accept["modes"][mode]["reason"])
        found.append(f"Wrong commit of {mode}{control} in {plain(case['id'])}, path {path}: {reason}")
    return found


def ending(record: dict, detail: str = "") -> list[str]:
    """Return the last paragraphs of a view: reasons, the command, the verdict with a detail in brackets."""
    lines = [f"Because: {plain(reason)}" for reason in record["verdict"]["reasons"]]
    lines += [f"{COMMAND}{plain(record['command'])}"] if record.get("command") else []
    last = f"verdict: {record['verdict']['text']}{detail and f' ({detail})'}, exit code {record['exit_code']}"
    return [*filter(None, ["\n".join(lines)]), last]


def rounds_blocks(rounds: dict) -> list[Table | str]:
    """Return what many rounds came to in each mode, where each first left plain decoding, and what was exercised."""
    rows, firsts = [], []
    means = [f"{name}_per_round" for name in ("accepted", "ar_accepted", "moved", "wrong_accept", "wrong_reject")]
    for mode, summary in rounds["summary"].items():
        texts, share = f"{summary['same_text']} of {summary['texts']}", f"{summary['agreement']:.1%}"
        counts, drift = _picked(summary, "rounds", "off", "ties"), number(summary["drift"]["largest"])
        rows.append((mode, *counts, texts, share, *_decimals(summary, *means), drift))
        if first := summary["first"]:
            sizes = [number(first[name]) for name in ("margin", "max_abs", "floor")]
            firsts.append(
                (mode, *_picked(first, "prompt", "round", "position", "node", "depth"), *sizes, summary["alarm"])
            )
    headers = ("mode", "rounds", "off", "ties", "same text", "agreement", "accepted", "ar accepts", "moved")
    title = (
        "Rounds against plain decoding of the same text (a round, without root and bonus; accepted is withheld where "
        "the text differs; drift: largest rms error of a state / its rms)"
    )
    spare = ("moved", "agreement", "ties", "drift")
    parts: list[Table | str] = [Table(title, (*headers, *WRONG[:2], "drift"), rows, spare)]
    if firsts:
        headers = ("mode", "prompt", "round", "token", "node", "depth", "margin", "|Δ|", "floor", "acceptance")
        parts.append(Table("First round off", headers, firsts, spare=("floor", "depth")))
    parts += [f"{mode}: unsupported ({plain(why)})" for mode, why in rounds.get("unsupported", {}).items()]
    parts += drafter_lines(rounds["summary"])
    coverage = rounds["coverage"]
    return [
        *parts,
        f"Coverage: of {counted(coverage['rounds'], 'drafted round')} {coverage['accepted_two_or_more']:.0%} accept "
        f"two nodes or more and {coverage['side_branch_accepts']:.0%} leave the first branch{_asked(coverage)}.",
    ]


def _asked(seen: dict) -> str:
    """Return what the shares of rounds are held against, where the record says so."""
    least = seen.get("least")
    if least is None:
        return ""
    short = [name for name, share in least.items() if seen[name] < share]
    asked = f"{least['accepted_two_or_more']:.0%} and {least['side_branch_accepts']:.0%}"
    return f" (at least {asked}: {'not exercised' if short else 'exercised'})"


def batch_blocks(batch: dict) -> list[Table | str]:
    """Return what stood in one batch and came out otherwise than alone, check by check, then the first findings."""
    if batch["not_run"] is not None:
        return [f"Batches: not_run: {plain(batch['not_run'])}"]
    names = ("check", "mode", "size", "compared", "off")
    rows = [(*_picked(check, *names), number(check["largest"]), number(check["floor"])) for check in batch["checks"]]
    headers = ("check", "mode", "batch", "compared", "off", "largest |Δ|", "largest floor")
    title = (
        "Batches, each request against itself alone (verify, step, prefill: logits; commit, reorder, canary: what is "
        "stored; reorder, canary and again must keep every bit)"
    )
    parts: list[Table | str] = [Table(title, headers, rows, spare=("largest floor",))]
    if shown := sorted(batch["findings"], key=lambda finding: finding["verdict"] != "fail")[:MOST]:
        names = ("check", "mode", "size", "composition", "request", "node", "layer", "channel", "verdict")
        headers = tuple("batch" if name == "size" else name for name in names)
        title = f"Findings in batches, the first {len(shown)} of {len(batch['findings'])}"
        parts.append(Table(title, headers, [_picked(each, *names) for each in shown], spare=("composition", "mode")))
        parts.append(f"First: {plain(shown[0]['says'])}")
    coverage = batch["coverage"]
    return [
        *parts,
        f"Coverage of batches: {counted(coverage['groups'], 'group')}, {coverage['unequal_lengths']} of unequal "
        f"lengths, prompts of {coverage['shortest']} to {coverage['longest']} tokens.",
    ]


def drafter_lines(summary: dict) -> list[str]:
    """Return a line a mode about a drafter that reads the target; modes of the same words share one."""
    lines: dict[str, list[str]] = {}
    for mode, found in summary.items():
        if drafter := found.get("drafter"):
            ngram = drafter["ngram"]
            ngram = "" if ngram is None else f" (of an n-gram draft in the same places {ngram:.2f})"
            polluted = f"; polluted in {counted(drafter['polluted'], 'round')}" if drafter["polluted"] else ""
            text = (
                f"expected {drafter['expected']:.2f} nodes a round, plain decoding accepts {drafter['accepted']:.2f} "
                f"of its drafts{ngram}{polluted}{': ' + drafter['says'] if drafter['says'] else ''}."
            )
            lines.setdefault(text, []).append(mode)
    return ["\n".join(f"Drafter in {', '.join(modes)}: {text}" for text, modes in lines.items())] if lines else []


def _commit_count(accepts: Sequence[dict], mode: str) -> str:
    """Return '4 pass', or how many of how many are not."""
    if accepts and not any(mode in accept["modes"] for accept in accepts):
        return "not run"
    verdicts = [accept["modes"][mode]["verdict"] for accept in accepts]
    others = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts) if verdict != "pass"}
    return ", ".join(f"{count} of {len(verdicts)} {verdict}" for verdict, count in others.items()) or (
        f"{len(verdicts)} pass" if verdicts else "no such path"
    )


def remarks(record: dict) -> str:
    floor, seen, leak = record["floor"], record["coverage"], record["leakage"]
    controls = ", ".join(f"{name} {number(value)}" for name, value in floor["controls"].items()) or "none was run"
    layers = ", ".join(f"{count} {kind}" for kind, count in seen["layers"].items())
    library = floor.get("library_unforked")
    if library is not None:
        controls += f"; the library's own unforked pass is {number(library)} from ours"
    wiring = record["settings"].get("wiring")
    without = f"wired {plain(wiring)}" if wiring else "not forked"
    lines = [
        f"Noise: largest control |Δ|: {controls}. Beyond noise: {floor['rule']}, factor {floor['factor']:g}, "
        f"ulps {floor['ulps']:g}, node by node.",
        f"Coverage: {counted(seen['cases'], 'case')}, {counted(seen['nodes'], 'node')}, "
        f"{counted(seen['branch_nodes'], 'branch node')}, "
        f"{seen['contaminated']} contaminated; {seen['near_moved']} of {seen['near']} near a skip edge moved; rounds "
        f"with two or more accepted {seen['accepted_two_or_more']}, off the first branch "
        f"{seen['side_branch_accepts']}, with a rejection {seen['rejections']}; layers: {layers}; "
        f"{'commits: ' + str(seen['commits']) if seen.get('commits') else 'no commit was looked at (--accept does)'}.",
    ]
    certified = (record.get("exact") or {}).get("verdict") == "pass"  # then nothing hides below a floor
    if (above := floor.get("systematic")) and (above["beyond"] or not certified):
        lines.insert(1, _systematic(above, judged_as(record)))
    lines.append(f"In bits: {exact_text(record)}.")
    effect = f"; what that does was not seen, for {CONTROL} was not run"
    if leak["rounds"]:
        effect = (
            f" and {leak['flipped']} would choose another token (median KL {_leak_kl(record)} nats); "
            f"{leak['wrong_accept_per_round']:.2f} tokens a round would be accepted wrongly, and "
            f"{leak['rounds_changed']} of {leak['rounds']} rounds would emit other tokens"
        )
    nodes = f"{leak['contaminated']} of {leak['nodes']} nodes"
    lines.append(f"Leakage: if the rows were {without}, {nodes} would read foreign tokens{effect}.")
    lines += [*draft_lines(record), *tie_lines(record)]
    if oracle := record.get("oracle"):
        modes = [mode for mode in ("ar", *record["verdict"]["modes"]) if mode in oracle]
        errors = ", ".join(f"{mode} {number(oracle[mode]['median_abs'])}" for mode in modes)
        outlier = "; ar is the outlier" if oracle["ar_is_the_outlier"] else ""
        lines.append(f"Against float64, median |Δ|: {errors}{outlier}.")
    lines += [f"Trace: {plain(note)}." for note in record.get("trace", {}).get("notes", ())]
    lines += [f"Because: {plain(reason)}" for reason in record["verdict"]["reasons"]]
    lines += where_lines(record)
    if record.get("command"):
        lines.append(f"{COMMAND}{plain(record['command'])}")
    return "\n".join(lines)


def exact_text(record: dict) -> str:
    """Return what the exact checks came to, or that nothing was compared in bits."""
    if exact := record.get("exact"):
        return plain(exact["text"])
    off = record["settings"].get("exact", "off") == "off"
    return "nothing was compared: " + ("--exact is off" if off else "no tree pass, or no passes that could be paired")


def draft_lines(record: dict) -> list[str]:
    """Return what the draft expected of its trees and what plain decoding accepts of them; nothing of trees that were
    given, and nothing of `self`, whose errors are drawn."""
    found = [case for case in record["cases"] if "expected" in case["tree"].get("source", {})]
    if not found or record["settings"]["draft"] == "self":
        return []
    expected = statistics.fmean(case["tree"]["source"]["expected"] for case in found)
    accepted = statistics.fmean(case["acceptance"]["ar"]["accepted"] for case in found)
    name = (record["model"].get("drafter") or {}).get("name") or f"of {record['settings']['draft']}"
    return [
        f"Draft {plain(name)}: expected {expected:.2f} nodes a round, plain decoding accepts {accepted:.2f} of its "
        f"drafts{'' if accepted >= expected else '; what is missing is drafter-side, no verify takes part in it'}."
    ]


def judged_as(record: dict) -> str | None:
    """Return the dtype that a record was judged in."""
    environment = record["environment"]
    return environment.get("judged_as") or environment.get("dtype")


def _systematic(above: dict, dtype: str) -> str:
    """Return what the run could see of wrong positions and masks, which may hide below a coarse dtype's floor."""
    prompts = f"{above['prompts']} of {counted(above.get('given', above['prompts']), 'prompt')}"
    if not above["judged"]:
        few = f"{prompts} with noise to compare with, {above['least']} are needed"
        if above["prompts"] >= above["least"]:
            few = (
                f"{counted(above['quiet'], 'row')} of trees differ from ar where chains are ar's own bit for bit, and "
                f"only {above['rows']} have noise to compare with"
            )
        return (
            f"Systematic: not judged: {few}; in {dtype} wrong positions and masks of attention may hide below the "
            "floor: give more prompts or deeper trees, or --dtype float32."
        )
    return (
        f"Systematic: errors of tree_forked {number(above['ratio'])} x those of chains as wide in {prompts}, "
        f"{'beyond' if above['beyond'] else 'within'} {number(above['limit'])}; one wrong position or mask bit at a "
        f"single node may still hide in {dtype}, not in float32."
    )


def where_lines(record: dict) -> list[str]:
    """Return where the faults enter that were looked into, a paragraph each."""
    return [line for case in record["cases"] for line in case_where(case)]


def case_where(case: dict, *modes: str) -> list[str]:
    """Return the same of one case, in these modes or in all; what moved in bits first."""
    evidence = (case.get("exact") or {}).get("evidence", []) if not modes or "tree_forked" in modes else []
    lines = [f"In bits (tree_forked in {plain(case['id'])}): {plain(text)}." for text in evidence[:EVIDENCE]]
    if len(evidence) > EVIDENCE:
        lines.append(f"In bits (tree_forked in {plain(case['id'])}): {len(evidence) - EVIDENCE} further nodes.")
    return lines + [
        f"Where ({found['mode']} in {plain(case['id'])}, {found['nodes']} beyond): {plain(found['text'])}."
        for mode, found in case.get("attribution", {}).items()
        if not modes or mode in modes
    ]


def tie_lines(record: dict) -> list[str]:
    """Return equal largest logits, and modes that take another of them than ar: explained, never a leak."""
    equal, rules = [], {}
    for case in record["cases"]:
        found = case.get("ties", {"equal": {}, "rules": {}})
        equal += [(plain(case["id"]), node, ids) for node, ids in found["equal"].items()]
        for mode, taken in found["rules"].items():
            rules.setdefault(mode, []).extend((plain(case["id"]), one) for one in taken)
    lines = []
    if equal:
        case, node, ids = equal[0]
        lines.append(
            f"Ties: at {counted(len(equal), 'node')} ar's largest logits are equal, margin 0 (first: {case}, node "
            f"{node}, tokens {' '.join(map(str, ids))})."
        )
    for mode, found in rules.items():
        case, one = found[0]
        lines.append(
            f"Tie rule differs: {mode} takes another of equal logits than ar at {counted(len(found), 'node')} (first: "
            f"{case}, node {one['node']}, ar {one['ar']}, {mode} {one['mode']}); the logits are the same."
        )
    return lines


def verdict_line(record: dict) -> str:
    modes = ", ".join(f"{mode} {record['verdict']['modes'][mode]}" for mode in record["settings"]["require"])
    passed = all(record["verdict"]["modes"][mode] in GREEN for mode in record["settings"]["require"])
    if passed and record["exit_code"]:  # the logits are right, something else is not
        modes += f"; {_decisive(record)}"
    # A pass on a chain, or on a model without a recurrence, says nothing about forking.
    nothing = record["verdict"]["sensitive"] is None and not record["coverage"].get("contaminated")
    empty = "; nothing to leak here, no fork was exercised" if nothing else ""
    return f"verdict: {record['verdict']['text']} ({modes}{empty}), exit code {record['exit_code']}"


def _decisive(record: dict) -> str:
    """Return the reason behind the exit code, as far as a headline has room for it."""
    reasons = [plain(reason) for reason in record["verdict"]["reasons"]] or ["no reason is recorded"]
    decisive = next((reason for reason in reasons if record["exit_code"] == DEFECT and ": fail" in reason), reasons[0])
    return decisive.partition(" (")[0].partition("; ")[0]


def find_case(record: dict, name: str) -> dict:
    """Return a case by its id. Raises ValueError listing what there is."""
    known = {case["id"]: case for case in record["cases"]}
    if name not in known:
        raise ValueError(f"case: got {name!r}, expected one of {', '.join(map(plain, known))}")
    return known[name]


def case_blocks(record: dict, case: dict) -> list[Table | str]:
    """Return every node of one case under every mode."""
    modes, rows, count = list(case["modes"]), [], len(looks(CASE, figures.FIGURES))
    for node in case["nodes"]:
        row = cells(CASE, figures.FACTS, node, Place(record, case, node))
        for mode in modes:
            place = Place(record, case, node, mode)
            run = node[mode]["argmax"] is not None
            row += cells(CASE, figures.FIGURES, node[mode], place) if run else [NONE] * count
        rows.append(row)
    shown = [look for mode in modes for look in looks(CASE, figures.FIGURES, mode)]
    table = _looking(f"Case {plain(case['id'])}", (), looks(CASE, figures.FACTS) + shown, rows)
    reasons = [
        f"{mode}: {result['verdict']}: {plain(result['reason'])}"
        for mode, result in case["modes"].items()
        if result["reason"]
    ]
    return [table, *reasons, *case_where(case)]


def find_node(case: dict, place: int) -> dict:
    """Return a node by its number. Raises ValueError for one that the case does not have."""
    if not 0 <= place < len(case["nodes"]):
        raise ValueError(f"node: got {place}, expected 0..{len(case['nodes']) - 1} in case {plain(case['id'])}")
    return case["nodes"][place]


def node_blocks(record: dict, case: dict, place: int) -> list[Table | str]:
    """Return all figures of one node. Raises ValueError for a node that the case does not have."""
    tokens, node = record.get("tokens", {}), find_node(case, place)
    path = [place]
    while case["nodes"][path[-1]]["parent"] >= 0:
        path.append(case["nodes"][path[-1]]["parent"])
    steps = " ".join(f"{step}:{token_text(case['nodes'][step]['token'], tokens)}" for step in reversed(path))
    after = node["rows_since_skip"]
    facts = [
        f"Case {plain(case['id'])}, node {place}: token {token_text(node['token'], tokens)}, depth {node['depth']}",
        f"path {steps}",
        f"parent {node['parent']}; unforked reads from {node['read_from']}, "
        + f"{counted(node['leaked'], 'foreign token')}, "
        + ("clean" if node["clean"] else "contaminated")
        + ("" if after is None else f", {counted(after, 'row')} after a skip edge"),
        *phrases(NODE, figures.FACTS, node, Place(record, case, node)),
        "controls |Δ|: "
        + (", ".join(f"{name} {number(value)}" for name, value in node["controls"].items()) or "none was run"),
        *(
            f"{mode} is off here from layer {found['first'][str(place)]} on"
            for mode, found in case.get("attribution", {}).items()
            if str(place) in found["first"]
        ),
        *case_where(case),
    ]
    rows, shown = [], looks(NODE, figures.FIGURES)
    for mode, result in case["modes"].items():
        run = node[mode]["argmax"] is not None
        row = cells(NODE, figures.FIGURES, node[mode], Place(record, case, node, mode)) if run else []
        rows.append((mode, *(row or [result["verdict"], *[NONE] * (len(shown) - 1)])))
    return ["\n".join(facts), _looking("", ("mode",), shown, rows)]


def _median_kl(values: Sequence[dict]) -> str:
    if any(value["kl"] is None and value["max_abs"] is not None for value in values):
        return "unknown"
    return f"{statistics.median(size(value['kl']) for value in values):.3g}"


def _leak_kl(record: dict) -> str:
    median = record["leakage"]["median_kl"]
    return "unknown" if median is None and record.get("trace", {}).get("top") else number(median)
