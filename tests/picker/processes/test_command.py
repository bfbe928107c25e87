"""The command line with several processes: readiness, signals, and no process that is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from ext_proc_stream import PATIENCE_SECONDS, GatewayStream, completion
from whole_picker import until

READY = "picker ready: ext_proc 127.0.0.1:"
PORTS = ("--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0")


@asynccontextmanager
async def picker(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A picker of three processes that is ready, and where it listens."""
    path = folder / "e.yaml"
    path.write_text("endpoints: [{name: a, address: 127.0.0.1, port: 1}]")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker", "--processes", "3", "--bind-address", "127.0.0.1"),
        *("--endpoints-file", str(path), *PORTS),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for line in process.stderr:
                if READY in line.decode():
                    break
        yield process, line.decode().partition("ext_proc ")[2].partition(",")[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in listed.split()]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or only waits for somebody to take note of that."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_all_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal's reaches the children as well, which leave it to the parent."""
    async with picker(tmp_path) as (process, _):
        serving = children(process.pid)
        assert len(serving) == 3
        for one in serving:
            if number is signal.SIGINT:
                os.kill(one, number)
        process.send_signal(number)
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0, log
        assert "draining: 0 requests under way" in log
        assert "Traceback" not in log
        assert all(map(is_gone, serving))


async def test_a_second_signal_does_not_wait_for_streams(tmp_path: Path) -> None:
    """What is under way is cut."""
    async with picker(tmp_path) as (process, address), grpc.aio.insecure_channel(address) as to:
        stream = GatewayStream(to)
        await stream.ask(completion())
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        async for line in process.stderr:
            if b"draining: 1 requests under way" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0
        assert await stream.call.code() is not grpc.StatusCode.OK


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell children by the channel")
async def test_no_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Even one that cannot see to it itself, because it is stopped."""
    async with picker(tmp_path) as (process, _):
        serving = children(process.pid)
        assert len(serving) == 3
        os.kill(serving[0], signal.SIGSTOP)
        process.kill()
        await process.wait()

        async def all_are_gone() -> bool:
            return all(map(is_gone, serving))

        await until(all_are_gone)
