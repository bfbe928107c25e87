"""The InferencePool itself: created, changed, deleted, and what is not of it."""

from conformance.case import Case, Provision, Strength, case, expect
from conformance.epp.scene import said
from conformance.k8s.api import ApiRefusalError
from conformance.k8s.cases.sources import POOL
from conformance.k8s.objects import PodState, pod_document, pod_status
from conformance.k8s.scene import LATE, PRIMARY, ClusterScene
from conformance.waiting import until
from conformance.wire.messages import Request

_SELECTION = Provision.SELECTION
_A_WHILE = 60  # requests


@case("pool-created-later", POOL, _SELECTION, Provision.HEALTH)
async def created_later(scene: ClusterScene) -> None:
    """A picker may start before its InferencePool: it MUST wait, not ready, and follow the pool
    once it exists, without a restart.
    """
    side = scene.side(LATE)
    await side.scene.picker.start()

    async def is_up() -> bool:
        return await side.scene.health("liveness") in ("SERVING", "NOT_SERVING")

    async def is_ready() -> bool:
        return await side.scene.health("readiness") == "SERVING"

    await until(is_up, "the picker answers health checks", scene.follow_seconds)
    expect(not await is_ready(), "it is ready without a pool")
    await scene.put_pool(LATE)
    await until(is_ready, "it is ready once there is a pool", scene.follow_seconds)
    await side.until_endpoints(side.plan.endpoints, "the pool's Pods are its endpoints")


@case("pool-deleted", POOL, _SELECTION)
async def deleted(scene: ClusterScene) -> None:
    """Without its InferencePool a picker MUST NOT pick an endpoint (503); with the pool back it
    MUST pick again.
    """
    side = scene.side(PRIMARY)
    await scene.delete_pool(PRIMARY)

    async def refuses() -> bool:
        answer = await side.scene.ask(Request())
        expect(answer.status in (None, 503), f"the answer is {said(answer)}")
        return answer.status == 503

    await until(refuses, "requests are refused with 503", scene.follow_seconds)
    expect(not await side.endpoints(), "some endpoints are still picked")
    await scene.put_pool(PRIMARY)
    await side.until_endpoints(side.plan.endpoints, "the pool's Pods are endpoints again")


@case("pool-selector-changed", POOL, _SELECTION)
async def selector_changed(scene: ClusterScene) -> None:
    """When the selector of the pool changes exactly the Pods that it selects MUST be endpoints, and
    no request may fail meanwhile.
    """
    side = scene.side(PRIMARY)
    for at in (0, 1):
        await scene.label_pod(side.plan.pod(at), {"role": "chosen"})
    async with scene.traffic():
        await scene.put_pool(PRIMARY, labels={**side.plan.labels, "role": "chosen"})
        await side.until_endpoints(side.at(0, 1), "the chosen Pods alone are endpoints")
        await scene.put_pool(PRIMARY)
        await side.until_endpoints(side.plan.endpoints, "all Pods are endpoints again")


@case("pool-ports-changed", POOL, _SELECTION)
async def ports_changed(scene: ClusterScene) -> None:
    """When the target ports change exactly these ports of each Pod MUST be endpoints, and no
    request may fail meanwhile.
    """
    side = scene.side(PRIMARY)
    before, after = side.plan.ports[0], side.plan.spare_ports[0]
    every = range(len(side.plan.addresses))
    async with scene.traffic():
        for ports in ([before, after], [after], [before]):
            await scene.put_pool(PRIMARY, ports=ports)
            expected = side.at(*every, ports=ports)
            await side.until_endpoints(expected, f"the ports {ports} of each Pod are endpoints")


@case("pool-of-its-own-namespace", POOL, _SELECTION)
async def own_namespace(scene: ClusterScene) -> None:
    """Pods with the pool's labels in another namespace MUST NOT be endpoints."""
    side = scene.side(PRIMARY)
    other = f"{scene.namespace}-other"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}}
    try:
        await scene.api.create(namespace)
        await scene.api.create(pod_document("stranger", side.plan.labels), other)
        await scene.api.merge("Pod", "stranger", pod_status(side.plan.spare[0]), other, "status")
        # A Pod of the right namespace is seen after the other one: by then that would be, too.
        await scene.run_pod("one-more", PodState(side.plan.spare[1], side.plan.labels))
        expected = [*side.plan.endpoints, f"{side.plan.spare[1]}:{side.plan.ports[0]}"]
        await side.until_endpoints(expected, "the Pod of the pool's namespace alone is added")
    finally:
        await scene.api.delete("Pod", "stranger", other)
        await scene.api.delete("Namespace", other)


@case("pool-that-makes-no-sense", POOL, _SELECTION, strength=Strength.SHOULD)
async def makes_no_sense(scene: ClusterScene) -> None:
    """A pool with a selector that no API server can list Pods by (its schema accepts it) should not
    cost a request: the picker continues with the previous one.
    """
    side = scene.side(PRIMARY)
    async with scene.traffic() as traffic:
        try:
            await scene.put_pool(PRIMARY, labels={"no label key!": "x"})
        except ApiRefusalError:
            return  # an admission policy closes the hole
        await traffic.goes_on(_A_WHILE, scene.follow_seconds)
        # What comes after it is seen: the picker has not stopped listening.
        await scene.put_pool(PRIMARY, ports=[*side.plan.ports, *side.plan.spare_ports])
        ports = [*side.plan.ports, *side.plan.spare_ports]
        expected = side.at(*range(len(side.plan.addresses)), ports=ports)
        await side.until_endpoints(expected, "the pool is followed once it makes sense again")


CASES: tuple[Case[ClusterScene], ...] = (
    created_later,
    deleted,
    selector_changed,
    ports_changed,
    own_namespace,
    makes_no_sense,
)
