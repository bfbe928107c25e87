"""How many drafts to verify, and how many to make: as many as the measured step time repays.

Theory of operation
-------------------
A step in which R sequences decode gives R tokens in t(R) seconds. With B drafts besides, it gives
R + S(B) tokens in t(R + B), where S(B) sums the chances that the drafts are accepted. A draft's
chance is its survival: the product of the chances of itself and those before it to stand
(`acceptance`), so taking drafts over all sequences by falling survival takes a head of each
sequence's drafts. Of all B the one with the most tokens a second is chosen, if it beats B = 0 by
`_MARGIN`. The times are measured (`step_times`). Tokens of prompts in the step are not counted
among its time: they are to be run anyway, and would make any draft look cheap; but a draft beside
them costs as much as one of them.

A drafter on the device is asked before its drafts are known: the same choice, with the survivals
that its drafts have on the average, and with the time of drafting.

Nothing of this is right from the start, so four rules keep it from doing harm (`probing`):

1. An account. Every draft verified and every second of drafting is paid from it, accepted tokens
   are paid into it, each step adds 1.2 % of a plain one. No step may risk more than the balance,
   were all of its drafts to fall. So estimates may be wrong, and the loss against plain decoding
   stays bounded all the same.
2. A step is at most twice as large as the largest one that was seen.
3. A sequence whose drafts do not pay has one of them verified from time to time, at distances that
   double up to a bound; at once when the drafter is surer than it was when it failed. Once a probe
   stands, the next drafts are probes too, and longer. In the same way a device drafter that does
   not pay is asked for one sequence's drafts from time to time.
4. While drafts pay, steps without them are run from time to time, the more often the less is won,
   lest the time of plain steps, which all is weighed against, be forgotten or remembered wrongly.
   Nobody is asked for drafts in these, so that they are scheduled ahead, as they would be without
   speculation: what that saves counts against drafts.

With a schedule by batch size, or adaptive verification turned off, none of this applies: the limit
that is configured for the number of sequences is what is verified and drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from worker.config import SpeculativeConfig
from worker.engine.drafters.acceptance import (
    OwnRun,
    PooledAcceptance,
    SequenceAcceptance,
    TypicalRun,
    confidence_class,
)
from worker.engine.drafters.probing import Account, ProbeClock
from worker.engine.drafters.step_times import ASSUMED_AHEAD, StepTimes

_MARGIN = 0.03  # what drafts must win to be worth it
_MAX_SURPRISE = 3.0  # times the expected seconds, beyond which a step's own are somebody else's
_MAX_DOUBT = 0.1  # of the expected seconds of a size that is known
_MAX_PROBE_DRAFTS = 3
_CONTROL_STEPS = 2  # plain ones in a row, for the sake of measuring
_CONTROL_DISTANCES = (16, 400)  # steps from one to the next: the less is won, the shorter
_CONTROL_COST = 0.016  # of what is won
_GAIN_MEMORY = 64.0  # steps
_MIN_GAIN = 0.02  # on the average, below which nobody is asked for drafts in most steps
_MAX_LOOK_DISTANCE = 16
_MAX_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts at hand for one decoding sequence, maybe none, told by their confidences.

    `drafter` names who made them: estimates are kept apart by it.
    """

    seq_id: int
    drafter: str
    confidences: tuple[float, ...]


class _Drafter:
    """What is known of one drafter over all sequences; owns it."""

    __slots__ = ("clock", "pool", "typical")

    def __init__(self, now: int) -> None:
        self.pool = PooledAcceptance()
        self.typical = TypicalRun()
        self.clock = ProbeClock(now, shortest=2)


class _Tracked:
    """What is known of one drafter for one sequence; owns it."""

    __slots__ = (
        "acceptance",
        "clock",
        "failed_class",
        "is_probe",
        "is_trial",
        "last_drafted",
        "run",
        "wanted",
    )

    def __init__(self, drafter: _Drafter, now: int) -> None:
        self.acceptance = SequenceAcceptance(drafter.pool)
        self.run = OwnRun(drafter.typical)
        self.clock = ProbeClock(now)
        self.wanted = 1  # drafts that a probe verifies
        self.failed_class = -1  # the surest that fell at once since any stood; -1: none did
        self.is_probe = False  # the device drafter was asked to see if it pays
        self.is_trial = False  # drafts are verified to see if they would stand
        self.last_drafted = 0


class DraftLengths:
    """Chooses draft lengths; owns what is known of acceptance and of step times. Pure: it knows of
    time what `observe_step` tells it, and counts steps by its calls.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._schedule = config.num_speculative_tokens_per_batch_size
        self._is_adaptive = config.enable_adaptive_verification and not self._schedule
        self._times = StepTimes()
        self._account = Account()
        self._drafters: dict[str, _Drafter] = {}
        self._tracked: dict[int, dict[str, _Tracked]] = {}
        self._device_drafters: set[str] = set()
        # The last plan: what each draft costs and an accepted one saves, in plain steps.
        self._draft_cost = 0.0
        self._token_value = 0.0
        self._asking_cost = 0.0
        self._drafting_seconds = 0.0  # planned for each step, as long as the device drafts
        self._plain_seconds = 0.0
        self._was_asked = False  # for drafts, for the step that is observed next
        self._control_left = 0  # plain steps still to be run for the sake of measuring
        # What asking for drafts has won lately, and when to ask again if it is nothing.
        self._gain = 3 * _MIN_GAIN
        self._look_distance = 1
        self._look_at = 0

    def may_pay(self, seq_ids: Sequence[int]) -> bool:
        """Whether drafts may be verified, made or probed in the next step, were these sequences
        (all that decode) in it; False: that step can be scheduled ahead without asking anybody.
        """
        num = len(seq_ids)
        if not num or not self._limit(num):
            return False
        if not self._is_adaptive:
            return True
        if self._control_left:
            return False
        if self._drafting_seconds > 0.0:
            return True
        return self._can_afford(self._times.extra(num, 0, 1)[1], num) and self._is_news(seq_ids)

    def to_verify(self, offers: Sequence[Offer], num_other_tokens: int) -> list[int]:
        """How many of its drafts to verify, by offer; one offer for each sequence that decodes.

        The step runs a known token of each, and `num_other_tokens` of prompts besides.
        """
        num = len(offers)
        limit = self._limit(num)
        if not self._is_adaptive or not limit:
            return [min(limit, len(offer.confidences)) for offer in offers]
        self._was_asked = True
        survivals = [self._survivals(offer, limit) for offer in offers]
        ranked = sorted(chain.from_iterable(survivals), reverse=True)
        plain = self._plain_seconds = self._times.plain(num)
        extra = self._extra(num, num_other_tokens, len(ranked))
        best, gain, is_saving = self._best(num, ranked, extra, plain)
        self._note_gain(gain)
        # What is only assumed is not charged for.
        self._asking_cost = max(0.0, self._times.decoding(num) * ASSUMED_AHEAD / plain - 1.0)
        self._token_value = 1.0 / num
        self._draft_cost = extra[max(best, 1)] / max(best, 1) / plain if ranked else 0.0
        if best and self._is_control_due(num, gain):
            self._control_left = _CONTROL_STEPS
        counts = _heads(survivals, ranked, best)
        if ranked and not is_saving:
            self._add_probes(offers, counts, limit, self._account.balance - extra[best] / plain)
        return counts

    def to_draft(self, seq_ids: Sequence[int], drafter: str, num_other_tokens: int) -> list[int]:
        """How many drafts the device's `drafter` makes after this step, by sequence (all that will
        decode in the next one).
        """
        num = len(seq_ids)
        limit = self._limit(num)
        if not self._is_adaptive or not limit:
            return [limit] * num
        self._was_asked = True
        self._device_drafters.add(drafter)
        now = self._times.clock
        limit = min(limit, 2 * self._times.most_rounds + 1)
        tracked = [self._track(seq_id, drafter) for seq_id in seq_ids]
        survivals = [one.run.survivals(limit) for one in tracked]
        counts, seconds, is_saving = self._draft_plan(survivals, num, num_other_tokens)
        clock = self._drafters[drafter].clock
        if seconds > 0.0 and not self._drafting_seconds:
            clock.restart(now)
        if clock.is_due(now) and not is_saving:
            idle = [index for index in range(num) if not counts[index]]
            cost = self._times.drafting(1, 1.0)
            if idle and self._can_afford(cost + self._extra(num, num_other_tokens, 1)[-1], num):
                chosen = min(idle, key=lambda index: tracked[index].last_drafted)
                counts[chosen] = min(limit, 2)
                tracked[chosen].is_probe = True
                clock.tried(now)
                seconds += cost
        for one, count in zip(tracked, counts, strict=True):
            if count:
                one.last_drafted = now
        self._drafting_seconds = seconds
        return counts

    def observe_step(
        self,
        num_tokens: int,
        seconds: float,
        drafting_seconds: float,
        num_drafted: int,
        num_drafting: int,
        num_other_tokens: int = 0,
    ) -> None:
        """A step ran `num_tokens`, drafts and `num_other_tokens` of prompts included, in `seconds`,
        of which `drafting_seconds` went into making `num_drafted` drafts for `num_drafting`
        sequences.
        """
        times = self._times
        seconds = max(0.0, seconds - drafting_seconds)
        num_decoding = num_tokens - num_other_tokens
        plain = self._plain_seconds
        if num_decoding > 0:
            self._account.earn()
            if self._was_asked and not num_other_tokens and num_tokens * self._token_value > 1.0:
                self._account.settle(-self._surprise(num_tokens, seconds) / plain)
        if drafting_seconds > 0.0 and plain > 0.0:
            rounds = max(1.0, num_drafted / max(1, num_drafting))
            expected = times.drafting(max(1, num_drafting), rounds)
            cost = min(drafting_seconds, _MAX_SURPRISE * expected)
            self._account.settle(-cost / plain)
        if self._was_asked:
            self._account.settle(-self._asking_cost)
        times.observe(num_tokens, num_other_tokens, seconds, not self._was_asked)
        if not self._was_asked:
            self._drafting_seconds = 0.0
            self._control_left = max(0, self._control_left - (num_decoding > 0))
        self._was_asked = False
        times.observe_drafting(num_drafted, num_drafting, drafting_seconds)

    def observe(self, offer: Offer, num_verified: int, num_accepted: int) -> None:
        """Of an offer's drafts the first `num_verified` were verified, `num_accepted` stood."""
        if not num_verified or not self._is_adaptive:
            return
        now = self._times.clock
        one = self._track(offer.seq_id, offer.drafter)
        one.acceptance.observe(offer.confidences, num_verified, num_accepted)
        self._account.settle(num_accepted * self._token_value - num_verified * self._draft_cost)
        if num_accepted:
            one.failed_class = -1
            one.wanted = min(num_accepted + 1, _MAX_PROBE_DRAFTS)
            if one.is_trial:
                one.clock.succeeded(now)
            else:
                one.clock.restart(now)
            if one.is_probe:
                self._drafters[offer.drafter].clock.succeeded(now)
        else:
            one.clock.failed()
            one.failed_class = max(one.failed_class, confidence_class(offer.confidences[0]))
            one.wanted = 1
            if one.is_probe:
                self._drafters[offer.drafter].clock.failed()
        one.is_probe = one.is_trial = False

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; unknown ones are ignored."""
        self._tracked.pop(seq_id, None)

    def _limit(self, num_sequences: int) -> int:
        """The most drafts of one sequence, when so many decode."""
        limit = self._most
        for first, _, most in self._schedule:
            if first <= num_sequences:
                limit = min(most, self._most)
        return limit

    def _surprise(self, num_tokens: int, seconds: float) -> float:
        """By how much a step with drafts took longer than expected; of a known size, hardly any of
        that is believed at once.
        """
        expected = self._times.decoding(num_tokens)
        if num_tokens > self._times.largest:
            return max(0.0, min(seconds, _MAX_SURPRISE * expected) - expected)
        slack = _MAX_DOUBT * expected
        return max(-slack, min(slack, seconds - expected))

    def _is_news(self, seq_ids: Sequence[int]) -> bool:
        """Whether it is worth asking for drafts: it was, it is time to look, or somebody is new."""
        now = self._times.clock
        return (
            self._gain >= _MIN_GAIN
            or now >= self._look_at
            or any(self._drafters[name].clock.is_due(now) for name in self._device_drafters)
            or any(seq_id not in self._tracked for seq_id in seq_ids)
        )

    def _track(self, seq_id: int, name: str) -> _Tracked:
        """What is known of a sequence, made when it is new."""
        by_drafter = self._tracked.setdefault(seq_id, {})
        one = by_drafter.get(name)
        if one is None:
            drafter = self._drafters.get(name)
            if drafter is None:
                drafter = self._drafters[name] = _Drafter(self._times.clock)
            one = by_drafter[name] = _Tracked(drafter, self._times.clock)
        return one

    def _survivals(self, offer: Offer, limit: int) -> list[float]:
        """Of an offer's drafts that may be verified at all."""
        one = self._track(offer.seq_id, offer.drafter)
        if not offer.confidences:
            return []
        survivals = one.acceptance.survivals(offer.confidences[:limit])
        if offer.drafter in self._device_drafters:
            one.run.observe(survivals)
        return survivals

    def _extra(self, num: int, num_other_tokens: int, most: int) -> list[float]:
        """Seconds that 0, 1, … drafts add, as many as the sizes that were seen allow.

        A first draft is always listed if there is any, for its price.
        """
        largest = max(self._times.largest, num)
        most = min(most, largest + max(4, largest) - num)
        extra = self._times.extra(num, num_other_tokens, max(0, most))
        return extra

    def _can_afford(self, seconds: float, num: int) -> bool:
        """Whether the account can bear to lose so much."""
        return seconds <= self._account.balance * self._times.plain(num)

    def _best(
        self, num: int, ranked: Sequence[float], extra: Sequence[float], plain: float
    ) -> tuple[int, float, bool]:
        """How many of the likeliest drafts to verify, what part of plain decoding that wins, and
        whether more would be better but is more than the account can bear.
        """
        affordable = self._account.balance * plain
        best, best_rate = 0, (1.0 + _MARGIN) * num / plain
        base = self._times.decoding(num) + self._drafting_seconds
        tokens = float(num)
        for index, (survival, more) in enumerate(zip(ranked, extra[1:], strict=False), start=1):
            tokens += survival
            rate = tokens / (base + more)
            if rate > best_rate:
                if more > affordable:
                    return best, best_rate * plain / num - 1.0 if best else 0.0, True
                best, best_rate = index, rate
        return best, best_rate * plain / num - 1.0 if best else 0.0, False

    def _is_control_due(self, num: int, gain: float) -> bool:
        """Whether to run plain steps, to know their time."""
        age, count = self._times.plain_age(num)
        shortest, longest = _CONTROL_DISTANCES
        distance = _CONTROL_STEPS * gain / _CONTROL_COST
        if count < 2 * _CONTROL_STEPS:
            distance /= 2.0
        return age >= min(max(distance, shortest), longest)

    def _add_probes(
        self, offers: Sequence[Offer], counts: list[int], limit: int, balance: float
    ) -> None:
        """Have drafts verified that do not pay, for the sequences whose turn it is."""
        now = self._times.clock
        left = max(1, len(offers) // 16)
        for index, offer in enumerate(offers):
            if left and offer.confidences:
                one = self._track(offer.seq_id, offer.drafter)
                wanted = min(one.wanted, limit, len(offer.confidences))
                cost = (wanted - counts[index]) * self._draft_cost
                if 0.0 < cost <= balance and self._is_probe_due(one, offer, now):
                    counts[index] = wanted
                    one.is_trial = True
                    one.clock.tried(now)
                    balance -= cost
                    left -= 1

    @staticmethod
    def _is_probe_due(one: _Tracked, offer: Offer, now: int) -> bool:
        """Whether it is time, or the drafts are news."""
        if one.is_probe or one.clock.is_due(now):
            return True
        return 0 <= one.failed_class < confidence_class(offer.confidences[0])

    def _draft_plan(
        self, survivals: Sequence[Sequence[float]], num: int, num_other_tokens: int
    ) -> tuple[list[int], float, bool]:
        """How many drafts to make of each sequence, how long that will take, and whether more would
        be better but is more than the account can bear.
        """
        ranked = sorted(chain.from_iterable(survivals), reverse=True)
        firsts = sorted((one[0] for one in survivals), reverse=True)
        tokens = list(accumulate(ranked, initial=float(num)))
        plain, base = self._times.plain(num), self._times.decoding(num)
        extra = self._extra(num, num_other_tokens, len(ranked))
        most = len(extra) - 1
        stride = max(1, most // _MAX_CANDIDATES)
        best, best_rate, best_seconds = 0, (1.0 + _MARGIN) * num / plain, 0.0
        affordable = self._account.balance * plain
        num_drafting = 0
        for total in chain(range(1, min(most, 8) + 1), range(8 + stride, most + 1, stride)):
            while num_drafting < num and firsts[num_drafting] >= ranked[total - 1]:
                num_drafting += 1
            drafting = min(num_drafting, total)
            seconds = self._times.drafting(drafting, total / drafting)
            rate = tokens[total] / (base + extra[total] + seconds)
            if rate > best_rate:
                if seconds + extra[total] > affordable:
                    return _heads(survivals, ranked, best), best_seconds, True
                best, best_rate, best_seconds = total, rate, seconds
        return _heads(survivals, ranked, best), best_seconds, False

    def _note_gain(self, gain: float) -> None:
        """Remember what asking for drafts has won; while that is little, ask less often."""
        self._gain += (gain - self._gain) / _GAIN_MEMORY
        if self._gain >= _MIN_GAIN:
            return
        if gain > _MARGIN:
            self._gain = 3 * _MIN_GAIN
            self._look_distance = 1
            return
        now = self._times.clock
        if now >= self._look_at:
            self._look_at = now + self._look_distance
            self._look_distance = min(2 * self._look_distance, _MAX_LOOK_DISTANCE)


def _heads(survivals: Sequence[Sequence[float]], ranked: Sequence[float], total: int) -> list[int]:
    """How many of each sequence's drafts are among the `total` likeliest (`ranked`) of all."""
    if not total:
        return [0] * len(survivals)
    lowest = ranked[total - 1]
    counts = [sum(one > lowest for one in values) for values in survivals]
    left = total - sum(counts)
    for index, values in enumerate(survivals):
        while left and counts[index] < len(values) and values[counts[index]] == lowest:
            counts[index] += 1
            left -= 1
    return counts
