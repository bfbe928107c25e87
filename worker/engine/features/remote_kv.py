"""KV of other engines, attached to the scheduler: what to fetch, and what to export."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from worker.engine.features.adapters import AdapterSlots
from worker.engine.features.interface import BackgroundFeature, EngineState
from worker.engine.sequences.sequence import Sequence
from worker.errors import DeviceMemoryError
from worker.kv.asked import KvQuestion, WantedKv
from worker.kv.content import content_digest
from worker.kv.pull import Pull
from worker.kv.transfers import TransferCounts
from worker.types import KvBytes, KvOffer, KvPeer, KvSource, TransferStats


class KvConnector(Protocol):
    """Moves KV between engines, without ever blocking; see `worker.kv.tcp`."""

    counts: TransferCounts

    @property
    def num_expired(self) -> int: ...

    def has_room(self, num_tokens: int) -> bool: ...

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: KvBytes,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer | None: ...

    def pull(self, source: KvSource, digest: bytes, start: int) -> Pull: ...

    def ask(self, peer: KvPeer, wanted: WantedKv) -> Pull: ...

    @property
    def has_questions(self) -> bool: ...

    def next_question(self) -> KvQuestion | None: ...

    def lend(self, question: KvQuestion, num_tokens: int) -> bool: ...

    def promise(self, name: str) -> None: ...

    @property
    def num_promised(self) -> int: ...

    def leave_model(self) -> None: ...

    @property
    def bell(self) -> int: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Reading:
    """An unfinished answer: KV of `num_tokens` tokens from `start` on; `pull` reads the rest."""

    question: KvQuestion
    start: int
    parts: list[memoryview]
    num_tokens: int
    pull: Pull | None

    def data(self) -> memoryview | None:
        """Return the KV from the first token that was asked for, if there is any."""
        if not self.num_tokens:
            return None
        is_whole = self.pull is None and len(self.parts) == 1
        data = self.parts[0] if is_whole else memoryview(b"".join(self.parts))
        num_before = self.question.wanted.start - self.start
        return data[num_before * (data.nbytes // self.num_tokens) :]

    def close(self) -> None:
        if self.pull is not None:
            self.pull.close()


class RemoteKv(BackgroundFeature):
    """Takes KV from other engines, exports KV for them, and answers questions about the caches.

    `read` returns the KV of the first tokens in some blocks: [tokens, layers, 2, kv_heads,
    head_dim], as bytes. `pool` (`worker.executor.kv_cache`) takes exports while it has room.
    Owns the answers that wait for a disk.
    """

    name = "remote KV"

    def __init__(
        self,
        connector: KvConnector,
        read: Callable[[Seq[int], int], memoryview],
        block_size: int,
        adapters: AdapterSlots | None = None,
        pool: Any = None,
    ) -> None:
        self._connector = connector
        self._read = read
        self._block_size = block_size
        self._adapters = adapters
        self._pool = pool
        self._reading: list[_Reading] = []
        self.bell = connector.bell

    def attach(self, state: EngineState) -> None:
        self._live, self._kv, self._counters = state.live, state.kv, state.counters

    @property
    def totals(self) -> tuple[int, ...]:
        return (self._connector.num_expired, *dataclasses.astuple(self._connector.counts))

    def stats(self) -> dict[str, Any]:
        counts = self._connector.counts
        transfers = TransferStats(
            counts.num_failed,
            self._connector.num_expired,
            counts.num_bytes_sent,
            counts.num_bytes_received,
        )
        return {"transfers": transfers, "pulls": self._live.pulls()}

    def leave_model(self) -> None:
        self._connector.leave_model()

    def close(self) -> None:
        self._connector.close()

    def hand_over(self, request_id: str) -> None:
        self._connector.promise(request_id)

    def waits(self, sequence: Sequence) -> bool:
        return sequence.is_awaiting_kv

    @property
    def is_asked(self) -> bool:
        return self._connector.has_questions or self.is_reading

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    @property
    def has_promised(self) -> bool:
        return self._connector.num_promised > 0

    def add(self, sequence: Sequence) -> None:
        """Take the KV that is missing here from another engine, if that saves computing a block."""
        source, peer = sequence.request.kv_source, sequence.request.kv_peer
        if source is None and peer is None:
            return
        hit = self._kv.lookup(sequence)
        if source is not None:
            self._counters.external_cache_queries += self._pull(sequence, source, hit.num_tokens)
        elif peer is not None:
            is_on_disk = self._kv.is_on_disk(sequence, hit)
            asked = self._ask(sequence, peer, hit.num_tokens, is_on_disk)
            if self._kv.tiers is None:  # else the whole prompt counts when it is admitted
                self._counters.external_cache_queries += asked

    def _ask(self, sequence: Sequence, peer: KvPeer, num_local: int, is_on_disk: bool) -> int:
        """Ask for all KV missing here, outputs' too. Return how many prompt tokens that is."""
        request, token_ids = sequence.request, tuple(sequence.token_ids)
        adapter = None if request.adapter is None else request.adapter.digest
        start = num_local // self._block_size * self._block_size
        is_short = len(token_ids) - 1 - num_local < self._block_size
        if is_on_disk or is_short or sequence.num_readable < len(token_ids):
            if peer.promise:  # the peer holds KV that is not needed
                wanted = WantedKv(token_ids, len(token_ids), request.cache_salt, adapter)
                self._connector.ask(peer, wanted)
            return 0
        wanted = WantedKv(token_ids, start, request.cache_salt, adapter)
        sequence.kv_pull = self._connector.ask(peer, wanted)
        sequence.asks_peer = True
        return max(0, min(len(token_ids) - 1, sequence.num_prompt) - start)

    def _pull(self, sequence: Sequence, source: KvSource, num_local: int) -> int:
        """Pull the KV exported for the sequence. Return the number of prompt tokens pulled."""
        end = min(source.num_tokens, sequence.num_prompt - 1)
        # A prompt whose log probabilities are wanted, or that is pooled, is run anyway.
        is_read = sequence.num_readable >= sequence.num_prompt >= source.num_tokens
        digest = _digest(sequence, min(source.num_tokens, sequence.num_prompt))
        if not is_read or end - num_local < self._block_size:
            # No token of it is needed: the exporter frees it.
            self._connector.pull(source, digest, source.num_tokens)
            return 0
        start = num_local // self._block_size * self._block_size
        sequence.kv_pull = self._connector.pull(source, digest, start)
        return end - start

    def offer(self, sequence: Sequence) -> KvOffer | None:
        if not sequence.request.keeps_kv or sequence.index:
            return None
        num_tokens = min(sequence.num_written, sequence.num_prompt)
        if not num_tokens or not self._connector.has_room(num_tokens):
            return None
        table = self._kv.blocks.table(sequence.seq_id)
        blocks = tuple(table[: -(-num_tokens // self._block_size)])
        try:
            pooled = None if self._pool is None else self._pool.keep(blocks, num_tokens)
            data = self._read(blocks, num_tokens) if pooled is None else pooled
        except DeviceMemoryError:
            return None
        digest = _digest(sequence, num_tokens)
        name = sequence.request.kv_name
        return self._connector.keep(sequence.request_id, digest, data, blocks, name)

    # ---- what others ask --------------------------------------------------------------------

    def before_step(self) -> None:
        """Answer at most one question from the device, so that no step waits for long, and all
        questions whose KV has been read from disk.
        """
        reading, self._reading = self._reading, []
        for one in reading:
            if one.pull is None or one.pull.done or not one.question.is_open:
                self._take_in(one)
            else:
                self._reading.append(one)
        if self._reading:  # a disk serves one at a time, and sequences here before others
            return
        question = self._connector.next_question()
        if question is not None:
            self._look_up(question)

    def _look_up(self, question: KvQuestion) -> None:
        wanted, adapter = question.wanted, None
        if wanted.adapter is not None:
            adapter = None if self._adapters is None else self._adapters.find(wanted.adapter)
            if adapter is None:
                question.answer(None)
                return
        held = self._kv.held(wanted, adapter)
        num_tokens = (len(held.blocks) + len(held.views)) * self._block_size
        parts: list[memoryview] = []
        has_room = self._connector.lend(question, num_tokens)
        try:
            if has_room and held.blocks:
                parts.append(self._read(held.blocks, len(held.blocks) * self._block_size))
        except DeviceMemoryError:
            has_room = False
        if held.views:
            parts.append(memoryview(b"".join(held.views)))
        reading = _Reading(question, held.start, parts, num_tokens, held.reading)
        if not has_room:
            reading.close()
            question.answer(None)
        elif held.reading is None:
            question.answer(reading.data())
        else:
            self._reading.append(reading)

    def _take_in(self, reading: _Reading) -> None:
        pull = reading.pull
        part = None if pull is None else pull.part
        if part is not None and self._connector.lend(reading.question, part.end - part.start):
            reading.parts.append(part.data)
            reading.num_tokens += part.end - part.start
        reading.question.answer(reading.data())
        reading.close()


def _digest(sequence: Sequence, num_tokens: int) -> bytes:
    request = sequence.request
    return content_digest(
        request.prompt_token_ids[:num_tokens], request.cache_salt, request.adapter
    )
