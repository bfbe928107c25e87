"""The header by which the upstream suite names to a picker under test the endpoint to pick."""

from conformance.case import Case, Provision, case, expect
from conformance.epp.cases.sources import EPP_ROLE
from conformance.epp.scene import BODILESS, Scene, said
from conformance.wire.messages import SELECTION, Request, completion

_STRANGER = "127.0.0.99"
_NEEDS = Provision.SELECTION


def _selecting(value: str, bodiless: bool = False) -> Request:
    return Request({SELECTION: value}, None if bodiless else (completion(),))


@case("selection-of-endpoint", EPP_ROLE, _NEEDS)
async def of_endpoint(scene: Scene) -> None:
    """A request whose header names an `ip:port` of the pool MUST go there."""
    for endpoint in scene.pool.endpoints:
        answer = await scene.routed(_selecting(endpoint))
        expect(answer.endpoints == [endpoint], f"for {endpoint}: {answer.endpoints}")


@case("selection-of-address", EPP_ROLE, _NEEDS)
async def of_address(scene: Scene) -> None:
    """An entry without a port MUST mean every port of that address, and no other address."""
    hosts = {endpoint.rpartition(":")[0] for endpoint in scene.pool.endpoints}
    for host in sorted(hosts):
        answer = await scene.routed(_selecting(host))
        others = [e for e in answer.endpoints if e.rpartition(":")[0] != host]
        expect(not others, f"for {host}: {answer.endpoints}")


@case("selection-of-several", EPP_ROLE, _NEEDS)
async def of_several(scene: Scene) -> None:
    """A request whose header names several endpoints MUST go to one of these."""
    wanted = scene.pool.endpoints[:2]
    for _ in range(10):
        answer = await scene.routed(_selecting(", ".join(wanted)))
        expect(set(answer.endpoints) <= set(wanted), f"for {wanted}: {answer.endpoints}")


@case("selection-without-body", EPP_ROLE, _NEEDS)
async def without_body(scene: Scene) -> None:
    """The header MUST count for requests without a body, too."""
    for endpoint in scene.pool.endpoints:
        answer = await scene.ask(_selecting(endpoint, bodiless=True))
        expect(answer.endpoints == [endpoint], f"for {endpoint}: {said(answer)}")


@case("selection-with-strangers", EPP_ROLE, _NEEDS)
async def with_strangers(scene: Scene) -> None:
    """Entries that are not in the pool MUST be ignored: in a split over two pools every pool's
    picker gets the addresses of both.
    """
    known = scene.pool.endpoints[1]
    for value in (f"{_STRANGER},{known}", f"{known},{_STRANGER}:8000"):
        answer = await scene.routed(_selecting(value))
        expect(answer.endpoints == [known], f"for '{value}': {answer.endpoints}")


@case("selection-of-strangers", EPP_ROLE, _NEEDS)
async def of_strangers(scene: Scene) -> None:
    """A header without endpoints of the pool MUST NOT be answered with another endpoint; the
    request is rejected.
    """
    answer = await scene.ask(_selecting(_STRANGER))
    expect(not answer.endpoints, f"{answer.endpoints} were picked")
    refused = answer.status is not None and answer.status >= 400
    expect(refused, f"the answer is {said(answer)}")


@case("selection-absent", EPP_ROLE, _NEEDS)
async def absent(scene: Scene) -> None:
    """Without the header a request MUST be routed to any endpoint, with a body or without."""
    for request in (Request(), BODILESS):
        answer = await scene.ask(request)
        expect(answer.endpoints, f"the answer is {said(answer)}")


CASES: tuple[Case[Scene], ...] = (
    of_endpoint,
    of_address,
    of_several,
    without_body,
    with_strangers,
    of_strangers,
    absent,
)
