"""The facts that checks judge, their findings, and the reader of their texts.

A judge yields the key of a finding with the values that its texts name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any, NamedTuple, TypeVar

from fleet.doctor.cluster_look import ClusterFacts
from fleet.doctor.envoy_look import EnvoyFacts, Lane
from fleet.doctor.paths import ConfigPart, at
from fleet.doctor.picker_look import CertificateFacts, PickerFacts, WorkerFacts
from fleet.doctor.table import FILTER, TABLE
from picker.config.findings import Severity

T = TypeVar("T")
_FINDING = re.compile(r"  (error|warning|either) ([\w-]+): (.*)")
_TEXT = re.compile(r"    (why|fix) (.*)")
_FIELDS = {"why": 2, "fix": 3}


@dataclass(frozen=True, slots=True)
class Facts:
    """Observations; parts that were not requested are None or empty."""

    picker: PickerFacts | None = None
    envoys: tuple[EnvoyFacts, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()
    cluster: ClusterFacts | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    severity: Severity
    seen: str
    why: str
    fix: str
    check: str = ""


class JudgeFinding(NamedTuple):
    key: str
    severity: Severity | None  # None: that of the table
    values: Mapping[str, object]


Judge = Callable[[Facts], Iterable[JudgeFinding]]


def found(key: str, severity: Severity | None = None, /, **values: object) -> JudgeFinding:
    return JudgeFinding(key, severity, values)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    about: str
    texts: Mapping[str, list[str]]
    judge: Judge

    def diagnose(self, facts: Facts) -> Iterator[Diagnosis]:
        for key, severity, values in self.judge(facts):
            usual, *texts = self.texts[key]
            known = {"FILTER": FILTER, **values}
            seen, why, fix = (Template(one).substitute(known) for one in texts)
            yield Diagnosis(severity or Severity(usual), seen, why, fix, self.name)


def read_checks(judges: Mapping[str, Judge]) -> Iterator[Check]:
    for part in re.split(r"\n(?=\S)", TABLE.strip()):
        head, *lines = part.splitlines()
        name, about = head.split(None, 1)
        texts: dict[str, list[str]] = {}
        current, field = ["", "", "", ""], 0
        for line in lines:
            if finding := _FINDING.fullmatch(line):
                texts[finding[2]] = [finding[1], finding[3], *current[2:]]
                current, field = texts[finding[2]], 1
            elif text := _TEXT.fullmatch(line):
                field = _FIELDS[text[1]]
                current[field] = text[2]
            else:
                current[field] += f" {line.strip()}"
        yield Check(name, about, texts, judges[name])


def row(
    key: str, path: str, is_wrong: Callable[[Any], object]
) -> Callable[[ConfigPart | Lane], Iterator[JudgeFinding]]:
    """Return a judge of the value at a path. Its texts name `$place`, and `is_wrong`'s `$value`."""
    steps = [step for step in path.split(".") if step]

    def judge(part: ConfigPart | Lane) -> Iterator[JudgeFinding]:
        value = at(part.document, *steps)
        wrong = is_wrong(value)
        if wrong:
            yield found(key, place=part.place, value=value if wrong is True else wrong)

    return judge


def each(
    subjects: Callable[[Facts], Iterable[T]], *judges: Callable[[T], Iterable[JudgeFinding]]
) -> Judge:
    def judged(facts: Facts) -> Iterator[JudgeFinding]:
        for subject in subjects(facts):
            for judge in judges:
                yield from judge(subject)

    return judged
