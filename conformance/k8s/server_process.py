"""The API server of this repository's tests, as a process that the suite may take away."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SERVER = ROOT / "tests" / "fakes" / "kube_api"
_START_SECONDS = 30.0


class NoServerError(Exception):
    """The server does not start; the text says why."""


@dataclass(frozen=True, slots=True)
class TestServer:
    """A running one; `kubeconfig` leads to it."""

    __test__ = False

    kubeconfig: Path
    process: asyncio.subprocess.Process

    def go_away(self) -> None:
        """Connections are cut, and new ones refused."""
        self.process.send_signal(signal.SIGUSR1)

    def come_back(self) -> None:
        """At the same port, with its objects, and without its history."""
        self.process.send_signal(signal.SIGUSR2)


@asynccontextmanager
async def running_test_server(folder: Path, definitions: Path) -> AsyncIterator[TestServer]:
    """One with these CRDs, for the length of the block. Raises `NoServerError`."""
    if not _SERVER.is_dir():
        raise NoServerError(f"{_SERVER} is not there; set KUBECONFIG to use a real API server")
    kubeconfig = folder / "kubeconfig"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.kube_api"),
        *("--kubeconfig", str(kubeconfig), "--crds", str(definitions)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _until_ready(process)
        yield TestServer(kubeconfig, process)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_ready(process: asyncio.subprocess.Process) -> None:
    if process.stdout is None:
        raise NoServerError("the test API server has no output")
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
    except TimeoutError:
        raise NoServerError(f"no word from it for {_START_SECONDS:g} s") from None
    if not line.startswith(b"ready "):
        raise NoServerError("the test API server has ended by itself")
