"""Through a real Envoy: requests arrive where the picker says, whole, and so do responses."""

import asyncio
import hashlib

import aiohttp

from conformance.case import Case, Provision, case, expect
from conformance.echo.answers import ECHO, SERVED_BY, STREAM
from conformance.echo.server import STREAM_EVENTS, EchoServer
from conformance.epp.cases.sources import DESTINATION, EPP_ROLE, SERVED, STREAMING
from conformance.epp.scene import BY_HEADER, CLOSED, Scene
from conformance.ports import free_ports
from conformance.waiting import until
from conformance.wire import messages
from conformance.wire.messages import SELECTION, SERVED_HEADER, completion

_GATEWAY, _SELECTION = Provision.GATEWAY, Provision.SELECTION
_WAYS = (CLOSED, BY_HEADER)
_SIZES = (60, 62_000, 62_001, 70_000, 1_000_000, 3_000_000)
_REQUESTS, _AT_ONCE = 100, 10


@case("gateway-first-of-list", DESTINATION, _GATEWAY)
async def first_of_list(scene: Scene) -> None:
    """A request MUST arrive at the first endpoint that the picker names, whether the gateway reads
    the metadata or the header, with a body or without.
    """
    for at in range(20):
        reply = await (scene.post if at % 2 else scene.get)(CLOSED)
        expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
        named = reply.seen(messages.DESTINATION)
        expect(len(named) == 1, f"the endpoint saw the destinations {named}")
        first = named[0].split(",")[0]
        expect(reply.endpoint == first, f"picked {named[0]}, served by {reply.endpoint}")


@case("gateway-selected", EPP_ROLE, _GATEWAY, _SELECTION)
async def selected(scene: Scene) -> None:
    """A request that selects an endpoint MUST be served by it, whether the gateway reads the
    metadata or the header.
    """
    for listener in _WAYS:
        for endpoint in scene.pool.endpoints:
            chosen = {SELECTION: endpoint}
            for reply in (
                await scene.post(listener, headers=chosen),
                await scene.get(listener, headers=chosen),
            ):
                expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
                expect(reply.endpoint == endpoint, f"for {endpoint}: served by {reply.endpoint}")


@case("gateway-crowd-selected", EPP_ROLE, _GATEWAY, _SELECTION)
async def following(scene: Scene) -> None:
    """A hundred requests, ten at a time, that select one, two or three addresses MUST all be
    served by these.
    """
    for count in (1, 2, 3):
        chosen = list(dict.fromkeys(e.rpartition(":")[0] for e in scene.pool.endpoints))[:count]
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(addresses: list[str], room: asyncio.Semaphore) -> tuple[int, str]:
            async with room:
                reply = await scene.post(headers={SELECTION: ",".join(addresses)})
                return reply.status, (reply.endpoint or "").rpartition(":")[0]

        found = await asyncio.gather(*(one(chosen, room) for _ in range(_REQUESTS)))
        wrong = {pair for pair in found if pair[0] != 200 or pair[1] not in chosen}
        expect(not wrong, f"for {chosen}: {sorted(wrong)}")


@case("gateway-bodies-intact", STREAMING, _GATEWAY)
async def bodies_intact(scene: Scene) -> None:
    """Bodies of requests and of responses MUST pass whole, whatever their size."""
    for size in _SIZES:
        body = completion(size)
        sent = await scene.post(body=body)
        expect(sent.status == 200, f"{size} bytes: status {sent.status} {sent.body[:200]!r}")
        wanted = hashlib.sha256(body).hexdigest()
        expect(sent.described().get("sha256") == wanted, f"{size} bytes did not arrive whole")
        back = await scene.post(body=body, headers={ECHO: "body"})
        expect(back.body == body, f"of {size} bytes {len(back.body)} came back, or other ones")


@case("gateway-events-as-they-come", STREAMING, _GATEWAY)
async def events_as_they_come(scene: Scene) -> None:
    """Events of a response MUST reach the client as they arrive: the first one before the endpoint
    has sent the others.
    """
    gateway = scene.gateway()
    servers = scene.pool.servers.values()
    for server in servers:
        server.go_on.clear()
    try:
        async with (
            asyncio.timeout(scene.patience_seconds * 3),
            gateway.client.post(
                gateway.urls[CLOSED] + "/v1/completions",
                data=completion(stream=True),
                headers={ECHO: STREAM, "content-type": "application/json"},
            ) as response,
        ):
            first = await response.content.readuntil(b"\n\n")
            expect(b'"index": 0' in first, f"the first event is {first!r}")
            for server in servers:
                server.go_on.set()
            others = await response.content.read()
            expect(
                others.count(b"data:") == STREAM_EVENTS and others.endswith(b"[DONE]\n\n"),
                f"after the first event: {others!r}",
            )
    finally:
        for server in servers:
            server.go_on.set()


@case("gateway-served-told", SERVED, _GATEWAY, Provision.SERVED)
async def served_header(scene: Scene) -> None:
    """The picker under test MUST return the gateway's report of the endpoint that served."""
    for reply in (await scene.post(), await scene.get()):
        named = reply.headers.get(SERVED_HEADER)
        expect(named == reply.headers.get(SERVED_BY), f"named {named}, served by {reply.endpoint}")


@case("gateway-unsteered", DESTINATION, _GATEWAY)
async def unsteered(scene: Scene) -> None:
    """A client's own routing headers MUST NOT steer a request, even if no gateway strips them: the
    picker's destination replaces them.
    """
    stranger = EchoServer("127.0.0.1", free_ports(1)[0])
    await stranger.start()
    steering = {
        messages.DESTINATION: stranger.endpoint,
        messages.SUBSET: stranger.endpoint,
        "x-prefiller-host-port": stranger.endpoint,
        # A gateway that goes by the header takes one endpoint, and no list.
        SELECTION: scene.pool.endpoints[0],
    }
    try:
        for listener in _WAYS:
            for reply in (
                await scene.post(listener, headers=steering),
                await scene.get(listener, headers=steering),
            ):
                expect(
                    reply.endpoint in (None, *scene.pool.endpoints),
                    f"{listener}: served by {reply.endpoint}",
                )
                expect(
                    reply.status == 200 or listener == BY_HEADER,
                    f"{listener}: status {reply.status} {reply.body[:200]!r}",
                )
    finally:
        await stranger.stop()
    expect(not stranger.received, "an endpoint outside the pool was reached")


@case("gateway-clients-gone", STREAMING, _GATEWAY)
async def clients_gone(scene: Scene) -> None:
    """Clients that disconnect in the middle of a response MUST NOT harm later ones."""
    gateway = scene.gateway()
    servers = list(scene.pool.servers.values())
    for server in servers:
        server.go_on.clear()
        server.streams_begun = 0

    async def leave() -> None:
        sent = gateway.client.post(
            gateway.urls[CLOSED] + "/v1/completions",
            data=completion(stream=True),
            headers={ECHO: STREAM},
        )
        async with sent as response:
            await response.content.readuntil(b"\n\n")
            response.close()

    async def all_begun() -> bool:
        return sum(server.streams_begun for server in servers) >= _AT_ONCE

    try:
        async with asyncio.timeout(scene.patience_seconds * 3):
            await asyncio.gather(*(leave() for _ in range(_AT_ONCE)))
        await until(all_begun, "the streams begin", scene.patience_seconds)
    except (TimeoutError, aiohttp.ClientError) as error:
        expect(False, f"the streams did not begin: {type(error).__name__} {error}")
    finally:
        for server in servers:
            server.go_on.set()
    for _ in range(5):
        reply = await scene.post()
        expect(reply.status == 200, f"afterwards: status {reply.status}")


CASES: tuple[Case[Scene], ...] = (
    first_of_list,
    selected,
    following,
    bodies_intact,
    events_as_they_come,
    served_header,
    unsteered,
    clients_gone,
)
