"""A night as JUnit XML: a suite a cell; a test a case, one for the cell's verdict and one for the baseline.

What was not run or not concluded is an error, never a skip: a skip reads as green.
"""

from __future__ import annotations

from xml.etree import ElementTree

from .nightly import drift_text, where_texts
from .text import GREEN, plain

BROKEN = ("fail", "drift")


def render(night: dict) -> str:
    """Return the XML. `night` is what gate.json holds."""
    root = ElementTree.Element("testsuites", name=plain(night["gate"]))
    total = dict.fromkeys(("tests", "failures", "errors"), 0)
    for cell in night["cells"]:
        suite = ElementTree.SubElement(root, "testsuite", name=plain(cell["name"]), timestamp=night["started"][:19])
        properties = ElementTree.SubElement(suite, "properties")
        facts = {
            "command": cell["command"],
            "ran_tonight": str(cell["ran"]).lower(),
            "exact": cell["exact"] or "not run",
        } | night["environment"]
        for name, value in (facts | night["environment"]).items():
            ElementTree.SubElement(properties, "property", name=plain(name), value=plain(value))
        for case in cell["cases"]:
            bad = {mode: found for mode, found in case["modes"].items() if found["verdict"] not in GREEN}
            words = [f"{mode}: {found['verdict']}: {found['reason']}" for mode, found in bad.items()]
            words = "; ".join([*words, *case["where"]])
            failed = any(found["verdict"] == "fail" for found in bad.values())
            _test(suite, cell, case["id"], 0.0, ("failure" if failed else "error") if bad else None, words)
        kind = None if cell["verdict"] == "pass" else "failure" if cell["verdict"] == "fail" else "error"
        said = cell["verdict"] + (f": {cell['reason']}" if cell["reason"] else "")
        said = "; ".join([said, *where_texts(cell)])
        _test(suite, cell, "verdict", cell["seconds"], None if cell["verdict"] == "drift" else kind, said)
        if cell["in_baseline"]:
            words = "; ".join(drift_text(drift) for drift in cell["drifts"])
            _test(suite, cell, "baseline", 0.0, "failure" if cell["drifts"] else None, words)
        counts = {"tests": len(suite.findall("testcase"))}
        counts |= {f"{kind}s": len(suite.findall(f"testcase/{kind}")) for kind in ("failure", "error")}
        for name, count in counts.items():
            suite.set(name, str(count))
            total[name] += count
        suite.set("skipped", "0")
        suite.set("time", f"{cell['seconds']:.3f}")
    for name, count in total.items():
        root.set(name, str(count))
    root.set("time", f"{sum(cell['seconds'] for cell in night['cells']):.3f}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False).join((_HEAD, "\n"))


_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'


def _test(suite: ElementTree.Element, cell: dict, name: str, seconds: float, kind: str | None, words: str) -> None:
    """Add a test to a suite; kind: failure, error, or None for one that passed."""
    place = {"classname": plain(cell["name"]), "name": plain(name), "time": f"{seconds:.3f}"}
    test = ElementTree.SubElement(suite, "testcase", place)
    if kind:
        found = ElementTree.SubElement(test, kind, message=plain(words), type=plain(cell["verdict"]))
        found.text = plain(f"{words}; again: {cell['command']}")
