"""The report: what it says, and when a run has passed."""

import json
from pathlib import Path

import pytest
import yaml

from conformance.case import PROVISIONS, Provision, Strength
from conformance.pickers.picker import Implementation
from conformance.report import Outcome, Report, Result, broken, last_line, row

README = Path(__file__).parents[2] / "conformance" / "reports" / "README.md"


def result(name: str, outcome: Outcome, reason: str = "") -> Result:
    return Result(name, Strength.MUST, "A rule.", "a page", outcome, reason, 0.12345)


def report(*results: Result) -> Report:
    return Report(
        "conformance/epp",
        "1.0.0",
        Implementation("some-picker", "2.3"),
        "2026-01-02T03:04:05+00:00",
        frozenset({Provision.TLS}),
        results,
        {"envoy": "1.40.0"},
    )


@pytest.mark.parametrize(
    ("outcomes", "passed"),
    [
        ([Outcome.PASSED], True),
        ([Outcome.PASSED, Outcome.SKIPPED, Outcome.WARNED], True),
        ([Outcome.PASSED, Outcome.FAILED], False),
        ([Outcome.SKIPPED], False),
        ([], False),
    ],
)
def test_a_run_has_passed_if_nothing_failed_and_something_passed(
    outcomes: list[Outcome], passed: bool
) -> None:
    found = report(*(result(str(at), outcome) for at, outcome in enumerate(outcomes)))
    assert found.passed is passed
    assert ("NOT conformant" in last_line(found)) is not passed


@pytest.mark.parametrize("name", ["r.yaml", "r.json"])
def test_the_file_holds_all_that_the_readme_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "folder" / name
    report(result("a", Outcome.PASSED), result("b", Outcome.FAILED, "so")).write(path)
    text = path.read_text()
    document = json.loads(text) if name.endswith("json") else yaml.safe_load(text)
    assert document["implementation"] == {"name": "some-picker", "version": "2.3"}
    assert document["summary"] == {
        "result": "failed",
        "passed": 1,
        "failed": 1,
        "warned": 0,
        "skipped": 0,
    }
    assert document["provisions"]["tls"] == {"given": True, "meaning": PROVISIONS[Provision.TLS]}
    assert document["provisions"]["restart"]["given"] is False
    first, second = document["cases"]
    assert "reason" not in first
    assert second == {
        "case": "b",
        "strength": "MUST",
        "text": "A rule.",
        "source": "a page",
        "result": "failed",
        "seconds": 0.123,
        "reason": "so",
    }
    assert all(f"`{key}" in README.read_text() for key in document)


def test_a_row_is_one_line() -> None:
    line = row(result("a", Outcome.FAILED, "two\nlines"))
    assert "\n" not in line
    assert line.startswith("failed   MUST   a ")
    assert line.endswith("two lines")


def test_broken_cases_are_those_that_failed_or_were_warned_of() -> None:
    every = [result(outcome.value, outcome) for outcome in Outcome]
    assert broken(every) == ["failed", "warned"]


def test_every_provision_is_explained() -> None:
    assert set(PROVISIONS) == set(Provision)
