"""Cases on the endpoint that served, which the proxy reports to the picker with the response."""

from conformance.case import Case, Provision, case, expect
from conformance.epp.cases.sources import EPP_ROLE, SERVED
from conformance.epp.scene import BODILESS, Scene, said
from conformance.wire.messages import SERVED_HEADER, Request, Response

_NEEDS = Provision.SERVED


async def _reports_another(scene: Scene, request: Request) -> None:
    """Report another endpoint than the picked one as having served, as after a retry."""
    stream = await scene.stream()
    asked = await stream.request(request)
    expect(asked.endpoints, f"no destination: {said(asked)}")
    served = next(one for one in scene.pool.endpoints if one != asked.endpoints[0])
    answered = await stream.response(Response(served=served))
    await stream.leave()
    found = answered.headers.get(SERVED_HEADER, [])
    expect(found == [served], f"served by {served}, reported {found}")


async def _reported(scene: Scene, request: Request, response: Response) -> list[str]:
    _, answer = await scene.converse(request, response)
    return answer.headers.get(SERVED_HEADER, [])


@case("served-taken", SERVED)
async def taken(scene: Scene) -> None:
    """The served endpoint's metadata on the response MUST be accepted: of the endpoint picked, of
    one further down the list after a retry, of an unknown one, and none at all.
    """
    for served in (*scene.pool.endpoints, "127.0.0.99:9", None):
        for request in (Request(), BODILESS):
            _, answer = await scene.converse(request, Response(served=served))
            wanted = ["response_headers", "response_body"]
            expect(answer.kinds == wanted, f"served by {served}: {answer.kinds}")


@case("served-told", EPP_ROLE, _NEEDS)
async def reported(scene: Scene) -> None:
    """A picker under test MUST set x-conformance-test-served-endpoint to the metadata's value,
    which may differ from its pick.
    """
    for _ in range(3):
        await _reports_another(scene, Request())


@case("served-told-without-body", EPP_ROLE, _NEEDS)
async def reported_without_body(scene: Scene) -> None:
    """The same MUST hold for requests without a body."""
    await _reports_another(scene, BODILESS)


@case("served-missing", EPP_ROLE, _NEEDS)
async def missing(scene: Scene) -> None:
    """If the proxy does not report the endpoint that served, the header MUST begin with `fail:`, so
    that a test that expects an endpoint fails.
    """
    nothing, other = Response(), Response(metadata={"envoy.lb": {"other": "value"}})
    for response in (nothing, other):
        found = await _reported(scene, Request(), response)
        expect(len(found) == 1 and found[0].startswith("fail:"), f"reported {found}")


CASES: tuple[Case[Scene], ...] = (taken, reported, reported_without_body, missing)
