"""The methods of endpoint discovery: carries sessions over calls of gRPC.

Theory of operation. A stream is read and written at the same time. What is read goes to the
session; that, and every change of the cache, wakes the writer, which asks the session what to send.
The session sees to it that at most one response is under way, so a slow client is sent the
latest state when it is ready for it, and nothing is ever queued.

Streams end when the client ends them, breaks the protocol or names more than `MAX_NAMES` resources.
A subscription to what is not served here is answered as the protocol says, with silence or with a
removal, and named in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from picker.metrics.families import XdsSeries
from picker.rpc.call import Served, streaming
from picker.rpc.calls import Read, RpcError, Status, Write
from picker.xds import wire
from picker.xds.state.cache import Cache, ResourceSet
from picker.xds.state.delta import DeltaSession
from picker.xds.state.sotw import SotwSession
from picker.xds.state.subscription import Acknowledgement

log = logging.getLogger(__name__)

MAX_NAMES = 4096  # that a client may have remembered
MAX_LINES = 20  # of the log that a client may fill at once
LINE_SECONDS = 60.0  # for another one
_MAX_SHOWN = 10  # names in one line
_MAX_TEXT = 160  # characters of what a client says

Q = TypeVar("Q")
R = TypeVar("R")
Q_in = TypeVar("Q_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)


class Session(Protocol[Q_in, R_out]):
    """The decisions about one client; see `sotw` and `delta`."""

    @property
    def names(self) -> frozenset[str]:
        """What the client subscribes to by name."""
        ...

    @property
    def remembered(self) -> int:
        """How many names it holds on to, at least."""
        ...

    def receive(self, request: Q_in) -> Acknowledgement:
        """A request has come."""
        ...

    def poll(self, current: ResourceSet | None) -> R_out | None:
        """What to send now, if anything."""
        ...


@dataclass(frozen=True, slots=True)
class Variant(Generic[Q, R]):
    """One form of the protocol: its name, its decisions and its messages."""

    name: str
    begin: Callable[[], Session[Q, R]]
    decode: Callable[[bytes], wire.Asked[Q]]
    encode: Callable[[R], bytes]


SOTW = Variant("sotw", lambda: SotwSession(wire.emptied), wire.sotw_request, wire.sotw_response)
DELTA = Variant("delta", DeltaSession, wire.delta_request, wire.delta_response)


class EndpointDiscovery:
    """Serves what is in `cache`; counts in `series`."""

    def __init__(self, cache: Cache, series: XdsSeries) -> None:
        self._cache = cache
        self._series = series

    def methods(self) -> Mapping[str, Served]:
        """Paths to methods: of the service of endpoints, and of the one for all types, where only
        endpoints are answered for.
        """
        return {
            wire.STREAM_ENDPOINTS: self._streams(SOTW),
            wire.DELTA_ENDPOINTS: self._streams(DELTA),
            wire.STREAM_AGGREGATED: self._streams(SOTW, is_aggregated=True),
            wire.DELTA_AGGREGATED: self._streams(DELTA, is_aggregated=True),
            wire.FETCH_ENDPOINTS: streaming(self.fetch),
        }

    def _streams(self, variant: Variant[Q, R], is_aggregated: bool = False) -> Served:
        async def stream(read: Read, write: Write) -> None:
            await _Client(self._cache, self._series, variant, is_aggregated).serve(read, write)

        return streaming(stream)

    async def fetch(self, read: Read, write: Write) -> None:
        """What is true now, once."""
        data = await read()
        if data is None:
            raise RpcError(Status.INVALID_ARGUMENT, "a request without a message")
        asked = wire.sotw_request(data)
        _refuse_other_types(asked.type_url)
        if self._cache.current is None:
            raise RpcError(Status.UNAVAILABLE, "the endpoints are not known yet")
        session = SOTW.begin()
        session.receive(asked.request)
        response = session.poll(self._cache.current)
        if response is None:
            if session.names & self._cache.current.awaited:
                raise RpcError(Status.UNAVAILABLE, "the endpoints are not known yet")
            served = _listed(self._cache.current.resources)
            text = f"no endpoints of {_listed(session.names)} here, only of {served}"
            raise RpcError(Status.NOT_FOUND, text)
        await write(wire.sotw_response(response))


class _Lines:
    """How many lines of the log a client may fill now: what it says is its own choice."""

    def __init__(self) -> None:
        self._left = float(MAX_LINES)
        self._looked_at_seconds = self._clock()

    def take(self) -> bool:
        """True if there is one more."""
        now = self._clock()
        gained = (now - self._looked_at_seconds) / LINE_SECONDS
        self._left, self._looked_at_seconds = min(self._left + gained, MAX_LINES), now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()


class _Client(Generic[Q, R]):
    """One stream. Owns its session, and what was logged about it."""

    def __init__(
        self, cache: Cache, series: XdsSeries, variant: Variant[Q, R], is_aggregated: bool
    ) -> None:
        self._cache, self._series, self._variant = cache, series, variant
        self._is_aggregated = is_aggregated
        self._session = variant.begin()
        self._wake = asyncio.Event()
        self._node_id = ""
        self._complaint = ""
        self._strange: set[str] = set()
        self._lines = _Lines()

    async def serve(self, read: Read, write: Write) -> None:
        """Until the client ends the stream. Raises `RpcError` when it breaks the protocol."""
        self._cache.watch(self._wake.set)
        self._series.clients.inc()
        try:
            async with asyncio.TaskGroup() as group:
                pushing = group.create_task(self._push(write), name="endpoint discovery")
                await self._listen(read)
                pushing.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._series.clients.dec()
            self._cache.unwatch(self._wake.set)

    async def _listen(self, read: Read) -> None:
        while (data := await read()) is not None:
            asked = self._variant.decode(data)
            self._node_id = self._node_id or asked.node_id
            if self._is_about_endpoints(asked.type_url):
                self._take(asked.request)
                self._wake.set()

    async def _push(self, write: Write) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._log_unserved_names()
            response = self._session.poll(self._cache.current)
            if response is not None:
                self._series.responses_total.labels(self._variant.name).inc()
                await write(self._variant.encode(response))

    def _is_about_endpoints(self, type_url: str) -> bool:
        """Where other types may be asked for, there is silence about them. Raises `RpcError`."""
        if not self._is_aggregated:
            _refuse_other_types(type_url)
            return True
        if not type_url:
            raise RpcError(Status.INVALID_ARGUMENT, "a request of no type")
        if type_url == wire.ENDPOINT_TYPE:
            return True
        if type_url not in self._strange and self._lines.take():
            self._strange.add(type_url)
            log.info("%s asks for %s: only endpoints are served here", self, _shown(type_url))
        return False

    def _take(self, request: Q) -> None:
        problem = getattr(request, "problem", None)
        acknowledged = self._session.receive(request)
        if acknowledged is Acknowledgement.ACK:
            self._series.acks_total.labels(self._variant.name).inc()
            self._complaint = ""
        elif acknowledged is Acknowledgement.NACK:
            self._series.nacks_total.labels(self._variant.name).inc()
            if problem is not None and problem != self._complaint and self._lines.take():
                self._complaint = problem
                log.error("%s refuses the endpoints it was sent: %s", self, _shown(problem))
        if self._session.remembered > MAX_NAMES:
            text = f"a client may name {MAX_NAMES} resources"
            raise RpcError(Status.RESOURCE_EXHAUSTED, text)

    def _log_unserved_names(self) -> None:
        """Say once of each name that is asked for and not served what is served instead."""
        current = self._cache.current
        if current is None:
            return
        strange = self._session.names - current.resources.keys() - current.awaited - self._strange
        if strange and self._lines.take():
            self._strange |= strange
            served = _listed(current.resources)
            log.warning("%s asks for endpoints of %s: here are %s", self, _listed(strange), served)

    def __str__(self) -> str:
        return f"the proxy '{_shown(self._node_id)}'" if self._node_id else "a proxy"


def _refuse_other_types(type_url: str) -> None:
    if type_url not in ("", wire.ENDPOINT_TYPE):
        text = f"'{type_url}' is not served here, only {wire.ENDPOINT_TYPE}"
        raise RpcError(Status.INVALID_ARGUMENT, text)


def _listed(names: Mapping[str, object] | frozenset[str] | set[str]) -> str:
    shown = [f"'{_shown(name)}'" for name in sorted(names)[:_MAX_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") or "none"


def _shown(text: str) -> str:
    """What a client says, in one line of the log that is not too long."""
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    return "".join(letter if letter.isprintable() else " " for letter in short)
