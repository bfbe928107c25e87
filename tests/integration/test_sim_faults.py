"""Faults asked of a real worker process over `/admin/config`."""

import asyncio
import time

import httpx
import pytest

from tests.support.worker.running_worker import CHAT, Worker, running_worker
from worker.sim.tokenizer import WORDS

pytestmark = pytest.mark.full

SIM = ("--engine", "sim", "--sim-decode-base-ms", "5")


async def configure(worker: Worker, **settings: object) -> httpx.Response:
    body = {name.replace("_", "-"): value for name, value in settings.items()}
    return await worker.http.post("/admin/config", json=body)


async def seconds_of(worker: Worker, **fields: object) -> float:
    started = time.monotonic()
    reply = await worker.ask(max_tokens=10, ignore_eos=True, **fields)
    assert reply.status_code == 200
    return time.monotonic() - started


async def test_settings_of_the_model_change_while_it_runs() -> None:
    async with running_worker(*SIM) as worker:
        assert (await configure(worker, decode_base="100ms", decode_per_seq=0)).status_code == 200
        assert await seconds_of(worker) >= 0.9
        assert (await configure(worker, decode_base="10ms", slow=20)).status_code == 200
        assert await seconds_of(worker) >= 1.8
        shown = (await worker.http.get("/admin/config")).json()
        assert (shown["decode-base"], shown["slow"]) == ("10ms", 20.0)
        refused = await configure(worker, decode_base="1ms", volume=11)
        assert refused.status_code == 400
        assert "volume" in refused.json()["error"]["message"]
        assert (await worker.http.get("/admin/config")).json() == shown


async def test_load_headers_report_the_false_load() -> None:
    async with running_worker(*SIM) as worker:
        await configure(worker, fake_metrics={"waiting-requests": 77})
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        headers = {"endpoint-load-metrics-format": "text"}
        reply = await worker.http.post(CHAT, json=body, headers=headers)
        assert "num_requests_waiting=77" in reply.headers["endpoint-load-metrics"]


async def test_a_crashed_engine_ends_its_streams_and_comes_back() -> None:
    async with running_worker(*SIM) as worker:
        await configure(worker, crash={"target": "engine", "after-tokens": 20})
        ended = await worker.stream(lambda: None)
        assert ended.error is not None
        assert not ended.is_whole
        assert len(ended.events) <= 25
        await worker.until("/health", 200)
        assert (await worker.ask()).status_code == 200


async def test_a_crashed_worker_exits_with_status_70() -> None:
    async with running_worker(*SIM) as worker:
        crash = {"target": "worker", "after-requests": 2}
        assert (await configure(worker, crash=crash)).status_code == 200
        assert (await worker.ask()).status_code == 200
        with pytest.raises(httpx.TransportError):
            await worker.ask()
        assert await worker.exit_status() == 70


async def test_an_echo_says_what_it_was_asked() -> None:
    flags = ("--engine", "sim", "--sim-mode", "echo", "--sim-time-scale", "0")
    async with running_worker(*flags, "--num-gpu-blocks-override", "40") as worker:
        texts = [" ".join(WORDS[n % 3 : n % 3 + 3 * n]) for n in range(1, 25)]

        async def echo(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            reply = await worker.ask(messages=messages, max_tokens=100)
            return str(reply.json()["choices"][0]["message"]["content"])

        answers = await asyncio.gather(*map(echo, texts))
        assert [answer.split() for answer in answers] == [text.split() for text in texts]
