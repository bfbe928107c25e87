"""The requests that would be dispatched last, which a full queue evicts to make room.

Shares of flows change with every request that arrives or leaves, and are needed only when a queue
is full: changed flows are noted, and sorted on demand.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from picker.flowcontrol.removable_heap import RemovableHeap
from picker.framework.flow import QueuedRequest, Rank
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
    """The requests of one flow, the last first, and the sums of what they hold."""

    __slots__ = ("held", "last", "weight")

    def __init__(self, weight: float) -> None:
        self.last: RemovableHeap[Rank, tuple[QueuedRequest, Rank]] = RemovableHeap()
        self.held = dict.fromkeys(QueueResource, 0)
        self.weight = weight

    def count(self, item: QueuedRequest, times: int) -> None:
        for resource in QueueResource:
            self.held[resource] += times * taken_by(item, resource)


class Backlogs:
    """Owns the reverse order of one band; without `weight` all its requests count as one flow."""

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
        """Take out the request that would go last of the flow that holds the most, and its rank."""
        name = self._first(resource)
        if name is None:
            return None
        backlog = self._backlogs[name]
        taken = backlog.last.pop()
        if taken is not None:
            self._removed(name, backlog, taken[0])
        return taken

    def is_better_held_by(self, item: QueuedRequest, resource: QueueResource) -> bool:
        """True if the fullest flow would hold more than that of `item` even if `item` waited."""
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
