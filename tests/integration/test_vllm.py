"""One picker before a real vLLM server and a worker of ours: it reads, and follows, both.

Runs where `POINTSMAN_VLLM` names a `vllm` command (a CPU build does) and `POINTSMAN_VLLM_MODEL` a
model directory for it.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.envoy.binary import find_envoy
from fleet.envoy.bootstrap import build, to_json
from fleet.envoy.settings import BootstrapConfig, SocketAddress
from fleet.run.ports import free_ports
from tests.support.waiting import until
from tests.support.worker.running_worker import running_worker

VLLM, MODEL = os.environ.get("POINTSMAN_VLLM"), os.environ.get("POINTSMAN_VLLM_MODEL")
HOST = "127.0.0.1"
NAME = "both"
SLOTS = 2  # sequences that either engine runs at once
START_SECONDS = 240.0  # a vLLM that starts on a busy CPU

pytestmark = [
    pytest.mark.skipif(not (VLLM and MODEL), reason="POINTSMAN_VLLM names no vllm command"),
    pytest.mark.model,
    pytest.mark.envoy,
    pytest.mark.full,
]


class Pair:
    def __init__(self, urls: dict[str, str], door: str, picker: str) -> None:
        self.urls = urls
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(timeout=START_SECONDS, limits=limits)
        self.door, self.picker = door, picker

    async def ask(self, url: str, prompt: str, max_tokens: int = 2) -> None:
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = await self.http.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == max_tokens

    async def endpoints(self) -> dict[str, dict[str, Any]]:
        page = (await self.http.get(f"{self.picker}/endpoints")).json()
        return {row["name"]: row["metrics"] for row in page["endpoints"]}

    async def is_known(self) -> bool:
        return all((await self.endpoints()).values())

    async def has_queue(self, engine: str) -> bool:
        metrics = (await self.endpoints())[engine]
        return metrics is not None and metrics["waiting_requests"] >= 2

    async def is_idle(self) -> bool:
        loads = (await self.endpoints()).values()
        return all(m and m["waiting_requests"] + m["running_requests"] == 0 for m in loads)

    async def decisions(self) -> dict[str, int]:
        page = (await self.http.get(f"{self.picker}/metrics")).text
        found: dict[str, int] = {}
        for labels, count in re.findall(r"llm_d_epp_scheduler_attempts_total{(.*)} (\S+)", page):
            if name := re.search(r'endpoint_name="(\w+)"', labels):
                found[name[1]] = found.get(name[1], 0) + int(float(count))
        return found

    @asynccontextmanager
    async def busy(self, engine: str) -> AsyncIterator[None]:
        prompts = [f"Write about the number {n}." for n in range(6 * SLOTS)]
        asking = [
            asyncio.create_task(self.ask(self.urls[engine], prompt, 400)) for prompt in prompts
        ]
        try:
            await until(lambda: self.has_queue(engine))
            yield
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await until(self.is_idle)


@asynccontextmanager
async def program(*command: str, **variables: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables})
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def until_well(url: str) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as http:
        while True:
            try:
                if (await http.get(url)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)


def vllm_command(port: int) -> list[str]:
    flags = ["--host", HOST, "--port", str(port), "--served-model-name", NAME]
    flags += ["--max-model-len", "1024", "--max-num-seqs", str(SLOTS), "--enforce-eager"]
    return [str(VLLM), "serve", str(MODEL), *flags]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    vllm, door, admin, grpc, health, metrics = free_ports(HOST, 6, 27_000)
    async with AsyncExitStack() as stack:
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        await stack.enter_async_context(program(*vllm_command(vllm), **environment))
        flags = ("--served-model-name", NAME, "--max-num-seqs", str(SLOTS))
        worker = await stack.enter_async_context(running_worker(*flags, "--max-model-len", "1024"))
        urls = {"vllm": f"http://{HOST}:{vllm}", "ours": str(worker.http.base_url).rstrip("/")}
        await until_well(f"{urls['vllm']}/health")
        ports = {name: int(url.rpartition(":")[2]) for name, url in urls.items()}
        endpoints = tmp_path / "endpoints.yaml"
        endpoints.write_text(
            "endpoints:\n"
            + "".join(f'- {{name: {n}, address: {HOST}, port: "{p}"}}\n' for n, p in ports.items())
        )
        command = [sys.executable, "-m", "picker", "--endpoints-file", str(endpoints)]
        command += ["--bind-address", HOST, "--grpc-port", str(grpc)]
        command += ["--grpc-health-port", str(health), "--metrics-port", str(metrics)]
        await stack.enter_async_context(program(*command))
        await until_well(f"http://{HOST}:{metrics}/readyz")
        bootstrap = BootstrapConfig(
            listen=SocketAddress(HOST, door),
            admin=SocketAddress(HOST, admin),
            picker=SocketAddress(HOST, grpc),
            picker_health=SocketAddress(HOST, health),
            endpoints=tuple(SocketAddress(HOST, port) for port in ports.values()),
            buffer_request_body=True,
        )
        file = tmp_path / "envoy.json"
        file.write_text(to_json(build(bootstrap)))
        quiet = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "off")
        await stack.enter_async_context(program(str(find_envoy()), "-c", str(file), *quiet))
        await until_well(f"http://{HOST}:{door}/health")
        pair = Pair(urls, f"http://{HOST}:{door}", f"http://{HOST}:{metrics}")
        stack.push_async_callback(pair.http.aclose)
        yield pair


async def test_both_engines_are_read_and_followed(pair: Pair) -> None:
    await until(pair.is_known)
    known = await pair.endpoints()
    assert {name: bool(one["num_kv_blocks"]) for name, one in known.items()} == dict.fromkeys(
        ("vllm", "ours"), True
    )
    for loaded, other in (("vllm", "ours"), ("ours", "vllm")):
        async with pair.busy(loaded):
            before = await pair.decisions()
            for number in range(6):
                await pair.ask(pair.door, f"{loaded} {number} " * 20)
            after = await pair.decisions()
        assert after.get(other, 0) - before.get(other, 0) == 6, (loaded, before, after)
        assert after.get(loaded, 0) == before.get(loaded, 0)

    story = "Once upon a time there was a train that had lost its way. " * 30
    before = await pair.decisions()
    for number in range(5):
        await pair.ask(pair.door, f"{story} {number}")
    after = await pair.decisions()
    assert sorted(after.get(name, 0) - before.get(name, 0) for name in pair.urls) == [0, 5]
