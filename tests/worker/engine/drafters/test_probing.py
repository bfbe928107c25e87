"""The account of what may be lost, and the clocks of probes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.drafters.probing import INCOME, MAX_DISTANCE, Account, Interest, ProbeClock


@given(st.lists(st.one_of(st.none(), st.floats(-5.0, 5.0)), max_size=200))
def test_nobody_can_lose_more_than_was_paid_in(changes: list[float | None]) -> None:
    """Who only spends what there is loses the start, the income and what was won, at most."""
    account = Account()
    start, won, lost = account.balance, 0.0, 0.0
    for change in changes:
        if change is None:
            account.earn()
        elif change >= 0.0:
            account.settle(change)
            won += change
        elif -change <= account.balance:
            account.settle(change)
            lost -= change
    assert account.balance >= 0.0
    assert lost <= start + won + INCOME * changes.count(None) + 1e-9


def test_income_alone_fills_the_account_only_so_far() -> None:
    """A long quiet time does not allow for a large loss."""
    account = Account()
    for _ in range(100_000):
        account.earn()
    quiet = account.balance
    account.settle(100.0)
    assert quiet < 4.0 < account.balance < 10.0


def test_many_sequences_risk_less_than_few() -> None:
    """At the start and later; never more than there is."""
    account = Account()
    for change in (0.0, 100.0, -4.0):
        account.settle(change)
        assert account.affordable(is_few=False) < account.affordable(is_few=True) <= account.balance


def test_probes_that_fail_come_at_growing_but_bounded_distances() -> None:
    """1, 2, 4, … steps apart, and never more than the bound."""
    clock = ProbeClock(0)
    probes = []
    for now in range(400):
        if clock.is_due(now):
            probes.append(now)
            clock.tried(now)
            clock.failed()
    distances = [b - a for a, b in pairwise(probes)]
    assert distances[:6] == [1, 2, 4, 8, 16, 32]
    assert max(distances) == MAX_DISTANCE


def test_a_pace_stretches_every_distance_of_a_clock() -> None:
    """Also that to the probe after one that succeeds, and of one that is put off."""
    clock = ProbeClock(0)
    probes = []
    for now in range(100):
        if clock.is_due(now):
            probes.append(now)
            clock.tried(now, pace=4)
            clock.failed()
    assert probes == [0, 4, 12, 28, 60]
    clock.succeeded(100)
    assert (clock.is_due(103), clock.is_due(104)) == (False, True)
    clock.postpone(200)
    assert (clock.is_due(231), clock.is_due(232)) == (False, True)


def test_a_probe_that_cannot_be_paid_is_put_off() -> None:
    """It is due again after some steps, no sooner than its distance, and that does not grow."""
    clock = ProbeClock(0)
    clock.postpone(5)
    assert [clock.is_due(now) for now in (5, 12, 13)] == [False, False, True]
    for now in (20, 30, 40, 50, 60, 70):
        clock.tried(now)
    clock.postpone(200)
    assert (clock.is_due(231), clock.is_due(232)) == (False, True)


def test_probes_that_succeed_are_followed_up_a_few_times_only() -> None:
    """If it does not pay after several successes, it is for another reason than acceptance."""
    clock = ProbeClock(0, followed_up=3)
    probes = []
    for now in range(400):
        if clock.is_due(now):
            probes.append(now)
            clock.tried(now)
            clock.succeeded(now)
    assert probes[:4] == [0, 1, 2, 3]
    assert len(probes) < 25


def test_a_failure_makes_success_news_again() -> None:
    """After a probe that failed, the next one that succeeds is followed up."""
    clock = ProbeClock(0, followed_up=3)
    for now in range(6):
        clock.tried(now)
        clock.succeeded(now)
    clock.tried(6)
    clock.failed()
    clock.tried(50)
    clock.succeeded(50)
    assert clock.is_due(51)


def test_interest_fades_without_gain_and_comes_back_with_it() -> None:
    """Nobody is asked in most steps after a barren while; one gain is enough to ask again."""
    interest = Interest()
    asked = []
    for now in range(400):
        asked.append(interest.is_due(now))
        if asked[-1]:
            interest.note(0.0, now, num_asked=1)
    assert all(asked[:40])
    assert 0 < sum(asked[200:]) <= 200 // 10
    now = next(n for n in range(400, 450) if interest.is_due(n))
    interest.note(0.5, now, num_asked=1)
    assert all(interest.is_due(now + step) for step in range(1, 20))


def test_many_that_win_nothing_tell_it_sooner_than_one() -> None:
    """Sixteen sequences that had won much, then nothing: nobody is asked after a few steps."""
    num_asked = []
    for number in (1, 16):
        interest, asked = Interest(), 0
        for now in range(200):
            if interest.is_due(now):
                interest.note(0.3 if now < 60 else 0.0, now, number)
                asked += now >= 60
        num_asked.append(asked)
    assert num_asked[1] <= 30 < 60 <= num_asked[0] <= 90


def test_many_are_looked_at_less_often_than_few() -> None:
    """With more sequences less can be won by a look, however long nothing was."""
    distances = []
    for number in (4, 5, 16):
        interest, asked = Interest(), []
        for now in range(1000):
            if interest.is_due(now):
                interest.note(0.0, now, number)
                asked.append(now)
        distances.append({late - early for early, late in pairwise(asked) if early > 500})
    assert distances == [{16}, {48}, {48}]
