"""Reads a cluster's InferencePools and policy objects, and finds everything wrong in them.

The structs follow the definitions under `crds/`; objects of the legacy group are read where a
cluster has them. A server also returns objects that break its current schema: an object with an
error is not followed, and no other object suffers. Selectors are stricter than the definitions:
they need a label, valid keys and no null.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from picker.config.decode import decode
from picker.config.findings import Finding, Findings, Path, Severity
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
S = TypeVar("S", bound=msgspec.Struct)
MAX_PROBLEMS: Final = 50  # reported of one object, which may be large
MAX_LOGGED: Final = 10_000  # states of objects that are remembered; then they are logged again
DEFAULT_LEGACY_PORT: Final = 9002
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
# Not read: other metadata and the status, which others write.
_READ_METADATA: Final = ("name", "namespace", "creationTimestamp", "deletionTimestamp")

# Structs of InferencePools

_LABEL_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
_PREFIX = r"(?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
_LABEL_KEY: Final = re.compile(rf"({_PREFIX})?{_LABEL_NAME}")
LabelValue: TypeAlias = Annotated[
    str, Meta(max_length=63, pattern=rf"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?{END}")
]
AppProtocol: TypeAlias = Literal["http", "kubernetes.io/h2c"]
FailureMode: TypeAlias = Literal["FailOpen", "FailClose"]


class PoolSelector(Part, frozen=True, kw_only=True):
    """The labels of the pool's Pods, in its own namespace; a Pod must have all of them."""

    match_labels: Annotated[dict[str, LabelValue], Meta(min_length=1, max_length=64)]


class Port(Part, frozen=True, kw_only=True):
    number: PortNumber


class _Reference(Part, frozen=True, kw_only=True):
    group: GroupName = ""
    kind: KindName = "Service"
    name: ReferentName
    failure_mode: FailureMode = "FailClose"


class EndpointPickerReference(_Reference, frozen=True, kw_only=True):
    port: Port | None = None

    @property
    def service_port(self) -> int | None:
        return None if self.port is None else self.port.number


class InferencePoolSpec(Part, frozen=True, kw_only=True):
    selector: PoolSelector
    target_ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=MAX_TARGET_PORTS)]
    app_protocol: AppProtocol = "http"
    endpoint_picker_ref: EndpointPickerReference | None = None


class InferencePool(Part, frozen=True, kw_only=True):
    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: InferencePoolSpec


class ExtensionReference(_Reference, frozen=True, kw_only=True):
    port_number: PortNumber | None = None

    @property
    def service_port(self) -> int | None:
        return self.port_number or (DEFAULT_LEGACY_PORT if self.kind == "Service" else None)


class LegacyPoolSpec(Part, frozen=True, kw_only=True):
    selector: Annotated[dict[str, LabelValue], Meta(min_length=1)]
    target_port_number: PortNumber
    extension_ref: ExtensionReference


class LegacyPool(Part, frozen=True, kw_only=True):
    api_version: str
    kind: Literal["InferencePool"]
    metadata: ObjectMeta
    spec: LegacyPoolSpec


# Values

PickerReference: TypeAlias = EndpointPickerReference | ExtensionReference


@dataclass(frozen=True, slots=True)
class Pool:
    """An InferencePool; each of the 1 to 8 `target_ports` is an endpoint on every Pod."""

    name: str
    namespace: str
    is_deleting: bool
    selector: Mapping[str, str]
    target_ports: tuple[int, ...]
    picker: PickerReference | None

    def selects(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.selector.items())

    @property
    def label_selector(self) -> str:
        """The value of the parameter `labelSelector` for a list or a watch."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.selector.items()))


@dataclass(frozen=True, slots=True)
class Reading(Generic[V]):
    """An object as a value, None if one of `problems` is an error; errors come first."""

    value: V | None
    problems: tuple[Finding, ...] = ()


# From documents to values

_Shapes: TypeAlias = Mapping[tuple[str, str], type[S]]
_POOLS: Final[_Shapes[InferencePool | LegacyPool]] = {
    (f"{POOL_GROUP}/v1", POOL_KIND): InferencePool,
    (LEGACY_API_VERSION, POOL_KIND): LegacyPool,
}
_POLICIES: Final[_Shapes[PolicyObject]] = {
    **{(API_VERSION, kind): shape for kind, shape in KINDS.items()},
    (LEGACY_API_VERSION, "InferenceObjective"): InferenceObjective,
    (LEGACY_API_VERSION, "InferenceModelRewrite"): LegacyModelRewrite,
}


def read_pool(document: Any) -> Reading[Pool]:
    """Read an InferencePool, of the current group or of the legacy one."""
    findings = Findings(None, MAX_PROBLEMS)
    given = _read(document, _POOLS, findings)
    if given is None:
        return _reading(None, findings)
    pool = _pool(given)
    at: Path = ("spec", "selector")
    if isinstance(given, InferencePool):
        at = (*at, "matchLabels")
        _check_pool(given.spec, findings)
    for key in pool.selector:
        if not _LABEL_KEY.fullmatch(key):
            text = "is no label key: at most 63 letters, digits, '-', '_' and '.' that begin and "
            text += "end with a letter or digit, after a DNS name and '/' if there is one"
            findings.error((*at, key), text)
    for key in _dropped_labels(document, at, pool.selector):
        text = "was applied without a value and dropped, so the selector takes more Pods; write a "
        findings.warn((*at, key), f"{text}value, or leave the key out")
    return _reading(pool, findings)


def read_policy(document: Any) -> Reading[PolicyObject]:
    """Read an InferenceObjective or InferenceModelRewrite; parts without effect give warnings."""
    findings = Findings(None, MAX_PROBLEMS)
    given = _read(document, _POLICIES, findings)
    for doubt in () if given is None else doubts_about(given):
        findings.warn(doubt.path, doubt.text)
    return _reading(given, findings)


def _read(document: Any, shapes: _Shapes[S], findings: Findings) -> S | None:
    if not isinstance(document, dict):
        findings.error((), "expected an object of Kubernetes")
        return None
    version, kind = document.get("apiVersion"), document.get("kind")
    shape = next((found for key, found in shapes.items() if key == (version, kind)), None)
    if shape is None:
        kinds, versions = {kind for _, kind in shapes}, [one for one, of in shapes if of == kind]
        key, allowed = ("apiVersion", versions) if versions else ("kind", sorted(kinds))
        findings.error((key,), "is not known here", allowed)
        return None
    metadata = document.get("metadata")
    read = metadata if isinstance(metadata, dict) else {}
    given = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {key: read[key] for key in _READ_METADATA if key in read},
        "spec": document.get("spec"),
    }
    return decode(given, shape, (), findings, allow_unknown=True)


def _reading(value: V | None, findings: Findings) -> Reading[V]:
    problems = sorted(findings, key=lambda one: one.severity is not Severity.ERROR)
    return Reading(None if findings.has_errors else value, tuple(problems))


def _check_pool(spec: InferencePoolSpec, findings: Findings) -> None:
    """Check the rules that the definition states in CEL."""
    numbers = [port.number for port in spec.target_ports]
    if len(numbers) > len(set(numbers)):
        findings.error(("spec", "targetPorts"), "port number must be unique; name each port once")
    reference = spec.endpoint_picker_ref
    if reference is not None and reference.kind == "Service" and reference.port is None:
        text = "port is required when kind is 'Service' or unspecified (defaults to 'Service'); "
        text += "add 'port: {number: 9002}', or the port of the picker's Service"
        findings.error(("spec", "endpointPickerRef"), text)


def _dropped_labels(document: Any, at: Path, selector: Mapping[str, str]) -> Iterator[str]:
    """Yield the labels that the server dropped as null: the selector takes more Pods than meant."""
    applied = _at(document, ("metadata", "annotations", LAST_APPLIED))
    try:
        given: Any = msgspec.json.decode(applied) if isinstance(applied, str) else None
    except (msgspec.DecodeError, RecursionError):
        return
    labels = _at(given, at)
    for key, value in labels.items() if isinstance(labels, dict) else ():
        if value is None and key not in selector:
            yield key


def _at(value: Any, path: Path) -> Any:
    for step in path:
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
    """Decodes the objects that concern `pool`; logs and counts problems once per version."""

    pool: PoolName
    count_error: Callable[[], object]
    _logged: dict[tuple[str, str], str] = field(default_factory=dict)

    def read_pool(self, raw: msgspec.Raw) -> Pool | None:
        """Return the pool; None while it is being deleted, even if it is malformed."""
        document = msgspec.json.decode(raw)
        metadata = _metadata_of(document)
        is_ours = metadata.get("name") == self.pool.name and self._is_here(metadata)
        if not is_ours or metadata.get("deletionTimestamp") is not None:
            return None
        return self._checked(POOL_KIND, metadata, read_pool(document))

    def read_pod(self, raw: msgspec.Raw) -> PodRecord | None:
        """Return the Pod; None if it is in another namespace."""
        try:
            record = read_pod(raw)
        except PodError as failure:
            self.count_error()
            metadata = metadata_of(raw)
            # A Pod that is being deleted must not serve any more, in its last good state either.
            ends = metadata is not None and metadata.deletion_timestamp is not None
            raise MalformedObjectError(str(failure), keep_last_good=not ends) from failure
        return record if record.namespace == self.pool.namespace else None

    def read_objective(self, raw: msgspec.Raw) -> Objective | None:
        given = self._policy(raw)
        return objective_of(given) if isinstance(given, InferenceObjective) else None

    def read_rewrite(self, raw: msgspec.Raw) -> tuple[RewriteRule, ...] | None:
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
        return bool(metadata.get("namespace", self.pool.namespace) == self.pool.namespace)

    def _concerns(self, document: Any) -> bool:
        """Return whether an object may refer to the pool; problems of others are not reported."""
        reference = _at(document, ("spec", "poolRef"))
        if not isinstance(reference, dict):
            return True
        named = (reference.get("name"), reference.get("group", POOL_GROUP))
        return named == (self.pool.name, self.pool.group)

    def _checked(self, kind: str, metadata: dict[str, Any], reading: Reading[V]) -> V | None:
        name, version = str(metadata.get("name")), str(metadata.get("resourceVersion"))
        is_new = self._logged.get((kind, name)) != version
        if is_new:
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged[kind, name] = version
            for one in reading.problems:
                if one.severity is not Severity.ERROR:
                    log.warning("%s %s/%s: %s", kind, self.pool.namespace, name, one.text)
        errors = [one.text for one in reading.problems if one.severity is Severity.ERROR]
        if errors:
            if is_new:
                self.count_error()
            raise MalformedObjectError("; ".join(errors))
        return reading.value


def _metadata_of(document: Any) -> dict[str, Any]:
    metadata = _at(document, ("metadata",))
    return metadata if isinstance(metadata, dict) else {}
