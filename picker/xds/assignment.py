"""Which endpoints a proxy can be told of, and where each of them stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from picker.types import Endpoint

REGION_LABEL = "topology.kubernetes.io/region"
ZONE_LABEL = "topology.kubernetes.io/zone"
RACK_LABEL = "topology.kubernetes.io/rack"


@dataclass(frozen=True, slots=True)
class Locality:
    """Where an endpoint stands, as Envoy divides it; "" where its labels say nothing."""

    region: str = ""
    zone: str = ""
    sub_zone: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The endpoints of `cluster` by where they stand, in an order that depends on nothing else.

    `skipped` are the keys of those that a proxy cannot be told of.
    """

    cluster: str
    localities: tuple[tuple[Locality, tuple[Endpoint, ...]], ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many endpoints it names."""
        return sum(len(endpoints) for _, endpoints in self.localities)


def assignment_of(cluster: str, endpoints: Iterable[Endpoint]) -> Assignment:
    """What to tell of `endpoints`.

    Envoy refuses a whole assignment for one address that is a name and not an IP address, or has a
    zone (`fe80::1%eth0`), so such an endpoint is left out. Of several endpoints at one address the
    first one stands for all.
    """
    by_place: dict[tuple[str, ...], list[Endpoint]] = {}
    skipped: list[str] = []
    taken: set[str] = set()
    for endpoint in sorted(endpoints, key=lambda one: one.key):
        if not _is_ip(endpoint.address):
            skipped.append(endpoint.key)
        elif endpoint.host_port not in taken:
            taken.add(endpoint.host_port)
            by_place.setdefault(_place(endpoint), []).append(endpoint)
    localities = tuple((Locality(*place), tuple(by_place[place])) for place in sorted(by_place))
    return Assignment(cluster, localities, tuple(skipped))


def _place(endpoint: Endpoint) -> tuple[str, ...]:
    label = endpoint.labels.get
    return label(REGION_LABEL, ""), label(ZONE_LABEL, ""), label(RACK_LABEL, "")


@lru_cache(maxsize=8192)
def _is_ip(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return "%" not in address
