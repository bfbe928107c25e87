"""Rings of samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.admin.history import MAX_SAMPLES, EndpointSample, History, HistoryView
from tests.depth import examples


def view_of(history: History, count: int) -> HistoryView:
    last, keys, taken = history.cut(count)
    return HistoryView(last, endpoints=dict(zip(keys, taken, strict=True)))


VALUES = st.one_of(st.none(), st.integers(0, 10_000).map(float))


def test_a_new_history_is_empty() -> None:
    view = view_of(History(), 5)
    assert (view.last, view.endpoints) == (0, {})
    assert History().latest("a") == EndpointSample()


def test_a_young_endpoint_has_fewer_samples_and_the_newest_is_last() -> None:
    history = History(3)
    for number in range(5):
        samples = {"a": EndpointSample(running=number)}
        if number == 4:
            samples["b"] = EndpointSample(waiting=7.0)
        history.record(samples)
    view = view_of(history, 10)
    assert view.last == 5
    assert view.endpoints["a"].running == (2.0, 3.0, 4.0)
    assert view.endpoints["a"].waiting == (None, None, None)
    assert view.endpoints["b"].waiting == (7.0,)
    assert view_of(history, 2).endpoints["a"].running == (3.0, 4.0)


def test_the_samples_of_an_endpoint_that_left_are_dropped() -> None:
    history = History(3)
    history.record({"a": EndpointSample(running=1.0), "b": EndpointSample(running=1.0)})
    history.record({"b": EndpointSample(running=2.0)})
    assert view_of(history, 3).endpoints.keys() == {"b"}
    assert history.latest("a") == EndpointSample()
    history.record({"a": EndpointSample(running=3.0), "b": EndpointSample(running=3.0)})
    assert view_of(history, 3).endpoints["a"].running == (3.0,)


def test_values_are_rounded() -> None:
    history = History()
    history.record({"a": EndpointSample(kv_cache_usage=0.30000001)})
    assert view_of(history, 1).endpoints["a"].kv_cache_usage == (0.3,)


@examples(50)
@given(st.lists(VALUES, max_size=30), st.integers(1, 7), st.integers(1, 10))
def test_a_ring_is_the_end_of_a_list(values: list[float | None], size: int, count: int) -> None:
    history = History(size)
    for value in values:
        history.record({"a": EndpointSample(inflight=value)})
    shown = view_of(history, count).endpoints.get("a")
    assert (shown.inflight if shown else ()) == tuple(values[-min(size, count) :])
    assert history.latest("a").inflight == pytest.approx(values[-1] if values else None)


def test_a_view_of_many_endpoints_is_bounded() -> None:
    history = History(4)
    samples = {str(number): EndpointSample(running=number) for number in range(MAX_SAMPLES // 2)}
    for _ in range(3):
        history.record(samples)
    assert view_of(history, 4).endpoints["7"].running == (7.0, 7.0)


def test_samples_that_are_added_meanwhile_do_not_show() -> None:
    """Its turns let the ring wrap, and endpoints leave and join meanwhile."""
    history = History(4)
    for number in range(3):
        history.record({"a": EndpointSample(running=number), "gone": EndpointSample(running=9.0)})
    last, keys, taken = history.cut(3)
    for number in (3, 4):
        history.record({"a": EndpointSample(running=number), "new": EndpointSample()})
    assert (last, keys) == (3, ["a", "gone"])
    a, gone = taken
    assert a.running == (1.0, 2.0)  # the first one has been overwritten
    assert gone.running == (9.0, 9.0, 9.0)
