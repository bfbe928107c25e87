"""A real Envoy that knows only the endpoints that a real picker publishes."""

from pathlib import Path

import pytest

from tests.support.fleet.eds_scene import discovery_scene

pytestmark = [pytest.mark.envoy, pytest.mark.usefixtures("patient_envoy"), pytest.mark.full]
VARIANTS = pytest.mark.parametrize("is_delta", [False, True], ids=["sotw", "delta"])


@VARIANTS
async def test_endpoints_come_and_go_and_the_picker_is_lost_without_a_failed_request(
    tmp_path: Path, is_delta: bool
) -> None:
    async with discovery_scene(tmp_path, is_delta) as (scene, (a, b, c)), scene.clients():
        scene.list_workers(a, b)
        await scene.until_members(2)
        await scene.until_serves(b)
        assert [await scene.ask(b) for _ in range(20)] == ["b"] * 20

        scene.list_workers(b)
        await scene.until_members(1)
        await scene.answered(10)  # what was under way to it is over
        served = a.served
        assert set(await scene.answered(40)) == {"b"}
        assert a.served == served

        await scene.picker.kill()
        assert set(await scene.answered(20)) == {"b"}
        assert await scene.envoy.healthy("pool") == 1
        scene.list_workers(b, c)
        await scene.picker.start()
        await scene.until_members(2)
        await scene.until_serves(c)
        assert [await scene.ask(c) for _ in range(20)] == ["c"] * 20

        assert await scene.series("pointsman_xds_nacks_total") == 0
        assert await scene.series("pointsman_xds_acks_total") >= 1
        assert await scene.series("pointsman_xds_clients") == 1
        assert await scene.series("pointsman_xds_endpoints") == 2
    assert set(scene.answers) <= {"a", "b", "c"}


async def test_a_stream_outlives_its_endpoints_place_in_the_pool(tmp_path: Path) -> None:
    async with discovery_scene(tmp_path) as (scene, (a, b, _)):
        async with scene.stream(a) as response:
            scene.list_workers(a, b)
            await scene.until_members(2)
            scene.list_workers(b)
            await scene.until_members(1)
            assert [await scene.ask() for _ in range(10)] == ["b"] * 10
            scene.list_workers()
            await scene.until_members(0)
            assert (await scene.ask()).startswith("503")
            await scene.picker.kill()
            await scene.picker.start()
            scene.list_workers(b)
            await scene.until_members(1)
            a.go_on.set()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await scene.access_log("endpoint=a")
        await scene.access_log("endpoint=b")
