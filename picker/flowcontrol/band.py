"""One priority band. Its requests are ordered for dispatch, by flow, and for eviction.

Shares of flows change with every request that arrives or leaves, but are needed only when a queue
is full, so changed flows are noted, and sorted on demand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import msgspec

from picker.flowcontrol.removable_heap import RemovableHeap
from picker.flowcontrol.settings import BandSettings
from picker.framework.flow import BandFairness, KeepsHeadroom, QueuedRequest, Rank, SharesCapacity
from picker.framework.flow_heap import FlowHeap

_ALL_FLOWS = ""  # the only backlog where flows do not share


class QueueResource(Enum):
    REQUESTS = "requests"
    BYTES = "bytes"
    MEMORY = "memory"


def taken_by(item: QueuedRequest, resource: QueueResource) -> int:
    if resource is QueueResource.REQUESTS:
        return 1
    return item.size_bytes if resource is QueueResource.BYTES else item.held_bytes


class _Backlog:
    """One flow's requests, the last to be dispatched first, and the resources that they take."""

    __slots__ = ("held", "last", "weight")

    def __init__(self, weight: float) -> None:
        self.last: RemovableHeap[Rank, tuple[QueuedRequest, Rank]] = RemovableHeap()
        self.held = dict.fromkeys(QueueResource, 0)
        self.weight = weight

    def count(self, item: QueuedRequest, times: int) -> None:
        for resource in QueueResource:
            self.held[resource] += times * taken_by(item, resource)


class Backlogs:
    """Owns the order of eviction of one band; without `weight`, all requests count as one flow."""

    def __init__(self, weight: Callable[[str], float] | None) -> None:
        self._weight = weight
        self._backlogs: dict[str, _Backlog] = {}
        self._greatest: dict[QueueResource, FlowHeap[tuple[float]]] = {
            resource: FlowHeap() for resource in QueueResource
        }
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._backlogs)

    def add(self, item: QueuedRequest, rank: Rank) -> None:
        name = self._name(item.flow)
        backlog = self._backlogs.get(name)
        if backlog is None:
            weight = 1.0 if self._weight is None else self._weight(item.flow)
            backlog = self._backlogs[name] = _Backlog(weight)
        reverse = (*(-one for one in rank), float(-item.sequence))
        backlog.last.push(reverse, item.sequence, (item, rank))
        backlog.count(item, 1)
        self._changed.add(name)

    def remove(self, item: QueuedRequest) -> None:
        name = self._name(item.flow)
        backlog = self._backlogs[name]
        backlog.last.remove(item.sequence)
        self._removed(name, backlog, item)

    def last(self, resource: QueueResource) -> tuple[QueuedRequest, Rank] | None:
        """Remove and return the last request, with its rank, of the flow that holds the most."""
        name = self._first(resource)
        if name is None:
            return None
        backlog = self._backlogs[name]
        taken = backlog.last.pop()
        if taken is not None:
            self._removed(name, backlog, taken[0])
        return taken

    def is_better_held_by(self, item: QueuedRequest, resource: QueueResource) -> bool:
        """Return whether another flow would hold more than the flow of `item` if `item` waited."""
        greatest = self._first(resource)
        if self._weight is None or greatest is None:
            return False
        mine = self._backlogs.get(item.flow) or _Backlog(self._weight(item.flow))
        share = (mine.held[resource] + taken_by(item, resource)) / mine.weight
        theirs = self._backlogs[greatest]
        return share < theirs.held[resource] / theirs.weight

    def check_integrity(self, waiting: Sequence[QueuedRequest]) -> None:
        sequences = [item.sequence for one in self._backlogs.values() for item, _ in one.last]
        if sorted(sequences) != sorted(item.sequence for item in waiting):
            raise AssertionError(f"{len(sequences)} are in the reverse order, {len(waiting)} wait")
        for resource in QueueResource:
            held = sum(backlog.held[resource] for backlog in self._backlogs.values())
            if held != sum(taken_by(item, resource) for item in waiting):
                raise AssertionError(f"the reverse order counts wrong {resource.value}")
        if any(not len(backlog.last) for backlog in self._backlogs.values()):
            raise AssertionError("a flow without waiting requests has a backlog")

    def _name(self, flow: str) -> str:
        return _ALL_FLOWS if self._weight is None else flow

    def _removed(self, name: str, backlog: _Backlog, item: QueuedRequest) -> None:
        backlog.count(item, -1)
        if len(backlog.last):
            self._changed.add(name)
            return
        del self._backlogs[name]
        self._changed.discard(name)
        for heap in self._greatest.values():
            heap.remove(name)

    def _first(self, resource: QueueResource) -> str | None:
        for name in self._changed:
            backlog = self._backlogs[name]
            for one, heap in self._greatest.items():
                heap.put(name, (-backlog.held[one] / backlog.weight,))
        self._changed.clear()
        return self._greatest[resource].first()


_NO_RANK: Rank = ()


class BandFlow(msgspec.Struct, eq=False):
    """The requests of one tenant that wait in one band; at least one."""

    name: str
    heap: RemovableHeap[Rank, QueuedRequest] = msgspec.field(default_factory=RemovableHeap)
    num_bytes: int = 0


class Band(msgspec.Struct, eq=False):
    """One priority, with a `fairness` policy of its own. Only its `FlowQueue` changes it."""

    priority: int
    settings: BandSettings
    fairness: BandFairness
    headroom: float = 0.0  # the part reserved last
    backlogs: Backlogs = msgspec.field(default_factory=lambda: Backlogs(None))
    flows: dict[str, BandFlow] = {}
    # Since when nothing of a flow waits, oldest first; a dict would have to be searched for its
    # first key past all that were there.
    idle: OrderedDict[str, float] = msgspec.field(default_factory=OrderedDict)
    num_requests: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.fairness, SharesCapacity):
            self.backlogs = Backlogs(self.fairness.weight)

    def __iter__(self) -> Iterator[QueuedRequest]:
        for flow in self.flows.values():
            yield from flow.heap

    def adapted(self, settings: BandSettings) -> Band | None:
        """Return this band, or an empty one with its fairness policy; None if that changes."""
        if settings.fairness is not self.settings.fairness:
            return None
        if settings.ordering is self.settings.ordering:
            self.settings = settings
            return self
        for name in self.flows:
            # The requests are inserted again, in the order of the other policy.
            self.fairness.head_changed(name, None, _NO_RANK)
        return Band(self.priority, settings, self.fairness)

    def remember(self, before: Band, now_seconds: float) -> None:
        """Remember the flows of the replaced band `before` that have no waiting request here."""
        gone = before.idle | dict.fromkeys(before.flows, now_seconds)
        self.idle |= {name: since for name, since in gone.items() if name not in self.flows}
        self.idle = OrderedDict(sorted(self.idle.items(), key=lambda one: one[1]))

    def insert(self, item: QueuedRequest) -> None:
        name = item.flow
        flow = self.flows.get(name)
        if flow is None:
            flow = self.flows[name] = BandFlow(name)
            self.idle.pop(name, None)
        rank = self.settings.ordering.rank(item)
        flow.heap.push(rank, item.sequence, item)
        flow.num_bytes += item.size_bytes
        self.backlogs.add(item, rank)
        self.num_requests += 1
        self.num_bytes += item.size_bytes
        first = flow.heap.first()
        if first is not None and first[1].sequence == item.sequence:
            self.fairness.head_changed(name, item, rank)

    def delete(self, item: QueuedRequest, now_seconds: float) -> None:
        flow = self.flows[item.flow]
        before = flow.heap.first()
        flow.heap.remove(item.sequence)
        flow.num_bytes -= item.size_bytes
        self.backlogs.remove(item)
        self.num_requests -= 1
        self.num_bytes -= item.size_bytes
        if before is None or before[1].sequence != item.sequence:
            return
        after = flow.heap.first()
        if after is not None:
            self.fairness.head_changed(flow.name, after[1], after[0])
            return
        del self.flows[flow.name]
        self.idle[flow.name] = now_seconds
        self.fairness.head_changed(flow.name, None, _NO_RANK)

    def keep(self, place: float, now_seconds: float) -> float:
        """Return the reserved part of the band's ceiling; a request takes about `place` of it."""
        if isinstance(self.fairness, KeepsHeadroom):
            self.headroom = self.fairness.headroom(place, now_seconds)
        return self.headroom

    def next(self, now_seconds: float, is_tight: bool = False) -> QueuedRequest | None:
        """Return the request to dispatch next; `is_tight`: there is less room than `headroom`."""
        fairness = self.fairness
        if is_tight and isinstance(fairness, KeepsHeadroom):
            name = fairness.select_within_share(now_seconds)
            if name is None:
                return None
        else:
            name = fairness.select(now_seconds)
        flow = self.flows.get(name) if name is not None else None
        first = flow.heap.first() if flow is not None else self._oldest()
        return None if first is None else first[1]

    def pass_by(self, item: QueuedRequest, now_seconds: float) -> None:
        name, fairness = item.flow, self.fairness
        fairness.head_changed(name, item, self.settings.ordering.rank(item))
        fairness.dispatched(item, now_seconds)
        fairness.head_changed(name, None, _NO_RANK)
        idle = self.idle
        idle.pop(name, None)  # to the end
        idle[name] = now_seconds

    def _oldest(self) -> tuple[Rank, QueuedRequest] | None:
        """Return the oldest request: a policy that names no flow must not stop a pool."""
        heads = filter(None, (flow.heap.first() for flow in self.flows.values()))
        return min(heads, key=lambda head: head[1].sequence, default=None)
