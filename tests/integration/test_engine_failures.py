"""The engine is killed, stopped, stuck or broken under load: nothing hangs, nothing ends silently,
and service comes back by itself. Times are printed (`pytest -s`), and bounded only generously.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.busy_loops import busy_loops, counts_waits, crowd
from tests.support.worker.running_worker import (
    Ended,
    Worker,
    assert_each_reports_its_end,
    running_worker,
    under_load,
)

pytestmark = pytest.mark.full

SIM = ("--engine", "sim", "--sim-decode-base-ms", "20")
STREAMS = 24


def send(worker: Worker, number: signal.Signals) -> Callable[[], None]:
    def harm() -> None:
        pid = worker.engine_pid()
        assert pid is not None
        os.kill(pid, number)

    return harm


async def report(
    worker: Worker, what: str, load: asyncio.Task[tuple[list[Ended], float]]
) -> list[Ended]:
    engine = worker.engine_pid()
    down = await worker.until_down(engine)
    assert await worker.status("/health/ready") == 503 or worker.has_another(engine)
    refused = await worker.ask()
    if refused.status_code != 200:  # unless it is back already
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    streams, harmed = await load
    last = max(stream.seconds for stream in streams)
    await worker.until("/health", 200)
    answer = await worker.ask()
    back = time.monotonic()
    assert answer.status_code == 200
    print(  # noqa: T201 (shows how long it takes)
        f"\n{what}: last error event {last - harmed:.2f} s, /health 503 {down - harmed:.2f} s,"
        f" answering again {back - harmed:.2f} s after the harm"
    )
    return streams


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_engine_ends_every_stream_and_is_replaced(number: signal.Signals) -> None:
    flags = ("--heartbeat-timeout", "2") if number is signal.SIGSTOP else ()
    async with running_worker(*SIM, *flags) as worker:
        assert (await worker.ask()).status_code == 200
        lost = worker.engine_pid()
        before = await worker.counters()
        load = asyncio.create_task(under_load(worker, send(worker, number), STREAMS))
        streams = await report(worker, number.name, load)
        assert_each_reports_its_end(streams)
        assert worker.engine_pid() not in (None, lost)
        assert lost is not None
        with pytest.raises(ProcessLookupError):
            os.kill(lost, 0)
        after = await worker.counters()
        assert {name for name, value in before.items() if after.get(name, -1) < value} == set()
        restarts = [v for name, v in after.items() if "engine_restarts_total" in name]
        errors = [v for name, v in after.items() if "request_success" in name and "'error'" in name]
        assert (restarts, errors) == ([1], [STREAMS])
        page = (await worker.http.get("/metrics")).text
        assert 'vllm:num_requests_running{model_name="sim",engine="0"} 0\n' in page
        generated = sum(v for name, v in after.items() if "generation_tokens_total" in name)
        assert generated >= sum(len(stream.events) - 2 for stream in streams)


async def test_a_step_that_never_ends_is_a_stall_and_then_a_loss() -> None:
    async with running_worker(*SIM, "--step-budget", "1") as worker:
        assert (await worker.ask()).status_code == 200
        lost = worker.engine_pid()

        def harm() -> None:
            requests.append(
                asyncio.create_task(worker.http.post("/admin/config", json={"hang": 3600}))
            )

        requests: list[asyncio.Task[object]] = []
        load = asyncio.create_task(under_load(worker, harm, STREAMS))
        assert_each_reports_its_end(await report(worker, "hung step", load))
        await asyncio.gather(*requests, return_exceptions=True)
        assert worker.engine_pid() != lost


async def test_by_policy_the_worker_exits_instead() -> None:
    async with running_worker(*SIM, "--engine-failure-policy", "exit") as worker:
        streams, _ = await under_load(worker, send(worker, signal.SIGKILL), STREAMS)
        assert_each_reports_its_end(streams)
        assert await worker.exit_status() == 1


async def test_a_crash_loop_ends_the_worker() -> None:
    async with running_worker(*SIM, "--max-engine-restarts", "2") as worker:
        for _ in range(2):
            engine = worker.engine_pid()
            send(worker, signal.SIGKILL)()
            await worker.until_down(engine)
            await worker.until("/health", 200)
        send(worker, signal.SIGKILL)()
        assert await worker.exit_status() == 1


async def test_a_drain_while_the_engine_is_being_replaced_ends_with_0() -> None:
    async with running_worker(*SIM) as worker:
        engine = worker.engine_pid()
        send(worker, signal.SIGKILL)()
        await worker.until_down(engine)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.exit_status() == 0


async def test_a_drain_while_the_engine_sleeps_times_out_and_ends_with_0() -> None:
    flags = (*SIM, "--enable-admin-routes", "--shutdown-timeout", "0.5")
    async with running_worker(*flags) as worker:
        begun = asyncio.Event()
        stream = asyncio.create_task(worker.stream(begun.set))
        await begun.wait()
        slept = await worker.http.post("/sleep", params={"level": "0", "mode": "keep"})
        assert slept.status_code == 200
        worker.process.send_signal(signal.SIGTERM)
        assert_each_reports_its_end([await stream])
        assert await worker.exit_status() == 0


@pytest.mark.model
async def test_the_real_engine_is_replaced_within_seconds(model_path: Path) -> None:
    flags = ("--model", str(model_path), "--max-model-len", "2048")
    async with running_worker(*flags) as worker:
        question = {"temperature": 0, "max_tokens": 8}
        expected = (await worker.ask(**question)).json()["choices"]
        load = asyncio.create_task(under_load(worker, send(worker, signal.SIGKILL), STREAMS))
        assert_each_reports_its_end(await report(worker, "real engine", load))
        assert (await worker.ask(**question)).json()["choices"] == expected


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.skipif(not counts_waits(), reason="the kernel keeps no sums of waits")
async def test_a_starved_engine_is_not_replaced(model_path: Path) -> None:
    flags = ("--model", str(model_path), "--max-model-len", "2048", "--step-budget", "0.5")
    async with running_worker(*flags) as worker:
        for n in range(3):  # the engine learns how long such a step takes
            assert (await worker.ask(messages=story(n), max_tokens=2)).status_code == 200
        engine = worker.engine_pid()
        assert engine is not None
        crowd(engine)
        with busy_loops(8):
            stream = await worker.stream(lambda: None, messages=story(3), max_tokens=2)
        assert stream.is_whole
        assert worker.engine_pid() == engine


def story(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} trains and a pointsman. " * 40}]
