"""Label selectors as Kubernetes knows them: `matchLabels` and `matchExpressions`, all of which have
to hold.

`In` needs the label with one of the values, `NotIn` holds for the label with another value and
without the label, `Exists` and `DoesNotExist` look at the key alone. A selector that says nothing
selects everything. Keys and values are held to the syntax of Kubernetes labels, because one that
breaks it could never match.

Source: Kubernetes, apimachinery `metav1.LabelSelector` and the text form of `labels.Parse`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from picker.framework.registry import Parameters

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist"]

_MAX_NAME = 63
_MAX_PREFIX = 253
_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_PREFIX = re.compile(
    r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_SET = re.compile(r"(?P<key>\S+)\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)")
_EQUALITY = re.compile(r"(?P<key>[^=!\s]+)\s*(?P<operator>==?|!=)\s*(?P<value>[^=!\s]*)")
_COMMA_OUTSIDE_SET = re.compile(r",(?![^(]*\))")


class LabelRequirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One entry of `matchExpressions`."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


class LabelSelectorParameters(Parameters, frozen=True):
    """A label selector as a configuration writes it."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class _Requirement:
    key: str
    operator: Operator
    values: frozenset[str]

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        return (value is not None) == (self.operator == "Exists")


class LabelSelector:
    """A checked selector. Immutable."""

    __slots__ = ("_requirements",)

    def __init__(self, parameters: LabelSelectorParameters) -> None:
        """Raises `ValueError` that names the entry for a key or a value that is no label, values
        where the operator takes none, and none where it needs some.
        """
        self._requirements = tuple(_compiled(parameters))

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """A selector in its text form, e.g. `app=llm,tier!=test,role in (a,b),!gone,there`.

        Raises `ValueError` for what is no selector.
        """
        parts = [part.strip() for part in _COMMA_OUTSIDE_SET.split(text)] if text.strip() else []
        return cls(LabelSelectorParameters(match_expressions=tuple(map(_parsed, parts))))

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether every requirement holds."""
        return all(requirement.holds(labels) for requirement in self._requirements)


def _compiled(parameters: LabelSelectorParameters) -> Iterator[_Requirement]:
    for key, value in parameters.match_labels.items():
        _check_key(key, "matchLabels")
        _check_value(value, f"matchLabels['{key}']")
        yield _Requirement(key, "In", frozenset((value,)))
    for index, entry in enumerate(parameters.match_expressions):
        where = f"matchExpressions[{index}]"
        _check_key(entry.key, f"{where}.key")
        if (entry.operator in ("In", "NotIn")) != bool(entry.values):
            needs = "needs values" if not entry.values else "takes no values"
            raise ValueError(f"{where}.values: the operator {entry.operator} {needs}")
        for value in entry.values:
            _check_value(value, f"{where}.values")
        yield _Requirement(entry.key, entry.operator, frozenset(entry.values))


def _check_key(key: str, where: str) -> None:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
        raise ValueError(f"{where}: '{key}' is no label key, '{prefix}' is no DNS name")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: '{key}' is no label key")


def _check_value(value: str, where: str) -> None:
    if value and (len(value) > _MAX_NAME or not _NAME.fullmatch(value)):
        raise ValueError(f"{where}: '{value}' is no label value")


def _parsed(text: str) -> LabelRequirement:
    if found := _SET.fullmatch(text):
        values = tuple(value.strip() for value in found["values"].split(","))
        return LabelRequirement(
            found["key"], "In" if found["operator"] == "in" else "NotIn", values
        )
    if found := _EQUALITY.fullmatch(text):
        operator: Operator = "NotIn" if found["operator"] == "!=" else "In"
        return LabelRequirement(found["key"], operator, (found["value"],))
    if text.startswith("!"):
        return LabelRequirement(text[1:].strip(), "DoesNotExist")
    return LabelRequirement(text, "Exists")
