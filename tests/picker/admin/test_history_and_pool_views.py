"""The pages of a pool: sampled once a second, and of very many endpoints beside the requests."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from picker.admin.history import EndpointSample, PoolSample
from picker.admin.views import EndpointsView
from picker.types import ServedTotals
from tests.support.picker.admin_scene import QUEUES, Scene


def test_a_sample_holds_what_is_known() -> None:
    """Load as it was scraped, requests as they were counted here."""
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


def test_a_sample_of_the_pool_holds_what_workers_report() -> None:
    """Times to the first token, and tokens, between two looks."""
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


@pytest.mark.looptime
async def test_a_minute_is_sixty_samples() -> None:
    scene = Scene()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.5):
            await scene.pages.watch()
    assert scene.pages.history.cut(1)[0] == 60


async def test_others_get_their_turn_while_a_thousand_endpoints_are_shown() -> None:
    """And what is shown is of one moment, though samples are taken meanwhile."""
    scene = Scene()
    history = scene.pages.history
    names = [f"worker-{number}" for number in range(1000)]
    scene.pool(*names)
    keys = [f"default/{name}" for name in names]
    for second in range(3):
        history.record(dict.fromkeys(keys, EndpointSample(running=second)))
    routes = {route.path: route for route in scene.pages.routes(lambda: True)}
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            history.record(dict.fromkeys(keys, EndpointSample(running=99)))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        working = group.create_task(work())
        request = make_mocked_request("GET", "/endpoints?history=3")
        answer = await routes["/endpoints"].handler(request)  # type: ignore[misc]
        working.cancel()
    assert turns > 20
    view = msgspec.json.decode(answer.body, type=EndpointsView)
    assert [one.key for one in view.endpoints] == keys
    assert view.history.last == 3
    assert {one.running for one in view.history.endpoints.values()} == {(0.0, 1.0, 2.0)}
