"""Pytest plugin: with RLMQ_REQUIRE_ALL=1 a skip that tests/README.md does not list is a failure.

A test that skips itself where something is missing is right on a user's machine and a hole in CI. The list is the
section "Skips that are allowed" of tests/README.md: lines "* `PATTERN`: reason", the pattern matched (fnmatch)
against the test's id, `tests/gpu/test_x.py::test_y[case]`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

VARIABLE = "RLMQ_REQUIRE_ALL"
COVERAGE = Path(__file__).resolve().parent.parent / "docs" / "coverage.md"
LIST = Path(__file__).with_name("README.md")
SECTION = "## Skips that are allowed"


def allowed_patterns(text: str) -> tuple[str, ...]:
    """The patterns that the README's text lists."""
    _, _, section = text.partition(SECTION)
    section, _, _ = section.partition("\n## ")
    return tuple(re.findall(r"^\* `([^`]+)`: ", section, flags=re.MULTILINE))


def required() -> bool:
    """Whether unlisted skips are failures in this process."""
    return os.environ.get(VARIABLE, "") == "1"


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn an unlisted skip into a failure. An expected failure (xfail) is no skip."""
    if not required() or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    if any(fnmatchcase(report.nodeid, pattern) for pattern in allowed_patterns(LIST.read_text("utf-8"))):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid} skipped itself: {reason}. {VARIABLE}=1 wants every test to run. Provide what is missing, "
        f'or list the test with its reason in tests/README.md, section "{SECTION.removeprefix("## ")}".'
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge each phase of each test."""
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge whole modules that skip themselves when imported."""
    report = yield
    judge(report)
    return report


_passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests passed, without their parameters."""
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid.partition("[")[0])


def uncovered(passed: set[str], page: str) -> list[str]:
    """Tests that the coverage page names and that did not pass."""
    return [
        name for name in re.findall(r"`(tests/[^`]+::[^`]+)` \|$", page, flags=re.MULTILINE) if name not in passed
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A whole run must have shown every line of docs/coverage.md."""
    whole = session.config.args == session.config.getini("testpaths") and not session.config.option.keyword
    part = hasattr(session.config, "workerinput")  # pytest-xdist: only the process that collects all reports judges
    if not required() or not whole or part or exitstatus != pytest.ExitCode.OK:
        return
    missing = uncovered(_passed, COVERAGE.read_text("utf-8"))
    if missing:
        print(f"\ndocs/coverage.md names tests that did not run: {', '.join(missing)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
