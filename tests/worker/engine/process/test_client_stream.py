"""A request's stream keeps one output at most and loses nothing."""

import asyncio

import pytest

from worker.engine.messages import RequestOutput
from worker.engine.process.client import RequestStream
from worker.errors import EngineDeadError
from worker.types import FinishReason


async def test_a_lagging_consumer_gets_one_merged_output() -> None:
    stream = RequestStream("a", [].append)
    stream.push(RequestOutput("a", [1], num_cached_tokens=4, scheduled_seconds=1.0))
    stream.push(RequestOutput("a", [2, 3], None, None, 4, 1.0, 2.0, 3.0))
    stream.push(RequestOutput("a", [4], FinishReason.STOP, 4, 4, 1.0, 2.0, 5.0, 1))
    assert stream.finished
    expected = RequestOutput(
        *("a", [1, 2, 3, 4], FinishReason.STOP, 4, 4, 1.0, 2.0, 5.0, 1), num_steps=3
    )
    assert await stream.next() == expected


async def test_an_end_without_tokens_is_no_step() -> None:
    stream = RequestStream("a", [].append)
    stream.push(RequestOutput("a", []))
    stream.push(RequestOutput("a", [1, 2]))
    stream.push(RequestOutput("a", [], FinishReason.ABORT))
    assert (await stream.next()).num_steps == 1


async def test_a_waiting_consumer_is_woken() -> None:
    stream = RequestStream("a", [].append)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.push(RequestOutput("a", [1]))
    assert (await waiting).token_ids == [1]


async def test_a_cancelled_wait_leaves_the_stream_usable() -> None:
    stream = RequestStream("a", [].append)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stream.push(RequestOutput("a", [1]))
    assert (await stream.next()).token_ids == [1]


async def test_failure_comes_after_what_was_received() -> None:
    stream = RequestStream("a", [].append)
    stream.push(RequestOutput("a", [1]))
    stream.fail(EngineDeadError("gone"))
    assert (await stream.next()).token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await stream.next()
