"""The client and real engine processes over real sockets: streams, losses and new engines."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.support.waiting import until
from tests.support.worker.step_driver import make_request
from worker.config import EngineConfig, KvEventsConfig
from worker.engine.messages import (
    AddRequest,
    Command,
    Configure,
    DumpCache,
    Pause,
    RequestOutput,
    ResetPrefixCache,
    Resume,
    Sleep,
    StepOutputs,
    Vocabulary,
    WakeUp,
)
from worker.engine.process.client import EngineClient, Halts, RequestStream, StepObserver
from worker.engine.process.supervision import Supervision
from worker.errors import EngineDeadError, WorkerError
from worker.sim.config import SimConfig
from worker.sim.tokenizer import IM_END_ID, IM_START_ID, SimTokenizer
from worker.types import FinishReason

AT_ONCE = SimConfig(time_scale=0.0)
REAL_TIME = SimConfig()
PATIENT = Supervision(heartbeat_timeout_seconds=60.0)


@asynccontextmanager
async def running(
    sim: SimConfig = REAL_TIME,
    on_step: StepObserver | None = None,
    supervision: Supervision = PATIENT,
    **fields: Any,
) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineConfig("sim", None, sim=sim, **fields), on_step, supervision)
    async with asyncio.timeout(240.0):
        await client.start()
        try:
            yield client
        finally:
            await client.shutdown()


async def generate(
    client: EngineClient, request: AddRequest
) -> AsyncGenerator[RequestOutput, None]:
    (stream,) = client.open(request)
    with closing(stream):
        while (output := await stream.next()).finish_reason is None:
            yield output
        yield output


async def collect(client: EngineClient, request: AddRequest) -> tuple[list[int], RequestOutput]:
    outputs = [output async for output in generate(client, request)]
    return [token for output in outputs for token in output.token_ids], outputs[-1]


async def test_start_reports_the_size_of_the_cache() -> None:
    client = EngineClient(EngineConfig("sim", None, num_blocks_override=10, block_size=8))
    assert not client.is_alive
    ready = await client.start(240.0)
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (10, 8, 80)
    assert client.is_alive
    await client.shutdown()
    await client.shutdown()
    assert not client.is_alive


async def test_fifty_requests_at_once_answer_as_each_alone() -> None:
    requests = [
        make_request(f"r{i}", range(i, i + 20), max_tokens=10 + i, seed=i) for i in range(50)
    ]
    async with running(AT_ONCE) as client:
        together = await asyncio.gather(*(collect(client, r) for r in requests))
        for request, (tokens, last) in zip(requests, together, strict=True):
            assert len(tokens) == request.params.max_tokens
            assert last.finish_reason is FinishReason.LENGTH
        assert (await collect(client, requests[7]))[0] == together[7][0]
        assert client.num_unfinished == 0
        assert client.stats.scheduler.generation_tokens == sum(len(t) for t, _ in together) + 17


async def test_closing_the_iterator_aborts_in_the_engine() -> None:
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
        assert (await last_of(client, make_request("b", [1]))).finish_reason is not None


async def test_abort_ends_the_stream() -> None:
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


async def test_a_request_that_cannot_be_sent_leaves_nothing_open() -> None:
    """Its end would never be reported; its ids are free again."""
    async with running(AT_ONCE) as client:
        request = make_request("a", [1], max_tokens=1)
        with pytest.raises(OverflowError):
            client.open(msgspec.structs.replace(request, priority=1 << 70, branch_ids=["b"]))
        assert client.num_unfinished == 0
        assert (await last_of(client, request)).finish_reason is FinishReason.LENGTH


async def test_stats_count_what_the_engine_has_not_seen_yet() -> None:
    """The queue gauge includes requests that are on their way."""
    async with running(REAL_TIME) as client:
        requests = [make_request(f"r{i}", [1], max_tokens=5) for i in range(3)]
        tasks = [asyncio.create_task(collect(client, r)) for r in requests]
        await asyncio.sleep(0)
        assert (client.stats.num_running, client.stats.num_waiting) == (0, 3)
        await asyncio.gather(*tasks)
        assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)


async def test_a_failing_observer_disturbs_no_stream() -> None:
    def on_step(_: StepOutputs) -> None:
        raise ValueError("metrics")

    async with running(AT_ONCE, on_step) as client:
        assert len((await collect(client, make_request("a", [1], max_tokens=100)))[0]) == 100


async def test_an_id_in_use_is_refused() -> None:
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


async def test_shutdown_ends_open_streams() -> None:
    stepped = asyncio.Event()
    async with running(REAL_TIME, lambda _: stepped.set()) as client:
        task = asyncio.create_task(collect(client, make_request("a", [1], max_tokens=5000)))
        await stepped.wait()
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task


async def test_signals_to_the_group_are_left_to_the_parent() -> None:
    async with running(AT_ONCE) as client:
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
    assert await parent.stdout.readline() == b"ready\n"
    parent.kill()
    assert await asyncio.wait_for(parent.stdout.read(), 240.0) == b""
    await parent.wait()


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


async def read_on(stream: RequestStream) -> RequestOutput:
    while (output := await stream.next()).finish_reason is None:
        pass
    return output


async def last_of(client: EngineClient, request: AddRequest) -> RequestOutput:
    return (await collect(client, request))[1]


def signal_engine(client: EngineClient, number: signal.Signals) -> int:
    os.kill(client.pid, number)
    return client.pid


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_engine_is_replaced_and_its_counters_go_on() -> None:
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


async def test_a_new_engine_follows_grammars_too() -> None:
    tokenizer = SimTokenizer()
    spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    async with running(eos_token_ids=(IM_END_ID,), sim=SimConfig(end_token_id=IM_END_ID)) as client:
        client.describe(Vocabulary(spelled, [IM_START_ID, IM_END_ID], [IM_END_ID]))
        for _ in range(2):
            asked = make_request("a", [1], max_tokens=9, grammar='start: "," "(" | ",;"', seed=1)
            said, last = await collect(client, asked)
            assert said[:-1] in ([*b",("], [*b",;"])
            assert (said[-1], last.finish_reason) == (IM_END_ID, FinishReason.STOP)
            signal_engine(client, signal.SIGKILL)
            await until(lambda: not client.is_alive)
            await until(lambda: client.is_alive)


async def test_a_stopped_engine_is_killed_when_its_silence_lasts() -> None:
    async with running() as client:
        (stream,) = client.open(make_request("a", [1], max_tokens=5000))
        await stream.next()
        lost = signal_engine(client, signal.SIGSTOP)
        child = client._child
        child._supervision = Supervision(heartbeat_timeout_seconds=0.8)
        child._tick()  # at that pace from now on
        with pytest.raises(EngineDeadError, match=r"no sign of life for 0\.8 s"):
            await read_on(stream)
        await until(lambda: client.is_alive)
        assert is_gone(lost)


async def test_a_stopped_engine_that_continues_in_time_is_not_replaced() -> None:
    """A pause shorter than the timeout (a debugger, a busy machine) costs nothing."""
    async with running() as client:
        (stream,) = client.open(make_request("a", [1], max_tokens=5000))
        await stream.next()
        pid = signal_engine(client, signal.SIGSTOP)
        signal_engine(client, signal.SIGCONT)
        assert (await last_of(client, make_request("b", [1]))).finish_reason is not None
        stream.close()
        assert (client.pid, client.stats.num_restarts) == (pid, 0)


async def test_a_step_that_hangs_is_no_progress_and_then_a_loss() -> None:
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


async def test_an_engine_that_breaks_at_once_is_given_up() -> None:
    async with running(supervision=Supervision(max_restarts=1)) as client:
        for _ in range(2):
            await until(lambda: client.is_alive)
            lost = client.pid
            signal_engine(client, signal.SIGKILL)
            await until(lambda pid=lost: client.pid != pid or not client.is_alive)
        await client.gone()
        assert client.stats.num_restarts == 1


async def test_an_error_in_a_step_reaches_every_stream_and_the_engine_comes_back() -> None:
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


async def test_commands_are_answered() -> None:
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


async def test_a_sleeping_engine_that_dies_comes_back_asleep() -> None:
    slept: list[float] = []
    config = EngineConfig("sim", None, sim=SimConfig(time_scale=0.0))
    client = EngineClient(config, None, PATIENT, slept.append)
    async with asyncio.timeout(240.0):
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


async def test_a_new_engine_reports_its_blocks_from_the_beginning(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("reported", "again"),
    [
        ([], []),
        ([ResetPrefixCache(1)], []),
        ([Pause(1, "wait")], [Pause(0, "keep")]),
        ([Pause(1), Resume(2)], []),
        ([Sleep(1, 0, "abort")], [Sleep(0, 0, "keep")]),
        ([Sleep(1, 0), WakeUp(2, ["weights"])], []),
        ([Sleep(1, 2), Sleep(2, 1)], [Sleep(0, 2, "keep")]),
        ([Sleep(1, 1), WakeUp(2)], []),
        ([Sleep(1, 1), WakeUp(2, ["weights"])], [Sleep(0, 1, "keep"), WakeUp(0, ["weights"])]),
        ([Sleep(1, 1), WakeUp(2, ["weights"]), WakeUp(3, ["kv_cache"])], []),
        ([Sleep(1, 1), WakeUp(2, ["weights"]), Sleep(3, 1)], [Sleep(0, 1, "keep")]),
        ([WakeUp(1, ["weights"])], []),
        ([Sleep(1, 1), Resume(2)], [Sleep(0, 1, "keep")]),
        ([Pause(1), Sleep(2, 1), WakeUp(3)], [Pause(0, "keep")]),
    ],
)
def test_commands_that_hold_are_repeated_and_undone_ones_are_not(
    reported: list[Command], again: list[Command]
) -> None:
    halts = Halts()
    for command in reported:
        halts.note(command)
    assert halts.commands() == again
    assert halts.is_halted is bool(again)
    levels = [command.level for command in again if isinstance(command, Sleep)]
    assert [halts.sleep_level] == (levels or [None])
