"""KV that moves between simulated workers, on the clock of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.config import KvTransferConfig
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.kept import KeptKv, KeptKvs
from worker.kv.tcp import TransferCounts
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
        """It has arrived, or failed. Idempotent."""
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
    """What a worker keeps for others and takes from them; implements `KvConnector`. `peers` are the
    connectors of all workers that live, by name; `pace` says how many seconds so many tokens take,
    and `arrived` is called when a transfer to here has ended.
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
        self._kept = KeptKvs(int(_LIMITS.kv_buffer_size))
        self._giving: list[VirtualPull] = []
        self.counts = TransferCounts()
        peers[name] = self

    @property
    def num_expired(self) -> int:
        return self._kept.num_expired

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
        """As `KvConnector` says."""
        num_tokens, now = data.nbytes // TOKEN_BYTES, asyncio.get_running_loop().time()
        until, name = now + _LIMITS.kv_lease_duration, name or request_id
        if not self._kept.keep(name, KeptKv(digest, num_tokens, data, until), now):
            return None
        return KvOffer(KvSource("", 0, self._name, name, num_tokens), blocks, until)

    def pull(self, source: KvSource, digest: bytes, start: int) -> VirtualPull:
        """As `KvConnector` says. What fails, fails at the next turn of the loop, when its keeper
        dies, or when its time is up.
        """
        pull = VirtualPull(self._arrived)
        peer = self._peers.get(source.engine_id or "")
        kept = None if peer is None else peer._given(source.transfer_id, digest)
        seconds = self._pace(source.num_tokens - start)
        if peer is None or kept is None:
            pull.end_in(0.0, None)
        elif seconds > _LIMITS.kv_transfer_timeout:
            pull.end_in(_LIMITS.kv_transfer_timeout, None)
        else:
            peer._giving = [one for one in peer._giving if not one.done] + [pull]
            part = KvPart(start, source.num_tokens, kept.data[TOKEN_BYTES * start :])
            pull.end_in(seconds, part)
        return pull

    # No picker here names a worker to be asked for what it has cached.
    has_questions, num_promised, bell = False, 0, -1

    def ask(self, peer: KvPeer, wanted: WantedKv) -> VirtualPull:
        """As `KvConnector` says: it has nothing."""
        del peer, wanted
        pull = VirtualPull(self._arrived)
        pull.end_in(0.0, None)
        return pull

    def next_question(self) -> None:
        """Nobody asks."""

    def lend(self, question: KvQuestion, num_tokens: int) -> bool:
        """As `KvConnector` says."""
        del question, num_tokens
        return False

    def promise(self, name: str) -> None:
        """Nobody will ask."""

    def leave_model(self) -> None:
        """None sleeps here."""

    def close(self) -> None:
        """The worker is dead: what it keeps is gone, and what is on its way from it ends."""
        self._peers.pop(self._name, None)
        giving, self._giving = self._giving, []
        for pull in giving:
            pull.end()

    def _given(self, transfer_id: str, digest: bytes) -> KeptKv | None:
        self._kept.expire(asyncio.get_running_loop().time())
        kept = self._kept.take(transfer_id)
        if kept is not None:
            self._kept.sent(kept)
        return None if kept is None or kept.digest != digest else kept
