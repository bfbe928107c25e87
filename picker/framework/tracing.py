"""What the picker needs of a tracer; `picker.telemetry.tracing` makes a real one.

The span that is open in a decision is one of its findings, so that steps become parts of it. It is
there only where somebody will see it: most traces are not sampled, and cost no more than a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from picker.framework.attributes import DataKey

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Span(Protocol):
    """A stretch of time of one request."""

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it, and spans within it."""

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Say something about it."""

    def fail(self, description: str) -> None:
        """It ended in an error."""

    def end(self) -> None:
        """It is over; called once."""

    def propagation(self) -> Mapping[str, str]:
        """Headers that make what the endpoint does a part of it."""


class Tracer(Protocol):
    """Begins spans; must be quick and must not raise."""

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        """The span of a whole request that began `age_seconds` ago.

        Its parent is what `headers` (lower case) name, if anything.
        """

    def begin(self, name: str, parent: Span) -> Span:
        """A span within `parent`, which this tracer began."""


class NoSpan:
    """Nobody watches."""

    __slots__ = ()
    is_recorded = False

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Ignore."""

    def fail(self, description: str) -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""

    def propagation(self) -> Mapping[str, str]:
        """No headers."""
        return _NOTHING


NO_SPAN = NoSpan()
# The span within which the next step of a decision takes place.
OPEN_SPAN: DataKey[Span] = DataKey("Span", "director")


class NoTracer:
    """Traces nothing."""

    __slots__ = ()

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        """No span."""
        return NO_SPAN

    def begin(self, name: str, parent: Span) -> Span:
        """No span."""
        return NO_SPAN
