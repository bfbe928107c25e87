"""Two picker processes that elect a leader: real signals, a lost API server, and a real Envoy."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from fleet.envoy.bootstrap import build, pickers_document, to_yaml
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from tests.support.fleet.envoy_process import EnvoyProcess
from tests.support.kube.elected_pickers import (
    LIMIT_SECONDS,
    ElectedPicker,
    elected_pickers,
    until_not_ready,
    until_ready,
)
from tests.support.local_ports import free_port
from tests.support.waiting import until
from tests.support.web_server import for_all_paths, serving

pytestmark = pytest.mark.full

LOOPBACK = "127.0.0.1"
BODY = {"model": "sim", "prompt": "hello"}
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


async def _answer(request: web.Request) -> web.Response:
    if request.path != "/metrics":
        await request.read()
        return web.json_response({"choices": []})
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    return web.Response(text="".join(f"vllm:{name} 0\n" for name in names))


def _bootstrap(folder: Path, ports: list[int], worker: int, *pickers: ElectedPicker) -> str:
    known = folder / "pickers.yaml"
    addresses = [
        (SocketAddress(LOOPBACK, one.grpc), SocketAddress(LOOPBACK, one.health)) for one in pickers
    ]
    known.write_text(pickers_document(addresses))
    config = BootstrapConfig(
        listen=SocketAddress(LOOPBACK, ports[0]),
        admin=SocketAddress(LOOPBACK, ports[1]),
        picker=addresses[0][0],
        endpoints=(SocketAddress(LOOPBACK, worker),),
        pickers_file=str(known),
        buffer_request_body=True,
    )
    return to_yaml(build(config))


@pytest.mark.envoy
async def test_no_request_fails_while_a_leader_is_killed(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    async with (
        serving(for_all_paths(_answer)) as worker,
        elected_pickers(tmp_path, pods=(LOOPBACK,), port=worker) as scene,
    ):
        envoy = EnvoyProcess(tmp_path, ports[1])
        await envoy.start(_bootstrap(tmp_path, ports, worker, scene.leader, scene.standby))
        answers: list[int] = []
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://{LOOPBACK}:{ports[0]}/v1/completions"

                async def ask() -> int:
                    try:
                        async with session.post(url, json=BODY) as answer:
                            await answer.read()
                            return answer.status
                    except aiohttp.ClientError:
                        return 0

                async def decides(one: ElectedPicker) -> bool:
                    before = await _decided(one)
                    answers.append(await ask())
                    return await _decided(one) > before

                await until(lambda: decides(scene.leader))
                answers.clear()
                assert await _decided(scene.standby) == 0, "a standby is sent nothing"
                load = asyncio.create_task(_steadily(ask, answers))
                await until(lambda: len(answers) >= 20)
                scene.leader.signal(signal.SIGKILL)
                await until_ready(scene.standby)
                assert scene.transitions == 1
                await until(lambda: decides(scene.standby))
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
        finally:
            await envoy.stop()
    assert len(answers) > 20
    assert set(answers) == {200}


async def _steadily(ask: Callable[[], Awaitable[int]], answers: list[int]) -> None:
    while True:
        answers.append(await ask())
        await asyncio.sleep(0.01)


async def _decided(one: ElectedPicker) -> float:
    lines = (await one.page("/metrics"))[1].splitlines()
    counts = [line for line in lines if line.startswith("llm_d_epp_request_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)
