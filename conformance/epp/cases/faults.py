"""Through a real Envoy: endpoints that are dead, a picker that is killed, comes back, drains."""

import asyncio

from conformance.case import Case, NotApplicable, Provision, case, expect
from conformance.echo.answers import ECHO, STREAM
from conformance.epp.cases.sources import FAILURE_MODE, FALLBACK, HEALTH
from conformance.epp.scene import CLOSED, OPEN, Reply, Scene
from conformance.waiting import until
from conformance.wire import messages
from conformance.wire.messages import SELECTION, completion

_GATEWAY, _RESTART = Provision.GATEWAY, Provision.RESTART
_REQUESTS = 30
_STREAMS = 6
_END_SECONDS = 30.0


@case("gateway-falls-back", FALLBACK, _GATEWAY, Provision.FALLBACK, Provision.SELECTION)
async def falls_back(scene: Scene) -> None:
    """When the first endpoint of the list is unreachable the request MUST be served by a later one
    of the same list, whole.
    """
    dead, *alive = scene.pool.endpoints[:3]
    chosen = {SELECTION: ",".join((dead, *alive))}
    await scene.pool.at(dead).stop()
    fell_back = 0
    try:
        for _ in range(_REQUESTS):
            reply = await scene.post(CLOSED, headers=chosen)
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            expect(reply.endpoint in alive, f"served by {reply.endpoint}")
            named = (reply.seen(messages.DESTINATION) or [""])[0].split(",")
            fell_back += named[0] == dead and len(named) > 1
    finally:
        await scene.pool.at(dead).start()
    if not fell_back:
        raise NotApplicable("the picker has not once put the dead endpoint first")


@case("failure-open", FAILURE_MODE, _GATEWAY, _RESTART)
async def failure_open(scene: Scene) -> None:
    """With failureMode FailOpen requests MUST be served without a picker, with a body or without,
    by endpoints of the pool.
    """
    async with scene.without_picker():
        for at in range(_REQUESTS):
            reply = await (scene.post if at % 2 else scene.get)(OPEN)
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            expect(reply.endpoint in scene.pool.endpoints, f"served by {reply.endpoint}")


@case("failure-close", FAILURE_MODE, _GATEWAY, _RESTART)
async def failure_close(scene: Scene) -> None:
    """With failureMode FailClose requests MUST be rejected with a 5xx without a picker, and none
    may reach an endpoint.
    """
    async with scene.without_picker():
        before = _reached(scene)
        for at in range(_REQUESTS):
            reply = await (scene.post if at % 2 else scene.get)(CLOSED)
            expect(500 <= reply.status < 600, f"status {reply.status}")
        expect(_reached(scene) == before, "a request has reached an endpoint")


@case("picker-back", FAILURE_MODE, _GATEWAY, _RESTART)
async def picker_back(scene: Scene) -> None:
    """A killed and restarted picker MUST be in use again without help by the gateway: it picks for
    every request.
    """
    async with scene.without_picker():
        pass
    for listener in (CLOSED, OPEN):
        for at in range(_REQUESTS):
            reply = await (scene.post if at % 2 else scene.get)(listener)
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            expect(reply.seen(messages.DESTINATION), "a request has passed without a picker")


@case("drain", HEALTH, _GATEWAY, _RESTART)
async def drain(scene: Scene) -> None:
    """A picker that gets SIGTERM MUST finish its streams, and new requests of a pool that fails
    open MUST be served meanwhile.
    """
    servers = list(scene.pool.servers.values())
    for server in servers:
        server.go_on.clear()
        server.streams_begun = 0
    asked = {ECHO: STREAM}
    streams = [
        asyncio.create_task(
            scene.post(CLOSED, body=completion(stream=True), headers=asked), name="drained stream"
        )
        for _ in range(_STREAMS)
    ]

    async def all_begun() -> bool:
        return sum(server.streams_begun for server in servers) >= _STREAMS

    try:
        await until(all_begun, "streams begin", scene.patience_seconds)
        scene.picker.ask_to_end()
        if scene.picker.health_address is not None:
            await until(lambda: _is_leaving(scene), "it is not ready any more", 10.0)
            await scene.gateway().until_healthy(OPEN, 0)
        replies = [await (scene.post if at % 2 else scene.get)(OPEN) for at in range(_REQUESTS)]
        _all_served(scene, replies)
        for server in servers:
            server.go_on.set()
        for reply in await asyncio.gather(*streams):
            whole = reply.status == 200 and reply.body.endswith(b"[DONE]\n\n")
            expect(whole, f"a stream was cut: {reply.status} …{reply.body[-60:]!r}")
        code = await scene.picker.end(_END_SECONDS)
        expect(code == 0, f"the picker ended with {code}")
    finally:
        for server in servers:
            server.go_on.set()
        await asyncio.gather(*streams, return_exceptions=True)
        await scene.picker.kill()
        await scene.back_again()


async def _is_leaving(scene: Scene) -> bool:
    return await scene.health("readiness") != "SERVING"


def _all_served(scene: Scene, replies: list[Reply]) -> None:
    for reply in replies:
        expect(reply.status == 200, f"while it drains: status {reply.status}")
        expect(reply.endpoint in scene.pool.endpoints, f"served by {reply.endpoint}")


def _reached(scene: Scene) -> int:
    return sum(len(server.received) for server in scene.pool.servers.values())


CASES: tuple[Case[Scene], ...] = (falls_back, failure_open, failure_close, picker_back, drain)
