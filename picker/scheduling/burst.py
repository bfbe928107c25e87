"""Which endpoints the requests of one burst should go to, decided for all of them together. Pure.

1. Requests that begin with the same blocks and may go to the same endpoints form a group: each that
   goes elsewhere would have the beginning computed once more.
2. Groups are placed whole, the heaviest first, each at the endpoint that has got least so far; of
   equal ones at that with the least under way, then at the first one.
3. An endpoint gets at most `max_per_endpoint` requests (None: any number). What does not fit there
   goes on to the next; once all are full, the limit counts no more.

The weight of a group is the number of its requests, or of the blocks that one endpoint has to
compute for all of them: those that several have in common once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """A request by its chained block hashes, and the endpoints that may serve it.

    `endpoints` are keys with the requests that are under way there; never empty.
    """

    blocks: tuple[int, ...]
    endpoints: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BurstRules:
    """How many blocks have to be alike, how many requests an endpoint takes, what weighs."""

    colocate_blocks: int = 1
    max_per_endpoint: int | None = None
    weigh_blocks: bool = False


def assign(requests: Sequence[BurstRequest], rules: BurstRules) -> list[str]:
    """The endpoint of each request, in the order given."""
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_alike(request, index, rules), []).append(index)
    weighed = [(_weight(requests, members, rules), members) for members in groups.values()]
    weighed.sort(key=lambda one: -one[0])  # stable: of equal ones, who came first
    placed: dict[int, str] = {}
    load = _Load()
    for _, members in weighed:
        _place(requests, members, rules, load, placed)
    return [placed[index] for index in range(len(requests))]


class _Load:
    """What each endpoint has got so far. Owned by one `assign`."""

    def __init__(self) -> None:
        self.weight: dict[str, int] = {}
        self.count: dict[str, int] = {}

    def add(self, key: str, weight: int, count: int) -> None:
        """Endpoint `key` gets so much more."""
        self.weight[key] = self.weight.get(key, 0) + weight
        self.count[key] = self.count.get(key, 0) + count

    def least(self, endpoints: Sequence[tuple[str, int]], limit: int | None) -> tuple[str, int]:
        """The endpoint that is next, and for how many requests it has room."""
        open_ones = [one for one in endpoints if limit is None or self.count.get(one[0], 0) < limit]
        candidates = open_ones or endpoints
        key, _ = min(candidates, key=lambda one: (self.weight.get(one[0], 0), one[1]))
        if limit is None:
            return key, -1
        return key, limit - self.count.get(key, 0) if open_ones else 1


def _alike(request: BurstRequest, index: int, rules: BurstRules) -> object:
    """What requests of one group have in common."""
    shared = max(1, rules.colocate_blocks)
    if len(request.blocks) < shared:
        return index  # too short to be worth it
    # Hashes are chained: this one stands for all blocks before it.
    return request.blocks[shared - 1], tuple(key for key, _ in request.endpoints)


def _weight(requests: Sequence[BurstRequest], members: Sequence[int], rules: BurstRules) -> int:
    if not rules.weigh_blocks:
        return len(members)
    return len({block for index in members for block in requests[index].blocks})


def _place(
    requests: Sequence[BurstRequest],
    members: Sequence[int],
    rules: BurstRules,
    load: _Load,
    placed: dict[int, str],
) -> None:
    left = list(members)
    while left:
        key, room = load.least(requests[left[0]].endpoints, rules.max_per_endpoint)
        part = left if room < 0 else left[:room]
        for index in part:
            placed[index] = key
        load.add(key, _weight(requests, part, rules), len(part))
        left = left[len(part) :]
