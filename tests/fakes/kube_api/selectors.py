"""Label and field selectors of lists and watches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from picker.framework.label_selector import LabelSelector, check_label_key, check_label_value
from tests.fakes.kube_api.resources import Object, Resource, value_at
from tests.fakes.kube_api.statuses import bad_request

Test = Callable[[Any], bool]  # of the value of a field, None where there is none


@dataclass(frozen=True, slots=True)
class Selector:
    namespace: str | None
    labels: LabelSelector
    fields: tuple[tuple[str, Test], ...]
    name: str | None

    def __call__(self, obj: Object) -> bool:
        metadata = obj["metadata"]
        if self.namespace is not None and metadata.get("namespace") != self.namespace:
            return False
        return self.labels.matches(metadata.get("labels") or {}) and all(
            test(value_at(obj, path)) for path, test in self.fields
        )


def parse_selector(resource: Resource, namespace: str | None, labels: str, fields: str) -> Selector:
    asked = [text for text in fields.split(",") if text]
    names = [text.rpartition("=")[2] for text in asked if text.startswith("metadata.name=")]
    try:
        selected = LabelSelector.parse(labels)
    except ValueError as error:
        raise bad_request(f"unable to parse requirement: {error}") from error
    tests = tuple(_field_test(resource, text) for text in asked)
    return Selector(namespace, selected, tests, names[0] if names else None)


def label_value_errors(labels: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in labels.items():
        try:
            check_label_key(key)
            check_label_value(value if isinstance(value, str) else "no label")
        except ValueError as error:
            yield key, f"Invalid value: {error}: must consist of alphanumeric characters"


def _compared(operator: str, wanted: str) -> Test:
    if operator == "!=":
        return lambda value: (value or "") != wanted
    return lambda value: (value or "") == wanted


def _field_test(resource: Resource, text: str) -> tuple[str, Test]:
    for operator in ("!=", "==", "="):
        path, there, wanted = text.partition(operator)
        if there:
            if path not in resource.fields:
                raise bad_request(f"field label not supported: {path}")
            return path, _compared(operator, wanted)
    raise bad_request(f"invalid selector: '{text}'; can't understand '{text}'")
