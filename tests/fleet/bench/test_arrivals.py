"""Arrival times: rates, ramps and burstiness, checked against their closed forms."""

import math
from random import Random

import numpy as np
import pytest

from fleet.bench.arrivals import Ramp, intended_times

SECONDS = 1000.0


def times(ramp: Ramp, burstiness: float = 1.0) -> list[float]:
    return list(intended_times(ramp, SECONDS, burstiness, Random(1)))


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(
    burstiness: float, spread: float
) -> None:
    """The coefficient of variation of a gamma distribution is one over the root of its shape."""
    gaps = np.diff(times(Ramp(20, 20), burstiness))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


def test_a_regular_stream_is_regular() -> None:
    assert np.diff(times(Ramp(10, 10), math.inf)) == pytest.approx(0.1)
    assert list(intended_times(Ramp(1, 1), 3.0, math.inf, Random(1))) == [1.0, 2.0]


@pytest.mark.parametrize("ramp", [Ramp(2, 18), Ramp(18, 2)])
def test_a_ramp_has_its_share_of_arrivals_in_every_part(ramp: Ramp) -> None:
    """The integral of the rate gives the shares, up and down."""
    found = np.asarray(times(ramp, math.inf))
    assert (np.diff(found) > 0).all()
    for until in (250.0, 500.0, 1000.0):
        area = ramp.first * until + (ramp.last - ramp.first) * until**2 / (2 * SECONDS)
        assert abs((found < until).sum() - area) <= 1.5


def test_a_seed_decides_all_of_them() -> None:
    assert times(Ramp(5, 9), 0.5) == times(Ramp(5, 9), 0.5)
