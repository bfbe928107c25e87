"""Rings of samples, and the views of many endpoints in turns with requests."""

import asyncio
import contextlib

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.admin.history import MAX_SAMPLES, EndpointSample, History, HistoryView, PoolSample
from picker.admin.views import EndpointsView
from picker.flowcontrol.views import QueuesView
from picker.types import ServedTotals
from tests.depth import examples
from tests.support.picker.admin_scene import QUEUES, Scene, decision, other_task


def view_of(history: History, count: int) -> HistoryView:
    last, keys, taken = history.cut(count)
    return HistoryView(last, endpoints=dict(zip(keys, taken, strict=True)))


async def shown(scene: Scene, query: str) -> EndpointsView:
    routes = {route.path: route for route in scene.pages.routes(lambda: True)}
    request = make_mocked_request("GET", f"/endpoints{query}")
    answer = await routes["/endpoints"].handler(request)  # type: ignore[misc]
    return msgspec.json.decode(answer.body, type=EndpointsView)


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


def test_a_sample_has_the_scraped_load_and_the_counted_requests() -> None:
    scene = Scene()
    scene.pool("a", "b")
    scene.load("a", running=1, waiting=2, cache=0.25)
    scene.inflight.acquire("default/a")
    scene.decide("a", 64, 16)
    scene.pages.sample()
    assert scene.pages.history.latest("default/a") == EndpointSample(
        *(1, 2, 0.25, 0.25, 1, 1.0), failures_per_second=0.0
    )
    assert scene.pages.history.latest("default/b") == EndpointSample(
        prefix_hit_share=None, inflight=0, requests_per_second=0.0, failures_per_second=0.0
    )


def test_a_sample_of_the_pool_has_the_workers_first_tokens_and_tokens() -> None:
    scene = Scene()
    scene.pool("a", "b")
    scene.load("a", running=1, waiting=2, cache=0.25, served=ServedTotals(0, 0, (0.1,), (0, 0)))
    scene.pages.sample()
    scene.load("a", running=1, waiting=2, cache=0.25, served=ServedTotals(2, 9, (0.1,), (4, 0)))
    scene.decide("a", 64, 16)
    scene.pages.sample()
    assert scene.pages.history.latest_pool == PoolSample(
        *(0.5, 0.0, 0.0, 0.05, 0.095, 4.5, 1, 2), queued=QUEUES.queued_requests
    )
    assert scene.pages.history.latest("default/a").ttft_p95_seconds == 0.095
    assert scene.pages.history.pool(5).running == (1.0, 1.0)


def test_the_pools_time_to_first_token_includes_the_wait_in_the_picker() -> None:
    scene = Scene()
    scene.pool("a")
    scene.load("a", running=1, waiting=2, cache=0.25, served=ServedTotals(0, 0, (0.1,), (0, 0)))
    scene.pages.sample()
    scene.load("a", running=1, waiting=2, cache=0.25, served=ServedTotals(2, 9, (0.1,), (8, 0)))
    for _ in range(8):
        one = replace(decision("a", 64, None), decision_seconds=1.5)
        scene.source.counted.decided(one)
    scene.pages.sample()
    latest = scene.pages.history.latest_pool
    assert latest.ttft_p50_seconds == pytest.approx(1.55)
    assert latest.ttft_p95_seconds == pytest.approx(1.595)
    assert latest.queue_wait_p95_seconds == pytest.approx(1.5)
    assert scene.pages.history.latest("default/a").ttft_p95_seconds == pytest.approx(0.095)


@pytest.mark.parametrize(("query", "expected"), [("?history=2", (4, 1, 1, 14)), ("", (9, 3, 0, 0))])
async def test_numbers_beside_a_history_are_those_of_its_last_sample(
    query: str, expected: tuple[int, ...]
) -> None:
    scene = Scene()
    scene.pool("a")
    scene.load("a", running=4, waiting=2, cache=0.25)
    scene.inflight.acquire("default/a")
    scene.pages.sample()
    scene.load("a", running=9, waiting=0, cache=0.5)
    for _ in range(2):
        scene.inflight.acquire("default/a")
    scene.source.queues_view = QueuesView(True, queued_requests=3)
    view = await shown(scene, query)
    [one] = view.endpoints
    history = view.history or HistoryView()
    found = (one.metrics.running_requests, one.inflight_requests, history.last)
    assert (*found, history.queues.queued_requests) == expected
    if view.history is not None:
        assert view.history.endpoints[one.key].running == (4.0,)
        assert view.history.pool.queued == (14.0,)


@pytest.mark.looptime
async def test_a_minute_is_sixty_samples() -> None:
    scene = Scene()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.5):
            await scene.pages.watch()
    assert scene.pages.history.cut(1)[0] == 60


async def test_a_view_of_a_thousand_endpoints_yields_to_other_tasks() -> None:
    scene = Scene()
    history = scene.pages.history
    names = [f"worker-{number}" for number in range(1000)]
    scene.pool(*names)
    keys = [f"default/{name}" for name in names]
    for second in range(3):
        history.record(dict.fromkeys(keys, EndpointSample(running=second)))
    other = dict.fromkeys(keys, EndpointSample(running=99))
    async with other_task(lambda: history.record(other)) as turns:
        view = await shown(scene, "?history=3")
    assert len(turns) > 20
    assert [one.key for one in view.endpoints] == keys
    assert view.history.last == 3
    assert {one.running for one in view.history.endpoints.values()} == {(0.0, 1.0, 2.0)}
