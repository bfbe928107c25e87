"""Requests that get no endpoint: which status, and nothing else."""

from conformance.case import Case, Provision, Strength, case, expect
from conformance.epp.cases.sources import ERRORS
from conformance.epp.scene import BODILESS, Scene, said
from conformance.waiting import until
from conformance.wire.messages import SUBSET, SUBSET_NAMESPACE, Metadata, Request, completion

_OBJECTIVE = {
    "x-llm-d-inference-objective": "sheddable",
    "x-gateway-inference-objective": "sheddable",
}
_EMPTY_SUBSET: Metadata = {SUBSET_NAMESPACE: {SUBSET: []}}


@case("refusal-empty-pool", ERRORS, Provision.POOL_CHANGES)
async def empty_pool(scene: Scene) -> None:
    """With no ready endpoint in the pool the answer MUST be an ImmediateResponse with status
    503.
    """
    async with scene.pool_of([]):
        answer = await scene.ask(Request())
        expect(answer.status == 503, f"the answer is {said(answer)}")


@case("refusal-empty-pool-without-body", ERRORS, Provision.POOL_CHANGES, strength=Strength.SHOULD)
async def empty_pool_without_body(scene: Scene) -> None:
    """Requests without a body should get the same status."""
    async with scene.pool_of([]):
        answer = await scene.ask(BODILESS)
        expect(answer.status == 503, f"the answer is {said(answer)}")


@case("refusal-dropped", ERRORS, Provision.SHEDDING)
async def dropped(scene: Scene) -> None:
    """A request that has to be dropped because the endpoints are full MUST be answered by an
    ImmediateResponse with status 429; one of higher priority continues.
    """

    async def is_dropped() -> bool:
        answer = await scene.ask(Request(_OBJECTIVE))
        expect(answer.status in (None, 429), f"the answer is {said(answer)}")
        return answer.status == 429

    async def is_taken() -> bool:
        return (await scene.ask(Request(_OBJECTIVE))).status is None

    async with scene.full():
        await until(is_dropped, "requests that may be shed are dropped", scene.ready_seconds)
        await scene.routed(Request())
    await until(is_taken, "they are taken again once there is room", scene.ready_seconds)


@case("refusal-only", ERRORS)
async def only(scene: Scene) -> None:
    """An ImmediateResponse MUST be the only answer: no destination before it, no message after
    it.
    """
    stream = await scene.stream()
    answer = await stream.request(Request(metadata=_EMPTY_SUBSET))
    expect(answer.status is not None, f"not refused: {said(answer)}")
    expect(answer.kinds == ["immediate_response"], f"the order is {answer.kinds}")
    expect(not answer.in_metadata, f"with metadata {answer.metadata}")
    more = [str(message.WhichOneof("response")) for message in await stream.rest()]
    expect(not more, f"after the refusal: {more}")


@case("refusal-of-nonsense", ERRORS, strength=Strength.SHOULD)
async def of_nonsense(scene: Scene) -> None:
    """A body that is no JSON where JSON is required should get an answer, a rejection or a
    destination, rather than a failed stream.
    """
    for body in (b"no healthy upstream", completion()[:-1], b"\xff\xfe", b"[]"):
        answer = await scene.ask(Request(body=(body,)))
        refused = answer.status is not None and 400 <= answer.status < 500
        expect(refused or answer.endpoints, f"for {body!r}: {said(answer)}")


@case("refusal-then-served", ERRORS)
async def then_served(scene: Scene) -> None:
    """A rejection applies to one request: those that follow MUST be routed."""
    for _ in range(5):
        await scene.ask(Request(metadata=_EMPTY_SUBSET))
        await scene.routed(Request())


CASES: tuple[Case[Scene], ...] = (
    empty_pool,
    empty_pool_without_body,
    dropped,
    only,
    of_nonsense,
    then_served,
)
