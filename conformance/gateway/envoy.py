"""Start and stop one Envoy process."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from conformance.waiting import until

_START_SECONDS = 30.0


class GatewayError(Exception):
    """Envoy does not run with what it was given; the text says why."""


@dataclass(frozen=True, slots=True)
class Envoy:
    """A running Envoy: where its listeners are, by their names."""

    urls: Mapping[str, str]
    admin: str
    client: aiohttp.ClientSession

    async def healthy_members(self, cluster: str) -> int:
        """The number of members of a cluster that Envoy would use."""
        name = f"cluster.{cluster}.membership_healthy"
        asked = {"filter": f"^{name}$", "format": "json"}
        async with self.client.get(f"{self.admin}/stats", params=asked) as response:
            found = (await response.json(content_type=None))["stats"]
        return sum(int(stat["value"]) for stat in found if stat.get("name") == name)

    async def until_healthy(self, pool: str, count: int, limit_seconds: float = 30.0) -> None:
        """Wait until it uses `count` pickers (0 or 1) for a pool."""

        async def settled() -> bool:
            return await self.healthy_members(f"picker-{pool}") == count

        what = "uses the picker" if count else "has noticed that the picker is gone"
        await until(settled, f"Envoy {what}", limit_seconds)


@asynccontextmanager
async def running_envoy(
    binary: Path, document: Mapping[str, Any], folder: Path
) -> AsyncIterator[Envoy]:
    """Run it with a bootstrap for the length of the block. Raises `GatewayError`."""
    config, admin = folder / "envoy.json", folder / "envoy.admin"
    config.write_text(json.dumps(document))
    admin.unlink(missing_ok=True)
    log = folder / "envoy.log"
    process = await asyncio.create_subprocess_exec(
        str(binary),
        *("-c", str(config), "--admin-address-path", str(admin), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warn", "--log-path", str(log)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as client:
            url = await _admin_url(process, admin, log)
            yield Envoy(await _listeners(client, url), url, client)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _admin_url(process: asyncio.subprocess.Process, path: Path, log: Path) -> str:
    async def listening() -> str:
        if process.returncode is not None:
            raise GatewayError(f"Envoy ended with {process.returncode}: {_text(log)[-2000:]}")
        return _text(path).strip()

    return "http://" + await until(listening, "Envoy starts", _START_SECONDS)


def _text(path: Path) -> str:
    """The text of a small file, empty while it does not exist."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


async def _listeners(client: aiohttp.ClientSession, admin: str) -> dict[str, str]:
    async def ready() -> dict[str, str]:
        with suppress(aiohttp.ClientError):
            async with client.get(f"{admin}/ready") as response:
                if response.status != 200:
                    return {}
            async with client.get(f"{admin}/listeners", params={"format": "json"}) as response:
                listed = (await response.json(content_type=None))["listener_statuses"]
            addresses = {one["name"]: one["local_address"]["socket_address"] for one in listed}
            return {
                name: f"http://{at['address']}:{at['port_value']}" for name, at in addresses.items()
            }
        return {}

    return await until(ready, "Envoy listens", _START_SECONDS)
