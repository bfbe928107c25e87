"""What steps that followed each other say, on a machine whose speed jumps."""

from __future__ import annotations

import math
import random

import pytest

from worker.engine.drafters.step_ratios import Slope
from worker.engine.drafters.step_times import StepTimes


def test_the_slope_is_found_while_the_machine_jumps() -> None:
    """Every thirty steps the speed is another one; what a token adds is not."""
    rng, slope, speed = random.Random(5), Slope(), 1.0
    for now in range(600):
        if now % 30 == 0:
            speed = math.exp(rng.gauss(0.0, 0.3))
        size = 16 + rng.choice((0, 0, 1, 4, 8))
        slope.observe(size, speed * (24 + size) * math.exp(rng.gauss(0.0, 0.05)), now)
    assert slope.at(16) == pytest.approx(1 / 42, rel=0.3)


def test_steps_that_did_not_follow_each_other_say_nothing() -> None:
    """Nor do those of one size; and of what was never seen nothing is said."""
    slope = Slope()
    for now in range(0, 200, 2):
        slope.observe(16 + now % 4, 1.0 + now % 4, now)
    for now in range(200, 300):
        slope.observe(16, 1.0, now)
    assert slope.at(16) == 0.0
    assert slope.at(64) == 0.0


def test_a_curve_measured_at_different_times_does_not_make_drafts_free() -> None:
    """Plain steps were slow for a while, steps with drafts are not since: a draft still costs."""
    times = StepTimes()
    for now in range(40):
        size = 16 if now % 2 else 24
        times.observe(size, 0, 0.002 * (24 + size), False)
    for _ in range(40):
        times.observe(16, 0, 0.30, False)
    for _ in range(6):
        times.observe(24, 0, 0.002 * 48, False)
    assert times.extra(16, 0, 8)[8] >= 0.5 * 0.002 * 8
