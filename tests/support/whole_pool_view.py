"""The endpoints of a pool worked out from all of its Pods at every look.

`PoolView`, which looks at what has changed, is compared with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from picker.k8s.pods import Phase, PodRecord
from picker.k8s.pool_view import (
    GATHER_SECONDS,
    HOLD_SECONDS,
    MIN_FLICKERING,
    PodKey,
    PoolShape,
)
from picker.types import Endpoint

_ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class WholeView:
    """The endpoints at one moment, and when they may change though nothing is heard (None: never
    then); that is on the clock of the caller.
    """

    endpoints: tuple[Endpoint, ...]
    next_due: float | None


@dataclass(slots=True)
class _Serving:
    """A Pod that serves, or flickers since `since` and is kept `until`."""

    record: PodRecord
    endpoints: tuple[Endpoint, ...]
    since: float | None = None
    until: float = 0.0


@dataclass(slots=True)
class WholePoolView:
    """Owns what is known of the Pods of one selection; all methods are synchronous."""

    shape: PoolShape
    _records: dict[PodKey, PodRecord] = field(default_factory=dict)
    _serving: dict[PodKey, _Serving] = field(default_factory=dict)
    _claims: dict[str, set[PodKey]] = field(default_factory=dict)
    _contested: set[str] = field(default_factory=set)

    @property
    def records(self) -> Mapping[PodKey, PodRecord]:
        """The last state of every Pod."""
        return self._records

    def put(self, record: PodRecord, now: float) -> bool:
        """A Pod is there, or has changed; whether that could make a difference."""
        before = self._records.get(record.key)
        if before is record or before == record:
            return False
        if before is not None:
            self._unclaim(before)
        self._records[record.key] = record
        self._claim(record)
        self._judge(record, now)
        return True

    def remove(self, key: PodKey) -> bool:
        """A Pod is gone; whether it was known."""
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._unclaim(record)
        self._serving.pop(key, None)
        return True

    def replace(self, records: Mapping[PodKey, PodRecord], now: float) -> None:
        """These are all Pods. Most of them are those of before, which costs little."""
        known = self._records
        for key in [key for key in known if key not in records]:
            self.remove(key)
        for record in [one for key, one in records.items() if known.get(key) is not one]:
            self.put(record, now)

    def use(self, shape: PoolShape, now: float) -> None:
        """Go by other labels or ports from now on."""
        self.shape = shape
        for record in self._records.values():
            self._judge(record, now)

    def look(self, now: float, *, is_current: bool = True) -> WholeView:
        """The endpoints now. Unless what is known `is_current`, no time runs out for a node or for
        the pool: that they are well again could not be heard.
        """
        flickering = [one for one in self._serving.values() if one.since is not None]
        if flickering:
            self._settle(flickering, now, is_current=is_current)
        kept = list(self._serving.values())
        if self._contested:
            kept = [one for one in kept if self._has_address(one.record)]
        endpoints = tuple(chain.from_iterable(one.endpoints for one in kept))
        if any(one.record.is_on_host_network for one in kept):
            endpoints = tuple(_one_for_each_port(kept))
        dues = [one.until for one in self._serving.values() if one.since is not None]
        return WholeView(endpoints, min(dues, default=None))

    # One Pod

    def _judge(self, record: PodRecord, now: float) -> None:
        """Whether a Pod serves, by its own state."""
        key = record.key
        before = self._serving.get(key)
        if not record.could_serve() or not self.shape.selects(record.labels):
            self._serving.pop(key, None)
            return
        endpoints = self._endpoints(record)
        if before is not None and before.endpoints == endpoints:
            endpoints = before.endpoints  # the same objects, which are quicker to compare
        if record.is_ready:
            self._serving[key] = _Serving(record, endpoints)
        elif before is not None and self._only_lost_readiness(before, record, endpoints):
            if before.since is None:
                before.since = before.until = now
            before.record, before.endpoints = record, endpoints
        else:
            self._serving.pop(key, None)

    def _only_lost_readiness(
        self, before: _Serving, record: PodRecord, endpoints: tuple[Endpoint, ...]
    ) -> bool:
        """Whether the same servers still run there."""
        ports = self.shape.ports
        runs = (run for port in ports for run in record.serving_containers(port))
        return (
            len(endpoints) == len(before.endpoints)
            and all(map(Endpoint.is_same_server, endpoints, before.endpoints))
            and not any(run.has_stopped for run in runs)
        )

    def _endpoints(self, record: PodRecord) -> tuple[Endpoint, ...]:
        """One for each port that is active."""
        return tuple(
            Endpoint(
                name=f"{record.name}-rank-{rank}",
                address=record.address or "",
                port=port,
                namespace=record.namespace,
                labels=record.labels,
                rank_index=rank,
                node_address=record.node_address,
                incarnation=record.incarnation(port),
            )
            for rank, port in enumerate(self.shape.ports)
            if record.active_ports is None or port in record.active_ports
        )

    # Pods together

    def _settle(self, flickering: Iterable[_Serving], now: float, *, is_current: bool) -> None:
        """Find out for how long each is kept, and drop those whose time is over."""
        on_node = Counter(one.record.node for one in self._serving.values())
        unready = Counter(one.record.node for one in flickering)
        is_pool = all(one.since is not None for one in self._serving.values())
        for one in flickering:
            since, node = one.since or 0.0, one.record.node
            is_node = unready[node] >= max(MIN_FLICKERING, on_node[node] / 2)
            if is_node or is_pool:
                one.until = max(one.until, (since if is_current else now) + HOLD_SECONDS)
            elif on_node[node] > 1:
                one.until = max(one.until, since + GATHER_SECONDS)
        for one in flickering:
            if one.until <= now:
                del self._serving[one.record.key]

    def _claim(self, record: PodRecord) -> None:
        if record.address is None or record.phase in _ENDED or record.is_on_host_network:
            return
        claims = self._claims.setdefault(record.address, set())
        claims.add(record.key)
        if len(claims) > 1:
            self._contested.add(record.address)

    def _unclaim(self, record: PodRecord) -> None:
        claims = self._claims.get(record.address or "")
        if claims is None:
            return
        claims.discard(record.key)
        if len(claims) < 2:
            self._contested.discard(record.address or "")
        if not claims:
            del self._claims[record.address or ""]

    def _has_address(self, record: PodRecord) -> bool:
        """Whether no newer Pod has its IP."""
        if record.is_on_host_network or record.address not in self._contested:
            return True
        claims = self._claims[record.address]
        return record.key == max(claims, key=lambda key: _age(self._records[key]))


def _age(record: PodRecord) -> tuple[str, str]:
    """Newer Pods sort later."""
    return record.created, record.uid


def _one_for_each_port(kept: Iterable[_Serving]) -> Iterator[Endpoint]:
    """The endpoints without those whose address and port a newer Pod has."""
    owners: dict[str, tuple[str, str]] = {}
    for one in kept:
        for endpoint in one.endpoints:
            age = _age(one.record)
            if age >= owners.get(endpoint.host_port, age):
                owners[endpoint.host_port] = age
    for one in kept:
        for endpoint in one.endpoints:
            if owners[endpoint.host_port] == _age(one.record):
                yield endpoint
