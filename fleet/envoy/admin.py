"""A running Envoy, as its admin port reports and controls it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from fleet.envoy import probe
from fleet.envoy.settings import Address, PipeAddress, SocketAddress

# Requests that continued without the picker's answer, and responses that it has not seen.
WITHOUT_PICKER = "http.ingress.ext_proc.failure_mode_allowed"
ACTIVE = "http.ingress.downstream_rq_active"
COMPLETED = "http.ingress.downstream_rq_completed"
FAILED = "http.ingress.downstream_rq_5xx"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    is_healthy: bool
    active: int


class _Stat(msgspec.Struct, frozen=True):
    name: str = ""
    value: int | str = 0  # a text of a cluster's endpoint


class _Stats(msgspec.Struct, frozen=True):
    stats: tuple[_Stat, ...]


class _Socket(msgspec.Struct, frozen=True):
    address: str
    port_value: int


class _Pipe(msgspec.Struct, frozen=True):
    path: str


class _Address(msgspec.Struct, frozen=True):
    socket_address: _Socket | None = None
    pipe: _Pipe | None = None


class _Host(msgspec.Struct, frozen=True):
    address: _Address
    health_status: Mapping[str, object]
    stats: tuple[_Stat, ...] = ()


class _Cluster(msgspec.Struct, frozen=True):
    name: str
    host_statuses: tuple[_Host, ...] = ()


class _Clusters(msgspec.Struct, frozen=True):
    cluster_statuses: tuple[_Cluster, ...]  # required: every endpoint has statistics


async def stats(admin: Address, names: Iterable[str]) -> dict[str, int]:
    page = f"/stats?format=json&filter=^({'|'.join(names)})$"
    found = _decoded(await probe.request(admin, page), _Stats)
    return {one.name: int(one.value) for one in found.stats if one.name}


async def hosts(admin: Address, cluster: str) -> dict[Address, Host]:
    found = _decoded(await probe.request(admin, "/clusters?format=json"), _Clusters)
    return {
        _address(host.address): _seen(host)
        for one in found.cluster_statuses
        if one.name == cluster
        for host in one.host_statuses
    }


def _address(shown: _Address) -> Address:
    if shown.socket_address is not None:
        return SocketAddress(shown.socket_address.address, shown.socket_address.port_value)
    return PipeAddress("" if shown.pipe is None else shown.pipe.path)


def _seen(host: _Host) -> Host:
    # Every failure of an endpoint is a field of its own, beside the health from discovery.
    ailments = {name for name, value in host.health_status.items() if value is True}
    active = next((int(one.value) for one in host.stats if one.name == "rq_active"), 0)
    return Host(not ailments, active)


async def drain(admin: Address) -> None:
    """End each connection with its next answer, and accept no new ones. Raises `NoReplyError`."""
    # Ends each connection with its next answer, which draining listeners alone does not.
    await probe.request(admin, "/healthcheck/fail", "POST")
    await probe.request(admin, "/drain_listeners", "POST")


def _decoded(reply: probe.ProbeReply, kind: type[T]) -> T:
    if reply.status != 200:
        raise probe.NoReplyError(f"status {reply.status}")
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise probe.NoReplyError(str(error)) from error
