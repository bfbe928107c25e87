"""What is known of each drafter, and of each drafter for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.drafters.acceptance import (
    OwnRun,
    PooledAcceptance,
    SequenceAcceptance,
    TypicalRun,
    confidence_class,
)
from worker.engine.drafters.probing import ProbeClock

_MAX_PROBE_DRAFTS = 3
_MOST_BETWEEN_LONGER = 2  # steps between drafts that are longer than seems to pay
_PACE_GAIN = 1.0 / 12.0
_LIKELY = 0.5  # survivals from here on count for a pace


class DrafterRecord:
    """One drafter over all sequences; owns what is known of it."""

    __slots__ = ("clock", "pool", "typical")

    def __init__(self, now: int) -> None:
        self.pool = PooledAcceptance()
        self.typical = TypicalRun()
        self.clock = ProbeClock(now, shortest=2, followed_up=3)


class SequenceRecord:
    """One drafter for one sequence; owns what is known of it.

    `wanted` is how many drafts a probe verifies. `is_asked`: the device was asked for drafts only
    to see if they would stand. `last_drafted` is when the device was last asked for any; `longer`
    is when it is to be asked for one more than seems to pay. `longest` is the most of its drafts
    that stood at once, `pace` how many tokens a step its drafts promise on the average, and `worth`
    what one of its tokens is worth just now (`worths`).
    """

    __slots__ = (
        "_drafter",
        "_failed_class",
        "_lengthened",
        "acceptance",
        "clock",
        "is_asked",
        "last_drafted",
        "longer",
        "longest",
        "pace",
        "run",
        "wanted",
        "worth",
    )

    def __init__(self, drafter: DrafterRecord, now: int) -> None:
        self._drafter = drafter
        # The surest that fell at once since any stood; None: none did.
        self._failed_class: int | None = None
        self.acceptance = SequenceAcceptance(drafter.pool)
        self.run = OwnRun(drafter.typical)
        self.clock = ProbeClock(now)
        self.wanted = 1
        self.is_asked = False
        self.last_drafted = 0
        self.longest = 0
        # When drafts are verified of which one more was made than seemed to pay, and how many.
        self._lengthened: list[tuple[int, int]] = []
        self.longer = ProbeClock(now, longest=_MOST_BETWEEN_LONGER)
        self.pace = 1.0
        self.worth = 1.0

    def lengthen(self, num_drafts: int, now: int) -> None:
        """The device makes so many drafts, one more than seems to pay, for the next step. Those of
        this one, which may be longer as well, are judged after that.
        """
        self.longer.tried(now)
        self._lengthened = [one for one in self._lengthened if one[0] == now]
        self._lengthened.append((now + 1, num_drafts))

    def note_promise(self, survivals: Sequence[float]) -> None:
        """Its drafts of this step would be accepted with these chances."""
        promised = 1.0 + sum(survival for survival in survivals if survival >= _LIKELY)
        self.pace += (promised - self.pace) * _PACE_GAIN

    def is_probe_due(self, confidence: float, now: int) -> bool:
        """Whether it is time to try a first draft of this confidence, or whether it is news."""
        if self.is_asked or self.clock.is_due(now):
            return True
        return self._failed_class is not None and self._failed_class < confidence_class(confidence)

    def observe(
        self,
        confidences: Sequence[float],
        num_verified: int,
        num_accepted: int,
        now: int,
        is_trial: bool,
    ) -> None:
        """Of drafts of these confidences the first `num_verified`, at least one, were verified;
        some only to see if they would stand, if it `is_trial`.
        """
        if is_trial:
            self.clock.tried(now)
        self.acceptance.observe(confidences, num_verified, num_accepted)
        if num_accepted:
            self.longest = max(self.longest, num_accepted)
            if any(at == now and count <= num_accepted for at, count in self._lengthened):
                self.longer.restart(now)
            self._failed_class = None
            self.wanted = min(num_accepted + 1, _MAX_PROBE_DRAFTS)
            if is_trial:
                self.clock.succeeded(now)
            else:
                self.clock.restart(now)
            if self.is_asked:
                self._drafter.clock.succeeded(now)
        else:
            its_class = confidence_class(confidences[0])
            failed = self._failed_class
            self._failed_class = its_class if failed is None else max(failed, its_class)
            self.wanted = 1
            self.clock.failed()
            if self.is_asked:
                self._drafter.clock.failed()
        self.is_asked = False


class TrackRecords:
    """Owns all records."""

    def __init__(self) -> None:
        self._drafters: dict[str, DrafterRecord] = {}
        self._sequences: dict[int, dict[str, SequenceRecord]] = {}

    def __len__(self) -> int:
        """How many sequences are remembered."""
        return len(self._sequences)

    def __contains__(self, seq_id: int) -> bool:
        """Whether the sequence is remembered."""
        return seq_id in self._sequences

    def drafter(self, name: str, now: int) -> DrafterRecord:
        """The drafter's record, made when it is new."""
        record = self._drafters.get(name)
        if record is None:
            record = self._drafters[name] = DrafterRecord(now)
        return record

    def sequence(self, seq_id: int, name: str, now: int) -> SequenceRecord:
        """The drafter's record for the sequence, made when it is new."""
        by_drafter = self._sequences.setdefault(seq_id, {})
        record = by_drafter.get(name)
        if record is None:
            record = by_drafter[name] = SequenceRecord(self.drafter(name, now), now)
        return record

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; unknown ones are ignored."""
        self._sequences.pop(seq_id, None)
