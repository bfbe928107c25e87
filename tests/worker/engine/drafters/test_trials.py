"""Drafts on trial: what they may cost, and that all get their turn."""

from __future__ import annotations

from worker.engine.drafters.plans import Costs
from worker.engine.drafters.track_records import SequenceRecord, TrackRecords
from worker.engine.drafters.trials import Offer, Trials

PLENTY = (5, 1000)


def costs(num: int, draft: float, first: float = 0.0, affordable: float = 100.0) -> Costs:
    """Plain steps of a second; a draft costs `draft`, the first one `first` more."""
    extra = [0.0] + [first + draft * count for count in range(1, 33)]
    return Costs(num, 1.0, 1.0, extra, extra, affordable)


def sequences(num: int) -> tuple[list[Offer], list[SequenceRecord]]:
    """New ones, with drafts."""
    tracked = TrackRecords()
    offers = [Offer(index, "d", (0.9,) * 5) for index in range(num)]
    return offers, [tracked.sequence(index, "d", 0) for index in range(num)]


def spent(num: int, steps: int, price: float, succeed: bool) -> float:
    """What trials cost a step on the average; all that are tried fail, or stand."""
    trials, (offers, records) = Trials(), sequences(num)
    total = 0
    for now in range(steps):
        counts = [0] * num
        trials.seq_ids.clear()
        trials.add(offers, records, counts, PLENTY, costs(num, price), now)
        for offer, record, count in zip(offers, records, counts, strict=True):
            if count:
                record.observe(offer.confidences, count, count * succeed, now, True)
                trials.won(count * succeed / num)
        total += sum(counts)
        trials.earn()
    return total * price / steps


def test_trials_that_fail_cost_a_part_of_a_percent() -> None:
    """1 % of a plain step for each one at most, divided by the number of sequences."""
    for num in (9, 16, 64, 256):
        assert spent(num, 4000, 0.4 / num, succeed=False) <= 0.0105 / num


def test_a_few_sequences_are_tried_by_their_clocks_alone() -> None:
    """At one sequence the account is what bounds trials."""
    assert spent(1, 1000, 0.05, succeed=False) > 0.0105 / 10
    trials, (offers, records) = Trials(), sequences(1)
    counts = [0]
    trials.add(offers, records, counts, PLENTY, costs(1, 0.05, affordable=0.01), 0)
    assert counts == [0]


def test_trials_that_succeed_pay_for_others() -> None:
    """Where all stand far more are made."""
    assert spent(16, 2000, 0.02, succeed=True) > 2 * spent(16, 2000, 0.02, succeed=False)


def test_several_are_tried_together_where_the_first_is_dear() -> None:
    """Of 16 sequences more than one, as they share what the first costs."""
    trials, (offers, records) = Trials(), sequences(16)
    for _ in range(100):
        trials.earn()
    counts = [0] * 16
    trials.add(offers, records, counts, PLENTY, costs(16, 0.001, first=0.04), 0)
    assert sum(counts) > 8
    assert trials.seq_ids == {index for index, count in enumerate(counts) if count}


def test_a_full_allowance_is_enough_for_one_however_dear() -> None:
    """Else what was once measured wrongly would never be measured again."""
    trials, (offers, records) = Trials(), sequences(16)
    counts = [0] * 16
    trials.add(offers, records, counts, PLENTY, costs(16, 3.0), 0)
    assert sum(counts) == 0
    for _ in range(100):
        trials.earn()
    assert trials.is_full
    trials.add(offers, records, counts, PLENTY, costs(16, 3.0, affordable=-1.0), 0)
    assert sum(counts) == 1
    assert not trials.is_full


def test_limits_and_what_is_planned_already_hold() -> None:
    """No more of a sequence than its limit, and no more in all than there is room for."""
    trials, (offers, records) = Trials(), sequences(16)
    for record in records:
        record.wanted = 3
    counts = [1] * 16
    trials.add(offers, records, counts, (2, 5), costs(16, 0.0), 0)
    assert max(counts) == 2
    assert sum(counts) == 16 + 5
