"""What can be watched about requests: the shape of the outcomes and who is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from picker.errors import RefusedError
from picker.framework.attributes import Attributes
from picker.pool.policies import Rewritten
from picker.types import Candidate, FinishCause, InferenceRequest, SchedulingResult, Usage


class Decision(msgspec.Struct, frozen=True):
    """One successful decision, with everything needed to explain it.

    `candidates` are what the scheduler saw. For a request without a body `result` is None: any
    endpoint will do. `number` is the request's, see `RequestObserver`. It arrived and was decided
    at these times, on the clock of the requests; `seconds` is what the picker took, `queue_seconds`
    the part of it that the request waited for admission. `rewritten` is what a rule made of the
    model (None: no rule did), `set_headers` what was added to the request. `attributes` are what
    producers found. `seed` is what every random draw of this decision came from (None: draws are
    not kept apart).
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
    queue_seconds: float = 0.0
    rewritten: Rewritten | None = None
    set_headers: Sequence[tuple[str, str]] = ()
    attributes: Attributes | None = None
    seed: int | None = None
    number: int = 0
    received_at_seconds: float = 0.0
    at_seconds: float = 0.0


class ResponseTimes(msgspec.Struct, frozen=True):
    """How a response went, as far as it passed through the picker.

    `ttft_seconds` is from the arrival of the request to the first piece of the body that is not
    empty (None: there was none); `num_bytes` counts the body as the endpoint sent it.
    `processing_seconds` is what the picker added to it.
    """

    is_streaming: bool
    num_bytes: int = 0
    ttft_seconds: float | None = None
    processing_seconds: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """How one request ended. Every request has exactly one.

    `endpoint_key` is None when no endpoint was chosen. `response_status` is what the client was
    sent, None when no response was seen. `refusal` is the director's; a body over the size limit is
    refused before that, and shows in `cause` and `response_status` alone. `response` and `usage`
    are None where the picker did not see a body, or it said nothing. `queue_seconds` is what the
    request waited for admission. `request` is None when it was refused before it was understood.
    `number` is its own, see `RequestObserver`.
    """

    request_id: str
    incoming_model: str
    target_model: str
    cause: FinishCause
    seconds: float
    endpoint_key: str | None = None
    response_status: int | None = None
    served_by: str | None = None
    refusal: RefusedError | None = None
    fairness_id: str = ""
    priority: int = 0
    usage: Usage | None = None
    response: ResponseTimes | None = None
    queue_seconds: float = 0.0
    request: InferenceRequest | None = None
    number: int = 0


class RequestObserver(Protocol):
    """Told of every decision and every outcome; must be quick and must not raise.

    Each request of a process has a number of its own, whatever id its client gave it.
    """

    def waits(self, number: int, request: InferenceRequest) -> None:
        """A request is understood and may have to wait before it is decided: until flow control
        lets it in, or for what a producer asks others.
        """
        ...

    def decided(self, decision: Decision) -> None:
        """An endpoint was chosen; the request is about to leave."""
        ...

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """A piece of a streaming response has come, so long after the one before."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """The request is over, whatever ended it."""
        ...

    def plugin_failed(self, plugin: str) -> None:
        """A plugin raised something other than a refusal, or took too long; its name."""
        ...


class Observers:
    """Tells several observers, in order."""

    def __init__(self, observers: Iterable[RequestObserver]) -> None:
        every = tuple(observers)
        # Bound once: every request is told of several times.
        self._waits = tuple(one.waits for one in every)
        self._decided = tuple(one.decided for one in every)
        self._streamed = tuple(one.streamed for one in every)
        self._finished = tuple(one.finished for one in every)
        self._plugin_failed = tuple(one.plugin_failed for one in every)

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Tell them."""
        for tell in self._waits:
            tell(number, request)

    def decided(self, decision: Decision) -> None:
        """Tell them."""
        for tell in self._decided:
            tell(decision)

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Tell them."""
        for tell in self._streamed:
            tell(request, gap_seconds)

    def finished(self, outcome: Outcome) -> None:
        """Tell them."""
        for tell in self._finished:
            tell(outcome)

    def plugin_failed(self, plugin: str) -> None:
        """Tell them."""
        for tell in self._plugin_failed:
            tell(plugin)


class NoObserver:
    """Watches nothing."""

    def waits(self, number: int, request: InferenceRequest) -> None:
        """Ignore."""

    def decided(self, decision: Decision) -> None:
        """Ignore."""

    def streamed(self, request: InferenceRequest, gap_seconds: float) -> None:
        """Ignore."""

    def finished(self, outcome: Outcome) -> None:
        """Ignore."""

    def plugin_failed(self, plugin: str) -> None:
        """Ignore."""
