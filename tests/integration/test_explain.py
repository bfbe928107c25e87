"""`pointsman explain` finds the fleet that runs and says why a request went where it went."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from running_fleet import Fleet, free_base_port, running_fleet, until

pytestmark = pytest.mark.envoy


async def pointsman(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a person types it, with a pipe behind it."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fleet.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


async def complete(fleet: Fleet, request_id: str, prompt: str) -> None:
    """One completion through Envoy."""
    await fleet.openai.completions.create(
        model="sim", prompt=prompt, max_tokens=4, extra_headers={"x-request-id": request_id}
    )


async def test_a_request_is_explained_while_the_fleet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one and one by its id, without being told where the picker is; the second request
    of a kind went where the first one left its prompt. A fleet that is gone is not found.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    prompt = "tell me a long story about a railway " * 40
    async with running_fleet(free_base_port(), "--workers", "3") as fleet:
        await fleet.ready()
        await complete(fleet, "first", prompt)
        await complete(fleet, "second", prompt)
        last, first = await pointsman("explain", "--last"), await pointsman("explain", "first")
        unknown = await pointsman("explain", "nobody")
        fleet.process.terminate()
        await until(lambda: fleet.process.returncode is not None, "the end")
    assert last.returncode == first.returncode == 0, last.stderr + first.stderr
    assert last.stdout.startswith("request second: completed, 200\n")
    assert "won by" in last.stdout
    assert "prefix-cache-scorer gave it" in last.stdout
    assert "chance chose among them" in first.stdout
    assert "\x1b" not in last.stdout
    assert (unknown.returncode, "not any more" in unknown.stderr) == (1, True)
    gone = await pointsman("explain", "--last", "--picker", fleet.picker_url)
    assert (gone.returncode, "no picker answers" in gone.stderr) == (1, True)
    assert not list((tmp_path / "pointsman").iterdir())
