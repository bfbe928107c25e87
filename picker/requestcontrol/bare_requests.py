"""Requests without a body: whom they may go to, and what is set on their responses.

Nothing is known about such a request but its headers, so the scheduler is not asked, and few
plugins have anything to say. Those that need no more than headers say it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from picker.requestcontrol.plugin_log import PluginLog
from picker.requestcontrol.responses import CONSEQUENCE, NO_METADATA
from picker.types import Candidate, Metadata, ResponseHead


@runtime_checkable
class BareFilter(Protocol):
    """A filter that goes by headers alone."""

    def narrow(
        self, headers: Mapping[str, str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """The candidates that may serve."""
        ...


@runtime_checkable
class BareResponseHook(Protocol):
    """Told of the beginning of a response to whichever request."""

    def bare_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        """Headers to set on the response, if any."""
        ...


class BareRequests(msgspec.Struct, frozen=True):
    """What a configuration says of requests without a body."""

    filters: tuple[BareFilter, ...] = ()
    heads: tuple[BareResponseHook, ...] = ()

    def narrowed(
        self, headers: Mapping[str, str], candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """The candidates that every filter leaves. Raises what a filter raises."""
        for one in self.filters:
            candidates = one.narrow(headers, candidates)
        return candidates

    def tap(self, log: PluginLog) -> BareResponse | None:
        """What watches the response; None when nobody wants to."""
        return BareResponse(self.heads, log) if self.heads else None


class BareResponse:
    """A `ResponseTap` that sets headers, and lets bodies pass. Stateless."""

    __slots__ = ("_heads", "_log")

    def __init__(self, heads: Sequence[BareResponseHook], log: PluginLog) -> None:
        self._heads = heads
        self._log = log

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        """The headers that the hooks want, a later hook's last."""
        headers: dict[str, str] = {}
        log = self._log
        for hook in self._heads:
            try:
                headers.update(hook.bare_response_head(head) or {})
            except Exception as error:
                log.exception(hook, error, CONSEQUENCE)
        return tuple(headers.items())

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        """The piece as it is."""
        del is_last
        return data, NO_METADATA

    def end(self) -> bytes:
        """Nothing is ever held back."""
        return b""


NOTHING_SAID = BareRequests()
