"""Clients that disconnect or do not read: other clients are served as before."""

import asyncio
import json
import re
from contextlib import suppress

import pytest

from tests.support.worker.running_worker import CHAT, PATIENCE_SECONDS, Worker, running_worker

pytestmark = pytest.mark.full

SIM = ("--engine", "sim", "--sim-decode-base-ms", "10", "--max-num-seqs", "256")
LEAVERS = 200


async def connect(
    worker: Worker, num_sent: int | None = None, **fields: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    payload = json.dumps(body).encode()
    host, port = worker.http.base_url.host, worker.http.base_url.port
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 12)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: w\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
    writer.write(request[:num_sent])
    await writer.drain()
    return reader, writer


async def gauges(worker: Worker) -> tuple[float, float, float]:
    page = (await worker.http.get("/metrics")).text
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    values = [re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE) for name in names]
    running, waiting, usage = (float(value[1]) for value in values if value)
    return running, waiting, usage


async def until_idle(worker: Worker) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await gauges(worker) != (0, 0, 0):
            pass


async def test_a_storm_of_disconnects_leaves_nothing_behind() -> None:
    """Clients leave at once, in every phase and with half a request sent: blocks and slots come
    back, and another client's answer continues.
    """
    async with running_worker(*SIM) as worker:
        patient = asyncio.create_task(worker.ask(max_tokens=200, ignore_eos=True))
        connections = await asyncio.gather(
            *(connect(worker) for _ in range(LEAVERS)),
            *(connect(worker, num_sent=n) for n in (0, 1, 30, -5) for _ in range(20)),
        )
        for reader, _ in connections[: LEAVERS // 2]:
            await reader.readline()  # the others leave before their answer has begun
        for _, writer in connections:
            writer.transport.abort()
        assert (await patient).json()["usage"]["completion_tokens"] == 200
        await until_idle(worker)
        counters = await worker.counters()
        aborted = [v for n, v in counters.items() if "request_success" in n and "'abort'" in n]
        assert LEAVERS // 2 <= aborted[0] <= LEAVERS
        assert (await worker.ask()).status_code == 200


async def test_a_client_that_does_not_read_is_dropped_and_delays_no_other() -> None:
    flags = (*SIM, "--sim-time-scale", "0", "--write-stall-timeout", "0.5")
    async with running_worker(*flags) as worker:
        # Long frames, so that the buffers of both kernels fill up.
        long = {"max_tokens": 8000, "logprobs": True, "top_logprobs": 20}
        slow = [await connect(worker, **long) for _ in range(4)]
        answers = await asyncio.gather(*(worker.ask(max_tokens=50) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        await until_idle(worker)
        counters = await worker.counters()
        ends = {n: v for n, v in counters.items() if "request_success" in n and v}
        assert [v for n, v in ends.items() if "'abort'" in n] == [4], ends
        for _, writer in slow:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
