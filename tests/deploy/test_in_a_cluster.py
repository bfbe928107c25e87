"""What is rendered, run: the picker's flags and rights, its Envoy, and what that does at its end.

Only ports and files are others than in a Pod; the API server is that of the tests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import ClientConnectionError, ClientSession, web
from kube_api.access import Rule
from kube_api.kubelet import Kubelet
from kube_api.server import KubeApi, running_kube_api
from manifests import NAMESPACE, ROOT, containers, kustomized, of_kind, pod_of, workloads

from fleet.envoy.binary import find_envoy
from fleet.ports import free_ports

pytestmark = [pytest.mark.usefixtures("kubectl"), pytest.mark.envoy]
FOLDER = "deploy/k8s/overlays/standalone"
PORTS = {"http": 8080, "admin": 9901, "grpc": 9002, "health": 9003, "xds": 9004}
LABELS = {"app.kubernetes.io/name": "pointsman-worker"}
LIMIT_SECONDS = 60


@dataclass
class Workers:
    """Servers at one port of several loopback addresses; `hold` keeps answers back until set."""

    port: int
    served: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.Response:
        """Say which address answers; a path with `slow` waits for `hold`."""
        body = await request.json()
        if body["prompt"] == "slow":
            self.arrived.set()
            await self.hold.wait()
        assert request.transport is not None
        self.served.append(request.transport.get_extra_info("sockname")[0])
        return web.json_response({"choices": []})


@asynccontextmanager
async def workers(addresses: list[str], port: int) -> AsyncIterator[Workers]:
    """Workers that answer at these addresses."""
    serving = Workers(port)
    app = web.Application()
    app.router.add_post("/v1/completions", serving.serve)
    app.router.add_get("/metrics", _page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    for address in addresses:
        await web.TCPSite(runner, address, port).start()
    try:
        yield serving
    finally:
        serving.hold.set()
        await runner.cleanup()


async def _page(_: web.Request) -> web.Response:
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    return web.Response(text="".join(f"vllm:{name} 0\n" for name in names))


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program for the length of the block."""
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until `check` says yes."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _account(api: KubeApi, overlay: str, folder: Path) -> dict[str, str]:
    """The environment of a Pod that may do what the rendered Role allows, and nothing else."""
    [role] = of_kind(kustomized(overlay), "Role")
    rules = [
        Rule(
            one["apiGroups"],
            one["resources"],
            one["verbs"],
            one.get("resourceNames", ()),
            NAMESPACE,
        )
        for one in role["rules"]
    ]
    api.access.grant("the-token", "the-picker", rules)
    config = api.write_kubeconfig(folder / "kubeconfig", token="the-token")
    return {"KUBECONFIG": str(config), "POD_NAME": "pointsman-picker-6c9h2-abcde"}


def _picker(overlay: str, ports: dict[str, int], folder: Path) -> list[str]:
    """The picker's command, as rendered, at other ports."""
    objects = kustomized(overlay)
    [workload] = workloads(objects)
    [container] = [one for one in containers(pod_of(workload)) if one["name"] == "picker"]
    [text] = [
        one["data"]["picker.yaml"]
        for one in of_kind(objects, "ConfigMap")
        if "picker.yaml" in one["data"]
    ]
    (folder / "picker.yaml").write_text(text)
    others = {
        "--pool-namespace": NAMESPACE,
        "--config-file": str(folder / "picker.yaml"),
        "--endpoint-target-ports": str(ports["worker"]),
        "--metrics-bind-address": "127.0.0.1",
        "--xds-port": str(ports["xds"]),
    }
    flags = dict(word.split("=", 1) for word in container["args"] if "=" in word)
    flags |= {name: value for name, value in others.items() if name in flags}
    bare = [word for word in container["args"] if "=" not in word]
    own = [f"--grpc-port={ports['grpc']}", f"--grpc-health-port={ports['health']}"]
    own += [f"--metrics-port={ports['metrics']}"]
    given = [f"{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "picker", *given, *bare, *own]


def _envoy(ports: dict[str, int], folder: Path) -> list[str]:
    """Envoy's command, as rendered, at other ports."""
    objects = kustomized(FOLDER)
    [workload] = workloads(objects)
    [container] = [one for one in containers(pod_of(workload)) if one["name"] == "envoy"]
    [data] = [one["data"] for one in of_kind(objects, "ConfigMap") if "envoy.yaml" in one["data"]]
    text = data["envoy.yaml"].replace("address: 0.0.0.0", "address: 127.0.0.1")
    for name, port in PORTS.items():
        text = text.replace(f"port_value: {port}\n", f"port_value: {ports[name]}\n")
    (folder / "envoy.yaml").write_text(text)
    (folder / "drain.sh").write_text(data["drain.sh"])
    words = [
        str(folder / Path(word).name) if word[0] == "/" else word for word in container["args"]
    ]
    return [str(find_envoy()), *words, "--log-level", "error"]


@dataclass(frozen=True)
class Scene:
    """What runs."""

    url: str
    ports: dict[str, int]
    workers: Workers
    nodes: Kubelet
    session: ClientSession
    drain: Path

    async def ask(self, prompt: str = "hello") -> int:
        """One request through Envoy; the status, 0 while nothing listens."""
        body = {"model": "m", "prompt": prompt}
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as reply:
                return reply.status
        except ClientConnectionError:
            return 0

    async def serves(self) -> bool:
        """Whether a request comes through."""
        return await self.ask() == 200

    async def endpoints_are(self, number: int) -> bool:
        """Whether Envoy balances over so many."""
        url = f"http://127.0.0.1:{self.ports['admin']}/clusters?format=json"
        async with self.session.get(url) as reply:
            [pool] = [c for c in (await reply.json())["cluster_statuses"] if c["name"] == "pool"]
        return len(pool.get("host_statuses", ())) == number


def some_ports() -> list[int]:
    """Seven free ones, where other test processes do not look."""
    return free_ports("127.0.0.1", 7, 21000 + os.getpid() % 400 * 20)


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Scene]:
    """Envoy, picker and two Pods, of which the picker may know what its Role allows."""
    ports = dict(zip((*PORTS, "metrics", "worker"), some_ports(), strict=True))
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_kube_api())
        serving = await stack.enter_async_context(
            workers(["127.0.0.2", "127.0.0.3"], ports["worker"])
        )
        session = await stack.enter_async_context(ClientSession())
        nodes = Kubelet(api)
        for number in (2, 3):
            nodes.run(f"w{number}", f"127.0.0.{number}", LABELS, namespace=NAMESPACE)
        nodes.run("other", "127.0.0.9", {"app": "other"}, namespace=NAMESPACE)
        environment = _account(api, FOLDER, folder)
        stack.enter_context(running(_picker(FOLDER, ports, folder), environment))
        stack.enter_context(running(_envoy(ports, folder), {}))
        url = f"http://127.0.0.1:{ports['http']}"
        yield Scene(url, ports, serving, nodes, session, folder / "drain.sh")


async def test_envoy_and_picker_serve_the_selected_pods(tmp_path: Path) -> None:
    """With no more than the Role allows, and with Pods that come and go."""
    async with standing(tmp_path) as scene:
        await until(scene.serves)
        await until(lambda: scene.endpoints_are(2))
        assert await scene.ask() == 200
        assert set(scene.workers.served) <= {"127.0.0.2", "127.0.0.3"}
        scene.nodes.delete("w2", NAMESPACE)
        await until(lambda: scene.endpoints_are(1))
        scene.workers.served.clear()
        for _ in range(10):
            assert await scene.ask() == 200
        assert set(scene.workers.served) == {"127.0.0.3"}


async def test_the_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    """The preStop returns once the last answer is sent, and not before."""
    async with standing(tmp_path) as scene:
        await until(scene.serves)
        slow = asyncio.create_task(scene.ask("slow"))
        await scene.workers.arrived.wait()
        drain = await asyncio.create_subprocess_exec(
            "bash", str(scene.drain), "60", "0", str(scene.ports["admin"])
        )
        assert await scene.ask() == 200
        assert drain.returncode is None
        assert not slow.done()
        scene.workers.hold.set()
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await slow == 200
            assert await drain.wait() == 0


async def test_the_end_does_not_wait_for_ever(tmp_path: Path) -> None:
    """After its limit the preStop returns whatever is under way."""
    async with standing(tmp_path) as scene:
        await until(scene.serves)
        slow = asyncio.create_task(scene.ask("slow"))
        await scene.workers.arrived.wait()
        drain = await asyncio.create_subprocess_exec(
            "bash", str(scene.drain), "1", "0", str(scene.ports["admin"])
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await drain.wait() == 0
        assert not slow.done()
        slow.cancel()


async def test_rights_are_those_that_the_picker_uses(tmp_path: Path) -> None:
    """Of the gateway's form: it becomes ready with them, and none is there for nothing."""
    overlay = "deploy/k8s/overlays/gateway"
    async with AsyncExitStack() as stack:
        definitions = sorted((ROOT / "crds").glob("*.yaml"))
        api = await stack.enter_async_context(running_kube_api(None, *definitions))
        session = await stack.enter_async_context(ClientSession())
        for kind in ("InferencePool", "InferenceObjective"):
            for one in of_kind(kustomized(overlay), kind):
                api.write(one)
        Kubelet(api).run("w", "127.0.0.2", LABELS, namespace=NAMESPACE)
        ports = dict(zip((*PORTS, "metrics", "worker"), some_ports(), strict=True))
        environment = _account(api, overlay, tmp_path)
        stack.enter_context(running(_picker(overlay, ports, tmp_path), environment))

        async def is_ready() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{ports['metrics']}/readyz") as reply:
                    return reply.status == 200
            except ClientConnectionError:
                return False

        async def asked_for_all() -> bool:
            # It lists the one pool; `get` is for whoever asks about it in the picker's name.
            asked = {(one.plural, one.verb) for one in api.asked}
            return granted - asked == {("inferencepools", "get")}

        [role] = of_kind(kustomized(overlay), "Role")
        granted = {
            (resource, verb)
            for rule in role["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        await until(is_ready)
        await until(asked_for_all)
        assert {(one.plural, one.verb) for one in api.asked} <= granted
