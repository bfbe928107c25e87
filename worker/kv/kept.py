# Apart: what is kept is a pure matter of time and bytes.
"""KV that was computed for another engine, until it is taken or its time is up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptKv:
    """The KV of the first `num_tokens` tokens of what `digest` names; `deadline_seconds` is on the
    engine's clock.
    """

    digest: bytes
    num_tokens: int
    data: memoryview
    deadline_seconds: float


class KeptKvs:
    """Sole owner of what is kept, of at most `limit_bytes` together. What is asked for once is
    gone: nothing is sent twice.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, KeptKv] = OrderedDict()  # the oldest first
        self.num_bytes = 0
        self.num_expired = 0  # and those that gave way to others

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, transfer_id: str, kept: KeptKv, now: float) -> bool:
        """Keep it; the oldest give way where there is no room. False if it alone is too large."""
        self.expire(now)
        size = kept.data.nbytes
        if size > self._limit_bytes:
            return False
        while self.num_bytes + size > self._limit_bytes:
            self._drop(next(iter(self._kept)))
        self.take(transfer_id)
        self._kept[transfer_id] = kept
        self.num_bytes += size
        return True

    def take(self, transfer_id: str) -> KeptKv | None:
        """Keep it no more; None: it is not there (any more)."""
        kept = self._kept.pop(transfer_id, None)
        if kept is not None:
            self.num_bytes -= kept.data.nbytes
        return kept

    def expire(self, now: float) -> None:
        """Give up what was not taken in time."""
        late = [name for name, kept in self._kept.items() if kept.deadline_seconds <= now]
        for name in late:
            self._drop(name)

    def _drop(self, transfer_id: str) -> None:
        self.take(transfer_id)
        self.num_expired += 1
