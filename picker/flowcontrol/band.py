"""One priority. Its requests are ordered by dispatch, by flow, and by eviction (`backlogs`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from picker.flowcontrol.backlogs import Backlogs
from picker.flowcontrol.removable_heap import RemovableHeap
from picker.flowcontrol.settings import BandSettings
from picker.framework.flow import BandFairness, KeepsHeadroom, QueuedRequest, Rank, SharesCapacity

_NO_RANK: Rank = ()


class BandFlow(msgspec.Struct, eq=False):
    """The requests of one tenant that wait in one band; at least one."""

    name: str
    heap: RemovableHeap[Rank, QueuedRequest] = msgspec.field(default_factory=RemovableHeap)
    num_bytes: int = 0


class Band(msgspec.Struct, eq=False):
    """One priority, with a `fairness` policy of its own. Changed by its `FlowQueue` alone."""

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
        """Return this band, an empty one with the same fairness policy, or None."""
        if settings.fairness is not self.settings.fairness:
            return None
        if settings.ordering is self.settings.ordering:
            self.settings = settings
            return self
        for name in self.flows:
            self.fairness.head_changed(name, None, _NO_RANK)
        return Band(self.priority, settings, self.fairness)

    def remember(self, before: Band, now_seconds: float) -> None:
        """Remember the flows of the band that this one replaces, of which nothing waits here."""
        for name, since in (
            *before.idle.items(),
            *dict.fromkeys(before.flows, now_seconds).items(),
        ):
            if name not in self.flows:
                self.idle[name] = since
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
