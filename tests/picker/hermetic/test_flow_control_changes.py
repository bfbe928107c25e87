"""Requests that wait while the picker is reconfigured or ended, and requests that are stopped."""

from pathlib import Path

import pytest

from tests.support.picker.waiting_requests import (
    FAIRNESS,
    OBJECTIVE,
    config,
    headers_of,
    status_of,
    waiting_scene,
)
from tests.support.waiting import until

PRIORITIES = {"critical": 10, "sheddable": -5}
REASON = "x-llm-d-request-dropped-reason"


async def test_disabled_flow_control_holds_no_request(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config()) as scene:
        requests = [await scene.serve(), await scene.wait(1), await scene.wait(2)]
        scene.use(config(gate=False))
        for waiter in requests[1:]:
            await waiter.destination()
        requests.append(await scene.serve())
        for waiter in requests:
            await waiter.end()
        await scene.is_at_rest()


async def test_enabled_flow_control_counts_requests_in_flight(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config(gate=False)) as scene:
        before = [await scene.serve(), await scene.serve()]
        scene.use(config())
        waiter = await scene.wait(1)
        await before[0].end()
        assert waiter.waits
        await before[1].end()
        await waiter.destination()
        await waiter.end()
        await scene.is_at_rest()


async def test_a_drain_serves_waiting_requests(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config()) as scene:
        requests = [await scene.serve(), await scene.wait(1)]
        scene.picker.picker.stop()
        await until(lambda: scene.picker.get("/readyz"), lambda found: found[0] == 503)
        assert requests[1].waits
        for waiter in requests:
            await waiter.destination()
            await waiter.end()


@pytest.mark.parametrize("is_hurried", [True, False])
async def test_an_expired_drain_refuses_waiting_requests(tmp_path: Path, is_hurried: bool) -> None:
    seconds = 30.0 if is_hurried else 0.05
    async with waiting_scene(tmp_path, config(), drain_timeout_seconds=seconds) as scene:
        await scene.serve()
        waiter = await scene.wait(1)
        scene.picker.picker.stop()
        if is_hurried:
            scene.picker.picker.stop()
        reply = await waiter.answer()
        assert status_of(reply) == 503
        assert headers_of(reply)[REASON] == "rejected-shutting-down"
        assert int(headers_of(reply)["retry-after"]) >= 1


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_request_in_flight_is_evicted_for_a_better_one(
    tmp_path: Path, is_streaming: bool
) -> None:
    """A proxy turns the 429 into a reset once the response has begun."""
    text = config("  enableEviction: true")
    async with waiting_scene(tmp_path, text, objectives=PRIORITIES) as scene:
        victim = await scene.serve({OBJECTIVE: "sheddable", FAIRNESS: "batch"})
        if is_streaming:
            await victim.stream.response_headers({"content-type": "text/event-stream"})
            await victim.stream.response_body(b'data: {"x":1}\n\n')
            assert len(await victim.stream.read(1)) == 1
        better = await scene.ask({OBJECTIVE: "critical"})
        reply = await victim.stream.read(1)
        assert status_of(reply) == 429
        assert headers_of(reply)[REASON].startswith("evicted")
        assert headers_of(reply)["retry-after"] == "1"
        assert await victim.stream.read(1) == []
        await better.destination()
        await better.end()
        await scene.is_at_rest()
        assert await scene.picker.outcomes() == {"evicted": 1, "completed": 1}
        errors = {"error_code": "ResourceExhausted", "priority": "-5"}
        assert await scene.picker.series("llm_d_epp_request_error_total", **errors) == 1
