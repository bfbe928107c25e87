"""What steps that followed each other say of drafts, on a machine whose speed jumps."""

from __future__ import annotations

import math
import random

import pytest

from worker.engine.drafters.draft_costs import DecodingStep, DraftCosts
from worker.engine.drafters.step_times import StepTimes

ASSUMED = 0.025
ANY, EACH = 0.05, 0.02


def observed(
    num_steps: int,
    noise: float,
    each: float = EACH,
    any_drafts: float = ANY,
    seed: int = 5,
    jumps: float = 0.4,
) -> DraftCosts:
    """What is known after so many steps of sixteen, of which every thirtieth changes the speed."""
    rng, costs, speed = random.Random(seed), DraftCosts(), 1.0
    for now in range(num_steps):
        if now % 30 == 0:
            speed = math.exp(rng.gauss(0.0, jumps))
        drafts = rng.choice((0, 0, 1, 4, 8))
        seconds = speed * (1.0 + (any_drafts if drafts else 0.0) + each * drafts)
        seconds *= math.exp(rng.gauss(0.0, noise))
        costs.observe(DecodingStep(16, drafts, seconds, now), ASSUMED)
    return costs


def test_costs_are_found_while_the_machine_jumps() -> None:
    """What any drafts cost and what each does, and no more than a little is added."""
    found = observed(600, 0.05).of(16, ASSUMED)
    assert found.any == pytest.approx(ANY, abs=0.02)
    assert found.each == pytest.approx(EACH, rel=0.25)
    assert found.expected(8) < found.at_most(8) < 1.2 * (ANY + 8 * EACH)
    assert found.expected(0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_one_late_step_decides_nothing(seed: int) -> None:
    """A step that took three times as long beside drafts, or without any: the cost stays sane."""
    costs = observed(100, 0.1, seed=seed)
    before = costs.of(16, ASSUMED).expected(4)
    for now, (drafts, seconds) in enumerate(((0, 1.0), (4, 3.5), (0, 1.0), (0, 3.0), (4, 1.1))):
        costs.observe(DecodingStep(16, drafts, seconds, 1000 + now), ASSUMED)
    assert costs.of(16, ASSUMED).expected(4) == pytest.approx(before, abs=0.08)


def test_a_quiet_machine_tells_soon_that_drafts_are_free() -> None:
    """After 150 steps: a quarter of what was assumed, with all caution."""
    found = observed(150, 0.01, each=0.0005, any_drafts=0.0, jumps=0.0).of(16, ASSUMED)
    assert found.at_most(8) < 8 * ASSUMED / 4


def test_a_busy_machine_does_not() -> None:
    """Where steps differ by half for no reason, a few of them do not make drafts free."""
    for seed in range(10):
        found = observed(12, 0.5, each=0.0005, any_drafts=0.0, seed=seed).of(16, ASSUMED)
        assert found.at_most(8) > 8 * ASSUMED / 2


def test_what_is_assumed_wrongly_is_unlearnt() -> None:
    """Ten times too much or too little at first; after three hundred steps it is right."""
    for each in (ASSUMED / 10, ASSUMED * 3):
        found = observed(300, 0.05, each=each, any_drafts=0.0).of(16, ASSUMED)
        assert found.expected(8) == pytest.approx(8 * each, rel=0.3, abs=0.03)


def test_having_drafts_makes_no_step_cheaper() -> None:
    """Whatever chance says."""
    for seed in range(20):
        found = observed(10, 0.3, seed=seed).of(16, ASSUMED)
        assert found.any >= 0.0
        assert found.at_most(1) > found.expected(1)


def test_steps_that_did_not_follow_each_other_say_nothing() -> None:
    """Nor do those with as many drafts, or of other numbers of sequences; nor of other sizes."""
    costs, nothing = DraftCosts(), DraftCosts().of(16, ASSUMED)
    for now in range(0, 100, 2):
        costs.observe(DecodingStep(16, now % 4, 1.0 + now % 4, now), ASSUMED)
    for now in range(200, 300):
        costs.observe(DecodingStep(16, 4, 1.0 + now % 2, now), ASSUMED)
    for now in range(400, 500):
        costs.observe(DecodingStep(16 + now % 2, 4 * (now % 2), 1.0 + now % 2, now), ASSUMED)
    assert costs.of(16, ASSUMED) == nothing
    assert observed(100, 0.05).of(64, ASSUMED) == nothing
    assert nothing.expected(4) == pytest.approx(4 * ASSUMED)


def alternating(
    num_steps: int, cliff: float, seed: int, num_sequences: int = 1, late: float = 0.0
) -> DraftCosts:
    """Six plain steps and six with two drafts, in turn, on a noisy machine; drafts add `cliff`. So
    many of the steps, as a part, take three times as long.
    """
    rng, costs = random.Random(seed), DraftCosts()
    for now in range(num_steps):
        drafts = 2 if now // 6 % 2 else 0
        seconds = (1.0 + (cliff if drafts else 0.0)) * math.exp(rng.gauss(0.0, 0.08))
        seconds *= 3.0 if rng.random() < late else 1.0
        costs.observe(DecodingStep(num_sequences, drafts, seconds, now), ASSUMED)
    return costs


@pytest.mark.parametrize("seed", range(5))
def test_with_few_sequences_a_cliff_is_found_soon(seed: int) -> None:
    """Where one token is quick and several take twice as long: seen four times, it is known."""
    assert alternating(60, 1.0, seed).of(1, ASSUMED).expected(2) == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_late_steps_do_not_make_drafts_dear(seed: int) -> None:
    """One step in twelve takes three times as long: no cliff, and so drafts go on."""
    assert alternating(400, 0.06, seed, late=1 / 12).of(1, ASSUMED).expected(2) < 0.3


def test_few_and_more_sequences_are_learned_apart() -> None:
    """What is found with four says nothing of five."""
    costs = alternating(60, 1.0, 1, num_sequences=4)
    assert costs.of(2, ASSUMED).expected(2) > 0.6
    assert costs.of(5, ASSUMED) == DraftCosts().of(5, ASSUMED)


def test_a_curve_measured_at_different_times_does_not_make_drafts_free() -> None:
    """Plain steps were slow for a while, steps with drafts are not since: a draft still costs."""
    times = StepTimes()
    for now in range(40):
        drafts = 0 if now % 2 else 8
        times.observe(16 + drafts, 0, 0.002 * (40 + drafts), False, drafts)
    for _ in range(40):
        times.observe(16, 0, 0.30, False)
    for _ in range(6):
        times.observe(24, 0, 0.002 * 48, False, 8)
    assert times.extra(16, 0, 8)[8] >= 0.5 * 0.002 * 8


def test_prompts_tell_what_drafts_will_cost() -> None:
    """Before any was verified, and if the prompt came before everything else."""
    for prompt_seconds in (0.00001, 0.002):
        times = StepTimes()
        times.observe(500, 500, 0.05 + 500 * prompt_seconds, False)
        for _ in range(4):
            times.observe(16, 0, 0.05, True)
        cost = times.extra(16, 0, 8, is_cautious=False)[8]
        assert cost == pytest.approx(8 * 1.33 * prompt_seconds, rel=0.35, abs=0.0005)
