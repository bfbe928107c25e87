"""KV over TCP: an engine's server and its transfers, on a thread and an event loop of their own.

Theory of operation
-------------------
The engine computes on its own threads and never waits for a socket. It hands over KV that is to be
kept (`keep`), begins transfers (`pull`) and looks whether they are done. A transfer goes from the
keeper's buffer into a new one here, without a copy in between; the engine writes it into its blocks
as part of a step. So no block is touched while bytes are on their way, and whatever happens to
them, the worst that comes of it is that the prompt is computed.

Between processes of one machine the bytes are put into anonymous memory instead, which the taker
maps: as /proc/PID/fd/FD, so only under one user and in one PID namespace. They are sent where that
fails. Engines that both have NIXL use that instead (`worker.kv.nixl`).

KV whose name is agreed on beforehand (SGLang's rooms) is asked for before it is there: on one
connection the taker hears that it is, with the next one the transfer begins.

Everything is bounded: bytes that are kept or sent, bytes on their way or not loaded yet (a transfer
waits for room), connections, and the time of a wait (`kv_lease_duration`) and of a transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag

from worker.config import KvTransferConfig
from worker.errors import ConfigError, KvTransferError
from worker.kv.content import KvShape
from worker.kv.kept import KeptKv, KeptKvs
from worker.kv.shared import SharedMemory, map_shared
from worker.kv.wire import (
    LENGTH_BYTES,
    VERSION,
    Challenge,
    Fetch,
    Frame,
    Hello,
    Mapped,
    Reply,
    Seal,
    Sent,
    Tag,
    body_size,
)
from worker.types import KvOffer, KvPart, KvSource

if TYPE_CHECKING:
    from worker.kv.nixl import NixlTransport

logger = logging.getLogger(__name__)

KEY_VARIABLE = "POINTSMAN_KV_TRANSFER_KEY"
MAX_CONNECTIONS = 64
MAX_WAITING = 1024  # connections whose KV is not there yet
_BACKLOG = 128
_EXPIRY_SECONDS = 1.0
_PIECE_BYTES = 1 << 22  # which is decrypted while the next is received
_CIPHER_ROOM = 15  # bytes that `update_into` wants behind what it writes
_HANDSHAKE_SECONDS = 2.0  # so who has no key holds a connection no longer than that
_NO_KEY = hashlib.sha256().digest()


def read_key(config: KvTransferConfig, environment: Mapping[str, str]) -> bytes:
    """The key that engines share, from a file or the environment. Without one, any process of this
    machine may take KV, and no other. Raises `ConfigError`.
    """
    text = environment.get(KEY_VARIABLE, "")
    if config.key_file is not None:
        try:
            text = Path(config.key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--kv-transfer-config: key_file: {error}") from error
        if not text.strip():
            raise ConfigError(f"--kv-transfer-config: key_file {config.key_file} is empty")
    if not text.strip() and not is_loopback(config.kv_ip):
        raise ConfigError(
            f"--kv-transfer-config: kv_ip {config.kv_ip} can be reached from other machines: give"
            f" the workers a common key, in {KEY_VARIABLE} or in the file key_file"
        )
    return hashlib.sha256(text.strip().encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own. Raises `ValueError` for what is no address."""
    return ipaddress.ip_address(host).is_loopback


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
        self._num_inbound_bytes = 0
        self._has_room = asyncio.Event()
        self._has_more = asyncio.Event()  # under a name that may be waited for
        self.num_waiting = 0  # connections to here
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats = asyncio.Semaphore(MAX_CONNECTIONS)  # of transfers to here
        self._giving = asyncio.Semaphore(MAX_CONNECTIONS)  # of those from here; others wait
        self._listener = _listening(config)
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
            self._listener.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            with self._lock:
                self._kept.expire(time.monotonic())

    async def _accept(self) -> None:
        while True:
            await self._giving.acquire()
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, say
                self._giving.release()
                logger.warning("a connection for KV was not accepted: %s", error)
                await asyncio.sleep(_EXPIRY_SECONDS)
                continue
            connection.setblocking(False)
            self._start(self._give(connection), "kv-give")

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _give(self, connection: socket.socket) -> None:
        """Serve one connection: one fetch."""
        with contextlib.ExitStack() as seat, connection:
            seat.callback(self._giving.release)
            try:
                channel = _Channel(self._loop, connection, self._key)
                fetch = await self._greeted(channel)
                if fetch.waits:
                    seat.close()  # others are served meanwhile
                    await self._announce(channel, fetch)
                else:
                    async with asyncio.timeout(self._config.kv_transfer_timeout):
                        await self._answer(channel, fetch)
            except (OSError, KvTransferError) as error:  # a TimeoutError is an OSError
                logger.warning("KV was not handed over: %s", str(error) or "it took too long")

    async def _greeted(self, channel: _Channel) -> Fetch:
        async with asyncio.timeout(_HANDSHAKE_SECONDS):
            hello = await channel.receive(Hello)
            if hello.version != VERSION:
                message = f"the other end speaks version {hello.version}, not {VERSION}"
                raise KvTransferError(message)
            await channel.send(Challenge(Seal.nonce()))
            return await channel.receive(Fetch)

    async def _announce(self, channel: _Channel, fetch: Fetch) -> None:
        """Say that something is kept, once it is."""
        if self.num_waiting >= MAX_WAITING:
            await channel.send(Reply("too many wait for KV"))
            return
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._config.kv_lease_duration):
                while not self._is_kept(fetch.transfer_id):
                    self._has_more.clear()
                    await self._has_more.wait()
        finally:
            self.num_waiting -= 1
        await channel.send(Reply(None))

    def _is_kept(self, transfer_id: str) -> bool:
        with self._lock:
            return transfer_id in self._kept

    async def _answer(self, channel: _Channel, fetch: Fetch) -> None:
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

    async def _has_mapped(self, channel: _Channel, data: memoryview, *, maps: bool) -> bool:
        """Promise `data`, as memory of this machine if that is possible; whether it was mapped."""
        memory = await asyncio.to_thread(SharedMemory.of, data) if maps and data else None
        with contextlib.nullcontext() if memory is None else memory:
            shared = None if memory is None else memory.shared
            await channel.send(Reply(None, data.nbytes, shared))
            return shared is not None and (await channel.receive(Mapped)).ok

    async def _lend(self, channel: _Channel, data: memoryview, nixl: NixlTransport) -> None:
        async with nixl.lent(data) as lent:
            await channel.send(Reply(None, data.nbytes, lent=lent))
            await channel.send(Tag(await channel.tag_of(data)))
            await channel.receive(Mapped)

    def _look_up(self, fetch: Fetch) -> tuple[KeptKv | None, str | None]:
        """What is asked for, which is not kept any longer; else why it is not to be had."""
        difference = fetch.shape.difference(self._shape)
        if fetch.engine_id not in (None, self.engine_id):
            return None, f"this is engine {self.engine_id}, not {fetch.engine_id}"
        if difference is not None:
            return None, f"the KV of engine {self.engine_id} does not fit: {difference}"
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

    def _begin(self, pull: TcpPull, source: KvSource, digest: bytes, start: int) -> None:
        pull.task = self._start(self._take(pull, source, digest, start), "kv-take")

    def _closed(self, pull: TcpPull) -> None:
        if pull.task is not None:
            pull.task.cancel()
        self._num_inbound_bytes -= pull.num_reserved_bytes
        pull.num_reserved_bytes = 0
        self._has_room.set()

    async def _take(self, pull: TcpPull, source: KvSource, digest: bytes, start: int) -> None:
        try:
            if source.engine_id is None:
                async with asyncio.timeout(self._config.kv_lease_duration):
                    await self._wait_for(source, digest)
            async with asyncio.timeout(self._config.kv_transfer_timeout):
                await self._reserve(pull, (source.num_tokens - start) * self._token_bytes)
                async with self._seats:
                    part = await self._fetch(source, digest, start)
                    if self._pace is not None:
                        await asyncio.sleep(self._pace(part.end - start))
                    pull.part = part
        except (OSError, ValueError, KvTransferError) as error:  # ValueError: a host that is none
            self.counts.num_failed += 1
            reason = str(error) or "it took too long"
            logger.warning("KV of %s is computed here: %s", source.transfer_id, reason)
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
    async def _asked(self, source: KvSource, fetch: Fetch) -> AsyncIterator[tuple[_Channel, Reply]]:
        """A connection with what it says to `fetch`. Raises `KvTransferError` for an error."""
        if self._key == _NO_KEY and not is_loopback(source.host):
            raise KvTransferError(f"without a key nothing is taken from {source.host}")
        with await _connected(self._loop, source) as connection:
            channel = _Channel(self._loop, connection, self._key)
            await channel.send(Hello(VERSION, Seal.nonce()))
            await channel.receive(Challenge)
            await channel.send(fetch)
            reply = await channel.receive(Reply)
            if reply.error is not None:
                raise KvTransferError(reply.error)
            yield channel, reply

    async def _fetch(self, source: KvSource, digest: bytes, start: int) -> KvPart:
        end = source.num_tokens
        size = (end - start) * self._token_bytes
        which = (source.engine_id, source.transfer_id, digest)
        maps = is_loopback(source.host)
        reads = self._nixl is not None
        fetch = Fetch(*which, start, end, self._shape, maps, reads=reads)
        async with self._asked(source, fetch) as (channel, reply):
            if reply.num_bytes != size:
                raise KvTransferError(f"{reply.num_bytes} bytes are offered and {size} expected")
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
        return KvPart(start, end, data)


class _Channel:
    """Whole frames and raw bytes on one connection."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: socket.socket, key: bytes
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._seal = Seal(key)

    async def send(self, frame: Sent) -> None:
        await self._loop.sock_sendall(self._connection, self._seal.encode(frame))

    async def receive(self, kind: type[Frame]) -> Frame:
        """Raises `KvTransferError` for anything but a right frame."""
        prefix = memoryview(bytearray(LENGTH_BYTES))
        await self._fill(prefix)
        data = memoryview(bytearray(body_size(bytes(prefix))))
        await self._fill(data)
        return self._seal.decode(bytes(data), kind)

    async def send_data(self, data: memoryview) -> None:
        """The bytes, each piece encrypted while the one before it is sent, and their tag."""
        cipher = self._seal.data_cipher().encryptor()
        sending: asyncio.Task[None] | None = None
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                sealed = await asyncio.to_thread(cipher.update, data[start : start + _PIECE_BYTES])
                if sending is not None:
                    await sending
                sending = asyncio.create_task(self._loop.sock_sendall(self._connection, sealed))
            if sending is not None:
                await sending
        finally:
            if sending is not None:
                sending.cancel()
        cipher.finalize()
        await self.send(Tag(cipher.tag))

    async def tag_of(self, data: memoryview) -> bytes:
        """Of bytes that go another way, and in the clear; one tag for a connection."""
        cipher = self._seal.data_cipher().encryptor()
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            await asyncio.to_thread(cipher.authenticate_additional_data, piece)
        cipher.finalize()
        return cipher.tag

    async def receive_data(self, size: int) -> memoryview:
        """So many bytes. Raises `KvTransferError` when they are damaged, or fewer."""
        data = memoryview(bytearray(size + _CIPHER_ROOM))
        cipher = self._seal.data_cipher().decryptor()
        opening: asyncio.Task[int] | None = None
        for start in range(0, size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, size)
            await self._fill(data[start:end])
            if opening is not None:
                await opening
            into = data[start : end + _CIPHER_ROOM]
            work = asyncio.to_thread(cipher.update_into, data[start:end], into)
            opening = asyncio.create_task(work)
        if opening is not None:
            await opening
        try:
            cipher.finalize_with_tag((await self.receive(Tag)).tag)
        except (InvalidTag, ValueError) as error:  # ValueError: it is too short for a tag
            raise KvTransferError("the bytes were damaged on the way") from error
        return data[:size]

    async def _fill(self, data: memoryview) -> None:
        while data:
            size = await self._loop.sock_recv_into(self._connection, data)
            if not size:
                raise KvTransferError("the other end hung up: it stopped, or it has another key")
            data = data[size:]


async def _connected(loop: asyncio.AbstractEventLoop, source: KvSource) -> socket.socket:
    connection = socket.socket(_family(source.host), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, (source.host, source.port))
    except BaseException:
        connection.close()
        raise
    return connection


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listening(config: KvTransferConfig) -> socket.socket:
    listener = socket.socket(_family(config.kv_ip), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.kv_ip, config.kv_port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        where = f"kv_ip {config.kv_ip} and kv_port {config.kv_port}"
        raise ConfigError(f"--kv-transfer-config: cannot listen on {where}: {error}") from error
    return listener
