"""Label and field selectors: what an object is asked for in a list or a watch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kube_api.resources import Object, Resource
from kube_api.statuses import bad_request

_LABEL_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_PREFIX = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_KEY = re.compile(rf"({_PREFIX}/)?{_LABEL_NAME}")
_VALUE = re.compile(rf"({_LABEL_NAME})?")
_SET = re.compile(r"(?P<key>.*?)\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
_MAX_VALUE_LENGTH = 63

Test = Callable[[Any], bool]  # of what stands under a key, None where nothing does


@dataclass(frozen=True, slots=True)
class Selector:
    """A conjunction of tests on labels, fields and the namespace.

    `name` is the one name it can select, when the field selector asks for one.
    """

    namespace: str | None = None
    labels: tuple[tuple[str, Test], ...] = ()
    fields: tuple[tuple[str, Test], ...] = ()
    name: str | None = None

    def __call__(self, obj: Object) -> bool:
        """Whether the object is selected."""
        metadata = obj["metadata"]
        if self.namespace is not None and metadata.get("namespace") != self.namespace:
            return False
        labels = metadata.get("labels") or {}
        return all(test(labels.get(key)) for key, test in self.labels) and all(
            test(_field(obj, path)) for path, test in self.fields
        )


def parse_selector(resource: Resource, namespace: str | None, labels: str, fields: str) -> Selector:
    """The selector of a request. Raises ApiError 400 for what cannot be parsed."""
    asked = [text for text in fields.split(",") if text]
    names = [text.rpartition("=")[2] for text in asked if text.startswith("metadata.name=")]
    return Selector(
        namespace,
        tuple(_label_test(text) for text in _requirements(labels)),
        tuple(_field_test(resource, text) for text in asked),
        names[0] if names else None,
    )


def _requirements(text: str) -> Iterator[str]:
    """Splits at the commas that stand outside of parentheses."""
    for one in re.findall(r"(?:[^,()]|\([^()]*\))+", text):
        if one.strip():
            yield one.strip()


def _label_test(text: str) -> tuple[str, Test]:
    found = _SET.fullmatch(text)
    if found:
        values = frozenset(_value(one.strip()) for one in found["values"].split(","))
        if found["how"] == "in":
            return _key(found["key"]), lambda value: value in values
        return _key(found["key"]), lambda value: value is None or value not in values
    for operator in ("!=", "==", "="):
        key, there, value = text.partition(operator)
        if there:
            return _key(key), _compared(operator, _value(value.strip()))
    if text.startswith("!"):
        return _key(text[1:]), lambda value: value is None
    return _key(text), lambda value: value is not None


def _compared(operator: str, wanted: str) -> Test:
    """A label that is not there differs from every value."""
    if operator == "!=":
        return lambda value: value != wanted
    return lambda value: value == wanted


def _compared_field(operator: str, wanted: str) -> Test:
    """A field that is not there is empty."""
    if operator == "!=":
        return lambda value: (value or "") != wanted
    return lambda value: (value or "") == wanted


def _key(text: str) -> str:
    text = text.strip()
    if not _KEY.fullmatch(text) or len(text.rpartition("/")[2]) > _MAX_VALUE_LENGTH:
        why = (
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start "
            "and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', "
            "regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )
        shown = f'<nil>: Invalid value: "{text}": {why}'
        raise bad_request(f"unable to parse requirement: {shown}")
    return text


def _value(text: str) -> str:
    if not _VALUE.fullmatch(text) or len(text) > _MAX_VALUE_LENGTH:
        why = "a valid label must be an empty string or consist of alphanumeric characters"
        shown = f'values[0][]: Invalid value: "{text}": {why}'
        raise bad_request(f"unable to parse requirement: {shown}")
    return text


def label_value_errors(labels: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The key and the fault of every label that no object may carry."""
    for key, value in labels.items():
        if not _KEY.fullmatch(key):
            yield key, f'Invalid value: "{key}": name part must consist of alphanumeric characters'
        elif not isinstance(value, str) or not _VALUE.fullmatch(value):
            yield key, f'Invalid value: "{value}": a valid label must be an empty string or consist'
        elif len(value) > _MAX_VALUE_LENGTH:
            yield key, f'Invalid value: "{value}": must be no more than 63 bytes'


def _field_test(resource: Resource, text: str) -> tuple[str, Test]:
    for operator in ("!=", "==", "="):
        path, there, wanted = text.partition(operator)
        if there:
            if path not in resource.fields:
                raise bad_request(f"field label not supported: {path}")
            return path, _compared_field(operator, wanted)
    raise bad_request(f"invalid selector: '{text}'; can't understand '{text}'")


def _field(obj: Object, path: str) -> Any:
    value: Any = obj
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value
