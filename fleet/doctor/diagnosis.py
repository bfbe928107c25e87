"""The checks' common words: what they judge, what they say, and what a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from string import Template
from typing import Any, TypeVar

from fleet.doctor.cluster_look import ClusterFacts
from fleet.doctor.envoy_look import EnvoyFacts, Lane
from fleet.doctor.paths import ConfigPart, at
from fleet.doctor.picker_look import CertificateFacts, PickerFacts, WorkerFacts
from picker.config.findings import Severity

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was seen. What was not looked at is None or empty."""

    picker: PickerFacts | None = None
    envoys: tuple[EnvoyFacts, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()
    cluster: ClusterFacts | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that is wrong. `seen` names what was looked at and its value, `why` what that
    costs; `fix` is a command, or YAML to paste. `check` is the name of the check that says so.

    An error loses requests or sends them astray, now or on a bad day that is sure to come; a
    warning costs something, or may be meant.
    """

    severity: Severity
    seen: str
    why: str
    fix: str
    check: str = ""


def error(seen: str, why: str, fix: str) -> Diagnosis:
    return Diagnosis(Severity.ERROR, seen, why, fix)


def warning(seen: str, why: str, fix: str) -> Diagnosis:
    return Diagnosis(Severity.WARNING, seen, why, fix)


@dataclass(frozen=True, slots=True)
class Row:
    """A setting that may be wrong: where it stands, what is wrong there, and what to say of it.

    The texts may name `$place` and `$value`, which is what `is_wrong` returns: something true, or
    the value itself where it returns True.
    """

    path: str
    is_wrong: Callable[[Any], object]
    say: Callable[[str, str, str], Diagnosis]
    seen: str
    why: str
    fix: str

    def __call__(self, part: ConfigPart | Lane) -> Iterator[Diagnosis]:
        """One diagnosis where it is wrong, none where it is not."""
        value = at(part.document, *filter(None, self.path.split(".")))
        found = self.is_wrong(value)
        if found:
            known = {"place": part.place, "value": value if found is True else found}
            texts = (Template(one).substitute(known) for one in (self.seen, self.why, self.fix))
            yield self.say(*texts)


def each(
    subjects: Callable[[Facts], Iterable[T]], *judges: Callable[[T], Iterable[Diagnosis]]
) -> Callable[[Facts], Iterator[Diagnosis]]:
    """What all `judges` say of each of the subjects that are found in some facts."""

    def judged(facts: Facts) -> Iterator[Diagnosis]:
        for subject in subjects(facts):
            for judge in judges:
                yield from judge(subject)

    return judged


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked after. `judge` does no I/O."""

    name: str
    about: str
    judge: Callable[[Facts], Iterable[Diagnosis]]

    def diagnose(self, facts: Facts) -> Iterator[Diagnosis]:
        """What it says of the facts, under its name."""
        return (replace(one, check=self.name) for one in self.judge(facts))
