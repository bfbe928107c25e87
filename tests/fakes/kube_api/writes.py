"""The steps of an object into the store as pure functions, in a server's order.

A create drops the status; an update of the main resource keeps the status, one of `/status` keeps
all else; the generation changes with the spec alone.
"""

import copy
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from tests.fakes.kube_api.clock import stamp
from tests.fakes.kube_api.resources import Object, Resource, value_at
from tests.fakes.kube_api.selectors import label_value_errors
from tests.fakes.kube_api.statuses import bad_request, conflict, invalid
from tests.support.kube.crd_rules import FieldError, name_errors

_SET_BY_SERVER = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
    "generateName",
    "namespace",
    "name",
)


class FieldValidation(StrEnum):
    STRICT = "Strict"
    WARN = "Warn"
    IGNORE = "Ignore"


def decoded(resource: Resource, body: Any, validation: FieldValidation) -> tuple[Object, list[str]]:
    """Return a pruned and defaulted copy, and its warnings. Raises ApiError 400."""
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise bad_request("the object provided is unrecognized (must be of type Object)")
    obj = copy.deepcopy(body)
    obj.setdefault("kind", resource.kind)
    obj.setdefault("apiVersion", resource.api_version)
    obj.setdefault("metadata", {})
    if (obj["kind"], obj["apiVersion"]) != (resource.kind, resource.api_version):
        raise bad_request(
            f"{obj['kind']} in version {obj['apiVersion']!r} does not match the expected "
            f"{resource.kind} in version {resource.api_version!r}"
        )
    unknown = [f'unknown field "{path}"' for path in _pruned(resource, obj)]
    if unknown and validation is FieldValidation.STRICT:
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a '
            f"{resource.kind}: strict decoding error: {', '.join(unknown)}"
        )
    return obj, unknown if validation is FieldValidation.WARN else []


def _pruned(resource: Resource, obj: Object) -> list[str]:
    unknown: list[str] = []
    if resource.rules is not None:
        unknown = resource.rules.prune(obj)
        resource.rules.apply_defaults(obj)
    if resource.defaults is not None:
        resource.defaults(obj)
    return unknown


def created(resource: Resource, body: Object, namespace: str, uid: str, now: float) -> Object:
    given = body["metadata"]
    obj = dict(body)
    if resource.has_status:
        obj.pop("status", None)
        _redefaulted(resource, obj)
    metadata = {k: v for k, v in given.items() if k not in _SET_BY_SERVER and v is not None}
    name = given.get("name")
    if not name and given.get("generateName"):
        name = f"{given['generateName']}{uid[-5:]}"
        metadata["generateName"] = given["generateName"]
    metadata |= {"name": name, "uid": uid, "creationTimestamp": stamp(now)}
    if resource.namespaced:
        metadata["namespace"] = namespace
    if resource.has_generation:
        metadata["generation"] = 1
    obj["metadata"] = metadata
    refuse(resource, obj, errors_of(resource, obj))
    return obj


def _redefaulted(resource: Resource, obj: Object) -> None:
    if resource.defaults is not None:
        resource.defaults(obj)
    if resource.rules is not None:
        resource.rules.apply_defaults(obj)


def updated(resource: Resource, old: Object, body: Object, *, status: bool) -> Object:
    """Return the next state of `old`; a rule that it broke already may stay broken."""
    given, stored = body["metadata"], old["metadata"]
    _check_identity(resource, stored, given)
    if status:
        obj = {**old}
        _take(obj, body, "status")
        metadata = dict(stored)
    else:
        obj = {**body}
        if resource.has_status:
            _take(obj, old, "status")
        metadata = {k: v for k, v in given.items() if k not in _SET_BY_SERVER and v is not None}
        metadata |= {k: stored[k] for k in _SET_BY_SERVER if k in stored}
        metadata["resourceVersion"] = stored["resourceVersion"]
    if resource.has_generation and _spec_of(resource, obj) != _spec_of(resource, old):
        metadata["generation"] = stored.get("generation", 0) + 1
    obj["metadata"] = metadata
    refuse(resource, obj, _newly_broken(resource, old, obj))
    return obj


def _take(obj: Object, other: Object, key: str) -> None:
    if key in other:
        obj[key] = other[key]
    else:
        obj.pop(key, None)


def _check_identity(resource: Resource, stored: Object, given: Object) -> None:
    if given.get("resourceVersion") not in (None, "", stored["resourceVersion"]):
        raise conflict(resource, stored["name"])


def _spec_of(resource: Resource, obj: Object) -> Object:
    separate = {"metadata", "status"} if resource.has_status else {"metadata"}
    return {key: value for key, value in obj.items() if key not in separate}


def errors_of(resource: Resource, obj: Object) -> list[FieldError]:
    errors = list(_metadata_errors(obj["metadata"]))
    if resource.rules is not None:
        return errors + list(resource.rules.errors(obj))
    errors += name_errors(obj)
    if resource.check is not None:
        errors += resource.check(obj)
    return errors


def _metadata_errors(metadata: Object) -> Iterator[FieldError]:
    for _, text in label_value_errors(metadata.get("labels") or {}):
        yield FieldError("metadata.labels", "FieldValueInvalid", text)


def _newly_broken(resource: Resource, old: Object, new: Object) -> list[FieldError]:
    errors = errors_of(resource, new)
    if not errors:
        return []
    before = set(errors_of(resource, old))
    return [
        error
        for error in errors
        if error not in before or value_at(old, error.path) != value_at(new, error.path)
    ]


def refuse(resource: Resource, obj: Object, errors: list[FieldError]) -> None:
    if errors:
        raise invalid(resource, obj["metadata"].get("name") or "", errors)
