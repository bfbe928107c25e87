"""Telling of very many endpoints, beside the requests."""

from __future__ import annotations

import asyncio

import msgspec
from admin_scene import Scene
from aiohttp.test_utils import make_mocked_request

from picker.admin.endpoint_routes import EndpointRoutes
from picker.admin.endpoint_views import EndpointsView
from picker.admin.history import History, Sample


async def test_others_get_their_turn_while_a_thousand_endpoints_are_told() -> None:
    """And what is told is of one moment, though samples are taken meanwhile."""
    scene, history = Scene(), History()
    names = [f"worker-{number}" for number in range(1000)]
    scene.pool(*names)
    keys = [f"default/{name}" for name in names]
    for second in range(3):
        history.record(dict.fromkeys(keys, Sample(running=second)))
    routes = EndpointRoutes(scene.datastore, scene.inflight, scene.source, history)
    (route,) = routes.routes()
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            history.record(dict.fromkeys(keys, Sample(running=99)))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        working = group.create_task(work())
        answer = await route.handler(make_mocked_request("GET", "/endpoints?history=3"))  # type: ignore[misc]
        working.cancel()
    assert turns > 20
    view = msgspec.json.decode(answer.body, type=EndpointsView)
    assert [one.key for one in view.endpoints] == keys
    assert view.history is not None
    assert view.history.last == 3
    assert {one.running for one in view.history.endpoints.values()} == {(0.0, 1.0, 2.0)}
