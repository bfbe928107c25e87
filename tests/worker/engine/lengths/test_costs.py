"""Acceptance rates, step times, and the worth of a token to each sequence."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.lengths.acceptance import Acceptance, DeviceRuns, Offer
from worker.engine.lengths.costs import StepCosts
from worker.engine.lengths.worth import Newcomers, worths
from worker.executor.profiling import StepProfile

PROFILE = StepProfile(
    ((1, 0.05), (4, 0.06), (16, 0.1)), ((1, 0.01), (4, 0.02)), ((1, 0.002), (4, 0.004))
)


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, 0.05), (4, 0.06), (2.5, 0.055), (10, 0.08), (28, 0.14)]
)
def test_seconds_are_linear_between_profiled_sizes_and_beyond(size: float, seconds: float) -> None:
    assert StepCosts(PROFILE).step(size) == pytest.approx(seconds)


def test_a_larger_step_never_takes_less() -> None:
    costs = StepCosts(StepProfile(((1, 0.05), (2, 0.04), (4, 0.06))))
    assert costs.extra(1, 1) == 0.0
    assert costs.extra(2, 2) == pytest.approx(0.01)


def test_drafting_takes_the_first_draft_and_more_for_each_further_one() -> None:
    costs = StepCosts(PROFILE)
    assert costs.drafting(1, 1) == pytest.approx(0.01)
    assert costs.drafting(4, 3) == pytest.approx(0.02 + 2 * 0.004)


def test_a_machine_that_gets_slower_does_not_change_the_table() -> None:
    """Steps of one size say nothing of how sizes compare; they do say how fast the machine is."""
    costs = StepCosts(PROFILE)
    for _ in range(200):
        costs.observe_step(4, 0.18)
    assert costs.step(4) == pytest.approx(0.06)
    assert costs.speed == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("speed", [1.0, 2.5])
def test_steps_in_a_row_correct_the_table(speed: float) -> None:
    """A cliff that the profile missed shows after some dozen pairs, on a noisy machine whose speed
    jumps.
    """
    rng = random.Random(7)
    costs = StepCosts(PROFILE)
    truth = {1: 0.05, 2: 0.1}
    for number in range(400):
        jump = speed if number // 40 % 2 else 1.0
        size = 1 + number % 2
        costs.observe_step(size, truth[size] * jump * rng.lognormvariate(0.0, 0.1))
    assert costs.step(2) / costs.step(1) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), 1e9])
def test_no_single_step_moves_the_table_far(seconds: float) -> None:
    costs = StepCosts(PROFILE)
    costs.observe_step(1, 0.05)
    costs.observe_step(4, seconds)
    assert costs.step(4) / costs.step(1) == pytest.approx(1.2, rel=0.1)


SURE, UNSURE = (1.0,) * 4, (0.2,) * 4


def judged(
    num: int, confidences: tuple[float, ...], num_accepted: int, seq_id: int = 0
) -> Acceptance:
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


BASE, ROW = 0.05, 0.002  # seconds of a step, and of each row in it


def plain(num_sequences: int) -> float:
    return BASE + ROW * num_sequences


@given(st.lists(st.floats(1.0, 8.0), min_size=1, max_size=40), st.floats(0.0, 1.0))
def test_no_token_is_worth_less_than_nothing(paces: list[float], chance: float) -> None:
    found = worths(paces, plain, chance)
    assert min(found) >= 0.0
    assert max(found) <= len(paces)
    assert worths(paces, plain, 1.0) == [1.0] * len(paces)
    assert len(set(worths([2.0] * len(paces), plain, chance))) == 1


def test_equally_fast_sequences_share_the_gain_of_the_last() -> None:
    assert worths([1.0], plain, 0.0) == [1.0]
    much, little, hardly = (worths([pace] * 16, plain, 0.0)[0] for pace in (4.0, 1.1, 1.02))
    assert 0.85 < much < 1.0
    assert 0.3 < little < 0.6
    assert hardly == 0.0
    assert worths([1.1] * 4, plain, 0.0)[0] > little


def test_the_gain_of_the_last_is_left_to_chance() -> None:
    """The least of sixteen sums of rare tokens, drawn: about the part that is worth anything."""
    rng = random.Random(11)
    for pace in (1.2, 1.5, 3.0):
        gained = 100 * (pace - 1.0)
        chance = gained / 1000
        least = [
            min(sum(rng.random() < chance for _ in range(1000)) for _ in range(16))
            for _ in range(20)
        ]
        share = sum(least) / len(least) / gained
        assert worths([pace] * 16, plain, 0.0)[0] == pytest.approx(share, abs=0.1)


def test_the_few_that_get_ahead_save_their_rows_alone() -> None:
    found = worths([4.0] * 4 + [1.0] * 12, plain, 0.0)
    row = 16 * ROW / plain(16)
    assert found[:4] == pytest.approx([row] * 4, rel=0.1)
    slow = worths([4.0] * 4 + [2.0] * 12, plain, 0.0)
    assert slow[4:] == pytest.approx([16 * plain(12) / 12 / plain(16)] * 12, rel=0.2)
    half = worths([4.0] * 4 + [1.0] * 12, plain, 0.5)
    assert half[0] == pytest.approx((1.0 + found[0]) / 2)


def test_newcomers_are_expected_where_places_were_taken() -> None:
    """Arrivals soon after an end teach it, and it never quite gives up."""
    taken, left = Newcomers(), Newcomers()
    for now in range(0, 2000, 40):
        for one in (taken, left):
            one.ended(now, num_left=15)
        taken.came(now + 3)
        left.came(now + 30)
    assert taken.chance > 0.95
    assert 0.2 < left.chance < 0.3


def test_a_newcomer_after_the_last_end_takes_no_place() -> None:
    """A batch after another one: its requests come at once, and yet no sequence gained by that."""
    newcomers = Newcomers()
    for now in range(0, 1000, 100):
        for left in range(7, -1, -1):
            newcomers.ended(now, left)
        for _ in range(8):
            newcomers.came(now)
    assert newcomers.chance < 0.3
