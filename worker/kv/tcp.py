"""KV over TCP: an engine's server and its transfers, on a thread and an event loop of their own.

Theory of operation
-------------------
The engine computes on its own threads and never waits for a socket. It hands over KV that is to be
kept (`keep`), begins transfers (`pull`, `ask`) and looks whether they are done. What others ask of
its caches it answers between its steps (`next_question`), for which `bell` wakes it. A transfer
goes from the keeper's buffer into a new one here, without a copy in between; the engine writes it
into its blocks as part of a step. So no block is touched while bytes are on their way, and whatever
happens to them, the worst that comes of it is that the prompt is computed.

Between processes of one machine the bytes are put into anonymous memory instead, which the taker
maps: as /proc/PID/fd/FD, so only under one user and in one PID namespace. They are sent where that
fails. Engines that both have NIXL use that instead (`worker.kv.nixl`).

KV whose name is agreed on beforehand (SGLang's rooms) is asked for before it is there: on one
connection the taker hears that it is, with the next one the transfer begins.

Everything is bounded: bytes that are kept or sent, bytes on their way or not loaded yet (a transfer
waits for room), connections, and the time of a wait (`kv_lease_duration`) and of a transfer. A
handshake has plenty of time, as the machine may be busy; but where all seats are taken, those that
have had enough give way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from worker.config import KvTransferConfig
from worker.errors import KvTransferError
from worker.kv.access import NO_KEY, is_loopback, may_ask
from worker.kv.asked import KvQuestion, WantedKv, pack, unpack
from worker.kv.channel import Channel, connected, listening, new_bell
from worker.kv.content import KvShape
from worker.kv.kept import KeptKv, KeptKvs
from worker.kv.shared import SharedMemory, map_shared
from worker.kv.wire import (
    VERSION,
    Challenge,
    Fetch,
    Hello,
    Mapped,
    Reply,
    Seal,
    Tag,
)
from worker.types import KvOffer, KvPart, KvPeer, KvSource

if TYPE_CHECKING:
    from worker.kv.nixl import NixlTransport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_WAITING = 1024  # connections whose KV is not there yet
_EXPIRY_SECONDS = 1.0
MAX_GIVEN = 256  # connections from others that are served at a time, handshakes included
_HANDSHAKE_SECONDS = 30.0
_ENOUGH_SECONDS = 2.0  # where others wait for a seat
_PEER_SECONDS = 2.0  # for the handshake of a peer that is asked
_MOST_BYTES = 1 << 24  # of a question


class TcpPull:
    """A transfer to here. `done` and `part` may be read from any thread, `close` called once or
    more often: it ends what runs, and gives up what has arrived.
    """

    def __init__(self, on_close: Callable[[TcpPull], None]) -> None:
        self._on_close = on_close
        self._is_closed = False
        self.num_reserved_bytes = 0  # the connector's
        self.task: asyncio.Task[None] | None = None  # the connector's
        self.done = False
        self.part: KvPart | None = None  # once done; None: it failed

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.part = None
            self._on_close(self)


@dataclass(slots=True)
class TransferCounts:
    """Totals since start. Each field has one writer; any thread may read."""

    num_failed: int = 0
    num_bytes_sent: int = 0
    num_bytes_received: int = 0


class TcpConnector:
    """Owns the socket, the thread, and what is kept or on its way. `token_bytes` is the size of one
    token's KV; `pace` says how many seconds more a transfer of so many tokens takes in simulations.
    Raises `ConfigError` when the address cannot be listened on.
    """

    def __init__(
        self,
        config: KvTransferConfig,
        key: bytes,
        shape: KvShape,
        token_bytes: int,
        pace: Callable[[int], float] | None = None,
        nixl: NixlTransport | None = None,
    ) -> None:
        self._config = config
        self._key = key
        self._shape = shape
        self._token_bytes = token_bytes
        self._pace = pace
        self._nixl = nixl  # moves the bytes between engines that have it
        self.engine_id = config.engine_id
        self.counts = TransferCounts()
        self._lock = threading.Lock()  # guards what is kept
        self._kept = KeptKvs(int(config.kv_buffer_size))
        self._questions: deque[KvQuestion] = deque()
        self._ringing, self._bell = new_bell()
        self._num_inbound_bytes = 0
        self._has_room = asyncio.Event()
        self._has_more = asyncio.Event()  # under a name that may be waited for
        self.num_waiting = 0  # connections to here
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats = asyncio.Semaphore(MAX_CONNECTIONS)  # of transfers to here
        self._giving = asyncio.Semaphore(MAX_GIVEN)  # seats of those from here; others wait
        self._greeting: set[asyncio.Timeout] = set()  # of handshakes that have plenty of time
        self._listener = listening(config)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    # ---- the engine's thread ----------------------------------------------------------------

    def has_room(self, num_tokens: int) -> bool:
        """Whether KV of so many tokens can be kept; older ones give way to it."""
        size = num_tokens * self._token_bytes
        with self._lock:
            has_room = self._kept.make_room(size, time.monotonic())
        if not has_room:
            logger.warning("there is no room for %d bytes of KV in kv_buffer_size", size)
        return has_room

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: memoryview,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer | None:
        """Keep the KV of the tokens that `digest` names until it is taken, as `name` if that is
        given; where it can be had. None: there is no room.
        """
        num_tokens = data.nbytes // self._token_bytes
        transfer_id = name or f"{request_id}-{uuid.uuid4().hex[:8]}"
        now, lease = time.monotonic(), self._config.kv_lease_duration
        with self._lock:
            if not self._kept.keep(transfer_id, KeptKv(digest, num_tokens, data, now + lease), now):
                return None
        if name is not None:
            self._call(self._has_more.set)
        source = KvSource(self._config.kv_ip, self.port, self.engine_id, transfer_id, num_tokens)
        return KvOffer(source, blocks, time.time() + lease)

    def pull(self, source: KvSource, digest: bytes, start: int) -> TcpPull:
        """Begin to take the KV of what `digest` names from token `start` on; from the last one on,
        to say that it is not needed.
        """
        pull = TcpPull(lambda closed: self._call(self._closed, closed))
        self._call(self._begin, pull, source, digest, start)
        return pull

    def ask(self, peer: KvPeer, wanted: WantedKv) -> TcpPull:
        """Begin to take what another engine's caches have of `wanted`, which may be nothing."""
        pull = TcpPull(lambda closed: self._call(self._closed, closed))
        source = KvSource(peer.host, peer.port, "", peer.promise, len(wanted.token_ids))
        self._call(self._begin, pull, source, b"", wanted.start, wanted)
        return pull

    @property
    def bell(self) -> int:
        """A file that can be read when there are questions, or a promise was redeemed."""
        return self._bell.fileno()

    @property
    def has_questions(self) -> bool:
        """Whether `next_question` has one."""
        return bool(self._questions)

    def next_question(self) -> KvQuestion | None:
        """What another engine asks of the caches here and waits for; in order."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(MAX_CONNECTIONS)
        while self._questions:
            question = self._questions.popleft()
            if question.is_open:
                return question
        return None

    def leave_model(self) -> None:
        """Nobody knows the weights here any more: give and take nothing."""
        self._shape = msgspec.structs.replace(self._shape, model=f"unknown {uuid.uuid4().hex}")

    def lend(self, question: KvQuestion, num_tokens: int) -> bool:
        """Whether there is room for so many tokens more of an answer; before it is given."""
        size = num_tokens * self._token_bytes
        with self._lock:
            has_room = self._kept.lend(size, time.monotonic())
            question.num_lent_bytes += size * has_room
        if not has_room:
            logger.warning("there is no room for %d bytes of KV in kv_buffer_size", size)
        return has_room

    def promise(self, name: str) -> None:
        """Another engine will ask for what the caches hold of a sequence, and name it."""
        if self._config.gives:
            with self._lock:
                self._kept.promise(name, time.monotonic() + self._config.kv_lease_duration)

    @property
    def num_promised(self) -> int:
        """Promises that are neither redeemed nor expired."""
        return self._kept.num_promised

    @property
    def num_expired(self) -> int:
        """What was kept and not taken, in time or before it had to give way."""
        return self._kept.num_expired

    def close(self) -> None:
        """End the thread and all transfers. Idempotent."""
        self._call(self._stop.set)
        self._thread.join()
        if self._nixl is not None:
            self._nixl.close()

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # ---- the loop's thread ------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        serving = [
            asyncio.create_task(self._accept(), name="kv-accept"),
            asyncio.create_task(self._expire(), name="kv-expiry"),
        ]
        try:
            await self._stop.wait()
        finally:
            ending = [*serving, *self._tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for one in (self._listener, self._ringing, self._bell):
                one.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            with self._lock:
                self._kept.expire(time.monotonic())

    async def _accept(self) -> None:
        while True:
            try:
                connection, taker = await self._loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, say
                logger.warning("a connection for KV was not accepted: %s", error)
                await asyncio.sleep(_EXPIRY_SECONDS)
                continue
            connection.setblocking(False)
            try:
                if self._giving.locked():
                    await asyncio.sleep(0)  # so that every handshake has begun
                    self._hurry()
                await self._giving.acquire()
            except BaseException:
                connection.close()
                raise
            self._start(self._give(connection, taker[0]), "kv-give")

    def _hurry(self) -> None:
        for patience in self._greeting:
            end = patience.when()
            if end is not None and not patience.expired():
                patience.reschedule(end - _HANDSHAKE_SECONDS + _ENOUGH_SECONDS)
        self._greeting.clear()

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _give(self, connection: socket.socket, taker: str) -> None:
        """Serve one connection, from the address `taker`: one fetch."""
        with contextlib.ExitStack() as seat, connection:
            seat.callback(self._giving.release)
            try:
                channel = Channel(self._loop, connection, self._key)
                fetch = await self._greeted(channel)
                if fetch.waits:
                    seat.close()  # others are served meanwhile
                    await self._announce(channel, fetch)
                else:
                    async with asyncio.timeout(self._config.kv_transfer_timeout):
                        await self._answer(channel, fetch)
            except (OSError, KvTransferError) as error:  # a TimeoutError is an OSError
                reason = str(error) or "it took too long"
                logger.warning("KV was not handed over to %s: %s", taker, reason)

    async def _greeted(self, channel: Channel) -> Fetch:
        async with asyncio.timeout(_HANDSHAKE_SECONDS) as patience:
            self._greeting.add(patience)
            try:
                hello = await channel.receive(Hello)
                if hello.version != VERSION:
                    message = f"the other end speaks version {hello.version}, not {VERSION}"
                    raise KvTransferError(message)
                await channel.send(Challenge(Seal.nonce()))
                return await channel.receive(Fetch)
            finally:
                self._greeting.discard(patience)

    async def _announce(self, channel: Channel, fetch: Fetch) -> None:
        """Say that something is kept, once it is."""
        if self.num_waiting >= MAX_WAITING:
            await channel.send(Reply("too many wait for KV"))
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._config.kv_lease_duration):
                await channel.while_open(self._until_kept(fetch.transfer_id))
        finally:
            self.num_waiting -= 1
        await channel.send(Reply(None))

    async def _until_kept(self, transfer_id: str) -> None:
        while True:
            with self._lock:
                if transfer_id in self._kept:
                    return
            self._has_more.clear()
            await self._has_more.wait()

    async def _answer(self, channel: Channel, fetch: Fetch) -> None:
        if fetch.asked is not None:
            await self._answer_question(channel, fetch, fetch.asked)
            return
        kept, error = self._look_up(fetch)
        if kept is None:
            await channel.send(Reply(error))
            return
        try:
            data = kept.data[fetch.start * self._token_bytes :]
            if self._nixl is not None and fetch.reads and data:
                await self._lend(channel, data, self._nixl)
            elif not await self._has_mapped(channel, data, maps=fetch.maps):
                await channel.send_data(data)
        except BaseException:
            with self._lock:
                self._kept.put_back(fetch.transfer_id, kept)
            raise
        with self._lock:
            self._kept.sent(kept)
        self.counts.num_bytes_sent += data.nbytes

    async def _answer_question(self, channel: Channel, fetch: Fetch, num_bytes: int) -> None:
        """Have the engine look for what is wanted, and send it."""
        num_tokens = fetch.num_tokens
        if not (0 <= fetch.start <= num_tokens and 0 <= num_bytes <= _MOST_BYTES):
            raise KvTransferError(f"{num_tokens} tokens from {fetch.start} on are no question")
        wanted = unpack(await channel.receive_data(num_bytes), num_tokens, fetch.start)
        error = self._misfit(fetch)
        if error is None and not self._config.gives:
            error = f"engine {self.engine_id} is a kv_consumer"
        if error is not None:
            self._redeem(fetch.transfer_id)
            await channel.send(Reply(error))
            return
        question = KvQuestion(wanted, self._loop.create_future(), self._answered)
        try:
            data = memoryview(b"")
            if fetch.start < num_tokens:
                self._questions.append(question)
                self._ring()
                data = await channel.while_open(question.answered)
            if not await self._has_mapped(channel, data, maps=fetch.maps):
                await channel.send_data(data)
        finally:
            question.answered.cancel()
            self._give_back(question)
        self.counts.num_bytes_sent += data.nbytes
        self._redeem(fetch.transfer_id)

    def _redeem(self, name: str) -> None:
        with self._lock:
            self._kept.redeem(name)
        self._ring()

    def _answered(self, question: KvQuestion, data: memoryview) -> None:
        """On any thread."""

        def take() -> None:
            if question.is_open:
                question.answered.set_result(data)
            else:
                self._give_back(question)

        self._call(take)

    def _give_back(self, question: KvQuestion) -> None:
        with self._lock:
            self._kept.given_back(question.num_lent_bytes)
            question.num_lent_bytes = 0

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it rings already
            self._ringing.send(b"\0")

    async def _has_mapped(self, channel: Channel, data: memoryview, *, maps: bool) -> bool:
        """Promise `data`, as memory of this machine if that is possible; whether it was mapped."""
        memory = await asyncio.to_thread(SharedMemory.of, data) if maps and data else None
        with contextlib.nullcontext() if memory is None else memory:
            shared = None if memory is None else memory.shared
            await channel.send(Reply(None, data.nbytes, shared))
            return shared is not None and (await channel.receive(Mapped)).ok

    async def _lend(self, channel: Channel, data: memoryview, nixl: NixlTransport) -> None:
        async with nixl.lent(data) as lent:
            await channel.send(Reply(None, data.nbytes, lent=lent))
            await channel.send(Tag(await channel.tag_of(data)))
            await channel.receive(Mapped)

    def _misfit(self, fetch: Fetch) -> str | None:
        difference = fetch.shape.difference(self._shape)
        return difference and f"the KV of engine {self.engine_id} does not fit: {difference}"

    def _look_up(self, fetch: Fetch) -> tuple[KeptKv | None, str | None]:
        """What is asked for, which is not kept any longer; else why it is not to be had."""
        if fetch.engine_id not in (None, self.engine_id):
            return None, f"this is engine {self.engine_id}, not {fetch.engine_id}"
        if (error := self._misfit(fetch)) is not None:
            return None, error
        with self._lock:
            kept = self._kept.take(fetch.transfer_id)
        if kept is None:
            return None, f"{fetch.transfer_id} is not kept (any longer)"
        right = (kept.digest, kept.num_tokens) == (fetch.digest, fetch.num_tokens)
        if right and 0 <= fetch.start <= kept.num_tokens:
            return kept, None
        with self._lock:
            self._kept.put_back(fetch.transfer_id, kept)
        return None, f"{fetch.transfer_id} is of other tokens"

    def _begin(
        self,
        pull: TcpPull,
        source: KvSource,
        digest: bytes,
        start: int,
        wanted: WantedKv | None = None,
    ) -> None:
        pull.task = self._start(self._take(pull, source, digest, start, wanted), "kv-take")

    def _closed(self, pull: TcpPull) -> None:
        if pull.task is not None:
            pull.task.cancel()
        self._shrink(pull, 0)

    def _shrink(self, pull: TcpPull, num_bytes: int) -> None:
        self._num_inbound_bytes -= pull.num_reserved_bytes - num_bytes
        pull.num_reserved_bytes = num_bytes
        self._has_room.set()

    async def _take(
        self,
        pull: TcpPull,
        source: KvSource,
        digest: bytes,
        start: int,
        wanted: WantedKv | None,
    ) -> None:
        try:
            if source.engine_id is None:
                async with asyncio.timeout(self._config.kv_lease_duration):
                    await self._wait_for(source, digest)
            async with asyncio.timeout(self._config.kv_transfer_timeout):
                await self._reserve(pull, (source.num_tokens - start) * self._token_bytes)
                async with self._seats:
                    part = await self._fetch(source, digest, start, wanted)
                    self._shrink(pull, part.data.nbytes)
                    if self._pace is not None:
                        await asyncio.sleep(self._pace(part.end - start))
                    pull.part = part if part.data or wanted is None else None
        # The host may be none, and the port out of range.
        except (OSError, ValueError, OverflowError, KvTransferError) as error:
            self.counts.num_failed += 1
            reason = str(error) or "it took too long"
            name = source.transfer_id or f"{source.host}:{source.port}"
            logger.warning("KV of %s is computed here: %s", name, reason)
        finally:
            pull.done = True

    async def _reserve(self, pull: TcpPull, num_bytes: int) -> None:
        limit = int(self._config.kv_buffer_size)
        if not 0 <= num_bytes <= limit:
            raise KvTransferError(f"{num_bytes} bytes are more than kv_buffer_size")
        while self._num_inbound_bytes + num_bytes > limit:
            self._has_room.clear()
            await self._has_room.wait()
        self._num_inbound_bytes += num_bytes
        pull.num_reserved_bytes = num_bytes

    async def _wait_for(self, source: KvSource, digest: bytes) -> None:
        """Until the keeper has it."""
        which = (source.engine_id, source.transfer_id, digest)
        async with self._asked(source, Fetch(*which, 0, 0, self._shape, waits=True)):
            pass

    @contextlib.asynccontextmanager
    async def _asked(
        self, source: KvSource, fetch: Fetch, question: memoryview | None = None
    ) -> AsyncIterator[tuple[Channel, Reply]]:
        """A connection with what it says to `fetch`. Raises `KvTransferError` for an error."""
        if self._key == NO_KEY and not is_loopback(source.host):
            raise KvTransferError(f"without a key nothing is taken from {source.host}")
        if not may_ask(source.host, self._config.kv_peer_networks):
            raise KvTransferError(f"{source.host} is not in kv_peer_networks")
        with contextlib.ExitStack() as stack:
            # An engine that hangs costs no more: it may have died, and nothing was promised.
            async with asyncio.timeout(None if question is None else _PEER_SECONDS):
                connection = stack.enter_context(await connected(self._loop, source))
                channel = Channel(self._loop, connection, self._key)
                await channel.send(Hello(VERSION, Seal.nonce()))
                await channel.receive(Challenge)
            await channel.send(fetch)
            if question is not None:
                await channel.send_data(question)
            reply = await channel.receive(Reply)
            if reply.error is not None:
                raise KvTransferError(reply.error)
            yield channel, reply

    async def _fetch(
        self, source: KvSource, digest: bytes, start: int, wanted: WantedKv | None
    ) -> KvPart:
        which = (source.engine_id, source.transfer_id, digest)
        maps = is_loopback(source.host)
        reads = self._nixl is not None and wanted is None
        question = None if wanted is None else pack(wanted)
        asked = None if question is None else question.nbytes
        end = source.num_tokens
        fetch = Fetch(*which, start, end, self._shape, maps, reads=reads, asked=asked)
        async with self._asked(source, fetch, question) as (channel, reply):
            size, most = reply.num_bytes, (end - start) * self._token_bytes
            if size != most and (wanted is None or size % self._token_bytes or size > most):
                raise KvTransferError(f"{size} bytes are offered and {most} expected")
            data: memoryview | None = None
            if reply.shared is not None:
                data = map_shared(reply.shared, size)
                await channel.send(Mapped(data is not None))
            elif reply.lent is not None and self._nixl is not None:
                data = await self._nixl.read(reply.lent, size, (source.host, source.port))
                tag = await channel.tag_of(data)
                if not hmac.compare_digest((await channel.receive(Tag)).tag, tag):
                    raise KvTransferError("the bytes were damaged on the way")
                await channel.send(Mapped(True))
            if data is None:
                data = await channel.receive_data(size)
        self.counts.num_bytes_received += size
        return KvPart(start, start + size // self._token_bytes, data)
