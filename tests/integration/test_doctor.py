"""`pointsman doctor` over a fleet that runs: silent while all is well, to the point when not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from running_fleet import Fleet, free_base_port, running_fleet, until

from fleet.doctor.command import FINE, WRONG

pytestmark = pytest.mark.envoy
Environment = dict[str, str]


async def doctor(environment: Environment, *flags: str) -> tuple[int, dict]:
    """Its exit status and its report."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fleet.cli", "doctor", "--json", *flags),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(output)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Where no other fleet of this machine is known."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return dict(os.environ)


def worker_pid(fleet: Fleet, url: str) -> int:
    """The process that listens there."""
    port = url.rpartition(":")[2]
    found = [pid for pid, line in fleet.descendants().items() if f"--port {port} " in line]
    return min(found)


async def test_a_fleet_that_is_well_and_then_is_not(environment: Environment) -> None:
    """Picker, Envoy and workers are found and nothing is said of them; a worker that hangs is
    told of by whoever asks it.
    """
    async with running_fleet(free_base_port(), "--workers", "2") as fleet:
        await fleet.ready()
        await fleet.say_hello()
        status, report = await doctor(environment)
        assert report["findings"] == []
        assert status == FINE
        looked_at = " ".join(report["looked_at"])
        assert fleet.picker_url in looked_at
        assert "Envoy unix://" in looked_at
        assert "2 workers" in looked_at

        stopped = worker_pid(fleet, fleet.worker_urls[0])
        os.kill(stopped, signal.SIGSTOP)
        try:
            status, report = await doctor(environment)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert status == WRONG
        checks = {one["check"] for one in report["findings"]}
        assert "worker-reachable" in checks
        assert all(one["why"] and one["fix"] for one in report["findings"])
        fleet.process.send_signal(signal.SIGINT)
        await until(lambda: fleet.process.returncode is not None, "the end")
