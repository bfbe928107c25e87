"""InferencePools and policy objects of a cluster → values, with all of their problems.

The structs follow the definitions under `crds/`; the legacy group is read where a cluster has it
and never installed. An object with an error has no value and must not be followed. Of metadata only
what the picker needs is read, and a status not at all: what others write there removes no pool.

Stricter than the definitions: keys of selectors have to be label keys, a selector has to have a
label, a null in a selector is an error, and an objective or a rewrite needs a `spec`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from picker.k8s.object_check import ABSENT, ObjectProblem, Place, error, stored, warning
from picker.k8s.object_map import MalformedObjectError, metadata_of
from picker.k8s.pods import PodError, PodRecord, read_pod
from picker.pool.object_parts import (
    END,
    MAX_TARGET_PORTS,
    GroupName,
    KindName,
    ObjectMeta,
    Part,
    PortNumber,
    ReferentName,
)
from picker.pool.policies import (
    API_VERSION,
    KINDS,
    LEGACY_API_VERSION,
    POOL_GROUP,
    POOL_KIND,
    InferenceModelRewrite,
    InferenceObjective,
    LegacyModelRewrite,
    Objective,
    PolicyObject,
    RewriteRule,
    doubts_about,
    objective_of,
    rules_of,
)

log = logging.getLogger(__name__)

V = TypeVar("V")
MAX_PROBLEMS: Final = 50  # of one object: more are not read, and objects may be large
MAX_LOGGED: Final = 10_000  # states of objects that are remembered; then they are logged again
DEFAULT_LEGACY_PORT: Final = 9002
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_READ_METADATA: Final = ("name", "namespace", "creationTimestamp", "deletionTimestamp")

# Structs of InferencePools

_LABEL_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
_PREFIX = r"(?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
LabelKey: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^({_PREFIX})?{_LABEL_NAME}{END}",
        description="at most 63 letters, digits, '-', '_' and '.' that begin and end with a letter "
        "or digit, perhaps behind a DNS name and '/'",
    ),
]
LabelValue: TypeAlias = Annotated[
    str,
    Meta(
        max_length=63,
        pattern=rf"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?{END}",
        description="letters, digits, '-', '_' and '.' that begin and end with a letter or digit",
    ),
]
AppProtocol: TypeAlias = Literal["http", "kubernetes.io/h2c"]
FailureMode: TypeAlias = Literal["FailOpen", "FailClose"]


class PoolSelector(Part, frozen=True, kw_only=True):
    """Which Pods of the pool's own namespace belong to it: those with all of these labels."""

    match_labels: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=64)]


class Port(Part, frozen=True, kw_only=True):
    """A target port of a pool, or the port of the endpoint picker's Service."""

    number: PortNumber


class _Reference(Part, frozen=True, kw_only=True):
    """The endpoint picker that chooses among the pool's endpoints."""

    group: GroupName = ""
    kind: KindName = "Service"
    name: ReferentName
    failure_mode: FailureMode = "FailClose"


class EndpointPickerReference(_Reference, frozen=True, kw_only=True):
    """The form of the current group."""

    port: Port | None = None

    @property
    def service_port(self) -> int | None:
        """The port of its Service; None for other kinds that name none."""
        return None if self.port is None else self.port.number


class InferencePoolSpec(Part, frozen=True, kw_only=True):
    """Which Pods make up the pool, which protocol they speak, and who chooses among them."""

    selector: PoolSelector
    target_ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=MAX_TARGET_PORTS)]
    app_protocol: AppProtocol = "http"
    endpoint_picker_ref: EndpointPickerReference | None = None


class InferencePool(Part, frozen=True, kw_only=True):
    """InferencePool `inference.networking.k8s.io/v1`."""

    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: InferencePoolSpec


class ExtensionReference(_Reference, frozen=True, kw_only=True):
    """The form of the legacy group."""

    port_number: PortNumber | None = None

    @property
    def service_port(self) -> int | None:
        """The port of its Service; None for other kinds that name none."""
        return self.port_number or (DEFAULT_LEGACY_PORT if self.kind == "Service" else None)


class LegacyPoolSpec(Part, frozen=True, kw_only=True):
    """Which Pods make up the pool, their one port, and who chooses among them."""

    selector: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1)]
    target_port_number: PortNumber
    extension_ref: ExtensionReference


class LegacyPool(Part, frozen=True, kw_only=True):
    """InferencePool `inference.networking.x-k8s.io/v1alpha2`."""

    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: LegacyPoolSpec


# Values

PickerReference: TypeAlias = EndpointPickerReference | ExtensionReference


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool, of the current group or of the legacy one.

    `selector` has at least one label; a Pod has to have all of them. Each of the 1 to 8 different
    `target_ports` is an endpoint of its own on every Pod.
    """

    name: str
    namespace: str
    is_deleting: bool
    selector: Mapping[str, str]
    target_ports: tuple[int, ...]
    picker: PickerReference | None

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a Pod with these labels belongs to the pool."""
        return all(labels.get(key) == value for key, value in self.selector.items())

    @property
    def label_selector(self) -> str:
        """The selector as the parameter `labelSelector` of a list or a watch."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.selector.items()))


@dataclass(frozen=True, slots=True)
class Reading(Generic[V]):
    """An object as a value; None when one of `problems` is an error."""

    value: V | None
    problems: tuple[ObjectProblem, ...] = ()


# From documents to values

_Shape: TypeAlias = type[msgspec.Struct]
_POOL_SHAPES: Final[dict[tuple[str, str], _Shape]] = {
    (f"{POOL_GROUP}/v1", POOL_KIND): InferencePool,
    (LEGACY_API_VERSION, POOL_KIND): LegacyPool,
}
_POLICY_SHAPES: Final[dict[tuple[str, str], _Shape]] = {
    **{(API_VERSION, kind): shape for kind, shape in KINDS.items()},
    (LEGACY_API_VERSION, "InferenceObjective"): InferenceObjective,
    (LEGACY_API_VERSION, "InferenceModelRewrite"): LegacyModelRewrite,
}


def read_pool(document: Any) -> Reading[Pool]:
    """An InferencePool, of the current group or of the legacy one."""
    found: list[ObjectProblem] = []
    given = _read(document, _POOL_SHAPES, found)
    pool = None
    if isinstance(given, InferencePool):
        found.extend(_pool_problems(given.spec))
        pool = _pool(given)
        found.extend(_dropped_labels(document, ("spec", "selector", "matchLabels"), pool.selector))
    elif isinstance(given, LegacyPool):
        pool = _pool(given)
        found.extend(_dropped_labels(document, ("spec", "selector"), pool.selector))
    return _reading(pool, found)


def read_policy(document: Any) -> Reading[PolicyObject]:
    """An InferenceObjective or an InferenceModelRewrite; what can have no effect is a warning."""
    found: list[ObjectProblem] = []
    given = _read(document, _POLICY_SHAPES, found)
    if given is not None:
        hint = "see docs/objectives.md"
        found.extend(warning(one.path, ABSENT, one.text, hint) for one in doubts_about(given))
    return _reading(given, found)


def _read(
    document: Any, shapes: Mapping[tuple[str, str], _Shape], found: list[ObjectProblem]
) -> Any:
    """The object as one of `shapes`, by apiVersion and kind; None when an error was found."""
    if not isinstance(document, dict):
        found.append(error((), document, "must be a mapping", "give an object of Kubernetes"))
        return None
    version, kind = document.get("apiVersion"), document.get("kind")
    versions = [known for known, called in shapes if called == kind]
    if not versions:
        found.append(_unknown("kind", kind, sorted({called for _, called in shapes})))
        return None
    if version not in versions:
        found.append(_unknown("apiVersion", version, versions))
        return None
    shape = shapes[str(version), str(kind)]
    metadata = _metadata(document.get("metadata"), found)
    given: dict[str, Any] = {"apiVersion": version, "kind": kind, "metadata": metadata}
    if document.get("spec") is None:
        found.append(error(("spec",), ABSENT, "is missing", "add the key 'spec'"))
    else:
        spec = next(one.type for one in msgspec.structs.fields(shape) if one.name == "spec")
        given["spec"] = stored(document["spec"], spec, ("spec",), found)
    return None if _has_errors(found) else msgspec.convert(given, shape)


def _unknown(key: str, value: Any, allowed: list[str]) -> ObjectProblem:
    return error((key,), value, "is not known here", f"write one of: {', '.join(allowed)}")


def _metadata(given: Any, found: list[ObjectProblem]) -> dict[str, Any]:
    """The part of the metadata that is read; the API server is responsible for the rest."""
    read: dict[str, Any] = {}
    if isinstance(given, dict):
        read = {key: given[key] for key in _READ_METADATA if given.get(key) is not None}
    try:
        msgspec.convert(read, ObjectMeta)
    except msgspec.ValidationError as failure:
        fix = "give the object as an API server returns it"
        found.append(error(("metadata",), read.get("name", ABSENT), str(failure), fix))
    return read


def _has_errors(found: Iterable[ObjectProblem]) -> bool:
    return any(one.is_error for one in found)


def _reading(value: V | None, found: list[ObjectProblem]) -> Reading[V]:
    """Errors first, so that none is left out when there are too many problems."""
    found.sort(key=lambda one: not one.is_error)
    return Reading(None if _has_errors(found) else value, tuple(found[:MAX_PROBLEMS]))


def _pool_problems(spec: InferencePoolSpec) -> Iterator[ObjectProblem]:
    """The rules that the definition has in CEL, for a spec that is right otherwise."""
    numbers = [port.number for port in spec.target_ports]
    if len(numbers) > len(set(numbers)):
        at = ("spec", "targetPorts")
        yield error(at, numbers, "port number must be unique", "name each port once")
    reference = spec.endpoint_picker_ref
    if reference is not None and reference.kind == "Service" and reference.port is None:
        yield error(
            ("spec", "endpointPickerRef"),
            ABSENT,
            "port is required when kind is 'Service' or unspecified (defaults to 'Service')",
            "add 'port: {number: 9002}', or what port the picker's Service has",
        )


def _dropped_labels(
    document: Any, at: Place, selector: Mapping[str, str]
) -> Iterator[ObjectProblem]:
    """Labels whose null the API server dropped from the selector at `at`: it now takes more Pods
    than its author may think. The annotation of `kubectl apply` still has them.
    """
    applied = _at(document, ("metadata", "annotations", LAST_APPLIED))
    try:
        given: Any = msgspec.json.decode(applied) if isinstance(applied, str) else None
    except (msgspec.DecodeError, RecursionError):
        return
    labels = _at(given, at)
    for key, value in labels.items() if isinstance(labels, dict) else ():
        if value is None and key not in selector:
            text = "was applied without a value and dropped, so the selector takes more Pods"
            yield warning((*at, key), None, text, "write a value, or leave the key out")


def _at(value: Any, place: Place) -> Any:
    for step in place:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _pool(given: InferencePool | LegacyPool) -> Pool:
    picker: PickerReference | None
    if isinstance(given, InferencePool):
        labels, picker = given.spec.selector.match_labels, given.spec.endpoint_picker_ref
        ports = tuple(port.number for port in given.spec.target_ports)
    else:
        labels, picker = given.spec.selector, given.spec.extension_ref
        ports = (given.spec.target_port_number,)
    return Pool(
        name=given.metadata.name,
        namespace=given.metadata.namespace,
        is_deleting=given.metadata.deletion_timestamp is not None,
        selector=MappingProxyType(labels),
        target_ports=ports,
        picker=picker,
    )


# What a picker follows


@dataclass(frozen=True, slots=True)
class PoolName:
    """A pool as other objects refer to it."""

    name: str
    namespace: str
    group: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class ObjectReader:
    """Reads the objects that concern `pool`; owns what was logged about them.

    Warnings are logged once for each state of an object. One that cannot be followed is a
    `MalformedObjectError` that says why; `count_error` is called once for each state too.
    """

    pool: PoolName
    count_error: Callable[[], object]
    _logged: dict[tuple[str, str], str] = field(default_factory=dict)

    def read_pool(self, raw: msgspec.Raw) -> Pool | None:
        """The pool itself; None while it is being deleted, even if it is malformed."""
        document = msgspec.json.decode(raw)
        metadata = _metadata_of(document)
        is_ours = metadata.get("name") == self.pool.name and self._is_here(metadata)
        if not is_ours or metadata.get("deletionTimestamp") is not None:
            return None
        return self._checked(POOL_KIND, metadata, read_pool(document))

    def read_pod(self, raw: msgspec.Raw) -> PodRecord | None:
        """A Pod; None when it is of another namespace.

        A malformed one that is being deleted has no last good state: it must not serve on.
        """
        try:
            record = read_pod(raw)
        except PodError as failure:
            self.count_error()
            metadata = metadata_of(raw)
            ends = metadata is not None and metadata.deletion_timestamp is not None
            raise MalformedObjectError(str(failure), keep_last_good=not ends) from failure
        return record if record.namespace == self.pool.namespace else None

    def read_objective(self, raw: msgspec.Raw) -> Objective | None:
        """An objective; None when it is about another pool."""
        given = self._policy(raw)
        return objective_of(given) if isinstance(given, InferenceObjective) else None

    def read_rewrite(self, raw: msgspec.Raw) -> tuple[RewriteRule, ...] | None:
        """The rules of a rewrite; None when it is about another pool."""
        given = self._policy(raw)
        return rules_of(given) if isinstance(given, InferenceModelRewrite) else None

    def _policy(self, raw: msgspec.Raw) -> PolicyObject | None:
        document = msgspec.json.decode(raw)
        metadata = _metadata_of(document)
        if not self._concerns(document) or not self._is_here(metadata):
            return None
        kind = document["kind"] if isinstance(document.get("kind"), str) else "object"
        return self._checked(kind, metadata, read_policy(document))

    def _is_here(self, metadata: dict[str, Any]) -> bool:
        """Whether an object is of the pool's namespace, as all are that a server was asked for."""
        return bool(metadata.get("namespace", self.pool.namespace) == self.pool.namespace)

    def _concerns(self, document: Any) -> bool:
        """Whether it may be about the pool; problems of other objects are not reported."""
        reference = _at(document, ("spec", "poolRef"))
        if not isinstance(reference, dict):
            return True
        named = (reference.get("name"), reference.get("group", POOL_GROUP))
        return named == (self.pool.name, self.pool.group)

    def _checked(self, kind: str, metadata: dict[str, Any], reading: Reading[V]) -> V | None:
        """The value. Raises `MalformedObjectError` when one of the problems is an error."""
        name, version = str(metadata.get("name")), str(metadata.get("resourceVersion"))
        is_new = self._logged.get((kind, name)) != version
        if is_new:
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged[kind, name] = version
            for one in reading.problems:
                if not one.is_error:
                    log.warning("%s %s/%s: %s", kind, self.pool.namespace, name, one)
        errors = [str(one) for one in reading.problems if one.is_error]
        if errors:
            if is_new:
                self.count_error()
            raise MalformedObjectError("; ".join(errors))
        return reading.value


def _metadata_of(document: Any) -> dict[str, Any]:
    metadata = _at(document, ("metadata",))
    return metadata if isinstance(metadata, dict) else {}
