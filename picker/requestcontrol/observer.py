"""What can be watched about requests: the shape of the outcomes and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from picker.errors import Code
from picker.types import Candidate, FinishCause, InferenceRequest, SchedulingResult


@dataclass(frozen=True, slots=True)
class Decision:
    """One successful decision, with everything needed to explain it.

    `candidates` are what the scheduler saw. For a request without a body `result` is None: any
    endpoint will do.
    """

    request_id: str
    incoming_model: str
    target_model: str
    destination: str
    size_bytes: int
    seconds: float
    candidates: Sequence[Candidate]
    request: InferenceRequest | None = None
    result: SchedulingResult | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Every request has exactly one.

    `endpoint_key` is None when no endpoint was chosen. `response_status` is what the client was
    sent, None when no response was seen. `refusal` is the code of a refusal by the director; a body
    over the size limit is refused before that, and shows in `cause` and `response_status` alone.
    """

    request_id: str
    incoming_model: str
    target_model: str
    cause: FinishCause
    seconds: float
    endpoint_key: str | None = None
    response_status: int | None = None
    served_by: str | None = None
    refusal: Code | None = None


class RequestObserver(Protocol):
    """Told of every decision and every outcome; must be quick and must not raise."""

    def decided(self, decision: Decision) -> None:
        """An endpoint was chosen; the request is about to leave."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """The request is over, whatever ended it."""
        ...

    def plugin_failed(self, plugin: str) -> None:
        """A data producer or hook raised something other than a refusal; its type's name."""
        ...


class NoObserver:
    """Watches nothing."""

    def decided(self, decision: Decision) -> None:
        """Ignore."""

    def finished(self, outcome: Outcome) -> None:
        """Ignore."""

    def plugin_failed(self, plugin: str) -> None:
        """Ignore."""
