"""Exported KV: held until a peer fetches it or its lease expires."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from worker.types import KvBytes


@dataclass(frozen=True, slots=True)
class ExportedKv:
    """The KV of `num_tokens` tokens that `digest` names. The deadline is on the caller's clock."""

    digest: bytes
    num_tokens: int
    data: KvBytes
    deadline_seconds: float


class Exports:
    """Sole owner of exported KV, of at most `limit_bytes` together. Safe on any thread.

    An export is fetched once: `take` removes it, and its room is free when it is `sent` or put
    back. KV `lent` to an answer takes room too; a promise is about cached KV and takes none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()  # these methods call each other
        self._exports: OrderedDict[str, ExportedKv] = OrderedDict()  # the oldest first
        self._promised: dict[str, float] = {}  # the deadlines
        self.num_bytes = 0
        self.num_expired = 0  # those that gave way to others count too

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._exports

    def make_room(self, size: int, now: float) -> bool:
        """True if `size` bytes can be exported; the oldest exports give way if there is no room."""
        with self._lock:
            self.expire(now)
            if size > self._limit_bytes:
                return False
            while self._exports and self.num_bytes + size > self._limit_bytes:
                self._drop(next(iter(self._exports)))
            return self.num_bytes + size <= self._limit_bytes

    def add(self, transfer_id: str, exported: ExportedKv, now: float) -> bool:
        """Export KV, in place of another export of this name. Return False if there is no room."""
        with self._lock:
            if transfer_id in self._exports:
                self._drop(transfer_id)
            if not self.make_room(exported.data.nbytes, now):
                return False
            self._exports[transfer_id] = exported
            self.num_bytes += exported.data.nbytes
            return True

    def take(self, transfer_id: str) -> ExportedKv | None:
        with self._lock:
            return self._exports.pop(transfer_id, None)

    def put_back(self, transfer_id: str, exported: ExportedKv) -> None:
        """Make an export that was not sent available again, unless a newer one has its name."""
        with self._lock:
            if self._exports.setdefault(transfer_id, exported) is not exported:
                self.sent(exported)

    def sent(self, exported: ExportedKv) -> None:
        self.given_back(exported.data.nbytes)

    def lend(self, size: int, now: float) -> bool:
        """True if `size` bytes may be sent at once; no export gives way to them."""
        with self._lock:
            self.expire(now)
            if self.num_bytes + size > self._limit_bytes:
                return False
            self.num_bytes += size
            return True

    def given_back(self, size: int) -> None:
        with self._lock:
            self.num_bytes -= size

    def promise(self, name: str, deadline_seconds: float) -> None:
        """Note until when a peer may fetch the cached KV of the sequence that `name` stands for."""
        with self._lock:
            self._promised[name] = deadline_seconds

    def redeem(self, name: str) -> None:
        with self._lock:
            self._promised.pop(name, None)

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def expire(self, now: float) -> None:
        with self._lock:
            late = [name for name, one in self._exports.items() if one.deadline_seconds <= now]
            for name in late:
                self._drop(name)
            for name in [name for name, deadline in self._promised.items() if deadline <= now]:
                self.redeem(name)
                self.num_expired += 1

    def _drop(self, transfer_id: str) -> None:
        self.sent(self._exports.pop(transfer_id))
        self.num_expired += 1
