"""The API server goes away and comes back: the picker serves from what it knows, and catches up."""

import aiohttp

from conformance.case import Case, Provision, case, expect
from conformance.k8s.cases.sources import API
from conformance.k8s.scene import PRIMARY, ClusterScene
from conformance.k8s.server_process import TestServer
from conformance.waiting import until

_A_WHILE = 60  # requests
_NEEDS = (Provision.SELECTION, Provision.API_OUTAGE)


def _server(scene: ClusterScene) -> TestServer:
    if scene.server is None:
        raise RuntimeError(f"the case does not say that it needs {Provision.API_OUTAGE}")
    return scene.server


async def _is_there(scene: ClusterScene) -> bool:
    try:
        await scene.api.names("Pod", scene.namespace)
    except (aiohttp.ClientError, OSError):
        return False
    return True


async def _leave(scene: ClusterScene) -> None:
    _server(scene).go_away()

    async def is_gone() -> bool:
        return not await _is_there(scene)

    await until(is_gone, "the API server is gone", scene.follow_seconds)


async def _return(scene: ClusterScene) -> None:
    _server(scene).come_back()
    await until(lambda: _is_there(scene), "the API server is back", scene.follow_seconds)


@case("api-server-away", API, *_NEEDS)
async def away(scene: ClusterScene) -> None:
    """Without the API server requests MUST be served as before; once it is back, with its history
    lost (410), the picker MUST follow changes again.
    """
    side = scene.side(PRIMARY)
    async with scene.traffic():
        try:
            await _leave(scene)
            await side.until_endpoints(side.plan.endpoints, "the endpoints are as before")
        finally:
            await _return(scene)
        await scene.delete_pod(side.plan.pod(0))
        await side.until_endpoints(side.at(1, 2), "a Pod deleted after the outage is gone")


@case("api-server-away-again-and-again", API, *_NEEDS)
async def away_again(scene: ClusterScene) -> None:
    """An API server that goes away several times MUST cost no request, and leave the endpoints
    right.
    """
    side = scene.side(PRIMARY)
    async with scene.traffic() as traffic:
        for _ in range(3):
            try:
                await _leave(scene)
                await traffic.goes_on(_A_WHILE, scene.follow_seconds)
            finally:
                await _return(scene)
        await scene.set_pod(side.plan.pod(1), side.plan.addresses[1], is_ready=False)
        await side.until_endpoints(side.at(0, 2), "a Pod that is not ready is out")


@case("picker-started-in-an-outage", API, *_NEEDS, Provision.RESTART, Provision.HEALTH)
async def started_in_an_outage(scene: ClusterScene) -> None:
    """A picker that starts without an API server MUST wait, not ready, and serve once there is one,
    without a restart.
    """
    side = scene.side(PRIMARY)
    picker = side.scene.picker
    await picker.kill()
    await side.scene.disconnect()
    try:
        await _leave(scene)
        await picker.start()

        async def is_up() -> bool:
            return await side.scene.health("liveness") in ("SERVING", "NOT_SERVING")

        await until(is_up, "the picker answers health checks", scene.follow_seconds)
        readiness = await side.scene.health("readiness")
        expect(readiness != "SERVING", "it is ready without knowing its pool")
    finally:
        await _return(scene)
    await side.until_endpoints(side.plan.endpoints, "it follows its pool once it can")


CASES: tuple[Case[ClusterScene], ...] = (away, away_again, started_in_an_outage)
