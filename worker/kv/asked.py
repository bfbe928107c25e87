"""What one engine asks of the caches of another."""

from __future__ import annotations

import sys
from array import array
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TOKEN = "I"  # 4 bytes wherever CPython runs
TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class WantedKv:
    """The KV of `token_ids` from token `start` on, but of the last one; `adapter` is the digest of
    its files. Where `start` is behind them all, none.
    """

    token_ids: Sequence[int]
    start: int
    cache_salt: str | None
    adapter: str | None


@dataclass(slots=True, eq=False)
class KvQuestion:
    """What another engine wants of the caches here. `is_open` and `answer` may be used on any
    thread, `answer` once. The rest is the connector's.
    """

    wanted: WantedKv
    answered: Future[memoryview]
    on_answer: Callable[[KvQuestion, memoryview], None]
    num_lent_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the other engine still waits."""
        return not self.answered.done()

    def answer(self, data: memoryview | None) -> None:
        """The KV of consecutive tokens from the first wanted on; None: there is none."""
        self.on_answer(self, memoryview(b"") if data is None else data)


def pack(token_ids: Sequence[int]) -> memoryview:
    """Token ids as they are sent."""
    return memoryview(_words(token_ids).tobytes())


def unpack(data: memoryview) -> list[int]:
    """What `pack` made."""
    words = array(_TOKEN)
    words.frombytes(data)
    return _words(words).tolist()


def _words(token_ids: Sequence[int]) -> array[int]:
    words = array(_TOKEN, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words
