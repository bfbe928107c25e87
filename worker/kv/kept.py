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
    gone: nothing is sent twice. It takes room until it is `sent`, or put back. What is `lent` to be
    sent at once takes room too. A promise is of what is in caches, and takes none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, KeptKv] = OrderedDict()  # the oldest first
        self._promised: dict[str, float] = {}  # until when
        self.num_bytes = 0
        self.num_expired = 0  # and those that gave way to others

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._kept

    def make_room(self, size: int, now: float) -> bool:
        """Whether `size` bytes can be kept; the oldest give way where there is no room."""
        self.expire(now)
        if size > self._limit_bytes:
            return False
        while self._kept and self.num_bytes + size > self._limit_bytes:
            self._drop(next(iter(self._kept)))
        return self.num_bytes + size <= self._limit_bytes

    def keep(self, transfer_id: str, kept: KeptKv, now: float) -> bool:
        """Keep it, in place of what has this name. False: there is no room, as others are larger or
        being sent.
        """
        if transfer_id in self._kept:
            self._drop(transfer_id)
        if not self.make_room(kept.data.nbytes, now):
            return False
        self._kept[transfer_id] = kept
        self.num_bytes += kept.data.nbytes
        return True

    def take(self, transfer_id: str) -> KeptKv | None:
        """It is about to be sent, and not to be had any more; None: it is not there."""
        return self._kept.pop(transfer_id, None)

    def put_back(self, transfer_id: str, kept: KeptKv) -> None:
        """What was taken was not sent: it may be asked for again, in the time that it had. What has
        its name by now stays.
        """
        if self._kept.setdefault(transfer_id, kept) is not kept:
            self.sent(kept)

    def sent(self, kept: KeptKv) -> None:
        """What was taken is not needed any more."""
        self.num_bytes -= kept.data.nbytes

    def lend(self, size: int, now: float) -> bool:
        """Whether `size` bytes may be sent at once; nothing gives way to them."""
        self.expire(now)
        if self.num_bytes + size > self._limit_bytes:
            return False
        self.num_bytes += size
        return True

    def given_back(self, size: int) -> None:
        """What was lent is not needed any more."""
        self.num_bytes -= size

    def promise(self, name: str, deadline_seconds: float) -> None:
        """What caches hold of a sequence will be asked for."""
        self._promised[name] = deadline_seconds

    def redeem(self, name: str) -> None:
        """It was asked for. Unknown names pass."""
        self._promised.pop(name, None)

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def expire(self, now: float) -> None:
        """Give up what was not taken in time."""
        late = [name for name, kept in self._kept.items() if kept.deadline_seconds <= now]
        for name in late:
            self._drop(name)
        for name in [name for name, deadline in self._promised.items() if deadline <= now]:
            self.redeem(name)
            self.num_expired += 1

    def _drop(self, transfer_id: str) -> None:
        self.sent(self._kept.pop(transfer_id))
        self.num_expired += 1
