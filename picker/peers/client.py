"""Tells one replica what this one does, over and over again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import grpc

from picker.metrics.families import PeerSeries
from picker.peers.credentials import PeerCredentials
from picker.peers.exchange import Exchange, OneselfError
from picker.peers.outbox import Cursor
from picker.peers.wire import MAX_MESSAGE_BYTES, TELL_METHOD, PeerMessageError

log = logging.getLogger(__name__)

WELCOME_SECONDS = 5.0  # for a connection and its first answer
WRITE_SECONDS = 10.0  # for one message: a peer that takes nothing is gone
GOODBYE_SECONDS = 1.0
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.2, 5.0
SELF_SECONDS = 30.0  # before an address that was this replica's own is tried again
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a replica may be: `target` is `ip:port`; `name` what its certificate has to say."""

    target: str
    name: str


class Rounds:
    """Wakes all clients after each tick of the exchange."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def begin(self) -> None:
        """There may be something to tell."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def next(self) -> None:
        """Return with the next round."""
        await self._event.wait()


class Connected:
    """Which replicas are told what this one does. Owned by who starts the clients.

    An address that leads to a replica which is told already, by another name of it, is left alone.
    """

    def __init__(self, series: PeerSeries) -> None:
        self._series = series
        self._by_id: dict[bytes, str] = {}

    def claim(self, peer: bytes, target: str) -> bool:
        """Whether `target` is the one to tell this peer by."""
        if self._by_id.setdefault(peer, target) != target:
            return False
        self._series.connected.set(len(self._by_id))
        return True

    def let_go(self, peer: bytes) -> None:
        """It is not told any more."""
        self._by_id.pop(peer, None)
        self._series.connected.set(len(self._by_id))


class _AnotherNameError(Exception):
    """The replica is told already, at another address."""


class PeerClient:
    """Owns the connection to one address. `run` ends only by being cancelled."""

    def __init__(
        self,
        address: PeerAddress,
        exchange: Exchange,
        connected: Connected,
        rounds: Rounds,
        series: PeerSeries,
        clock: Callable[[], float],
        credentials: PeerCredentials | None,
    ) -> None:
        self._address, self._exchange = address, exchange
        self._connected, self._rounds, self._series = connected, rounds, series
        self._clock, self._credentials = clock, credentials
        self._rng = Random()
        self._complaint = ""

    async def run(self) -> None:
        """Tell what is to be told until cancelled; then say goodbye, if there is time."""
        delay = FIRST_DELAY_SECONDS
        while True:
            began = self._clock()
            pause = await self._live()
            if pause is None:
                if self._clock() - began > MAX_DELAY_SECONDS:
                    delay = FIRST_DELAY_SECONDS
                pause = delay
                delay = min(2 * delay, MAX_DELAY_SECONDS)
            await asyncio.sleep(pause * self._rng.uniform(0.75, 1.25))

    async def _live(self) -> float | None:
        """One connection; after how many seconds to try again, where that is known."""
        try:
            async with self._channel() as channel:
                await self._call(channel)
        except OneselfError:
            self._ended("self")
            return SELF_SECONDS
        except _AnotherNameError:
            self._ended("known")
            return SELF_SECONDS
        except PeerMessageError as error:
            self._complain(str(error))
            self._ended("refused")
        except TimeoutError:
            self._complain("does not answer")
            self._ended("unreachable")
        except grpc.aio.AioRpcError as error:
            self._complain(f"{error.code().name}: {error.details()}")
            refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            self._ended("refused" if refused else "unreachable")
        else:
            self._ended("ended")
        return None

    def _channel(self) -> grpc.aio.Channel:
        target = f"{'ipv6' if self._address.target.startswith('[') else 'ipv4'}:"
        target += self._address.target
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        named = ("grpc.ssl_target_name_override", self._address.name)
        credentials = self._credentials.of_client()
        return grpc.aio.secure_channel(target, credentials, options=[*_OPTIONS, named])

    async def _call(self, channel: grpc.aio.Channel) -> None:
        exchange = self._exchange
        call = channel.stream_stream(TELL_METHOD)()
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                await call.write(exchange.hello(self._clock()))
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise PeerMessageError("it hangs up")
            peer, cursor = exchange.welcomed(answer, self._clock())
            if not self._connected.claim(peer, self._address.target):
                raise _AnotherNameError
            self._complaint = ""
            log.info(
                "peer %s at %s is told what this one does", peer.hex()[:8], self._address.target
            )
            try:
                await self._tell(call, cursor)
            finally:
                self._connected.let_go(peer)
        finally:
            call.cancel()

    async def _tell(self, call: grpc.aio.StreamStreamCall, cursor: Cursor) -> None:
        try:
            while not call.done():
                message = self._exchange.next(cursor, self._clock())
                if message is None:
                    await self._rounds.next()
                    continue
                async with asyncio.timeout(WRITE_SECONDS):
                    await call.write(message)
                self._series.messages_total.labels("sent").inc()
                self._series.bytes_total.labels("sent").inc(len(message))
        except asyncio.CancelledError:
            await self._say_goodbye(call)
            raise
        except asyncio.InvalidStateError:
            pass  # the call has ended meanwhile
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise PeerMessageError(f"{code.name}: {await call.details()}")

    async def _say_goodbye(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await call.write(self._exchange.goodbye())
                await call.done_writing()
                await call.read()  # until it has been heard
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            log.debug("%s has not heard the goodbye", self._address.target)

    def _ended(self, result: str) -> None:
        self._series.calls_total.labels(result).inc()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            log.warning("peer at %s: %s", self._address.target, text)
