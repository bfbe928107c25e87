"""The command line: flags, exit statuses, signals."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from picker.__main__ import main


def test_a_picker_that_cannot_start_says_why_and_exits_with_1(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert main(["--endpoints-file", "/nowhere/e.yaml"]) == 1
    assert caplog.records[-1].message.startswith("/nowhere/e.yaml: cannot read the endpoints file")
    assert caplog.records[-1].exc_info is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: []")
    ports = ["--grpc-port=0", "--grpc-health-port=0", "--metrics-port=0"]
    command = [*("-m", "picker", "--bind-address", "127.0.0.1", "--endpoints-file"), str(path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *ports, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    async for line in process.stderr:
        lines.append(line.decode())
        if "picker ready: ext_proc 127.0.0.1:" in lines[-1]:
            process.send_signal(number)
    assert await process.wait() == 0, "".join(lines)
    assert "draining" in lines[-1]
