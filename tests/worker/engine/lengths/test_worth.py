"""The worth of a token to each sequence, and newcomers that take free places."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.lengths.worth import Newcomers, worths

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
