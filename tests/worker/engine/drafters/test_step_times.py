"""Step times: what a curve learns from noisy times, and what it assumes where it has none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.drafters.step_ratios import bucket
from worker.engine.drafters.step_times import Curve, Speed, StepTimes


def noisy(true: float, rng: random.Random) -> float:
    """A time with 4 % of noise, and one in twenty several times as long."""
    disturbed = rng.uniform(1.5, 4.0) if rng.random() < 0.05 else 1.0
    return true * rng.gauss(1.0, 0.04) * disturbed


@pytest.mark.parametrize(
    "true",
    [
        lambda n: 0.05 + 0.0023 * n,
        lambda n: 0.008 + 0.00008 * max(0, n - 64),
        lambda n: 0.02 * n,
        lambda n: 0.03 if n == 1 else 0.06 + 0.001 * n,
    ],
    ids=["cpu", "gpu", "steep", "cliff"],
)
def test_a_curve_finds_the_true_times_under_noise(true: Callable[[int], float]) -> None:
    """Sizes seen twenty times each are known to a few per cent, whatever the shape."""
    rng = random.Random(1)
    curve = Curve(Speed())
    sizes = [1, 2, 3, 5, 8, 12, 16, 24, 40, 64, 96, 160]
    for clock in range(20 * len(sizes)):
        size = sizes[clock % len(sizes)]
        curve.observe(size, noisy(true(size), rng), clock)
    for size in sizes:
        assert curve.at(size) == pytest.approx(true(size), rel=0.06)


def test_outliers_move_nothing() -> None:
    """A few steps that took ten times as long leave the estimate where it was."""
    curve = Curve(Speed())
    for clock in range(30):
        curve.observe(4, 0.5 if clock % 6 == 5 else 0.05, clock)
    assert curve.at(4) == pytest.approx(0.05, rel=0.02)


def test_a_size_seen_once_is_still_unknown() -> None:
    """A single time, maybe disturbed, does not make a size look dear for good."""
    curve = Curve(Speed())
    for clock in range(10):
        curve.observe(4, 0.05, clock)
    before = curve.at(6)
    curve.observe(6, 0.5, 10)
    assert curve.at(6) == pytest.approx(before)
    curve.observe(6, 0.5, 11)
    assert curve.at(6) == pytest.approx(0.5)


def test_when_the_machine_slows_down_sizes_not_run_move_along() -> None:
    """Twice the time for one size is taken for the machine's, not for that size's own."""
    curve = Curve(Speed())
    for clock in range(60):
        curve.observe(1 if clock % 2 else 5, 0.05 if clock % 2 else 0.06, clock)
    for clock in range(60, 140):
        curve.observe(5, 0.12, clock)
    assert curve.at(5) == pytest.approx(0.12, rel=0.05)
    assert curve.at(1) == pytest.approx(0.10, rel=0.1)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    """A curve does not grow without bound, nor trust what is thousands of steps old."""
    curve = Curve(Speed())
    for clock in range(6):
        curve.observe(300, 9.0, clock)
    assert curve.largest == 300
    for clock in range(6, 5000):
        curve.observe(1 + clock % 3, 0.05, clock)
    assert curve.largest == 3


def test_before_anything_is_measured_the_prior_holds() -> None:
    """Only ratios matter then: 24 tokens cost what a step does anyway."""
    curve = Curve(Speed())
    assert curve.at(48) / curve.at(12) == pytest.approx(72 / 36)
    curve.observe(12, 0.36, 0)
    assert curve.at(12) == pytest.approx(0.36)
    assert curve.at(22) == pytest.approx(0.36 + 10 * 0.01)


def test_times_that_are_none_are_ignored() -> None:
    """Zero, negative and endless times teach nothing."""
    curve = Curve(Speed())
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        curve.observe(3, seconds, 0)
    assert curve.largest == 0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(1e-4, 10.0)), min_size=1, max_size=60),
)
def test_a_curve_never_falls(seen: list[tuple[int, float]]) -> None:
    """Larger sizes never take less time, and none takes no time."""
    curve = Curve(Speed())
    for clock, (size, seconds) in enumerate(seen):
        curve.observe(size, seconds, clock)
    times = [curve.at(size) for size in range(1, 500)]
    assert all(time > 0.0 for time in times)
    assert all(b >= a - 1e-9 * abs(a) for a, b in pairwise(times))


@given(st.integers(1, 100_000))
def test_buckets_are_in_order_and_narrow(size: int) -> None:
    """Sixteen to an octave, each size below 32 alone."""
    assert bucket(size) <= bucket(size + 1) <= bucket(size) + 1
    assert bucket(size + size // 8 + 1) > bucket(size)
    if size < 32:
        assert bucket(size) == size


def test_prompts_tell_what_tokens_cost_beyond_what_was_seen() -> None:
    """On hardware that takes a prompt's tokens in its stride, more drafts are expected to be cheap;
    where prompts are slow, dear.
    """
    slopes = []
    for prompt_seconds in (0.0001, 0.005):
        times = StepTimes()
        for _ in range(10):
            times.observe(4, 0, 0.05, False)
            times.observe(104, 100, 0.05 + 100 * prompt_seconds, False)
        slopes.append((times.decoding(12) - times.decoding(4)) / 8)
    assert slopes == pytest.approx([0.000133, 0.00665], rel=0.01)


def test_beside_a_prompt_a_draft_costs_a_token_of_it() -> None:
    """The room that a flat curve has is taken by the prompt."""
    times = StepTimes()
    for _ in range(40):
        for num_drafts in (0, 4, 8):
            times.observe(4 + num_drafts, 0, 0.05, False, num_drafts)
        times.observe(104, 100, 0.15, False)
    assert times.extra(4, 0, 4)[4] == pytest.approx(0.0, abs=5e-4)
    assert times.extra(4, 100, 4)[4] == pytest.approx(0.004)


def test_what_scheduling_ahead_saves_is_learned() -> None:
    """A plain step is taken to be as short as those of which nobody was asked for drafts."""
    times = StepTimes()
    for _ in range(10):
        times.observe(4, 0, 0.050, False)
    assert 0.045 < times.plain(4) < 0.050
    for step in range(400):
        is_ahead = step % 5 > 1
        times.observe(4, 0, 0.040 if is_ahead else 0.050, is_ahead)
    assert times.plain(4) == pytest.approx(0.040, rel=0.06)
    assert times.decoding(4) == pytest.approx(0.050, rel=0.06)


def test_a_few_noisy_steps_do_not_make_asking_dear() -> None:
    """Where scheduling ahead saves nothing, steps that differ by chance hardly say so."""
    worst = 1.0
    for seed in range(40):
        rng, times = random.Random(seed), StepTimes()
        for step in range(60):
            times.observe(16, 0, 0.07 * math.exp(rng.gauss(0.0, 0.1)), step % 3 > 0)
            worst = max(worst, times.decoding(16) / times.plain(16)) if step > 4 else worst
    assert worst < 1.08


def test_drafting_times_are_learned_by_batch_and_rounds() -> None:
    """Known batches as measured; others are taken to change as plain steps do."""
    times = StepTimes()
    for _ in range(10):
        times.observe(1, 0, 0.05, False)
        times.observe(64, 0, 0.20, False)
        for rounds in (1, 2, 4):
            times.observe_drafting(rounds, 1, 0.002 + 0.003 * rounds)
    assert times.most_rounds == 4
    assert times.drafting(1, 2) == pytest.approx(0.008, rel=0.02)
    assert times.drafting(1, 3) == pytest.approx(0.011, rel=0.02)
    assert times.drafting(64, 2) == pytest.approx(0.032, rel=0.1)
    for _ in range(3):
        times.observe(64, 0, 0.20, False)
        times.observe_drafting(128, 64, 0.5)
    assert times.drafting(64, 2) == pytest.approx(0.5, rel=0.02)


def test_drafts_made_in_a_slow_moment_are_not_dear() -> None:
    """Drafting counts as a part of the step that it follows, so whoever slows both down is out."""
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 0, 0.05, True)
        times.observe(2, 0, 0.052, False, 1)
    for factor in (2.0, 1.9, 2.0, 1.8, 2.0):
        times.observe(2, 0, 0.052 * factor, False, 1)
        times.observe_drafting(1, 1, 0.005 * factor)
    for _ in range(40):
        times.observe(1, 0, 0.05, True)
    assert times.drafting(1, 1) == pytest.approx(0.005, rel=0.15)
