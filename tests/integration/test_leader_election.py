"""Two picker processes that elect a leader, with real signals and an API server that goes away."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.kube.elected_pickers import (
    LIMIT_SECONDS,
    elected_pickers,
    until_not_ready,
    until_ready,
)
from tests.support.waiting import until

pytestmark = pytest.mark.full

READY = ("", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")


async def test_a_leader_that_stood_still_or_ends_leads_no_more(tmp_path: Path) -> None:
    async with elected_pickers(tmp_path) as scene:
        for service in READY:
            assert await scene.leader.serving(service)
            assert not await scene.standby.serving(service)
        assert await scene.standby.serving("liveness")
        assert "on standby; the leader is first_" in (await scene.standby.page("/readyz"))[1]
        assert "\npointsman_leader{" in (await scene.standby.page("/metrics"))[1]
        scene.leader.signal(signal.SIGSTOP)
        await until_ready(scene.standby)
        scene.leader.signal(signal.SIGCONT)
        assert (await scene.leader.page("/readyz"))[0] == 503
        await until(scene.leader.stands_by)
        assert await scene.standby.is_ready()
        transitions = scene.transitions
        scene.standby.signal(signal.SIGTERM)
        await until_ready(scene.leader)
        assert not await scene.standby.is_ready()
        status = await asyncio.to_thread(scene.standby.process.wait, LIMIT_SECONDS)
        assert status == 0
        assert scene.transitions == transitions + 1


async def test_without_the_api_server_no_picker_is_ready_and_all_serve(tmp_path: Path) -> None:
    async with elected_pickers(tmp_path) as scene:
        await scene.api.go_away()
        await until_not_ready(scene.leader)
        for one in (scene.leader, scene.standby):
            assert await one.serving("liveness")
            await until(
                lambda one=one: one.page("/readyz"), lambda page: "cannot be renewed" in page[1]
            )
        await scene.api.come_back(forget_changes=True)
        waits = [asyncio.create_task(until_ready(one)) for one in (scene.leader, scene.standby)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        ready = [await one.is_ready() for one in (scene.leader, scene.standby)]
        assert sum(ready) == 1
