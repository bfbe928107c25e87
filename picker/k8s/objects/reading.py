"""Objects in JSON → values, with all that is wrong with them.

An API server hands out objects that break its current schema: they were stored under an older one.
So everything is checked again by the schema that `crds/` is written from. An object with an error
has no value and must not be followed. Of metadata only what the picker needs is read, and of a
status nothing: what others write there takes no pool away.

Stricter than the schema: keys of selectors have to be label keys, a selector has to say something,
a null in a selector is an error, and an objective or a rewrite needs a `spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec

from picker.k8s.objects.check import problems, settled
from picker.k8s.objects.definitions import (
    LEGACY_OBJECTIVE,
    LEGACY_POOL,
    LEGACY_REWRITE,
    OBJECTIVE,
    POOL,
    REWRITE,
    Definition,
)
from picker.k8s.objects.findings import (
    ABSENT,
    MAX_FINDINGS,
    ObjectFinding,
    Place,
    Severity,
    error,
    warning,
)
from picker.k8s.objects.labels import dropped_labels, selector_problems
from picker.k8s.objects.legacy_pool import DEFAULT_PICKER_PORT, LegacyPool
from picker.k8s.objects.pool import InferencePool
from picker.k8s.objects.schema import Schema, schema_of
from picker.k8s.objects.values import PickerReference, Pool, PoolSpec
from picker.pool.object_parts import ObjectMeta
from picker.pool.policy_objects import PolicyObject, doubts_about

V = TypeVar("V")
_READ_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
_MATCH_LABELS: Final[Place] = ("spec", "selector", "matchLabels")
_POOLS: Final = (POOL, LEGACY_POOL)
_POLICIES: Final = (OBJECTIVE, REWRITE, LEGACY_OBJECTIVE, LEGACY_REWRITE)
_Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading(Generic[V]):
    """What an object says: None when `findings` has an error, as then it is not to be followed."""

    value: V | None
    findings: tuple[ObjectFinding, ...] = ()


def read_pool(document: Any) -> Reading[Pool]:
    """An InferencePool, of the current group or of the legacy one."""
    found: list[ObjectFinding] = []
    definition, settled_document = _settled(document, _POOLS, found)
    if definition is None:
        return _reading(None, found)
    at: Place = ("spec", "selector") if definition is LEGACY_POOL else _MATCH_LABELS
    selector = _at(settled_document, at)
    if isinstance(selector, dict):
        told = {one.path for one in found}
        extra = (one for one in selector_problems(selector, at) if one.path not in told)
        found.extend(extra)
        annotations = _at(document, ("metadata", "annotations"))
        found.extend(dropped_labels(annotations, at, selector))
    given = _converted(settled_document, definition, found)
    return _reading(None if given is None else _pool(given), found)


def read_policy(document: Any) -> Reading[PolicyObject]:
    """An InferenceObjective or an InferenceModelRewrite; what cannot be meant are warnings."""
    found: list[ObjectFinding] = []
    definition, settled_document = _settled(document, _POLICIES, found)
    if definition is None:
        return _reading(None, found)
    given = _converted(settled_document, definition, found)
    if given is not None:
        doubts = doubts_about(given)
        found.extend(
            warning(one.path, ABSENT, one.text, "see docs/objectives.md") for one in doubts
        )
    return _reading(given, found)


def _settled(
    document: Any, definitions: tuple[Definition, ...], found: list[ObjectFinding]
) -> tuple[Definition | None, _Document]:
    """The definition that an object follows, and what of the object is read, checked by it."""
    if not isinstance(document, dict):
        found.append(error((), document, "must be a mapping", "give an object of Kubernetes"))
        return None, {}
    definition = _definition_of(document, definitions, found)
    if definition is None:
        return None, {}
    result: _Document = {"apiVersion": definition.api_version, "kind": definition.kind}
    result["metadata"] = _metadata(document.get("metadata"))
    spec, schema = document.get("spec"), _spec_schema(definition)
    if spec is None:
        found.append(error(("spec",), ABSENT, "is missing", "add the key 'spec'"))
    else:
        result["spec"] = settled(spec, schema, ("spec",), found)
        found.extend(islice(problems(result["spec"], schema, ("spec",)), MAX_FINDINGS))
    return definition, result


def _definition_of(
    document: _Document, definitions: tuple[Definition, ...], found: list[ObjectFinding]
) -> Definition | None:
    version, kind = document.get("apiVersion"), document.get("kind")
    of_kind = [one for one in definitions if one.kind == kind]
    if not of_kind:
        kinds = sorted({one.kind for one in definitions})
        found.append(_one_of(("kind",), kind, kinds))
        return None
    matching = next((one for one in of_kind if one.api_version == version), None)
    if matching is None:
        found.append(_one_of(("apiVersion",), version, [one.api_version for one in of_kind]))
    return matching


def _one_of(at: Place, value: Any, allowed: list[str]) -> ObjectFinding:
    return error(at, value, "is not known here", f"write one of: {', '.join(allowed)}")


@cache
def _spec_schema(definition: Definition) -> Schema:
    fields = msgspec.structs.fields(definition.shape)
    return next(schema_of(one.type) for one in fields if one.name == "spec")


def _metadata(given: Any) -> _Document:
    """What is read of it, for what else stands there is the API server's business."""
    if not isinstance(given, dict):
        return {}
    return {key: given[key] for key in _READ_METADATA if given.get(key) is not None}


def _converted(document: _Document, definition: Definition, found: list[ObjectFinding]) -> Any:
    """The object as a struct. What is wrong with its metadata is found here."""
    fix = "give the object as an API server hands it out"
    metadata = document["metadata"]
    try:
        msgspec.convert(metadata, ObjectMeta)
        return None if _has_errors(found) else msgspec.convert(document, definition.shape)
    except msgspec.ValidationError as failure:
        found.append(error(("metadata",), metadata.get("name", ABSENT), str(failure), fix))
        return None


def _has_errors(found: list[ObjectFinding]) -> bool:
    return any(one.severity is Severity.ERROR for one in found)


def _at(value: Any, place: Place) -> Any:
    for step in place:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _reading(value: V | None, found: list[ObjectFinding]) -> Reading[V]:
    """Errors first, so that none is left out when there is too much to tell."""
    found.sort(key=lambda one: one.severity is not Severity.ERROR)
    return Reading(value, tuple(found[:MAX_FINDINGS]))


def _pool(given: InferencePool | LegacyPool) -> Pool:
    metadata = given.metadata
    return Pool(
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        generation=metadata.generation,
        is_deleting=metadata.deletion_timestamp is not None,
        api_version=given.api_version,
        spec=_spec(given) if isinstance(given, InferencePool) else _legacy_spec(given),
    )


def _spec(given: InferencePool) -> PoolSpec:
    spec, reference = given.spec, given.spec.endpoint_picker_ref
    return PoolSpec(
        selector=MappingProxyType(spec.selector.match_labels),
        target_ports=tuple(port.number for port in spec.target_ports),
        app_protocol=spec.app_protocol,
        picker=None
        if reference is None
        else PickerReference(
            group=reference.group,
            kind=reference.kind,
            name=reference.name,
            port=None if reference.port is None else reference.port.number,
            failure_mode=reference.failure_mode,
        ),
    )


def _legacy_spec(given: LegacyPool) -> PoolSpec:
    spec, reference = given.spec, given.spec.extension_ref
    default = DEFAULT_PICKER_PORT if reference.kind == "Service" else None
    return PoolSpec(
        selector=MappingProxyType(spec.selector),
        target_ports=(spec.target_port_number,),
        app_protocol="http",
        picker=PickerReference(
            group=reference.group,
            kind=reference.kind,
            name=reference.name,
            port=default if reference.port_number is None else reference.port_number,
            failure_mode=reference.failure_mode,
        ),
    )
