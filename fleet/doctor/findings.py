"""What the doctor says: one thing that is wrong, why it matters, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from fleet.doctor.facts import Facts


class Severity(Enum):
    """An error loses requests or sends them astray, now or on a bad day that is sure to come; a
    warning costs something, or may be meant.
    """

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """`seen` names what was looked at and its value; `fix` is a command, or YAML to paste."""

    severity: Severity
    seen: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked after. `judge` does no I/O; what was not gathered it passes over."""

    name: str
    about: str
    judge: Callable[[Facts], Iterable[Finding]]


def error(seen: str, why: str, fix: str) -> Finding:
    """See `Severity`."""
    return Finding(Severity.ERROR, seen, why, fix)


def warning(seen: str, why: str, fix: str) -> Finding:
    """See `Severity`."""
    return Finding(Severity.WARNING, seen, why, fix)
