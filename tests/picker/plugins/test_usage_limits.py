"""Usage limits: the share of the pool for each priority."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.flow import UsageLimitPolicy
from picker.plugins.usage_limits import SoftReflectiveCeilingPolicy
from tests.depth import examples
from tests.support.picker.plugin_scenes import configured

STATIC = "static-usage-limit-policy"
HOLDBACK = "priority-holdback-policy"
VALUE = {"minCeiling": 0.5, "domain": "value"}


@pytest.mark.parametrize(
    ("plugin", "parameters", "priorities", "expected"),
    [
        (STATIC, {}, [3, 0, -1], [1.0, 1.0, 1.0]),
        (STATIC, {"threshold": 0.8}, [3, 0], [0.8, 0.8]),
        (HOLDBACK, {"minCeiling": 0.5}, [7], [1.0]),
        (HOLDBACK, {"minCeiling": 0.5}, [100, 10, 0], [1.0, 0.75, 0.5]),
        (HOLDBACK, {"minCeiling": 0.2, "maxCeiling": 0.8}, [1, 0], [0.8, 0.2]),
        (HOLDBACK, VALUE, [100, 10, 0], [1.0, 0.55, 0.5]),
        (HOLDBACK, VALUE, [0, -10], [1.0, 0.5]),
        (HOLDBACK, VALUE, [4], [1.0]),
        (HOLDBACK, {**VALUE, "maxCeiling": 0.9}, [2, 1, 0], [0.9, 0.7, 0.5]),
    ],
)
def test_ceilings_follow_the_formula(
    plugin: str, parameters: dict[str, Any], priorities: list[int], expected: list[float]
) -> None:
    policy = configured(plugin, parameters)
    assert isinstance(policy, UsageLimitPolicy)
    assert policy.ceilings(0.7, priorities) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("saturation", "times", "expected"),
    [
        (0.0, 1, [1.0, 1.0, 1.0]),
        (0.49, 1, [1.0, 1.0, 1.0]),
        (0.5, 1, [1.0, 1.0, 1.0]),  # the lowest is below its ceiling every time
        (0.62, 1, [1.0, 1.0, 0.0]),
        (0.62, 2, [1.0, 1.0, 1.0]),  # round(0.62 / 0.38) = 2
        (0.75, 2, [1.0, 0.0, 0.0]),
        (0.75, 3, [1.0, 1.0, 1.0]),
        (0.9, 8, [1.0, 0.0, 0.0]),
        (0.9, 9, [1.0, 1.0, 1.0]),
        (1.0, 4, [1.0, 0.0, 0.0]),
        (1.7, 1, [1.0, 0.0, 0.0]),
    ],
)
def test_lower_priorities_are_dispatched_less_often_in_a_fuller_pool(
    saturation: float, times: int, expected: list[float]
) -> None:
    policy = SoftReflectiveCeilingPolicy()
    found = [policy.ceilings(saturation, [2, 1, 0]) for _ in range(times)]
    assert found[-1] == expected


def test_a_single_priority_may_fill_the_pool() -> None:
    assert SoftReflectiveCeilingPolicy().ceilings(0.99, [-5]) == [1.0]


@examples(60)
@given(
    saturation=st.floats(0, 3),
    priorities=st.lists(st.integers(-1000, 1000), min_size=1, max_size=8, unique=True),
    domain=st.sampled_from(["rank", "value"]),
)
def test_a_lower_priority_never_has_the_higher_ceiling(
    saturation: float, priorities: list[int], domain: str
) -> None:
    ordered = sorted(priorities, reverse=True)
    holdback = configured(HOLDBACK, {"minCeiling": 0.1, "maxCeiling": 0.9, "domain": domain})
    for policy in (configured(STATIC), holdback, SoftReflectiveCeilingPolicy()):
        assert isinstance(policy, UsageLimitPolicy)
        ceilings = policy.ceilings(saturation, ordered)
        assert len(ceilings) == len(ordered)
        assert all(higher >= lower - 1e-12 for higher, lower in pairwise(ceilings))
        assert ceilings[0] == (0.9 if policy is holdback else 1.0)
