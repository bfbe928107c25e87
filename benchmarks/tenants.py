"""The latency of a tenant alone, and while another floods the pool.

Starts `pointsman up` with simulated workers, two tenants with keys, and flow control that is fair
to them; the loads are two `pointsman bench`. Steps of the simulated engine take the same time
whatever runs in them, so all of the difference is waiting. Prints both, and the ratio:

    python benchmarks/tenants.py --seconds 60
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from measuring import Table, command_line, write_results

from fleet.run.ports import free_ports

PLACES = 16  # of each worker
CONFIG = f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {{type: running-requests-size-scorer}}
- {{type: FAIRNESS}}
- {{type: concurrency-detector, parameters: {{maxConcurrency: {PLACES}}}}}
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: running-requests-size-scorer}}]
flowControl:
  defaultPriorityBand: {{fairnessPolicyRef: FAIRNESS}}
  saturationDetector: {{pluginRef: concurrency-detector}}
"""
STEP_MS = 40
WORKER = f"--max-num-seqs {PLACES} --sim-decode-base-ms {STEP_MS}ms --sim-decode-per-seq-ms 0s"
COMMAND = (sys.executable, "-m", "fleet.commands.cli")


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, given: argparse.Namespace, keys: dict[str, str]
) -> AsyncIterator[str]:
    tenants = [{"name": name, "keys": [{"value": key}]} for name, key in keys.items()]
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
    (folder / "config.yaml").write_text(CONFIG.replace("FAIRNESS", given.fairness))
    (port,) = free_ports("127.0.0.1", 1, 21_000)
    url = f"http://127.0.0.1:{port}"
    up = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("up", "--engine", "sim", "--workers", str(given.workers), "--port", str(port)),
        *("--tenants", str(folder / "tenants.yaml"), "--config", str(folder / "config.yaml")),
        *("--worker-args", WORKER, "--drain-timeout", "1"),
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        await ready(url, next(iter(keys.values())), up)
        yield url
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
        await up.wait()


async def ready(url: str, key: str, up: asyncio.subprocess.Process) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with asyncio.timeout(180), httpx.AsyncClient(headers=headers) as client:
        while True:
            if up.returncode is not None:
                raise SystemExit(f"`pointsman up` ended with status {up.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/v1/models")).status_code == 200:
                    return
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def load(url: str, key: str, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    bench = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("bench", "--url", url, "--header", f"authorization: Bearer {key}"),
        *("--input-tokens", "64", "--seed", "1", *flags),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield bench
    finally:
        if bench.returncode is None:
            bench.kill()
            await bench.wait()


async def quiet(url: str, key: str, path: Path, given: argparse.Namespace) -> dict[str, Any]:
    flags = ("--rate", f"{given.rate:g}", "--duration", f"{given.seconds:g}")
    tokens = ("--output-tokens", str(given.tokens), "--json", str(path))
    async with load(url, key, *flags, *tokens) as bench:
        await bench.wait()
    return read(path)


def read(path: Path) -> dict[str, Any]:
    (stage,) = json.loads(path.read_text())["stages"]
    found: dict[str, Any] = stage
    return found


async def measured(given: argparse.Namespace) -> dict[str, Any]:
    keys = {name: f"sk-{secrets.token_hex(16)}" for name in ("quiet", "flood")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with fleet(folder, given, keys) as url:
            alone = await quiet(url, keys["quiet"], folder / "alone.json", given)
            sessions = str(given.flood * given.workers * PLACES)
            long = f"{3 * given.seconds + 60:g}"
            flood = ("--concurrency", sessions, "--duration", long)
            async with load(url, keys["flood"], *flood, "--output-tokens", str(given.tokens)):
                await asyncio.sleep(given.settle)  # until the flood fills the pool
                beside = await quiet(url, keys["quiet"], folder / "beside.json", given)
    return {"alone": alone, "beside": beside}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of the tenant")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--flood", type=int, default=2, help="sessions for each place of the pool")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of flood beforehand")
    fairness = "deficit-round-robin-fairness-policy"
    parser.add_argument("--fairness", default=fairness, help="policy of flow control")
    given = parser.parse_args()
    found = asyncio.run(measured(given))
    table = Table("p99 <6", "alone_seconds .3f", "beside_seconds .3f", "ratio .2f")
    for name in ("ttft", "e2e"):
        one, two = (found[which][name]["p99"] for which in ("alone", "beside"))
        table.add(p99=name, alone_seconds=one, beside_seconds=two, ratio=two / one)
    write_results(given, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
