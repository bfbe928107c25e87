"""The endpoints that can be published to a proxy, by locality."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address

from picker.types import Endpoint

REGION_LABEL = "topology.kubernetes.io/region"
ZONE_LABEL = "topology.kubernetes.io/zone"
RACK_LABEL = "topology.kubernetes.io/rack"


@dataclass(frozen=True, slots=True)
class Locality:
    region: str = ""
    zone: str = ""
    sub_zone: str = ""


class Assignment:
    """The endpoints of `cluster` by locality, in a deterministic order.

    Envoy rejects a whole assignment if one address is a host name or has a zone
    (`fe80::1%eth0`), so such an endpoint is `skipped`; every other one is encoded once.
    """

    def __init__(self, cluster: str, encode: Callable[[Endpoint], bytes]) -> None:
        self.cluster, self._encode = cluster, encode
        self.skipped: set[str] = set()  # keys
        self._known: dict[str, Endpoint] = {}
        self._at: dict[str, list[Endpoint]] = {}  # by address and port, sorted by key
        self._places: dict[tuple[str, ...], _Place] = {}

    @property
    def size(self) -> int:
        return len(self._at)

    @property
    def places(self) -> Iterator[tuple[Locality, Sequence[bytes]]]:
        """The localities in order, each with its encoded endpoints."""
        for place in sorted(self._places):
            yield Locality(*place), self._places[place].pieces

    def put(self, endpoint: Endpoint) -> None:
        self.remove(endpoint.key)
        self._known[endpoint.key] = endpoint
        if not _is_ip(endpoint.address):
            self.skipped.add(endpoint.key)
            return
        there = self._at.setdefault(endpoint.host_port, [])
        before = there[0] if there else None
        insort(there, endpoint, key=_key)
        if there[0] is not before:
            if before is not None:
                self._hide(before)
            self._show(endpoint)

    def remove(self, key: str) -> None:
        endpoint = self._known.pop(key, None)
        if endpoint is None:
            return
        if key in self.skipped:
            self.skipped.remove(key)
            return
        there = self._at[endpoint.host_port]
        is_shown = there[0] is endpoint
        del there[bisect_left(there, key, key=_key)]
        if is_shown:
            self._hide(endpoint)
            if there:
                self._show(there[0])
        if not there:
            del self._at[endpoint.host_port]

    def _show(self, endpoint: Endpoint) -> None:
        place = self._places.setdefault(_place(endpoint), _Place())
        index = bisect_left(place.keys, endpoint.key)
        place.keys.insert(index, endpoint.key)
        place.pieces.insert(index, self._encode(endpoint))

    def _hide(self, endpoint: Endpoint) -> None:
        place = self._places[_place(endpoint)]
        index = bisect_left(place.keys, endpoint.key)
        del place.keys[index], place.pieces[index]
        if not place.keys:
            del self._places[_place(endpoint)]


@dataclass(slots=True)
class _Place:
    """The endpoints of a locality: sorted keys, and the bytes of each."""

    keys: list[str] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)


def _key(endpoint: Endpoint) -> str:
    return endpoint.key


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
