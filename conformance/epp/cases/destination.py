"""The answer to a request: one list of endpoints, said twice and alike."""

import ipaddress

from conformance.case import Case, NotApplicable, Provision, Strength, case, expect
from conformance.epp.cases.sources import DESTINATION, FALLBACK
from conformance.epp.scene import BODILESS, Scene
from conformance.wire import messages
from conformance.wire.messages import Request, completion, cut

_REQUESTS = (Request(), Request(body=tuple(cut(completion(5_000), 1_000))), BODILESS)
_ASKED = 30


@case("destination-in-header", DESTINATION)
async def in_header(scene: Scene) -> None:
    """A routed request MUST get the header x-gateway-destination-endpoint, with one value."""
    for request in _REQUESTS:
        answer = await scene.ask(request)
        values = answer.headers.get(messages.DESTINATION, [])
        expect(len(values) == 1 and values[0], f"the header has the values {values}")


@case("destination-in-metadata", DESTINATION)
async def in_metadata(scene: Scene) -> None:
    """A routed request MUST get the dynamic metadata x-gateway-destination-endpoint in the
    namespace envoy.lb.
    """
    for request in _REQUESTS:
        answer = await scene.ask(request)
        expect(answer.in_metadata, f"the metadata is {answer.metadata}")


@case("destination-said-alike", DESTINATION)
async def said_alike(scene: Scene) -> None:
    """Header and metadata MUST hold the same value."""
    for request in (*_REQUESTS, *_REQUESTS):
        answer = await scene.ask(request)
        header, metadata = answer.in_headers, answer.in_metadata
        if header is None or metadata is None:
            raise NotApplicable("one of the two is missing, which other cases report")
        expect(header == metadata, f"the header says {header}, the metadata {metadata}")


@case("destination-form", DESTINATION)
async def form(scene: Scene) -> None:
    """The value MUST be `ip:port`, or several of them separated by commas."""
    for request in _REQUESTS:
        answer = await scene.routed(request)
        for value in (answer.in_headers, answer.in_metadata):
            for entry in (value or "").split(",") if value else ():
                expect(_is_endpoint(entry), f"'{entry}' in '{value}' is no ip:port")


@case("destination-in-pool", DESTINATION)
async def in_pool(scene: Scene) -> None:
    """Addresses outside the InferencePool MUST NOT be named."""
    for at in range(_ASKED):
        answer = await scene.routed(_REQUESTS[at % len(_REQUESTS)])
        strangers = set(answer.endpoints) - set(scene.pool.endpoints)
        expect(not strangers, f"{sorted(strangers)} are not in the pool")


@case("destination-unsteered", DESTINATION)
async def unsteered(scene: Scene) -> None:
    """Routing headers that a client has sent MUST NOT reach the answer: the destination is the
    picker's alone.
    """
    stranger = "127.0.0.99:9"
    sent = {
        messages.DESTINATION: stranger,
        messages.SUBSET: stranger,
        messages.SERVED: stranger,
        "x-gateway-destination-endpoint-scores": stranger,
    }
    for body in (None, (completion(),)):
        answer = await scene.routed(Request(sent, body))
        expect(stranger not in answer.endpoints, "the client's destination was taken")
        expect(
            set(answer.endpoints) <= set(scene.pool.endpoints),
            f"{answer.endpoints} are not all of the pool",
        )


@case("destination-of-ipv6", DESTINATION, Provision.POOL_CHANGES)
async def of_ipv6(scene: Scene) -> None:
    """An endpoint with an IPv6 address MUST be named with brackets around it, before its port."""
    wanted = "[2001:db8::1]:8000"
    async with scene.pool_of([wanted]):
        for request in (BODILESS, Request()):
            answer = await scene.routed(request)
            expect(set(answer.endpoints) == {wanted}, f"the destination is {answer.endpoints}")


@case("destination-list-of-different", FALLBACK, Provision.FALLBACK)
async def list_of_different(scene: Scene) -> None:
    """A list of endpoints to fall back on should name each once, and more than one where more are
    eligible.
    """
    answer = await scene.routed(Request())
    listed = answer.endpoints
    expect(len(set(listed)) == len(listed), f"{listed} names an endpoint twice")
    expect(len(listed) > 1, f"of {len(scene.pool.endpoints)} endpoints only {listed} is named")


@case("destination-route-anew", DESTINATION, strength=Strength.SHOULD)
async def route_anew(scene: Scene) -> None:
    """The answer should clear the proxy's route cache, since routes may match the header."""
    for request in (Request(), BODILESS):
        answer = await scene.routed(request)
        expect(answer.clears_route, "clear_route_cache is not set")


def _is_endpoint(entry: str) -> bool:
    host, _, port = entry.strip().rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    in_range = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    return in_range and bracketed == (address.version == 6)


CASES: tuple[Case[Scene], ...] = (
    in_header,
    in_metadata,
    said_alike,
    form,
    in_pool,
    unsteered,
    of_ipv6,
    list_of_different,
    route_anew,
)
