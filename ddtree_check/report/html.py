"""The record as one HTML file that needs nothing else: figures by plotly, whose code travels in it, and the tables.

Figures are made here as plain plotly JSON, and drawn by the browser when their part of the page is opened. Code and
figures are compressed, which makes a file of 2 MB out of 5. Ids, tokens and reasons are escaped wherever they stand.
"""

from __future__ import annotations

import base64
import functools
import gzip
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..base.conclusion import DEFECT, PASS, USAGE
from ..base.files import json_number
from ..base.words import counted
from ..judge import figures
from ..judge.figures import HOVER
from .columns import CONTROL, Place, mode_verdict, phrases
from .drawing import children_of
from .layout import Table
from .terminal import BEYOND, blocks, verdict_line, where_lines
from .text import plain, token_text

COLOURS = {  # of verdicts, told apart by people who do not see red and green; and each has a shape of its own
    "pass": "#009e73",
    "tie": "#f0e442",
    "leak": "#e69f00",
    "flip": "#d55e00",
    "not judged": "#bbbbbb",
}
SHAPES = {"pass": "circle", "tie": "diamond", "leak": "square", "flip": "x", "not judged": "circle-open"}
PATHS = {  # mode -> colour and width of its accepted path; wide below narrow, so that equal paths all show
    "ar": ("#000000", 18),
    "linear": ("#56b4e9", 13),
    "tree_forked": ("#0072b2", 8),
    "tree_unforked": ("#cc79a7", 4),
}
WORDS = {"pass": "good", "fail": "bad", "drift": "bad", "error": "bad"}  # verdict -> class of its colour
STATES = {PASS: "good", DEFECT: "bad", USAGE: "bad"}
QUIET = {
    "margin": {"l": 60, "r": 20, "t": 30, "b": 45},
    "template": None,
    "plot_bgcolor": "#fff",
    "hovermode": "closest",
}
ROW = 44  # pixels a level of a tree


def render(record: dict) -> str:
    """The page of one record."""
    page = _Page()
    run = page.run(record, "record")
    line = verdict_line(record)
    notes = [*record["verdict"]["reasons"], *where_lines(record)]
    return page.render(title=line, state=STATES.get(record["exit_code"], "unsure"), notes=notes, runs=[run], cells=[])


def render_gate(night: dict, records: Sequence[dict | None], past: Sequence[tuple[str, dict]]) -> str:
    """The page of a night of the gate. night: what gate.json holds; records: of each cell, None if there is none.

    past: (started, {cell: (verdict, seconds, metrics)}) of the earlier nights, the oldest first.
    """
    from .nightly import drift_text, where_texts

    page = _Page()
    cells, runs = [], []
    for place, (cell, record) in enumerate(zip(night["cells"], records, strict=True)):
        why = [plain(cell["reason"])] if cell["reason"] else []
        why += [plain(text) for text in (*map(drift_text, cell["drifts"]), *where_texts(cell))]
        run = None
        if record is not None:
            run = page.run(record, f"cell-{place}", cell["name"])
            run["history"] = page.add(f"history-{place}", _metrics_figure(cell, night["started"], past))
            run["open"] = False
            runs.append(run)
        cells.append(
            {
                "name": plain(cell["name"]),
                "verdict": cell["verdict"],
                "state": WORDS.get(cell["verdict"], "unsure"),
                "seconds": f"{cell['seconds']:.1f}",
                "nights": cell["nights"][-14:],
                "why": why,
                "command": plain(cell["command"]),
                "anchor": run["id"] if run else None,
            }
        )
    history = page.add("nights", _nights_figure(night, past)) if past else None
    state = STATES.get(night["exit_code"], "unsure")
    notes = [plain(note) for note in night["notes"]]
    return page.render(title=night["line"], state=state, notes=notes, runs=runs, cells=cells, history=history)


class _Page:
    """Collects the figures of a page and fills its template."""

    def __init__(self):
        self.figures: dict[str, dict] = {}

    def add(self, name: str, figure: dict) -> str:
        self.figures[name] = figure
        return name

    def run(self, record: dict, name: str, title: str | None = None) -> dict:
        """What the template needs of one record."""
        figures = [
            (title, self.add(f"{name}-{key}", figure))
            for key, (title, figure) in {
                "depth": ("Leak by depth", _leak_figure(record, "depth", "depth of the node")),
                "leaked": (
                    "Leak by foreign tokens absorbed",
                    _leak_figure(record, "leaked", "foreign tokens absorbed"),
                ),
                "layers": ("The layer at which a node goes off", _layer_figure(record)),
                "profile": ("How far off each layer is", _profile_figure(record)),
                "stored": ("Stored states, layer by layer", _stored_figure(record)),
                "accepted": ("Accepted by mode, case by case", _acceptance_figure(record)),
                "rounds": ("Accepted by mode, round by round", _rounds_figure(record)),
            }.items()
            if figure is not None
        ]
        cases = []
        for place, case in enumerate(record["cases"]):
            modes = [(mode, mode_verdict(record, case, mode), _state(record, case, mode)) for mode in case["modes"]]
            figure = self.add(f"{name}-case-{place}", _tree_figure(record, case))
            reasons = [f"{mode}: {plain(found['reason'])}" for mode, found in case["modes"].items() if found["reason"]]
            cases.append({"id": plain(case["id"]), "modes": modes, "figure": figure, "reasons": reasons})
        parts = [
            {"title": part.title, "headers": part.headers, "rows": [list(map(str, row)) for row in part.rows]}
            if isinstance(part, Table)
            else {"lines": part.splitlines()}
            for part in blocks(record)[:-1]
        ]
        return {
            "id": name,
            "title": plain(title) if title else None,
            "line": verdict_line(record),
            "state": STATES.get(record["exit_code"], "unsure"),
            "head": parts[0],
            "parts": parts[1:],
            "figures": figures,
            "cases": cases,
            "history": None,
            "open": True,
        }

    def render(self, **values) -> str:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        template = environment.get_template("page.html")
        values.setdefault("history", None)
        figures = _packed(json.dumps(self.figures, allow_nan=False))
        heights = {name: figure["layout"]["height"] for name, figure in self.figures.items()}
        text = template.render(figures=figures, heights=heights, code=_plotly(), colours=COLOURS, **values)
        return text.encode("utf-8", "backslashreplace").decode()


def _packed(text: str) -> str:
    """Text that the page unpacks: base64 of gzip. Nothing in it can end a script element."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 9, mtime=0)).decode("ascii")


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _packed(get_plotlyjs())


def _state(record: dict, case: dict, mode: str) -> str:
    verdict = mode_verdict(record, case, mode)
    if verdict.startswith(("pass", "fail (expected")):
        return "good"
    return "bad" if verdict.startswith("fail") else "unsure"


def _text(value: object) -> str:
    """Text inside a figure: plotly obeys some tags there."""
    return escape(plain(value), quote=False)


# The tree


def _places(case: dict) -> list[tuple[float, int]]:
    """(x, depth) of each node: leaves side by side, a node over the middle of its children."""
    nodes = case["nodes"]
    children = children_of(nodes)
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
    x, leaves = [0.0] * len(nodes), 0
    for node in order:
        if not children[node]:
            x[node], leaves = float(leaves), leaves + 1
    for node in reversed(order):
        if children[node]:
            x[node] = (x[children[node][0]] + x[children[node][-1]]) / 2
    return [(x[node["node"]], node["depth"]) for node in nodes]


def _lines(pairs: Sequence[tuple[int, int]], places: Sequence[tuple[float, int]]) -> dict:
    """x and y of separate lines between nodes."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for start, end in pairs:
        xs += [places[start][0], places[end][0], None]
        ys += [places[start][1], places[end][1], None]
    return {"x": xs, "y": ys}


def _tree_figure(record: dict, case: dict) -> dict:
    """The draft tree: edges, the edges along which the unforked control read its state, accepted paths, nodes."""
    nodes, places, tokens = case["nodes"], _places(case), record.get("tokens", {})
    line = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    data = [
        line
        | _lines([(node["parent"], node["node"]) for node in nodes[1:]], places)
        | {"name": "continues", "line": {"color": "#999", "width": 1.5}}
    ]
    for mode, (colour, width) in PATHS.items():
        if mode not in case["acceptance"]:
            continue
        walk = case["acceptance"][mode]
        path = walk["path"]
        found = _lines(list(itertools.pairwise(path)), places)
        if len(path) == 1:  # the root alone: a point, so that the legend still says so
            found = {"x": [places[0][0]] * 2, "y": [places[0][1]] * 2}
        name = f"{mode} accepts {walk['accepted']}, then {_text(token_text(walk['bonus'], tokens))}"
        data.append(line | found | {"name": name, "line": {"color": colour, "width": width}, "opacity": 0.35})
    wrong = [(node["read_from"], node["node"]) for node in nodes if node["read_from"] not in (node["parent"], -1, None)]
    if wrong:
        arrows = {
            "symbol": "arrow",
            "angleref": "previous",
            "size": [0, 10, 0] * len(wrong),
            "standoff": [0, 6, 0] * len(wrong),
        }
        data.append(
            line
            | _lines(wrong, places)
            | {
                "mode": "lines+markers",
                "name": f"state read from another node ({CONTROL})",
                "line": {"color": "#d55e00", "width": 1, "dash": "dot"},
                "marker": arrows | {"color": "#d55e00"},
                "opacity": 0.7,
            }
        )
    modes = [mode for mode in (CONTROL, "tree_forked", "linear") if mode in case["modes"]]
    looks = {mode: _look(nodes, mode) for mode in modes}
    failed = next(
        (mode for mode in reversed(modes) if mode != CONTROL and case["modes"][mode]["verdict"] == "fail"), None
    )
    first = failed or modes[0]
    data.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "nodes",
            "x": [x for x, _ in places],
            "y": [y for _, y in places],
            "text": [str(node["node"]) for node in nodes],
            "textposition": "middle right",
            "textfont": {"size": 10},
            "hovertext": [_hover(record, case, node) for node in nodes],
            "hoverinfo": "text",
            "marker": {"size": 13, "line": {"color": "#333", "width": 1}} | looks[first],
        }
    )
    last = len(data) - 1
    buttons = [
        {
            "label": label,
            "method": "restyle",
            "args": [{f"marker.{key}": [value] for key, value in look.items()}, [last]],
        }
        for mode in modes
        for label, look in ((f"verdict of {mode}", looks[mode]), (f"|Δ| of {mode}", _sizes(nodes, mode)))
        if look is not None
    ]
    active = next(place for place, button in enumerate(buttons) if button["label"] == f"verdict of {first}")
    depth = max(node["depth"] for node in nodes)
    menu = {"buttons": buttons, "active": active, "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"}
    layout = QUIET | {
        "height": 190 + ROW * depth,
        "margin": {"l": 50, "r": 20, "t": 60, "b": 20},
        "xaxis": {"visible": False},
        "yaxis": {
            "autorange": "reversed",
            "dtick": 1,
            "title": {"text": "depth"},
            "zeroline": False,
            "gridcolor": "#eee",
        },
        "updatemenus": [menu],
        "legend": {"orientation": "h", "y": -0.02, "yanchor": "top"},
        "hoverlabel": {"align": "left", "font": {"family": "monospace", "size": 12}},
    }
    return {"data": data, "layout": layout}


def _look(nodes: Sequence[dict], mode: str) -> dict:
    verdicts = [node[mode]["verdict"] or "not judged" for node in nodes]
    return {
        "color": [COLOURS[verdict] for verdict in verdicts],
        "symbol": [SHAPES[verdict] for verdict in verdicts],
        "showscale": False,
    }


def _sizes(nodes: Sequence[dict], mode: str) -> dict | None:
    """Colours by the power of ten of |Δ|; None if there is nothing to tell apart. Not finite: the top of the scale."""
    found = [node[mode]["max_abs"] for node in nodes if node[mode]["max_abs"]]
    if not found:
        return None
    low, high = math.log10(min(found)), math.log10(max(found))
    sizes = [
        high
        if node[mode]["max_abs"] is None
        else low
        if node[mode]["max_abs"] == 0
        else math.log10(node[mode]["max_abs"])
        for node in nodes
    ]
    scale = {"title": {"text": "log10 |Δ|"}, "thickness": 12}
    return {"color": sizes, "symbol": "circle", "colorscale": "Viridis", "showscale": True, "colorbar": scale}


def _hover(record: dict, case: dict, node: dict) -> str:
    """All figures of a node, a line each."""
    tokens = record.get("tokens", {})
    state = "clean" if node["clean"] else "contaminated"
    lines = [
        f"node {node['node']} {token_text(node['token'], tokens)}, parent {node['parent']}, depth {node['depth']}",
        f"{CONTROL} reads node {node['read_from']}: {counted(node['leaked'], 'foreign token')}, {state}",
        ", ".join(phrases(HOVER, figures.FACTS, node, Place(record, case, node))),
    ]
    for mode, found in case["modes"].items():
        run = node[mode]["argmax"] is not None
        shown = phrases(HOVER, figures.FIGURES, node[mode], Place(record, case, node, mode)) if run else ()
        lines.append(f"{mode}: {', '.join(shown) or found['verdict']}")
    return "<br>".join(map(_text, lines))


# Over all cases


def _leak_figure(record: dict, key: str, title: str) -> dict | None:
    """Contaminated nodes of the control by `key`: how many moved, and how far at the median."""
    groups: dict[int, list[dict]] = {}
    for case in record["cases"]:
        for node in case["nodes"]:
            if not node["clean"] and node[CONTROL]["argmax"] is not None:
                groups.setdefault(node[key], []).append(node[CONTROL])
    if not groups:
        return None
    xs = sorted(groups)
    counts = {
        name: [sum(value["verdict"] == name for value in groups[x]) for x in xs]
        for name in ("flip", "leak", "tie", "pass")
    }
    data = [
        {"type": "bar", "x": xs, "y": ys, "name": name, "marker": {"color": COLOURS[name]}}
        for name, ys in counts.items()
    ]
    finite = [[value["max_abs"] for value in groups[x] if value["max_abs"]] for x in xs]
    medians = [json_number(statistics.median(values)) if values else None for values in finite]
    data.append(
        {"type": "scatter", "mode": "lines+markers", "x": xs, "y": medians, "name": "median |Δ|", "yaxis": "y2",
         "line": {"color": "#000"}}
    )  # fmt: skip
    layout = QUIET | {
        "barmode": "stack",
        "height": 320,
        "margin": QUIET["margin"] | {"r": 60},
        "xaxis": {"title": {"text": title}},
        "yaxis": {"title": {"text": f"nodes of {CONTROL}"}},
        "yaxis2": {
            "title": {"text": "median |Δ|"},
            "overlaying": "y",
            "side": "right",
            "type": "log",
            "showgrid": False,
            "tickformat": ".2~g",
        },
        "legend": {"orientation": "h", "y": 1.15},
    }
    return {"data": data, "layout": layout}


def _layer_figure(record: dict) -> dict | None:
    """The layer at which the nodes of each mode go off first; None where nobody looked for it, or found nothing."""
    counts: dict[str, dict[int, int]] = {}
    for case in record["cases"]:
        for mode, found in (case.get("attribution") or {}).items():
            for layer in (found.get("first") or {}).values():
                if layer is not None:
                    layers = counts.setdefault(mode, {})
                    layers[layer] = layers.get(layer, 0) + 1
    if not counts:
        return None
    data = [
        {"type": "bar", "name": _text(mode), "x": sorted(layers), "y": [layers[layer] for layer in sorted(layers)]}
        for mode, layers in counts.items()
    ]
    last = max(layer for layers in counts.values() for layer in layers)
    layout = QUIET | {
        "barmode": "group",
        "height": 300,
        "showlegend": True,
        "xaxis": {"title": {"text": "layer"}, "dtick": 1, "range": [-0.7, last + 0.7]},
        "yaxis": {"title": {"text": "nodes that go off there first"}},
        "legend": {"orientation": "h", "y": 1.15},
    }
    return {"data": data, "layout": layout}


def _profile_figure(record: dict) -> dict | None:
    """How far each layer's output is off, by case and mode; None where nobody looked."""
    data = []
    for case in record["cases"]:
        for mode, found in (case.get("attribution") or {}).items():
            if profile := found.get("profile"):
                data.append(
                    {
                        "type": "scatter",
                        "mode": "lines+markers",
                        "name": f"{_text(mode)} in {_text(case['id'])}",
                        "x": list(range(-1, len(profile) - 1)),
                        "y": profile,
                    }
                )
    layout = QUIET | {
        "height": 320,
        "showlegend": True,
        "xaxis": {"title": {"text": "layer (-1: the input of the first)"}, "dtick": 1},
        "yaxis": {"title": {"text": "largest error / rms of a row, median"}, "type": "log", "tickformat": ".2~g"},
        "legend": {"orientation": "h", "y": 1.15},
    }
    return {"data": data, "layout": layout} if data else None


def _stored_figure(record: dict) -> dict | None:
    """How far stored states are off, layer by layer; None without forced accepts that went wrong."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for case in record["cases"]:
        for accept in case.get("commit") or ():
            for mode, result in accept["modes"].items():
                for part in result.get("bad") or ():
                    if part["layer"] < 0 or part.get("error") is None:
                        continue
                    errors = found.setdefault((mode, part["channel"]), {})
                    errors[part["layer"]] = max(errors.get(part["layer"], 0.0), part["error"])
    if not found:
        return None
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{mode} {_text(channel)}",
            "x": sorted(errors),
            "y": [errors[layer] for layer in sorted(errors)],
        }
        for (mode, channel), errors in sorted(found.items())
    ]
    layout = QUIET | {
        "height": 320,
        "xaxis": {"title": {"text": "layer"}},
        "yaxis": {"title": {"text": "largest error of a stored state"}, "type": "log", "tickformat": ".2~g"},
        "legend": {"orientation": "h", "y": 1.15},
    }
    return {"data": data, "layout": layout}


def _acceptance_figure(record: dict) -> dict | None:
    """Accepted tokens of each mode, a round a case."""
    names = [_text(case["id"]) for case in record["cases"]]
    data = []
    for mode in PATHS:
        walks = [case["acceptance"].get(mode) for case in record["cases"]]
        if any(walks):
            ys = [walk["accepted"] if walk else None for walk in walks]
            mean = statistics.fmean(y for y in ys if y is not None)
            name = f"{mode} (mean {mean:.2f})"
            data.append({"type": "bar", "x": names, "y": ys, "name": name, "marker": {"color": PATHS[mode][0]}})
    if not data:
        return None
    layout = QUIET | {
        "barmode": "group",
        "height": 340,
        "margin": QUIET["margin"] | {"b": 110},
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": "accepted, without root and bonus"}},
        "legend": {"orientation": "h", "y": 1.15},
    }
    return {"data": data, "layout": layout}


def _rounds_figure(record: dict) -> dict | None:
    """Accepted tokens of each mode by round, the mean over prompts, beside what ar accepts of the same trees."""
    if not record.get("rounds"):
        return None
    data = []
    for mode in record["rounds"]["summary"]:
        texts = [prompt["modes"][mode]["rounds"] for prompt in record["rounds"]["prompts"] if mode in prompt["modes"]]
        longest = max((len(rounds) for rounds in texts), default=0)
        for key, dash in (("accepted", "solid"), ("ar_accepted", "dot")):
            ys = []
            for place in range(longest):
                seen = [r[place][key] for r in texts if len(r) > place and r[place].get(key) is not None]
                ys.append(statistics.fmean(seen) if seen else None)
            name = mode if key == "accepted" else f"ar on the trees of {mode}"
            line = {"dash": dash, "color": PATHS.get(mode, ("#555", 1))[0]}
            data.append(
                {"type": "scatter", "mode": "lines", "name": name, "x": list(range(longest)), "y": ys, "line": line}
            )
    layout = QUIET | {
        "height": 340,
        "xaxis": {"title": {"text": "round"}},
        "yaxis": {"title": {"text": "accepted, mean over prompts"}},
        "legend": {"orientation": "h", "y": 1.2},
    }
    return {"data": data, "layout": layout}


# Over the nights


def _short(started: str) -> str:
    """The time of a night, without the century."""
    return started[2:19].replace("T", " ")


def _nights_figure(night: dict, past: Sequence[tuple[str, dict]]) -> dict:
    """The verdict of every cell on every night, tonight last."""
    names = [_text(cell["name"]) for cell in night["cells"]]
    tonight = {cell["name"]: (cell["verdict"], cell["seconds"], {}) for cell in night["cells"]}
    points: dict[str, list[tuple[str, str, str]]] = {}
    for started, cells in [*past, (night["started"], tonight)]:
        for cell in night["cells"]:
            if cell["name"] in cells:
                verdict, seconds, _ = cells[cell["name"]]
                state = WORDS.get(verdict, "unsure")
                hover = f"{_text(cell['name'])}<br>{_short(started)}: {_text(verdict)}, {seconds:.1f} s"
                points.setdefault(state, []).append((_short(started), _text(cell["name"]), hover))
    looks = {"good": (COLOURS["pass"], "circle"), "bad": (COLOURS["flip"], "x"), "unsure": (COLOURS["leak"], "square")}
    titles = {"good": "pass", "bad": "fail, drift or error", "unsure": "inconclusive or not run"}
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": titles[state],
            "x": [x for x, _, _ in found],
            "y": [y for _, y, _ in found],
            "hovertext": [text for _, _, text in found],
            "hoverinfo": "text",
            "marker": {"size": 14, "color": looks[state][0], "symbol": looks[state][1]},
        }
        for state, found in points.items()
    ]
    layout = QUIET | {
        "height": 150 + 26 * len(names),
        "margin": QUIET["margin"] | {"l": 20, "t": 40},
        "xaxis": {"type": "category", "categoryorder": "category ascending", "tickangle": -30},
        "yaxis": {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True},
        "legend": {"orientation": "h", "y": 1.2},
    }
    return {"data": data, "layout": layout}


def _metrics_figure(cell: dict, started: str, past: Sequence[tuple[str, dict]]) -> dict:
    """One metric of a cell over the nights, picked from a list."""
    out = [drift["metric"] for drift in cell["drifts"] if not drift.get("gone")]
    names = sorted(cell["metrics"], key=lambda name: (name not in out, name != "tree_forked.max_abs", name))
    data = []
    for place, name in enumerate(names):
        seen = [(when, cells[cell["name"]][2].get(name)) for when, cells in past if cell["name"] in cells]
        seen.append((started, cell["metrics"][name]["value"]))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": [_short(when) for when, _ in seen],
                "y": [value for _, value in seen],
                "visible": place == 0,
            }
        )
    buttons = [
        {"label": name, "method": "update", "args": [{"visible": [other == name for other in names]}]} for name in names
    ]
    layout = QUIET | {
        "height": 300,
        "margin": QUIET["margin"] | {"t": 60, "b": 80},
        "xaxis": {"type": "category", "tickangle": -30},
        "showlegend": False,
        "updatemenus": [{"buttons": buttons, "x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"}],
    }
    return {"data": data, "layout": layout}


assert set(BEYOND) < set(COLOURS)
