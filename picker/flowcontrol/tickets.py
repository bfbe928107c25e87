"""A request that was let in, until it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from picker.errors import DropReason
from picker.framework.flow import QueuedRequest
from picker.types import FinishCause, Usage

Evict: TypeAlias = Callable[[DropReason], None]


class TicketOffice(Protocol):
    """The owner of tickets, notified of their progress."""

    def ticket_left(self, ticket: FlowTicket) -> None:
        """It has left for an endpoint."""
        ...

    def ticket_closed(self, ticket: FlowTicket, usage: Usage | None) -> None:
        """It is over."""
        ...


class FlowTicket:
    """Counts as let in until `left`, as under way until `closed`.

    `priority` is that of its band. Whatever is called a second time, or after the end, does
    nothing.
    """

    __slots__ = (
        "_office",
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
        office: TicketOffice,
    ) -> None:
        self.item = item
        self.priority = priority
        self.evict = evict
        self.dispatched_at_seconds = dispatched_at_seconds
        self.endpoint_key: str | None = None
        self.is_closed = False
        self._office = office

    @property
    def queue_seconds(self) -> float:
        """How long it waited."""
        return self.dispatched_at_seconds - self.item.enqueued_at_seconds

    @property
    def has_left(self) -> bool:
        """True if it left for an endpoint."""
        return self.endpoint_key is not None

    def left(self, endpoint_key: str) -> None:
        """It counts as under way at this endpoint from now on."""
        if self.endpoint_key is None and not self.is_closed:
            self.endpoint_key = endpoint_key
            self._office.ticket_left(self)

    def closed(self, cause: FinishCause, usage: Usage | None) -> None:
        """It is over, and counts as under way nowhere any more."""
        if not self.is_closed:
            self.is_closed = True
            self.evict = None  # it holds all that there was of the request, this ticket included
            self._office.ticket_closed(self, usage)
