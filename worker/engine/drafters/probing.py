"""What may be risked to learn: an account of time won and lost, and clocks that slow down."""

from __future__ import annotations

from worker.engine.drafters.plans import FEW_SEQUENCES

INCOME = 0.01  # of a plain step, for every step
_START = 3.0
_RESERVE = 2.0
_KEPT = 1.0  # what a debt is not paid from
_MOST_EARNED = 3.0
_MOST_WON = 8.0
_FLOOR = -6.0
_MOST_DEBT = 32.0
MAX_DISTANCE = 32  # steps between two probes of the same thing
_LEAST_POSTPONED = 8  # steps

_GAIN_MEMORY = 64.0  # sequences that were asked for drafts, one after the other or together
_LEAST_MEMORY = 4.0  # steps
_MIN_GAIN = 0.02  # on the average, below which nobody is asked in most steps
_GAIN_OF_FEW, _GAIN = 3 * _MIN_GAIN, 2 * _MIN_GAIN  # to begin with, and at most; of more sequences
_LOOK_DISTANCE_OF_FEW, _LOOK_DISTANCE = 16, 48  # steps from one look to the next, at most


class Account:
    """What speculation may still lose against plain decoding, in plain steps; owns the balance.

    Every step pays in a little, accepted drafts what they saved, and everything that drafts cost is
    taken out of it. So whatever else is wrong, all that can be lost in the long run is `INCOME` of
    the time, what the account held at the start, and what was won before.

    `debt` is what was spent on something that pays off later, if at all (`catch_ups`); it is paid
    off by whatever the account has beyond the first plain step.
    """

    def __init__(self) -> None:
        self.balance = _START
        self.debt = 0.0

    def affordable(self, is_few: bool) -> float:
        """What the next step may risk, in plain steps; less if more than a few sequences decode,
        of which many are wrong at once where an estimate is.
        """
        return self.balance if is_few else self.balance - _RESERVE

    @property
    def is_full(self) -> bool:
        """Whether as much was earned as is kept: what was tried last is long ago."""
        return self.balance >= _MOST_EARNED

    def earn(self) -> None:
        """A step was run."""
        if self.balance < _MOST_EARNED:
            self.settle(INCOME)

    def settle(self, change: float) -> None:
        """So many plain steps were won, or lost where negative."""
        self.balance = max(_FLOOR, min(_MOST_WON, self.balance + change))
        repaid = min(self.debt, max(0.0, self.balance - _KEPT))
        self.debt -= repaid
        self.balance -= repaid

    def borrow(self, amount: float) -> None:
        """So many plain steps were spent on what pays off later. However many: a debt is bounded,
        and so is the time until it is paid off.
        """
        self.debt = min(_MOST_DEBT, self.debt + amount)
        self.settle(0.0)


class ProbeClock:
    """When to try again what did not pay: after a distance that doubles, up to the `longest`.

    The first `followed_up` probes that succeed in a row are followed up at once. If it still does
    not pay after them, the reason is another one, and success is no news any more. All distances
    are so many times as long as the `pace` of the last probe.
    """

    __slots__ = (
        "_distance",
        "_due_at",
        "_followed_up",
        "_longest",
        "_num_successes",
        "_pace",
        "_shortest",
    )

    def __init__(
        self, now: int, shortest: int = 1, followed_up: int = 8, longest: int = MAX_DISTANCE
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._followed_up = followed_up
        self._distance = shortest
        self._due_at = now
        self._pace = 1
        self._num_successes = 0

    def is_due(self, now: int) -> bool:
        """Whether the next probe's time has come."""
        return now >= self._due_at

    def tried(self, now: int, pace: int = 1) -> None:
        """A probe is under way; its result is not known yet."""
        self._pace = pace
        self._due_at = now + self._distance * pace
        self._distance = min(2 * self._distance, self._longest)

    def postpone(self, now: int) -> None:
        """Its time has come, but nothing may be spent on it: later."""
        self._due_at = now + max(self._distance, _LEAST_POSTPONED) * self._pace

    def failed(self) -> None:
        """It came to nothing."""
        self._num_successes = 0

    def succeeded(self, now: int) -> None:
        """It came to something."""
        self._num_successes += 1
        if self._num_successes <= self._followed_up:
            self._distance = self._shortest
            self._due_at = now + self._pace

    def restart(self, now: int) -> None:
        """It pays after all, or things have changed: as soon as possible."""
        self._distance = self._shortest
        self._due_at = now + 1


class Interest:
    """Whether asking for drafts has won anything lately; owns that average.

    While it has not, nobody is asked in most steps, so that these can be scheduled ahead. At
    distances that double, up to a bound, one looks if that has changed; with more than a few
    sequences, which win less, less often.
    """

    def __init__(self) -> None:
        self._gain = _GAIN_OF_FEW
        self._distance = 1
        self._look_at = 0

    def is_due(self, now: int) -> bool:
        """Whether to ask."""
        return self._gain >= _MIN_GAIN or now >= self._look_at

    def wake(self, now: int) -> None:
        """A probe stood: look once, at once, what becomes of it."""
        self._look_at = now

    def note(self, gain: float, now: int, num_asked: int) -> None:
        """So many sequences were asked, all there are, which wins this part of plain decoding's
        rate. However much that is: what was won by a text that copies says little of the next one.
        """
        is_few = num_asked <= FEW_SEQUENCES
        most = _GAIN_OF_FEW if is_few else _GAIN
        memory = max(_LEAST_MEMORY, _GAIN_MEMORY / num_asked)
        before = min(self._gain, most)
        self._gain = before + (min(gain, most) - before) / memory
        if self._gain >= _MIN_GAIN:
            return
        if gain > 0.0:
            self._gain = most
            self._distance = 1
        elif now >= self._look_at:
            self._look_at = now + self._distance
            longest = _LOOK_DISTANCE_OF_FEW if is_few else _LOOK_DISTANCE
            self._distance = min(2 * self._distance, longest)
