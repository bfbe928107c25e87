"""Cases through a Kubernetes API pass with a right picker, and fail with one that errs there."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from conformance.case import Case, Provision
from conformance.echo.pool import EchoPool
from conformance.epp.scene import Scene
from conformance.gateway.binary import find_envoy
from conformance.gateway.bootstrap import Listener, PickerAt, Route, bootstrap
from conformance.gateway.envoy import Envoy, running_envoy
from conformance.k8s.api import ApiRefusalError, KubeApi, api_at
from conformance.k8s.cases import extension, following, outages, pods
from conformance.k8s.objects import PodState, PoolPlan
from conformance.k8s.plans import behind, behind_several, plans
from conformance.k8s.scene import (
    LATE,
    PRIMARY,
    SECONDARY,
    ClusterScene,
    SeveralPools,
    Side,
    of_several,
)
from conformance.k8s.suite import play
from conformance.pickers.by_port import PortOf
from conformance.report import Outcome, Result, broken
from tests.fakes.kube_api.server import KubeApi as ApiServer
from tests.fakes.kube_api.server import running_kube_api
from tests.support.picker.mutant_epp import MutantEpp, running_mutant

EVERY_SECONDS = 0.03
HOLD_SECONDS = 1.0
_READY = {"type": "Ready", "status": "True"}


class Misreading(Enum):
    NONE = auto()
    READY_WITHOUT_POOL = auto()
    KEEPS_A_DELETED_POOL = auto()
    KEEPS_THE_FIRST_SELECTOR = auto()
    KEEPS_THE_FIRST_PORTS = auto()
    LOOKS_INTO_EVERY_NAMESPACE = auto()
    STOPS_AT_NONSENSE = auto()
    TAKES_WHAT_IS_NOT_READY = auto()
    TAKES_WHAT_WAS_NEVER_READY = auto()
    TAKES_WHAT_IS_LEAVING = auto()
    KEEPS_WHAT_IS_DELETED = auto()
    KEEPS_THE_FIRST_ADDRESS = auto()
    KEEPS_THE_FIRST_LABELS = auto()
    GOES_BY_ADDRESS = auto()
    EMPTIES_ON_A_FLAP = auto()
    EMPTIES_IN_AN_OUTAGE = auto()
    ENDS_WITH_AN_OUTAGE = auto()
    TAKES_PODS_OF_EVERY_POOL = auto()
    EMPTIES_WITH_ANY_POOL = auto()


class Follower:
    def __init__(self, api: KubeApi, namespace: str, pool: str, epp: MutantEpp) -> None:
        self._api, self._namespace, self._pool, self._epp = api, namespace, pool, epp
        self._was_ready: set[str] = set()
        self._looks = asyncio.Condition()
        self.be(Misreading.NONE)

    def be(self, wrong: Misreading) -> None:
        self.wrong = wrong
        self._first: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self._held_since: float | None = None
        self._has_ended = False

    async def run(self) -> None:
        while True:
            if not self._has_ended:
                await self._look()
            async with self._looks:
                self._looks.notify_all()
            await asyncio.sleep(EVERY_SECONDS)

    async def looked(self) -> None:
        async with self._looks:
            await self._looks.wait()
            await self._looks.wait()

    async def _look(self) -> None:
        try:
            pool = await self._api.read("InferencePool", self._pool, self._namespace)
            pods = [pod for space in self._spaces() for pod in await self._api.items("Pod", space)]
            pools = await self._api.items("InferencePool", self._namespace)
        except (aiohttp.ClientError, OSError):
            self._has_ended = self.wrong is Misreading.ENDS_WITH_AN_OUTAGE
            if self.wrong is Misreading.EMPTIES_IN_AN_OUTAGE:
                await self._epp.use_pool([])
            return
        except ApiRefusalError:
            return
        self._epp.is_ready = pool is not None or self.wrong is Misreading.READY_WITHOUT_POOL
        if pool is None:
            if self.wrong is not Misreading.KEEPS_A_DELETED_POOL:
                await self._epp.use_pool([])
            return
        most = self._first["pools"] = max(len(pools), self._first.get("pools", 0))
        if self.wrong is Misreading.EMPTIES_WITH_ANY_POOL and len(pools) < most:
            await self._epp.use_pool([])
            return
        await self._use(pool["spec"], pods)
        if self.wrong is Misreading.TAKES_PODS_OF_EVERY_POOL:
            await self._epp.use_pool([one for each in pools for one in _planned(each, pods)])

    def _spaces(self) -> list[str]:
        if self.wrong is Misreading.LOOKS_INTO_EVERY_NAMESPACE:
            return [self._namespace, f"{self._namespace}-other"]
        return [self._namespace]

    async def _use(self, spec: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        labels = spec["selector"]["matchLabels"]
        ports = [port["number"] for port in spec["targetPorts"]]
        if any(" " in key for key in labels):
            self._has_ended = self.wrong is Misreading.STOPS_AT_NONSENSE
            return
        if self.wrong is Misreading.KEEPS_THE_FIRST_SELECTOR:
            labels = self._first.setdefault("labels", labels)
        if self.wrong is Misreading.KEEPS_THE_FIRST_PORTS:
            ports = self._first.setdefault("ports", ports)
        if self.wrong is Misreading.KEEPS_WHAT_IS_DELETED:
            self._seen |= {pod["metadata"]["name"]: pod for pod in pods}
            pods = list(self._seen.values())
        if self.wrong is Misreading.GOES_BY_ADDRESS:
            pods = list(self._by_address(pods))
        found = [pod for pod in pods if self._serves(pod, labels)]
        if not found and pods and self._holds():
            return
        if found:
            self._held_since = None
        endpoints = {f"{self._address(pod)}:{port}" for pod in found for port in ports}
        await self._epp.use_pool(sorted(endpoints))

    def _by_address(self, pods: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for pod in pods:
            ip, name = (pod.get("status") or {}).get("podIP"), pod["metadata"]["name"]
            first = self._seen.setdefault(ip, pod) if ip else pod
            yield pod if first["metadata"]["name"] == name else first

    def _holds(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._held_since is None:
            self._held_since = now
        wrong = self.wrong is Misreading.EMPTIES_ON_A_FLAP
        return not wrong and now - self._held_since < HOLD_SECONDS

    def _serves(self, pod: dict[str, Any], labels: dict[str, str]) -> bool:
        metadata, status, wrong = pod["metadata"], pod.get("status") or {}, self.wrong
        own = metadata.get("labels") or {}
        if wrong is Misreading.KEEPS_THE_FIRST_LABELS:
            own = self._first.setdefault(metadata["uid"], own)
        selected = all(own.get(key) == value for key, value in labels.items())
        leaving = "deletionTimestamp" in metadata and wrong is not Misreading.TAKES_WHAT_IS_LEAVING
        return selected and not leaving and "podIP" in status and self._is_ready(pod)

    def _is_ready(self, pod: dict[str, Any]) -> bool:
        conditions = pod["status"].get("conditions") or ()
        uid = pod["metadata"]["uid"]
        if _READY in conditions:
            self._was_ready.add(uid)
            return True
        if uid in self._was_ready:
            return self.wrong is Misreading.TAKES_WHAT_IS_NOT_READY
        return self.wrong is Misreading.TAKES_WHAT_WAS_NEVER_READY

    def _address(self, pod: dict[str, Any]) -> str:
        ip = str(pod["status"]["podIP"])
        if self.wrong is Misreading.KEEPS_THE_FIRST_ADDRESS:
            return str(self._first.setdefault(f"ip of {pod['metadata']['uid']}", ip))
        return ip


def _planned(pool: dict[str, Any], pods: list[dict[str, Any]]) -> Iterator[str]:
    app = pool["spec"]["selector"]["matchLabels"]["app"]
    for pod in pods:
        is_ready = _READY in pod.get("status", {}).get("conditions", ())
        if is_ready and pod["metadata"]["labels"].get("app") == app:
            for port in pool["spec"]["targetPorts"]:
                yield f"{pod['status']['podIP']}:{port['number']}"


CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))
CASES = (*following.CASES, *pods.CASES, *outages.CASES, *extension.CASES)
FOLLOW_SECONDS, FAIL_SECONDS = 10.0, 0.5
PATIENCE_SECONDS = 5.0
GIVEN = frozenset(Provision) - {Provision.RESTART}
# Played with every misreading: those that are not about it leave it alone.
CONTROL = {"pod-never-ready"}
M = Misreading
# What each misreading breaks.
EXPECTED: dict[Misreading, set[str]] = {
    M.READY_WITHOUT_POOL: {"pool-created-later"},
    M.KEEPS_A_DELETED_POOL: {"pool-deleted"},
    M.KEEPS_THE_FIRST_SELECTOR: {"pool-selector-changed"},
    M.KEEPS_THE_FIRST_PORTS: {"pool-ports-changed", "pool-that-makes-no-sense"},
    M.LOOKS_INTO_EVERY_NAMESPACE: {"pool-of-its-own-namespace"},
    M.STOPS_AT_NONSENSE: {"pool-that-makes-no-sense"},
    M.TAKES_WHAT_IS_NOT_READY: {"pod-not-ready", "api-server-away-again-and-again"},
    M.TAKES_WHAT_WAS_NEVER_READY: {"pod-never-ready"},
    M.TAKES_WHAT_IS_LEAVING: {"pod-terminating"},
    M.KEEPS_WHAT_IS_DELETED: {"pod-added-and-deleted", "pod-replaced", "api-server-away"},
    M.KEEPS_THE_FIRST_ADDRESS: {"pod-moved"},
    M.KEEPS_THE_FIRST_LABELS: {"pod-relabelled", "pool-selector-changed"},
    M.GOES_BY_ADDRESS: {"pod-replaced"},
    M.EMPTIES_ON_A_FLAP: {"pods-flap-together"},
    M.EMPTIES_IN_AN_OUTAGE: {"api-server-away", "api-server-away-again-and-again"},
    M.TAKES_PODS_OF_EVERY_POOL: {"several-pools-kept-apart", "several-pools-one-deleted"},
    M.EMPTIES_WITH_ANY_POOL: {"several-pools-one-deleted"},
    M.ENDS_WITH_AN_OUTAGE: {"api-server-away", "api-server-away-again-and-again"},
}


@dataclass
class OutageOf:
    server: ApiServer
    tasks: asyncio.TaskGroup

    def go_away(self) -> None:
        self.tasks.create_task(self.server.go_away())

    def come_back(self) -> None:
        self.tasks.create_task(self.server.come_back(forget_changes=True))


class Staying(PortOf):
    async def kill(self) -> None: ...


@asynccontextmanager
async def set_scene(
    folder: Path, stack: AsyncExitStack
) -> AsyncIterator[tuple[ClusterScene, list[Follower]]]:
    server = await stack.enter_async_context(running_kube_api(None, *CRDS))
    api = await stack.enter_async_context(api_at(server.write_kubeconfig(folder / "kubeconfig")))
    server.write({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "suite"}})
    chosen = [plan for plan in plans() if plan.name in (PRIMARY, SECONDARY, LATE)]
    sides: dict[str, Side] = {}
    several: dict[str, Side] = {}
    followers: list[Follower] = []

    async def side_of(plan: PoolPlan, pool: EchoPool, kind: type[PortOf]) -> Side:
        epp = await stack.enter_async_context(running_mutant(pool))
        followers.append(Follower(api, "suite", plan.name, epp))
        picker = kind(epp, epp.address)
        return Side(
            plan, Scene(picker, pool, None, PATIENCE_SECONDS, FOLLOW_SECONDS), FOLLOW_SECONDS
        )

    async with asyncio.TaskGroup() as tasks:
        for plan in chosen:
            pool = EchoPool(plan.served)
            stack.push_async_callback(pool.stop)
            await pool.start()
            sides[plan.name] = await side_of(plan, pool, PortOf)
            if plan.has_object:
                several[plan.name] = await side_of(plan, pool, Staying)
        envoy = await stack.enter_async_context(_envoy(folder, sides, several))
        for side in (*sides.values(), *several.values()):
            side.scene.envoy = envoy
        outage = OutageOf(server, tasks)
        scene = ClusterScene(api, "suite", sides, envoy, outage, FOLLOW_SECONDS)  # type: ignore[arg-type]
        scene.several = SeveralPools(several)
        following_tasks = [tasks.create_task(follower.run()) for follower in followers]
        await _begin(api, scene)
        try:
            yield scene, followers
        finally:
            for task in following_tasks:
                task.cancel()
            for side in sides.values():
                await side.scene.disconnect()


@asynccontextmanager
async def _envoy(
    folder: Path, sides: dict[str, Side], several: dict[str, Side]
) -> AsyncIterator[Envoy]:
    binary = find_envoy()
    assert binary is not None
    shared = [side.plan for side in several.values()]
    pools = [
        *(behind(side.plan, _at(side)) for side in sides.values()),
        *(behind_several(side.plan, shared, _at(side)) for side in several.values()),
    ]
    named = [PRIMARY, *map(of_several, several)]
    routes = [Route(f"/{name}", {name: 1}) for name in named]
    listeners = [Listener("main", [*routes, Route("/", {LATE: 1})])]
    async with running_envoy(binary, bootstrap(pools, listeners), folder) as envoy:
        yield envoy


def _at(side: Side) -> PickerAt:
    return PickerAt(side.scene.picker.address, side.scene.picker.health_address)


async def _begin(api: KubeApi, scene: ClusterScene) -> None:
    for side in scene.sides.values():
        if side.plan.has_object:
            await scene.put_pool(side.plan.name)
        for at, ip in enumerate(side.plan.addresses):
            await scene.run_pod(side.plan.pod(at), PodState(ip, side.plan.labels))


def with_followers(
    case: Case[ClusterScene], followers: Sequence[Follower], wrong: Misreading
) -> Case[ClusterScene]:
    def limit(scene: ClusterScene, seconds: float) -> None:
        for part in (scene, *scene.sides.values(), *scene.several.sides.values()):
            part.follow_seconds = seconds

    async def check(scene: ClusterScene) -> None:
        try:
            for follower in followers:
                follower.be(wrong)
                await follower.looked()
            if case.id in EXPECTED.get(wrong, ()):
                limit(scene, FAIL_SECONDS)  # it waits in vain, sooner or later
            await case.check(scene)
        finally:
            limit(scene, FOLLOW_SECONDS)
            for follower in followers:
                follower.be(Misreading.NONE)

    return replace(case, check=check)


@pytest.mark.envoy
@pytest.mark.soak
async def test_cases_fail_for_mutants_that_err_and_for_no_other(tmp_path: Path) -> None:
    found: dict[Misreading, set[str]] = {}
    async with AsyncExitStack() as stack, set_scene(tmp_path, stack) as (scene, followers):

        async def results(wrong: Misreading, cases: Sequence[Case[ClusterScene]]) -> list[Result]:
            played = [with_followers(case, followers, wrong) for case in cases]
            return await play(played, scene, GIVEN, lambda _: None)

        right = await results(Misreading.NONE, CASES)
        assert {one.case: one.reason for one in right if one.outcome is not Outcome.PASSED} == {
            "picker-started-in-an-outage": "not provided: restart"
        }
        for wrong, expected in EXPECTED.items():
            cases = [case for case in CASES if case.id in expected | CONTROL]
            found[wrong] = set(broken(await results(wrong, cases)))
    assert found == EXPECTED


def test_every_case_about_objects_can_fail() -> None:
    covered = set().union(*EXPECTED.values())
    assert {case.id for case in CASES} - covered == {"picker-started-in-an-outage"}
    assert set(EXPECTED) == set(Misreading) - {Misreading.NONE}
