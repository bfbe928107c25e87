"""A whole picker of several pools of files: the pool of a request, and the state of each pool."""

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.app.picker import QUIET_SECONDS, StartError
from picker.cli.options import PoolFlags
from picker.errors import ConfigError
from tests.support.picker.ext_proc_stream import completion, destination_of
from tests.support.picker.metrics_pages import Pod, page, pods
from tests.support.picker.pools_scene import of_pool, pool_flags, pools_picker, several_pools
from tests.support.picker.waiting_requests import Scene, config, status_of
from tests.support.picker.whole_picker import HEAD, WholePicker, objective, rewrite, rule
from tests.support.waiting import until

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
