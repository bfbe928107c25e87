"""How many drafts are the most tokens a second, and which sizes of steps are used."""

from __future__ import annotations

import pytest

from worker.engine.drafters.plans import Costs, choose_verified, is_common_size

FREE = Costs(16, 1.0, 1.0, [0.0] * 200, [0.0] * 200, 1.0)  # a draft costs nothing


def test_few_sizes_are_common_and_the_closer_together_the_smaller() -> None:
    """All up to 16, every fourth up to 64, every eighth up to 128, and so on."""
    common = [size for size in range(1, 300) if is_common_size(size)]
    assert common[:16] == list(range(1, 17))
    assert [size for size in common if 16 < size <= 64] == list(range(20, 65, 4))
    assert [size for size in common if 64 < size <= 128] == list(range(72, 129, 8))
    assert [size for size in common if size > 128] == [*range(144, 257, 16), 288]


@pytest.mark.parametrize(("num_drafts", "verified"), [(3, 0), (4, 4), (7, 4), (8, 8), (60, 56)])
def test_drafts_fill_a_step_up_to_a_common_size(num_drafts: int, verified: int) -> None:
    """With sixteen sequences: what is left over is not verified, however likely."""
    assert choose_verified([0.9] * num_drafts, FREE).total == verified


def test_where_sizes_are_regular_anyway_every_size_is_used() -> None:
    """A device drafter makes as many drafts for each sequence."""
    assert choose_verified([0.9] * 7, FREE, any_size=True).total == 7


def test_one_sequence_has_any_number_verified() -> None:
    """Small steps are all common."""
    assert choose_verified([0.9] * 11, Costs(1, 1.0, 1.0, [0.0] * 20, [0.0] * 20, 1.0)).total == 11


def test_drafts_must_repay_what_they_may_cost_not_what_they_are_expected_to() -> None:
    """What is not known of their cost counts against them."""
    dear = [0.05 * number for number in range(20)]
    cheap = [0.01 * number for number in range(20)]
    assert choose_verified([0.5] * 8, Costs(16, 1.0, 1.0, cheap, cheap, 1.0)).total == 8
    assert choose_verified([0.5] * 8, Costs(16, 1.0, 1.0, dear, cheap, 1.0)).total == 0
