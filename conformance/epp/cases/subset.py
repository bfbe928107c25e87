"""The proxy's subset hint: only those, and an error where there are none."""

from collections.abc import Sequence
from dataclasses import replace

from conformance.case import Case, NotApplicable, Strength, case, expect
from conformance.epp.cases.sources import SUBSET
from conformance.epp.scene import BODILESS, Scene, said
from conformance.wire import messages
from conformance.wire.messages import SUBSET_NAMESPACE, Request, completion, cut

_STRANGER = "127.0.0.99:9"
_TIMES = 5


def _hinted(endpoints: Sequence[str], request: Request | None = None) -> Request:
    hint = {SUBSET_NAMESPACE: {messages.SUBSET: list(endpoints)}}
    return replace(request or Request(), metadata=hint)


async def _only(scene: Scene, request: Request, allowed: Sequence[str]) -> None:
    answer = await scene.ask(request)
    expect(answer.endpoints, f"no destination: {said(answer)}")
    others = set(answer.endpoints) - set(allowed)
    expect(not others, f"{sorted(others)} were picked, of which the hint says nothing")


@case("subset-of-one", SUBSET)
async def of_one(scene: Scene) -> None:
    """With a subset hint of one endpoint the picker MUST pick only that one."""
    body = tuple(cut(completion(3_000), 1_000))
    for endpoint in scene.pool.endpoints:
        for request in (Request(), Request(body=body)):
            # What another endpoint of the same address is worth is a case of its own.
            host = endpoint.rpartition(":")[0]
            near = [e for e in scene.pool.endpoints if e.rpartition(":")[0] == host]
            await _only(scene, _hinted([endpoint], request), near)


@case("subset-of-some", SUBSET)
async def of_some(scene: Scene) -> None:
    """With a subset hint of several endpoints the picker MUST pick only from these."""
    subset = scene.pool.endpoints[:2]
    for _ in range(_TIMES):
        await _only(scene, _hinted(subset), subset)


@case("subset-of-ports", SUBSET)
async def of_ports(scene: Scene) -> None:
    """An entry of the hint is `ip:port`: another port of the same address MUST NOT be picked."""
    group = scene.pool.same_address()
    if not group:
        raise NotApplicable("no two endpoints of the pool share an address")
    for endpoint in group:
        for _ in range(_TIMES):
            await _only(scene, _hinted([endpoint]), [endpoint])


@case("subset-without-body", SUBSET)
async def without_body(scene: Scene) -> None:
    """Requests without a body MUST follow the hint like any other."""
    for endpoint in scene.pool.endpoints[:2]:
        for _ in range(_TIMES):
            await _only(scene, _hinted([endpoint], BODILESS), [endpoint])


@case("subset-with-strangers", SUBSET)
async def with_strangers(scene: Scene) -> None:
    """Endpoints in the hint that are not in the pool MUST NOT be picked; those in the pool still
    may.
    """
    known = scene.pool.endpoints[0]
    for _ in range(_TIMES):
        await _only(scene, _hinted([_STRANGER, known]), [known])


async def _refused(scene: Scene, request: Request) -> None:
    answer = await scene.ask(request)
    expect(not answer.endpoints, f"{answer.endpoints} were picked")
    expect(answer.status == 503, f"the answer is {said(answer)}")


@case("subset-empty", SUBSET)
async def empty(scene: Scene) -> None:
    """An empty hint leaves no endpoint: the answer MUST be an ImmediateResponse with status 503."""
    await _refused(scene, _hinted([]))


@case("subset-of-strangers", SUBSET)
async def of_strangers(scene: Scene) -> None:
    """A hint without endpoints of the pool leaves no endpoint: the answer MUST be an
    ImmediateResponse with status 503.
    """
    await _refused(scene, _hinted([_STRANGER, "127.0.0.98:9"]))


@case("subset-absent", SUBSET)
async def absent(scene: Scene) -> None:
    """Without a hint every endpoint of the pool may be picked; metadata of other namespaces is no
    hint.
    """
    elsewhere = {"some.other.filter": {messages.SUBSET: [_STRANGER]}}
    for request in (Request(), Request(metadata=elsewhere)):
        await _only(scene, request, scene.pool.endpoints)


@case("subset-empty-without-body", SUBSET, strength=Strength.SHOULD)
async def empty_without_body(scene: Scene) -> None:
    """An empty hint should refuse requests without a body, too, with status 503."""
    await _refused(scene, _hinted([], BODILESS))


CASES: tuple[Case[Scene], ...] = (
    of_one,
    of_some,
    of_ports,
    without_body,
    with_strangers,
    empty,
    of_strangers,
    absent,
    empty_without_body,
)
