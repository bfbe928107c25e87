"""The caps of the queue, and the waiting requests to evict for an arriving one.

An arriving request above a total cap displaces requests of lower bands, the lowest first; else, in
a band whose flows share (`SharesCapacity`), those of the flow that holds the most for its weight,
if the arriving request's flow would hold less. The request that would be dispatched last goes
first. So a tenant that floods a queue uses the room that others leave, but cannot lock them out.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from picker.flowcontrol.band import Band, QueueResource, taken_by
from picker.framework.flow import QueuedRequest, Rank

MAX_DISPLACED = 64  # one large request must not empty a queue


class Cap(Enum):
    """The caps, in the order in which they are checked."""

    BYTES = "bytes in all"
    REQUESTS = "requests in all"
    MEMORY = "memory in all"
    BAND_BYTES = "bytes of its priority"
    BAND_REQUESTS = "requests of its priority"


_RESOURCES = {
    Cap.BYTES: QueueResource.BYTES,
    Cap.REQUESTS: QueueResource.REQUESTS,
    Cap.MEMORY: QueueResource.MEMORY,
    Cap.BAND_BYTES: QueueResource.BYTES,
    Cap.BAND_REQUESTS: QueueResource.REQUESTS,
}
_IN_ALL = (Cap.BYTES, Cap.REQUESTS, Cap.MEMORY)


def displaced_by(
    item: QueuedRequest, band: Band, bands: Iterable[Band], excess: Mapping[Cap, int]
) -> Sequence[QueuedRequest]:
    """Return the requests to evict so that `item` may wait in `band`; empty: it must be rejected.

    `excess` is the amount above each exceeded cap; `bands` are ordered from the highest.
    """
    left = dict(excess)
    lower = [one for one in bands if one.priority < band.priority and one.num_requests]
    taken: list[tuple[Band, QueuedRequest, Rank]] = []
    while left and len(taken) < MAX_DISPLACED:
        cap = next(
            one for one in reversed(Cap) if one in left
        )  # room in a band is also room in total
        loser = _loser(item, band, lower, cap)
        # The last one has waited least.
        last = None if loser is None else loser.backlogs.last(_RESOURCES[cap])
        if loser is None or last is None:
            break
        taken.append((loser, *last))
        left = _less(left, last[0], is_of_band=loser is band)
    # All go back: the caller evicts them, and only if they suffice.
    for loser, victim, rank in taken:
        loser.backlogs.add(victim, rank)
    return [] if left else [victim for _, victim, _ in taken]


def _loser(item: QueuedRequest, band: Band, lower: list[Band], cap: Cap) -> Band | None:
    if cap in _IN_ALL:
        while lower and not len(lower[-1].backlogs):
            lower.pop()
        if lower:
            return lower[-1]
    return band if band.backlogs.is_better_held_by(item, _RESOURCES[cap]) else None


def _less(excess: Mapping[Cap, int], item: QueuedRequest, is_of_band: bool) -> dict[Cap, int]:
    left: dict[Cap, int] = {}
    for cap, amount in excess.items():
        freed = taken_by(item, _RESOURCES[cap])
        if cap not in _IN_ALL and not is_of_band:
            freed = 0
        if amount > freed:
            left[cap] = amount - freed
    return left
