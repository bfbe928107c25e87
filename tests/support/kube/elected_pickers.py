"""Pickers as processes of their own that elect a leader at the fake API server."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.local_ports import free_port
from tests.support.waiting import until

LIMIT_SECONDS = 60.0
LEASE = "epp-default-pool.llm-d.ai"
APP = {"app": "vllm"}
TIMINGS = (
    "--leader-election-lease-duration=9s",
    "--leader-election-renew-deadline=6s",  # on a busy machine the API server, too, takes seconds
    "--leader-election-retry-period=500ms",
)
_K8S, _OWN = "inference.networking.k8s.io", "llm-d.ai"
RIGHTS = (
    Rule([""], ["pods"], ["list", "watch"], (), "default"),
    Rule([_K8S], ["inferencepools"], ["list", "watch"], ["pool"], "default"),
    Rule([_OWN], ["inferenceobjectives", "inferencemodelrewrites"], ["list", "watch"]),
    Rule(["coordination.k8s.io"], ["leases"], ["get", "update"], [LEASE], "default"),
    Rule(["coordination.k8s.io"], ["leases"], ["create"], (), "default"),
)


@dataclass
class ElectedPicker:
    name: str
    process: subprocess.Popen[bytes]
    grpc: int
    health: int
    http: int

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def page(self, path: str) -> tuple[int, str]:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_SECONDS)) as session,
                session.get(f"http://127.0.0.1:{self.http}{path}") as response,
            ):
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def is_ready(self) -> bool:
        return (await self.page("/readyz"))[0] == 200

    async def stands_by(self) -> bool:
        status, text = await self.page("/readyz")
        return status == 503 and "on standby" in text

    async def serving(self, service: str) -> bool:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.health}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass
class Election:
    api: KubeApi
    leader: ElectedPicker
    standby: ElectedPicker

    @property
    def transitions(self) -> int:
        return self.api.read("leases", LEASE)["spec"]["leaseTransitions"]


async def until_ready(one: ElectedPicker) -> None:
    await until(one.is_ready)


async def until_not_ready(one: ElectedPicker) -> None:
    await until(one.is_ready, lambda found: not found)


@contextmanager
def _running(name: str, environment: dict[str, str], *flags: str) -> Iterator[ElectedPicker]:
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "picker", "--pool-name=pool", "--pool-namespace=default"]
    command += ["--bind-address=127.0.0.1", f"--grpc-port={ports[0]}", "--drain-timeout=2s"]
    command += [f"--grpc-health-port={ports[1]}", f"--metrics-port={ports[2]}"]
    command += ["--ha-enable-leader-election", *TIMINGS, *flags]
    environment = {**os.environ, **environment, "POD_NAME": name}
    process = subprocess.Popen(command, env=environment)
    try:
        yield ElectedPicker(name, process, ports[0], ports[1], ports[2])
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(LIMIT_SECONDS)


@asynccontextmanager
async def elected_pickers(
    folder: Path, *flags: str, pods: tuple[str, ...] = (), port: int = 8000
) -> AsyncIterator[Election]:
    async with running_kube_api(None, *sorted(CRDS.glob("*.yaml"))) as api:
        api.write(pool(name="pool", targetPorts=[{"number": port}]))
        for number, address in enumerate(pods):
            Kubelet(api).run(f"pod-{number}", address, APP)
        api.access.grant("token", "picker", RIGHTS)
        environment = {"KUBECONFIG": str(api.write_kubeconfig(folder / "config", token="token"))}
        with ExitStack() as stack:
            first = stack.enter_context(_running("first", environment, *flags))
            await until_ready(first)
            second = stack.enter_context(_running("second", environment, *flags))
            await until(second.stands_by)
            yield Election(api, first, second)
