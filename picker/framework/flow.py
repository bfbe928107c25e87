"""The contracts of flow control's plugins, which choose the next request and limit the share of a
pool for each priority.

All methods are synchronous; `now_seconds` is on the clock of the requests. A policy is one object
of the configuration and may serve several priority bands; the `BandFairness` that it creates for
one band owns the state of that band.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from picker.types import Candidates, InferenceRequest, Usage

DEFAULT_SETTLE_SECONDS = 0.5  # of a detector without one of its own
# The smallest is dispatched first; of equal ranks the earliest arrival.
Rank: TypeAlias = tuple[float, ...]


class QueuedRequest(msgspec.Struct, frozen=True):
    """A request in a queue, or admitted from it.

    `sequence` counts arrivals. `size_bytes` is the size of its body, `held_bytes` the memory that
    it takes while it waits, `tokens` an estimate of the cost of serving it. `ttl_seconds` bounds
    its wait while the pool has endpoints (None: no bound).
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
        """The fairness id, which names the flow."""
        return self.request.fairness_id


@runtime_checkable
class OrderingPolicy(Protocol):
    """Orders the requests of one flow."""

    def rank(self, item: QueuedRequest) -> Rank:
        """Return the rank of a request; called once, when it arrives."""


class BandFairness(Protocol):
    """Chooses among the flows of one band. Owns their state."""

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        """Set the next request of `flow`; None if its queue is empty."""

    def select(self, now_seconds: float) -> str | None:
        """Return the next flow, the same on repeated calls; None if all queues are empty."""

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """Note that `item` was admitted; called before the `head_changed` that follows."""

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Note that an admitted request ended. Its flow is unknown if its band was dropped."""

    def forget(self, flow: str) -> None:
        """Drop the state of a flow that has been idle for a long time."""


@runtime_checkable
class SharesCapacity(Protocol):
    """A band's fairness: the flow that takes most of a full queue makes room for the others."""

    def weight(self, flow: str) -> float:
        """Return the weight of `flow`, above 0; it is constant while the flow has a queue."""


@runtime_checkable
class KeepsHeadroom(Protocol):
    """A band's fairness that reserves the last places in the pool for flows with little load."""

    def headroom(self, place: float, now_seconds: float) -> float:
        """Return the part of the band's ceiling to reserve, 0 to 1; a request takes about `place`.
        That close to the ceiling, `select_within_share` is called instead of `select`.
        """

    def select_within_share(self, now_seconds: float) -> str | None:
        """Return the flow whose head is dispatched next; None: no request of the band may go now.
        Called periodically, because time may change the answer.
        """


@runtime_checkable
class FairnessPolicy(Protocol):
    """Shares a band among its flows."""

    def for_band(self, priority: int) -> BandFairness:
        """Create the state of one band."""


class ProgramShare(msgspec.Struct, frozen=True):
    """The attained service of a program (fairness id), as it counts now, and its average wait."""

    attained_tokens: float
    average_wait_seconds: float


@runtime_checkable
class SharesByProgram(Protocol):
    """A fairness policy with an account for each program, for gauges."""

    def program_shares(self) -> Mapping[str, ProgramShare]:
        """Return the current shares of all known programs."""


@runtime_checkable
class UsageLimitPolicy(Protocol):
    """Limits how full the pool may be for requests of each priority to be admitted."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """Return a ceiling for each of `priorities`, which are in descending order and not empty. A
        priority is held back while the pool's saturation is at its ceiling or above. Called once
        for each pass over the queues.
        """


@runtime_checkable
class EvictionFilter(Protocol):
    """Selects requests under way that may be stopped in favour of others."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        """Return whether the request may be stopped; called once, when it is admitted."""


@runtime_checkable
class EvictionOrder(Protocol):
    """Orders the requests that may be stopped."""

    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        """Return the rank of a request; the one with the smallest rank is stopped first."""


@runtime_checkable
class JudgesStaleness(Protocol):
    """A saturation detector that knows how many of its inputs are stale."""

    def stale(self, candidates: Candidates, now_seconds: float) -> int:
        """Count the candidates without fresh metrics."""


@runtime_checkable
class SettlesLate(Protocol):
    """A saturation detector that notices the end of a request with a delay."""

    @property
    def settle_seconds(self) -> float:
        """The seconds after which the saturation reflects the end of a request."""
