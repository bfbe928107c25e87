"""Label selectors of Kubernetes: `matchLabels` and `matchExpressions` of objects, and the text form
of `kubectl get -l`. All requirements must hold.

`In` requires the label with one of the values, `NotIn` holds for the label with another value and
without the label, `Exists` and `DoesNotExist` test only the key. A selector without requirements
selects everything. Keys and values must have the syntax of Kubernetes labels, because others could
never match. Only the text form compares whole numbers (`a>1`, `a<1`), which a label that is not a
number never satisfies.

Source: Kubernetes, apimachinery `metav1.LabelSelector` and `labels.Parse`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from picker.framework.registry import Parameters

Operator: TypeAlias = Literal["In", "NotIn", "Exists", "DoesNotExist"]

_MAX_NAME = 63
_MAX_PREFIX = 253
_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_PREFIX = re.compile(
    r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_SET = re.compile(r"(?P<key>\S+)\s+(?P<operator>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARISON = re.compile(r"(?P<key>[^=!<>\s]+)\s*(?P<operator>==?|!=|>|<)\s*(?P<value>[^=!<>\s]*)")
_COMMA_OUTSIDE_SET = re.compile(r",(?![^(]*\))")
_OPERATORS = {"in": "In", "notin": "NotIn", "=": "In", "==": "In", "!=": "NotIn"}
_OPERATORS |= {">": "Gt", "<": "Lt"}


class LabelRequirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One entry of `matchExpressions`."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()


class LabelSelectorParameters(Parameters, frozen=True):
    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[LabelRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class _Requirement:
    key: str
    operator: str  # an `Operator`, "Gt" or "Lt"
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        if self.operator in ("Gt", "Lt"):
            number, (bound,) = _number(value or ""), map(int, self.values)
            return number is not None and (
                number > bound if self.operator == "Gt" else number < bound
            )
        return (value is not None) == (self.operator == "Exists")


class LabelSelector:
    __slots__ = ("_requirements",)

    def __init__(self, parameters: LabelSelectorParameters) -> None:
        """Raise a `ValueError` that names the entry if its key or a value is invalid."""
        self._requirements = tuple(_compiled(parameters))

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Parse the text form, e.g. `app=llm,tier!=test,role in (a,b),!gone,there,gpus>4`. Raises
        `ValueError`.
        """
        parts = [part.strip() for part in _COMMA_OUTSIDE_SET.split(text)] if text.strip() else []
        selector = cls.__new__(cls)
        selector._requirements = tuple(map(_parsed, parts))
        return selector

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.holds(labels) for requirement in self._requirements)


def check_label_key(key: str) -> None:
    """Raise `ValueError` for an invalid key of a label."""
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
        raise ValueError(f"'{key[:_MAX_NAME]}' is no label key, '{prefix}' is no DNS name")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(f"'{key[:_MAX_NAME]}' is no label key")


def check_label_value(value: str) -> None:
    """Raise `ValueError` for an invalid value of a label."""
    if value and (len(value) > _MAX_NAME or not _NAME.fullmatch(value)):
        raise ValueError(f"'{value[:_MAX_NAME]}' is no label value")


def _compiled(parameters: LabelSelectorParameters) -> Iterator[_Requirement]:
    for key, value in parameters.match_labels.items():
        yield _requirement(key, "In", (value,), "matchLabels", f"matchLabels['{key}']")
    for index, entry in enumerate(parameters.match_expressions):
        where = f"matchExpressions[{index}]"
        if (entry.operator in ("In", "NotIn")) != bool(entry.values):
            needs = "needs values" if not entry.values else "takes no values"
            raise ValueError(f"{where}.values: the operator {entry.operator} {needs}")
        places = f"{where}.key", f"{where}.values"
        yield _requirement(entry.key, entry.operator, entry.values, *places)


def _requirement(
    key: str, operator: str, values: tuple[str, ...], key_at: str, values_at: str
) -> _Requirement:
    """Return the requirement. Raises a `ValueError` that begins with an invalid label's place."""
    at = key_at
    try:
        check_label_key(key)
        at = values_at
        for value in values:
            check_label_value(value)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from error
    return _Requirement(key, operator, frozenset(values))


def _parsed(text: str) -> _Requirement:
    operator, values = "Exists", tuple[str, ...]()
    if found := _SET.fullmatch(text):
        key, operator = found["key"], _OPERATORS[found["operator"]]
        values = tuple(value.strip() for value in found["values"].split(","))
    elif found := _COMPARISON.fullmatch(text):
        key, operator, values = found["key"], _OPERATORS[found["operator"]], (found["value"],)
    elif text.startswith("!"):
        key, operator = text[1:].strip(), "DoesNotExist"
    else:
        key = text
    if operator in ("Gt", "Lt") and _number(values[0]) is None:
        raise ValueError(f"'{values[0]}' is no whole number, and {key} is compared with it")
    try:
        return _requirement(key, operator, values, "key", "value")
    except ValueError as error:
        raise ValueError(
            f"cannot be read at '{text[:_MAX_NAME]}' ({error}); write requirements like a=b, a!=b, "
            "a in (b,c), a notin (b,c), a, !a or a>1, separated by commas"
        ) from error


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None
