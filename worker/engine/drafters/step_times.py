"""How long steps take by their number of tokens, and drafting by its number of drafts: measured.

Theory of operation
-------------------
A `Curve` is a set of knots, one for each size that was seen (sizes above 31 share a knot with
their neighbours, sixteen knots to an octave). A knot keeps its last few times and stands for their
median, so that the heavy tail of a busy machine moves nothing. Between knots the curve is linear,
and it never falls: knots out of order are pooled. All times are kept relative to a common speed,
which follows the median of the last few residuals: when the whole machine slows down, or contexts
grow, the sizes that were not run lately move along with those that were, and comparing sizes,
which is all that the curve is for, stays fair.

A step that was scheduled ahead did not wait for its scheduling. How much shorter that makes it is
one number for all sizes (`step_ratios`), from steps in a row, one of each kind; what is known of
few steps counts little against what is assumed. So there is one curve for both kinds: of two, each
a few times seen, the difference would be mostly noise.

What drafts add to a step, a curve whose sizes were measured at different times is too rough to
tell: that comes from steps in a row (`draft_costs`), and what making them takes from how long the
step before took. What is assumed of drafts before any were seen is what a token of a prompt costs,
and a third on top.

Before anything is measured a step of n tokens takes (24 + n) / 25 seconds. That is the shape of a
small model on a CPU; a GPU is flatter, and the first measurements say so: beyond the largest knot
the curve rises by what a token of a prompt costs, once prompts were seen, and a third on top.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate

from worker.engine.drafters.draft_costs import DecodingStep, DraftCosts
from worker.engine.drafters.plans import FEW_SEQUENCES
from worker.engine.drafters.step_ratios import Lead, bucket

WINDOW = 25  # times that a knot keeps
_PRIOR_TOKENS = 24.0  # a step costs as much as so many tokens, before its tokens are counted
_RESIDUALS = 7  # whose median moves the speed
_SPEED_GAIN = 0.25
_MIN_MERGED = 16  # smaller sizes stand for themselves
_MERGED_RANGE = 1.1
_WELL_SEEN = 12  # times, above which a knot is not merged with its neighbours
_CLEANING = 64  # observations from one clean-up to the next
_PATIENCE = 4096  # ticks that a size is remembered without being seen
_NO_DRIFT = 0.03  # a smaller median is chance,
_NO_DRIFT_SPREADS = 0.5  # and one of so many median deviations from it
_MIN_SETTLED = 4  # times that a knot needs before it says something about the speed
_PROMPT_TO_DRAFT = 1.33  # a draft has logits made and is verified; a token of a prompt has not
_LEAST_ASSUMED, _MOST_ASSUMED = 1e-4, 4.0  # plain steps, for a draft
_MIN_PROMPT_TOKENS = 16  # below, a prompt's time is noise
_MAX_SLOWNESS = 2.0  # of the moment in which drafts were made; more is chance


class _Knot:
    """The last times of one size, relative to the speed of their moment."""

    __slots__ = ("clock", "count", "size", "time", "times")

    def __init__(self, size: int) -> None:
        self.size = float(size)
        self.times: deque[float] = deque(maxlen=WINDOW)
        self.time = 0.0
        self.count = 0
        self.clock = 0

    def add(self, size: int, time: float, clock: int) -> None:
        """One more time."""
        self.times.append(time)
        self.count += 1
        self.clock = clock
        # The middle one, the lower one of two.
        self.time = sorted(self.times)[(len(self.times) - 1) // 2]
        self.size += (size - self.size) / min(self.count, WINDOW)


class Speed:
    """How fast the machine is just now; owns the number that all times are kept relative to."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # of what the prior calls one; None: nothing was measured
        self._residuals: deque[float] = deque(maxlen=_RESIDUALS)

    def follow(self, residual: float) -> None:
        """A time was off by this factor (its logarithm), of something well known."""
        if self.seconds is None:
            return
        self._residuals.append(residual)
        middle = sorted(self._residuals)[len(self._residuals) // 2]
        spread = sorted(abs(one - middle) for one in self._residuals)[len(self._residuals) // 2]
        if abs(middle) > max(_NO_DRIFT, _NO_DRIFT_SPREADS * spread):
            change = _SPEED_GAIN * middle
            self.seconds *= math.exp(change)
            for index in range(len(self._residuals)):
                self._residuals[index] -= change


class Curve:
    """Times by size, learned; owns its knots. `tail_slope` is what a unit of size adds beyond the
    largest knot, None: in proportion to (`prior_units` + size).
    """

    def __init__(self, speed: Speed, prior_units: float = _PRIOR_TOKENS) -> None:
        self.tail_slope: float | None = None
        self._speed = speed
        self._prior_units = prior_units
        self._knots: dict[int, _Knot] = {}
        self._sizes: list[float] = []
        self._times: list[float] = []
        self._is_stale = False
        self._num_observed = 0

    @property
    def largest(self) -> int:
        """The largest size that was seen; 0: none was."""
        return int(max((knot.size for knot in self._knots.values()), default=0.0))

    @property
    def speed(self) -> float:
        """Seconds of what the prior calls one, just now."""
        return self._speed.seconds or 1.0

    def observe(self, size: int, seconds: float, clock: int) -> None:
        """Something of this size took so long, at tick `clock` of the owner's counter."""
        if not seconds > 0.0 or not math.isfinite(seconds):
            return
        if self._speed.seconds is None:
            self._speed.seconds = seconds / self._prior(size)
        key = bucket(size)
        knot = self._knots.get(key)
        if knot is None:
            knot = self._knots[key] = _Knot(size)
        if knot.count >= _MIN_SETTLED:
            self._speed.follow(math.log(seconds / (knot.time * self._speed.seconds)))
        knot.add(size, seconds / self._speed.seconds, clock)
        self._is_stale = True
        self._num_observed += 1
        if self._num_observed % _CLEANING == 0:
            self._forget(clock)

    def _forget(self, clock: int) -> None:
        """Drop sizes that were not seen for long; sooner, if they never were often."""
        for key, knot in list(self._knots.items()):
            patience = _PATIENCE if knot.count >= _MIN_SETTLED else _PATIENCE // 16
            if clock - knot.clock > patience:
                del self._knots[key]

    def _prior(self, size: float) -> float:
        """What a size takes before anything is measured, at speed 1."""
        return (self._prior_units + size) / (self._prior_units + 1)

    def at(self, size: float) -> float:
        """Seconds that this size takes."""
        if self._is_stale:
            self._rebuild()
        sizes, times = self._sizes, self._times
        speed = self.speed
        if not sizes:
            return speed * self._prior(size)
        index = bisect_left(sizes, size)
        if index == len(sizes):
            return speed * times[-1] + self._slope(sizes[-1], times[-1]) * (size - sizes[-1])
        if sizes[index] == size:
            return speed * times[index]
        if index == 0:
            lowered = speed * times[0] - self._slope(sizes[0], times[0]) * (sizes[0] - size)
            return max(lowered, speed * times[0] * size / sizes[0])
        left, right = sizes[index - 1], sizes[index]
        share = (size - left) / (right - left)
        return speed * (times[index - 1] + share * (times[index] - times[index - 1]))

    def _slope(self, size: float, time: float) -> float:
        """What one more unit costs where nothing was measured."""
        seconds = self.speed * time
        if self.tail_slope is not None:
            return min(self.tail_slope, seconds / size)
        return seconds / (self._prior_units + size)

    def _rebuild(self) -> None:
        """All knots in order of size, pooled where they would fall. A size that was seen once is
        still unknown: had it been disturbed then, it would never be tried again.
        """
        self._is_stale = False
        known = [knot for knot in self._knots.values() if knot.count > 1] or self._knots.values()
        merged = _merged(sorted(known, key=lambda knot: knot.size))
        pools: list[tuple[float, float, int]] = []  # time, weight, number of sizes
        for _, time, weight in merged:
            number = 1
            while pools and pools[-1][0] > time:
                before, its_weight, its_number = pools.pop()
                time = (time * weight + before * its_weight) / (weight + its_weight)
                weight, number = weight + its_weight, number + its_number
            pools.append((time, weight, number))
        self._sizes = [size for size, _, _ in merged]
        self._times = [time for time, _, number in pools for _ in range(number)]


def _merged(knots: Sequence[_Knot]) -> list[tuple[float, float, float]]:
    """Size, time and weight of each knot, the means of neighbours where they were seen seldom."""
    answer: list[tuple[float, float, float]] = []
    first = 0.0
    for knot in knots:
        size, time, weight = knot.size, knot.time, float(len(knot.times))
        if answer and first >= _MIN_MERGED and size <= first * _MERGED_RANGE:
            its_size, its_time, its_weight = answer[-1]
            if weight < _WELL_SEEN and its_weight < _WELL_SEEN:
                total = weight + its_weight
                answer[-1] = (
                    (size * weight + its_size * its_weight) / total,
                    (time * weight + its_time * its_weight) / total,
                    total,
                )
                continue
        first = size
        answer.append((size, time, weight))
    return answer


class StepTimes:
    """What steps and drafting cost; owns the curves. Seconds throughout."""

    def __init__(self) -> None:
        self._steps = Curve(Speed())  # as if each was scheduled when the one before had ended
        self._lead = Lead()
        self._draft_costs = DraftCosts()
        self._prompts: deque[tuple[int, int, float]] = deque(maxlen=WINDOW)  # not told from yet
        self._prompt_slopes: deque[float] = deque(maxlen=WINDOW)
        self._prompt_ratios: deque[float] = deque(maxlen=WINDOW)  # by the speed then
        # In plain steps, by the bit length of the number of sequences.
        self._drafting: dict[int, Curve] = {}
        self._slowness = 1.0  # of the last step, by the curve
        self.clock = 0
        self.most_rounds = 0  # drafts of one sequence in a step, on the average, that were measured

    @property
    def largest(self) -> int:
        """The most tokens of a step without prompts that was measured; 0: none was."""
        return self._steps.largest

    def decoding(self, num_tokens: int) -> float:
        """A step of so many tokens (at least 1), none of prompts."""
        return self._steps.at(num_tokens)

    def plain(self, num_sequences: int) -> float:
        """A step without drafts, of which nobody was asked for any: it may be scheduled ahead,
        which saves the time of scheduling. How much is assumed until it is measured.
        """
        return self._steps.at(num_sequences) * self._lead.factor

    def extra(
        self, num_sequences: int, num_other_tokens: int, most: int, is_cautious: bool = True
    ) -> list[float]:
        """What 0, 1, …, `most` drafts add to a step of so many sequences beside a prompt's tokens:
        what is expected, and if `is_cautious` a standard error more.

        By steps in a row (`draft_costs`). With a few sequences nothing is added: more is won by
        drafts than what they cost is uncertain by. Beside a prompt a draft costs what a token of a
        prompt does, if that is more: the room that a flat curve seems to have is taken.
        """
        plain = self._steps.at(num_sequences)
        surcharge = self._draft_costs.of(num_sequences, self._assumed_cost(num_sequences))
        is_cautious = is_cautious and num_sequences > FEW_SEQUENCES
        cost = surcharge.at_most if is_cautious else surcharge.expected
        costs = (plain * cost(count) for count in range(1, most + 1))
        answer = list(accumulate(costs, max, initial=0.0))  # what is more is not cheaper
        if num_other_tokens and self._prompt_slopes:
            slope = self._prompt_slope()
            answer = [max(cost, slope * index) for index, cost in enumerate(answer)]
        return answer

    def plain_age(self, num_sequences: int) -> tuple[int, int]:
        """Steps since a plain one of about so many sequences was measured, and how many were."""
        clock, count = self._lead.seen(num_sequences)
        return self.clock - clock, count

    def drafting(self, num_sequences: int, rounds: float) -> float:
        """Making `rounds` drafts (at least 1, on the average) for each of so many sequences.

        Before anything is measured: a twelfth of a plain step and another one for each round. What
        was measured for other numbers of sequences is taken to change as plain steps do.
        """
        if not self._drafting:
            return self.decoding(num_sequences) * (1.0 + rounds) / 12.0
        key = num_sequences.bit_length()
        near = min(self._drafting, key=lambda known: (abs(known - key), known))
        return self._drafting[near].at(rounds) * self.decoding(num_sequences)

    def observe(
        self,
        num_tokens: int,
        num_other_tokens: int,
        seconds: float,
        is_ahead: bool,
        num_drafts: int = 0,
    ) -> None:
        """A step of `num_tokens`, `num_drafts` and `num_other_tokens` of prompts included; without
        its drafting.

        `is_ahead`: nobody was asked for drafts, so that it may have been scheduled ahead.
        """
        self.clock += 1
        self._slowness = 1.0
        num_decoding = num_tokens - num_other_tokens
        if not num_other_tokens:
            if num_tokens > 0 and 0.0 < seconds < math.inf:
                self._observe_decoding(num_tokens, seconds, is_ahead, num_drafts)
        elif num_other_tokens >= _MIN_PROMPT_TOKENS:
            self._prompts.append((num_decoding, num_other_tokens, seconds))
        if self._steps.largest:
            self._note_prompts()

    def observe_drafting(self, num_drafted: int, num_drafting: int, seconds: float) -> None:
        """Making `num_drafted` drafts for `num_drafting` sequences took so long, after the step
        that was observed last. It counts as a part of a plain step of that moment.
        """
        if num_drafted <= 0 or num_drafting <= 0:
            return
        curve = self._drafting.setdefault(
            num_drafting.bit_length(), Curve(Speed(), prior_units=1.0)
        )
        rounds = max(1, round(num_drafted / num_drafting))
        slowness = max(1.0 / _MAX_SLOWNESS, min(self._slowness, _MAX_SLOWNESS))
        curve.observe(rounds, seconds / slowness / self.decoding(num_drafting), self.clock)
        self.most_rounds = max(self.most_rounds, rounds)

    def _observe_decoding(
        self, num_tokens: int, seconds: float, is_ahead: bool, num_drafts: int
    ) -> None:
        self._lead.observe(num_tokens, seconds, is_ahead, self.clock)
        if is_ahead:
            seconds /= self._lead.factor
        self._steps.observe(num_tokens, seconds, self.clock)
        self._slowness = seconds / self._steps.at(num_tokens)
        num_sequences = num_tokens - num_drafts
        step = DecodingStep(num_sequences, num_drafts, seconds, self.clock)
        self._draft_costs.observe(step, self._assumed_cost(num_sequences))

    def _note_prompts(self) -> None:
        """Of the steps with prompts so far, now that it is known what one without them takes."""
        for num_decoding, num_tokens, seconds in self._prompts:
            base = self._steps.at(max(1, num_decoding))
            slope = max(0.0, seconds - base) / num_tokens
            self._prompt_slopes.append(slope)
            self._prompt_ratios.append(slope / self._steps.speed)
            self._steps.tail_slope = self._prompt_slope() * _PROMPT_TO_DRAFT
        self._prompts.clear()

    def _assumed_cost(self, num_sequences: int) -> float:
        """Of a draft before any was seen, in plain steps of so many sequences."""
        if not self._prompt_slopes:
            return 1.0 / (_PRIOR_TOKENS + num_sequences)
        slope = _lower_middle(self._prompt_ratios) * self._steps.speed
        assumed = _PROMPT_TO_DRAFT * slope / self._steps.at(num_sequences)
        return max(_LEAST_ASSUMED, min(assumed, _MOST_ASSUMED))

    def _prompt_slope(self) -> float:
        """Seconds for a token of a prompt."""
        return _lower_middle(self._prompt_slopes)


def _lower_middle(values: Collection[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
