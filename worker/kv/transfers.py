"""The state that the two threads of a connector share; every part is safe on both."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worker.config import KvTransferConfig
from worker.kv.asked import KvQuestion
from worker.kv.channel import new_bell
from worker.kv.content import KvShape
from worker.kv.exports import Exports

_MAX_RINGS = 64


class KvQuestions:
    """The questions from other engines: the loop puts, the engine takes. `bell` is a file that can
    be read when a question has come or a promise was redeemed.
    """

    def __init__(self) -> None:
        self._questions: deque[KvQuestion] = deque()
        self._ringing, self._bell = new_bell()
        self.bell = self._bell.fileno()

    def __len__(self) -> int:
        return len(self._questions)

    def put(self, question: KvQuestion) -> None:
        self._questions.append(question)
        self.ring()

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # then it rings already
            self._ringing.send(b"\0")

    def take(self) -> KvQuestion | None:
        """Return the oldest question whose peer still waits."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(_MAX_RINGS)
        while self._questions:
            question = self._questions.popleft()
            if question.is_open:
                return question
        return None

    def close(self) -> None:
        self._ringing.close()
        self._bell.close()


@dataclass(slots=True)
class TransferCounts:
    """Totals since start. Each field has one writer; any thread may read."""

    num_failed: int = 0
    num_bytes_sent: int = 0
    num_bytes_received: int = 0


@dataclass(slots=True)
class TransferState:
    """The state shared by the engine's thread and the loop's. `token_bytes` is the size of one
    token's KV. `pool` is a GPU's `worker.executor.kv_cache.KvPool`. `shape` is replaced, never
    changed, when the model is left.
    """

    config: KvTransferConfig
    key: bytes
    shape: KvShape
    token_bytes: int
    exports: Exports
    pool: Any = None
    questions: KvQuestions = field(default_factory=KvQuestions)
    counts: TransferCounts = field(default_factory=TransferCounts)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Run `function` on the loop's thread; nothing happens if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)
