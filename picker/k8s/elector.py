"""The election of a leader among replicas, from one replica's view of a Lease.

A leader leads for `renew_seconds` from the moment at which it *requested* the write that was
accepted. Another replica takes the Lease `lease_seconds` after it *learned* of the last change,
which is later than that write. Both count by their own monotonic clocks; the holder's time is never
read. So no two replicas lead at a time, however late answers arrive or long a process is suspended,
while clock rates differ by less than `lease_seconds / renew_seconds` (1.5 by default), the API
server accepts no outdated write, and no other client removes the holder or the Lease.
"""

import enum
from dataclasses import dataclass
from typing import Final

MAX_STATED_SECONDS: Final = 120.0  # the longest wait that a Lease can demand of others


@dataclass(frozen=True, slots=True)
class Timings:
    """The validity of a Lease for others and for its holder, and the time between two attempts."""

    lease_seconds: float = 15.0  # the timings of the reference
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0

    @property
    def look_seconds(self) -> float:
        """The time between two reads of a standby, which delays its takeover."""
        return self.retry_seconds / 4

    @property
    def answer_seconds(self) -> float:
        """The time-out of a request, so that a leader can try twice before its time is over."""
        return self.renew_seconds / 2.5


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease; `holder` is "" if not held, None if malformed; `mark` changes with every write."""

    holder: str | None
    mark: str
    transitions: int = 0
    stated_seconds: float = 0.0


class Step(enum.Enum):
    LOOK = "look"
    CREATE = "create"
    WRITE = "write"


class Elector:
    """Owns one replica's view of the Lease; the clock of `now` must run even during suspension."""

    def __init__(self, identity: str, timings: Timings) -> None:
        self._identity, self._timings = identity, timings
        self._record: LeaseRecord | None = None
        self._free_at = float("-inf")  # for replicas other than the holder
        self.is_outdated = True
        self.leads_until: float | None = None  # without a further write

    def is_leader(self, now: float) -> bool:
        return self.leads_until is not None and now < self.leads_until

    @property
    def holder(self) -> str:
        return (self._record.holder or "") if self._record is not None else ""

    @property
    def holds(self) -> bool:
        return self._record is not None and self._record.holder == self._identity

    def step(self, now: float) -> Step:
        if self.is_outdated or not (self.holds or now >= self._free_at):
            return Step.LOOK
        return Step.CREATE if self._record is None else Step.WRITE

    def wait_seconds(self, now: float, jitter: float = 1.0) -> float:
        """Return the wait after a success; `jitter` keeps replicas from synchronizing."""
        if self.is_leader(now):
            return self._timings.retry_seconds * jitter
        if self.step(now) is not Step.LOOK:
            return 0.0
        looking = self._timings.look_seconds * jitter
        return min(max(self._free_at - now, 0.0), looking) if not self.is_outdated else looking

    def saw(self, record: LeaseRecord, now: float) -> None:
        """Note the Lease as read, or as written for another holder; `now` is after the answer."""
        known, self._record, self.is_outdated = self._record, record, False
        if record.holder != self._identity:
            self.leads_until = None
        if record.holder == "":
            self._free_at = now
        elif known is None or (known.holder, known.mark) != (record.holder, record.mark):
            stated = min(record.stated_seconds, MAX_STATED_SECONDS)
            self._free_at = now + max(self._timings.lease_seconds, stated)

    def saw_none(self, now: float) -> None:
        """Note that there is no Lease. All but its last known holder wait for the full span."""
        if self.holds:
            self._free_at = now
        self._record, self.is_outdated = None, False

    def wrote(self, record: LeaseRecord, asked_at: float) -> None:
        """Note an accepted write; `asked_at` is the time before it was sent."""
        self._record, self.is_outdated, self._free_at = record, False, asked_at
        self.leads_until = asked_at + self._timings.renew_seconds

    def lost_track(self) -> None:
        """Note that a write was refused or its outcome is unknown: read before the next write."""
        self.is_outdated = True

    def stand_down(self) -> None:
        self.leads_until = None
