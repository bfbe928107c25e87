"""The contracts of flow control's plugins: who goes next, and how far a priority may fill a pool.

All methods are synchronous; `now_seconds` is on the clock of the requests. A policy is one object
of the configuration and may serve several priority bands; what it remembers of one band is in
the `BandFairness` that it makes for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from picker.types import Candidates, InferenceRequest, Usage

DEFAULT_SETTLE_SECONDS = 0.5  # of a detector that does not say
# Smaller leaves first; of equal ranks the one that came first.
Rank: TypeAlias = tuple[float, ...]


class QueuedRequest(msgspec.Struct, frozen=True):
    """A request that waits, or has waited, for its turn.

    `sequence` counts arrivals and is unique. `size_bytes` is the size of its body, `held_bytes` the
    memory that it takes while it waits, `tokens` an estimate of what serving it costs.
    `ttl_seconds` is how long it may wait while the pool has endpoints (None: for ever).
    """

    request: InferenceRequest
    sequence: int
    enqueued_at_seconds: float
    size_bytes: int = 0
    held_bytes: int = 0
    tokens: int = 0
    ttl_seconds: float | None = None

    @property
    def flow(self) -> str:
        """Whose it is."""
        return self.request.fairness_id


@runtime_checkable
class OrderingPolicy(Protocol):
    """Orders the requests of one flow."""

    def rank(self, item: QueuedRequest) -> Rank:
        """Its place; asked once, when it arrives."""


class BandFairness(Protocol):
    """Chooses among the flows of one band. Owns what it remembers of them."""

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        """The next request of `flow` is now `head`; None: nothing of it waits."""

    def select(self, now_seconds: float) -> str | None:
        """The flow whose head goes next; None when nothing waits. Changes nothing that counts:
        asked twice it answers the same.
        """

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """`item` was let in; called before the `head_changed` that follows from it."""

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """A request that was let in is over; `usage` is what its response said, if anything. Its
        flow may be unknown here: bands come and go.
        """

    def forget(self, flow: str) -> None:
        """Nothing of `flow` waits and nothing has come for long."""


@runtime_checkable
class SharesCapacity(Protocol):
    """A band's fairness whose flows share a full queue as well: the flow that holds the most for
    its weight makes room for one that holds less.
    """

    def weight(self, flow: str) -> float:
        """More than 0; the same as long as anything of the flow waits."""


@runtime_checkable
class KeepsHeadroom(Protocol):
    """A band's fairness that keeps the last places in the pool for flows that ask for little, so
    that they need not wait until another request ends.
    """

    def headroom(self, place: float, now_seconds: float) -> float:
        """A part of the band's ceiling, 0 to 1, of which one more request takes about `place`. So
        close to the ceiling `select_within_share` is asked, and not `select`.
        """

    def select_within_share(self, now_seconds: float) -> str | None:
        """The flow whose head goes next; None when none that waits may: then nothing of the band
        goes until there is more room, or another one comes or goes. Also time may change it, and
        it is asked now and then.
        """


@runtime_checkable
class FairnessPolicy(Protocol):
    """Shares a band among its flows."""

    def for_band(self, priority: int) -> BandFairness:
        """A new state for one band."""


class ProgramShare(msgspec.Struct, frozen=True):
    """What one program (fairness id) got of a pool: the service that counts for it now, and how
    long its requests waited.
    """

    attained_tokens: float
    average_wait_seconds: float


@runtime_checkable
class SharesByProgram(Protocol):
    """A fairness policy that keeps accounts of programs, which are worth gauges."""

    def program_shares(self) -> Mapping[str, ProgramShare]:
        """All programs it knows, now."""


@runtime_checkable
class UsageLimitPolicy(Protocol):
    """Says how full the pool may be for requests of each priority to be let in."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """One ceiling per priority; `priorities` come highest first and are never none. A priority
        is held back while the pool's saturation is at its ceiling or above. Asked once per look at
        the queues.
        """


@runtime_checkable
class EvictionFilter(Protocol):
    """Says which requests under way may be stopped in favour of others."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        """Asked once, when it was let in."""


@runtime_checkable
class EvictionOrder(Protocol):
    """Orders the requests that may be stopped."""

    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        """Smaller is stopped first."""


@runtime_checkable
class JudgesStaleness(Protocol):
    """A saturation detector that knows how much of what it says rests on old metrics."""

    def stale(self, candidates: Candidates, now_seconds: float) -> int:
        """How many of `candidates` it judges without fresh metrics."""


@runtime_checkable
class SettlesLate(Protocol):
    """A saturation detector that says how long it takes to notice that a request is over."""

    @property
    def settle_seconds(self) -> float:
        """After so long the end of a request shows in its saturation."""
