"""KV of other engines, as the scheduler sees it: what to ask for, what has come, what to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from worker.engine.sequence import Pull, Sequence
from worker.errors import DeviceMemoryError
from worker.kv.content import content_digest
from worker.kv.tcp import TransferCounts
from worker.types import KvOffer, KvSource


class KvConnector(Protocol):
    """Moves KV between engines, without ever blocking; see `worker.kv.tcp`."""

    counts: TransferCounts

    @property
    def num_expired(self) -> int:
        """What was kept and not taken."""
        ...

    def has_room(self, num_tokens: int) -> bool:
        """Whether KV of so many tokens can be kept."""
        ...

    def keep(
        self,
        request_id: str,
        digest: bytes,
        data: memoryview,
        blocks: tuple[int, ...],
        name: str | None = None,
    ) -> KvOffer | None:
        """Keep KV for another engine, as `name` if that is given; where it can be had. None: it
        cannot be kept.
        """
        ...

    def pull(self, source: KvSource, digest: bytes, start: int) -> Pull:
        """Begin to take KV from token `start` on."""
        ...

    def close(self) -> None:
        """End all transfers. Idempotent."""
        ...


class RemoteKv:
    """Decides for sequences what is taken from other engines and kept for them. `read` gives the KV
    of the first tokens in some blocks: [tokens, layers, 2, kv_heads, head_dim], as bytes.
    """

    def __init__(
        self, connector: KvConnector, read: Callable[[Seq[int], int], memoryview], block_size: int
    ) -> None:
        self._connector = connector
        self._read = read
        self._block_size = block_size
        self.counts = connector.counts
        self.close = connector.close

    @property
    def num_expired(self) -> int:
        """What was kept for others and not taken."""
        return self._connector.num_expired

    @property
    def totals(self) -> tuple[int, ...]:
        """All counts: these change while the engine has nothing to do."""
        return (self.num_expired, *dataclasses.astuple(self.counts))

    def begin(self, sequence: Sequence, num_local: int) -> int:
        """A sequence has come, of which the prefix cache has `num_local` tokens: take the KV of the
        rest, if that saves computing a block. How many tokens were asked for.
        """
        source = sequence.request.kv_source
        if source is None:
            return 0
        end = min(source.num_tokens, sequence.num_prompt - 1)
        # A prompt whose log probabilities are wanted, or that is pooled, is run anyway.
        is_read = sequence.num_readable >= sequence.num_prompt >= source.num_tokens
        digest = _digest(sequence, min(source.num_tokens, sequence.num_prompt))
        if not is_read or end - num_local < self._block_size:
            # Nothing of it is needed, which its keeper is told.
            self._connector.pull(source, digest, source.num_tokens)
            return 0
        start = num_local // self._block_size * self._block_size
        sequence.kv_pull = self._connector.pull(source, digest, start)
        return end - start

    def offer(self, sequence: Sequence, table: Seq[int]) -> KvOffer | None:
        """A sequence has ended whose KV is asked for: where it can be had, if it could be kept."""
        num_tokens = min(sequence.num_written, sequence.num_prompt)
        if not num_tokens or not self._connector.has_room(num_tokens):
            return None
        blocks = tuple(table[: -(-num_tokens // self._block_size)])
        try:
            data = self._read(blocks, num_tokens)
        except DeviceMemoryError:
            return None
        digest = _digest(sequence, num_tokens)
        name = sequence.request.kv_name
        return self._connector.keep(sequence.request_id, digest, data, blocks, name)


def _digest(sequence: Sequence, num_tokens: int) -> bytes:
    request = sequence.request
    return content_digest(
        request.prompt_token_ids[:num_tokens], request.cache_salt, request.adapter
    )
