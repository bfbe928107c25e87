"""The findings of a run: a table to read, a file for programs."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from conformance.case import PROVISIONS, Provision, Strength
from conformance.pickers.picker import Implementation

SUITE_VERSION = "1.0.0"
API_VERSION = "conformance.pointsman.dev/v1"
_WIDTH = 100


class Outcome(StrEnum):
    """The outcome of a case. `WARNED`: a SHOULD is broken."""

    PASSED = "passed"
    FAILED = "failed"
    WARNED = "warned"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """One case: `reason` says why it failed or was skipped."""

    case: str
    strength: Strength
    text: str
    source: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `date` is UTC, ISO 8601."""

    suite: str
    spec_version: str
    implementation: Implementation
    date: str
    provisions: frozenset[Provision]
    results: Sequence[Result]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if at least one case was checked and no MUST is broken."""
        counts = self.counts()
        return not counts[Outcome.FAILED] and counts[Outcome.PASSED] > 0

    def counts(self) -> Counter[Outcome]:
        """The number of cases by outcome."""
        return Counter(result.outcome for result in self.results)

    def document(self) -> dict[str, Any]:
        """The report in the format of its file; see conformance/reports/README.md."""
        counts = self.counts()
        return {
            "apiVersion": API_VERSION,
            "kind": "EndpointPickerConformanceReport",
            "suite": {"name": self.suite, "version": SUITE_VERSION},
            "specVersion": self.spec_version,
            "implementation": asdict(self.implementation),
            "date": self.date,
            "environment": dict(self.environment),
            "provisions": {
                provision.value: {"given": provision in self.provisions, "meaning": meaning}
                for provision, meaning in PROVISIONS.items()
            },
            "summary": {
                "result": "passed" if self.passed else "failed",
                **{outcome.value: counts[outcome] for outcome in Outcome},
            },
            "cases": [_entry(result) for result in self.results],
        }

    def write(self, path: Path) -> None:
        """Write the file: JSON by the name's ending, else YAML. Raises OSError."""
        document = self.document()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        else:
            text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=_WIDTH)
        path.write_text(text, encoding="utf-8")


def _entry(result: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "case": result.case,
        "strength": result.strength.value,
        "text": result.text,
        "source": result.source,
        "result": result.outcome.value,
        "seconds": round(result.seconds, 3),
    }
    return {**entry, "reason": result.reason} if result.reason else entry


def row(result: Result, width: int = 36) -> str:
    """One line of the table."""
    name = f"{result.case:<{width}}"
    line = f"{result.outcome.value:<8} {result.strength.value:<6} {name} {result.seconds:6.2f} s"
    return f"{line}  {' '.join(result.reason.split())}" if result.reason else line


def last_line(report: Report) -> str:
    """Summarize the number of cases by outcome."""
    counts = report.counts()
    summary = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    verdict = "conformant" if report.passed else "NOT conformant"
    return f"{report.suite} {SUITE_VERSION}: {verdict}: {summary}"


def broken(results: Iterable[Result]) -> list[str]:
    """The names of cases that failed or were warned of."""
    bad = (Outcome.FAILED, Outcome.WARNED)
    return [result.case for result in results if result.outcome in bad]
