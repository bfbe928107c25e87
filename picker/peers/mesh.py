"""The connections to other replicas: one client per address, which sends this replica's reports."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import grpc

from picker.metrics.picker_metrics import PeerSeries
from picker.peers.credentials import PeerCredentials
from picker.peers.discovery import PeerAddress
from picker.peers.exchange import OwnAddressError, PeerExchange
from picker.peers.outbox import Cursor
from picker.peers.wire import MAX_MESSAGE_BYTES, REPORT_METHOD, PeerMessageError

log = logging.getLogger(__name__)

WELCOME_SECONDS = 5.0  # for a connection and the first answer
WRITE_SECONDS = 10.0  # for one message; a peer that does not read is gone
GOODBYE_SECONDS = 1.0  # per client
GOODBYES_SECONDS = 2.0  # for all clients
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.2, 5.0
SELF_SECONDS = 30.0  # before the next attempt at an address of this replica itself
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a quiet call stays open
    ("grpc.enable_retries", 0),  # `PeerClient.run` calls again itself
    ("grpc.use_local_subchannel_pool", 1),  # a shared connection would have an old certificate
]


class _DuplicateAddressError(Exception): ...


class Mesh:
    """Owns a client for each address that `follow` gets, and the list of connected replicas."""

    def __init__(
        self,
        exchange: PeerExchange,
        series: PeerSeries,
        clock: Callable[[], float],
        credentials: PeerCredentials | None,
        interval_seconds: float = 0.05,
    ) -> None:
        """`interval_seconds`, between two rounds of messages, may change later."""
        self.exchange, self.series, self.clock = exchange, series, clock
        self.credentials = credentials
        self.interval_seconds = interval_seconds
        self._round = asyncio.Event()  # set when the next round begins
        self._connected: dict[bytes, str] = {}  # targets, by replica
        self._reached: set[PeerAddress] = set()  # or not needed: of itself, or of a known peer
        self._wanted: Sequence[PeerAddress] = ()
        self._changed = asyncio.Event()
        self._clients: dict[PeerAddress, asyncio.Task[None]] = {}
        self._counted: dict[str, int] = {}

    def follow(self, addresses: Sequence[PeerAddress]) -> None:
        """Report to the replicas at these addresses only."""
        if addresses != self._wanted:
            self._wanted = addresses
            self._changed.set()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self.interval_seconds)
            self.exchange.tick(self.clock())
            self._count()
            begun, self._round = self._round, asyncio.Event()
            begun.set()

    async def next_round(self) -> None:
        await self._round.wait()

    async def run(self) -> None:
        """Keep a client for each address until cancelled; then all clients say goodbye."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    self._changed.clear()
                    self._match(group)
                    await self._changed.wait()
            finally:
                for task in self._clients.values():
                    task.cancel()
                if self._clients:
                    await asyncio.wait(self._clients.values(), timeout=GOODBYES_SECONDS)

    def _match(self, group: asyncio.TaskGroup) -> None:
        for address in set(self._clients) - set(self._wanted):
            self._clients.pop(address).cancel()
            self._reached.discard(address)
        for address in self._wanted:
            if address not in self._clients:
                running = PeerClient(address, self).run()
                self._clients[address] = group.create_task(running, name=f"peer {address.target}")

    @property
    def num_peers(self) -> int | None:
        """The number of other replicas; None before any is found, and while one does not answer."""
        is_known = self._wanted and self._reached.issuperset(self._wanted)
        return len(self._connected) if is_known else None

    def found(self, address: PeerAddress, is_reached: bool) -> None:
        if is_reached:
            self._reached.add(address)
        else:
            self._reached.discard(address)

    @contextmanager
    def connected(self, peer: bytes, target: str) -> Iterator[None]:
        """Count `peer` as connected at `target` in the context. Raises `_DuplicateAddressError`."""
        if self._connected.setdefault(peer, target) != target:
            raise _DuplicateAddressError
        self.series.connected.set(len(self._connected))
        try:
            yield
        finally:
            self._connected.pop(peer, None)
            self.series.connected.set(len(self._connected))

    def _count(self) -> None:
        series, exchange, learned = self.series, self.exchange, self.exchange.learned
        entries = series.entries_total.labels
        for name, counter, now in (
            ("missed", series.batches_missed_total, exchange.inbox.missed),
            ("dropped", series.entries_dropped_total, exchange.outbox.dropped),
            ("expired", series.loads_expired_total, exchange.inbox.expired),
            ("placement", None, learned.placements),
            ("session", None, learned.bindings),
            ("other_seed", None, learned.other_seed),
            ("other_endpoint", None, learned.other_endpoint),
            ("other_plugin", None, learned.other_plugin),
            ("unusable", None, learned.unusable),
        ):
            growth = now - self._counted.get(name, 0)
            if growth:
                (entries(name) if counter is None else counter).inc(growth)
                self._counted[name] = now


class PeerClient:
    def __init__(self, address: PeerAddress, mesh: Mesh) -> None:
        self._address, self._mesh = address, mesh
        self._exchange = mesh.exchange
        self._rng = Random()
        self._complaint = ""

    async def run(self) -> None:
        """Report until cancelled; then say goodbye if there is time."""
        delay, clock = FIRST_DELAY_SECONDS, self._mesh.clock
        while True:
            began = clock()
            pause = await self._connect()
            if pause is None:
                if clock() - began > MAX_DELAY_SECONDS:
                    delay = FIRST_DELAY_SECONDS
                pause = delay
                delay = min(2 * delay, MAX_DELAY_SECONDS)
            # Jitter: replicas that lost a peer together must not all reconnect at once.
            await asyncio.sleep(pause * self._rng.uniform(0.75, 1.25))

    async def _connect(self) -> float | None:
        """Hold one connection; return the seconds until the next attempt, None for a back-off."""
        result, pause = "ended", None
        try:
            async with self._channel() as channel:
                await self._call(channel)
        except OwnAddressError:
            result, pause = "self", SELF_SECONDS
        except _DuplicateAddressError:
            result, pause = "known", SELF_SECONDS
        except PeerMessageError as error:
            self._complain(str(error))
            result = "refused"
        except TimeoutError:
            self._complain("does not answer")
            result = "unreachable"
        except grpc.aio.AioRpcError as error:
            self._complain(f"{error.code().name}: {error.details()}")
            refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            result = "refused" if refused else "unreachable"
        self._mesh.found(self._address, is_reached=pause is not None)
        self._mesh.series.calls_total.labels(result).inc()
        return pause

    def _channel(self) -> grpc.aio.Channel:
        target = self._address.target
        target = f"{'ipv6' if target.startswith('[') else 'ipv4'}:{target}"
        if self._mesh.credentials is None:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        named = ("grpc.ssl_target_name_override", self._address.name)
        credentials = self._mesh.credentials.of_client()
        return grpc.aio.secure_channel(target, credentials, options=[*_OPTIONS, named])

    async def _call(self, channel: grpc.aio.Channel) -> None:
        exchange, clock, target = self._exchange, self._mesh.clock, self._address.target
        call = channel.stream_stream(REPORT_METHOD)()
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                await call.write(exchange.hello(clock()))
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise PeerMessageError("it closed the call without an answer")
            peer, cursor = exchange.welcomed(answer, clock())
            with self._mesh.connected(peer, target):
                self._complaint = ""
                self._mesh.found(self._address, is_reached=True)
                log.info("reporting to peer %s at %s", peer.hex()[:8], target)
                await self._report(call, cursor)
        finally:
            call.cancel()

    async def _report(self, call: grpc.aio.StreamStreamCall, cursor: Cursor) -> None:
        series = self._mesh.series
        try:
            while not call.done():
                message = self._exchange.next(cursor, self._mesh.clock())
                if message is None:
                    await self._mesh.next_round()
                    continue
                async with asyncio.timeout(WRITE_SECONDS):
                    await call.write(message)
                series.messages_total.labels("sent").inc()
                series.bytes_total.labels("sent").inc(len(message))
        except asyncio.CancelledError:
            await self._say_goodbye(call)
            raise
        except asyncio.InvalidStateError:
            pass  # the call has ended in the meantime
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise PeerMessageError(f"{code.name}: {await call.details()}")

    async def _say_goodbye(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await call.write(self._exchange.goodbye())
                await call.done_writing()
                await call.read()  # returns when the peer has received it
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            log.debug("%s did not receive the goodbye", self._address.target)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("peer at %s: %s", self._address.target, text)
