"""The port that receives the reports of other replicas."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from picker.errors import PickerError
from picker.metrics.picker_metrics import PeerSeries
from picker.peers.credentials import PeerCredentials
from picker.peers.exchange import PeerExchange, PeerRefusedError
from picker.peers.wire import MAX_MESSAGE_BYTES, REPORT_METHOD, PeerMessageError, decoded_report
from picker.rpc.call import Call, streaming
from picker.rpc.calls import Metadata, Read, Receiver, RpcError, Status, Write
from picker.rpc.options import ServerOptions
from picker.rpc.server import GrpcServer

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0  # for the hello of a caller
SILENCE_SECONDS = 30.0  # without a message, after which a call ends: its replica is gone
MAX_CALLS = 256  # per pool
MAX_COMPLAINTS = 256  # remembered so that each is logged once


def peer_port(host: str, port: int, credentials: PeerCredentials | None = None) -> ServerOptions:
    """Return the options of the port; without credentials every caller is trusted."""
    return ServerOptions(
        host,
        port,
        tls=None if credentials is None else credentials.of_server(),
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


class _NotYetError(PickerError): ...


class PoolReports:
    """The reports about one pool, which count once `is_ready`: when its endpoints are known."""

    def __init__(
        self, exchange: PeerExchange, series: PeerSeries, is_ready: Callable[[], bool]
    ) -> None:
        self.exchange, self.series, self.is_ready = exchange, series, is_ready
        self._callers: dict[bytes, int] = {}  # calls by replica

    def begin(self, peer: bytes, address: str) -> None:
        self._callers[peer] = self._callers.get(peer, 0) + 1
        self.series.reporting.set(len(self._callers))
        log.info("peer %s reports (%s)", peer.hex()[:8], address)

    def end(self, peer: bytes) -> None:
        self._callers[peer] -= 1
        if not self._callers[peer]:
            del self._callers[peer]
        self.series.reporting.set(len(self._callers))
        log.info("peer %s has stopped reporting", peer.hex()[:8])


class PeerServer:
    """Owns the port and its calls; `pools` (at least one) receive the reports, by pool name."""

    def __init__(self, pools: Mapping[str, PoolReports], clock: Callable[[], float]) -> None:
        self._pools, self._clock = dict(pools), clock
        self._first = next(iter(self._pools.values()))
        self._server: GrpcServer | None = None
        self._num_calls = 0
        self._complaints: deque[tuple[str, str]] = deque(maxlen=MAX_COMPLAINTS)

    async def start(self, port: ServerOptions) -> int:
        """Listen; return the port. Raises `OSError`."""
        self._server = GrpcServer(port, {REPORT_METHOD: self._open})
        return await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def _open(self, call: Call, metadata: Metadata) -> Receiver:
        return streaming(partial(self._serve, call.peer))(call, metadata)

    async def _serve(self, address: str, read: Read, write: Write) -> None:
        if self._num_calls >= MAX_CALLS * len(self._pools):
            raise RpcError(Status.RESOURCE_EXHAUSTED, "too many calls")
        self._num_calls += 1
        reports = self._first  # counts refusals of callers that have not named a pool
        try:
            if not any(one.is_ready() for one in self._pools.values()):
                raise _NotYetError
            first = await _next(read, HELLO_SECONDS)
            if first is not None:
                reports = self._pool_of(first)
                await self._receive(address, reports, first, read, write)
        except _NotYetError:
            raise RpcError(Status.UNAVAILABLE, "the pool is not known here yet") from None
        except TimeoutError:
            raise RpcError(Status.DEADLINE_EXCEEDED, "not in time") from None
        except PeerRefusedError as error:
            self._complain(address, reports, error)
            raise RpcError(Status.FAILED_PRECONDITION, str(error)) from error
        except PeerMessageError as error:
            self._complain(address, reports, error)
            raise RpcError(Status.INVALID_ARGUMENT, str(error)) from error
        finally:
            self._num_calls -= 1

    async def _receive(
        self, address: str, reports: PoolReports, first: bytes, read: Read, write: Write
    ) -> None:
        if not reports.is_ready():
            raise _NotYetError
        exchange, series = reports.exchange, reports.series
        peer, answer = exchange.greeted(first, self._clock())
        async with asyncio.timeout(HELLO_SECONDS):  # a caller may not read
            await write(answer)
        if peer == exchange.replica_id:
            return
        reports.begin(peer, address)
        try:
            while (message := await _next(read, SILENCE_SECONDS)) is not None:
                series.messages_total.labels("received").inc()
                series.bytes_total.labels("received").inc(len(message))
                exchange.receive(peer, message, self._clock())
        finally:
            reports.end(peer)

    def _pool_of(self, first: bytes) -> PoolReports:
        """Return the pool that the hello names. Raises `PeerMessageError` or `PeerRefusedError`."""
        if len(self._pools) == 1:
            return self._first
        hello = decoded_report(first).hello
        if hello is None:
            raise PeerMessageError("a call must begin with a hello")
        found = self._pools.get(hello.pool)
        if found is None:
            served = ", ".join(self._pools)
            raise PeerRefusedError(
                f"this is a replica of the pools {served}, not of {hello.pool!r}"
            )
        return found

    def _complain(self, address: str, reports: PoolReports, error: Exception) -> None:
        reports.series.messages_refused_total.inc()
        # A replica with further pools calls again every few seconds.
        complaint = (address.rpartition(":")[0], str(error))
        if complaint not in self._complaints:
            self._complaints.append(complaint)
            log.warning("%s was refused: %s", address, error)


async def _next(read: Read, seconds: float) -> bytes | None:
    """Return the next message; None at the end of the call. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        return await read()
