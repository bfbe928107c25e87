"""Questions of one engine to the caches of another."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from worker.errors import KvTransferError

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_decoder = msgspec.msgpack.Decoder(tuple[str | None, str | None, list[_Token]])


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
    salted = (wanted.cache_salt, wanted.adapter, wanted.token_ids)
    return memoryview(msgspec.msgpack.encode(salted))


def unpack(data: memoryview, num_tokens: int, start: int) -> WantedKv:
    """Decode a question about `num_tokens` tokens. Raises `KvTransferError`."""
    try:
        salt, adapter, token_ids = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise KvTransferError("the other end asks what is no question") from error
    if len(token_ids) != num_tokens:
        raise KvTransferError("the other end asks for other tokens than it names")
    return WantedKv(token_ids, start, salt, adapter)
