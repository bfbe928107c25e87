"""How many drafts to verify, and how many to make: as many as the measured step time repays.

Theory of operation
-------------------
A step in which R sequences decode gives R tokens in t(R) seconds. With B drafts besides, it gives
R + S(B) tokens in t(R + B), where S(B) sums the chances that the drafts are accepted. A draft's
chance is its survival: the product of the chances of itself and those before it to stand
(`acceptance`), so taking drafts over all sequences by falling survival takes a head of each
sequence's drafts. Of all B the one with the most tokens a second is chosen, if it beats B = 0 by
`plans.MARGIN`. The times are measured (`step_times`), t(R + B) - t(R) with a standard error on top
where R is more than a few. Tokens of prompts in the step are not counted
among its time: they are to be run anyway, and would make any draft look cheap; but a draft beside
them costs as much as one of them.

A drafter on the device is asked before its drafts are known: the same choice, with the survivals
that its drafts have on the average, and with the time of drafting. What it has to read before it
can draft is an investment, and counted apart: see `catch_ups`.

What a token is worth depends on who wins it, and on whether anybody takes the place of who ends:
survivals count that much more or less (`worth`).

Nothing of this is right from the start, so four rules keep it from doing harm (`probing`):

1. An account. Every draft verified and every second of drafting is paid from it, accepted tokens
   are paid into it, each step adds 1 % of a plain one. No step may risk more than the balance,
   were all of its drafts to fall. So estimates may be wrong, and the loss against plain decoding
   stays bounded all the same.
2. A step is at most twice as large as the largest one that was seen.
3. A sequence whose drafts do not pay has one of them verified from time to time, at distances that
   double up to a bound, out of an allowance (`trials`); at once when the drafter is surer than it
   was when it failed. Once a probe stands, the next drafts are probes too, and longer. A device
   drafter that does not pay is asked for one sequence's drafts from time to time, one that does for
   a longer run than seems to pay (`device_probes`). While drafts win nothing on the average, nobody
   is asked for any in most steps.
4. While drafts pay, steps without them are run from time to time, the more often the less is won,
   lest the time of plain steps, which all is weighed against, be forgotten or remembered wrongly.
   Nobody is asked for drafts in these, so that they are scheduled ahead, as they would be without
   speculation: what that saves counts against drafts.

With a schedule by batch size, or adaptive verification turned off, none of this applies: the limit
that is configured for the number of sequences is what is verified and drafted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from worker.config import SpeculativeConfig
from worker.engine.drafters.catch_ups import CatchUps
from worker.engine.drafters.device_probes import DeviceProbes
from worker.engine.drafters.plans import (
    FEW_SEQUENCES,
    Costs,
    Prices,
    choose_drafted,
    choose_verified,
    heads,
    spread,
)
from worker.engine.drafters.probing import Account, Interest
from worker.engine.drafters.step_times import StepTimes
from worker.engine.drafters.track_records import SequenceRecord, TrackRecords
from worker.engine.drafters.trials import Offer, Trials
from worker.engine.drafters.worth import Newcomers, weighed

_MAX_SURPRISE = 1.5  # times the expected seconds, beyond which a step's own are somebody else's
_MAX_DOUBT = 0.1  # of the expected seconds of a size that is known
_CONTROL_STEPS = 2  # plain ones in a row, for the sake of measuring
_CONTROL_DISTANCES = (16, 400)  # steps from one to the next: the less is won, the shorter
_CONTROL_COST_OF_FEW, _CONTROL_COST = 0.008, 0.016  # of the rate; with more sequences
_FIRST_CONTROL, _FIRST_CONTROLS = 4, 4  # of few sequences: steps until it, and how many are near
_FEW = 4  # drafts that tell what one costs
_MIN_LEAP = 4  # drafts that a step may always have more than any that was measured
_MOST_TYPICAL = 8  # offers of a step that tell what is typical


class DraftLengths:
    """Chooses draft lengths; owns what is known of acceptance and of step times. Pure: it knows of
    time what `observe_step` tells it, and counts steps by its calls.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._schedule = config.num_speculative_tokens_per_batch_size
        self._is_adaptive = config.enable_adaptive_verification and not self._schedule
        self._times = StepTimes()
        self._records = TrackRecords()
        self._account = Account()
        self._catch_ups = CatchUps(self._account)
        self._interest = Interest()
        self._device_drafters: set[str] = set()
        self._probes = DeviceProbes(self._times.drafting)
        self._trials = Trials()
        self._newcomers = Newcomers()
        self._prices: Prices | None = None  # of the last step in which somebody was asked
        self._drafting_seconds = 0.0  # planned for each step, as long as the device drafts
        self._was_asked = False  # for drafts, for the step that is observed next
        self._num_sequences = 0  # that decode in it, some with drafts; 0: each without
        self._control_left = 0  # plain steps still to be run for the sake of measuring

    @property
    def num_tracked(self) -> int:
        """How many sequences are remembered."""
        return len(self._records)

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
        if not self._is_time_to_ask(seq_ids):
            return False
        costs = self._costs(num, 0, 1)
        is_affordable = costs.extra[1] <= costs.affordable
        return is_affordable and (not self._device_drafters or self._may_draft(costs))

    def to_verify(
        self,
        offers: Sequence[Offer],
        num_other_tokens: int,
        room: int | None = None,
        is_crowded: bool = False,
    ) -> list[int]:
        """How many of its drafts to verify, by offer; one offer for each sequence that decodes.

        The step runs a known token of each, and `num_other_tokens` of prompts besides; it has
        `room` for so many drafts (None: for all). `is_crowded`: somebody waits for a place.
        """
        num = len(offers)
        limit = self._limit(num)
        if not self._is_adaptive or not limit or not num:
            return [min(limit, len(offer.confidences)) for offer in offers]
        self._was_asked, self._num_sequences = True, num
        records = [self._record(offer.seq_id, offer.drafter) for offer in offers]
        survivals = self._survivals(offers, records, limit)
        survivals = self._weighed(survivals, records, is_crowded)
        ranked = sorted(chain.from_iterable(survivals), reverse=True)[:room]
        costs = self._costs(num, num_other_tokens, len(ranked), self._drafting_seconds)
        # A device drafter's drafts are as many for each already, and made by now.
        choice = choose_verified(ranked, costs, any_size=bool(self._device_drafters))
        self._interest.note(choice.gain, self._times.clock, num)
        self._prices = self._make_prices(costs, choice.total)
        if choice.total and self._is_control_due(num, choice.gain, num_other_tokens > 0):
            self._control_left = _CONTROL_STEPS
        counts = heads(survivals, ranked, choice.total)
        self._trials.seq_ids.clear()
        if ranked and not choice.is_saving:
            left = num * limit if room is None else room - choice.total
            self._trials.add(offers, records, counts, (limit, left), costs, self._times.clock)
        return counts

    def to_draft(
        self, seq_ids: Sequence[int], drafter: str, num_other_tokens: int, room: int | None = None
    ) -> list[int]:
        """How many drafts the device's `drafter` makes after this step, by sequence (all that will
        decode in the next one, which has `room` for so many drafts; None: for all).
        """
        num = len(seq_ids)
        limit = self._limit(num)
        if not self._is_adaptive or not limit or not num:
            return spread(limit, num, room)
        self._was_asked = True
        self._device_drafters.add(drafter)
        limit = min(limit, 2 * self._times.most_rounds + 1)
        now, most = self._times.clock, (limit, num * limit if room is None else room)
        records = [self._record(seq_id, drafter) for seq_id in seq_ids]
        leaves = self._catch_ups.leaves(seq_ids, now)
        survivals = [
            [r.worth * chance for chance in r.run.survivals(limit)] if leave.to_ask else []
            for r, leave in zip(records, leaves, strict=True)
        ]
        ranked = sorted(chain.from_iterable(survivals), reverse=True)[:room]
        costs = self._costs(num, num_other_tokens, len(ranked))
        choice = choose_drafted(survivals, ranked, costs, self._times.drafting)
        counts = heads(survivals, ranked, choice.total)
        clock = self._records.drafter(drafter, now).clock
        if choice.total and not self._drafting_seconds:
            clock.restart(now)
        self._probes.lengthen(records, counts, most, costs, now)
        self._drafting_seconds = choice.drafting_seconds
        probed = 0
        if self._may_draft(costs, choice.is_saving):
            probed = self._probes.add(records, leaves, counts, most, costs, clock, now)
        if probed:
            self._drafting_seconds += self._times.drafting(probed, 1.0)
        elif not choice.total and clock.is_due(now):
            clock.postpone(now)  # lest the steps until then ask for nothing
        self._note_asked(seq_ids, records, counts)
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
        seconds = max(0.0, seconds - drafting_seconds)
        num_decoding = num_tokens - num_other_tokens
        self._charge(num_decoding, num_other_tokens, seconds)
        self._charge_drafting(drafting_seconds, num_drafted, num_drafting)
        num_drafts = num_decoding - (self._num_sequences or num_decoding)
        is_ahead = not self._was_asked
        self._times.observe(num_tokens, num_other_tokens, seconds, is_ahead, num_drafts)
        self._times.observe_drafting(num_drafted, num_drafting, drafting_seconds)
        if self._catch_ups.is_owing and self._times.largest:
            self._catch_ups.charge(self._times.plain(max(1, num_decoding)))
        self._probes.end_step(self._times.clock)
        if not self._was_asked:
            self._drafting_seconds = 0.0
            if num_decoding and self._control_left:
                self._control_left -= 1
        self._was_asked, self._num_sequences = False, 0

    def observe_catch_up(self, seconds: float, drafted: Collection[int]) -> None:
        """The step that `observe_step` tells of next took so long besides for what the device's
        drafter had to read; these sequences have drafts.
        """
        self._catch_ups.observe(seconds, drafted, self._times.clock)

    def observe(self, offer: Offer, num_verified: int, num_accepted: int) -> None:
        """Of an offer's drafts the first `num_verified` were verified, `num_accepted` stood."""
        if not num_verified or not self._is_adaptive:
            return
        record = self._record(offer.seq_id, offer.drafter)
        now, is_trial = self._times.clock, offer.seq_id in self._trials.seq_ids
        if is_trial and num_accepted:
            self._interest.wake(now)
        is_probe = record.is_asked
        record.observe(offer.confidences, num_verified, num_accepted, now, is_trial)
        if self._prices is not None:
            won = num_accepted * self._prices.token * record.worth
            cost = num_verified * self._prices.draft
            self._account.settle(won - cost)
            if is_probe:
                self._probes.settle(won - cost)
            if is_trial:
                self._trials.won(won)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; unknown ones are ignored."""
        self._records.forget(seq_id)
        self._newcomers.ended(self._times.clock, len(self._records))
        self._catch_ups.forget(seq_id)

    # ---- below: private ---------------------------------------------------------------------

    def _limit(self, num_sequences: int) -> int:
        """The most drafts of one sequence, when so many decode."""
        limit = self._most
        for first, _, most in self._schedule:
            if first <= num_sequences:
                limit = min(most, self._most)
        return limit

    def _record(self, seq_id: int, drafter: str) -> SequenceRecord:
        if seq_id not in self._records:
            self._newcomers.came(self._times.clock)
        return self._records.sequence(seq_id, drafter, self._times.clock)

    def _is_time_to_ask(self, seq_ids: Sequence[int]) -> bool:
        """Whether asking for drafts has won anything, or it is time to look, or somebody is new."""
        now = self._times.clock
        return (
            self._interest.is_due(now)
            or any(self._records.drafter(d, now).clock.is_due(now) for d in self._device_drafters)
            or any(seq_id not in self._records for seq_id in seq_ids)
        )

    def _may_draft(self, costs: Costs, is_saving: bool = False) -> bool:
        """Whether a draft of the device can be paid, or its price is an old one."""
        is_full = self._account.is_full or self._trials.is_full
        seconds = self._times.drafting(1, 1.0) + costs.extra[1]
        return is_full or (not is_saving and seconds <= costs.affordable)

    def _survivals(
        self, offers: Sequence[Offer], records: Sequence[SequenceRecord], limit: int
    ) -> list[list[float]]:
        """Of all drafts that may be verified; what is typical of device drafters is learned too."""
        survivals = [
            record.acceptance.survivals(offer.confidences[:limit]) if offer.confidences else []
            for offer, record in zip(offers, records, strict=True)
        ]
        if self._device_drafters:
            clock = self._times.clock
            stride = 1 + len(offers) // _MOST_TYPICAL
            for offer, record, chances in zip(offers, records, survivals, strict=True):
                if chances and offer.drafter in self._device_drafters:
                    record.run.observe(chances)
                    # A few offers of each step are enough, of other sequences each time.
                    if (offer.seq_id + clock) % stride == 0:
                        self._records.drafter(offer.drafter, clock).typical.observe(chances)
        return survivals

    def _weighed(
        self, survivals: list[list[float]], records: Sequence[SequenceRecord], is_crowded: bool
    ) -> list[list[float]]:
        """Survivals times what a token of their sequence is worth."""
        times, num = self._times, len(records)
        self._newcomers.pass_to(times.clock)
        chance = 1.0 if is_crowded else self._newcomers.chance
        price = times.extra(num, 0, _FEW)[_FEW] / _FEW / times.plain(num)
        return weighed(survivals, records, times.plain, price, chance)

    def _note_asked(
        self, seq_ids: Sequence[int], records: Sequence[SequenceRecord], counts: Sequence[int]
    ) -> None:
        for record, count in zip(records, counts, strict=True):
            if count:
                record.last_drafted = self._times.clock
        self._catch_ups.asked(i for i, n in zip(seq_ids, counts, strict=True) if n)

    def _costs(
        self, num: int, num_other_tokens: int, most: int, drafting_seconds: float = 0.0
    ) -> Costs:
        """What the next step costs with up to `most` drafts, fewer if it were too large a leap, but
        at least with one.
        """
        largest = max(self._times.largest, num)
        most = max(1, min(most, largest + max(_MIN_LEAP, largest) - num))
        plain = self._times.plain(num)
        return Costs(
            num,
            plain,
            self._times.decoding(num) + drafting_seconds,
            self._times.extra(num, num_other_tokens, most),
            self._times.extra(num, num_other_tokens, most, is_cautious=False),
            self._account.affordable(num <= FEW_SEQUENCES) * plain,
        )

    def _make_prices(self, costs: Costs, total: int) -> Prices:
        """If `total` drafts are verified, or one for a probe. What is only assumed of scheduling
        ahead is not charged for.
        """
        num_priced = max(1, total)
        asking = self._times.decoding(costs.num_sequences) / costs.plain - 1.0
        return Prices(
            plain_seconds=costs.plain,
            token=1.0 / costs.num_sequences,
            draft=costs.extra[num_priced] / num_priced / costs.plain,
            asking=asking if self._times.plain_age(costs.num_sequences)[1] else 0.0,
        )

    def _charge(self, num_decoding: int, num_other_tokens: int, seconds: float) -> None:
        """A step was run: pay in, and charge for what the plan did not foresee."""
        if num_decoding <= 0:
            return
        self._account.earn()
        self._trials.earn()
        prices = self._prices
        if not self._was_asked or prices is None:
            return
        self._account.settle(-prices.asking)
        if num_other_tokens or num_decoding * prices.token <= 1.0:
            return
        expected = self._times.decoding(num_decoding)
        surprise = min(seconds, _MAX_SURPRISE * expected) - expected
        if num_decoding <= self._times.largest:
            # Hardly any is believed at once of a size that is known.
            surprise = max(-_MAX_DOUBT * expected, min(_MAX_DOUBT * expected, surprise))
        else:
            surprise = max(0.0, surprise)
        self._account.settle(-surprise / prices.plain_seconds)

    def _charge_drafting(self, seconds: float, num_drafted: int, num_drafting: int) -> None:
        """Charge for the time of drafting; for all of it where that came to nothing."""
        if seconds <= 0.0 or self._prices is None:
            return
        if num_drafted and num_drafting:
            expected = self._times.drafting(num_drafting, max(1.0, num_drafted / num_drafting))
            seconds = min(seconds, _MAX_SURPRISE * expected)
        self._account.settle(-seconds / self._prices.plain_seconds)

    def _is_control_due(self, num: int, gain: float, is_beside_prompts: bool) -> bool:
        """Whether to run plain steps, to know their time."""
        age, count = self._times.plain_age(num)
        shortest, longest = _CONTROL_DISTANCES
        is_few = num <= FEW_SEQUENCES
        if is_few and not is_beside_prompts and count < _FIRST_CONTROLS * _CONTROL_STEPS:
            return age >= (shortest if count else _FIRST_CONTROL)
        distance = _CONTROL_STEPS * gain / (_CONTROL_COST_OF_FEW if is_few else _CONTROL_COST)
        if count < 2 * _CONTROL_STEPS:
            distance /= 2.0
        return age >= min(max(distance, shortest), longest)
