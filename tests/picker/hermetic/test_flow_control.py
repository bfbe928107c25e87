"""Flow control in a whole picker: waiting, order of dispatch and refusals."""

from pathlib import Path

import pytest

from tests.support.picker.metrics_pages import page, pods, serving
from tests.support.picker.waiting_requests import config, waiting_scene

PRIORITIES = {"critical": 10, "standard": 0, "sheddable": -5}


async def test_a_full_pool_holds_requests_until_a_slot_is_free(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config()) as scene:
        first = await scene.serve()
        second = await scene.wait(1)
        third = await scene.wait(2)
        assert second.waits
        await first.end()
        assert await second.destination() == scene.picker.pods[0].host_port
        await scene.has_waiting(1)
        assert third.waits
        await second.end()
        await third.destination()
        await third.end()
        await scene.is_at_rest()
        assert await scene.picker.outcomes() == {"completed": 3}


async def test_requests_wait_for_an_empty_pool(tmp_path: Path) -> None:
    async with waiting_scene(tmp_path, config(), []) as scene:
        assert (await scene.picker.get("/readyz"))[0] == 200
        waiter = await scene.wait(1)
        (pod,) = pods(page())
        async with serving(pod):
            scene.picker.list_endpoints([pod])
            assert await waiter.destination() == pod.host_port
            await waiter.end()
            await scene.is_at_rest()


@pytest.mark.parametrize("is_known", [True, False])
async def test_unreadable_metrics_do_not_stop_a_pool(tmp_path: Path, is_known: bool) -> None:
    text = config().replace("pluginRef: concurrency-detector", "pluginRef: utilization-detector")
    (pod,) = pods(page() if is_known else None)
    async with waiting_scene(
        tmp_path, text, [pod], metrics_staleness_threshold_seconds=0.2
    ) as scene:
        pod.page = None
        await scene.picker.knows(pod.name)
        for _ in range(3):
            waiter = await scene.serve()
            await waiter.end()
        await scene.is_at_rest()
