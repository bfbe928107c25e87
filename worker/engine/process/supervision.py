"""Restarts of an engine that died, and the sum of counters over its lives. Pure."""

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from worker.types import EngineStats

WINDOW_SECONDS = 600.0
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
# The fields that are not summed over engines; the names are unique in `EngineStats`.
_GAUGES = frozenset(
    {
        *("num_running", "num_waiting", "num_deferred", "kv_cache_usage", "num_fetching"),
        *("num_fetched", "host_blocks", "host_usage", "disk_blocks", "sleep_level", "is_paused"),
        *("num_restarts", "stalled_seconds", "num_speculative_tokens", "loaded", "awaited"),
    }
)
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Supervision:
    """The policy for an engine process that dies, hangs or stalls.

    After `heartbeat_timeout_seconds` without a sign of life it is killed (`startup_silence_seconds`
    while it starts). Without `restart` that is the end; with it a new one is started, at most
    `max_restarts` times in ten minutes.
    """

    restart: bool = True
    max_restarts: int = 5
    heartbeat_timeout_seconds: float = 2.0
    startup_silence_seconds: float = 60.0


class RestartBudget:
    def __init__(self, supervision: Supervision) -> None:
        self._allowed = supervision.max_restarts if supervision.restart else 0
        self._restarts: deque[float] = deque()

    def take(self, now_seconds: float) -> float | None:
        """Use up one restart and return how long to wait before it: at first not at all, then
        longer and longer while restarts keep coming. None when the budget is spent.
        """
        while self._restarts and self._restarts[0] <= now_seconds - WINDOW_SECONDS:
            self._restarts.popleft()
        recent = len(self._restarts)
        if recent >= self._allowed:
            return None
        self._restarts.append(now_seconds)
        if recent == 0:
            return 0.0
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** (recent - 1))


def add_counters(total: S, more: S) -> S:
    """Return `more` with the counters, but not the gauges, of `total` added to its own."""
    sums = {
        name: _sum(getattr(total, name), getattr(more, name))
        for name in more.__struct_fields__
        if name not in _GAUGES
    }
    return msgspec.structs.replace(more, **sums)


def _sum(one: Any, other: Any) -> Any:
    """Add numbers, structs, or tuples place by place, where one may be shorter."""
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    return add_counters(one, other) if isinstance(one, msgspec.Struct) else one + other


def counters_of(stats: EngineStats) -> EngineStats:
    return add_counters(stats, EngineStats())
