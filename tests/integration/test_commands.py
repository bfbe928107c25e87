"""Commands find the fleet that runs: `explain` says why a request went where it went, `doctor` is
silent while all is well and to the point when not.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from fleet.doctor.command import FINE, WRONG
from tests.support.fleet.running_fleet import Fleet, pointsman, ready_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.full]


async def complete(fleet: Fleet, request_id: str, prompt: str) -> None:
    await fleet.openai.completions.create(
        model="sim", prompt=prompt, max_tokens=4, extra_headers={"x-request-id": request_id}
    )


async def test_a_running_fleet_is_explained_and_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no other fleet of this machine is known
    async with ready_fleet("--workers", "3") as fleet:
        await explained(fleet)
        await examined(fleet)
        await listed(fleet)
        fleet.process.terminate()
        await until(lambda: fleet.process.returncode is not None, what="the end")
    gone = await pointsman("explain", "--last", "--picker", fleet.picker_url)
    assert (gone.returncode, "no picker answers" in gone.stderr) == (1, True)
    assert not list((tmp_path / "pointsman").iterdir())


async def explained(fleet: Fleet) -> None:
    prompt = "tell me a long story about a railway " * 40
    await complete(fleet, "first", prompt)
    await complete(fleet, "second", prompt)
    last, first = await pointsman("explain", "--last"), await pointsman("explain", "first")
    unknown = await pointsman("explain", "nobody")
    assert last.returncode == first.returncode == 0, last.stderr + first.stderr
    assert last.stdout.startswith("request second: completed, 200\n")
    assert "won by" in last.stdout
    assert "expected-cost-scorer gave it" in last.stdout
    assert "chance chose among them" in first.stdout
    assert "\x1b" not in last.stdout
    assert (unknown.returncode, "no longer stored" in unknown.stderr) == (1, True)


async def listed(fleet: Fleet) -> None:
    parts = await pointsman("ps")
    first, *lines = parts.stdout.splitlines()
    assert first == f"port {fleet.port}, pid {fleet.process.pid}, dashboard {fleet.picker_url}"
    names = ["envoy", "picker", "worker-1", "worker-2", "worker-3"]
    assert [line.split()[0] for line in lines] == names
    assert all(re.search(r"[1-9]\d* MB   pid \d+", line) for line in lines)
    log = await pointsman("logs", "worker-2", "--lines", "1000")
    assert (log.returncode, "worker ready on" in log.stdout) == (0, True), log.stdout
    unknown = await pointsman("logs", "worker-4")
    assert unknown.returncode == 1
    assert unknown.stderr == (
        f"pointsman: no part 'worker-4' has a log here; there are {', '.join(names)}\n"
    )


async def examined(fleet: Fleet) -> None:
    well = await pointsman("doctor", "--json")
    report = json.loads(well.stdout)
    assert report["findings"] == []
    assert well.returncode == FINE
    looked_at = " ".join(report["looked_at"])
    assert fleet.picker_url in looked_at
    assert "Envoy unix://" in looked_at
    assert "3 workers" in looked_at

    port = fleet.worker_urls[0].rpartition(":")[2]
    stopped = min(pid for pid, line in fleet.descendants().items() if f"--port {port} " in line)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wrong = await pointsman("doctor", "--json")
    finally:
        os.kill(stopped, signal.SIGCONT)
    findings = json.loads(wrong.stdout)["findings"]
    assert wrong.returncode == WRONG
    assert "worker-reachable" in {one["check"] for one in findings}
    assert all(one["why"] and one["fix"] for one in findings)
