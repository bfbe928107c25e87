"""A real Envoy and a real picker as processes, and what Envoy's port of administration says."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from fleet.envoy.binary import find_envoy
from tests.support.local_ports import free_port
from tests.support.waiting import until


class EnvoyProcess:
    def __init__(self, folder: Path, admin: int) -> None:
        self._folder, self._admin = folder, f"http://127.0.0.1:{admin}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, bootstrap: str, threads: int = 1) -> None:
        path = self._folder / "bootstrap.yaml"
        path.write_text(bootstrap)
        self._process = await asyncio.create_subprocess_exec(
            str(find_envoy()),
            *("-c", str(path), "--disable-hot-restart", "--concurrency", str(threads)),
            *("--log-level", "warn", "--log-path", str(self._folder / "envoy.log")),
            *("--file-flush-interval-msec", "50"),
        )

    async def until_ready(self) -> None:
        await until(self._is_ready, what="Envoy listens")

    async def _is_ready(self) -> bool:
        assert self._process.returncode is None, (self._folder / "envoy.log").read_text()[-2000:]
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self._admin}/ready") as reply,
            ):
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches; none while Envoy does not answer."""
        wanted = {"filter": pattern, "format": "json"}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self._admin}/stats", params=wanted) as reply,
            ):
                found = (await reply.json())["stats"]
        except aiohttp.ClientError:
            return {}
        return {one["name"]: one["value"] for one in found if "value" in one}

    async def healthy(self, cluster: str) -> int | None:
        name = f"cluster.{cluster}.membership_healthy"
        return (await self.stats(f"^{name}$")).get(name)

    async def until_healthy(self, cluster: str, count: int) -> None:
        await until(
            lambda: self.healthy(cluster),
            lambda found: found == count,
            what=f"{count} members of {cluster}",
        )


class PickerProcess:
    """A picker on ports that it keeps when it is started again; `pools` are `--pool` flags."""

    def __init__(self, folder: Path, pools: Sequence[str], *flags: str) -> None:
        self.grpc, self.health, self.http, self.xds = (free_port() for _ in range(4))
        self._folder, self._flags = folder, (*(f"--pool={one}" for one in pools), *flags)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "picker", "--bind-address=127.0.0.1", *self._flags),
            *(f"--grpc-port={self.grpc}", f"--grpc-health-port={self.health}"),
            *(f"--metrics-port={self.http}", f"--xds-port={self.xds}", "--secure-serving=false"),
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
