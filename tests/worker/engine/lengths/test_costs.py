"""The table of step times: what corrects it, and what does not."""

import random

import pytest

from worker.engine.lengths.costs import StepCosts
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
