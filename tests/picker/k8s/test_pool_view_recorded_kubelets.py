"""Recorded writes of real kubelets, and the endpoints that follow from them."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from picker.pool.datastore import EndpointChanges
from tests.fakes.kube_api.replay import Recording, Step, replay
from tests.fakes.kube_api.resources import Object
from tests.fakes.kube_api.store import Type
from tests.support.kube.followed_pool import FollowedPool, following, following_pods

FOLDER = Path(__file__).parents[3] / "tests/data/kubernetes"
APP = {"app": "vllm"}
LATE_SECONDS = 0.1
pytestmark = pytest.mark.looptime
FLAP_SECONDS = (89, 91)  # of the recording: a kubelet comes back


def recording(name: str) -> Recording:
    return Recording.load(FOLDER / f"{name}.jsonl")


def serving(pods: Iterable[Object]) -> set[str]:
    names = set()
    for pod in pods:
        metadata, status = pod["metadata"], pod["status"]
        ready = [one["status"] for one in status.get("conditions", ()) if one["type"] == "Ready"]
        if metadata["labels"].get("app") != "vllm" or "deletionTimestamp" in metadata:
            continue
        if status["phase"] == "Running" and status.get("podIP") and ready == ["True"]:
            names.add(metadata["name"])
    return names


def states_after(steps: Iterable[Step], before: Iterable[Object]) -> dict[str, Object]:
    pods = {pod["metadata"]["name"]: pod for pod in before}
    for step in steps:
        name = step.obj["metadata"]["name"]
        if step.type is Type.DELETED:
            pods.pop(name, None)
        else:
            pods[name] = step.obj
    return pods


@pytest.mark.parametrize("name", ["pod_lifecycle", "pod_faults", "deployment_rollout"])
async def test_ready_pods_serve_after_every_step(name: str) -> None:
    stream = recording(name)
    async with following_pods() as scene:
        for number, _ in enumerate(replay(scene.server, stream), 1):
            await asyncio.sleep(1.2)
            pods = states_after(stream.steps[:number], stream.met_midway())
            assert scene.pods == serving(pods.values()), stream.steps[number - 1].seconds
            for one in scene.datastore.snapshot().candidates:
                status = pods[one.endpoint.name.removesuffix("-rank-0")]["status"]
                assert one.endpoint.host_port == f"{status['podIP']}:8000"


async def played(scene: FollowedPool, stream: Recording) -> list[tuple[float, set[str]]]:
    loop = asyncio.get_running_loop()
    began = loop.time() - stream.steps[0].seconds
    shown: list[tuple[float, set[str]]] = [(0, scene.pods)]

    def look(_: EndpointChanges) -> None:
        if shown[-1][1] != scene.pods:
            shown.append((loop.time() - began, scene.pods))

    scene.datastore.subscribe(look)
    rest = iter(stream.steps)
    next(rest)
    for _ in replay(scene.server, stream):
        after = next(rest, None)
        await asyncio.sleep(2 if after is None else began + after.seconds - loop.time())
    return shown


def check(shown: list[tuple[float, set[str]]], *expected: tuple[float, set[str]]) -> None:
    assert [pods for _, pods in shown] == [pods for _, pods in expected]
    for (at, _), (due, _) in zip(shown[1:], expected[1:], strict=True):
        assert due - 0.001 <= at <= due + LATE_SECONDS


async def test_endpoints_follow_a_recorded_life_of_a_pod() -> None:
    """Its service ends with its deletion, although it reports ready for three more seconds."""
    async with following_pods() as scene:
        shown = await played(scene, recording("pod_lifecycle"))
    check(shown, (0, set()), (4.436, {"life"}), (19.387, set()))


async def test_endpoints_follow_a_recorded_rollout() -> None:
    async with following_pods() as scene:
        shown = await played(scene, recording("deployment_rollout"))
    old1, old2, old3 = (f"vllm-7bdfb47f6-{name}" for name in ("dmkcm", "jvp2g", "2gzd7"))
    new1, new2, new3 = (f"vllm-5cd876f6cf-{name}" for name in ("8cckp", "27b4j", "r9h8b"))
    check(
        shown,
        (0, set()),
        (2.804, {old1}),
        (2.965, {old1, old2}),
        (3.092, {old1, old2, old3}),
        (4.776, {old1, old2, old3, new1}),
        (4.872, {old2, old3, new1}),
        (6.75, {old2, old3, new1, new2}),
        (6.831, {old3, new1, new2}),
        (7.945, {old3, new1, new2, new3}),
        (7.988, {new1, new2, new3}),
    )


async def test_endpoints_follow_recorded_faults() -> None:
    async with following_pods() as scene:
        stream = recording("pod_faults")
        for pod in stream.met_midway():
            scene.server.write(pod)
        await scene.settled()
        shown = await played(scene, stream)
        forgotten = [key.removeprefix("default/") for key in scene.forgotten.keys]
    node = {f"vllm-7bdfb47f6-{name}" for name in ("4hxj8", "7c7qx", "9bthw")}
    first, second, third = sorted(node)
    given_up = [one for one in shown if 79 < one[0] < 90]
    assert {at for at, _ in given_up if 80.785 <= at < 80.9} == {at for at, _ in given_up}
    assert given_up[-1][1] == set()  # a second after its node was given up each of them is gone
    check(
        [one for one in shown if one not in given_up],
        (0, node),
        (3.151, node | {"life"}),
        (10.409, node),  # waited for, as others on its node might have followed
        (13.151, node | {"life"}),
        (15.767, node),  # its deletion
        (17.181, node | {"oom"}),
        (20.241, node),  # its container is seen to have ended
        (21.244, node | {"oom"}),
        (24.301, node),
        (90.164, {first}),
        (90.256, {first, third}),
        (90.352, {first, second, third}),
    )
    assert forgotten[:4] == ["life-rank-0", "life-rank-0", "oom-rank-0", "oom-rank-0"]


async def test_a_returning_kubelet_removes_no_endpoint() -> None:
    whole = recording("pod_faults")
    steps = [one for one in whole.steps if FLAP_SECONDS[0] < one.seconds < FLAP_SECONDS[1]]
    stream = replace(whole, steps=tuple(steps))
    async with following() as scene:
        scene.write_pool(APP)
        for pod in stream.met_midway():
            scene.server.write(pod)
        await scene.settled()
        shown = await played(scene, stream)
    assert len(shown) == 1
    assert len(shown[0][1]) == 3
    assert scene.forgotten.keys == []


async def test_a_recorded_out_of_memory_kill_is_a_new_incarnation() -> None:
    whole = recording("pod_faults")
    stream = replace(
        whole, steps=tuple(one for one in whole.steps if one.obj["metadata"]["name"] == "oom")
    )
    ready = [one.seconds for one in stream.steps if is_ready(one.obj)]
    async with following_pods() as scene:
        endpoints = []
        for step in replay(scene.server, stream):
            await asyncio.sleep(1.2)
            if step.seconds in ready:
                endpoints.append(scene.datastore.snapshot().candidates[0].endpoint)
        first, second = endpoints
        assert (first.key, first.host_port) == (second.key, second.host_port)
        assert not first.is_same_server(second)
        assert scene.forgotten.keys == ["default/oom-rank-0"] * 2


def is_ready(pod: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return conditions.get("Ready") == "True"
