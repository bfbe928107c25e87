"""What each process has under way, told to the others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from picker.pool.inflight import InflightLoad
from picker.sharing.block import BlockFullError, BlockReader, BlockWriter

log = logging.getLogger(__name__)

LOAD_BYTES = 4 * 2**20


class _Load(msgspec.Struct, array_like=True):
    """Requests under way by endpoint key, and how many decisions there were so far."""

    counts: dict[str, int]
    decisions: int = 0


class LoadWriter:
    """Publishes what one process has under way; `decisions` says how many it has made."""

    def __init__(
        self, block: BlockWriter, inflight: InflightLoad, decisions: Callable[[], int]
    ) -> None:
        self._block = block
        self._inflight = inflight
        self._decisions = decisions
        self._published: bytes | None = None
        self._is_full = False

    def publish(self) -> None:
        """Show the others what is under way, unless they see it already."""
        load = _Load(dict(self._inflight.own_counts), self._decisions())
        message = msgspec.msgpack.encode(load)
        if message == self._published:
            return
        try:
            self._block.publish(message)
        except BlockFullError as error:
            if not self._is_full:
                log.error("requests under way cannot be shared: %s", error)
            self._is_full = True
        else:
            self._published, self._is_full = message, False


def publish_nothing(block: BlockWriter) -> None:
    """Say of a process that has ended that it has nothing under way."""
    block.publish(msgspec.msgpack.encode(_Load({})))


class LoadReader:
    """Knows what other processes have under way. Owns what each has said last."""

    def __init__(self, blocks: Sequence[BlockReader]) -> None:
        self._blocks = tuple(blocks)
        self._decoder = msgspec.msgpack.Decoder(_Load)
        self._loads = [_Load({}) for _ in blocks]

    def poll(self) -> bool:
        """Take what is new; whether there was anything."""
        changed = False
        for index, block in enumerate(self._blocks):
            message = block.read()
            if message is not None:
                self._loads[index] = self._decoder.decode(message)
                changed = True
        return changed

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests under way by endpoint key, all of these processes together."""
        total: Counter[str] = Counter()
        for load in self._loads:
            total.update(load.counts)
        return total

    @property
    def decisions(self) -> int:
        """How many decisions they have made; less once one of them was replaced."""
        return sum(load.decisions for load in self._loads)
