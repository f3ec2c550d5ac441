"""The HTML report in a real browser: `make test-browser` (Debian: apt-get install chromium)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from ddtree_check.report import html
from tests.browser.chromium import Browser, find_chromium
from tests.tiny import break_forked, hand_record

if find_chromium() is None:  # a skip would read as green
    pytest.exit("tests/browser needs Chromium: apt-get install chromium", returncode=2)

SAMPLE = Path(__file__).parents[2] / "reports" / "sample.json"
OPENS = 3.0  # seconds for 100 cases of 65 nodes


def big_record(cases: int = 100, nodes: int = 65) -> dict:
    """The sample's first case, with as many nodes, as many times."""
    record = json.loads(SAMPLE.read_text(encoding="utf-8"))
    model = record["cases"][0]
    grown = copy.deepcopy(model["nodes"])
    while len(grown) < nodes:
        node = copy.deepcopy(model["nodes"][len(grown) % 16 + 1])
        parent = grown[len(grown) // 2]
        node |= {"node": len(grown), "parent": parent["node"], "depth": parent["depth"] + 1, "clean": False}
        node |= {"read_from": len(grown) - 1, "leaked": len(grown) - parent["depth"] - 1}
        grown.append(node)
    record["cases"] = [copy.deepcopy(model) | {"id": f"case/{place}", "nodes": grown} for place in range(cases)]
    return record


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_report_draws_its_figures_without_a_network_or_a_complaint(tmp_path):
    record = json.loads(SAMPLE.read_text(encoding="utf-8"))
    path = written(tmp_path, html.render(record))
    with Browser() as page:
        page.open(path)
        assert page.value("document.querySelectorAll('[data-drawn] .main-svg').length") > 0
        points = page.value(
            "document.querySelectorAll('details [data-figure] .scatterlayer .trace:last-child .point').length"
        )
        assert points == len(record["cases"][0]["nodes"])
        assert page.value("document.querySelector('h1').className") == "good"
        page.screenshot(tmp_path / "report.png")
        assert (tmp_path / "report.png").stat().st_size > 50_000
        assert page.complaints == []
        assert page.requests == [path.resolve().as_uri()]


def test_hovering_shows_the_figures_of_a_node(tmp_path):
    record = json.loads(SAMPLE.read_text(encoding="utf-8"))
    with Browser() as page:
        page.open(written(tmp_path, html.render(record)))
        place = page.value(
            "(() => { const at = document.querySelector('details .scatterlayer .trace:last-child .point')"
            ".getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; })()"
        )
        page("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        page.until("document.querySelector('.hoverlayer')?.textContent.includes('node: 0')")
        assert "tree_forked: pass" in page.value("document.querySelector('.hoverlayer').textContent")


def test_100_cases_of_65_nodes_open_in_time_and_draw_a_tree_when_asked(tmp_path):
    path = written(tmp_path, html.render(big_record()))
    assert path.stat().st_size < 5_000_000
    with Browser() as page:
        seconds = page.open(path)
        assert page.value("document.querySelectorAll('details').length") == 100
        assert page.value("document.querySelectorAll('details [data-drawn]').length") == 0
        page.value("(part => { part.open = true; part.scrollIntoView(); })(document.querySelectorAll('details')[41])")
        page.until("document.querySelectorAll('details [data-drawn] .main-svg').length > 0")
        points = page.value("document.querySelectorAll('details [data-drawn] .trace:last-child .point').length")
        assert points == 65
        assert page.complaints == []
    print(f"opened in {seconds:.2f} s, {path.stat().st_size / 1e6:.2f} MB")
    assert seconds <= OPENS


def test_what_strangers_wrote_is_text(tmp_path):
    record = break_forked(hand_record("<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 2'>"))
    record["tokens"] |= {"11": "<script>window.hit = 3</script>", "13": "</script><b>"}
    record["cases"][0]["modes"]["tree_forked"]["reason"] = "<svg onload='window.hit = 4'>"
    record["verdict"]["reasons"] = ["</h1><script>window.hit = 5</script>"]
    with Browser() as page:
        page.open(written(tmp_path, html.render(record)))
        page.value("document.querySelectorAll('details').forEach(part => part.open = true)")
        for place in range(2):
            page.value(f"document.querySelectorAll('details')[{place}].scrollIntoView()")
            page.until(f"document.querySelectorAll('details')[{place}].querySelector('[data-drawn] .main-svg')")
        assert page.value("window.hit") is None
        assert page.value("document.querySelectorAll('img, body b, section script').length") == 0
        assert "<script>window.hit = 1</script>" in page.value("document.body.innerText")
        assert page.complaints == []


def test_a_complaint_is_seen(tmp_path):
    """The twin of `complaints == []` and of the list of requests."""
    text = html.render(hand_record("a/3")).replace(
        '"use strict";', "console.error('no'); fetch('http://127.0.0.1:9/');", 1
    )
    with Browser() as page:
        page.open(written(tmp_path, text))
        assert any("no" in found for found in page.complaints)
        assert any("Content Security Policy" in found for found in page.complaints)
