"""Acceptance rates by confidence and place, and the runs that a device's drafter is asked by."""

import pytest

from worker.engine.lengths.acceptance import Acceptance, DeviceRuns, Offer

SURE, UNSURE = (1.0,) * 4, (0.2,) * 4


def judged(
    num: int, confidences: tuple[float, ...], num_accepted: int, seq_id: int = 0
) -> Acceptance:
    """Return rates after `count` offers, of which the given numbers of drafts were accepted."""
    rates = Acceptance()
    for _ in range(num):
        rates.observe(Offer(seq_id, confidences), len(confidences), num_accepted)
        rates.pass_step()
    return rates


def test_survivals_never_rise() -> None:
    for accepted in range(5):
        chances = judged(10, (0.4, 0.9, 0.2, 1.0), accepted).survivals(0, (0.4, 0.9, 0.2, 1.0))
        assert chances == sorted(chances, reverse=True)
        assert 0.0 < chances[0] < 1.0


def test_accepted_drafts_raise_the_expectation() -> None:
    good, bad = judged(30, SURE, 4), judged(30, SURE, 0)
    assert good.survivals(0, SURE)[3] > 0.8
    assert bad.survivals(0, SURE)[0] < 0.1


def test_a_draft_behind_the_first_that_fell_says_nothing() -> None:
    rates = judged(50, SURE, 0)
    first, second = rates.survivals(0, SURE)[:2]
    assert second / first == pytest.approx(0.6, abs=0.01)


def test_confidences_are_learned_separately() -> None:
    rates = judged(30, SURE, 4)
    for _ in range(30):
        rates.observe(Offer(0, UNSURE), 4, 0)
        rates.pass_step()
    assert rates.survivals(1, SURE)[0] > 2 * rates.survivals(1, UNSURE)[0]


def test_a_sequence_has_rates_of_its_own_until_it_ends() -> None:
    rates = judged(30, SURE, 4)
    for _ in range(30):
        rates.observe(Offer(7, SURE), 4, 0)
    assert rates.survivals(7, SURE)[0] < 0.2 < rates.survivals(8, SURE)[0]
    rates.forget(7)
    assert rates.survivals(7, SURE) == rates.survivals(8, SURE)


def test_a_class_that_is_no_longer_verified_gets_a_new_chance() -> None:
    """After many steps a rejected class of confidence is trusted like the drafter's others."""
    rates = judged(40, SURE, 4)
    for _ in range(20):
        rates.observe(Offer(0, UNSURE), 4, 0)
    before = rates.survivals(1, UNSURE)[0]
    for _ in range(300):
        rates.pass_step()
    assert rates.survivals(1, UNSURE)[0] > before + 0.2


def test_a_run_of_a_sequence_fades_into_the_typical_one() -> None:
    runs = DeviceRuns(3)
    for _ in range(60):
        runs.observe(0, (0.8, 0.6, 0.5))
    for _ in range(12):
        runs.observe(1, (0.1,))
    assert runs.recall(1)[0] < 0.3
    assert runs.recall(2)[0] > 0.4
    for _ in range(400):
        runs.pass_step()
    assert runs.recall(1) == pytest.approx(runs.recall(2), abs=0.01)


def test_places_that_were_not_drafted_follow_those_before_them() -> None:
    """One spell of bad first drafts does not end long runs for good."""
    runs = DeviceRuns(3)
    for survivals in [(0.1,)] * 30 + [(0.9,)] * 60:
        runs.observe(0, survivals)
    first, second, third = runs.recall(0)
    assert first > 0.8
    assert second > 0.4
    assert first >= second >= third
