"""The side of the loop that gives KV: connections from other engines, one fetch each.

A handshake has plenty of time, as the machine may be busy; but when all seats are taken, those that
took longer than usual give way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from worker.errors import KvTransferError
from worker.kv.asked import KvQuestion, unpack
from worker.kv.channel import Channel
from worker.kv.exports import ExportedKv
from worker.kv.shared import SharedMemory
from worker.kv.transfers import TransferState, call_on
from worker.kv.wire import VERSION, Challenge, Fetch, Hello, Lent, Mapped, Reply, Seal, Tag
from worker.types import KvBytes, PooledKv

if TYPE_CHECKING:
    from worker.kv.nixl import NixlTransport

logger = logging.getLogger(__name__)

MAX_GIVEN = 256  # connections that are served at a time, handshakes included
MAX_WAITING = 1024  # connections whose KV is not exported yet
_HANDSHAKE_SECONDS = 30.0
_SHORT_HANDSHAKE_SECONDS = 2.0  # where others wait for a seat
_RETRY_SECONDS = 1.0
_MAX_QUESTION_BYTES = 1 << 24

StartTask = Callable[[Coroutine[None, None, None], str], asyncio.Task[None]]


class KvServer:
    """Answers other engines. Everything runs on the loop's thread; `start` runs a task there.
    `has_more` is set when KV was exported under a name that peers may wait for.
    """

    def __init__(
        self,
        state: TransferState,
        loop: asyncio.AbstractEventLoop,
        start: StartTask,
        listener: socket.socket,
        nixl: NixlTransport | None,
    ) -> None:
        self._state = state
        self._loop = loop
        self._start = start
        self._listener = listener
        self._nixl = nixl  # moves the bytes between engines that have it
        self.has_more = asyncio.Event()
        self.num_waiting = 0  # connections
        self._giving = asyncio.Semaphore(MAX_GIVEN)
        self._handshakes: set[asyncio.Timeout] = set()  # those that have plenty of time

    async def serve(self) -> None:
        while True:
            try:
                connection, taker = await self._loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, say
                logger.warning("a connection for KV was not accepted: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            connection.setblocking(False)
            try:
                if self._giving.locked():
                    await asyncio.sleep(0)  # so that every handshake has begun
                    self._shorten_handshakes()
                await self._giving.acquire()
            except BaseException:
                connection.close()
                raise
            self._start(self._give(connection, taker[0]), "kv-give")

    def _shorten_handshakes(self) -> None:
        for deadline in self._handshakes:
            end = deadline.when()
            if end is not None and not deadline.expired():
                deadline.reschedule(end - _HANDSHAKE_SECONDS + _SHORT_HANDSHAKE_SECONDS)
        self._handshakes.clear()

    async def _give(self, connection: socket.socket, taker: str) -> None:
        with contextlib.ExitStack() as seat, connection:
            seat.callback(self._giving.release)
            try:
                channel = Channel(self._loop, connection, self._state.key)
                fetch = await self._handshake(channel)
                if fetch.waits:
                    seat.close()  # another connection is served meanwhile
                    await self._announce(channel, fetch)
                else:
                    async with asyncio.timeout(self._state.config.kv_transfer_timeout):
                        await self._answer(channel, fetch)
            except (OSError, KvTransferError) as error:  # a TimeoutError is an OSError
                reason = str(error) or "it took too long"
                logger.warning("KV was not handed over to %s: %s", taker, reason)

    async def _handshake(self, channel: Channel) -> Fetch:
        async with asyncio.timeout(_HANDSHAKE_SECONDS) as deadline:
            self._handshakes.add(deadline)
            try:
                hello = await channel.receive(Hello)
                if hello.version != VERSION:
                    message = f"the other end speaks version {hello.version}, not {VERSION}"
                    raise KvTransferError(message)
                await channel.send(Challenge(Seal.nonce()))
                return await channel.receive(Fetch)
            finally:
                self._handshakes.discard(deadline)

    async def _announce(self, channel: Channel, fetch: Fetch) -> None:
        if self.num_waiting >= MAX_WAITING:
            await channel.send(Reply("too many wait for KV"))
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._state.config.kv_lease_duration):
                await channel.while_open(self._until_exported(fetch.transfer_id))
        finally:
            self.num_waiting -= 1
        await channel.send(Reply(None))

    async def _until_exported(self, transfer_id: str) -> None:
        while True:
            if transfer_id in self._state.exports:
                return
            self.has_more.clear()
            await self.has_more.wait()

    async def _answer(self, channel: Channel, fetch: Fetch) -> None:
        if fetch.asked is not None:
            await self._answer_question(channel, fetch, fetch.asked)
            return
        exported, error = self._take_export(fetch)
        if exported is None:
            await channel.send(Reply(error))
            return
        held, first = exported.data, fetch.start * self._state.token_bytes
        try:
            if not await self._has_copied(channel, held, first):
                if isinstance(held, PooledKv):
                    held = await asyncio.to_thread(held.host)
                data = held[first:]
                if self._nixl is not None and fetch.reads and data:
                    async with self._nixl.lent(data) as lent:
                        await channel.send(Reply(None, data.nbytes, lent=lent))
                        await channel.send(Tag(await channel.tag_of(data)))
                        await channel.receive(Mapped)
                elif not await self._has_mapped(channel, data, maps=fetch.maps):
                    await channel.send_data(data)
        # A cancelled transfer, too, leaves the export for another try until its lease ends.
        except BaseException:
            self._state.exports.put_back(fetch.transfer_id, exported)
            raise
        self._state.exports.sent(exported)
        self._state.counts.num_bytes_sent += held.nbytes - first

    async def _has_copied(self, channel: Channel, held: KvBytes, first: int) -> bool:
        """Offer a device's memory to a peer on this machine; return whether it copied the KV."""
        if not isinstance(held, PooledKv) or first == held.nbytes:
            return False
        pooled = Lent(held.handle, held.start + first)
        await channel.send(Reply(None, held.nbytes - first, pooled=pooled))
        if not (await channel.receive(Mapped)).ok:
            return False
        await channel.send(Tag(b""))  # nothing was written there until now
        return True

    async def _answer_question(self, channel: Channel, fetch: Fetch, num_bytes: int) -> None:
        num_tokens = fetch.num_tokens
        if not (0 <= fetch.start <= num_tokens and 0 <= num_bytes <= _MAX_QUESTION_BYTES):
            raise KvTransferError(f"{num_tokens} tokens from {fetch.start} on are no question")
        wanted = unpack(await channel.receive_data(num_bytes), num_tokens, fetch.start)
        error = self._misfit(fetch)
        if error is None and not self._state.config.gives:
            error = f"engine {self._state.config.engine_id} is a kv_consumer"
        if error is not None:
            self._redeem(fetch.transfer_id)
            await channel.send(Reply(error))
            return
        question = KvQuestion(wanted, self._loop.create_future(), self._answered)
        try:
            data = memoryview(b"")
            if fetch.start < num_tokens:
                self._state.questions.put(question)
                data = await channel.while_open(question.answered)
            if not await self._has_mapped(channel, data, maps=fetch.maps):
                await channel.send_data(data)
        finally:
            question.answered.cancel()
            self._give_back(question)
        self._state.counts.num_bytes_sent += data.nbytes
        self._redeem(fetch.transfer_id)

    def _redeem(self, name: str) -> None:
        self._state.exports.redeem(name)
        self._state.questions.ring()

    def _answered(self, question: KvQuestion, data: memoryview) -> None:
        def take() -> None:
            if question.is_open:
                question.answered.set_result(data)
            else:
                self._give_back(question)

        call_on(self._loop, take)

    def _give_back(self, question: KvQuestion) -> None:
        self._state.exports.given_back(question.num_lent_bytes)
        question.num_lent_bytes = 0

    async def _has_mapped(self, channel: Channel, data: memoryview, *, maps: bool) -> bool:
        """Offer `data` as shared memory to a peer on this machine; return whether it took it."""
        memory = await asyncio.to_thread(SharedMemory.of, data) if maps and data else None
        with contextlib.nullcontext() if memory is None else memory:
            shared = None if memory is None else memory.shared
            await channel.send(Reply(None, data.nbytes, shared))
            return shared is not None and (await channel.receive(Mapped)).ok

    def _misfit(self, fetch: Fetch) -> str | None:
        difference = fetch.shape.difference(self._state.shape)
        own = self._state.config.engine_id
        return difference and f"the KV of engine {own} does not fit: {difference}"

    def _take_export(self, fetch: Fetch) -> tuple[ExportedKv | None, str | None]:
        """Take the fetched KV out of the exports, or return the reason why this is impossible."""
        if fetch.engine_id not in (None, self._state.config.engine_id):
            return None, f"this is engine {self._state.config.engine_id}, not {fetch.engine_id}"
        if (error := self._misfit(fetch)) is not None:
            return None, error
        exported = self._state.exports.take(fetch.transfer_id)
        if exported is None:
            return None, f"{fetch.transfer_id} is not exported (any longer)"
        right = (exported.digest, exported.num_tokens) == (fetch.digest, fetch.num_tokens)
        if right and 0 <= fetch.start <= exported.num_tokens:
            return exported, None
        self._state.exports.put_back(fetch.transfer_id, exported)
        return None, f"{fetch.transfer_id} is of other tokens"
