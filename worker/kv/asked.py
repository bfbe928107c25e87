"""Questions of one engine to the caches of another."""

from __future__ import annotations

import sys
from array import array
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from worker.errors import KvTransferError

_TOKEN = "I"  # 4 bytes wherever CPython runs
_decoder = msgspec.msgpack.Decoder(tuple[str | None, str | None, bytes])


@dataclass(frozen=True, slots=True)
class WantedKv:
    """The KV wanted of `token_ids`, from token `start` on, except the last one; `adapter` is the
    digest of the adapter's files. A `start` after them all wants none.
    """

    token_ids: Sequence[int]
    start: int
    cache_salt: str | None
    adapter: str | None


@dataclass(slots=True, eq=False)
class KvQuestion:
    """A question that another engine asks of the caches here. `is_open` and `answer` may be used on
    any thread, `answer` once; `on_answer` is the connector's.
    """

    wanted: WantedKv
    answered: Future[memoryview]
    on_answer: Callable[[KvQuestion, memoryview], None]
    num_lent_bytes: int = 0

    @property
    def is_open(self) -> bool:
        return not self.answered.done()

    def answer(self, data: memoryview | None) -> None:
        """Answer with the KV of consecutive tokens from the first wanted one on, if any."""
        self.on_answer(self, memoryview(b"") if data is None else data)


def pack(wanted: WantedKv) -> memoryview:
    words = _little(array(_TOKEN, wanted.token_ids))
    salted = (wanted.cache_salt, wanted.adapter, words.tobytes())
    return memoryview(msgspec.msgpack.encode(salted))


def unpack(data: memoryview, num_tokens: int, start: int) -> WantedKv:
    """Decode a question about `num_tokens` tokens. Raises `KvTransferError`."""
    try:
        salt, adapter, ids = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise KvTransferError("the other end asks what is no question") from error
    words = array(_TOKEN)
    if len(ids) != num_tokens * words.itemsize:
        raise KvTransferError("the other end asks for other tokens than it names")
    words.frombytes(ids)
    return WantedKv(_little(words).tolist(), start, salt, adapter)


def _little(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words.byteswap()
    return words
