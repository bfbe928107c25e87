"""A whole picker of several pools of files or of a cluster: state, replicas, proxies and TLS."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.discovery.v3 import discovery_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.picker import QUIET_SECONDS, StartError
from picker.cli.options import ElectionFlags, KubernetesFlags, PoolFlags, TlsFlags, XdsFlags
from picker.errors import ConfigError
from picker.k8s.elector import LeaseName, Timings
from picker.rpc.options import TlsMaterial
from picker.rpc.self_signed import self_signed
from picker.xds import wire
from tests.fakes.kube_api.access import Rule
from tests.fakes.kube_api.kubelet import Kubelet
from tests.fakes.kube_api.server import KubeApi, running_kube_api
from tests.support.kube.kubernetes_objects import CRDS, pool
from tests.support.local_ports import free_ports
from tests.support.picker.ext_proc_stream import completion, destination_of
from tests.support.picker.metrics_pages import Pod, page, pods, serving
from tests.support.picker.pools_scene import (
    SeveralPools,
    file_of,
    of_pool,
    pool_flags,
    pools_picker,
    several_pools,
)
from tests.support.picker.replicas_scene import CONFIG, LOOPBACK, peer_flags, until_connected
from tests.support.picker.steady_requests import Traffic
from tests.support.picker.waiting_requests import Scene, config, status_of
from tests.support.picker.whole_picker import (
    FOUR_SCORERS,
    HEAD,
    WholePicker,
    objective,
    rewrite,
    rule,
    write_endpoints,
)
from tests.support.picker.xds_call import assignments
from tests.support.waiting import pass_time, until

READY = "ready\n"
PREFIXES = "llm_d_epp_prefix_indexer_size"
KEYS = ("llama", "x/qwen", "y/qwen")
STICKY = f"""{HEAD}
plugins:
- {{type: prefix-cache-scorer}}
- {{type: session-affinity-scorer, parameters: {{strategy: session_id}}}}
- {{type: queue-scorer}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: prefix-cache-scorer}}
  - {{pluginRef: session-affinity-scorer, weight: 10}}
  - {{pluginRef: queue-scorer, weight: 2}}
"""


def places(some: Sequence[Pod]) -> set[str]:
    return {pod.host_port for pod in some}


def three(number: int = 2) -> dict[str, list[Pod]]:
    return {key: pods(*[page()] * number) for key in KEYS}


async def remembered(picker: WholePicker) -> list[str]:
    rows = json.loads((await picker.get("/decisions"))[1])["decisions"]
    return sorted(row["model"] for row in rows)


def shared(number: int = 2) -> dict[str, list[Pod]]:
    some = pods(*[page(model="m")] * number)
    return {"a": some, "b": some}


async def test_pools_of_the_same_pods_learn_nothing_of_each_other(tmp_path: Path) -> None:
    async with several_pools(tmp_path, shared(), STICKY) as scene:
        long = completion(prompt="a long prompt " * 100)
        first = await scene["a"].destination(long, {"x-session-id": "s"})
        assert (await scene["a"].series(PREFIXES) or 0) > 1
        assert not await scene["b"].series(PREFIXES)
        assert not await scene.common.series(PREFIXES, inference_pool="b")
        busy = next(pod for pod in scene["a"].pods if pod.host_port == first)
        busy.page = page(queue=50)
        for pool in (scene["a"], scene["b"]):
            await pool.knows(busy.name, waiting_requests=50)
        assert await scene["a"].destination(long, {"x-session-id": "s"}) == first
        assert await scene["b"].destination(long, {"x-session-id": "s"}) != first
        assert await remembered(scene["a"]) == ["my-model"] * 2
        assert await remembered(scene["b"]) == ["my-model"]


async def test_requests_in_flight_count_in_their_own_pool_alone(tmp_path: Path) -> None:
    async with several_pools(tmp_path, shared(1)) as scene, scene["a"].stream() as stream:
        await stream.ask(completion())
        rows = [next(iter((await scene[key].endpoints()).values())) for key in "ab"]
        assert [row["inflight_requests"] for row in rows] == [1, 0]
        assert await scene.common.series("llm_d_epp_request_running", inference_pool="a") == 1
        assert not await scene.common.series("llm_d_epp_request_running", inference_pool="b")
        await stream.respond([b"{}"])


async def test_objectives_and_rewrites_are_those_of_the_pool(tmp_path: Path) -> None:
    policies = {
        "a": [of_pool("a", objective("o", 7)), of_pool("a", rewrite("r", rule("m", m1=None)))],
        "b": [of_pool("b", objective("o", -7)), of_pool("a", rewrite("r", rule("m", m2=None)))],
    }
    async with several_pools(tmp_path, shared(1), policies=policies) as scene:
        for key in "ab":
            await scene[key].ask(completion("m"), {"x-llm-d-inference-objective": "o"})
        assert await scene["a"].requests(target_model_name="m1", priority="7") == 1
        assert await scene["b"].requests(target_model_name="m", priority="-7") == 1
        scene["b"].list_policies([of_pool("b", rewrite("r", rule("m", m3=None)))])

        async def has_changed() -> bool:
            await scene["b"].ask(completion("m"))
            return bool(await scene["b"].requests(target_model_name="m3"))

        await until(has_changed)
        await scene["a"].ask(completion("m"))
        assert await scene["a"].requests(target_model_name="m1") == 2


async def test_a_full_pool_delays_only_its_own_requests(tmp_path: Path) -> None:
    async with several_pools(tmp_path, shared(1), config("  maxRequests: 1")) as scene:
        full, free = Scene(scene["a"]), Scene(scene["b"])
        first = await full.serve()
        second = await full.wait(1)
        assert status_of(await (await full.ask()).answer()) == 429
        assert await free.waiting() == 0
        third = await free.serve()
        fourth = await free.wait(1)
        sizes = {"inference_pool": "b"}
        assert await scene.common.series("llm_d_epp_flow_control_queue_size", **sizes) == 1
        await third.end()
        await fourth.destination()
        assert second.waits
        await full.has_waiting(1)
        for one in (fourth, first):
            await one.end()
        await second.destination()
        await second.end()
        await full.is_at_rest()
        await free.is_at_rest()
        assert await scene["a"].outcomes() == {"completed": 2, "refused": 1}
        assert await scene["b"].outcomes() == {"completed": 2}


async def fails(picker: WholePicker, bad: Pod) -> None:
    async with picker.stream() as stream:
        went = destination_of(await stream.ask(completion()))
        status = "500" if went == bad.host_port else "200"
        await stream.response_headers({":status": status}, ends=True)


async def test_an_endpoint_that_fails_one_pool_is_ejected_from_it(tmp_path: Path) -> None:
    some = pods(page(), page(queue=50))
    async with several_pools(tmp_path, {"a": some, "b": some}) as scene:
        while not await scene["a"].series("pointsman_endpoint_ejections_total"):
            await fails(scene["a"], some[0])
        assert await scene.common.series("pointsman_endpoints_ejected", inference_pool="a") == 1
        assert await scene.common.series("pointsman_endpoints_ejected", inference_pool="b") == 0
        assert await scene["b"].destination(completion()) == some[0].host_port


async def test_a_broken_file_is_one_pools_problem(tmp_path: Path) -> None:
    async with several_pools(tmp_path, three()) as scene:
        broken, well = scene["llama"], scene["x/qwen"]
        broken.endpoints_file.write_text("endpoints: [")
        left = well.pods[1:]
        well.list_endpoints(left)
        await until(lambda: scene.common.get("/readyz"), lambda found: "llama: " in found[1])
        status, text = await scene.common.get("/readyz")
        assert (status, "qwen" in text) == (200, False)
        assert "llama.yaml:2:1: not valid YAML" in (await broken.get("/readyz"))[1]
        assert (await well.get("/readyz"))[1] == READY
        await until(well.endpoints, lambda found: set(found) == {pod.name for pod in left})
        assert await well.destination(completion()) in places(left)
        assert await broken.destination(completion()) in places(broken.pods)
        broken.list_endpoints(broken.pods[:1])
        await until(lambda: scene.common.get("/readyz"), lambda found: found[1] == READY)
        assert await broken.destination(completion()) in places(broken.pods)


async def test_one_pools_configuration_changes_alone(tmp_path: Path) -> None:
    common, own = tmp_path / "common.yaml", tmp_path / "own.yaml"
    common.write_text(STICKY)
    own.write_text(STICKY.replace("weight: 10", "weight: 5"))
    chosen = {"config_file": common, "configs": {"b": own}}
    async with several_pools(tmp_path, shared(), None, **chosen) as scene:
        before = scene["a"].pool.config.assembly

        async def shows(key: str, text: str) -> bool:
            return text in (await scene[key].get("/config"))[1]

        assert await shows("b", "weight: 5")
        assert await shows("a", "weight: 10")
        own.write_text(STICKY.replace("weight: 10", "weight: 7"))
        await until(lambda: shows("b", "weight: 7"))
        own.write_text("plugins: [{type: nothing-of-the-kind}]")

        async def is_reported() -> bool:
            name = "pointsman_config_last_reload_successful"
            return await scene.common.series(name, inference_pool="b") == 0

        await until(is_reported)
        assert await shows("b", "nothing-of-the-kind")
        assert not await shows("a", "nothing-of-the-kind")
        for key in "ab":
            assert await scene[key].destination(completion()) in places(scene[key].pods)
        assert scene["a"].pool.config.assembly is before
        reloads = "pointsman_config_reloads_total"
        assert not await scene.common.series(reloads, inference_pool="a", result="success")
        assert await scene.common.series(reloads, inference_pool="b", result="success") == 1
        common.write_text(STICKY.replace("weight: 10", "weight: 3"))
        await until(lambda: shows("a", "weight: 3"))
        assert await shows("b", "weight: 7")


async def health(port: int) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


async def test_the_drain_waits_for_the_requests_of_all_pools(tmp_path: Path) -> None:
    async with several_pools(tmp_path, three(1), health_checking=True) as scene:
        ports = [scene.ports.grpc, scene.ports.health, *scene.ports.pools.values()]
        assert {await health(port) for port in ports} == {1}
        async with (
            scene["llama"].stream() as one,
            scene.at_its_port("x/qwen") as own,
            own.stream() as other,
        ):
            await one.ask(completion())
            await other.ask(completion())
            scene.picker.stop()

            async def is_said() -> bool:
                return {await health(port) for port in ports} == {2}

            await until(is_said)
            assert (await scene.common.get("/readyz"))[0] == 503
            assert (await scene["y/qwen"].get("/readyz"))[0] == 503
            assert await scene["y/qwen"].destination(completion())
            assert await one.respond([b"{}"]) == b"{}"
            await asyncio.sleep(2 * QUIET_SECONDS)  # only one pool has anything to do now
            assert await scene["llama"].destination(completion())
            assert await other.respond([b"{}"]) == b"{}"


async def test_the_start_error_of_a_pool_has_its_name(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text('{"endpoints": []}')
    flags = pool_flags("llama", endpoints_file=file)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        taken = replace(flags, grpc_port=port)
        with pytest.raises(
            StartError, match=rf":{port} \(--pool llama\): the port is already in use"
        ):
            await begin(tmp_path, taken)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        await begin(tmp_path, replace(flags, endpoints_file=tmp_path / "missing.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("plugins: [{type: nothing-of-the-kind}]")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        await begin(tmp_path, replace(flags, config_file=broken))


async def begin(folder: Path, *flags: PoolFlags) -> None:
    async with pools_picker(folder, {"pools": flags}):
        pass


POOLS = "inferencepools"
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
class ClusterScene:
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
) -> AsyncIterator[ClusterScene]:
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
            yield ClusterScene(api, kubelet, several)


async def is_ready(picker: WholePicker) -> bool:
    return (await picker.get("/readyz"))[0] == 200


async def own_status(picker: WholePicker) -> int:
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
        assert await own_status(several[key]) == 0
        async with scene.under_requests("llama", "y/qwen") as traffic:
            for _ in range(3):
                erase_pool(scene.api, key)
                await until(lambda: own_status(several[key]), lambda found: found == 503)
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
        assert await own_status(several[missing]) == 503
        assert await own_status(several["llama"]) == 0
        async with several.at_its_port(missing) as picker:
            assert await own_status(picker) == 503
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
        assert await own_status(several["x/qwen"]) == 503
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
) -> AsyncIterator[tuple[ClusterScene, SeveralPools]]:
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
        assert [await own_status(standby[key]) for key in KEYS] == [0, 0, 0]
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


PROMPT = "the same beginning " * 100
DeltaRequest = discovery_pb2.DeltaDiscoveryRequest


async def learned(picker: WholePicker) -> float:
    """Return the number of prompts reported by other replicas."""
    name = "pointsman_peer_entries_total"
    return await picker.series(name, result="placement") or 0.0


async def test_replicas_share_the_pools_that_both_have(tmp_path: Path) -> None:
    some, ports = pods(*[page()] * 4), free_ports(2)
    async with AsyncExitStack() as stack:
        for pod in some:
            await stack.enter_async_context(serving(pod))
        first, second = [
            await stack.enter_async_context(
                several_pools(
                    tmp_path / keys,
                    dict.fromkeys(keys, some),
                    CONFIG,
                    serves=False,
                    peers=peer_flags(port, ports),
                )
            )
            for keys, port in zip(("ab", "bc"), ports, strict=True)
        ]
        for scene in (first, second):
            await until_connected(scene["b"])
        sent = {}
        for number in range(6):
            for key in "ab":
                await first[key].ask(completion(prompt=f"{key} {number} {PROMPT}"))
            body = completion(prompt=f"b {number} {PROMPT}")
            sent[number] = await first["b"].destination(body)
        await until(lambda: learned(second["b"]), lambda found: found >= 12)
        for number, place in sent.items():
            body = completion(prompt=f"b {number} {PROMPT}")
            assert await second["b"].destination(body) == place
        assert await learned(second["c"]) == 0
        assert await learned(first["a"]) == 0

        async def is_refused() -> bool:
            name = "pointsman_peer_calls_total"
            return bool(await first["a"].series(name, result="refused"))

        await until(is_refused)
        for lonely in (first["a"], second["c"]):
            assert not await lonely.series("pointsman_peers_connected")
            assert not await lonely.series("pointsman_peers_heard")


@asynccontextmanager
async def subscribed(scene: SeveralPools, *names: str, **had: str) -> AsyncIterator[Any]:
    """Open a client of the incremental variant that already has `had`."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{scene.ports.xds}") as channel:
        call = channel.stream_stream(
            wire.DELTA_ENDPOINTS,
            request_serializer=DeltaRequest.SerializeToString,
            response_deserializer=discovery_pb2.DeltaDiscoveryResponse.FromString,
        )()
        await call.write(
            DeltaRequest(resource_names_subscribe=names, initial_resource_versions=had)
        )
        yield call
        call.cancel()


async def assigned(call: Any) -> dict[str, list[str]]:
    """Return the clusters of the next response with their addresses, and acknowledge it."""
    response = await call.read()
    await call.write(DeltaRequest(response_nonce=response.nonce))
    assert list(response.removed_resources) == []
    return {name: sorted(found) for name, found in assignments(response).items()}


async def test_proxies_receive_each_pool_as_a_cluster(tmp_path: Path) -> None:
    one, two, three = pods(page(), page(), page())
    keys = {"llama": [one], "x/qwen": [two], "y/qwen": []}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(three))
        scene = await stack.enter_async_context(
            several_pools(tmp_path, keys, CONFIG, xds=XdsFlags(0, cluster_name="for one pool"))
        )
        call = await stack.enter_async_context(subscribed(scene, *keys))
        found: dict[str, list[str]] = {}
        while len(found) < len(keys):
            found |= await assigned(call)
        assert found == {"llama": [one.host_port], "x/qwen": [two.host_port], "y/qwen": []}
        scene["y/qwen"].list_endpoints([three])
        assert await assigned(call) == {"y/qwen": [three.host_port]}
        scene["llama"].list_endpoints([])
        assert await assigned(call) == {"llama": []}
        name = "pointsman_xds_endpoints"
        counts = [await scene.common.series(name, inference_pool=key) for key in keys]
        assert counts == [0, 1, 1]
        assert await scene.common.series("pointsman_xds_clients") == 1


async def shown(scene: SeveralPools) -> list[str]:
    ports = (scene.ports.grpc, *scene.ports.pools.values())
    return [
        await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) for port in ports
    ]


async def test_a_renewed_certificate_is_shown_at_all_ports(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()

    def put(made: TlsMaterial) -> str:
        (folder / "tls.crt").write_bytes(made.certificate_chain)
        (folder / "tls.key").write_bytes(made.private_key)
        return made.certificate_chain.decode()

    before = put(self_signed())
    tls = TlsFlags(folder, reload=True)
    async with several_pools(tmp_path, {"llama": (), "qwen": ()}, tls=tls) as scene:
        assert await shown(scene) == [before] * 3
        after = put(self_signed())
        await until(lambda: shown(scene), lambda found: found == [after] * 3)
