"""Fairness ids, processors, screeners, admitters and the `Prefer` header."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.requestcontrol.admission import MAX_FAIRNESS_ID, prefers_if_available
from picker.requestcontrol.pipeline import RequestPolicies
from picker.types import Candidate, FinishCause, InferenceRequest, RawRequest

HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
BODY = b'{"model":"m","prompt":"hello"}'


def raw(**headers: str) -> RawRequest:
    """Build a completions request; `_` in the name of a header stands for `-`."""
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return RawRequest({**HEADERS, **more}, BODY)


@dataclass
class Objectives:
    priorities: Mapping[str, int | None]

    def priority(self, objective: str) -> int | None:
        return self.priorities.get(objective)


@dataclass
class Agent:
    fairness_id: str

    def process(self, request: InferenceRequest) -> InferenceRequest:
        return replace(request, fairness_id=self.fairness_id)


@dataclass
class Full:
    value: float
    asked: list[tuple[int, float]] = field(default_factory=list)

    def saturation(self, candidates: Any, attributes: Any, now_seconds: float) -> float:
        self.asked.append((len(candidates), now_seconds))
        return self.value


@dataclass
class Keep:
    names: Sequence[str]
    seen: list[int] = field(default_factory=list)

    def screen(self, request: Any, candidates: Any, rng: Any) -> Sequence[Candidate]:
        self.seen.append(len(candidates))
        return [one for one in reversed(candidates) if one.endpoint.name in self.names]


@dataclass
class Gate:
    error: Exception | None = None
    asked: int = 0

    def admit(self, request: Any, candidates: Any, attributes: Any, rng: Any) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


@dataclass
class Finds:
    blocks: Mapping[str, int]
    name: str = "index"

    def produce(self, request: Any, candidates: Any, attributes: Any) -> InferenceRequest:
        attributes[match_info_key(self.name)] = PrefixCacheMatchInfo(4, 16, self.blocks)
        return request


@pytest.mark.parametrize(
    ("headers", "agent", "expected"),
    [
        ({}, "", "default-flow"),
        ({"x_llm_d_inference_fairness_id": "user-123"}, "", "user-123"),
        ({"x_gateway_inference_fairness_id": "user-123"}, "", "user-123"),
        ({}, "session-abc", "session-abc"),
        ({"x_llm_d_inference_fairness_id": "user-123"}, "session-abc", "user-123"),
    ],
)
async def test_a_request_is_from_whom_its_header_says_else_a_processor(
    house: Any, headers: dict[str, str], agent: str, expected: str
) -> None:
    house.use(processors=(Agent(agent),) if agent else ())
    exchange, _ = await house.route(raw(**headers))
    assert house.scheduler.calls[0][0].fairness_id == expected
    exchange.finish(FinishCause.COMPLETED)
    assert house.recorder.outcomes[0].fairness_id == expected


async def test_an_overlong_fairness_id_is_shortened_to_a_unique_one(house: Any) -> None:
    """Clients choose these ids, and thousands are remembered."""
    seen = []
    for name in ("x" * 60_000, "x" * 60_000 + "y", "x" * MAX_FAIRNESS_ID):
        exchange, _ = await house.route(raw(x_llm_d_inference_fairness_id=name))
        seen.append(house.scheduler.calls[-1][0].fairness_id)
        exchange.finish(FinishCause.COMPLETED)
    assert len(set(seen)) == 3
    assert max(map(len, seen)) == MAX_FAIRNESS_ID
    assert all(name.startswith("xxx") for name in seen)


@pytest.mark.parametrize(
    ("objective", "priority"), [("batch", -1), ("chat", 10), ("vague", 0), ("unknown", 0), ("", 0)]
)
async def test_an_objective_stands_for_a_priority(
    make_house: Any, objective: str, priority: int
) -> None:
    objectives = Objectives({"batch": -1, "chat": 10, "vague": None})
    house = make_house(policies=RequestPolicies(objectives=objectives))
    await house.route(raw(x_llm_d_inference_objective=objective))
    request = house.scheduler.calls[0][0]
    assert (request.objective, request.priority) == (objective, priority)


@pytest.mark.parametrize(
    ("priority", "saturation", "is_shed"),
    [(-1, 1.0, True), (-1, 2.5, True), (-1, 0.99, False), (0, 5.0, False), (1, 5.0, False)],
)
async def test_only_sheddable_requests_are_shed_and_only_while_the_pool_is_full(
    make_house: Any, priority: int, saturation: float, is_shed: bool
) -> None:
    detector = Full(saturation)
    house = make_house(policies=RequestPolicies(objectives=Objectives({"o": priority})))
    house.use(saturation=detector)
    request = replace(raw(x_llm_d_inference_objective="o"), subset_hint=("10.0.0.2",))
    if not is_shed:
        await house.route(request)
        return
    refusal = await house.refusal(request)
    assert (refusal.status, refusal.headers) == (429, (("retry-after", "1"),))
    assert refusal.message == "the pool is full, and requests of negative priority are rejected"
    assert [asked for asked, _ in detector.asked] == [1]
    assert house.recorder.outcomes[0].priority == -1


async def test_screeners_see_all_candidates_and_their_results_are_intersected(house: Any) -> None:
    first, second = Keep(["pod-1", "pod-2"]), Keep(["pod-3", "pod-2", "pod-1"])
    house.use(screeners=(first, second))
    await house.route(raw())
    assert [c.endpoint.name for c in house.scheduler.calls[0][1]] == ["pod-1", "pod-2"]
    assert (first.seen, second.seen) == ([3], [3])


async def test_screeners_without_a_common_candidate_are_a_503(house: Any) -> None:
    house.use(screeners=(Keep(["pod-1"]), Keep(["pod-2"])))
    refusal = await house.refusal(raw())
    assert (refusal.status, refusal.drop_reason) == (503, DropReason.NO_ENDPOINTS)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RefusedError(Code.RESOURCE_EXHAUSTED, "later", DropReason.SATURATED), 429, "later"),
        (
            AttributeError("'NoneType' object has no attribute 'x'"),
            500,
            "request cannot be admitted: a plugin failed; see the endpoint picker's log",
        ),
    ],
)
async def test_the_first_admitter_that_refuses_decides(
    house: Any, error: Exception, status: int, message: str
) -> None:
    gates = (Gate(), Gate(error), Gate())
    house.use(admitters=gates)
    refusal = await house.refusal(raw())
    assert (refusal.status, refusal.message) == (status, message)
    assert [gate.asked for gate in gates] == [1, 1, 0]
    assert house.scheduler.calls == []
    assert house.recorder.failed == ([] if status == 429 else ["Gate"])


@pytest.mark.parametrize(
    ("value", "prefers"),
    [
        ("if-available", True),
        ("If-Available", True),
        ("respond-async, if-available;wait=10", True),
        (' wait=10 ,  if-available ; x="y" ', True),
        ("", False),
        ("if-available-soon", False),
        ("if-available=no", False),
        ("wait; if-available", False),
        ('note="a, if-available, b"', False),
        ('note="a \\", if-available", if-available', True),
        ('note="a, if-available', False),
        ('if-available, note="a\\', True),
        ('"' + '\\"' * 100_000 + ", if-available", False),
    ],
)
def test_the_prefer_header_is_a_list_of_tokens_with_parameters(value: str, prefers: bool) -> None:
    """The header has the form of RFC 7240."""
    assert prefers_if_available({"prefer": value}) is prefers


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        ([Finds({"default/pod-1": 1})], False),
        ([Finds({"default/pod-1": 0})], True),
        ([Finds({"default/pod-2": 4})], True),
        ([Finds({}, "approximate"), Finds({"default/pod-1": 2}, "precise")], False),
        ([], True),
    ],
)
async def test_a_client_that_accepts_only_caches_is_refused_without_one(
    house: Any, found: list[Finds], is_refused: bool
) -> None:
    house.use(producers=found)
    if not is_refused:
        await house.route(raw(prefer="if-available"))
        return
    refusal = await house.refusal(raw(prefer="if-available"))
    assert refusal.reference_body == (
        "inference error: PreconditionFailed - no decode worker has the requested KV cache"
    )
    assert refusal.status == 412
    assert house.recorder.prepared == []
    await house.route(raw())


async def test_a_refusing_processor_is_the_answer(house: Any) -> None:
    class Refuse:
        def process(self, request: InferenceRequest) -> InferenceRequest:
            raise RefusedError(Code.UNAUTHORIZED, "who are you?")

    house.use(processors=(Refuse(),))
    assert (await house.refusal(raw())).status == 401
    assert house.scheduler.calls == []


def test_findings_are_found_by_their_type() -> None:
    attributes = Attributes()
    attributes[DataKey("A", "one")] = 1
    attributes[DataKey("B", "one")] = 2
    attributes[DataKey("A", "two")] = 3
    assert (attributes.of_type("A"), attributes.of_type("C")) == ((1, 3), ())
