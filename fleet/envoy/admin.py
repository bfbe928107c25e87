"""A running Envoy, by what it says and does at its admin port."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fleet import probe
from fleet.envoy.settings import Address, SocketAddress

# Requests that went on without the picker's answer, or responses without its look at them.
WITHOUT_PICKER = "http.ingress.ext_proc.failure_mode_allowed"
ACTIVE = "http.ingress.downstream_rq_active"
COMPLETED = "http.ingress.downstream_rq_completed"
FAILED = "http.ingress.downstream_rq_5xx"
# Connections, idle ones included, that the Envoy before this one still has.
OF_PREDECESSOR = "server.parent_connections"


@dataclass(frozen=True, slots=True)
class Host:
    """An endpoint as Envoy sees it; `active` requests are under way there."""

    healthy: bool
    active: int


class _Stat(msgspec.Struct, frozen=True):
    name: str = ""
    value: int = 0


class _Stats(msgspec.Struct, frozen=True):
    stats: tuple[_Stat, ...]


class _Socket(msgspec.Struct, frozen=True):
    address: str
    port_value: int


class _Address(msgspec.Struct, frozen=True):
    socket_address: _Socket


class _HostStatus(msgspec.Struct, frozen=True):
    address: _Address
    stats: tuple[_Stat, ...] = ()
    health_status: dict[str, object] = {}


class _ClusterStatus(msgspec.Struct, frozen=True):
    name: str
    host_statuses: tuple[_HostStatus, ...] = ()


class _Clusters(msgspec.Struct, frozen=True):
    cluster_statuses: tuple[_ClusterStatus, ...]


class _HostStat(msgspec.Struct, frozen=True):
    name: str = ""
    value: str = "0"
