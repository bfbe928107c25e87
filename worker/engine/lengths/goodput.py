"""Draft lengths: the number of drafts with the best goodput, in tokens a second.

A step of R sequences and B drafts gives R + S(B) tokens in t(R + B) seconds, where S sums the
survivals of the B likeliest drafts (`acceptance`), each times what its token is worth (`worth`),
and t is the table of step times (`costs`). The best B is verified if it beats no drafts at all by a
margin, as in SmartSpec (arXiv 2406.14066). Drafts that do not pay are tried again so seldom that
these tries take less than a hundredth of the time. In between no drafter is asked, so that steps
are scheduled ahead.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from worker.config import SpeculativeConfig
from worker.engine.lengths.acceptance import Acceptance, DeviceRuns, Offer
from worker.engine.lengths.costs import StepCosts
from worker.engine.lengths.worth import Newcomers, worths

_MARGIN = 0.03  # what drafts must win over none
_ASKING = 0.015  # of a step: what asking costs, since it is not scheduled ahead
_TRY_COST = 0.008  # of the time, at most, goes into tries
_TRY_AT_ONCE = 0.1  # of a step, for the tries of one step
_MAX_BETWEEN, _MAX_DOUBLED = 256, 64  # steps between tries of what does not pay
_NEWS = 0.6  # an accepted draft that was less likely than this is tried again at once
_READING_RATE = 0.3
_READING_HORIZON = 64  # steps over which reading a sequence pays off
_PACE_RATE = 0.2


@dataclass(slots=True)
class _Track:
    """A sequence's pace in tokens a step, a token's worth, and whether the device has read it."""

    pace: float = 1.0
    worth: float = 1.0
    is_read: bool = False


class DraftLengths:
    """Chooses draft lengths; sole owner of acceptance rates and step costs. Pure: it counts steps
    by calls of `observe_step`, whose seconds are all that it knows of time.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        costs: StepCosts | None = None,
        drafts_on_device: bool = False,
    ) -> None:
        self._most = config.num_speculative_tokens
        self._schedule = config.num_speculative_tokens_per_batch_size
        self._is_adaptive = config.enable_adaptive_verification and not self._schedule
        self._costs = costs or StepCosts()
        self._acceptance = Acceptance()
        self._runs = DeviceRuns(self._most) if drafts_on_device else None
        self._newcomers = Newcomers()
        self._tracks: dict[int, _Track] = {}
        self._reading_seconds = 0.0  # of a sequence, before its first device drafts
        self._unread_seconds = 0.0  # spent on reading since the device last drafted
        self._asked: set[int] = set()  # sequences that the device drafts for after this step
        self._now = 0  # steps
        self._pays = True
        self._try_at, self._try_distance = 0, 1

    def may_pay(self, seq_ids: Sequence[int]) -> bool:
        """True if drafts may pay in the next step, supposing that these sequences (all that decode)
        are in it. If False, that step can be scheduled ahead.
        """
        if not seq_ids or not self._limit(len(seq_ids)):
            return False
        if not self._is_adaptive or self._pays or self._now >= self._try_at:
            return True
        return any(seq_id not in self._tracks for seq_id in seq_ids)

    def to_verify(
        self,
        offers: Sequence[Offer],
        num_other_tokens: int,
        room: int | None = None,
        is_crowded: bool = False,
    ) -> list[int]:
        """Return the numbers of drafts to verify, by offer; each sequence that decodes has one.

        The step also runs `num_other_tokens` of prompts; it has room for `room` drafts (None: for
        all). `is_crowded`: requests wait for admission.
        """
        num, limit = len(offers), self._limit(len(offers))
        if not self._is_adaptive or not limit or not num:
            return [min(limit, len(offer.confidences)) for offer in offers]
        survivals = [
            self._acceptance.survivals(offer.seq_id, offer.confidences[:limit]) for offer in offers
        ]
        if self._runs is not None:
            for offer, chances in zip(offers, survivals, strict=True):
                self._runs.observe(offer.seq_id, chances)
        survivals = self._weighed([offer.seq_id for offer in offers], survivals, is_crowded)
        ranked = sorted(chain.from_iterable(survivals), reverse=True)[:room]
        total = self._best(num, num_other_tokens, ranked)
        counts = _heads(survivals, ranked, total)
        if self._runs is None:
            self._note(pays=total > 0)
            if self._now >= self._try_at:
                self._try(counts, survivals, len(ranked) - total)
        elif not self._pays:  # the device made these as a try
            counts = [max(n, min(1, len(s))) for n, s in zip(counts, survivals, strict=True)]
        return _cut(counts, room)

    def to_draft(
        self, seq_ids: Sequence[int], num_other_tokens: int, room: int | None = None
    ) -> list[int]:
        """Return the numbers of drafts that the device makes after this step, by sequence (all that
        will decode in the next one, which has room for `room` drafts; None: for all).
        """
        num, limit = len(seq_ids), self._limit(len(seq_ids))
        if not self._is_adaptive or not limit or not num or self._runs is None:
            return _cut([limit] * num, room)
        runs = {seq_id: self._runs.recall(seq_id) for seq_id in seq_ids}
        tracks = {seq_id: self._track(seq_id) for seq_id in seq_ids}
        order = sorted(seq_ids, key=lambda i: -tracks[i].worth * runs[i][0])
        ranked = [(tracks[i], runs[i]) for i in order]
        width, length = self._best_drafted(ranked, num_other_tokens, limit)
        self._note(pays=length > 0)
        if not length and self._now >= self._try_at:
            order.sort(key=lambda i: not tracks[i].is_read)  # reading costs more than drafting
            width = length = 1
            seconds = self._costs.extra(num, 1) + self._costs.drafting(1, 1)
            if not tracks[order[0]].is_read:
                seconds += self._to_read_seconds
            self._schedule_try(seconds / self._costs.step(num))
        chosen = set(order[:width])
        counts = _cut([length if i in chosen else 0 for i in seq_ids], room)
        self._asked = {i for i, count in zip(seq_ids, counts, strict=True) if count}
        return counts

    def observe_step(self, num_tokens: int, seconds: float, num_other_tokens: int = 0) -> None:
        """Learn that a step ran `num_tokens` tokens, with drafts and `num_other_tokens` of prompts,
        in `seconds`, not counting the time that the device's drafter took.
        """
        self._now += 1
        self._acceptance.pass_step()
        if self._runs is not None:
            self._runs.pass_step()
        # A token of a prompt has no logits, so it costs less than one of these.
        if not num_other_tokens:
            self._costs.observe_step(num_tokens, seconds)

    def observe_catch_up(self, seconds: float, drafted: Collection[int]) -> None:
        """Learn how long the device's drafter reads sequences in the step that `observe_step`
        reports next; `drafted` have drafts now. A sequence asked in vain, without any reading,
        counts as if its first draft was rejected.
        """
        self._unread_seconds += seconds / self._costs.speed
        tracks = [self._tracks[seq_id] for seq_id in drafted if seq_id in self._tracks]
        new = sum(not track.is_read for track in tracks)
        if new:
            read = self._unread_seconds / new
            self._reading_seconds += _READING_RATE * (read - self._reading_seconds)
        for track in tracks:
            track.is_read, self._unread_seconds = True, 0.0
        for seq_id in self._asked.difference(drafted):
            if self._runs is not None and not seconds and seq_id in self._tracks:
                self._runs.observe(seq_id, (0.0,))
        self._asked.clear()

    def observe(self, offer: Offer, num_verified: int, num_accepted: int) -> None:
        if not num_verified or not self._is_adaptive:
            return
        (expected,) = self._acceptance.survivals(offer.seq_id, offer.confidences[:1])
        self._acceptance.observe(offer, num_verified, num_accepted)
        if num_accepted and expected < _NEWS and not self._pays:
            self._try_at, self._try_distance = self._now + 1, 1

    def forget(self, seq_id: int) -> None:
        if self._tracks.pop(seq_id, None) is not None:
            self._newcomers.ended(self._now, len(self._tracks))
        self._acceptance.forget(seq_id)
        if self._runs is not None:
            self._runs.forget(seq_id)

    @property
    def _to_read_seconds(self) -> float:
        return max(self._reading_seconds, self._unread_seconds)

    def _limit(self, num_sequences: int) -> int:
        """Return the most drafts that each of `num_sequences` decoding sequences may have."""
        limit = self._most
        for first, _, most in self._schedule:
            if first <= num_sequences:
                limit = min(most, self._most)
        return limit

    def _track(self, seq_id: int) -> _Track:
        if seq_id not in self._tracks:
            self._newcomers.came(self._now)
            self._tracks[seq_id] = _Track()
        return self._tracks[seq_id]

    def _weighed(
        self, seq_ids: Sequence[int], survivals: Sequence[Sequence[float]], is_crowded: bool
    ) -> list[list[float]]:
        """Return the survivals, multiplied by what a token of their sequence is worth."""
        tracks = [self._track(seq_id) for seq_id in seq_ids]
        self._newcomers.pass_to(self._now)
        for track, chances in zip(tracks, survivals, strict=True):
            track.pace += _PACE_RATE * (1.0 + sum(chances) - track.pace)
        chance = 1.0 if is_crowded else self._newcomers.chance
        shares = worths([track.pace for track in tracks], self._costs.step, chance)
        for track, share in zip(tracks, shares, strict=True):
            track.worth = share
        pairs = zip(shares, survivals, strict=True)
        return [[share * survival for survival in chances] for share, chances in pairs]

    def _best(self, num: int, num_other: int, ranked: Sequence[float]) -> int:
        """Return the number of drafts with the best rate; 0 if none wins by the margin."""
        plain = self._costs.step(num)
        best_rate, best, tokens = (1.0 + _MARGIN) * num / plain, 0, float(num)
        for number, survival in enumerate(ranked, 1):
            tokens += survival
            # Prompts run anyway: their seconds count on neither side, but set a draft's price.
            rate = tokens / (plain + self._costs.extra(num + num_other, number))
            if rate > best_rate:
                best_rate, best = rate, number
        return best

    def _best_drafted(
        self, ranked: Sequence[tuple[_Track, Sequence[float]]], num_other: int, limit: int
    ) -> tuple[int, int]:
        """Return (sequences, drafts of each) with the best rate, for the first ones of `ranked`;
        (0, 0) if none beats plain decoding by the margin.
        """
        costs, num = self._costs, len(ranked)
        plain = costs.step(num)
        best_rate, best = (1.0 + _MARGIN) * num / plain, (0, 0)
        for width in sorted({1, num // 4, num // 2, num} - {0}):
            unread = sum(not track.is_read for track, _ in ranked[:width])
            fixed = plain + unread * self._to_read_seconds / _READING_HORIZON
            tokens = float(num)
            for length in range(1, limit + 1):
                tokens += sum(track.worth * run[length - 1] for track, run in ranked[:width])
                verifying = costs.extra(num + num_other, width * length)
                rate = tokens / (fixed + verifying + costs.drafting(width, length))
                if rate > best_rate:
                    best_rate, best = rate, (width, length)
        return best

    def _note(self, pays: bool) -> None:
        self._pays = pays
        if pays:
            self._try_at, self._try_distance = min(self._try_at, self._now + 4), 1

    def _try(self, counts: list[int], survivals: Sequence[Sequence[float]], room: int) -> None:
        """Add one draft each for sequences that have none in this step, for as many as is cheap."""
        idle = [i for i, s in enumerate(survivals) if s and not counts[i]][:room]
        total, plain = len(counts) + sum(counts), self._costs.step(len(counts))
        while len(idle) > 1 and self._costs.extra(total, len(idle)) > _TRY_AT_ONCE * plain:
            idle = idle[self._now % 2 :: 2]
        for i in idle:
            counts[i] = 1
        if idle:
            self._schedule_try(self._costs.extra(total, len(idle)) / plain)
        else:
            self._try_at = self._now + 1 + int(_ASKING / _TRY_COST)

    def _schedule_try(self, price: float) -> None:
        """Schedule the next try so late that this one, worth some plain steps, is a small part of
        the time; and ever later from try to try, as long as no unlikely draft is accepted.
        """
        shortest = 1 + int(min((price + _ASKING) / _TRY_COST, _MAX_BETWEEN))
        self._try_distance = max(shortest, min(2 * self._try_distance, _MAX_DOUBLED))
        self._try_at = self._now + self._try_distance


def _heads(survivals: Sequence[Sequence[float]], ranked: Sequence[float], total: int) -> list[int]:
    """Return how many drafts of each sequence are among the `total` likeliest of all."""
    lowest = ranked[total - 1] if total else float("inf")
    return _cut((sum(chance >= lowest for chance in chances) for chances in survivals), total)


def _cut(counts: Iterable[int], room: int | None) -> list[int]:
    """Return the counts cut to at most `room` in all: the first ones keep theirs."""
    if room is None:
        return list(counts)
    cut, left = [], room
    for count in counts:
        cut.append(min(count, left))
        left -= cut[-1]
    return cut
