"""The port on which replicas tell this one what they do."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from picker.errors import PickerError
from picker.metrics.families import PeerSeries
from picker.peers.credentials import PeerCredentials
from picker.peers.exchange import Exchange, PeerRefusedError
from picker.peers.wire import MAX_MESSAGE_BYTES, TELL_METHOD, PeerMessageError, decoded_told

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0  # for a caller to say who it is
SILENCE_SECONDS = 30.0  # after which a call is ended: nobody lives there any more
MAX_CALLS = 256  # for each pool
MAX_COMPLAINTS = 256  # that are remembered, not to be logged again
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
]


@dataclass(frozen=True, slots=True)
class PeerPort:
    """Where to listen, as `host:port` (port 0: a free one). Without credentials anybody who
    reaches it is believed.
    """

    address: str
    credentials: PeerCredentials | None = None


class _NotYetError(PickerError):
    """The pool that a call is about is not known here yet."""


class Hearing:
    """What is heard of one pool. Owns the count of those who tell it.

    Callers are put off until `is_ready`: what is told of endpoints that nobody knows here is lost.
    """

    def __init__(
        self, exchange: Exchange, series: PeerSeries, is_ready: Callable[[], bool]
    ) -> None:
        self.exchange, self.series, self.is_ready = exchange, series, is_ready
        self._callers: dict[bytes, int] = {}  # calls by who makes them

    def begins(self, peer: bytes, address: str) -> None:
        """`peer` has called."""
        self._callers[peer] = self._callers.get(peer, 0) + 1
        self.series.heard.set(len(self._callers))
        log.info("peer %s tells what it does (%s)", peer.hex()[:8], address)

    def count(self, message: bytes) -> None:
        """It has told something."""
        self.series.messages_total.labels("received").inc()
        self.series.bytes_total.labels("received").inc(len(message))

    def ends(self, peer: bytes) -> None:
        """The call is over."""
        self._callers[peer] -= 1
        if not self._callers[peer]:
            del self._callers[peer]
        self.series.heard.set(len(self._callers))
        log.info("peer %s does not tell any more", peer.hex()[:8])


class PeerServer:
    """Owns the port and the calls on it. `pools` are what is heard of, by the pools' names."""

    def __init__(self, pools: Mapping[str, Hearing], clock: Callable[[], float]) -> None:
        """Of one pool and more."""
        self._pools, self._clock = dict(pools), clock
        self._first = next(iter(self._pools.values()))
        self._server: grpc.aio.Server | None = None
        self._calls = 0
        self._complaints: deque[tuple[str, str]] = deque(maxlen=MAX_COMPLAINTS)

    async def start(self, port: PeerPort) -> int:
        """Listen; the port. Raises `OSError` when it cannot be had."""
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_OneMethod(self._serve),))
        try:
            if port.credentials is None:
                number = int(server.add_insecure_port(port.address))
            else:
                number = int(server.add_secure_port(port.address, port.credentials.of_server()))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {port.address}: {error}") from error
        await server.start()
        self._server = server
        return number

    async def stop(self) -> None:
        """End all calls."""
        if self._server is not None:
            await self._server.stop(0)

    async def _serve(self, _: object, context: grpc.aio.ServicerContext) -> None:
        if self._calls >= MAX_CALLS * len(self._pools):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
        self._calls += 1
        hearing = self._first  # what is refused before it is about a pool is counted there
        try:
            if not any(one.is_ready() for one in self._pools.values()):
                raise _NotYetError
            first = await _read(context, HELLO_SECONDS)
            if first is not None:
                hearing = self._hearing(first)
                await self._listen(context, hearing, first)
        except _NotYetError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the pool is not known here yet")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "not in time")
        except PeerRefusedError as error:
            self._refuse(context, hearing, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except PeerMessageError as error:
            self._refuse(context, hearing, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._calls -= 1

    async def _listen(
        self, context: grpc.aio.ServicerContext, hearing: Hearing, first: bytes
    ) -> None:
        if not hearing.is_ready():
            raise _NotYetError
        peer, answer = hearing.exchange.greeted(first, self._clock())
        async with asyncio.timeout(HELLO_SECONDS):  # who reads nothing must not keep a place
            await context.write(answer)
        if peer == hearing.exchange.replica_id:
            return
        hearing.begins(peer, context.peer())
        try:
            while (message := await _read(context, SILENCE_SECONDS)) is not None:
                hearing.count(message)
                hearing.exchange.hear(peer, message, self._clock())
        finally:
            hearing.ends(peer)

    def _hearing(self, first: bytes) -> Hearing:
        """Which pool a call is about. Raises `PeerMessageError` or `PeerRefusedError`."""
        if len(self._pools) == 1:
            return self._first
        hello = decoded_told(first).hello
        if hello is None:
            raise PeerMessageError("a call begins with a hello")
        found = self._pools.get(hello.pool)
        if found is None:
            served = ", ".join(self._pools)
            raise PeerRefusedError(
                f"this is a replica of the pools {served}, not of {hello.pool!r}"
            )
        return found

    def _refuse(
        self, context: grpc.aio.ServicerContext, hearing: Hearing, error: Exception
    ) -> None:
        hearing.series.messages_refused_total.inc()
        # Who serves other pools, too, tries again every few seconds, and is told again.
        complaint = (context.peer().rpartition(":")[0], str(error))
        if complaint not in self._complaints:
            self._complaints.append(complaint)
            log.warning("%s was refused: %s", context.peer(), error)


class _OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the only method; every other one is UNIMPLEMENTED."""

    def __init__(self, serve: Any) -> None:
        self._method = grpc.stream_stream_rpc_method_handler(serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method, None for another name."""
        return self._method if handler_call_details.method == TELL_METHOD else None


async def _read(context: grpc.aio.ServicerContext, seconds: float) -> bytes | None:
    """The next message; None: the caller has ended. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        try:
            message = await context.read()
        except grpc.aio.BaseError:
            return None
    return None if message is grpc.aio.EOF else bytes(message)
