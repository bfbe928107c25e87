"""What the director needs of a tracer; `picker.admin.tracing` makes a real one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

_NOTHING: Mapping[str, str] = MappingProxyType({})


class Span(Protocol):
    """A stretch of time of one request."""

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Say something about it."""
        ...

    def fail(self, description: str) -> None:
        """It ended in an error."""
        ...

    def end(self) -> None:
        """It is over; called once."""
        ...

    def propagation(self) -> Mapping[str, str]:
        """Headers that make what the endpoint does a part of it."""
        ...


class Tracer(Protocol):
    """Begins spans; must be quick and must not raise."""

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        """The span of a whole request that began `age_seconds` ago.

        Its parent is what `headers` (lower case) name, if anything.
        """
        ...

    def begin(self, name: str, parent: Span) -> Span:
        """A span within `parent`, which this tracer began."""
        ...


class NoSpan:
    """Nobody watches."""

    __slots__ = ()

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


class NoTracer:
    """Traces nothing."""

    __slots__ = ()

    def begin_request(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        """No span."""
        return NO_SPAN

    def begin(self, name: str, parent: Span) -> Span:
        """No span."""
        return NO_SPAN
