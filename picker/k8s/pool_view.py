"""The endpoints of a pool, derived from its Pods.

A Pod that served and has lost nothing but its readiness *flickers*: a restarted kubelet reports all
Pods of its node as not ready for a moment. It stays an endpoint for `GATHER_SECONDS` if other Pods
of the pool are on its node, and for `HOLD_SECONDS` if half of these flicker too or no Pod of the
pool serves (docs/decisions/0029).

If two Pods have one IP, the newer one owns it, because the older one is known only if its end was
missed. Pods on the host network share an IP: there a port belongs to the Pod that names it, because
the scheduler separates declared ports; else to a Pod that declares none of the pool's ports; else
to any Pod. Among equal claims the newest serving Pod wins, and the others are reported (`Contest`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias

from picker.k8s.pods import Phase, PodRecord
from picker.types import Endpoint

GATHER_SECONDS: Final = 0.3  # in a recorded restart, 274 ms lie between a node's first and last Pod
HOLD_SECONDS: Final = 1.0  # a restarted kubelet needs 50 to 460 ms for the Pods of a node
MIN_FLICKERING: Final = 2  # Pods of a node that make the node the cause

PodKey: TypeAlias = tuple[str, str]
_DECLARES_OTHERS, _DECLARES_NONE, _NAMED = range(3)  # claims to a port, the strongest last
_ENDED: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED})


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The labels of a pool's Pods (`selector` is for an API server), and the ports of each Pod."""

    selector: str
    selects: Callable[[Mapping[str, str]], bool]
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contest:
    """Two serving Pods that claim the same ports of an IP; `winner` has them."""

    address: str
    ports: tuple[int, ...]
    winner: PodKey
    loser: PodKey


@dataclass(frozen=True, slots=True)
class View:
    """The changes since the last look; `next_due` is when to look again even without an event."""

    changed: tuple[Endpoint, ...]
    gone: tuple[str, ...]
    next_due: float | None
    contests: tuple[Contest, ...] = ()


@dataclass(slots=True)
class _Serving:
    """A Pod that serves, or has flickered since `since` and stays an endpoint until `until`."""

    record: PodRecord
    endpoints: tuple[Endpoint, ...]
    since: float | None = None
    until: float = 0.0


@dataclass(slots=True)
class PoolView:
    """Owns the state of the Pods of one selection; all methods are synchronous."""

    shape: PoolShape
    _records: dict[PodKey, PodRecord] = field(default_factory=dict)
    _serving: dict[PodKey, _Serving] = field(default_factory=dict)
    _flickering: dict[PodKey, _Serving] = field(default_factory=dict)  # a part of `_serving`
    _on_node: Counter[str] = field(default_factory=Counter)  # the number of serving Pods
    # The Pods that have or may have an IP. Dicts, because the order of sets differs in each run.
    _at: dict[str, dict[PodKey, None]] = field(default_factory=dict)
    _touched: dict[PodKey, None] = field(default_factory=dict)  # since the last look
    _touched_ips: dict[str, None] = field(default_factory=dict)
    _shown: dict[PodKey, tuple[Endpoint, ...]] = field(default_factory=dict)
    _contests: dict[str, dict[Contest, None]] = field(default_factory=dict)  # reported, by IP
    _new_contests: list[Contest] = field(default_factory=list)

    @property
    def records(self) -> Mapping[PodKey, PodRecord]:
        return self._records

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(chain.from_iterable(self._shown.values()))

    def put(self, record: PodRecord, now: float) -> bool:
        """Add or replace a Pod; return whether its record changed."""
        before = self._records.get(record.key)
        if before is record or before == record:
            return False
        if before is not None:
            self._unclaim(before)
        self._records[record.key] = record
        self._claim(record)
        self._classify(record, now)
        return True

    def remove(self, key: PodKey) -> bool:
        """Remove a Pod; return whether it was known."""
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._unclaim(record)
        self._stop(key)
        return True

    def replace(self, records: Mapping[PodKey, PodRecord], now: float) -> None:
        self.update(records, [*(key for key in self._records if key not in records), *records], now)

    def update(
        self, records: Mapping[PodKey, PodRecord], changed: Collection[PodKey], now: float
    ) -> None:
        """Set all Pods, which equal the last ones except for `changed`."""
        arrived = []
        for key in changed:
            record = records.get(key)
            if record is None:
                self.remove(key)
            else:
                arrived.append(record)
        for record in arrived:
            self.put(record, now)

    def use(self, shape: PoolShape, now: float) -> None:
        self.shape = shape
        for record in self._records.values():
            self._touch(record)
            self._classify(record, now)

    def look(self, now: float, *, is_current: bool = True) -> View:
        """Return the changes since the last look. Unless `is_current`, no flicker expires where
        half a node's Pods flicker, or all of the pool's.
        """
        if self._flickering:
            self._expire_flickers(now, is_current=is_current)
        changed: list[Endpoint] = []
        gone: list[str] = []
        for key, endpoints in self._fresh().items():
            before = self._shown.pop(key, ())
            if endpoints:
                self._shown[key] = endpoints
            if endpoints is not before:
                changed += [one for one in endpoints if one not in before]
                keys = {one.key for one in endpoints}
                gone += [one.key for one in before if one.key not in keys]
        due = min((one.until for one in self._flickering.values()), default=None)
        contests, self._new_contests = tuple(self._new_contests), []
        return View(tuple(changed), tuple(gone), due, contests)

    # One Pod

    def _classify(self, record: PodRecord, now: float) -> None:
        key = record.key
        before = self._serving.get(key)
        if not record.could_serve() or not self.shape.selects(record.labels):
            self._stop(key)
            return
        endpoints = self._endpoints(record)
        if before is not None and before.endpoints == endpoints:
            endpoints = before.endpoints  # the same objects compare faster
        if record.is_ready:
            self._serve(_Serving(record, endpoints))
        elif before is not None and self._only_lost_readiness(before, record, endpoints):
            is_new = before.since is None
            since, until = (now, now) if is_new else (before.since, before.until)
            self._serve(_Serving(record, endpoints, since, until))
        else:
            self._stop(key)

    def _serve(self, one: _Serving) -> None:
        key = one.record.key
        self._stop(key)
        self._serving[key] = one
        self._on_node[one.record.node] += 1
        if one.since is not None:
            self._flickering[key] = one

    def _stop(self, key: PodKey) -> None:
        before = self._serving.pop(key, None)
        if before is None:
            return
        self._flickering.pop(key, None)
        node = before.record.node
        self._on_node[node] -= 1
        if not self._on_node[node]:
            del self._on_node[node]
        self._touch(before.record)

    def _only_lost_readiness(
        self, before: _Serving, record: PodRecord, endpoints: tuple[Endpoint, ...]
    ) -> bool:
        ports = self.shape.ports
        runs = (run for port in ports for run in record.serving_containers(port))
        return (
            len(endpoints) == len(before.endpoints)
            and all(map(Endpoint.is_same_server, endpoints, before.endpoints))
            and not any(run.has_stopped for run in runs)
        )

    def _endpoints(self, record: PodRecord) -> tuple[Endpoint, ...]:
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

    def _expire_flickers(self, now: float, *, is_current: bool) -> None:
        flickering = list(self._flickering.values())
        unready = Counter(one.record.node for one in flickering)
        is_pool = len(flickering) == len(self._serving)
        for one in flickering:
            since, node = one.since or 0.0, one.record.node
            is_node = unready[node] >= max(MIN_FLICKERING, self._on_node[node] / 2)
            if is_node or is_pool:
                # While the records are outdated, the end of a flicker cannot be received.
                one.until = max(one.until, (since if is_current else now) + HOLD_SECONDS)
            elif self._on_node[node] > 1:
                one.until = max(one.until, since + GATHER_SECONDS)
        for one in flickering:
            if one.until <= now:
                self._stop(one.record.key)

    def _touch(self, record: PodRecord) -> None:
        self._touched[record.key] = None
        if record.address is not None:
            self._touched_ips[record.address] = None

    def _claim(self, record: PodRecord) -> None:
        self._touch(record)
        if record.address is not None and record.phase not in _ENDED:
            self._at.setdefault(record.address, {})[record.key] = None

    def _unclaim(self, record: PodRecord) -> None:
        self._touch(record)
        there = self._at.get(record.address or "")
        if there is not None:
            there.pop(record.key, None)
            if not there:
                del self._at[record.address or ""]
                self._contests.pop(record.address or "", None)

    def _fresh(self) -> dict[PodKey, tuple[Endpoint, ...]]:
        fresh: dict[PodKey, tuple[Endpoint, ...]] = dict.fromkeys(self._touched, ())
        for address in self._touched_ips:
            fresh |= dict.fromkeys(self._at.get(address, ()), ())
            fresh |= self._endpoints_at(address)
        self._touched, self._touched_ips = {}, {}
        return fresh

    def _endpoints_at(self, address: str) -> dict[PodKey, tuple[Endpoint, ...]]:
        there = [self._records[key] for key in self._at.get(address, ())]
        owner = max((one for one in there if not one.is_on_host_network), key=_age, default=None)
        serving = [one for one in there if one.key in self._serving]
        if owner is not None and owner.key not in self._serving:
            serving = [one for one in serving if one.is_on_host_network]
        endpoints = {one.key: self._serving[one.key].endpoints for one in sorted(serving, key=_age)}
        if len(serving) < 2:
            return endpoints
        claims = {
            (key, one.port): self._claim_to(one.port, self._records[key])
            for key, those in endpoints.items()
            for one in those
        }
        winners: dict[int, PodKey] = {}
        # Requests for an older Pod of the address would reach the newest one.
        for key, port in claims:  # the newest Pod last
            if claims[key, port] >= claims[winners.get(port, key), port]:
                winners[port] = key
        having = set(winners.values())
        contested: dict[tuple[PodKey, PodKey], list[int]] = {}
        for (key, port), claim in claims.items():
            is_equal = claim == claims[winners[port], port]
            if key != winners[port] and (is_equal or key not in having):
                contested.setdefault((winners[port], key), []).append(port)
        for (winner, loser), ports in contested.items():
            self._note(Contest(address, tuple(ports), winner, loser))
        return {
            key: tuple(one for one in those if winners[one.port] == key)
            for key, those in endpoints.items()
        }

    def _claim_to(self, port: int, record: PodRecord) -> int:
        """Rank the evidence that a Pod serves at a port of the pool; higher is better."""
        if not record.is_on_host_network or record.active_ports is not None:
            return _NAMED
        declared = frozenset[int]().union(*(one.ports for one in record.containers))
        if port in declared:
            return _NAMED
        return _DECLARES_OTHERS if declared.intersection(self.shape.ports) else _DECLARES_NONE

    def _note(self, contest: Contest) -> None:
        known = self._contests.setdefault(contest.address, {})
        if contest not in known:
            known[contest] = None
            self._new_contests.append(contest)


def _age(record: PodRecord) -> tuple[str, str]:
    return record.created, record.uid
