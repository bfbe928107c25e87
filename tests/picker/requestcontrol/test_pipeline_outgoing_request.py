"""The outgoing request: headers, body and metadata for the proxy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.pool.policies import RewriteRule, RewriteRules, RewriteTarget
from picker.requestcontrol.bodies import outgoing_body
from picker.requestcontrol.pipeline import RequestPolicies
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    RawRequest,
    SchedulingResult,
    ScoredEndpoint,
)

HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
BODY = b'{ "model": "m", "prompt": "hello", "n": 1.50 }'
RAW = RawRequest(HEADERS, BODY)


@dataclass
class Sets:
    headers: Mapping[str, str] | None

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        return self.headers


@dataclass
class Decides:
    result: SchedulingResult

    def schedule(
        self, request: object, candidates: object, attributes: object, rng: object, steps: object
    ) -> SchedulingResult:
        return self.result


@dataclass
class Rewrites:
    rules: RewriteRules | None


def rewriting(*rules: RewriteRule) -> RequestPolicies:
    return RequestPolicies(rewrites=Rewrites(RewriteRules(rules)))


def result(**fields: Any) -> SchedulingResult:
    return SchedulingResult((Endpoint("a", "10.0.0.1", 8000),), "decode", **fields)


async def test_headers_of_the_profile_handler_and_of_all_hooks_are_set(house: Any) -> None:
    house.scheduler = Decides(result(set_headers={"x-prefiller-host-port": "p", "x-a": "handler"}))
    house.use(hooks=[Sets({"x-a": "first", "x-b": "b"}), Sets(None), Sets({"x-a": "second"})])
    _, decision = await house.route(RAW)
    assert dict(decision.set_headers) == {"x-prefiller-host-port": "p", "x-a": "second", "x-b": "b"}
    assert len(decision.set_headers) == 3
    assert house.recorder.decisions[0].set_headers == decision.set_headers


async def test_reasons_of_several_failing_hooks_are_joined(house: Any) -> None:
    house.fail_in("hooks", RefusedError(Code.PRECONDITION_FAILED, "cold"), ValueError("odd"))
    refusal = await house.refusal(RAW)
    failed = "a plugin failed; see the endpoint picker's log"
    assert refusal.message == f"the request could not be prepared: cold; {failed}"
    assert refusal.status == 500


async def test_a_scheduler_that_names_no_endpoint_is_our_fault(house: Any) -> None:
    house.scheduler = Decides(SchedulingResult((), "decode"))
    house.use()
    assert (await house.refusal(RAW)).status == 500


async def test_three_endpoints_and_the_scores_of_all_that_were_scored(make_house: Any) -> None:
    pool = [Candidate(Endpoint(f"pod-{n}", f"192.168.{n}.100", 8000)) for n in (1, 2, 4)]
    scores = [ScoredEndpoint(one, s) for one, s in zip(pool, (0.91, 0.74, 0.12), strict=True)]
    house = make_house(pool, RequestPolicies(emit_endpoint_scores=True))
    house.scheduler = Decides(
        SchedulingResult(
            tuple(one.endpoint for one in pool[:2]),
            "decode",
            {"decode": ProfileResult(tuple(scores[:2]), tuple(scores))},
        )
    )
    house.use()
    _, decision = await house.route(RAW)
    assert decision.destination == "192.168.1.100:8000,192.168.2.100:8000"
    assert decision.metadata == {
        "envoy.lb": {
            "x-gateway-destination-endpoint-scores": {
                "192.168.1.100:8000": 0.91,
                "192.168.2.100:8000": 0.74,
                "192.168.4.100:8000": 0.12,
            }
        }
    }
    assert (await make_house(pool).route(RAW))[1].metadata == {}


async def test_the_subset_hint_can_be_ignored(make_house: Any) -> None:
    """This is for pools whose proxies are wrong about the subset."""
    house = make_house(policies=RequestPolicies(ignore_subset_hint=True))
    await house.route(replace(RAW, subset_hint=("10.9.9.9",)))
    assert len(house.scheduler.calls[0][1]) == 3


async def test_an_unchanged_body_leaves_byte_for_byte(house: Any) -> None:
    assert (await house.route(RAW))[1].body is None


async def test_members_that_a_plugin_changes_are_written_and_no_others(house: Any) -> None:
    class Adds:
        def process(self, request: InferenceRequest) -> InferenceRequest:
            assert request.body.payload is not None
            payload = {**request.body.payload, "kv": {"do": True}}
            del payload["prompt"]
            return replace(request, body=replace(request.body, payload=payload))

    house.use(processors=(Adds(),))
    _, decision = await house.route(RAW)
    assert decision.body == b'{"kv":{"do":true},"model":"m","n":1.50}'
    assert not decision.needs_response_body


def test_a_payload_in_a_frame_changes_no_body() -> None:
    """The body is no JSON although its payload is an object, and the client is not to blame for
    that.
    """
    parsed = ParsedBody(Api.VLLM_GRPC, payload={"prompt": "x"}, can_rewrite=False)
    changed = replace(parsed, payload={"prompt": "x", "kv": 1})
    request = InferenceRequest("r", {}, changed, "", "m")
    assert outgoing_body(b"\0\0\0\0\3\x1a\1x", parsed, request) is None


async def test_a_rule_renames_the_model_whatever_the_header_says(make_house: Any) -> None:
    rule = RewriteRule("canary", (RewriteTarget("m-v2"),), frozenset({"m"}))
    house = make_house(policies=rewriting(rule))
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "from-header"}
    _, decision = await house.route(RawRequest(headers, BODY))
    assert decision.body == b'{"model":"m-v2","n":1.50,"prompt":"hello"}'
    assert decision.needs_response_body
    (seen,) = house.recorder.decisions
    assert (seen.incoming_model, seen.target_model) == ("m", "m-v2")
    assert (seen.rewritten.rule, seen.rewritten.model) == ("canary", "m-v2")


async def test_the_header_names_the_model_if_no_rule_matches(make_house: Any) -> None:
    rule = RewriteRule("canary", (RewriteTarget("m-v2"),), frozenset({"other"}))
    house = make_house(policies=rewriting(rule))
    headers = {**HEADERS, "x-llm-d-model-name-rewrite": "from-header"}
    _, decision = await house.route(RawRequest(headers, BODY))
    assert json.loads(decision.body)["model"] == "from-header"
    assert house.recorder.decisions[0].rewritten is None


async def test_a_generic_rule_supplies_a_missing_model(make_house: Any) -> None:
    house = make_house(policies=rewriting(RewriteRule("any", (RewriteTarget("default"),))))
    _, decision = await house.route(RawRequest(HEADERS, b'{"prompt":"hello"}'))
    assert decision.body == b'{"model":"default","prompt":"hello"}'
    assert not decision.needs_response_body
    exact = RewriteRule("one", (RewriteTarget("default"),), frozenset({"m"}))
    modelless = RawRequest(HEADERS, b'{"prompt":"hello"}')
    assert (await make_house(policies=rewriting(exact)).route(modelless))[1].body is None
    nothing = RewriteRule("none", (RewriteTarget(""),))
    refusal = await make_house(policies=rewriting(nothing)).refusal(modelless)
    assert (refusal.status, refusal.message) == (400, "the rewrite 'none' names no model")


UNREADABLE = b'{"model":"m","temperature":NaN}'


@pytest.mark.parametrize("names_a_model", [False, True])
async def test_an_unreadable_body_passes_unless_its_model_may_be_replaced(
    make_house: Any, names_a_model: bool
) -> None:
    """An engine may read more than JSON allows, but a rule or the header must know the model."""
    _, decision = await make_house().route(RawRequest(HEADERS, UNREADABLE))
    assert (decision.body, decision.needs_response_body) == (None, False)
    headers = HEADERS | ({"x-llm-d-model-name-rewrite": "n"} if names_a_model else {})
    rule = RewriteRule("one", (RewriteTarget("n"),), frozenset({"other"}))
    house = make_house() if names_a_model else make_house(policies=rewriting(rule))
    refusal = await house.refusal(RawRequest(headers, UNREADABLE))
    assert refusal.status == 400
    assert refusal.message.startswith("the request body cannot be read as JSON: ")


async def test_a_body_that_cannot_be_rewritten_is_left_alone_by_rules(make_house: Any) -> None:
    house = make_house(policies=rewriting(RewriteRule("any", (RewriteTarget("default"),))))
    _, decision = await house.route(RawRequest({":path": "/v1/rerank"}, b"\xff"))
    assert decision.body is None
    assert house.scheduler.calls[0][0].target_model == ""


@pytest.mark.parametrize("seed", [1, 2])
async def test_rules_draw_from_the_injected_generator(make_house: Any, seed: int) -> None:
    targets = (RewriteTarget("a"), RewriteTarget("b"))
    rules = RewriteRules([RewriteRule("split", targets)])

    def draws() -> list[str]:
        rng = Random(seed)
        made = [rules.apply("m", rng) for _ in range(40)]
        return [one.model for one in made if one is not None]

    assert draws() == draws()
    assert set(draws()) == {"a", "b"}
