"""Any number of processes shares the same load, and none outlives or delays the bench."""

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fleet.bench.client import Record
from fleet.bench.command import Settings
from fleet.bench.driver import ClientPulse, RequestForm
from fleet.bench.flags import build_parser
from fleet.bench.load import loads_of
from fleet.bench.shard import LoadShard, ShardProcess, endpoint_of, follow, started
from fleet.bench.summary import Observed, Stage, stage_of, summary
from fleet.errors import FleetError
from fleet.sim.virtual_time import run_in_virtual_time
from tests.support.fleet.virtual_endpoint import Times, VirtualEndpoint, bench_stage

FLAGS = ("--input-tokens", "4..40", "--output-tokens", "2..9", "--seed", "5")
SHARED = ("--prefix-groups", "3", "--prefix-tokens", "20..50")
TRACE = [{"timestamp": 700 * n, "input_length": 9, "output_length": 3} for n in range(20)]


def sent(tmp_path: Path, processes: int, *flags: str) -> tuple[Counter[str], list[float], Stage]:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, TRACE)))
    endpoint = VirtualEndpoint(lambda number, now: Times(0.3))
    argv = [str(trace) if one == "TRACE" else one for one in flags]
    run = bench_stage(endpoint, *FLAGS, *argv, processes=processes)
    drivers, stage = run_in_virtual_time(run)
    assert all(one.outcomes for one in drivers)
    bodies = Counter(json.dumps(body) for body in endpoint.bodies)
    return bodies, sorted(one.intended for one in stage.outcomes), stage


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "2..9", "--duration", "30", *SHARED),
        ("--rate", "5", "--requests", "50", "--burstiness", "0.5"),
        ("--rate", "1", "--duration", "30", "--turns", "1..4", "--think", "1"),
        ("--concurrency", "7", "--requests", "60"),
        ("--trace", "TRACE", "--speed", "2"),
        ("--trace", "TRACE", "--duration", "9"),
        ("--trace", "TRACE", "--rate", "4", "--duration", "3"),
    ],
    ids=["ramp", "requests", "sessions", "closed", "trace", "part of a trace", "trace at a rate"],
)
def test_three_processes_send_what_one_does(tmp_path: Path, flags: tuple[str, ...]) -> None:
    one, times, whole = sent(tmp_path, 1, *flags)
    three, times_of_three, parts = sent(tmp_path, 3, *flags)
    assert three == one
    if "--concurrency" not in flags:
        assert times_of_three == pytest.approx(times)
    flights = [max(pulse.in_flight for pulse in stage.pulses) for stage in (whole, parts)]
    assert flights[1] == flights[0]


def test_quantiles_are_those_of_all_samples() -> None:
    """30 of 300 requests are slow, all in one process, so a mean of quantiles would differ."""
    every = [Record(0.0, 0.0, ttft, ttft, ttft) for ttft in np.linspace(0.1, 0.2, 270)]
    slow = [Record(0.0, 0.0, ttft, ttft, ttft) for ttft in np.linspace(5.0, 9.0, 30)]
    parts = [Observed(some, [], 0, 0, 0.0) for some in (every[:100], every[100:], slow)]
    found = summary(stage_of("s", 0.0, 10.0, 0.0, parts), None).ttft
    assert found is not None
    values = [one.first_token for one in every + slow]
    assert (found.count, found.p95) == (300, pytest.approx(np.quantile(values, 0.95)))


def test_in_flight_is_the_sum_of_all_processes() -> None:
    looks = ([(0.051, 3), (0.102, 1)], [(0.052, 4), (0.101, 2), (0.152, 5)])
    parts = [Observed([], [ClientPulse(at, 0.0, n) for at, n in some], 0, 0, 0.0) for some in looks]
    stage = stage_of("s", 0.0, 1.0, 0.0, parts)
    assert [one.in_flight for one in stage.pulses] == [7, 3, 5, 0]


class Silent(asyncio.Protocol):
    def __init__(self, asked: asyncio.Event) -> None:
        self._asked = asked

    def data_received(self, data: bytes) -> None:
        self._asked.set()


async def with_two(act_on: str) -> tuple[list[ShardProcess], BaseException | None]:
    """Two processes without answers, and the error of `follow` after what is done to them."""
    asked = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(lambda: Silent(asked), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = Settings(**vars(build_parser().parse_args([*FLAGS, "--rate", "50"])))
    (load,) = loads_of(settings)
    place, form = endpoint_of(f"http://127.0.0.1:{port}", True, ()), RequestForm("m")
    shards = [LoadShard(n, 2, settings, load, 0, place, form, 600.0, 1.0, 0) for n in (0, 1)]
    async with server, started(shards[0]) as first, started(shards[1]) as second:
        for one in (first, second):
            await one.receive()
        following = asyncio.create_task(follow((first, second)))
        for one in (first, second):
            one.channel.send(time.perf_counter())
        await asked.wait()  # nothing is sent before the beginning, so `follow` runs already
        if act_on == "kill":
            second.process.send_signal(signal.SIGKILL)
        elif act_on == "stop":
            following.cancel()
        else:
            for one in (first, second):
                await one.channel.close()
                await one.process.wait()
        await asyncio.wait((following,))
        raised = None if following.cancelled() else following.exception()
    assert None not in (first.process.returncode, second.process.returncode)
    return [first, second], raised


def test_a_killed_process_is_one_sentence_and_ends_the_others() -> None:
    (first, _), raised = asyncio.run(with_two("kill"))
    assert isinstance(raised, FleetError)
    assert str(raised).startswith("process 2 of 2 of the bench was killed by SIGKILL")
    assert first.process.returncode == -signal.SIGKILL


def test_stopped_processes_send_their_results_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.bench.shard.STOP_SECONDS", 60.0)
    processes, raised = asyncio.run(with_two("stop"))
    assert raised is None
    assert any(one.seen.started for one in processes)
    assert all(one.seen.in_flight == 0 for one in processes)


def test_processes_end_with_the_bench() -> None:
    """A killed bench only closes its connections."""
    processes, _ = asyncio.run(with_two("leave"))
    assert [one.process.returncode for one in processes] == [0, 0]
