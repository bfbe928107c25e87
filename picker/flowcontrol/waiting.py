"""A request in flow control: while it waits, and from its dispatch to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from picker.errors import DropReason, RefusedError
from picker.flowcontrol.outcomes import FlowOutcome
from picker.flowcontrol.removable_heap import RemovableHeap
from picker.framework.flow import QueuedRequest
from picker.types import BYTES_PER_TOKEN, DEFAULT_FAIRNESS_ID, FinishCause, InferenceRequest, Usage

Evict: TypeAlias = Callable[[DropReason], None]
Labels = tuple[str, str, str, str]  # model, target, fairness id, priority


class TicketObserver(Protocol):
    def ticket_left(self, ticket: FlowTicket) -> None: ...

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None: ...


class FlowTicket(msgspec.Struct, eq=False):
    """Counts as admitted until `left`, in flight until `closed`. Repeated calls have no effect."""

    item: QueuedRequest
    priority: int
    evict: Evict | None
    dispatched_at_seconds: float
    _observer: TicketObserver
    endpoint_key: str | None = None
    is_closed: bool = False

    @property
    def queue_seconds(self) -> float:
        return self.dispatched_at_seconds - self.item.enqueued_at_seconds

    @property
    def has_left(self) -> bool:
        return self.endpoint_key is not None

    def left(self, endpoint_key: str) -> None:
        if self.endpoint_key is None and not self.is_closed:
            self.endpoint_key = endpoint_key
            self._observer.ticket_left(self)

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.evict = None  # it references the whole request, this ticket included
            self._observer.ticket_closed(self, usage)


DEFAULT_OUTPUT_TOKENS = 128
MAX_OUTPUT_TOKENS = 32_768  # clients name more than they use
TICK_SECONDS = 0.001  # the resolution of the event loop's timers


def queued_request(
    request: InferenceRequest, sequence: int, now_seconds: float, ttl_seconds: float | None
) -> QueuedRequest:
    if not request.fairness_id:
        request = replace(request, fairness_id=DEFAULT_FAIRNESS_ID)
    prompt_tokens = request.num_tokens or request.size_bytes // BYTES_PER_TOKEN
    output_tokens = request.body.max_output_tokens
    if output_tokens is None:
        output_tokens = DEFAULT_OUTPUT_TOKENS
    return QueuedRequest(
        request,
        sequence,
        now_seconds,
        size_bytes=request.size_bytes,
        held_bytes=request.held_bytes,
        tokens=prompt_tokens + max(0, min(output_tokens, MAX_OUTPUT_TOKENS)),
        ttl_seconds=ttl_seconds,
    )


class Waiting(msgspec.Struct, eq=False):
    """A request that waits until it has a `ticket` or a `refusal`; `wake` is called then."""

    item: QueuedRequest
    priority: int
    evict: Evict | None
    labels: Labels
    ticket: FlowTicket | None = None
    refusal: RefusedError | None = None
    outcome: FlowOutcome = FlowOutcome.NOT_YET
    wake: Callable[[], None] | None = None

    @property
    def is_resolved(self) -> bool:
        return self.ticket is not None or self.refusal is not None

    def resolve(self, result: FlowTicket | RefusedError) -> None:
        if isinstance(result, FlowTicket):
            self.ticket = result
        else:
            self.refusal = result
        if self.wake is not None:
            self.wake()


class Deadlines:
    """Owns the deadlines of waiting requests, from arrival or since the pool emptied or filled."""

    def __init__(self) -> None:
        self._heap: RemovableHeap[float, Waiting] = RemovableHeap()
        self._no_endpoint_ttl_seconds: float | None = None
        self._turned_at = 0.0
        self.pool_is_empty = False

    @property
    def next_seconds(self) -> float | None:
        first = self._heap.first()
        return None if first is None else first[0]

    def use(self, no_endpoint_ttl_seconds: float | None, waiting: Iterable[Waiting]) -> None:
        self._no_endpoint_ttl_seconds = no_endpoint_ttl_seconds
        self._heap.clear()
        for one in waiting:
            self.add(one)

    def pool_seen(self, is_empty: bool, waiting: Iterable[Waiting], now_seconds: float) -> None:
        if is_empty is not self.pool_is_empty:
            self.pool_is_empty = is_empty
            self._turned_at = now_seconds
            self.use(self._no_endpoint_ttl_seconds, waiting)

    def add(self, waiting: Waiting) -> None:
        item = waiting.item
        ttl = self._no_endpoint_ttl_seconds if self.pool_is_empty else item.ttl_seconds
        if ttl is not None:
            since = max(item.enqueued_at_seconds, self._turned_at)
            self._heap.push(since + ttl, item.sequence, waiting)

    def remove(self, waiting: Waiting) -> None:
        self._heap.remove(waiting.item.sequence)

    def due(self, now_seconds: float) -> Waiting | None:
        first = self._heap.first()
        return first[1] if first is not None and first[0] <= now_seconds + TICK_SECONDS else None

    def check_integrity(self, waiting: Iterable[Waiting]) -> None:
        if not set(self._heap) <= set(waiting):
            raise AssertionError("a deadline belongs to a request that does not wait")
