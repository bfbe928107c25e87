"""The outcomes of flow control, their errors for clients, and the time of the next attempt."""

import math
from enum import Enum

import msgspec

from picker.errors import Code, DropReason, RefusedError
from picker.flowcontrol.capacity import Cap

SHUTTING_DOWN_RETRY_SECONDS = 1  # another picker is asked
NO_ENDPOINTS_RETRY_SECONDS = 10  # a model server that starts takes about that, or longer


class FlowOutcome(Enum):
    """The outcome of a request, in the reference's words; NOT_YET is for requests that wait."""

    NOT_YET = "NotYetFinalized"
    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    REJECTED_NO_ENDPOINTS = "RejectedNoEndpoints"
    REJECTED_OTHER = "RejectedOther"
    EVICTED_TTL = "EvictedTTL"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CONTEXT_CANCELLED = "EvictedContextCancelled"
    EVICTED_OTHER = "EvictedOther"


def at_capacity(cap: Cap, retry_after_seconds: int) -> RefusedError:
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        f"the queue of requests is full ({cap.value})",
        DropReason.SATURATED,
        retry_after_seconds,
        reference=f"request rejected pre-queue: queue at capacity ({cap.value})",
    )


def too_large(size_bytes: int, most_bytes: int) -> RefusedError:
    """Return the refusal of a request that can never fit; it has no `Retry-After`."""
    why = (
        f"it takes {size_bytes} bytes, and no more than {most_bytes} may ever wait; to send it "
        "again is of no use"
    )
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        f"the request is too large for the queue: {why}",
        DropReason.SATURATED,
        reference=f"request rejected pre-queue: {why}",
    )


def at_capacity_without_endpoints(cap: Cap) -> RefusedError:
    return _unavailable(
        f"no endpoint is available, and the queue of requests is full ({cap.value})",
        DropReason.NO_ENDPOINTS,
        NO_ENDPOINTS_RETRY_SECONDS,
        f"no endpoints available: queue at capacity ({cap.value})",
    )


def timed_out(waited_seconds: float, retry_after_seconds: int) -> RefusedError:
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        f"the request waited {waited_seconds:.3g} s in the queue, as long as it may",
        DropReason.TTL_EXPIRED,
        retry_after_seconds,
        reference=f"request timed out in queue: waited {waited_seconds:.3g} s",
    )


def timed_out_without_endpoints(waited_seconds: float) -> RefusedError:
    return _unavailable(
        f"the request waited {waited_seconds:.3g} s in the queue, and no endpoint became available",
        DropReason.NO_ENDPOINTS,
        NO_ENDPOINTS_RETRY_SECONDS,
        f"request timed out in queue and no endpoints are available: waited {waited_seconds:.3g} s",
    )


def shutting_down() -> RefusedError:
    why = "the endpoint picker is shutting down"
    reference = f"internal flow control error: {why}"
    return _unavailable(why, DropReason.SHUTTING_DOWN, SHUTTING_DOWN_RETRY_SECONDS, reference)


def _unavailable(
    message: str, reason: DropReason, retry_after_seconds: int, reference: str
) -> RefusedError:
    code = Code.SERVICE_UNAVAILABLE
    return RefusedError(code, message, reason, retry_after_seconds, reference=reference)


TIME_CONSTANT_SECONDS = 10.0
MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
UNKNOWN_RETRY_SECONDS = 5
_SLOWEST = 1e-3  # per second; below it the rate is unknown


class DrainRate(msgspec.Struct, eq=False):
    """Counts dispatched requests, each worth exp(−age / 10 s). Times never go back."""

    _sum: float = 0.0
    _sumed_at: float = 0.0
    _began_at: float | None = None

    def count(self, now_seconds: float) -> None:
        if self._began_at is None:
            self._began_at = now_seconds
        self._sum = self._decayed(now_seconds) + 1.0
        self._sumed_at = now_seconds

    def per_second(self, now_seconds: float) -> float:
        """Return the dispatched requests per second, or 0 while that is unknown."""
        if self._began_at is None:
            return 0.0
        seen_seconds = max(
            1.0, now_seconds - self._began_at
        )  # one request is not a thousand per second
        # The sum that a steady stream of one a second would have reached since the first request.
        weight = TIME_CONSTANT_SECONDS * -math.expm1(-seen_seconds / TIME_CONSTANT_SECONDS)
        return self._decayed(now_seconds) / weight

    def retry_after_seconds(self, num_ahead: int, now_seconds: float) -> int:
        rate = self.per_second(now_seconds)
        if rate < _SLOWEST:
            return UNKNOWN_RETRY_SECONDS
        seconds = math.ceil(num_ahead / rate)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _decayed(self, now_seconds: float) -> float:
        return self._sum * math.exp((self._sumed_at - now_seconds) / TIME_CONSTANT_SECONDS)
