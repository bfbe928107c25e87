"""Decodes a Pod's JSON into a small record of the fields that the picker needs.

An API server sends about 12 kB for a Pod, thousands of times a second during a rollout, so only the
needed fields are decoded. Recorded kubelets (`tests/data/kubernetes`): a deleted Pod stays ready
during its preStop hook, and a container that was killed for memory restarts under the same IP.
"""

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from ipaddress import ip_address
from types import MappingProxyType
from typing import Final

import msgspec

from picker.pool.object_parts import DEFAULT_NAMESPACE, MAX_PORT

ACTIVE_PORTS: Final = "llm-d.ai/active-ports"
LEGACY_ACTIVE_PORTS: Final = "inference.networking.k8s.io/active-ports"


class PodError(ValueError):
    """The JSON is not a valid Pod; the text says why."""


class Phase(Enum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class ContainerRun(msgspec.Struct, frozen=True):
    """A container; `run` changes with each restart, `ports` are declared and may be incomplete."""

    name: str
    ports: frozenset[int]
    run: str
    has_stopped: bool


class PodRecord(msgspec.Struct, frozen=True):
    """The fields of a Pod that decide whether and how it serves."""

    name: str
    namespace: str
    uid: str
    created: str  # in RFC 3339, so that later times sort later
    phase: Phase
    address: str | None
    is_ready: bool
    is_deleting: bool
    node: str
    node_address: str | None
    is_on_host_network: bool
    labels: Mapping[str, str]
    active_ports: frozenset[int] | None  # None: it does not restrict itself
    containers: tuple[ContainerRun, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    def serving_containers(self, port: int) -> tuple[ContainerRun, ...]:
        """Return the containers that declare `port`, or all if none does."""
        # So that the restart of a sidecar forgets nothing.
        declaring = tuple(one for one in self.containers if port in one.ports)
        return declaring or self.containers

    def incarnation(self, port: int) -> str:
        """Return a text that changes when the server at `port` has lost its state."""
        runs = (f"{one.name}={one.run}" for one in self.serving_containers(port))
        return " ".join((self.uid, *runs))

    def could_serve(self) -> bool:
        """Return whether the Pod could serve as soon as it is ready."""
        is_running = self.phase is Phase.RUNNING and self.address is not None
        return is_running and not self.is_deleting


class _Part(msgspec.Struct, frozen=True, rename="camel", gc=False): ...


class _Metadata(_Part, frozen=True, rename="camel"):
    name: str
    uid: str
    namespace: str = DEFAULT_NAMESPACE
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Port(_Part, frozen=True, rename="camel"):
    container_port: int


class _Container(_Part, frozen=True, rename="camel"):
    name: str
    ports: tuple[_Port, ...] | None = None


class _Spec(_Part, frozen=True, rename="camel"):
    containers: tuple[_Container, ...] | None = None
    node_name: str | None = None
    host_network: bool | None = None


class _Running(_Part, frozen=True, rename="camel"):
    started_at: str | None = None


class _Stopped(_Part, frozen=True, rename="camel"):
    reason: str | None = None


class _State(_Part, frozen=True, rename="camel"):
    running: _Running | None = None
    waiting: _Stopped | None = None
    terminated: _Stopped | None = None


class _ContainerStatus(_Part, frozen=True, rename="camel"):
    name: str
    restart_count: int = 0
    container_id: str | None = msgspec.field(name="containerID", default=None)
    state: _State | None = None


class _Ip(_Part, frozen=True, rename="camel"):
    ip: str | None = None


class _Condition(_Part, frozen=True, rename="camel"):
    type: str
    status: str


class _Status(_Part, frozen=True, rename="camel"):
    phase: str | None = None
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    pod_ips: tuple[_Ip, ...] | None = msgspec.field(name="podIPs", default=None)
    host_ip: str | None = msgspec.field(name="hostIP", default=None)
    conditions: tuple[_Condition, ...] | None = None
    container_statuses: tuple[_ContainerStatus, ...] | None = None


class _Pod(_Part, frozen=True, rename="camel"):
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()


_DECODER: Final = msgspec.json.Decoder(_Pod)
_PHASES: Final[Mapping[str | None, Phase]] = {phase.value: phase for phase in Phase}
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_NO_STATE: Final = _State()
_NO_STATUS: Final = _ContainerStatus(name="")


def read_pod(document: msgspec.Raw | bytes) -> PodRecord:
    """Decode a Pod. Raises `PodError`."""
    try:
        pod = _DECODER.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PodError(str(error)) from error
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    if not metadata.name or not metadata.uid:
        raise PodError("it has no name or no uid")
    return PodRecord(
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        created=metadata.creation_timestamp or "",
        phase=_PHASES.get(status.phase, Phase.UNKNOWN),
        address=_address(status),
        is_ready=_is_ready(status),
        is_deleting=metadata.deletion_timestamp is not None,
        node=spec.node_name or "",
        node_address=status.host_ip or None,
        is_on_host_network=bool(spec.host_network),
        labels=MappingProxyType(metadata.labels) if metadata.labels else _NO_LABELS,
        active_ports=_active_ports(metadata.annotations),
        containers=_containers(spec, status),
    )


def _address(status: _Status) -> str | None:
    text = status.pod_ip or next((one.ip for one in status.pod_ips or () if one.ip), None)
    return None if text is None else _canonical(text)


@lru_cache(maxsize=8192)  # all states of a Pod have the same address
def _canonical(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError as error:
        raise PodError(f"its IP {text[:60]!r} is invalid") from error


def _is_ready(status: _Status) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())


def _active_ports(annotations: dict[str, str] | None) -> frozenset[int] | None:
    if not annotations:
        return None
    text = annotations.get(ACTIVE_PORTS, annotations.get(LEGACY_ACTIVE_PORTS))
    if text is None:
        return None
    words = (word.strip() for word in text.split(","))
    numbers = (int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 6)
    return frozenset(number for number in numbers if 1 <= number <= MAX_PORT)


def _containers(spec: _Spec, status: _Status) -> tuple[ContainerRun, ...]:
    statuses = {one.name: one for one in status.container_statuses or ()}
    return tuple(
        _container(one, statuses.get(one.name, _NO_STATUS)) for one in spec.containers or ()
    )


def _container(given: _Container, status: _ContainerStatus) -> ContainerRun:
    state = status.state or _NO_STATE
    begun = status.container_id or ("" if state.running is None else state.running.started_at) or ""
    return ContainerRun(
        name=given.name,
        ports=frozenset(port.container_port for port in given.ports or ()),
        run=f"{status.restart_count}/{begun}",
        has_stopped=state.waiting is not None or state.terminated is not None,
    )
