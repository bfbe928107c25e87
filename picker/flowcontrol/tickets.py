"""A dispatched request, until it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from picker.errors import DropReason
from picker.framework.flow import QueuedRequest
from picker.types import FinishCause, Usage

Evict: TypeAlias = Callable[[DropReason], None]


class TicketObserver(Protocol):
    """The owner of tickets, notified of their progress."""

    def ticket_left(self, ticket: FlowTicket) -> None: ...

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None: ...


class FlowTicket:
    """Counts as admitted until `left`, in flight until `closed`. Repeated calls have no effect."""

    __slots__ = (
        "_observer",
        "dispatched_at_seconds",
        "endpoint_key",
        "evict",
        "is_closed",
        "item",
        "priority",
    )

    def __init__(
        self,
        item: QueuedRequest,
        priority: int,
        evict: Evict | None,
        dispatched_at_seconds: float,
        observer: TicketObserver,
    ) -> None:
        self.item = item
        self.priority = priority
        self.evict = evict
        self.dispatched_at_seconds = dispatched_at_seconds
        self.endpoint_key: str | None = None
        self.is_closed = False
        self._observer = observer

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
