"""Which bands may go, as of one moment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from picker.flowcontrol.load_estimate import MAX_AGE_SECONDS, LoadEstimate, Pool
from picker.flowcontrol.queue import FlowQueue
from picker.flowcontrol.saturation import PoolLoad
from picker.framework.flow import UsageLimitPolicy

EXACT = 1e-9  # places are counted; sums of parts are not quite what they come to


class Verdict(msgspec.Struct, frozen=True):
    """How full the pool is, at what saturation each band is held back, and below which part of
    that nobody is.
    """

    load: PoolLoad
    ceilings: Mapping[int, float]
    lowest_ceiling: float
    at_seconds: float
    free_part: float = 1.0

    @property
    def is_open(self) -> bool:
        """Whether everybody in all bands may go."""
        return self._is_below(self.lowest_ceiling * self.free_part)

    def ceiling(self, priority: int) -> float:
        """At which the band `priority` is held back."""
        return self.ceilings.get(priority, self.lowest_ceiling)

    def lets_in(self, priority: int, headroom: float = 0.0) -> bool:
        """Whether the band `priority` may go, with so much of its ceiling to spare. To an empty
        pool nobody goes.
        """
        part = 1.0 - headroom - EXACT if headroom else 1.0
        return self._is_below(self.ceiling(priority) * part)

    def _is_below(self, saturation: float) -> bool:
        return self.load.num_endpoints > 0 and self.load.effective < saturation


class Judge:
    """Owns what is known of the load, and the verdict on it.

    A verdict holds until anything changes, or somebody was judged by it: a policy's ceilings are
    asked once for each request that is let in or held back.
    """

    def __init__(self, pool: Pool) -> None:
        self.load = LoadEstimate(pool)
        self._policy: UsageLimitPolicy | None = None
        self._verdict: Verdict | None = None
        self.ceilings: Mapping[int, float] = {}  # as the policy said last

    @property
    def verdict(self) -> Verdict | None:
        """The one that holds, if any does."""
        return self._verdict

    def use(self, policy: UsageLimitPolicy) -> None:
        """Ask another policy from now on."""
        self._policy = policy
        self._verdict, self.ceilings = None, {}

    def changed(self) -> None:
        """Nothing that was said holds any more."""
        self._verdict = None

    def ask(self, queue: FlowQueue, now_seconds: float) -> Verdict:
        """The verdict that holds, or a new one; an open one holds for whoever it was told to."""
        verdict = self._verdict
        if verdict is not None and (
            verdict.is_open or now_seconds - verdict.at_seconds <= MAX_AGE_SECONDS
        ):
            return verdict
        return self.ask_anew(queue, now_seconds)

    def ask_anew(self, queue: FlowQueue, now_seconds: float) -> Verdict:
        """A new verdict, on the bands of `queue`."""
        load, priorities = self.load.at(now_seconds), queue.priorities
        if self._policy is not None:
            ceilings = self._policy.ceilings(load.effective, priorities)
            self.ceilings = dict(zip(priorities, ceilings, strict=True))
        lowest = min(self.ceilings.values(), default=1.0)
        kept = max(band.headroom for band in queue)
        free_part = 1.0 - kept - EXACT if kept else 1.0
        self._verdict = Verdict(load, self.ceilings, lowest, now_seconds, free_part)
        return self._verdict
