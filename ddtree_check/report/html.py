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
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..base.conclusion import DEFECT, PASS, USAGE
from ..base.files import json_number
from ..judge import figures
from ..judge.figures import HOVER
from .columns import CONTROL, Place, mode_verdict, phrases
from .drawing import children_of
from .nightly import whys
from .record import BITS
from .terminal import where_lines
from .text import plain, token_text
from .views import blocks

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
NIGHTS = {  # class of a verdict -> its name, colour and shape
    "good": ("pass", COLOURS["pass"], "circle"),
    "bad": ("fail, drift or error", COLOURS["flip"], "x"),
    "unsure": ("inconclusive or not run", COLOURS["leak"], "square"),
}
LOG = {"type": "log", "tickformat": ".2~g"}  # of an axis
MENU = {"x": 0, "y": 1.0, "xanchor": "left", "yanchor": "bottom"}
ROW = 44  # pixels a level of a tree


def render(record: dict) -> str:
    """Return the page of one record."""
    page = _Page()
    run, state = page.run(record, "record"), STATES.get(record["exit_code"], "unsure")
    notes = [*record["verdict"]["reasons"], *where_lines(record)]
    return page.render(title=run["line"], state=state, notes=notes, runs=[run], cells=[])


def render_gate(night: dict, records: Sequence[dict | None], past: Sequence) -> str:
    """Return the page of a night of the gate.

    night: what gate.json holds; records: of each cell, None if there is none; past: the earlier `gate.history.Night`s,
    the oldest first.
    """
    page = _Page()
    cells, runs = [], []
    for place, (cell, record) in enumerate(zip(night["cells"], records, strict=True)):
        if record is not None:
            figure = _metrics_figure(cell, night["started"], past)
            more = {"history": figure and page.add(f"history-{place}", figure), "open": False}
            runs.append(page.run(record, f"cell-{place}", cell["name"]) | more)
        more = {"state": WORDS.get(cell["verdict"], "unsure"), "why": whys(cell)}
        cells.append(cell | more | {"anchor": runs[-1]["id"] if record is not None else None})
    history = page.add("nights", _nights_figure(night, past)) if past else None
    state = STATES.get(night["exit_code"], "unsure")
    return page.render(title=night["line"], state=state, notes=night["notes"], runs=runs, cells=cells, history=history)


class _Page:
    """Collects the figures of a page and fills its template."""

    def __init__(self):
        self.figures: dict[str, dict] = {}

    def add(self, name: str, figure: dict) -> str:
        self.figures[name] = figure
        return name

    def run(self, record: dict, name: str, title: str | None = None) -> dict:
        """Return what the template needs of one record."""
        head, *parts, line = blocks(record)
        values = {"id": name, "title": title, "line": line, "state": STATES.get(record["exit_code"], "unsure")}
        values |= {"head": head, "parts": parts, "history": None, "open": True}
        if record["schema"] == BITS:
            return values | {"figures": [], "cases": []}
        figures = {
            "depth": ("Leak by depth", _leak_figure(record, "depth", "depth of the node")),
            "leaked": ("Leak by foreign tokens absorbed", _leak_figure(record, "leaked", "foreign tokens absorbed")),
            "layers": ("The layer at which a node goes off", _layer_figure(record)),
            "profile": ("How far off each layer is", _profile_figure(record)),
            "stored": ("Stored states, layer by layer", _stored_figure(record)),
            "accepted": ("Accepted by mode, case by case", _acceptance_figure(record)),
            "rounds": ("Accepted by mode, round by round", _rounds_figure(record)),
        }
        cases = []
        for place, case in enumerate(record["cases"]):
            modes = [(mode, mode_verdict(record, case, mode), _state(record, case, mode)) for mode in case["modes"]]
            figure = self.add(f"{name}-case-{place}", _tree_figure(record, case))
            reasons = [f"{mode}: {result['reason']}" for mode, result in case["modes"].items() if result["reason"]]
            cases.append({"id": case["id"], "modes": modes, "figure": figure, "reasons": reasons})
        drawn = [(title, self.add(f"{name}-{key}", part)) for key, (title, part) in figures.items() if part]
        return values | {"figures": drawn, "cases": cases}

    def render(self, **values) -> str:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        loader = FileSystemLoader(Path(__file__).parent)
        environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        environment.filters["plain"] = plain
        figures = _packed(json.dumps(self.figures, allow_nan=False))
        heights = {name: figure["layout"]["height"] for name, figure in self.figures.items()}
        values = {
            "history": None,
            "figures": figures,
            "heights": heights,
            "code": _plotly(),
            "colours": COLOURS,
        } | values
        return environment.get_template("page.html").render(values).encode("utf-8", "backslashreplace").decode()


def _packed(text: str) -> str:
    """Return text that the page unpacks: base64 of gzip. Nothing in it can end a script element."""
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
    """Return text for the inside of a figure: plotly obeys some tags there."""
    return escape(plain(value), quote=False)


def _trace(name: str, x: Sequence, y: Sequence, mode: str = "lines+markers", **more) -> dict:
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **more}


def _bars(name: str, x: Sequence, y: Sequence, colour: str | None = None) -> dict:
    return {"type": "bar", "name": name, "x": list(x), "y": list(y)} | ({"marker": {"color": colour}} if colour else {})


def _axis(title: str, **more) -> dict:
    return {"title": {"text": title}, **more}


def _figure(data: list[dict], height: int, margin: dict | None = None, **layout) -> dict | None:
    """Return a figure, its legend above it unless the layout says otherwise; None without data."""
    quiet = {"template": None, "plot_bgcolor": "#fff", "hovermode": "closest", "legend": {"orientation": "h", "y": 1.2}}
    margin = {"l": 60, "r": 20, "t": 30, "b": 45} | (margin or {})
    return {"data": data, "layout": quiet | {"height": height, "margin": margin, **layout}} if data else None


# The tree


def _places(case: dict) -> list[tuple[float, int]]:
    """Return (x, depth) of each node: leaves side by side, a node over the middle of its children."""
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


def _edges(name: str, pairs: Sequence[tuple[int, int]], places: Sequence[tuple[float, int]], **more) -> dict:
    """Return separate lines between nodes as one trace."""
    x, y = ([part for pair in pairs for part in (*(places[node][axis] for node in pair), None)] for axis in (0, 1))
    return {**_trace(name, x, y, "lines", hoverinfo="skip"), **more}


def _tree_figure(record: dict, case: dict) -> dict:
    """Return the draft tree: edges, those along which the unforked control read its state, accepted paths, nodes."""
    nodes, places, tokens = case["nodes"], _places(case), record.get("tokens", {})
    pairs = [(node["parent"], node["node"]) for node in nodes[1:]]
    data = [_edges("continues", pairs, places, line={"color": "#999", "width": 1.5})]
    for mode, (colour, width) in PATHS.items():
        if walk := case["acceptance"].get(mode):
            # the root alone is a line to itself, so that the legend still says so
            pairs = list(itertools.pairwise(walk["path"])) or [(0, 0)]
            name = f"{mode} accepts {walk['accepted']}, then {_text(token_text(walk['bonus'], tokens))}"
            data.append(_edges(name, pairs, places, line={"color": colour, "width": width}, opacity=0.35))
    wrong = [(node["read_from"], node["node"]) for node in nodes if node["read_from"] not in (node["parent"], -1, None)]
    if wrong:
        n, colour = len(wrong), "#d55e00"
        arrows = {"symbol": "arrow", "angleref": "previous", "size": [0, 10, 0] * n, "standoff": [0, 6, 0] * n}
        line = {"color": colour, "width": 1, "dash": "dot"}
        more = {"mode": "lines+markers", "line": line, "marker": arrows | {"color": colour}, "opacity": 0.7}
        data.append(_edges(f"state read from another node ({CONTROL})", wrong, places, **more))
    modes = [mode for mode in (CONTROL, "tree_forked", "linear") if mode in case["modes"]]
    failed = [mode for mode in modes[::-1] if mode != CONTROL and case["modes"][mode]["verdict"] == "fail"]
    first = (failed or modes)[0]
    x, y = zip(*places, strict=True)
    more = {"textposition": "middle right", "textfont": {"size": 10}, "hoverinfo": "text"}
    more["marker"] = {"size": 13, "line": {"color": "#333", "width": 1}} | _look(nodes, first)
    hovers, names = [_hover(record, case, node) for node in nodes], [str(node["node"]) for node in nodes]
    data.append(_trace("nodes", x, y, "markers+text", text=names, hovertext=hovers, **more))
    looks = {
        f"{what} of {mode}": of(nodes, mode) for mode in modes for what, of in (("verdict", _look), ("|Δ|", _sizes))
    }
    looks = {label: look for label, look in looks.items() if look is not None}
    buttons = [
        {
            "label": label,
            "method": "restyle",
            "args": [{f"marker.{key}": [value] for key, value in look.items()}, [len(data) - 1]],
        }
        for label, look in looks.items()
    ]
    active = list(looks).index(f"verdict of {first}")
    return _figure(
        data,
        190 + ROW * max(y),
        {"l": 50, "t": 60, "b": 20},
        xaxis={"visible": False},
        yaxis=_axis("depth", autorange="reversed", dtick=1, zeroline=False, gridcolor="#eee"),
        updatemenus=[{"buttons": buttons, "active": active, **MENU}],
        legend={"orientation": "h", "y": -0.02, "yanchor": "top"},
        hoverlabel={"align": "left", "font": {"family": "monospace", "size": 12}},
    )


def _look(nodes: Sequence[dict], mode: str) -> dict:
    verdicts = [node[mode]["verdict"] or "not judged" for node in nodes]
    colours, symbols = ([table[verdict] for verdict in verdicts] for table in (COLOURS, SHAPES))
    return {"color": colours, "symbol": symbols, "showscale": False}


def _sizes(nodes: Sequence[dict], mode: str) -> dict | None:
    """Return colours by the power of ten of |Δ|, the top for what is not finite; None if there is nothing to tell."""
    sizes = [node[mode]["max_abs"] for node in nodes]
    finite = [size for size in sizes if size]
    if not finite:
        return None
    colours = [math.log10(max(finite) if size is None else size or min(finite)) for size in sizes]
    scale = {"title": {"text": "log10 |Δ|"}, "thickness": 12}
    return {"color": colours, "symbol": "circle", "colorscale": "Viridis", "showscale": True, "colorbar": scale}


def _hover(record: dict, case: dict, node: dict) -> str:
    """Return all figures of a node as `label: value`, the facts in three lines and each mode in one."""
    state = "clean" if node["clean"] else "contaminated"
    lines = [
        f"node: {node['node']}, token: {token_text(node['token'], record.get('tokens', {}))}, "
        f"parent: {node['parent']}, depth: {node['depth']}",
        f"read by {CONTROL}: {node['read_from']}, foreign tokens: {node['leaked']}, state: {state}",
        ", ".join(phrases(HOVER, figures.FACTS, node, Place(record, case, node), ": ")),
    ]
    for mode, result in case["modes"].items():
        place, run = Place(record, case, node, mode), node[mode]["argmax"] is not None
        shown = phrases(HOVER, figures.FIGURES, node[mode], place, ": ") if run else ()
        lines.append(f"{mode}: {', '.join(shown) or result['verdict']}")
    return "<br>".join(map(_text, lines))


# Over all cases


def _leak_figure(record: dict, key: str, title: str) -> dict | None:
    """Return contaminated nodes of the control by `key`: how many moved, and how far at the median."""
    groups: dict[int, list[dict]] = {}
    for case in record["cases"]:
        for node in case["nodes"]:
            if not node["clean"] and node[CONTROL]["argmax"] is not None:
                groups.setdefault(node[key], []).append(node[CONTROL])
    if not groups:
        return None
    x = sorted(groups)
    data = [
        _bars(name, x, [sum(value["verdict"] == name for value in groups[at]) for at in x], COLOURS[name])
        for name in ("flip", "leak", "tie", "pass")
    ]
    finite = [[value["max_abs"] for value in groups[at] if value["max_abs"]] for at in x]
    medians = [json_number(statistics.median(values)) if values else None for values in finite]
    data.append(_trace("median |Δ|", x, medians, yaxis="y2", line={"color": "#000"}))
    return _figure(
        data,
        320,
        {"r": 60},
        barmode="stack",
        xaxis=_axis(title),
        yaxis=_axis(f"nodes of {CONTROL}"),
        yaxis2=_axis("median |Δ|", overlaying="y", side="right", showgrid=False, **LOG),
    )


def _layer_figure(record: dict) -> dict | None:
    """Return the layer at which the nodes of each mode go off first; None where nobody looked for it, or saw none."""
    counts: dict[str, Counter] = {}
    for case in record["cases"]:
        for mode, result in (case.get("attribution") or {}).items():
            layers = [layer for layer in (result.get("first") or {}).values() if layer is not None]
            if layers:
                counts.setdefault(mode, Counter()).update(layers)
    data = [_bars(_text(mode), *zip(*sorted(layers.items()), strict=True)) for mode, layers in counts.items()]
    last = max((layer for layers in counts.values() for layer in layers), default=0)
    xaxis, yaxis = _axis("layer", dtick=1, range=[-0.7, last + 0.7]), _axis("nodes that go off there first")
    return _figure(data, 300, barmode="group", showlegend=True, xaxis=xaxis, yaxis=yaxis)


def _profile_figure(record: dict) -> dict | None:
    """Return how far each layer's output is off, by case and mode; None where nobody looked."""
    data = [
        _trace(f"{_text(mode)} in {_text(case['id'])}", range(-1, len(profile) - 1), profile)
        for case in record["cases"]
        for mode, result in (case.get("attribution") or {}).items()
        if (profile := result.get("profile"))
    ]
    xaxis = _axis("layer (-1: the input of the first)", dtick=1)
    yaxis = _axis("largest error / rms of a row, median", **LOG)
    return _figure(data, 320, showlegend=True, xaxis=xaxis, yaxis=yaxis)


def _stored_figure(record: dict) -> dict | None:
    """Return how far stored states are off, layer by layer; None without forced accepts that went wrong."""
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for case in record["cases"]:
        for accept in case.get("commit") or ():
            for mode, result in accept["modes"].items():
                for part in result.get("bad") or ():
                    layer, error = part["layer"], part.get("error")
                    if layer >= 0 and error is not None:
                        layers = errors.setdefault((mode, part["channel"]), {})
                        layers[layer] = max(layers.get(layer, 0.0), error)
    data = [
        _trace(f"{mode} {_text(channel)}", *zip(*sorted(layers.items()), strict=True))
        for (mode, channel), layers in sorted(errors.items())
    ]
    return _figure(data, 320, xaxis=_axis("layer"), yaxis=_axis("largest error of a stored state", **LOG))


def _acceptance_figure(record: dict) -> dict | None:
    """Return accepted tokens of each mode, a round a case."""
    names, data = [_text(case["id"]) for case in record["cases"]], []
    for mode, (colour, _) in PATHS.items():
        walks = [case["acceptance"].get(mode) for case in record["cases"]]
        if any(walks):
            counts = [walk["accepted"] if walk else None for walk in walks]
            mean = statistics.fmean(count for count in counts if count is not None)
            data.append(_bars(f"{mode} (mean {mean:.2f})", names, counts, colour))
    yaxis = _axis("accepted, without root and bonus")
    return _figure(data, 340, {"b": 110}, barmode="group", xaxis={"type": "category"}, yaxis=yaxis)


def _rounds_figure(record: dict) -> dict | None:
    """Return accepted tokens of each mode by round, the mean over prompts, beside what ar accepts of the same trees."""
    rounds, data = record.get("rounds") or {"summary": (), "prompts": ()}, []
    for mode in rounds["summary"]:
        texts = [prompt["modes"][mode]["rounds"] for prompt in rounds["prompts"] if mode in prompt["modes"]]
        colour = PATHS.get(mode, ("#555", 1))[0]
        for key, dash, name in (("accepted", "solid", mode), ("ar_accepted", "dot", f"ar on the trees of {mode}")):
            counts = [
                [entry[key] for entry in entries if entry is not None and entry.get(key) is not None]
                for entries in itertools.zip_longest(*texts)
            ]
            means = [statistics.fmean(each) if each else None for each in counts]
            data.append(_trace(name, range(len(means)), means, "lines", line={"dash": dash, "color": colour}))
    return _figure(data, 340, xaxis=_axis("round"), yaxis=_axis("accepted, mean over prompts"))


# Over the nights


def _short(started: str) -> str:
    """Return the time of a night, without the century."""
    return started[2:19].replace("T", " ")


def _nights_figure(night: dict, past: Sequence) -> dict:
    """Return the verdict of every cell on every night, tonight last."""
    points: dict[str, list[tuple[str, str, str]]] = {}
    for cell in night["cells"]:
        name = _text(cell["name"])
        before = [(n.started, n.cells[cell["name"]]) for n in past if cell["name"] in n.cells]
        verdicts = [(started, earlier.verdict, earlier.seconds) for started, earlier in before]
        for started, verdict, seconds in [*verdicts, (night["started"], cell["verdict"], cell["seconds"])]:
            hover = f"{name}<br>{_short(started)}: {_text(verdict)}, {seconds:.1f} s"
            points.setdefault(WORDS.get(verdict, "unsure"), []).append((_short(started), name, hover))
    data = []
    for state, entries in points.items():
        title, colour, symbol = NIGHTS[state]
        x, y, hovers = zip(*entries, strict=True)
        marker = {"size": 14, "color": colour, "symbol": symbol}
        data.append(_trace(title, x, y, "markers", hovertext=hovers, hoverinfo="text", marker=marker))
    names = [_text(cell["name"]) for cell in night["cells"]]
    xaxis = {"type": "category", "categoryorder": "category ascending", "tickangle": -30}
    yaxis = {"categoryorder": "array", "categoryarray": names[::-1], "automargin": True}
    return _figure(data, 150 + 26 * len(names), {"l": 20, "t": 40}, xaxis=xaxis, yaxis=yaxis)


def _metrics_figure(cell: dict, started: str, past: Sequence) -> dict | None:
    """Return one metric of a cell over the nights, picked from a list."""
    out = [drift["metric"] for drift in cell["drifts"] if not drift.get("gone")]
    names = sorted(cell["metrics"], key=lambda name: (name not in out, name != "tree_forked.max_abs", name))
    before = [(n.started, n.cells[cell["name"]].metrics) for n in past if cell["name"] in n.cells]
    tonight = (started, {name: metric["value"] for name, metric in cell["metrics"].items()})
    nights = [*before, tonight]
    x = [_short(when) for when, _ in nights]
    data = [_trace(name, x, [m.get(name) for _, m in nights], visible=name == names[0]) for name in names]
    buttons = [
        {"label": name, "method": "update", "args": [{"visible": [other == name for other in names]}]} for name in names
    ]
    menus, xaxis = [{"buttons": buttons, **MENU}], {"type": "category", "tickangle": -30}
    return _figure(data, 300, {"t": 60, "b": 80}, xaxis=xaxis, showlegend=False, updatemenus=menus)
