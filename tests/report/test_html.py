"""The HTML page as a text, and its figures as data. In a real browser: `make test-browser`."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as plotly
import pytest

from ddtree_check.cli import main as cli
from ddtree_check.report import html
from ddtree_check.report.record import write_record
from tests.tiny import break_forked, hand_record


def figures(page: str) -> dict[str, dict]:
    """The figures that a page carries, each held against plotly's own schema."""
    packed = re.search(r'id="figures">([^<]*)<', page).group(1)
    found = json.loads(gzip.decompress(base64.b64decode(packed)))
    for figure in found.values():
        plotly.Figure(figure)
    return found


def trace(figure: dict, name: str) -> dict:
    return next(trace for trace in figure["data"] if trace["name"].startswith(name))


def lines(trace: dict) -> set[tuple]:
    """The separate lines of a trace, as pairs of points."""
    points = list(zip(trace["x"], trace["y"], strict=True))
    return set(zip(points[::3], points[1::3], strict=True))


class Tags(HTMLParser):
    """Every tag and every address of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action") and value]


def test_the_verdict_stands_on_top():
    page = html.render(hand_record("a/3"))
    assert re.search(
        r'<body>\s*<h1 class="good">verdict: pass \(linear pass, tree_forked pass\), exit code 0</h1>', page
    )
    page = html.render(break_forked(hand_record("a/3")))
    assert re.search(r'<body>\s*<h1 class="bad">verdict: fail', page)
    assert "tree_forked: fail (1 node beyond the floor, first node 3)" in page
    unsure = hand_record("a/3") | {"exit_code": 2}
    assert '<h1 class="unsure">' in html.render(unsure)


def test_a_tree_shows_parents_what_was_read_paths_and_verdicts():
    figure = figures(html.render(hand_record("a/3")))["record-case-0"]
    nodes = trace(figure, "nodes")
    place = list(zip(nodes["x"], nodes["y"], strict=True))
    assert nodes["y"] == [0, 1, 1, 2] and nodes["text"] == ["0", "1", "2", "3"] and len(set(place)) == 4
    assert lines(trace(figure, "continues")) == {(place[0], place[1]), (place[0], place[2]), (place[1], place[3])}
    read = trace(figure, "state read from another node")
    assert lines(read) == {(place[1], place[2]), (place[2], place[3])}
    assert lines(trace(figure, "ar accepts 1")) == {(place[0], place[1])}
    assert lines(trace(figure, "tree_unforked accepts 2, then 'a|b'")) == {(place[0], place[1]), (place[1], place[3])}
    good, flip = html.COLOURS["pass"], html.COLOURS["flip"]
    assert nodes["marker"]["color"] == [good, good, flip, flip]
    buttons = {button["label"]: button["args"][0] for button in figure["layout"]["updatemenus"][0]["buttons"]}
    assert buttons["verdict of tree_forked"]["marker.color"] == [[good] * 4]
    assert buttons["|Δ| of tree_unforked"]["marker.showscale"] == [True]
    assert "verdict of linear" in buttons and len(buttons) == 6
    broken = figures(html.render(break_forked(hand_record("a/3"))))["record-case-0"]
    assert trace(broken, "nodes")["marker"]["color"] == [good, good, good, flip]  # of the required mode that failed


def test_hovering_has_every_figure_of_a_node():
    figure = figures(html.render(hand_record("a/3")))["record-case-0"]
    text = trace(figure, "nodes")["hovertext"][3].split("<br>")
    assert text[0].startswith("node: 3, token: ") and text[0].endswith(", parent: 1, depth: 2")
    assert text[1] == "read by tree_unforked: 2, foreign tokens: 1, state: contaminated"
    assert text[2] == "ar chooses: 17, margin: 1.5, in bits: -"
    assert text[5] == "tree_unforked: flip, |Δ|: 7 (floor 0.0001), KL: 0.7, chooses: 'a|b'"


def test_leak_by_depth_and_by_count():
    found = figures(html.render(hand_record("a/3", "b/3")))
    depth, leaked = found["record-depth"], found["record-leaked"]
    assert trace(depth, "flip")["x"] == [1, 2] and trace(depth, "flip")["y"] == [2, 2]
    assert trace(depth, "median")["y"] == [6.0, 7.0]
    assert trace(leaked, "flip")["x"] == [1] and trace(leaked, "flip")["y"] == [4]
    record = hand_record("a/3")
    for node in record["cases"][0]["nodes"]:
        node["clean"] = True
    assert "record-depth" not in figures(html.render(record))


def test_acceptance_by_mode_and_round():
    record = hand_record("a/3", "b/3")
    found = figures(html.render(record))
    assert trace(found["record-accepted"], "tree_unforked")["y"] == [2, 2] and "record-rounds" not in found
    rounds = [{"accepted": 2, "ar_accepted": 3}, {"accepted": 0, "ar_accepted": 1}]
    short = [{"accepted": 4, "ar_accepted": 3}]
    prompts = [
        {"id": "p", "modes": {"linear": {"rounds": rounds}}},
        {"id": "q", "modes": {"linear": {"rounds": short}}},
    ]
    figure = html._rounds_figure({"rounds": {"summary": {"linear": {}}, "prompts": prompts}})
    plotly.Figure(figure)
    assert trace(figure, "linear")["y"] == [3, 0] and trace(figure, "ar on the trees of linear")["y"] == [3, 1]


def test_layers_show_where_the_record_knows_them():
    record = hand_record("a/3")
    assert not {"record-layers", "record-profile", "record-stored"} & set(figures(html.render(record)))
    record["cases"][0]["attribution"] = {
        "tree_forked": {"first": {"2": 1, "3": 1}, "profile": [0, 1e-7, None, 0.5]},
        "linear": {"first": {}},
    }
    figure = html._layer_figure(record)
    assert (trace(figure, "tree_forked")["x"], trace(figure, "tree_forked")["y"]) == ([1], [2])
    bad = [{"layer": 2, "channel": "recurrent", "error": 0.5}, {"layer": -1, "channel": "position", "error": 1.0}]
    record["cases"][0]["commit"] = [{"modes": {"tree_forked": {"bad": bad}, "linear": {"bad": []}}}]
    stored = html._stored_figure(record)
    assert [(t["name"], t["x"], t["y"]) for t in stored["data"]] == [("tree_forked recurrent", [2], [0.5])]
    profile = html._profile_figure(record)
    assert [(t["name"], t["x"], t["y"]) for t in profile["data"]] == [
        ("tree_forked in a/3", [-1, 0, 1, 2], [0, 1e-7, None, 0.5])
    ]
    for one in (figure, stored, profile):
        plotly.Figure(one)


def test_what_was_not_run_judged_or_finite_is_shown():
    record = hand_record("a/3")
    case = record["cases"][0]
    for node in case["nodes"]:
        node["linear"] = dict.fromkeys(node["linear"])
        node["tree_forked"] |= {"verdict": None, "floor": None, "max_abs": None}
        node["tree_unforked"]["max_abs"] = 0.0
    case["modes"]["linear"] |= {"verdict": "unsupported", "reason": "no", "max_abs": None, "median_abs": None}
    case["modes"]["tree_forked"] |= {"verdict": "reference_unusable", "reason": "ar drifts", "max_abs": None}
    del case["acceptance"]["linear"]
    page = html.render(record)
    figure = figures(page)["record-case-0"]
    text = trace(figure, "nodes")["hovertext"][0]
    assert "linear: unsupported" in text and "tree_forked: not judged, |Δ|: not finite (floor -)" in text
    assert [t["name"] for t in figure["data"] if t["name"].startswith("linear")] == []
    labels = [button["label"] for button in figure["layout"]["updatemenus"][0]["buttons"]]
    assert labels == ["verdict of tree_unforked", "verdict of tree_forked", "verdict of linear"]  # no |Δ| to tell apart
    assert "reference_unusable" in page


def test_a_chain_of_one_node_can_be_drawn():
    record = hand_record("a/3")
    case = record["cases"][0]
    case["nodes"] = case["nodes"][:1]
    for walk in case["acceptance"].values():
        walk["path"] = [0]
    assert trace(figures(html.render(record))["record-case-0"], "nodes")["x"] == [0.0]


def test_a_deep_tree_is_drawn_without_recursion():
    record = hand_record("a/3")
    case = record["cases"][0]
    node = case["nodes"][1]
    case["nodes"] = [case["nodes"][0]] + [node | {"node": i, "parent": i - 1, "depth": i} for i in range(1, 3000)]
    html.render(record)


NASTY = "<script>alert(1)</script>"


def nasty(value, key=""):
    """Every text of a record that is not a name that we look up, spoilt."""
    if isinstance(value, dict):
        return {name: nasty(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [nasty(part, key) for part in value]
    looked_up = ("verdict", "schema", "require", "text", "mode")
    return f"{NASTY}\ud800\x00{value}" if isinstance(value, str) and key not in looked_up else value


def test_what_strangers_wrote_is_escaped_everywhere():
    record = nasty(break_forked(hand_record("a/3")))
    record["verdict"]["reasons"] = [NASTY]
    page = html.render(record)
    clean = Tags(html.render(hand_record("a/3"))).tags
    assert Tags(page).tags.count("script") == clean.count("script") == 3
    assert NASTY not in page and "&lt;script&gt;alert(1)" in page
    for figure in figures(page).values():
        for trace_ in figure["data"]:
            for text in [trace_["name"], *trace_.get("hovertext", [])]:
                assert "<script" not in text
    page.encode("utf-8")


def test_a_page_asks_for_nothing_from_elsewhere():
    page = html.render(hand_record("a/3"))
    assert Tags(page).addresses == [] and "default-src 'none'" in page
    assert len(page) < 2_500_000


def test_show_and_compare_write_the_page(tmp_path, capsys):
    record, page = tmp_path / "run.json", tmp_path / "run.html"
    write_record(record, hand_record("a/3"))
    assert cli.main(["show", str(record), "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == html.render(hand_record("a/3"))
    assert cli.main(["show", str(record), "--html", str(tmp_path)]) == 3
    assert "is not a regular file" in capsys.readouterr().err
    assert cli.main(["show", str(record), "--html", str(page), "--case", "a/3"]) == 3
    assert "html: shows the whole record, expected no --case" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--case", "a/3", "--node", "3"], ["--case", "a/3"], []], ids=["node", "case", "all"]
)
def test_show_has_four_formats(words, tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    data = hand_record("a/3", "b/3")
    write_record(path, data)
    said = {}
    for name in ("table", "markdown", "json", "csv"):
        assert cli.main(["show", str(path), *words, "--format", name]) == 0
        said[name] = capsys.readouterr().out
    case = copy.deepcopy(data["cases"][0])
    wanted = data if not words else case if len(words) == 2 else case["nodes"][3]
    assert json.loads(said["json"]) == wanted
    rows = said["csv"].splitlines()
    assert rows[0].startswith("case,node,token,parent,depth") and len(rows) - 1 == {0: 8, 2: 4, 4: 1}[len(words)]
    assert rows[-1].startswith("a/3,3,13,1,2,1,False,2,0,17,1.5,") == bool(words) and ",flip,23,7.0,0.0001," in rows[-1]
    assert "| tree_unforked" in said["markdown"] or "| 0 |" in said["markdown"] or "|      0 |" in said["markdown"]
    assert "\x1b" not in "".join(said.values())
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["show", str(path), *words]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < max(map(len, said["table"].splitlines()))


def test_colour_is_for_terminals_that_want_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    write_record(path, hand_record("a/3"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["show", str(path)]) == 0
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["show", str(path)]) == 0
    assert "\x1b[" not in capsys.readouterr().out


def test_figures_of_numbers_at_the_end_of_the_range_are_drawn():
    data = hand_record("a/3", "b/3")
    for node in (node for case in data["cases"] for node in case["nodes"]):
        node["tree_unforked"]["max_abs"] = 1.7e308
    assert "</html>" in html.render(data)
