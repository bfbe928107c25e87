"""Pods come and go: the right endpoints after each, and no request fails."""

import asyncio

from conformance.case import Case, Provision, Strength, case, expect
from conformance.echo.answers import ECHO, STREAM
from conformance.k8s.cases.sources import PODS
from conformance.k8s.objects import PodState
from conformance.k8s.scene import PRIMARY, ClusterScene
from conformance.waiting import until
from conformance.wire.messages import SELECTION, completion

_SELECTION = Provision.SELECTION
_FLAP_SECONDS = 0.2  # a real kubelet was seen to take 50 to 460 ms


@case("pod-added-and-deleted", PODS, _SELECTION)
async def added_and_deleted(scene: ClusterScene) -> None:
    """A Pod that becomes ready MUST become an endpoint, one that is deleted none, and no request
    fail.
    """
    side = scene.side(PRIMARY)
    spare, port = side.plan.spare[0], side.plan.ports[0]
    async with scene.traffic() as traffic:
        await scene.run_pod("added", PodState(spare, side.plan.labels))
        await side.until_endpoints([*side.plan.endpoints, f"{spare}:{port}"], "the Pod is added")
        await scene.delete_pod("added")
        await side.until_endpoints(side.plan.endpoints, "the deleted Pod is gone")
        traffic.served_by()
        await scene.delete_pod(side.plan.pod(0))
        await side.until_endpoints(side.at(1, 2), "another deleted Pod is gone")


@case("pod-not-ready", PODS, _SELECTION)
async def not_ready(scene: ClusterScene) -> None:
    """A Pod that is not ready MUST NOT be an endpoint, and be one again once it is ready."""
    side = scene.side(PRIMARY)
    async with scene.traffic():
        await scene.set_pod(side.plan.pod(1), side.plan.addresses[1], is_ready=False)
        await side.until_endpoints(side.at(0, 2), "the Pod that is not ready is out")
        await scene.set_pod(side.plan.pod(1), side.plan.addresses[1])
        await side.until_endpoints(side.plan.endpoints, "the Pod is back")


@case("pod-never-ready", PODS, _SELECTION)
async def never_ready(scene: ClusterScene) -> None:
    """A Pod that has an IP and has never been ready MUST NOT be an endpoint."""
    side = scene.side(PRIMARY)
    await scene.run_pod("unready", PodState(side.plan.spare[0], side.plan.labels, is_ready=False))
    await scene.run_pod("sign", PodState(side.plan.spare[1], side.plan.labels))
    expected = [*side.plan.endpoints, f"{side.plan.spare[1]}:{side.plan.ports[0]}"]
    await side.until_endpoints(expected, "the ready Pod alone is added")


@case("pod-terminating", PODS, _SELECTION)
async def terminating(scene: ClusterScene) -> None:
    """A Pod that is being deleted MUST get no new request, though it is still ready; a response
    that it is sending MUST reach its client whole.
    """
    side = scene.side(PRIMARY)
    ip, port = side.plan.spare[0], side.plan.ports[0]
    endpoint = f"{ip}:{port}"
    await scene.run_pod("leaving", PodState(ip, side.plan.labels), is_held=True)
    await side.until_endpoints([*side.plan.endpoints, endpoint], "the Pod is added")
    server = side.scene.pool.at(endpoint)
    server.go_on.clear()
    server.streams_begun = 0
    asked = {ECHO: STREAM, SELECTION: endpoint}
    body = completion(stream=True)
    path = "/primary/v1/completions"
    stream = asyncio.create_task(
        side.scene.post("main", path, body, asked), name="stream of a Pod that leaves"
    )

    async def has_begun() -> bool:
        return server.streams_begun > 0

    try:
        await until(has_begun, "the stream begins", scene.follow_seconds)
        async with scene.traffic() as traffic:
            await scene.delete_pod("leaving")
            await side.until_endpoints(side.plan.endpoints, "the Pod gets no new requests")
            traffic.served_by()
        expect(endpoint not in traffic.served_by(), "it has served a new request")
        server.go_on.set()
        reply = await stream
        whole = reply.status == 200 and reply.body.endswith(b"[DONE]\n\n")
        expect(whole, f"the stream was cut: {reply.status} …{reply.body[-60:]!r}")
        await scene.release_pod("leaving")
    finally:
        server.go_on.set()
        await asyncio.gather(stream, return_exceptions=True)


@case("pod-moved", PODS, _SELECTION)
async def moved(scene: ClusterScene) -> None:
    """A Pod whose IP changes MUST be picked at the new one, and no longer at the old one."""
    side = scene.side(PRIMARY)
    port = side.plan.ports[0]
    async with scene.traffic():
        await scene.set_pod(side.plan.pod(0), side.plan.spare[0])
        expected = [*side.at(1, 2), f"{side.plan.spare[0]}:{port}"]
        await side.until_endpoints(expected, "the Pod is at its new address alone")
        await scene.set_pod(side.plan.pod(0), side.plan.addresses[0])
        await side.until_endpoints(side.plan.endpoints, "the Pod is back at its old address")


@case("pod-relabelled", PODS, _SELECTION)
async def relabelled(scene: ClusterScene) -> None:
    """A Pod whose labels leave the pool's selector MUST leave the endpoints, and come back with
    them.
    """
    side = scene.side(PRIMARY)
    async with scene.traffic():
        await scene.label_pod(side.plan.pod(2), {"app": "something-else"})
        await side.until_endpoints(side.at(0, 1), "the Pod has left")
        await scene.label_pod(side.plan.pod(2), dict(side.plan.labels))
        await side.until_endpoints(side.plan.endpoints, "the Pod is back")


@case("pod-replaced", PODS, _SELECTION)
async def replaced(scene: ClusterScene) -> None:
    """A Pod that takes over name and IP of a deleted one MUST be the endpoint in its place; one of
    another pool that takes over the IP MUST NOT.
    """
    side = scene.side(PRIMARY)
    name, ip = side.plan.pod(0), side.plan.addresses[0]
    async with scene.traffic():
        await scene.delete_pod(name)
        await scene.run_pod(name, PodState(ip, side.plan.labels))
        await side.until_endpoints(side.plan.endpoints, "the new Pod is in the old one's place")
        await scene.delete_pod(name)
        await scene.run_pod("taker", PodState(ip, {"app": "something-else"}))
        # A Pod that comes later is seen: so is the one that has taken the address.
        await scene.run_pod("sign", PodState(side.plan.spare[0], side.plan.labels))
        expected = [*side.at(1, 2), f"{side.plan.spare[0]}:{side.plan.ports[0]}"]
        await side.until_endpoints(expected, "a Pod of another pool has taken the address")


@case("pods-flap-together", PODS, _SELECTION, strength=Strength.SHOULD)
async def flap_together(scene: ClusterScene) -> None:
    """When a kubelet restarts all its Pods are not ready for less than half a second, and serve all
    the time: no request should fail.
    """
    plan = scene.side(PRIMARY).plan
    async with scene.traffic():
        for _ in range(3):
            for is_ready in (False, True):
                flips = (
                    scene.set_pod(plan.pod(at), ip, is_ready)
                    for at, ip in enumerate(plan.addresses)
                )
                await asyncio.gather(*flips)
                await asyncio.sleep(_FLAP_SECONDS)
    await scene.side(PRIMARY).until_endpoints(plan.endpoints, "all Pods are endpoints")


CASES: tuple[Case[ClusterScene], ...] = (
    added_and_deleted,
    not_ready,
    never_ready,
    terminating,
    moved,
    relabelled,
    replaced,
    flap_together,
)
