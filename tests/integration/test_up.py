"""`pointsman up` as a user runs it: a real Envoy, the picker, simulated workers, real signals."""

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.support.fleet.running_fleet import Fleet, free_base_port, ready_fleet, running_fleet
from tests.support.waiting import until

pytestmark = pytest.mark.envoy


async def test_a_fleet_serves_survives_and_goes() -> None:
    async with ready_fleet("--workers", "3", "--drain-timeout", "5") as fleet:
        lines = fleet.output.splitlines()
        assert len(lines) <= 16, fleet.output
        assert "warn" not in fleet.output.lower()
        assert await fleet.say_hello() == 4
        stream = await fleet.openai.chat.completions.create(
            model="sim", max_tokens=4, stream=True, messages=[{"role": "user", "content": "hello"}]
        )
        reasons = [event.choices[0].finish_reason async for event in stream]
        assert reasons[-1] in ("length", "stop")

        await _the_first_page_leads_on(fleet)
        await _kill_a_worker_under_load(fleet)
        await until(lambda: "worker-2 is back" in fleet.output, what="the worker is back")
        assert "worker-2 was ended by SIGKILL; starting it again" in fleet.output

        assert len(fleet.descendants()) >= 6  # envoy, picker, three workers, the reaper
        await fleet.interrupt()
    folder = re.search(r"log: (/\S+)/worker-2.log", fleet.output)
    assert not os.path.exists(folder[1])  # noqa: ASYNC240


async def _the_first_page_leads_on(fleet: Fleet) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        async with http.get(f"{fleet.url}/") as reply:
            text = await reply.text()
        named = re.findall(r"(?:http:/)?(?<!\w)/[\w./:]+", text)
        urls = [one if one.startswith("http") else fleet.url + one for one in named]
        assert f"{fleet.picker_url}/metrics" in urls
        assert f"{fleet.url}/v1/models" in urls
        for url in urls:
            if not url.endswith("/completions"):
                async with http.get(url) as reply:
                    assert await reply.read()
    assert text.startswith("Pointsman")


async def _kill_a_worker_under_load(fleet: Fleet) -> None:
    leaders = {pid: line for pid, line in fleet.descendants().items() if "-m worker --" in line}
    assert len(leaders) == 3
    victim = sorted(leaders, key=lambda pid: leaders[pid].split("--port")[1])[1]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(fleet.say_hello()) for _ in range(10)]
        os.killpg(victim, signal.SIGKILL)
        answers += [group.create_task(fleet.say_hello()) for _ in range(20)]
    assert [task.result() for task in answers] == [4] * 30


@pytest.mark.full
async def test_folders_named_like_our_packages_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("fleet/__init__", "picker/__init__", "worker/__init__", "types", "asyncio", "zmq"):
        path = tmp_path / "here" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(7)")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with ready_fleet("--workers", "1") as fleet:
        assert not ran.exists(), ran.read_text()
        assert await fleet.say_hello() == 4, fleet.output
    assert not ran.exists(), ran.read_text()


@pytest.mark.full
async def test_a_second_signal_stops_at_once() -> None:
    async with ready_fleet("--workers", "1", "--drain-timeout", "600") as fleet:
        stream = await fleet.openai.chat.completions.create(
            model="sim",
            max_tokens=8000,
            stream=True,
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        fleet.process.send_signal(signal.SIGINT)
        wait = "stopping (waiting for 1 request, 600 s at most; Ctrl-C again to stop at once)"
        await until(lambda: wait in fleet.output, what="the drain begins")
        await until(lambda: re.search("  1 request left, 5\\d\\d", fleet.output), what="it goes on")
        assert fleet.process.returncode is None
        await fleet.interrupt()


@pytest.mark.full
async def test_a_signal_during_the_start_stops_it() -> None:
    async with running_fleet(free_base_port(), "--workers", "2") as fleet:
        await until(lambda: "starting" in fleet.output, what="it begins")
        await fleet.interrupt()
        assert "curl" not in fleet.output


@pytest.mark.full
async def test_a_start_that_fails_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with running_fleet(free_base_port(), "--startup-timeout", "0.01") as fleet:
        await fleet.ended(1)
    assert "not ready after 0.01 s" in fleet.output
    assert str(tmp_path) not in fleet.output
    assert not os.listdir(tmp_path)


@pytest.mark.full
async def test_a_busy_port_is_one_sentence() -> None:
    port = free_base_port()
    with socket.create_server(("127.0.0.1", port)):
        async with running_fleet(port) as fleet:
            await fleet.ended(1)
    assert fleet.output == (
        f"pointsman: port {port} on 127.0.0.1 is busy: stop what listens there, "
        "or choose another with --port\n"
    )
