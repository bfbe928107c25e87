"""A whole picker that follows several pools of a cluster, and one of a file, under requests."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from picker.cli.options import ElectionFlags, KubernetesFlags, PoolFlags
from picker.k8s.elector import LeaseName, Timings
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.picker.ext_proc_stream import completion
from tests.support.picker.metrics_pages import Pod
from tests.support.picker.pools_scene import SeveralPools, file_of, pool_flags, pools_picker
from tests.support.picker.steady_requests import Traffic
from tests.support.picker.whole_picker import FOUR_SCORERS, WholePicker, write_endpoints
from tests.support.waiting import pass_time, until

POOLS = "inferencepools"
KEYS = ("llama", "x/qwen", "y/qwen")
PLACES = {"llama": "127.0.0.11:8000", "x/qwen": "127.0.0.12:8000", "y/qwen": "127.0.0.13:8000"}
LEASE = "epp-default-llama.llm-d.ai"
WAITING = FOUR_SCORERS.replace(
    "plugins:", "featureGates: [haPopulateNonLeaderDatastore=false]\nplugins:", 1
)
K8S, OWN = "inference.networking.k8s.io", "llm-d.ai"


def parted(key: str) -> tuple[str, str]:
    namespace, _, name = key.rpartition("/")
    return namespace or "default", name


def write_pool(api: KubeApi, key: str, **spec: Any) -> None:
    namespace, name = parted(key)
    made = pool(name=name, selector={"matchLabels": {"app": name}}, **spec)
    made["metadata"]["namespace"] = namespace
    api.write(made)


def erase_pool(api: KubeApi, key: str) -> None:
    namespace, name = parted(key)
    api.erase(POOLS, name, namespace)


def run_pod(kubelet: Kubelet, key: str, ip: str, name: str = "pod") -> None:
    """The Pods of all pools share a name, and two pools share a label."""
    namespace, app = parted(key)
    kubelet.run(name, ip, {"app": app}, namespace=namespace, grace_seconds=600)


@dataclass
class Scene:
    api: KubeApi
    kubelet: Kubelet
    several: SeveralPools

    @asynccontextmanager
    async def under_requests(self, *keys: str) -> AsyncIterator[Mapping[str, Traffic]]:
        """Send each of these pools one request after the other; none fails, and all stay ready."""
        traffic = {key: Traffic(self.several[key]) for key in keys}
        unready: list[str] = []

        async def watch() -> None:
            while True:
                status, text = await self.several.common.get("/readyz")
                if status != 200:
                    unready.append(text)

        tasks = [asyncio.create_task(one.run()) for one in traffic.values()]
        tasks.append(asyncio.create_task(watch()))
        try:
            yield traffic
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert [one.failed for one in traffic.values()] == [[]] * len(keys)
        assert unready == []


@asynccontextmanager
async def cluster(*keys: str) -> AsyncIterator[tuple[KubeApi, Kubelet]]:
    async with running_kube_api(None, *sorted(CRDS.glob("*.yaml"))) as api:
        kubelet = Kubelet(api)
        for key, place in PLACES.items():
            run_pod(kubelet, key, place.partition(":")[0])
        for key in keys:
            write_pool(api, key)
        yield api, kubelet


@asynccontextmanager
async def following(
    folder: Path,
    *there: str,
    keys: Sequence[str] = KEYS,
    more: Sequence[PoolFlags] = (),
    rules: Sequence[Rule] = (Rule(["*"], ["*"], ["*"]),),
    **changes: Any,
) -> AsyncIterator[Scene]:
    """Run a picker of `keys`, of which `there` exist; `rules` are its permissions."""
    async with cluster(*there) as (api, kubelet):
        api.access.grant("token", "picker", rules)
        path = api.write_kubeconfig(folder / "kubeconfig", "token")
        given = {
            "pools": (*map(pool_flags, keys), *more),
            "kubernetes": KubernetesFlags(parted(keys[0])[1], kubeconfig=path),
            "config_text": FOUR_SCORERS,
        }
        async with pools_picker(folder, given | changes) as several:
            yield Scene(api, kubelet, several)


async def is_ready(picker: WholePicker) -> bool:
    return (await picker.get("/readyz"))[0] == 200


async def status_of(picker: WholePicker) -> int:
    """Return the status of the picker's own answer to a request, or 0 if it is served."""
    return int((await picker.ask(completion()))[0].immediate_response.status.code)


async def test_each_pool_is_its_own_namespaces(tmp_path: Path) -> None:
    async with following(tmp_path, *KEYS) as scene:
        several = scene.several
        await until(lambda: is_ready(several.common))
        for key, place in PLACES.items():
            assert {await several[key].destination(completion()) for _ in range(3)} == {place}
            assert [row["address"] for row in (await several[key].endpoints()).values()] == [place]
            async with several.at_its_port(key) as picker:
                assert await picker.destination(completion()) == place


async def test_a_pool_comes_and_goes_under_the_requests_of_the_others(tmp_path: Path) -> None:
    async with following(tmp_path, *KEYS) as scene:
        several, key = scene.several, "x/qwen"
        await until(lambda: is_ready(several.common))
        assert await status_of(several[key]) == 0
        async with scene.under_requests("llama", "y/qwen") as traffic:
            for _ in range(3):
                erase_pool(scene.api, key)
                await until(lambda: status_of(several[key]), lambda found: found == 503)
                assert not await is_ready(several[key])
                assert not await several[key].endpoints()
                write_pool(scene.api, key)
                await until(lambda: is_ready(several[key]))
                assert await several[key].destination(completion()) == PLACES[key]
            run_pod(scene.kubelet, "y/qwen", "127.0.0.23", "another")
            await traffic["y/qwen"].only_at([PLACES["y/qwen"], "127.0.0.23:8000"])
            await traffic["llama"].only_at([PLACES["llama"]])


async def test_an_absent_pool_holds_no_request(tmp_path: Path) -> None:
    async with following(tmp_path, "llama", "y/qwen") as scene:
        several, missing = scene.several, "x/qwen"
        await until(lambda: is_ready(several.common))
        assert several[missing].pool.known.is_absent()  # so that patience had no part in it
        assert await status_of(several[missing]) == 503
        assert await status_of(several["llama"]) == 0
        async with several.at_its_port(missing) as picker:
            assert await status_of(picker) == 503
        assert not await is_ready(several[missing])
        async with scene.under_requests("llama", "y/qwen"):
            write_pool(scene.api, missing)
            await until(lambda: is_ready(several[missing]))
            assert await several[missing].destination(completion()) == PLACES[missing]


def troubles(page: str, pool: str) -> list[str]:
    """Return the problems of a pool on a page, except silent endpoints."""
    said = [part for line in page.splitlines() for part in line.split("; ")]
    own = [part for part in said if part.startswith(f"{pool}: ")]
    return [part for part in own if "endpoints do not answer" not in part]


async def test_a_namespace_without_a_role_is_that_pools_problem(tmp_path: Path) -> None:
    rules = [
        Rule([""], ["pods"], ["list", "watch"], (), namespace) for namespace in ("default", "y")
    ]
    rules += [
        Rule([K8S], [POOLS], ["list", "watch"], (), namespace) for namespace in ("default", "y")
    ]
    rules += [Rule([OWN], ["inferenceobjectives", "inferencemodelrewrites"], ["list", "watch"])]
    async with following(tmp_path, *KEYS, rules=rules) as scene:
        several = scene.several
        for key in ("llama", "y/qwen"):
            await until(lambda key=key: is_ready(several[key]))
            assert await several[key].destination(completion()) == PLACES[key]
        await until(lambda: several.common.get("/readyz"), lambda found: "x/qwen: " in found[1])
        assert "forbidden" in (await several["x/qwen"].get("/readyz"))[1].lower()
        assert not troubles((await several.common.get("/readyz"))[1], "y/qwen")
        assert not several["x/qwen"].pool.known.is_absent()
        assert await status_of(several["x/qwen"]) == 503
        scene.api.access.grant("token", "picker", [Rule(["*"], ["*"], ["*"])])
        pass_time(asyncio.get_running_loop())  # what was refused is asked again after 12 s
        await asyncio.sleep(0)
        await until(lambda: is_ready(several["x/qwen"]))
        await until(lambda: is_ready(several.common))
        assert await several["x/qwen"].destination(completion()) == PLACES["x/qwen"]


async def test_pools_of_a_file_and_of_a_cluster_run_together(tmp_path: Path) -> None:
    pod = Pod("mine", "127.0.0.31", None, port=9000)
    write_endpoints(file_of(tmp_path, "mistral"), [pod])
    flags = pool_flags("mistral", endpoints_file=file_of(tmp_path, "mistral"))
    async with following(tmp_path, "llama", keys=("llama",), more=(flags,)) as scene:
        several = scene.several
        write_pool(scene.api, "mistral")
        run_pod(scene.kubelet, "mistral", "127.0.0.41", "theirs")
        await until(lambda: is_ready(several.common))
        assert await several["mistral"].destination(completion()) == pod.host_port
        assert await several["llama"].destination(completion()) == PLACES["llama"]
        await scene.api.go_away()
        await until(lambda: several.common.get("/readyz"), lambda found: "llama: " in found[1])
        assert not troubles((await several.common.get("/readyz"))[1], "mistral")
        assert await several["llama"].destination(completion()) == PLACES["llama"]


@asynccontextmanager
async def two_replicas(
    folder: Path, text: str, **own: Path
) -> AsyncIterator[tuple[Scene, SeveralPools]]:
    """Run a leader and a standby; `own` are the configurations of single pools."""
    name, timings = LeaseName("default", LEASE), Timings(3.0, 2.0, 0.2)
    common = {"config_text": text, "health_checking": True}
    election = ElectionFlags(name, "first", timings)
    async with following(folder, *KEYS, election=election, **common) as scene:
        await until(lambda: is_ready(scene.several.common))
        second = {
            "pools": tuple(pool_flags(key, config_file=own.get(key)) for key in KEYS),
            "kubernetes": KubernetesFlags("llama", kubeconfig=folder / "kubeconfig"),
            "election": ElectionFlags(name, "second", timings),
        }
        async with pools_picker(folder, second | common) as standby:
            await until(
                lambda: standby.common.get("/readyz"),
                lambda found: "the leader is first" in found[1],
            )
            yield scene, standby


@pytest.mark.parametrize("populates", [True, False], ids=["follows", "waits"])
async def test_one_lease_is_for_all_pools(tmp_path: Path, populates: bool) -> None:
    text = FOUR_SCORERS if populates else WAITING
    async with two_replicas(tmp_path, text) as (scene, standby):
        assert not any([await is_ready(standby[key]) for key in KEYS])
        scene.several.picker.stop()
        await until(lambda: is_ready(standby.common))
        assert [await status_of(standby[key]) for key in KEYS] == [0, 0, 0]
        assert all([await is_ready(standby[key]) for key in KEYS])
        held = scene.api.read("leases", LEASE)["spec"]["holderIdentity"]
        assert held == "second"


async def test_a_pools_own_configuration_decides_whether_a_standby_follows_it(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(WAITING)
    async with two_replicas(tmp_path, FOUR_SCORERS, llama=own) as (scene, standby):
        await until(lambda: all(standby[key].pool.is_known() for key in KEYS[1:]))
        assert not standby["llama"].pool.is_known()
        scene.several.picker.stop()
        await until(lambda: is_ready(standby["llama"]))
