"""The client and a real engine process (the simulator) over a real socket."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing

import msgspec
import pytest

from worker.config import EngineConfig, SimConfig
from worker.engine.messages import AddRequest, RequestOutput, StepOutputs
from worker.engine.process.client import EngineClient, StepObserver
from worker.engine.process.supervision import Supervision
from worker.errors import EngineDeadError, WorkerError
from worker.types import FinishReason

Make = Callable[..., AddRequest]
AT_ONCE = SimConfig(time_scale=0.0)
REAL_TIME = SimConfig()


@asynccontextmanager
async def running(
    sim: SimConfig = AT_ONCE, on_step: StepObserver | None = None, **fields: object
) -> AsyncIterator[EngineClient]:
    config = EngineConfig("sim", None, sim=sim, **fields)  # type: ignore[arg-type]
    client = EngineClient(config, on_step, Supervision(heartbeat_timeout_seconds=60.0))
    await client.start(240.0)
    try:
        yield client
    finally:
        await client.shutdown()


async def generate(
    client: EngineClient, request: AddRequest
) -> AsyncGenerator[RequestOutput, None]:
    (stream,) = client.open(request)
    with closing(stream):
        while True:
            output = await stream.next()
            yield output
            if output.finish_reason is not None:
                return


async def collect(client: EngineClient, request: AddRequest) -> tuple[list[int], RequestOutput]:
    tokens: list[int] = []
    last = None
    async for output in generate(client, request):
        tokens += output.token_ids
        last = output
    assert last is not None
    return tokens, last


async def test_start_reports_the_size_of_the_cache() -> None:
    client = EngineClient(EngineConfig("sim", None, num_blocks_override=10, block_size=8))
    assert not client.is_alive
    ready = await client.start(240.0)
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (10, 8, 80)
    assert client.is_alive
    await client.shutdown()
    await client.shutdown()
    assert not client.is_alive


async def test_fifty_requests_at_once_answer_as_each_alone(make_request: Make) -> None:
    requests = [
        make_request(f"r{i}", range(i, i + 20), max_tokens=10 + i, seed=i) for i in range(50)
    ]
    async with running() as client:
        together = await asyncio.gather(*(collect(client, r) for r in requests))
        for request, (tokens, last) in zip(requests, together, strict=True):
            assert len(tokens) == request.params.max_tokens
            assert last.finish_reason is FinishReason.LENGTH
        assert (await collect(client, requests[7]))[0] == together[7][0]
        assert client.num_unfinished == 0
        assert client.stats.scheduler.generation_tokens == sum(len(t) for t, _ in together) + 17


async def test_closing_the_iterator_aborts_in_the_engine(make_request: Make) -> None:
    aborted = asyncio.Event()

    def on_step(step: StepOutputs) -> None:
        if any(o.finish_reason is FinishReason.ABORT for o in step.outputs):
            assert step.stats.num_running + step.stats.num_waiting == 0
            assert step.stats.kv_cache_usage == 0.0
            aborted.set()

    async with running(REAL_TIME, on_step) as client:
        async with aclosing(generate(client, make_request("a", [1], max_tokens=5000))) as stream:
            async for output in stream:
                assert output.finish_reason is None
                break
        assert client.num_unfinished == 0
        await aborted.wait()
        assert (await collect(client, make_request("b", [1])))[1].finish_reason is not None


async def test_abort_ends_the_stream(make_request: Make) -> None:
    async with running(REAL_TIME) as client:
        reported = {}
        aborts = {"a": lambda: client.abort("a"), "b": lambda: client.abort_all("going home")}
        for request_id, abort in aborts.items():
            request = make_request(request_id, [1], max_tokens=5000)
            async for output in generate(client, request):
                reported[request_id] = (output.finish_reason, output.error)
                abort()
        # An abort that was asked for needs no excuse.
        assert reported == {
            "a": (FinishReason.ABORT, None),
            "b": (FinishReason.ABORT, "going home"),
        }
        client.abort("unknown")


async def test_a_request_that_cannot_be_sent_leaves_nothing_open(make_request: Make) -> None:
    """Its end would never be reported; its ids are free again."""
    async with running() as client:
        request = make_request("a", [1], max_tokens=1)
        with pytest.raises(OverflowError):
            client.open(msgspec.structs.replace(request, priority=1 << 70, branch_ids=["b"]))
        assert client.num_unfinished == 0
        assert (await collect(client, request))[1].finish_reason is FinishReason.LENGTH


async def test_stats_count_what_the_engine_has_not_seen_yet(make_request: Make) -> None:
    """The queue gauge includes requests that are on their way."""
    async with running(REAL_TIME) as client:
        requests = [make_request(f"r{i}", [1], max_tokens=5) for i in range(3)]
        tasks = [asyncio.create_task(collect(client, r)) for r in requests]
        await asyncio.sleep(0)
        assert (client.stats.num_running, client.stats.num_waiting) == (0, 3)
        await asyncio.gather(*tasks)
        assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)


async def test_a_failing_observer_disturbs_no_stream(make_request: Make) -> None:
    def on_step(_: StepOutputs) -> None:
        raise ValueError("metrics")

    async with running(on_step=on_step) as client:
        assert len((await collect(client, make_request("a", [1], max_tokens=100)))[0]) == 100


async def test_an_id_in_use_is_refused(make_request: Make) -> None:
    first = make_request("a", [1], max_tokens=5000)
    async with running(REAL_TIME) as client, aclosing(generate(client, first)) as stream:
        await anext(stream)
        with pytest.raises(WorkerError, match="in use"):
            await collect(client, make_request("a", [2]))


async def test_start_up_failure_has_the_engines_own_words() -> None:
    client = EngineClient(EngineConfig("abacus", None))
    with pytest.raises(WorkerError, match="unknown engine 'abacus'"):
        await client.start(240.0)
    assert client.pid is None
    assert not client.is_alive


async def test_shutdown_ends_open_streams(make_request: Make) -> None:
    stepped = asyncio.Event()
    async with running(REAL_TIME, lambda _: stepped.set()) as client:
        task = asyncio.create_task(collect(client, make_request("a", [1], max_tokens=5000)))
        await stepped.wait()
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task


async def test_signals_to_the_group_are_left_to_the_parent(make_request: Make) -> None:
    """The parent drains the engine and shuts it down."""
    async with running() as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert len((await collect(client, make_request("a", [1])))[0]) == 4


PARENT = """
import asyncio, sys
from worker.config import EngineConfig
from worker.engine.process.client import EngineClient

async def main():
    client = EngineClient(EngineConfig("sim", None))
    await client.start()
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_engine_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    parent.kill()
    assert await asyncio.wait_for(parent.stdout.read(), 240.0) == b""
    await parent.wait()
