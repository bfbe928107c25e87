"""The choice of a leader among replicas, by what one of them has seen of a Lease.

Theory of operation. A leader leads for `renew_seconds` from the moment at which it *asked* for the
write that was then accepted. Another one takes the Lease when it has not seen it change for
`lease_seconds`, counted from when it *heard* of the last change, which is later than that write.
Both count by monotonic clocks of their own; the time that a holder wrote is never read. As
the second span is longer than the first, no two lead at a time, however late answers come, however
long a process stands still, and whatever wall clocks say, as long as

- clocks do not differ in rate by more than `lease_seconds / renew_seconds` (1.5 by default),
- the API server accepts no write of an outdated version, and
- no other client deletes the Lease or takes the holder out of it.

A Lease that goes all the same is waited out by those who have seen its holder.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

MAX_STATED_SECONDS: Final = 120.0  # what a Lease may ask others to wait


@dataclass(frozen=True, slots=True)
class Timings:
    """How long a Lease holds for others, how long for its holder, and between two tries."""

    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0

    @property
    def look_seconds(self) -> float:
        """Between two looks of a standby: what a released Lease waits for, and by how much one
        that is not renewed may be judged too long.
        """
        return self.retry_seconds / 4

    @property
    def answer_seconds(self) -> float:
        """So long an answer is waited for: a leader can try twice before its time is up."""
        return self.renew_seconds / 2.5


@dataclass(frozen=True, slots=True)
class LeaseName:
    """Which Lease."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A Lease. `holder` "": it was released or never held; None: malformed.

    `mark` changes with every write; it is compared, never understood.
    """

    holder: str | None
    mark: str
    transitions: int = 0
    stated_seconds: float = 0.0


class Step(enum.Enum):
    """What to ask of the API server next: read the Lease, make it, or write it as one's own."""

    LOOK = "look"
    CREATE = "create"
    WRITE = "write"


class Elector:
    """Owns what one replica knows of the Lease, and until when it leads.

    Every `now` is of one monotonic clock, in seconds, that does not stop while the process does.
    """

    def __init__(self, identity: str, timings: Timings) -> None:
        self._identity, self._timings = identity, timings
        self._record: LeaseRecord | None = None
        self._free_at = float("-inf")  # for others than the holder
        self._outdated = True
        self._leads_until: float | None = None

    def is_leader(self, now: float) -> bool:
        """True if this replica leads; no other one does at the time."""
        return self._leads_until is not None and now < self._leads_until

    @property
    def leads_until(self) -> float | None:
        """When it stops to lead, if nothing else happens; None: it does not lead."""
        return self._leads_until

    @property
    def holder(self) -> str:
        """The holder of the Lease when it was last seen; "" for none."""
        return (self._record.holder or "") if self._record is not None else ""

    @property
    def holds(self) -> bool:
        """True if the Lease named this one when it was last seen."""
        return self._record is not None and self._record.holder == self._identity

    @property
    def is_outdated(self) -> bool:
        """True if a write would be of a version that is not the current one, as far as is known."""
        return self._outdated

    def step(self, now: float) -> Step:
        """What comes next."""
        if self._outdated or not (self.holds or now >= self._free_at):
            return Step.LOOK
        return Step.CREATE if self._record is None else Step.WRITE

    def wait_seconds(self, now: float, jitter: float = 1.0) -> float:
        """How long to wait before the next step, after one that went well.

        `jitter` shortens what may be shortened, so that replicas do not ask in step.
        """
        if self.is_leader(now):
            return self._timings.retry_seconds * jitter
        if self.step(now) is not Step.LOOK:
            return 0.0
        looking = self._timings.look_seconds * jitter
        return min(max(self._free_at - now, 0.0), looking) if not self._outdated else looking

    def saw(self, record: LeaseRecord, now: float) -> None:
        """The Lease was read, or written for another holder; `now` is when the answer was there."""
        known, self._record, self._outdated = self._record, record, False
        if record.holder != self._identity:
            self._leads_until = None
        if record.holder == "":
            self._free_at = now
        elif known is None or (known.holder, known.mark) != (record.holder, record.mark):
            stated = min(record.stated_seconds, MAX_STATED_SECONDS)
            self._free_at = now + max(self._timings.lease_seconds, stated)

    def saw_none(self, now: float) -> None:
        """There is no Lease. One whose holder was known is waited out, but by that holder."""
        if self.holds:
            self._free_at = now
        self._record, self._outdated = None, False

    def wrote(self, record: LeaseRecord, asked_at: float) -> None:
        """A write was accepted; `asked_at` is from before it was sent."""
        self._record, self._outdated, self._free_at = record, False, asked_at
        self._leads_until = asked_at + self._timings.renew_seconds

    def lost_track(self) -> None:
        """A write was refused, or its outcome is unknown: look before the next one."""
        self._outdated = True

    def stand_down(self) -> None:
        """Lead no more, whatever the Lease says."""
        self._leads_until = None
