"""What scheduling ahead saves, learned on machines whose speed changes."""

from __future__ import annotations

import math
import random

import pytest

from worker.engine.drafters.step_ratios import Lead


def learn(saved: float, num_steps: int, spread: float, jumps: float, seed: int) -> float:
    """The factor after steps of which every sixteenth was asked for drafts, and of one stretch all,
    while the speed jumps.
    """
    rng, lead, level = random.Random(seed), Lead(), 0.0
    for clock in range(1, num_steps + 1):
        if rng.random() < 1 / 30:
            level = rng.gauss(0.0, jumps)
        is_ahead = clock % 16 > 0 and not 100 <= clock % 400 < 160
        seconds = 0.05 * math.exp(level + rng.gauss(0.0, spread)) * (saved if is_ahead else 1.0)
        seconds *= 3.0 if rng.random() < 0.05 else 1.0
        lead.observe(1, seconds, is_ahead, clock)
    return lead.factor


def test_a_machine_whose_speed_jumps_does_not_make_asking_dear() -> None:
    """Steps of different moments are not compared."""
    found = [learn(0.985, 800, spread=0.05, jumps=0.15, seed=seed) for seed in range(40)]
    assert min(found) > 0.965
    assert sum(found) / len(found) == pytest.approx(0.985, abs=0.004)


def test_what_is_saved_is_found_among_jumps() -> None:
    """A fifth is more than what was assumed, and more than noise."""
    found = [learn(0.8, 800, spread=0.05, jumps=0.15, seed=seed) for seed in range(40)]
    assert sum(found) / len(found) == pytest.approx(0.82, abs=0.03)


def test_on_a_quiet_machine_a_few_pairs_tell() -> None:
    """Five steps that waited, among others that did not."""
    lead = Lead()
    for clock in range(1, 17):
        is_ahead = clock % 3 > 0
        lead.observe(4, 0.04 if is_ahead else 0.05, is_ahead, clock)
    assert lead.factor == pytest.approx(0.8, rel=0.03)


def test_a_late_step_or_two_tell_nothing() -> None:
    """One that waited is in two pairs of the first nine."""
    for late in ((3, 9), (3, 7), (2, 10)):
        lead = Lead()
        for clock in range(1, 60):
            seconds = 0.15 if clock in late else 0.05
            lead.observe(1, seconds, clock % 3 > 0, clock)
            assert lead.factor == pytest.approx(0.985, abs=0.03)


@pytest.mark.parametrize("change", ["size", "gap"])
def test_only_steps_of_one_size_in_a_row_are_compared(change: str) -> None:
    """Others differ for more reasons than one."""
    lead = Lead()
    assumed = lead.factor
    for clock in range(1, 100):
        is_ahead = clock % 2 > 0
        size = 2 - is_ahead if change == "size" else 1
        lead.observe(size, 0.05 + 0.05 * is_ahead, is_ahead, clock * (1 + (change == "gap")))
    assert lead.factor == assumed


def test_when_sizes_about_one_were_run_ahead() -> None:
    """Sizes within an eighth count as one."""
    lead = Lead()
    lead.observe(16, 0.05, True, 3)
    lead.observe(17, 0.05, True, 7)
    lead.observe(16, 0.05, False, 9)
    assert lead.seen(16) == (7, 2)
    assert lead.seen(40) == (0, 0)
