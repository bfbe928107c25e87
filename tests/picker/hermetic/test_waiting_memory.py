"""What requests that wait take of a whole picker's memory, and what the queue counts for them."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from parked_requests import Gateway, traced_bytes
from waiting_requests import Scene, config, waiting_scene
from whole_picker import until

from picker.requestcontrol.parked import REQUEST_BYTES

ONE_TEXT, CONVERSATION, COSTLY, TOKENS = "one text", "a conversation", "costly", "token ids"
WARM_UP = 30  # what is made once, and what grows in large steps
NO_CAPS = "  maxMemory: 0"
HEADERS_AND_NAMES = 4_000  # what is counted for those of these requests, at most


def body(kind: str, size: int) -> bytes:
    """About `size` bytes of JSON: `COSTLY` is what Python holds twenty times as much for."""
    if kind == TOKENS:
        return json.dumps({"model": "m", "prompt": list(range(1000, 1000 + size // 6))}).encode()
    texts = [f"text {number:05}" for number in range(size // 45)]
    messages = {
        ONE_TEXT: [{"role": "user", "content": "ж" + "x" * (size - 80)}],
        CONVERSATION: [{"role": "user", "content": text} for text in texts],
        COSTLY: [{"role": "user", "content": [{} for _ in range(size // 4)]}],
    }
    asked = {"model": "m", "max_tokens": 8, "messages": messages[kind]}
    return json.dumps(asked, ensure_ascii=False).encode()


@pytest.fixture
def tracing() -> Iterator[None]:
    """What is allocated is written down."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def fill(scene: Scene, gateway: Gateway, first: int, last: int) -> None:
    """Have these requests wait, some of them at a time."""
    for at in count(first, 8):
        if at >= last:
            return
        upto = min(at + 8, last)
        await gateway.send(at, upto)

        async def all_wait(number: int = upto) -> bool:
            return scene.picker.pool.waiting == number

        await until(all_wait)


@pytest.mark.parametrize(
    ("kind", "size", "number", "buffered"),
    [
        (ONE_TEXT, 500, 300, True),
        (ONE_TEXT, 16_000, 300, False),
        (ONE_TEXT, 256_000, 40, True),
        (CONVERSATION, 16_000, 100, True),
        (CONVERSATION, 256_000, 20, False),
        (COSTLY, 16_000, 50, True),
        (TOKENS, 16_000, 100, False),
    ],
)
async def test_the_queue_counts_no_less_than_is_held(
    tmp_path: Path, tracing: None, kind: str, size: int, number: int, buffered: bool
) -> None:
    """Whatever a body is made of; what it is decoded to is not held, and little is added to it."""
    async with waiting_scene(tmp_path, config(NO_CAPS)) as scene:
        served = await scene.serve()
        asked = body(kind, size)
        gateway = Gateway([asked] * (WARM_UP + number), buffered)
        await gateway.connect(scene.picker.ports.grpc)
        await fill(scene, gateway, 0, WARM_UP)
        before, counted_before = traced_bytes(), memory_bytes(scene)
        await fill(scene, gateway, WARM_UP, WARM_UP + number)
        held = (traced_bytes() - before) / number
        counted = (memory_bytes(scene) - counted_before) / number
        assert len(asked) < held <= counted
        packed = len(asked) if kind == TOKENS else 0
        at_most = 1.25 * len(asked) + packed + REQUEST_BYTES + HEADERS_AND_NAMES
        assert counted <= at_most
        await gateway.close()
        await scene.has_waiting(0)
        assert traced_bytes() - before < held * number / 2
        await served.end()
        await scene.is_at_rest()


def memory_bytes(scene: Scene) -> int:
    """What the queue counts of memory."""
    return scene.picker.pool.queues().queued_memory_bytes


async def test_nobody_waits_for_the_collector(tmp_path: Path) -> None:
    """What a refused request was made of is free at once; its body would be in memory else."""
    async with waiting_scene(tmp_path, config("  maxRequests: 1")) as scene:
        served = await scene.serve()
        waiter = await scene.wait(1)
        refused = Gateway([body(ONE_TEXT, 2_000)] * 2 * WARM_UP, buffered=True)
        await refused.connect(scene.picker.ports.grpc)
        tasks = len(asyncio.all_tasks())
        await refused.send(0, WARM_UP)
        await has_refused(scene, WARM_UP, tasks)
        gc.collect()
        gc.disable()
        try:
            await refused.send(WARM_UP, 2 * WARM_UP)
            await has_refused(scene, 2 * WARM_UP, tasks)
            assert gc.collect() < 100 + WARM_UP
        finally:
            gc.enable()
        await refused.close()
        await served.end()
        await waiter.destination()
        await waiter.end()
        await scene.is_at_rest()


async def test_who_gives_up_takes_its_body_along(tmp_path: Path) -> None:
    """As well: what is left for the collector is a scrap of each."""
    async with waiting_scene(tmp_path, config(NO_CAPS)) as scene:
        served = await scene.serve()
        tasks = len(asyncio.all_tasks())
        gateway = Gateway([body(ONE_TEXT, 2_000)] * WARM_UP, buffered=True)
        await gateway.connect(scene.picker.ports.grpc)
        await fill(scene, gateway, 0, WARM_UP)
        gc.collect()
        gc.disable()
        try:
            await gateway.close()

            async def all_gone() -> bool:
                waiting = scene.picker.pool.waiting
                return not waiting and len(asyncio.all_tasks()) == tasks

            await until(all_gone)
            assert gc.collect() < 100 + 3 * WARM_UP
        finally:
            gc.enable()
        await served.end()
        await scene.is_at_rest()


async def has_refused(scene: Scene, number: int, tasks: int) -> None:
    """Return once so many are refused, and no more tasks run than before."""

    async def is_so() -> bool:
        refused = scene.picker.pool.queues().outcomes.get("RejectedCapacity")
        return refused == number and len(asyncio.all_tasks()) == tasks

    await until(is_so)
