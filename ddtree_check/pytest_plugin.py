"""pytest -m leakage: a test for each case and required mode, and one for the run, in anybody's project.

The items are made without a model: prompts and budgets give their ids. The check runs once, when the first item does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from _pytest.mark.expression import Expression

from .base.errors import Unsupported, UsageError
from .base.options import offered
from .flows.job import RUN, Job, case_ids, job_of, run
from .flows.settings import Settings
from .report.columns import mode_verdict
from .report.layout import layout
from .report.record import BITS
from .report.terminal import case_where, node_table, remarks, verdict_line, worst_nodes
from .report.text import GREEN, plain
from .report.views import render

OPTIONS = offered("compare", RUN)
PLAN = pytest.StashKey[tuple[Job, dict[str, list[str]]]]()  # set if the run asks for leakage tests


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddtree-check", "tree verification on hybrid models (only with -m leakage)")
    for each in OPTIONS:
        kind = {"action": "append"} if each.repeat else {"type": each.kind.scalar}
        how = {"action": "store_true"} if each.kind.scalar is bool else kind | {"metavar": each.metavar}
        flag = each.flag().replace("--", "--ddtree-", 1)
        group.addoption(flag, dest=f"ddtree_{each.name}", default=None, help=each.help_text, **how)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "leakage: compares a tree verify with plain decoding; -m leakage adds the tests of ddtree-check"
    )
    if not selects_leakage(config.getoption("markexpr")):
        return
    try:
        job = job_of("compare", {each.name: config.getoption(f"ddtree_{each.name}") for each in OPTIONS})
        config.stash[PLAN] = job, case_ids(job)
    except UsageError as error:  # here and not with the items: a worker of pytest-xdist could only crash
        raise pytest.UsageError(f"ddtree-check: {error}") from None


@pytest.hookimpl(tryfirst=True)  # before -m and -k pick among the items
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if PLAN in config.stash:
        items += session.genitems(LeakageSuite.from_parent(session, name="leakage", nodeid="leakage"))


def selects_leakage(expression: str) -> bool:
    """Return whether a -m expression picks tests because they are marked leakage; 'not slow' has another reason."""
    try:
        compiled = Expression.compile(expression)
    except Exception:  # of a class that depends on the version; pytest refuses the expression itself, in better words
        return False
    return compiled.evaluate(lambda name, /, **_: name == "leakage") and not compiled.evaluate(lambda *_, **__: False)


class LeakageSuite(pytest.Collector):
    """The items, and the record that they share: the check runs once in a process."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_marker(pytest.mark.leakage)
        self.job, self.cases = self.config.stash[PLAN]
        self._outcome: dict | Exception | None = None

    def collect(self) -> list[LeakageItem]:
        found = [
            CaseItem.from_parent(self, name=plain(f"{case}::{mode}"), prompt=prompt, case=case, mode=mode)
            for prompt, cases in self.cases.items()
            for case in cases
            for mode in self.job.settings.get("require", Settings.require)
        ]
        return [*found, RunItem.from_parent(self, name="verdict")]

    def record(self) -> dict:
        """Return the record of the run that holds the selected items. Raises what the run raised, every time."""
        if self._outcome is None:
            try:
                self._outcome = run(self._selected())
            except (UsageError, Unsupported) as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _selected(self) -> Job:
        """Return all prompts for the verdict, otherwise those whose items -k has left."""
        items = [item for item in self.session.items if isinstance(item, LeakageItem) and item.parent is self]
        if any(isinstance(item, RunItem) for item in items):
            return self.job
        return self.repeat(*dict.fromkeys(item.prompt for item in items))

    def repeat(self, *prompts: str) -> Job:
        """Return the job for some of its prompts. They do not depend on each other, so the figures are the same."""
        return dataclasses.replace(self.job, only=() if len(prompts) == len(self.cases) else prompts)


class LeakageItem(pytest.Item):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.extra_keyword_matches.add(self.nodeid)

    def runtest(self) -> None:
        try:
            record = self.parent.record()
        except UsageError as error:
            # Every other item would say the same.
            self.session.shouldfail = "ddtree-check cannot run"
            raise pytest.UsageError(f"ddtree-check: {error}") from None
        problem = "\n".join(self.problems(record))
        if problem:
            raise Leaked(problem)

    def repr_failure(self, excinfo, style=None):
        if excinfo.errisinstance((Leaked, pytest.UsageError, Unsupported)):
            return str(excinfo.value) or excinfo.typename
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, self.nodeid

    def problems(self, record: dict) -> Iterator[str]:
        """Yield why the item fails, in lines; none if it passes."""
        raise NotImplementedError


class CaseItem(LeakageItem):
    """One case under one mode."""

    def __init__(self, prompt: str, case: str, mode: str, **kwargs):
        super().__init__(**kwargs)
        self.prompt, self.case, self.mode = prompt, case, mode

    def problems(self, record: dict) -> Iterator[str]:
        case = next(case for case in record["cases"] if case["id"] == self.case)
        if self.mode not in case["modes"]:  # an engine without plain decoding has exact checks alone
            reason = plain(record["reason"])
            yield f"{plain(self.case)}: {self.mode}: not judged: {reason}; --ddtree-require=tree_forked leaves it out"
            return
        result = case["modes"][self.mode]
        if result["verdict"] in GREEN:
            return
        yield f"{plain(self.case)}: {self.mode}: {mode_verdict(record, case, self.mode)}: {result['reason']}"
        yield from case_where(case, self.mode)
        worst = worst_nodes(case, self.mode)[:5]
        if worst:
            yield layout(node_table("", worst, record))
        yield f"again: {self.parent.repeat(self.prompt).command()}"


class RunItem(LeakageItem):
    """The whole run: whether it could have seen a leak at all, and what it came to."""

    def problems(self, record: dict) -> Iterator[str]:
        if record["exit_code"] and record["schema"] == BITS:
            yield render(record)
        elif record["exit_code"]:
            yield verdict_line(record)
            yield remarks(record)


class Leaked(AssertionError):
    """A failure whose text says it all."""
