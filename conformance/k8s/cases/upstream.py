"""The cases of the upstream suite that concern an endpoint picker, with its names for them.

Those about conditions that a gateway's controller writes (InferencePoolAccepted and others) ask
nothing of a picker.
"""

import asyncio
from collections.abc import Sequence

from conformance.case import Case, Provision, case, expect
from conformance.epp.scene import Reply
from conformance.k8s.cases.sources import UPSTREAM
from conformance.k8s.scene import H2C, PARALLEL, PRIMARY, SECONDARY, ClusterScene
from conformance.wire.messages import SERVED_HEADER

_SELECTION, _SERVED = Provision.SELECTION, Provision.SERVED
_REQUESTS, _AT_ONCE = 100, 10
_WEIGHTED, _WEIGHTED_AT_ONCE = 200, 5
PRIMARY_WEIGHT, SECONDARY_WEIGHT = 70, 30


async def _crowd(
    scene: ClusterScene, path: str, chosen: Sequence[str], count: int, at_once: int
) -> list[Reply]:
    """Send a number of requests, several at a time. Raises `Violation` unless all are served."""
    room = asyncio.Semaphore(at_once)

    async def one() -> Reply:
        async with room:
            return await scene.post(path, chosen)

    replies = await asyncio.gather(*(one() for _ in range(count)))
    for reply in replies:
        expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
    return replies


def _served(replies: Sequence[Reply]) -> set[str]:
    return {reply.endpoint or "" for reply in replies}


@case("gateway-following-epp-routing", UPSTREAM, _SELECTION)
async def following_epp_routing(scene: ClusterScene) -> None:
    """GatewayFollowingEPPRouting: a hundred requests, ten at a time, that select one, two or three
    Pods by IP MUST all land within these.
    """
    side = scene.side(PRIMARY)
    for count in (1, 2, 3):
        pods = range(count)
        chosen = [side.plan.addresses[at] for at in pods]
        found = _served(await _crowd(scene, "/primary", chosen, _REQUESTS, _AT_ONCE))
        strangers = found - set(side.at(*pods))
        expect(not strangers, f"for {chosen}: served by {sorted(strangers)}")


@case("gateway-following-epp-routing-with-data-parallelism", UPSTREAM, _SELECTION)
async def with_data_parallelism(scene: ClusterScene) -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: every target port of a Pod MUST be an endpoint
    of its own, which is selected by IP and port, and all of them by the IP.
    """
    side = scene.side(PARALLEL)
    first, second, third = side.plan.ports
    one, two, three = side.plan.addresses
    selections = [
        ([two], side.at(1)),
        ([one, f"{three}:{second}"], [*side.at(0), *side.at(2, ports=[second])]),
        (
            [one, f"{two}:{first}", f"{two}:{third}", three],
            [*side.at(0, 2), *side.at(1, ports=[first, third])],
        ),
    ]
    for chosen, allowed in selections:
        found = _served(await _crowd(scene, "/dp", chosen, _REQUESTS, _AT_ONCE))
        strangers = found - set(allowed)
        expect(not strangers, f"for {chosen}: served by {sorted(strangers)}")


@case("gateway-weighted-across-two-inference-pools", UPSTREAM, _SELECTION)
async def weighted_across_two_pools(scene: ClusterScene) -> None:
    """GatewayWeightedAcrossTwoInferencePools: with weights 70 and 30, and the Pods of both pools
    selected, every request MUST be served by the pool that the gateway chose for it: the share
    of the first is near 0.7.
    """
    primary, secondary = scene.side(PRIMARY), scene.side(SECONDARY)
    chosen = [*primary.plan.addresses, *secondary.plan.addresses]
    replies = await _crowd(scene, "/weighted", chosen, _WEIGHTED, _WEIGHTED_AT_ONCE)
    ours, others = set(primary.plan.endpoints), set(secondary.plan.endpoints)
    found = [reply.endpoint for reply in replies]
    strangers = {one or "" for one in found} - ours - others
    expect(not strangers, f"served by {sorted(strangers)}")
    wanted = PRIMARY_WEIGHT / (PRIMARY_WEIGHT + SECONDARY_WEIGHT)
    sigma = (wanted * (1 - wanted) / _WEIGHTED) ** 0.5
    share = sum(one in ours for one in found) / _WEIGHTED
    off = abs(share - wanted)
    expect(off <= max(0.1, 4.5 * sigma), f"the share of the first pool is {share:.2f}")


@case("gateway-destination-endpoint-served", UPSTREAM, _SELECTION, _SERVED)
async def destination_endpoint_served(scene: ClusterScene) -> None:
    """GatewayDestinationEndpointServed: a request that selects a Pod MUST be served by it, and
    return x-conformance-test-served-endpoint with its address; with a body or without.
    """
    side = scene.side(PRIMARY)
    for at, address in enumerate(side.plan.addresses):
        for method in ("POST", "GET"):
            reply = await scene.post("/primary", [address], method=method)
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            (wanted,) = side.at(at)
            named = reply.headers.get(SERVED_HEADER)
            expect(
                reply.endpoint == wanted and named == wanted,
                f"{method} for {wanted}: served by {reply.endpoint}, named {named}",
            )


@case("inference-pool-app-protocol", UPSTREAM, _SELECTION)
async def app_protocol(scene: ClusterScene) -> None:
    """InferencePoolAppProtocol: pools with appProtocol `kubernetes.io/h2c` and `http` MUST both be
    followed, and each Pod be reached by the protocol that the pool names.
    """
    for name, protocol in ((H2C, "h2c"), (PRIMARY, "http/1.1")):
        for endpoint in scene.side(name).plan.endpoints:
            reply = await scene.post(f"/{name}", [endpoint])
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            expect(reply.endpoint == endpoint, f"for {endpoint}: served by {reply.endpoint}")
            spoken = reply.described().get("protocol")
            expect(spoken == protocol, f"{endpoint} was spoken to in {spoken}")


@case("http-route-multiple-rules-different-pools", UPSTREAM)
async def multiple_rules(scene: ClusterScene) -> None:
    """HTTPRouteMultipleRulesDifferentPools: two rules of one route MUST each reach their own pool,
    by requests without a body.
    """
    for name in (PRIMARY, SECONDARY):
        for _ in range(10):
            reply = await scene.post(f"/{name}", method="GET")
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            own = scene.side(name).plan.endpoints
            expect(reply.endpoint in own, f"/{name}: served by {reply.endpoint}")


@case("http-route-multiple-gateways-different-pools", UPSTREAM)
async def multiple_gateways(scene: ClusterScene) -> None:
    """HTTPRouteMultipleGatewaysDifferentPools: requests of a second gateway MUST reach that one's
    pool.
    """
    own = scene.side(SECONDARY).plan.endpoints
    for _ in range(10):
        reply = await scene.post("", method="GET", listener="second")
        expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
        expect(reply.endpoint in own, f"served by {reply.endpoint}")


@case("epp-unavailable-fail-open", UPSTREAM, _SELECTION, Provision.RESTART)
async def unavailable_fail_open(scene: ClusterScene) -> None:
    """EppUnAvailableFailOpen: with failureMode FailOpen requests MUST go to the selected Pod while
    the picker runs, and to any Pod of the pool without it; the picker returns by itself.
    """
    side = scene.side(SECONDARY)
    (wanted,) = side.at(0)
    reply = await scene.post("/secondary", [wanted])
    expect(reply.endpoint == wanted, f"for {wanted}: served by {reply.endpoint}")
    try:
        await side.scene.picker.kill()
        await scene.envoy.until_healthy(side.plan.name, 0)
        for at in range(20):
            reply = await scene.post("/secondary", method="POST" if at % 2 else "GET")
            expect(reply.status == 200, f"status {reply.status}: {reply.body[:200]!r}")
            expect(reply.endpoint in side.plan.endpoints, f"served by {reply.endpoint}")
    finally:
        await side.scene.disconnect()
        await scene.until_ready(SECONDARY)
    reply = await scene.post("/secondary", [wanted])
    expect(reply.endpoint == wanted, f"afterwards, for {wanted}: served by {reply.endpoint}")


CASES: tuple[Case[ClusterScene], ...] = (
    following_epp_routing,
    with_data_parallelism,
    weighted_across_two_pools,
    destination_endpoint_served,
    app_protocol,
    multiple_rules,
    multiple_gateways,
    unavailable_fail_open,
)
