"""`pointsman restart`: a new picker, a new Envoy and new workers under load, and no request that
fails or passes the picker by.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from running_fleet import LIMIT_SECONDS, Fleet, command, free_base_port, running_fleet
from steady_load import PATH, STREAM_TOKENS, Load, body, steady_load
from waiting import until

pytestmark = pytest.mark.envoy
FLAGS = ("--decision-header", "--drain-timeout", "5")
QUEUE = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: queue-scorer}
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
flowControl: {saturationDetector: {pluginRef: concurrency-detector}}
"""


@pytest.fixture
def port() -> int:
    """Where the fleet of a test listens."""
    return free_base_port()


class Restart:
    """A running `pointsman restart`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def ended(self) -> int:
        """Its exit status."""
        assert self.process.stdout is not None
        async with asyncio.timeout(2 * LIMIT_SECONDS):
            async for line in self.process.stdout:
                self.output += line.decode()
            return await self.process.wait()


async def restart(fleet: Fleet, part: str) -> Restart:
    """Begin one, as a person would."""
    argv = (sys.executable, "-m", "fleet.cli", "restart", part, "--port", str(fleet.port))
    return Restart(
        await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    )


def parts_of(fleet: Fleet) -> dict[str, int]:
    """Name → process id of the leaders: picker, Envoy, and each worker by its port."""
    found = {}
    for pid, line in fleet.descendants().items():
        if "-m picker " in line:
            found["picker"] = pid
        elif "envoy" in line and "--concurrency" in line:
            found["envoy"] = pid
        elif "-m worker --" in line:
            found[f"worker {line.partition('--port ')[2].partition(' ')[0]}"] = pid
    return found


def assert_nothing_was_lost(load: Load) -> None:
    """Every request of every kind was answered in full, and had been picked."""
    assert not load.faults
    assert load.unpicked == 0
    kinds = {f"{http} {kind}" for http in ("HTTP/1.1", "HTTP/2") for kind in ("short", "stream")}
    assert set(load.served) == kinds


async def is_gone(processes: dict[int, str]) -> None:
    """None of them is left."""

    def remaining() -> list[int]:
        return [pid for pid, line in processes.items() if line and command(pid) == line]

    await until(lambda: not remaining(), what="all processes are gone")


async def test_a_restart_of_everything_costs_no_request(port: int) -> None:
    """From the first request that gets in to the last one: nothing fails, nothing passes the picker
    by; every part is a new process, `explain` finds the new picker, and supervision goes on.
    """
    async with running_fleet(port, "--workers", "3", *FLAGS) as fleet:
        await fleet.ready()
        before = parts_of(fleet)
        assert len(before) == 5
        async with steady_load(port) as load:
            await until(lambda: load.total > 20, what="load")
            first = await restart(fleet, "all")
            await until(lambda: "picker: starting" in fleet.output, what="the restart begins")
            second = await restart(fleet, "workers")
            assert await second.ended() == 1
            assert "a restart of picker, envoy, workers is under way" in second.output
            assert await first.ended() == 0, first.output
            # At once, when the Envoy before this one is hardly gone.
            assert await (await restart(fleet, "envoy")).ended() == 0
            so_far = load.total
            await until(lambda: load.total > so_far + 20, what="load afterwards")
        assert_nothing_was_lost(load)
        after = parts_of(fleet)
        assert after.keys() == before.keys()
        assert not set(after.values()) & set(before.values())
        assert "was ended by" not in fleet.output
        assert re.search(r"done in .* 0 with a status of 5xx, 0 past the picker", first.output)

        (metrics,) = re.findall(r"picker: restarted at \S+ metrics (\d+)", first.output)
        url = f"http://127.0.0.1:{metrics}/decisions?limit=1"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            assert (await reply.json())["decisions"]
        os.kill(after["picker"], signal.SIGKILL)
        os.kill(after["envoy"], signal.SIGKILL)
        await until(lambda: "picker is back" in fleet.output, what="the picker is back")
        await until(lambda: "envoy is back" in fleet.output, what="Envoy is back")
        assert await fleet.say_hello() == 4
        assert await (await restart(fleet, "envoy")).ended() == 0  # also of one that was reborn
        assert await fleet.say_hello() == 4

        processes = fleet.descendants()
        memory = set(Path("/dev/shm").glob("envoy_shared_memory_*"))  # noqa: ASYNC240
        fleet.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(fleet.process.wait(), LIMIT_SECONDS) == 0
        await is_gone(processes)
        assert len(memory - set(Path("/dev/shm").glob("envoy_shared_memory_*"))) == 1  # noqa: ASYNC240


async def test_a_worker_that_dies_meanwhile_does_not_stop_a_restart(port: int) -> None:
    """It is started again, restarted in its turn, and no short request is lost."""
    async with running_fleet(port, "--workers", "3", *FLAGS) as fleet:
        await fleet.ready()
        before = parts_of(fleet)
        stop = asyncio.Event()

        async def keep_asking() -> int:
            asked = 0
            while not stop.is_set():
                assert await fleet.say_hello() == 4
                asked += 1
            return asked

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(keep_asking()) for _ in range(3)]
            rolling = await restart(fleet, "workers")
            first, second, _ = sorted(name for name in before if "worker" in name)
            await until(
                lambda: parts_of(fleet).get(first) != before[first], what="the first worker goes"
            )
            os.killpg(before[second], signal.SIGKILL)
            assert await rolling.ended() == 0, rolling.output
            stop.set()
        assert all(task.result() for task in asking)
        after = parts_of(fleet)
        assert after.keys() == before.keys()
        assert not {after[name] for name in after if "worker" in name} & set(before.values())
        assert "worker-2 was ended by SIGKILL; starting it again" in fleet.output


async def test_the_only_worker_is_replaced_by_one_beside_it(port: int) -> None:
    """With one worker nothing fails either. Then Ctrl-C in the middle of another restart ends all,
    and whoever asked for it is told.
    """
    async with running_fleet(port, "--workers", "1", *FLAGS) as fleet:
        await fleet.ready()
        before = parts_of(fleet)
        async with steady_load(port) as load:
            await until(lambda: load.total > 10, what="load")
            rolling = await restart(fleet, "workers")
            assert await rolling.ended() == 0, rolling.output
        assert_nothing_was_lost(load)
        after = parts_of(fleet)
        assert after["picker"] == before["picker"]
        assert {name for name in after if "worker" in name}.isdisjoint(before)

        cut = await restart(fleet, "picker")
        await until(lambda: "picker: starting" in fleet.output, what="the restart begins")
        processes = fleet.descendants()
        fleet.process.send_signal(signal.SIGINT)
        assert await cut.ended() == 1
        assert "the fleet stops" in cut.output
        assert await asyncio.wait_for(fleet.process.wait(), LIMIT_SECONDS) == 0, fleet.output
        await is_gone(processes)


async def test_who_waits_or_streams_at_the_end_is_told(port: int, tmp_path: Path) -> None:
    """Before the fleet is ready nobody passes the picker by; a new picker that cannot start leaves
    the old one in its place; when the drain is over, a request in the picker's queue is refused and
    a stream ends with an error: nobody is just cut off.
    """
    config = tmp_path / "config.yaml"
    config.write_text(QUEUE)
    flags = ("--decision-header", "--workers", "1", "--drain-timeout", "0.5", "--config")
    async with running_fleet(port, *flags, str(config)) as fleet, aiohttp.ClientSession() as http:
        early = await _first_answer(http, fleet.url)
        await fleet.ready()
        decision = f"{fleet.picker_url}/decisions/{early.headers['x-request-id']}"
        async with http.get(decision) as reply:
            assert reply.status == 200, "nobody decided the first request"
        config.write_text("nonsense: true\n")
        failed = await restart(fleet, "picker")
        assert await failed.ended() == 1
        assert "picker ended with status 1 while starting" in failed.output
        request = body(stream=True, tokens=100 * STREAM_TOKENS)
        streaming = await http.post(fleet.url + PATH, json=request)
        await streaming.content.readline()
        waiting = asyncio.ensure_future(http.post(fleet.url + PATH, json=body(False, 4)))
        await until_queued(http, fleet)
        fleet.process.send_signal(signal.SIGINT)
        assert (await waiting).status == 503
        received = b""
        with contextlib.suppress(aiohttp.ClientPayloadError):  # a worker cuts off after its error
            async for piece in streaming.content.iter_any():
                received += piece
        assert b'"error"' in received
        assert await asyncio.wait_for(fleet.process.wait(), LIMIT_SECONDS) == 0, fleet.output


async def _first_answer(http: aiohttp.ClientSession, url: str) -> aiohttp.ClientResponse:
    """Of the first request that is not refused at the door."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                return await http.post(url + PATH, json=body(False, 4))
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)


async def until_queued(http: aiohttp.ClientSession, fleet: Fleet) -> None:
    """Wait until one request waits in the picker's queue."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            async with http.get(f"{fleet.picker_url}/queues") as reply:
                if (await reply.json())["queued_requests"]:
                    return
            await asyncio.sleep(0.02)
