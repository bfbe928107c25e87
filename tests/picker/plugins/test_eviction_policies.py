"""Eviction policies: the requests that may be stopped, and their order."""

import pytest

from picker.framework.flow import EvictionFilter, EvictionOrder
from tests.support.picker.plugin_scenes import configured, queued


@pytest.mark.parametrize(
    ("priority", "expected"), [(-10, True), (-1, True), (0, False), (7, False)]
)
def test_only_negative_priorities_may_be_stopped(priority: int, expected: bool) -> None:
    policy = configured("sheddable-eviction-filter")
    assert isinstance(policy, EvictionFilter)
    assert policy.is_evictable(queued(priority=priority)) is expected


def test_the_lowest_priority_goes_first_and_then_the_youngest() -> None:
    policy = configured("priority-then-time-eviction-order-policy")
    assert isinstance(policy, EvictionOrder)
    under_way = [(-1, 5.0), (-1, 9.0), (-3, 1.0), (-3, 2.0)]
    order = sorted(under_way, key=lambda one: policy.rank(queued(priority=one[0], at=9.0), one[1]))
    assert order == [(-3, 2.0), (-3, 1.0), (-1, 9.0), (-1, 5.0)]
