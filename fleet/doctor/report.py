"""The report: for people a short list by severity, for programs JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence

from fleet.doctor.findings import Severity
from fleet.doctor.registry import Told

_LABEL = 6
_TITLES = {Severity.ERROR: "Errors", Severity.WARNING: "Warnings"}


def text_lines(found: Sequence[Told], looked_at: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` characters where words allow; worst first."""
    for severity in Severity:
        group = [one for one in found if one.finding.severity is severity]
        if group:
            yield f"{_TITLES[severity]} ({len(group)})"
            for one in group:
                yield from _entry(one, width)
            yield ""
    where = ", ".join(looked_at) or "nothing"
    if not found:
        yield f"nothing wrong ({where})"
        return
    errors = sum(one.finding.severity is Severity.ERROR for one in found)
    yield f"{_counted(errors, 'error')}, {_counted(len(found) - errors, 'warning')} ({where})"


def _entry(one: Told, width: int) -> Iterator[str]:
    yield f"  {one.check}"
    finding = one.finding
    for label, text in (("seen", finding.seen), ("why", finding.why), ("fix", finding.fix)):
        head = f"    {label:<{_LABEL}}"
        # Not broken inside words or at hyphens: what is to be pasted stays whole.
        yield from textwrap.wrap(
            _printable(text),
            max(width, 40),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )


def as_json(found: Sequence[Told], looked_at: Sequence[str]) -> str:
    """One document."""
    document = {
        "looked_at": list(looked_at),
        "findings": [
            {
                "check": one.check,
                "severity": one.finding.severity.value,
                "seen": one.finding.seen,
                "why": one.finding.why,
                "fix": one.finding.fix,
            }
            for one in found
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _printable(text: str) -> str:
    """What others wrote may hold codes that a terminal obeys."""
    return "".join(one if one.isprintable() else " " for one in text)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
