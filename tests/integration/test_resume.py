"""`pointsman up --front`: streams continue when their workers are killed, and when they restart."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet.running_fleet import LIMIT_SECONDS, Fleet, ready_fleet

pytestmark = [pytest.mark.envoy, pytest.mark.full]

SLOW = "--worker-args=--sim-decode-base-ms 30ms"
ASKED: list[dict[str, Any]] = [
    {"seed": 1, "temperature": 1},
    {"temperature": 0},
    {"seed": 2, "temperature": 1, "stop": ["kan zo", "mi"], "presence_penalty": 1},
    {"seed": 3, "temperature": 1, "logprobs": True, "top_logprobs": 2},
]


async def said(
    fleet: Fleet, fields: dict[str, Any], begun: asyncio.Event, max_tokens: int
) -> list[Any]:
    stream = await fleet.openai.chat.completions.create(
        model="sim",
        max_tokens=max_tokens,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **fields,
    )
    text, logprobs, reasons, ids, usage, count = "", [], [], set(), None, 0
    async for chunk in stream:
        count += 1
        if count == 10:
            begun.set()
        ids.add((chunk.id, chunk.created))
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            entries = choice.logprobs.content if choice.logprobs else []
            logprobs += [(one.token, one.logprob) for one in entries or []]
    begun.set()
    assert len(ids) == 1
    assert usage is not None
    return [text, logprobs, reasons, usage.completion_tokens]


async def all_said(
    fleet: Fleet, disturb: Callable[[], Awaitable[None]] | None = None, max_tokens: int = 60
) -> list[list[Any]]:
    begun = [asyncio.Event() for _ in ASKED]
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(said(fleet, fields, event, max_tokens))
            for fields, event in zip(ASKED, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        if disturb is not None:
            await disturb()
    return [stream.result() for stream in streams]


def log_of(pid: int) -> str:
    return Path(f"/proc/{pid}/fd/1").read_text()


async def test_streams_outlive_their_workers() -> None:
    async with ready_fleet("--front", SLOW) as fleet:
        expected = await all_said(fleet)
        port = fleet.worker_urls[0].rpartition(":")[2]

        async def kill_one() -> None:
            for pid, line in fleet.descendants().items():
                if f"--port {port} " in line:
                    os.kill(pid, signal.SIGKILL)

        assert await all_said(fleet, kill_one) == expected


@pytest.mark.soak
async def test_streams_move_when_workers_restart() -> None:
    slow = f"""{SLOW} --kv-transfer-config '{{"kv_port": 0}}'"""
    async with ready_fleet("--front", "--drain-timeout", "60", slow) as fleet:
        expected = await all_said(fleet, max_tokens=400)
        (front,) = (pid for pid, line in fleet.descendants().items() if " front --host" in line)

        async def restart() -> None:
            async with asyncio.timeout(LIMIT_SECONDS):
                assert await (await fleet.restart("workers")).wait() == 0

        assert await all_said(fleet, restart, max_tokens=400) == expected
        assert "goes on after" in log_of(front)
        async with httpx.AsyncClient() as client:
            pages = [(await client.get(f"{url}/metrics")).text for url in fleet.worker_urls]
        moved = [line for page in pages for line in page.splitlines() if 'source="p2p"' in line]
        assert sum(float(line.split()[-1]) for line in moved) > 0
