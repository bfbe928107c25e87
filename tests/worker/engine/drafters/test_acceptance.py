"""Acceptance: what verdicts teach, and how fast."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.drafters.acceptance import (
    NUM_CLASSES,
    OwnRun,
    PooledAcceptance,
    SequenceAcceptance,
    TypicalRun,
    confidence_class,
    positions_judged,
)

SURE = (1.0,) * 8


def test_a_fresh_drafter_is_thought_well_of() -> None:
    """Optimistic, the more the surer the drafter is."""
    acceptance = SequenceAcceptance(PooledAcceptance())
    chances = [acceptance.survivals((c,))[0] for c in (0.1, 0.4, 0.6, 0.8, 0.9, 1.0)]
    assert chances == sorted(chances)
    assert 0.4 < chances[0] < chances[-1] < 1.0


def test_classes_of_confidence_cover_everything() -> None:
    """From the least sure to the surest, in order."""
    classes = [confidence_class(c / 1000) for c in range(1, 1001)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(NUM_CLASSES))


@given(st.integers(0, 9), st.integers(0, 9))
def test_what_comes_after_the_first_that_fell_is_not_judged(verified: int, accepted: int) -> None:
    """The drafts that stood and the next one were looked at, if there was a next one."""
    accepted = min(accepted, verified)
    assert positions_judged(verified, accepted) == accepted + (accepted < verified)


def test_positions_never_judged_learn_nothing() -> None:
    """First drafts that fall teach nothing about what comes after first drafts that stand."""
    pool = PooledAcceptance()
    acceptance = SequenceAcceptance(pool)
    first, second = SequenceAcceptance(PooledAcceptance()).survivals(SURE)[:2]
    for _ in range(30):
        acceptance.observe(SURE, 8, 0)
    survivals = acceptance.survivals(SURE)
    assert survivals[0] < 0.1
    # The class as a whole suffers, through which cells without verdicts lean on each other.
    assert survivals[1] / survivals[0] > 0.0
    acceptance.observe(SURE, 8, 8)
    assert acceptance.survivals(SURE)[1] / acceptance.survivals(SURE)[0] > 0.3
    assert second / first > 0.8


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5, 0.8, 0.97])
def test_a_steady_chance_is_found_and_kept(chance: float) -> None:
    """Averaged over time the estimate is the true chance, and it is not thrown about by luck."""
    rng = random.Random(3)
    acceptance = SequenceAcceptance(PooledAcceptance())
    estimates = []
    for number in range(1500):
        acceptance.observe((0.9,), 1, int(rng.random() < chance))
        if number > 100:
            estimates.append(acceptance.survivals((0.9,))[0])
    assert sum(estimates) / len(estimates) == pytest.approx(chance, abs=0.05)
    assert sum(e < chance / 4 for e in estimates) < len(estimates) / 10


def test_a_change_is_noticed_after_a_few_verdicts() -> None:
    """From nearly all to none in a handful of verdicts, and back."""
    acceptance = SequenceAcceptance(PooledAcceptance())
    for _ in range(50):
        acceptance.observe((1.0,), 1, 1)
    assert acceptance.survivals((1.0,))[0] > 0.9
    for _ in range(6):
        acceptance.observe((1.0,), 1, 0)
    assert acceptance.survivals((1.0,))[0] < 0.45
    for _ in range(60):
        acceptance.observe((1.0,), 1, 0)
    assert acceptance.survivals((1.0,))[0] < 0.1
    for _ in range(4):
        acceptance.observe((1.0,), 1, 1)
    assert acceptance.survivals((1.0,))[0] > 0.4


def test_a_new_sequence_inherits_what_others_showed() -> None:
    """It begins with the running average, and goes its own way from there."""
    pool = PooledAcceptance()
    for _ in range(20):
        old = SequenceAcceptance(pool)
        for _ in range(4):
            old.observe((0.6, 0.6), 2, 0)
    new = SequenceAcceptance(pool)
    assert new.survivals((0.6,))[0] < 0.1
    for _ in range(6):
        new.observe((0.6,), 1, 1)
    assert new.survivals((0.6,))[0] > 0.6
    assert SequenceAcceptance(pool).survivals((0.6,))[0] < 0.2


def test_classes_are_learned_apart() -> None:
    """Unsure drafts that fall say nothing of sure ones."""
    acceptance = SequenceAcceptance(PooledAcceptance())
    for _ in range(40):
        acceptance.observe((0.2,), 1, 0)
        acceptance.observe((0.99,), 1, 1)
    assert acceptance.survivals((0.2,))[0] < 0.1
    assert acceptance.survivals((0.99,))[0] > 0.9


VERDICTS = st.lists(
    st.tuples(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9), st.integers(0, 9)),
    max_size=30,
)


@given(VERDICTS, st.lists(st.floats(0.001, 1.0), max_size=12))
def test_survivals_are_chances_and_never_rise(
    verdicts: list[tuple[list[float], int]], confidences: list[float]
) -> None:
    """Whatever was judged, taking drafts by falling survival takes heads."""
    acceptance = SequenceAcceptance(PooledAcceptance())
    for judged, accepted in verdicts:
        acceptance.observe(judged, len(judged), min(accepted, len(judged)))
    survivals = acceptance.survivals(confidences)
    assert len(survivals) == len(confidences)
    assert all(0.0 <= s <= 1.0 for s in survivals)
    assert survivals == sorted(survivals, reverse=True)


def test_typical_runs_follow_the_offers() -> None:
    """What a drafter's drafts survive on the average is what the next ones are expected to."""
    typical = TypicalRun()
    good, bad = OwnRun(typical), OwnRun(typical)
    for _ in range(200):
        for run, survivals in ((good, [0.9, 0.81, 0.73]), (bad, [0.3, 0.09, 0.03])):
            run.observe(survivals)
            typical.observe(survivals)
    assert good.survivals(3) == pytest.approx([0.9, 0.81, 0.73], rel=0.05)
    assert bad.survivals(3) == pytest.approx([0.3, 0.09, 0.03], rel=0.1)
    assert bad.survivals(5)[4] < 0.01
    assert OwnRun(typical).survivals(1)[0] == pytest.approx(0.6, abs=0.05)
