"""The contract of every fairness policy: a request is selected whenever one waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.flow import FairnessPolicy
from picker.types import Usage
from tests.depth import examples
from tests.support.picker.band_queue import Queue
from tests.support.picker.plugin_scenes import configured, types_of

POLICIES = types_of(FairnessPolicy)
FLOWS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), FLOWS, st.integers(0, 3000)),
        st.tuples(st.just("cancel"), FLOWS, st.just(0)),
        st.tuples(st.just("dispatch"), FLOWS, st.just(0)),
        st.tuples(st.just("complete"), FLOWS, st.integers(0, 10**9)),
        st.tuples(st.just("forget"), FLOWS, st.just(0)),
        st.tuples(st.just("wait"), FLOWS, st.integers(1, 4000)),
    ),
    max_size=80,
)


@pytest.mark.parametrize("plugin", POLICIES)
@examples(40)
@given(steps=STEPS)
def test_a_waiting_flow_is_selected_whenever_one_waits(
    plugin: str, steps: list[tuple[str, str, int]]
) -> None:
    band = Queue(configured(plugin).for_band(0))
    for step, flow, value in steps:
        if step == "push":
            band.push(flow, value)
        elif step == "cancel":
            band.cancel(flow)
        elif step == "dispatch":
            band.dispatch()
        elif step == "complete" and band.under_way:
            usage = Usage(value // 2, value - value // 2) if value % 3 else None
            band.complete(band.under_way[value % len(band.under_way)], usage)
        elif step == "forget":
            band.forget(flow)
        elif step == "wait":
            band.now += value
        selected = band.fairness.select(band.now)
        assert selected == band.fairness.select(band.now)
        assert (selected is None) == (not band.waiting)
        assert selected is None or band.flows[selected]
    left = sum(map(len, band.flows.values()))
    assert len(band.drain()) == left


@pytest.mark.parametrize("plugin", POLICIES)
def test_bands_are_independent(plugin: str) -> None:
    policy = configured(plugin)
    one, other = Queue(policy.for_band(1)), Queue(policy.for_band(0))
    one.push("a")
    assert other.dispatch() is None
    assert one.dispatch() is not None


@pytest.mark.parametrize("plugin", POLICIES)
def test_a_request_may_complete_in_a_new_band(plugin: str) -> None:
    before, after = (Queue(configured(plugin).for_band(0)) for _ in range(2))
    before.push("a", 100)
    item = before.dispatch()
    after.fairness.completed(item, Usage(10, 10), 5.0)
    after.push("b")
    assert after.drain() == "b"


@pytest.mark.parametrize("plugin", POLICIES)
def test_requests_may_be_dispatched_without_waiting(plugin: str) -> None:
    band = Queue(configured(plugin).for_band(0))
    item = band.push("a", 50)
    band.cancel("a")
    band.fairness.dispatched(item, 1.0)
    band.fairness.completed(item, Usage(100, 100), 2.0)
    assert band.fairness.select(3.0) is None
    band.push_all("ab")
    assert sorted(band.drain()) == ["a", "b"]
