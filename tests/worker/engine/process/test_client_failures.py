"""An engine that is lost: what its clients see, and what comes after it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from worker.config import EngineConfig, KvEventsConfig, SimConfig
from worker.engine.messages import (
    AddRequest,
    Configure,
    DumpCache,
    Pause,
    RequestOutput,
    ResetPrefixCache,
    Resume,
    Sleep,
    Vocabulary,
    WakeUp,
)
from worker.engine.process.client import EngineClient, RequestStream
from worker.engine.process.supervision import Supervision
from worker.errors import EngineDeadError
from worker.tokenizer.sim import IM_END_ID, IM_START_ID, SimTokenizer
from worker.types import FinishReason

Make = Callable[..., AddRequest]
PATIENCE_SECONDS = 240.0
PATIENT = Supervision(heartbeat_timeout_seconds=60.0)


@asynccontextmanager
async def running(
    supervision: Supervision = PATIENT, sim: SimConfig | None = None, **fields: object
) -> AsyncIterator[EngineClient]:
    config = EngineConfig("sim", None, sim=sim or SimConfig(), **fields)  # type: ignore[arg-type]
    client = EngineClient(config, None, supervision)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.start()
        try:
            yield client
        finally:
            await client.shutdown()


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)


async def read_on(stream: RequestStream) -> RequestOutput:
    while (output := await stream.next()).finish_reason is None:
        pass
    return output


async def last_of(client: EngineClient, request: AddRequest) -> RequestOutput:
    (stream,) = client.open(request)
    with closing(stream):
        return await read_on(stream)


def signal_engine(client: EngineClient, number: signal.Signals) -> int:
    assert client.pid is not None
    os.kill(client.pid, number)
    return client.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_engine_is_replaced_and_its_counters_go_on(make_request: Make) -> None:
    async with running() as client:
        await last_of(client, make_request("a", range(40), max_tokens=5))
        before = client.stats
        assert (before.scheduler.prompt_tokens, before.scheduler.generation_tokens) == (40, 5)
        streams = client.open(make_request("b", [1], max_tokens=5000))
        await streams[0].next()
        lost = signal_engine(client, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await client.run(Pause(0, "wait"))
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await read_on(streams[0])
        with pytest.raises(EngineDeadError, match="lost"):
            client.open(make_request("c", [1]))
        down = client.stats
        assert (down.num_running, down.num_waiting, down.kv_cache_usage) == (0, 0, 0.0)
        assert down.scheduler.generation_tokens >= before.scheduler.generation_tokens
        await until(lambda: client.is_alive)
        assert client.pid not in (None, lost)
        assert is_gone(lost)
        assert (await last_of(client, make_request("b", [1, 2]))).finish_reason is not None
        assert client.stats.num_restarts == 1
        assert client.stats.scheduler.prompt_tokens >= before.scheduler.prompt_tokens + 2


async def test_a_new_engine_follows_grammars_too(make_request: Make) -> None:
    tokenizer = SimTokenizer()
    spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    async with running(eos_token_ids=(IM_END_ID,), sim=SimConfig(end_token_id=IM_END_ID)) as client:
        client.describe(Vocabulary(spelled, [IM_START_ID, IM_END_ID], [IM_END_ID]))
        for _ in range(2):
            asked = make_request("a", [1], max_tokens=9, grammar='start: "," "(" | ",;"', seed=1)
            (stream,) = client.open(asked)
            with closing(stream):
                said: list[int] = []
                reason = None
                while reason is None:
                    output = await stream.next()
                    said, reason = said + output.token_ids, output.finish_reason
            assert said[:-1] in ([*b",("], [*b",;"])
            assert (said[-1], reason) == (IM_END_ID, FinishReason.STOP)
            signal_engine(client, signal.SIGKILL)
            await until(lambda: not client.is_alive)
            await until(lambda: client.is_alive)


async def test_a_stopped_engine_is_killed_when_its_silence_lasts(make_request: Make) -> None:
    async with running() as client:
        (stream,) = client.open(make_request("a", [1], max_tokens=5000))
        await stream.next()
        lost = signal_engine(client, signal.SIGSTOP)
        child = client._child
        assert child is not None
        child._supervision = Supervision(heartbeat_timeout_seconds=0.8)
        child._tick()  # at that pace from now on
        with pytest.raises(EngineDeadError, match=r"no sign of life for 0\.8 s"):
            await read_on(stream)
        await until(lambda: client.is_alive)
        assert is_gone(lost)


async def test_a_stopped_engine_that_continues_in_time_is_not_replaced(make_request: Make) -> None:
    """A pause shorter than the timeout (a debugger, a busy machine) costs nothing."""
    async with running() as client:
        (stream,) = client.open(make_request("a", [1], max_tokens=5000))
        await stream.next()
        pid = signal_engine(client, signal.SIGSTOP)
        signal_engine(client, signal.SIGCONT)
        assert (await last_of(client, make_request("b", [1]))).finish_reason is not None
        stream.close()
        assert (client.pid, client.stats.num_restarts) == (pid, 0)


async def test_a_step_that_hangs_is_no_progress_and_then_a_loss(make_request: Make) -> None:
    """Beyond its budget the engine does not progress; at twice the budget it is killed."""
    async with running(step_budget_seconds=1.0) as client:
        assert client.is_progressing
        await last_of(client, make_request("a", [1]))
        assert (await client.run(Configure(0, {"hang_seconds": 3600}))).ok
        (stream,) = client.open(make_request("b", [1]))
        await until(lambda: not client.is_progressing)
        assert client.is_alive
        assert client.stats.stalled_seconds > 0
        with pytest.raises(EngineDeadError, match=r"beyond its budget of 1\.0 s"):
            await stream.next()
        await until(lambda: client.is_progressing)
        assert (await last_of(client, make_request("b", [1]))).finish_reason is not None


async def test_an_engine_that_breaks_at_once_is_given_up(make_request: Make) -> None:
    async with running(Supervision(max_restarts=1)) as client:
        for _ in range(2):
            await until(lambda: client.is_alive)
            lost = client.pid
            signal_engine(client, signal.SIGKILL)
            await until(lambda pid=lost: client.pid != pid or not client.is_alive)
        await client.gone()
        assert client.stats.num_restarts == 1


async def test_an_error_in_a_step_reaches_every_stream_and_the_engine_comes_back(
    make_request: Make,
) -> None:
    async with running(sim=SimConfig(time_scale=0.0, num_words=0)) as client:
        streams = [client.open(make_request(f"r{i}", [1]))[0] for i in range(5)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="Error"):
                await stream.next()
        await until(lambda: client.is_alive)
        assert client.stats.num_restarts == 1


async def test_shutdown_does_not_wait_for_an_engine_that_is_coming_up() -> None:
    async with running() as client:
        lost = signal_engine(client, signal.SIGKILL)
        await until(lambda: client.pid not in (None, lost))
        coming = client.pid
        await client.shutdown()
        assert coming is not None
        assert is_gone(coming)
        assert not client.is_alive


async def test_commands_are_answered(make_request: Make) -> None:
    async with running() as client:
        await last_of(client, make_request("a", range(64)))
        dump, reset = await asyncio.gather(
            client.run(DumpCache(0)), client.run(ResetPrefixCache(0))
        )
        assert (len(dump.blocks), reset.ok) == (4, True)
        assert (await client.run(DumpCache(0))).blocks == []
        refused = await client.run(Pause(0, "sideways"))
        assert (refused.ok, "sideways" in (refused.error or "")) == (False, True)
        assert (await client.run(Pause(0, "keep"))).ok
        waiting = asyncio.create_task(last_of(client, make_request("b", [1])))
        assert (await client.run(DumpCache(0))).ok
        assert not waiting.done()
        assert client.is_progressing
        assert (await client.run(Resume(0))).ok
        assert (await waiting).finish_reason is FinishReason.LENGTH


async def test_a_sleeping_engine_that_dies_comes_back_asleep(make_request: Make) -> None:
    slept: list[float] = []
    config = EngineConfig("sim", None, sim=SimConfig(time_scale=0.0))
    client = EngineClient(config, None, PATIENT, slept.append)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.start()
        assert (await client.run(Sleep(0, 1))).ok
        assert not (await client.run(Sleep(0, 7))).ok
        assert len(slept) == 1
        signal_engine(client, signal.SIGKILL)
        await until(lambda: not client.is_alive)
        assert (client.stats.sleep_level, client.stats.is_paused) == (1, True)
        await until(lambda: client.is_alive)
        waiting = asyncio.create_task(last_of(client, make_request("a", [1])))
        assert (await client.run(DumpCache(0))).ok
        assert (client.stats.sleep_level, client.stats.is_paused) == (1, True)
        assert not waiting.done()
        assert (await client.run(WakeUp(0))).ok
        assert (await waiting).finish_reason is FinishReason.LENGTH
        assert (client.stats.sleep_level, client.stats.is_paused) == (None, False)
        assert len(slept) == 2
        await client.shutdown()


async def replay(endpoint: str) -> list[tuple[int, list[dict[str, object]]]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        await socket.send_multipart((b"", (0).to_bytes(8, "big")))
        batches = []
        while True:
            _, _, number, payload = await socket.recv_multipart()
            if not payload:
                return batches
            events = msgspec.msgpack.decode(payload)[1]
            batches.append((int.from_bytes(number, "big"), events))


async def test_a_new_engine_reports_its_blocks_from_the_beginning(
    make_request: Make, tmp_path: Path
) -> None:
    """Batch 0 clears what subscribers believe; the same tokens have the same names as before."""
    endpoint = f"ipc://{tmp_path}/replay"
    events = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=endpoint
    )
    async with running(kv_events=events) as client:
        await last_of(client, make_request("a", range(64)))
        assert (await client.run(DumpCache(0))).event_sequence == 1
        before = await replay(endpoint)
        assert [number for number, _ in before] == [0, 1]
        signal_engine(client, signal.SIGKILL)
        await until(lambda: not client.is_alive)
        await until(lambda: client.is_alive)
        assert [(n, reported[0]["type"]) for n, reported in await replay(endpoint)] == [
            (0, "AllBlocksCleared")
        ]
        await last_of(client, make_request("a", range(64)))
        assert await replay(endpoint) == before
