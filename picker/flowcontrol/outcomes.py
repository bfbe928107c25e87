"""How a request's time at the gate ends, and what the client is told when it ended badly."""

from __future__ import annotations

from enum import Enum

from picker.errors import Code, DropReason, RefusedError
from picker.flowcontrol.capacity import Cap

SHUTTING_DOWN_RETRY_SECONDS = 1  # another picker is asked
NO_ENDPOINTS_RETRY_SECONDS = 10  # a model server that starts takes about that, or longer


class FlowOutcome(Enum):
    """One a request; the words of the reference. NOT_YET is of those that wait."""

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
    """429: there is no room to wait in."""
    message = f"request rejected pre-queue: queue at capacity ({cap.value})"
    return RefusedError(Code.RESOURCE_EXHAUSTED, message, DropReason.SATURATED, retry_after_seconds)


def too_large(size_bytes: int, most_bytes: int) -> RefusedError:
    """429: there can never be room for it to wait in, so nothing is said of another attempt."""
    message = (
        f"request rejected pre-queue: it takes {size_bytes} bytes, and no more than {most_bytes} "
        "may ever wait; to send it again is of no use"
    )
    return RefusedError(Code.RESOURCE_EXHAUSTED, message, DropReason.SATURATED)


def at_capacity_without_endpoints(cap: Cap) -> RefusedError:
    """503: there is nobody to serve it, and no room to wait for somebody."""
    message = f"no endpoints available: queue at capacity ({cap.value})"
    return _unavailable(message, DropReason.NO_ENDPOINTS, NO_ENDPOINTS_RETRY_SECONDS)


def timed_out(waited_seconds: float, retry_after_seconds: int) -> RefusedError:
    """429: it was not its turn in time."""
    message = f"request timed out in queue: waited {waited_seconds:.3g} s"
    return RefusedError(
        Code.RESOURCE_EXHAUSTED, message, DropReason.TTL_EXPIRED, retry_after_seconds
    )


def timed_out_without_endpoints(waited_seconds: float) -> RefusedError:
    """503: nobody came to serve it in time."""
    message = (
        f"request timed out in queue and no endpoints are available: waited {waited_seconds:.3g} s"
    )
    return _unavailable(message, DropReason.NO_ENDPOINTS, NO_ENDPOINTS_RETRY_SECONDS)


def shutting_down() -> RefusedError:
    """503: the picker lets nobody in any more."""
    message = "internal flow control error: the endpoint picker is shutting down"
    return _unavailable(message, DropReason.SHUTTING_DOWN, SHUTTING_DOWN_RETRY_SECONDS)


def _unavailable(message: str, reason: DropReason, retry_after_seconds: int) -> RefusedError:
    return RefusedError(Code.SERVICE_UNAVAILABLE, message, reason, retry_after_seconds)
