"""The pool's saturation, estimated between two passes over all endpoints.

In a pool of 64 endpoints or more it is computed at two points, for the present requests and for
more, by a sixteenth of the number of endpoints, and interpolated until that many were admitted or
ended. So the error is at most the weight of a sixteenth of a request per endpoint, for 50 ms.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from picker.flowcontrol.saturation import EMPTY_POOL, NOTHING_LET_IN, LetIn, PoolLoad, pool_load
from picker.framework.attributes import Attributes
from picker.framework.interfaces import SaturationDetector
from picker.types import Candidate

Pool: TypeAlias = Callable[[], Sequence[Candidate]]

LARGE_POOL = 64  # from here on, a pass for each change would be most of a request's cost
MAX_AGE_SECONDS = 0.05  # detectors depend on time
SECONDS_PER_ENDPOINT = 20e-6  # in which changes of metrics count as small: 20 ms for a thousand
PLACE_SECONDS = 0.25  # the share of one request hardly changes
_SHARE = 16  # an estimate is off by a 16th of a request per endpoint at most
_TIMER_SECONDS = 0.001  # a timer of the event loop may be early by this


class _NoDetector:
    def saturation(
        self, candidates: Sequence[Candidate], attributes: Attributes, now_seconds: float
    ) -> float:
        return 0.0


class LoadEstimate:
    """Owns the last computed load, and the count of admitted requests that are not sent yet."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._detector: SaturationDetector = _NoDetector()
        self.let_in = NOTHING_LET_IN
        self._typical_tokens = 0.0  # of the last requests
        self._known: PoolLoad | None = None  # None: unknown or outdated
        self._base = EMPTY_POOL  # the last computation
        self._slopes: dict[str, float] = {}
        self._slope = 0.0
        self._delta = 0  # more requests than then
        self._changes = 0  # requests admitted or ended since then
        self.is_behind = True  # the pool has changed since the last computation
        self._computed_at = 0.0
        self._place, self._place_at = 0.0, -math.inf

    @property
    def settle_seconds(self) -> float:
        """The time for which changes of the pool may accumulate."""
        size = self._base.num_endpoints
        return size * SECONDS_PER_ENDPOINT + _TIMER_SECONDS if size >= LARGE_POOL else 0.0

    def use(self, detector: SaturationDetector) -> None:
        self._detector = detector
        self._base, self._known = EMPTY_POOL, None
        self._place_at = -math.inf

    def pool_changed(self) -> None:
        self.is_behind = True
        self._known = None

    def entered(self, tokens: int) -> None:
        self.let_in = LetIn(self.let_in.requests + 1, self.let_in.tokens + tokens)
        self._typical_tokens += (tokens - self._typical_tokens) / _SHARE
        self._count(1)

    def left(self, tokens: int) -> None:
        """Stop counting an admitted request that was sent; from now on the pool counts it."""
        self._drop(tokens)
        self._count(0)

    def ended(self, tokens: int, has_left: bool) -> None:
        if not has_left:
            self._drop(tokens)
        self._count(-1)

    def at(self, now_seconds: float) -> PoolLoad:
        if self._is_stale(now_seconds - self._computed_at):
            self._compute(now_seconds)
        elif self._known is None:
            self._known = self._estimated()
        return self._known or self._base

    def place(self, num_under_way: int, now_seconds: float) -> float:
        """Return by about how much one more request raises the saturation."""
        load, place = self.at(now_seconds), self._slope
        if load.num_endpoints < LARGE_POOL:
            if not 0.0 <= now_seconds - self._place_at < PLACE_SECONDS:
                candidates = self._pool()
                base = pool_load(self._detector, candidates, self.let_in, now_seconds)
                loaded = self._loaded(candidates, 1, now_seconds)
                self._place = loaded.effective - base.effective
                self._place_at = now_seconds
            place = self._place
        return place if place > 0.0 else load.effective / max(1, num_under_way)

    def check_integrity(self) -> None:
        if self.let_in.requests < 0 or (not self.let_in.requests and self.let_in.tokens):
            raise AssertionError(f"admitted and not sent: {self.let_in}")

    def _is_stale(self, age_seconds: float) -> bool:
        size = self._base.num_endpoints
        if age_seconds > MAX_AGE_SECONDS:
            return True
        if size < LARGE_POOL:
            return self._known is None
        if self._changes * _SHARE >= size:
            return True
        return self.is_behind and age_seconds >= size * SECONDS_PER_ENDPOINT

    def _compute(self, now_seconds: float) -> None:
        candidates = self._pool()
        base = pool_load(self._detector, candidates, self.let_in, now_seconds)
        self._slope, self._slopes = 0.0, {}
        if len(candidates) >= LARGE_POOL:
            more = len(candidates) // _SHARE
            loaded = self._loaded(candidates, more, now_seconds)
            self._slope = (loaded.effective - base.effective) / more
            self._slopes = {
                stage: (loaded.stages[stage] - value) / more for stage, value in base.stages.items()
            }
        self._base = self._known = base
        self._delta = self._changes = 0
        self.is_behind = False
        self._computed_at = now_seconds

    def _loaded(self, candidates: Sequence[Candidate], more: int, now_seconds: float) -> PoolLoad:
        tokens = self.let_in.tokens + round(more * self._typical_tokens)
        then = LetIn(self.let_in.requests + more, tokens)
        return pool_load(self._detector, candidates, then, now_seconds)

    def _estimated(self) -> PoolLoad:
        base, delta = self._base, self._delta
        by_stage = {
            stage: max(0.0, value + delta * self._slopes[stage])
            for stage, value in base.stages.items()
        }
        whole = max(0.0, base.effective + delta * self._slope)
        return PoolLoad(max(by_stage.values(), default=whole), by_stage, base.num_endpoints)

    def _drop(self, tokens: int) -> None:
        self.let_in = LetIn(self.let_in.requests - 1, self.let_in.tokens - tokens)

    def _count(self, change: int) -> None:
        self._delta += change
        self._changes += 1
        self._known = None
