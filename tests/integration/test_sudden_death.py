"""SIGKILL of `pointsman up` or of a worker, at any moment of its life: no process is left of it."""

import asyncio
import contextlib
import os
import signal
import uuid
from pathlib import Path

import pytest

from tests.support.fleet.running_fleet import (
    LIMIT_SECONDS,
    children,
    free_base_port,
    ready_fleet,
    running_fleet,
)
from tests.support.waiting import until
from tests.support.worker.running_worker import running_worker

pytestmark = pytest.mark.full

SIM = ("--engine", "sim")


class Family:
    """All processes that a test has started, by a mark in the environment that they inherit: a
    process is found whatever its parent is by now. One that is `known` is found too while it cannot
    be read, as at the moment in which it becomes another program.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mark = uuid.uuid4().hex
        monkeypatch.setenv("POINTSMAN_TEST_FAMILY", mark)
        self._mark = f"POINTSMAN_TEST_FAMILY={mark}".encode()
        self.known: set[int] = set()

    def living(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state in "ZX":
                    continue
                known = int(folder.name) in self.known
                if known or self._mark in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = line
        return found

    async def until_gone(self) -> None:
        try:
            await until(lambda: not self.living(), what="the last process is gone")
        finally:
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    return Family(monkeypatch)


@pytest.mark.envoy
@pytest.mark.parametrize(("workers", "started"), [(2, 1), (2, 4), (10, 6)])
async def test_nothing_survives_a_fleet_that_is_killed_while_it_starts(
    family: Family, workers: int, started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after its first process, in the midst of starting them, and when it has them all. Its
    folder goes too, unless the first process did not hear of it.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with running_fleet(free_base_port(), "--workers", str(workers)) as fleet:
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(family.known) < started:
                await asyncio.sleep(0)
                family.known = set(children(fleet.process.pid))
        fleet.process.kill()
        await fleet.process.wait()
        await family.until_gone()
    assert started == 1 or not os.listdir(tmp_path)


@pytest.mark.envoy
async def test_nothing_survives_a_fleet_that_is_killed_while_it_serves(family: Family) -> None:
    async with ready_fleet("--workers", "2") as fleet:
        restart = await fleet.restart()
        await until(
            lambda: (
                sum("-m picker " in line for line in family.living().values()) == 2
                or restart.returncode is not None  # it was too fast for us
            ),
            what="a second picker is started",
        )
        fleet.process.kill()
        await fleet.process.wait()
        await restart.wait()
        await family.until_gone()


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGSTOP])
async def test_nothing_survives_a_worker_that_is_killed(
    family: Family, short_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_path))
    async with running_worker(*SIM) as worker:
        engine = worker.engine_pid()
        assert engine is not None
        await until(lambda: not any(short_path.iterdir()), what="no socket has a name")
        assert (await worker.ask()).status_code == 200
        os.kill(engine, number)
        worker.process.kill()
        await worker.process.wait()
        await family.until_gone()
