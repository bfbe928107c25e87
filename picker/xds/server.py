"""The methods of endpoint discovery, which carry sessions over gRPC calls.

A stream is read and written at the same time: each request and each change of the cache wakes the
writer, which asks the session for the next response. The session allows one unanswered response, so
a slow client receives the latest state when it is ready, and nothing is queued.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from picker.metrics.picker_metrics import XdsSeries
from picker.rpc.call import Served, streaming
from picker.rpc.calls import Read, RpcError, Status, Write
from picker.xds import wire
from picker.xds.state.cache import Cache, ResourceSet
from picker.xds.state.delta import DeltaSession
from picker.xds.state.sotw import SotwSession
from picker.xds.state.subscription import Acknowledgement

log = logging.getLogger(__name__)

MAX_NAMES = 4096  # remembered per client
MAX_LINES = 20  # of the log, in a burst, per client
LINE_SECONDS = 60.0  # until a client may cause another line
_MAX_SHOWN = 10  # names in one line of the log
_MAX_TEXT = 160  # characters of a client's text

Q = TypeVar("Q")
R = TypeVar("R")
Q_in = TypeVar("Q_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)


class Session(Protocol[Q_in, R_out]):
    @property
    def names(self) -> frozenset[str]: ...

    @property
    def remembered(self) -> int:
        """A lower bound on the number of names that the session stores."""

    def receive(self, request: Q_in) -> Acknowledgement:
        """Process a request; return its answer to the last response."""

    def poll(self, current: ResourceSet | None) -> R_out | None: ...


@dataclass(frozen=True, slots=True)
class Variant(Generic[Q, R]):
    """One variant of the protocol: its name, its sessions and its messages."""

    name: str
    begin: Callable[[], Session[Q, R]]
    decode: Callable[[bytes], wire.DecodedRequest[Q]]
    encode: Callable[[R], bytes]


SOTW = Variant("sotw", lambda: SotwSession(wire.emptied), wire.sotw_request, wire.sotw_response)
DELTA = Variant("delta", DeltaSession, wire.delta_request, wire.delta_response)


class EndpointDiscovery:
    def __init__(self, cache: Cache, series: XdsSeries) -> None:
        self._cache = cache
        self._series = series

    def methods(self) -> Mapping[str, Served]:
        """Return the methods of the endpoint service and of the aggregated one, by path."""
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
        data = await read()
        if data is None:
            raise RpcError(Status.INVALID_ARGUMENT, "a request without a message")
        decoded = wire.sotw_request(data)
        _refuse_other_types(decoded.type_url)
        if self._cache.current is None:
            raise RpcError(Status.UNAVAILABLE, "the endpoints are not known yet")
        session = SOTW.begin()
        session.receive(decoded.request)
        response = session.poll(self._cache.current)
        if response is None:
            if session.names & self._cache.current.awaited:
                raise RpcError(Status.UNAVAILABLE, "the endpoints are not known yet")
            served = _listed(self._cache.current.resources)
            text = f"no endpoints of {_listed(session.names)} here, only of {served}"
            raise RpcError(Status.NOT_FOUND, text)
        await write(wire.sotw_response(response))


class _Lines:
    """Limits the log lines that one client can cause."""

    def __init__(self) -> None:
        self._left = float(MAX_LINES)
        self._taken_at_seconds = self._clock()

    def take(self) -> bool:
        now = self._clock()
        gained = (now - self._taken_at_seconds) / LINE_SECONDS
        self._left, self._taken_at_seconds = min(self._left + gained, MAX_LINES), now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()


class _Client(Generic[Q, R]):
    """One stream. Owns its session and the limit on its log lines."""

    def __init__(
        self, cache: Cache, series: XdsSeries, variant: Variant[Q, R], is_aggregated: bool
    ) -> None:
        self._cache, self._series, self._variant = cache, series, variant
        self._is_aggregated = is_aggregated
        self._session = variant.begin()
        self._wake = asyncio.Event()
        self._node_id = ""
        self._logged_problem = ""
        self._logged_names: set[str] = set()
        self._lines = _Lines()

    async def serve(self, read: Read, write: Write) -> None:
        """Serve until the client ends the stream. Raises `RpcError` for violations."""
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
            decoded = self._variant.decode(data)
            self._node_id = self._node_id or decoded.node_id
            if self._is_about_endpoints(decoded.type_url):
                self._take(decoded.request)
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
        """Return whether endpoints are requested. Raises `RpcError` for a type that is refused."""
        if not self._is_aggregated:
            _refuse_other_types(type_url)
            return True
        if not type_url:
            raise RpcError(Status.INVALID_ARGUMENT, "a request without a type")
        if type_url == wire.ENDPOINT_TYPE:
            return True
        if type_url not in self._logged_names and self._lines.take():
            self._logged_names.add(type_url)
            log.info("%s requests %s: only endpoints are served here", self, _shown(type_url))
        return False

    def _take(self, request: Q) -> None:
        problem = getattr(request, "problem", None)
        acknowledged = self._session.receive(request)
        if acknowledged is Acknowledgement.ACK:
            self._series.acks_total.labels(self._variant.name).inc()
            self._logged_problem = ""
        elif acknowledged is Acknowledgement.NACK:
            self._series.nacks_total.labels(self._variant.name).inc()
            if problem is not None and problem != self._logged_problem and self._lines.take():
                self._logged_problem = problem
                log.error("%s rejects the endpoints: %s", self, _shown(problem))
        if self._session.remembered > MAX_NAMES:
            text = f"a client may name {MAX_NAMES} resources"
            raise RpcError(Status.RESOURCE_EXHAUSTED, text)

    def _log_unserved_names(self) -> None:
        """Log once each name that is requested and not served."""
        current = self._cache.current
        if current is None:
            return
        unserved = self._session.names - current.resources.keys() - current.awaited
        unserved -= self._logged_names
        if unserved and self._lines.take():
            self._logged_names |= unserved
            served = _listed(current.resources)
            log.warning("%s requests endpoints of %s; served: %s", self, _listed(unserved), served)

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
    """Return a client's text, made printable and cut to fit into one line of the log."""
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    return "".join(letter if letter.isprintable() else " " for letter in short)
