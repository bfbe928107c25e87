"""Label selectors as `kubectl get -l` takes them, checked before an API server refuses them.

Source: labels and selectors of Kubernetes. Equality (`a=b`, `a==b`, `a!=b`), sets (`a in (b,c)`,
`a notin (b,c)`), presence (`a`, `!a`) and order of numbers (`a>1`, `a<1`), separated by commas. A
Pod has to meet all of them; one without the label meets `!=`, `notin` and `!`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from picker.errors import ConfigError
from picker.k8s.objects.labels import is_label_key

MAX_VALUE_LENGTH: Final = 63

Requirement: TypeAlias = Callable[[Mapping[str, str]], bool]

_PARTS = re.compile(r"(?:[^,()]|\([^()]*\))+")
_SET = re.compile(r"(?P<key>\S+)\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARISON = re.compile(r"(?P<key>[^=!<>\s]+)\s*(?P<how>==|=|!=|>|<)\s*(?P<value>[^=!<>\s]*)")
_PRESENCE = re.compile(r"(?P<not>!?)\s*(?P<key>[^=!<>\s]+)")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """A selector: as an API server is asked, and by what its requirements ask for."""

    text: str
    requirements: tuple[Requirement, ...]

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a Pod with these labels is meant."""
        return all(requirement(labels) for requirement in self.requirements)


def parse_selector(text: str) -> LabelSelector:
    """Raises `ConfigError` for what is no selector, and for one that selects every Pod."""
    if not text.strip():
        raise ConfigError("is empty and would take every Pod of the namespace")
    return LabelSelector(text.strip(), tuple(_requirements(text)))


def _requirements(text: str) -> Iterator[Requirement]:
    end = 0
    for found in _PARTS.finditer(text):
        if found.start() != end:
            raise ConfigError(f"cannot be read at '{text[end:][:60]}'")
        end = found.end()
        if text[end : end + 1] == "," and text[end + 1 :].strip():
            end += 1
        yield _requirement(found[0].strip())
    if end != len(text):
        raise ConfigError(f"cannot be read at '{text[end:][:60]}'")


def _requirement(text: str) -> Requirement:
    if found := _SET.fullmatch(text):
        values = frozenset(_value(one.strip()) for one in found["values"].split(","))
        return _membership(_key(found["key"]), values, is_in=found["how"] == "in")
    if found := _COMPARISON.fullmatch(text):
        key, how, value = _key(found["key"]), found["how"], _value(found["value"])
        if how in "<>":
            return _order(key, value, is_greater=how == ">")
        return _membership(key, frozenset((value,)), is_in=how != "!=")
    if found := _PRESENCE.fullmatch(text):
        key, is_there = _key(found["key"]), not found["not"]
        return lambda labels: (key in labels) is is_there
    raise ConfigError(
        f"cannot be read at '{text[:60]}'; write requirements like a=b, a!=b, a in (b,c), "
        "a notin (b,c), a or !a, separated by commas"
    )


def _membership(key: str, values: frozenset[str], *, is_in: bool) -> Requirement:
    return lambda labels: (labels.get(key) in values) is is_in


def _order(key: str, value: str, *, is_greater: bool) -> Requirement:
    bound = _number(value)
    if bound is None:
        raise ConfigError(f"'{value}' is no whole number, and {key} is compared with it")

    def is_met(labels: Mapping[str, str]) -> bool:
        number = _number(labels.get(key, ""))
        if number is None:
            return False
        return number > bound if is_greater else number < bound

    return is_met


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal()
    return int(text) if is_number else None


def _key(text: str) -> str:
    if not is_label_key(text):
        raise ConfigError(f"'{text[:60]}' is no label key")
    return text


def _value(text: str) -> str:
    if len(text) > MAX_VALUE_LENGTH or not _VALUE.fullmatch(text):
        raise ConfigError(f"'{text[:60]}' is no value of a label")
    return text
