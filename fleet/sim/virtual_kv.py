"""KV that moves between simulated workers, on the clock of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.config import KvTransferConfig
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.exports import ExportedKv, Exports
from worker.kv.transfers import TransferCounts
from worker.types import KvOffer, KvPart, KvPeer, KvSource

_LIMITS = KvTransferConfig()
TOKEN_BYTES = 4
Connect = Callable[[Callable[[int], float], Callable[[], None]], "VirtualKv"]  # pace, arrived


class VirtualPull:
    """A transfer to a worker; implements `Pull`. `ended` is called once, unless it is closed."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._timer: asyncio.TimerHandle | None = None
        self.done = False
        self.part: KvPart | None = None

    def end_in(self, seconds: float, part: KvPart | None) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end, part)

    def end(self, part: KvPart | None = None) -> None:
        """Complete the transfer, or fail it without a `part`. Idempotent."""
        if not self.done:
            self.done, self.part = True, part
            if self._timer is not None:
                self._timer.cancel()
            self._ended()

    def close(self) -> None:
        self.done, self.part = True, None
        if self._timer is not None:
            self._timer.cancel()


class VirtualKv:
    """The KV that a worker holds for others and fetches from them; implements `KvConnector`.
    `peers` are the connectors of all live workers, by name; `pace` converts tokens to seconds, and
    `arrived` is called when a transfer to this worker has ended.
    """

    def __init__(
        self,
        name: str,
        peers: dict[str, VirtualKv],
        pace: Callable[[int], float],
        arrived: Callable[[], None],
    ) -> None:
        self._name = name
        self._peers = peers
        self._pace = pace
        self._arrived = arrived
        self._held = Exports(int(_LIMITS.kv_buffer_size))
        self._giving: list[VirtualPull] = []
        self.counts = TransferCounts()
        peers[name] = self

    @property
    def num_expired(self) -> int:
        return self._held.num_expired

    def has_room(self, num_tokens: int) -> bool:
        del num_tokens
        return True

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: memoryview,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer | None:
        num_tokens, now = data.nbytes // TOKEN_BYTES, asyncio.get_running_loop().time()
        until, name = now + _LIMITS.kv_lease_duration, name or request_id
        if not self._held.add(name, ExportedKv(digest, num_tokens, data, until), now):
            return None
        return KvOffer(KvSource("", 0, self._name, name, num_tokens), blocks, until)

    def pull(self, source: KvSource, digest: bytes, start: int) -> VirtualPull:
        """Begin a transfer. It may fail at the next turn of the loop, when its source closes, or
        when its time is up.
        """
        pull = VirtualPull(self._arrived)
        peer = self._peers.get(source.engine_id or "")
        held = None if peer is None else peer._given(source.transfer_id, digest)
        seconds = self._pace(source.num_tokens - start)
        if peer is None or held is None:
            pull.end_in(0.0, None)
        elif seconds > _LIMITS.kv_transfer_timeout:
            pull.end_in(_LIMITS.kv_transfer_timeout, None)
        else:
            peer._giving = [one for one in peer._giving if not one.done] + [pull]
            part = KvPart(start, source.num_tokens, held.data[TOKEN_BYTES * start :])
            pull.end_in(seconds, part)
        return pull

    # No simulated picker names a worker whose cache others may ask for.
    has_questions, num_promised, bell = False, 0, -1

    def ask(self, peer: KvPeer, wanted: WantedKv) -> VirtualPull:
        """Return a transfer that fails at the next turn of the loop: peers answer no questions."""
        del peer, wanted
        pull = VirtualPull(self._arrived)
        pull.end_in(0.0, None)
        return pull

    def next_question(self) -> None:
        pass

    def lend(self, question: KvQuestion, num_tokens: int) -> bool:
        del question, num_tokens
        return False

    def promise(self, name: str) -> None:
        pass

    def leave_model(self) -> None:
        pass

    def close(self) -> None:
        self._peers.pop(self._name, None)
        giving, self._giving = self._giving, []
        for pull in giving:
            pull.end()

    def _given(self, transfer_id: str, digest: bytes) -> ExportedKv | None:
        self._held.expire(asyncio.get_running_loop().time())
        held = self._held.take(transfer_id)
        if held is not None:
            self._held.sent(held)
        return None if held is None or held.digest != digest else held
