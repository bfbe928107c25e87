"""The side of the loop that takes KV: connections to other engines."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from worker.errors import KvTransferError
from worker.kv.access import NO_KEY, is_loopback, may_ask
from worker.kv.asked import WantedKv, pack
from worker.kv.channel import Channel, connected
from worker.kv.serving import StartTask
from worker.kv.shared import map_shared
from worker.kv.transfers import TransferState
from worker.kv.wire import VERSION, Challenge, Fetch, Hello, Lent, Mapped, Reply, Seal, Tag
from worker.types import KvPart, KvSource

if TYPE_CHECKING:
    from worker.kv.nixl import NixlTransport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_PEER_SECONDS = 2.0  # for the handshake of a peer that is asked for its caches


class TcpPull:
    """A transfer to this engine. Any thread may read `done` and `part` and call `close`."""

    def __init__(self, on_close: Callable[[TcpPull], None]) -> None:
        self._on_close = on_close
        self._is_closed = False
        self.num_reserved_bytes = 0  # the fetcher's
        self.task: asyncio.Task[None] | None = None  # the fetcher's
        self.done = False
        self.part: KvPart | None = None  # once done; None: it failed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.part = None
            self._on_close(self)


class KvFetcher:
    """Fetches KV from other engines, on the loop's thread; `start` runs a task there. `pace` is the
    number of seconds that a transfer of N tokens takes in simulations.
    """

    def __init__(
        self,
        state: TransferState,
        loop: asyncio.AbstractEventLoop,
        start: StartTask,
        pace: Callable[[int], float] | None,
        nixl: NixlTransport | None,
    ) -> None:
        self._state = state
        self._loop = loop
        self._start = start
        self._pace = pace
        self._nixl = nixl
        self._num_inbound_bytes = 0
        self._has_room = asyncio.Event()
        self._seats = asyncio.Semaphore(MAX_CONNECTIONS)

    def begin(
        self,
        pull: TcpPull,
        source: KvSource,
        digest: bytes,
        start: int,
        wanted: WantedKv | None = None,
    ) -> None:
        """Fetch the KV from token `start` on of the exported tokens that `digest` names, or what a
        peer's caches have of `wanted`.
        """
        pull.task = self._start(self._pull(pull, source, digest, start, wanted), "kv-take")

    def close(self, pull: TcpPull) -> None:
        if pull.task is not None:
            pull.task.cancel()
        self._shrink(pull, 0)

    def _shrink(self, pull: TcpPull, num_bytes: int) -> None:
        self._num_inbound_bytes -= pull.num_reserved_bytes - num_bytes
        pull.num_reserved_bytes = num_bytes
        self._has_room.set()

    async def _pull(
        self, pull: TcpPull, source: KvSource, digest: bytes, start: int, wanted: WantedKv | None
    ) -> None:
        try:
            # A room of SGLang's has a name before its KV is exported.
            if source.engine_id is None:
                which = (source.engine_id, source.transfer_id, digest)
                wait = Fetch(*which, 0, 0, self._state.shape, waits=True)
                async with asyncio.timeout(self._state.config.kv_lease_duration):
                    async with self._asked(source, wait):
                        pass
            async with asyncio.timeout(self._state.config.kv_transfer_timeout):
                await self._reserve(pull, (source.num_tokens - start) * self._state.token_bytes)
                async with self._seats:
                    part = await self._fetch(source, digest, start, wanted)
                    # A peer's caches may have had less than the reserved size.
                    self._shrink(pull, part.data.nbytes)
                    if self._pace is not None:
                        await asyncio.sleep(self._pace(part.end - start))
                    pull.part = part if part.data.nbytes or wanted is None else None
        # ValueError: the host is no IP address; OverflowError: the port is out of range.
        except (OSError, ValueError, OverflowError, KvTransferError) as error:
            self._state.counts.num_failed += 1
            reason = str(error) or "it took too long"
            name = source.transfer_id or f"{source.host}:{source.port}"
            logger.warning("KV of %s is computed here: %s", name, reason)
        finally:
            pull.done = True

    async def _reserve(self, pull: TcpPull, num_bytes: int) -> None:
        limit = int(self._state.config.kv_buffer_size)
        if not 0 <= num_bytes <= limit:
            raise KvTransferError(f"{num_bytes} bytes are more than kv_buffer_size")
        while self._num_inbound_bytes + num_bytes > limit:
            self._has_room.clear()
            await self._has_room.wait()
        self._num_inbound_bytes += num_bytes
        pull.num_reserved_bytes = num_bytes

    @contextlib.asynccontextmanager
    async def _asked(
        self, source: KvSource, fetch: Fetch, question: memoryview | None = None
    ) -> AsyncIterator[tuple[Channel, Reply]]:
        """Connect and send `fetch`. Raises `KvTransferError` if the reply is an error."""
        if self._state.key == NO_KEY and not is_loopback(source.host):
            raise KvTransferError(f"without a key nothing is taken from {source.host}")
        if not may_ask(source.host, self._state.config.kv_peer_networks):
            raise KvTransferError(f"{source.host} is not in kv_peer_networks")
        with contextlib.ExitStack() as stack:
            # A peer that was asked for its caches may be dead: computing is cheaper than waiting.
            async with asyncio.timeout(None if question is None else _PEER_SECONDS):
                connection = stack.enter_context(await connected(self._loop, source))
                channel = Channel(self._loop, connection, self._state.key)
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
        fetch = Fetch(*which, start, end, self._state.shape, maps, reads=reads, asked=asked)
        async with self._asked(source, fetch, question) as (channel, reply):
            size, most = reply.num_bytes, (end - start) * self._state.token_bytes
            if size != most and (wanted is None or size % self._state.token_bytes or size > most):
                raise KvTransferError(f"{size} bytes are offered and {most} expected")
            data: Any = None
            if reply.pooled is not None:
                data = await self._copied(channel, reply.pooled, size)
                reply = await channel.receive(Reply) if data is None else reply
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
        if self._state.pool is not None and isinstance(data, memoryview) and data:
            data = await asyncio.to_thread(self._state.pool.staged, data)
        self._state.counts.num_bytes_received += size
        return KvPart(start, start + size // self._state.token_bytes, data, time.monotonic())

    async def _copied(self, channel: Channel, pooled: Lent, size: int) -> Any:
        """Return KV from another device's memory; None: it comes another way."""
        pool, data = self._state.pool, None
        if pool is not None and self._num_inbound_bytes <= pool.limit_bytes:
            try:
                fetch, place = pool.fetch, pooled.address
                data = await asyncio.to_thread(fetch, pooled.metadata, place, size)
            except KvTransferError as error:
                logger.warning("KV comes through the host's memory: %s", error)
        await channel.send(Mapped(data is not None))
        if data is not None:
            await channel.receive(Tag)  # else the memory may have been written meanwhile
        return data
