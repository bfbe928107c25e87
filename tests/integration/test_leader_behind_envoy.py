"""A real Envoy in front of two pickers that elect a leader, and requests while it is killed."""

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
from tests.support.kube.elected_pickers import ElectedPicker, elected_pickers, until_ready
from tests.support.local_ports import free_port
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.full]
LOOPBACK = "127.0.0.1"
BODY = {"model": "sim", "prompt": "hello"}


async def _completion(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"choices": []})


async def _page(_: web.Request) -> web.Response:
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    return web.Response(text="".join(f"vllm:{name} 0\n" for name in names))


async def _worker() -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.router.add_post("/v1/completions", _completion)
    app.router.add_get("/metrics", _page)
    app.router.add_get("/health", _page)  # without it Envoy has nowhere to go by itself
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    return runner, int(runner.addresses[0][1])


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


async def test_no_request_fails_while_a_leader_is_killed(tmp_path: Path) -> None:
    runner, worker = await _worker()
    ports = [free_port(), free_port()]
    async with elected_pickers(tmp_path, pods=(LOOPBACK,), port=worker) as scene:
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
            await runner.cleanup()
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
