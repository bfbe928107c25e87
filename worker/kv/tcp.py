"""KV over TCP: the connector that the engine calls, and the thread of its transfers.

The engine never waits for a socket: it exports KV (`keep`), begins transfers (`pull`, `ask`), polls
whether they are done, and answers what other engines ask of its caches (`next_question`, `bell`).
What has arrived is written into blocks as part of a step, so no block is touched while bytes are on
their way. `KvServer` and `KvFetcher` run on the thread of an event loop and share only
`TransferState` with the connector. All bytes, connections and waits are bounded.

A peer on the same machine copies from device to device, or maps anonymous memory as
/proc/PID/fd/FD, which takes the same user and PID namespace. KV whose name is agreed on beforehand
(SGLang's rooms) may be asked for before it is exported: one connection waits for the export, the
next one transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from worker.config import KvTransferConfig
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.channel import listening
from worker.kv.content import KvShape
from worker.kv.exports import ExportedKv, Exports
from worker.kv.fetching import KvFetcher, TcpPull
from worker.kv.serving import KvServer
from worker.kv.transfers import TransferState, call_on
from worker.types import KvBytes, KvOffer, KvPeer, KvSource

if TYPE_CHECKING:
    from worker.kv.nixl import NixlTransport

logger = logging.getLogger(__name__)

_EXPIRY_SECONDS = 1.0


class TcpConnector:
    """The engine's end of KV transfers; its methods are for the engine's thread and never block.

    `token_bytes` is the size of one token's KV; `pace` is the number of seconds that a transfer of
    N tokens takes in simulations. Raises `ConfigError` when the address cannot be listened on.
    """

    def __init__(
        self,
        config: KvTransferConfig,
        key: bytes,
        shape: KvShape,
        token_bytes: int,
        pace: Callable[[int], float] | None = None,
        nixl: NixlTransport | None = None,
        pool: Any = None,
    ) -> None:
        self._exports = Exports(int(config.kv_buffer_size))
        self._state = TransferState(config, key, shape, token_bytes, self._exports, pool)
        self._nixl = nixl
        self.engine_id = config.engine_id
        self.counts = self._state.counts
        self._listener = listening(config)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop's
        self._server = KvServer(self._state, self._loop, self._start, self._listener, nixl)
        self._fetcher = KvFetcher(self._state, self._loop, self._start, pace, nixl)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def has_room(self, num_tokens: int) -> bool:
        """True if KV of `num_tokens` tokens can be exported; older exports give way to it."""
        size = num_tokens * self._state.token_bytes
        has_room = self._exports.make_room(size, time.monotonic())
        if not has_room:
            logger.warning("there is no room for %d bytes of KV in kv_buffer_size", size)
        return has_room

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: KvBytes,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer | None:
        """Export the KV that `digest` names until it is fetched; None if there is no room."""
        num_tokens = data.nbytes // self._state.token_bytes
        transfer_id = name or f"{request_id}-{uuid.uuid4().hex[:8]}"
        now, lease = time.monotonic(), self._state.config.kv_lease_duration
        if not self._exports.add(
            transfer_id, ExportedKv(digest, num_tokens, data, now + lease), now
        ):
            return None
        if name is not None:
            self._call(self._server.has_more.set)
        source = KvSource(
            self._state.config.kv_ip, self.port, self.engine_id, transfer_id, num_tokens
        )
        return KvOffer(source, blocks, time.time() + lease)

    def pull(self, source: KvSource, digest: bytes, start: int) -> TcpPull:
        """Begin to fetch the KV that `digest` names from `start` on; if none is left, free it."""
        pull = TcpPull(lambda closed: self._call(self._fetcher.close, closed))
        self._call(self._fetcher.begin, pull, source, digest, start)
        return pull

    def ask(self, peer: KvPeer, wanted: WantedKv) -> TcpPull:
        """Begin to fetch what another engine's caches have of `wanted`, which may be nothing."""
        pull = TcpPull(lambda closed: self._call(self._fetcher.close, closed))
        source = KvSource(peer.host, peer.port, "", peer.promise, len(wanted.token_ids))
        self._call(self._fetcher.begin, pull, source, b"", wanted.start, wanted)
        return pull

    @property
    def bell(self) -> int:
        """A file that can be read when a question has come or a promise was redeemed."""
        return self._state.questions.bell

    @property
    def has_questions(self) -> bool:
        return len(self._state.questions) > 0

    def next_question(self) -> KvQuestion | None:
        """Return the oldest question whose answer another engine still waits for, if any."""
        return self._state.questions.take()

    def leave_model(self) -> None:
        """Refuse to give or take KV from before: the weights may be others from now on."""
        self._state.shape = msgspec.structs.replace(
            self._state.shape, model=f"unknown {uuid.uuid4().hex}"
        )

    def lend(self, question: KvQuestion, num_tokens: int) -> bool:
        """True if there is room for `num_tokens` more tokens of an answer."""
        size = num_tokens * self._state.token_bytes
        has_room = self._exports.lend(size, time.monotonic())
        question.num_lent_bytes += size * has_room
        if not has_room:
            logger.warning("there is no room for %d bytes of KV in kv_buffer_size", size)
        return has_room

    def promise(self, name: str) -> None:
        """Note that a peer will fetch the cached KV of a sequence, by this name."""
        if self._state.config.gives:
            self._exports.promise(name, time.monotonic() + self._state.config.kv_lease_duration)

    @property
    def num_promised(self) -> int:
        return self._exports.num_promised

    @property
    def num_expired(self) -> int:
        """The number of exports and promises that expired or gave way before a fetch."""
        return self._exports.num_expired

    def close(self) -> None:
        self._call(self._stop.set)
        self._thread.join()
        if self._nixl is not None:
            self._nixl.close()

    def _call(self, function: Callable[..., None], *args: object) -> None:
        call_on(self._loop, function, *args)

    # ---- the loop's thread ------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        serving = [
            asyncio.create_task(self._server.serve(), name="kv-accept"),
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
            self._state.questions.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            self._exports.expire(time.monotonic())

    def _start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
