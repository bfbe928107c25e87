"""Inputs and outputs of a decision: parsers, candidates, headers, bodies and metadata."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.pool.policies import RewriteRule, RewriteRules, RewriteTarget
from picker.requestcontrol import headers
from picker.requestcontrol.bodies import changes, outgoing_body, with_members
from picker.requestcontrol.candidates import LoadedCandidates, candidates_for
from picker.requestcontrol.headers import (
    DISAGGREGATION,
    PICKER_OWNED,
    SYSTEM_OWNED,
    first_of,
    target_of,
)
from picker.requestcontrol.pipeline import BodylessRequests, ParserTable, RequestPolicies
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    ProfileResult,
    RawRequest,
    ResponseHead,
    SchedulingResult,
    ScoredEndpoint,
)
from tests.depth import examples

HEADERS = {":path": "/v1/completions", "x-request-id": "id-1"}
BODY = b'{ "model": "m", "prompt": "hello", "n": 1.50 }'
RAW = RawRequest(HEADERS, BODY)


@dataclass
class Sets:
    headers: Mapping[str, str] | None

    def pre_request(self, request: Any, result: Any, attributes: Any) -> Mapping[str, str] | None:
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


_SGLANG = {"llm-d.ai/engine-type": "sglang"}


@pytest.mark.parametrize(
    ("objective", "path", "labels", "sent", "expected", "header"),
    [
        ("gold", "/v1/completions", {}, b'{"model":"m"}', b'{"model":"m","priority":-7}', "-7"),
        ("gold", "/v1/completions", _SGLANG, b'{"model":"m"}', b'{"model":"m","priority":7}', "7"),
        ("", "/v1/completions", {}, b'{"priority":-9}', b'{"priority":0}', "0"),
        ("", "/v1/completions", {}, b'{"model":"m"}', None, "0"),
        ("gold", "/v1/conversations", {}, b'{"items":[]}', None, "-7"),
    ],
)
async def test_an_engine_receives_the_priority_of_the_objective_and_not_that_of_the_client(
    make_house: Any, objective, path, labels, sent, expected, header
) -> None:
    class Gold:
        def priority(self, objective: str) -> int | None:
            return {"gold": 7}.get(objective)

    pool = (Candidate(Endpoint("pod", "10.0.0.1", 8000, labels=labels)),)
    house = make_house(pool, policies=RequestPolicies(objectives=Gold()))
    house.use(propagates_priority=True)
    headers = {":path": path, "x-vllm-priority": "-99", "x-llm-d-inference-objective": objective}
    _, decision = await house.route(RawRequest(headers, sent))
    assert decision.body == expected
    assert dict(decision.set_headers)["x-vllm-priority"] == header


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


BODYLESS_HEADERS = {":path": "/v1/models", "wanted": "pod-2"}


class ByHeader:
    def narrow(self, headers: Any, candidates: Any) -> Sequence[Candidate]:
        return [one for one in candidates if one.endpoint.name == headers.get("wanted")]


@dataclass
class BodylessHook:
    answer: Callable[[ResponseHead], Mapping[str, str] | None]

    def bodyless_response_head(self, head: ResponseHead) -> Mapping[str, str] | None:
        return self.answer(head)


async def test_filters_that_need_no_body_are_asked(house: Any) -> None:
    house.use(bodyless=BodylessRequests(filters=(ByHeader(),)))
    routed = [await house.route(RawRequest(BODYLESS_HEADERS, None)) for _ in range(20)]
    keys = {c.endpoint.host_port for c in house.pool.candidates if c.endpoint.name == "pod-2"}
    assert {decision.destination for _, decision in routed} == keys
    for exchange, _ in routed:
        exchange.finish(FinishCause.COMPLETED)


@pytest.mark.parametrize(
    "raw",
    [
        RawRequest({":path": "/v1/models"}, None),
        RawRequest(BODYLESS_HEADERS, None, subset_hint=("10.0.0.1:8000",)),
    ],
    ids=["no endpoint of that name", "none within the subset"],
)
async def test_a_request_without_a_candidate_after_filters_is_refused(
    house: Any, raw: RawRequest
) -> None:
    house.use(bodyless=BodylessRequests(filters=(ByHeader(),)))
    assert (await house.refusal(raw)).status == 503


async def test_hooks_set_headers_on_the_response(house: Any) -> None:
    broken = BodylessHook(lambda head: {"never": 1 / 0})
    silent = BodylessHook(lambda head: None)
    reports = BodylessHook(lambda head: {"status": str(head.status)})
    house.use(bodyless=BodylessRequests(heads=(broken, silent, reports)))
    exchange, decision = await house.route(RawRequest(BODYLESS_HEADERS, None))
    assert decision.response.head(ResponseHead(200)) == (("status", "200"),)
    assert decision.response.body(b"piece", True) == (b"piece", {})
    assert decision.response.end() == b""
    exchange.finish(FinishCause.COMPLETED)


async def test_the_response_has_a_tap_only_if_there_are_hooks(house: Any) -> None:
    exchange, decision = await house.route(RawRequest(BODYLESS_HEADERS, None))
    assert decision.response is None
    exchange.finish(FinishCause.COMPLETED)


class Claiming:
    def __init__(self, *claims: str) -> None:
        self.claims = claims

    def parse(self, path: str, headers: Mapping[str, str], body: bytes) -> ParsedBody:
        return ParsedBody(Api.RAW)


CHAT = Claiming("chat/completions", "/completions/")
GENERATE = Claiming("inference/v1/generate")
SHORT = Claiming("generate")
VERTEX = Claiming("PredictionService/ChatCompletions")
FALLBACK = Claiming()


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({":path": "/v1/chat/completions?x=/y"}, "/v1/chat/completions"),
        ({"x-original-path": "/a", "x-forwarded-path": "/b"}, "/a"),
        ({"x-forwarded-path": "/b"}, "/b"),
        ({":path": "", "x-original-path": "/a"}, "/a"),
        ({}, "/v1/completions"),
    ],
)
def test_the_path_comes_from_the_first_header_that_has_one(
    headers: dict[str, str], path: str
) -> None:
    assert target_of(headers).partition("?")[0] == path


@pytest.mark.parametrize(
    ("path", "parser"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions/", CHAT),
        ("/tenant/v1/completions", CHAT),
        ("completions", CHAT),
        ("/inference/v1/generate", GENERATE),
        ("/generate", SHORT),
        ("/v1/projects/p/PredictionService/ChatCompletions", VERTEX),
        ("/google.cloud.aiplatform.v1beta1.PredictionService/ChatCompletions", VERTEX),
        ("/v1/models", FALLBACK),
        ("/foocompletions", FALLBACK),
        ("/regenerate", FALLBACK),
        ("/v1/completions/more", FALLBACK),
        ("/", FALLBACK),
        ("", FALLBACK),
    ],
)
def test_the_longest_matching_claim_wins_whatever_the_order(path: str, parser: Claiming) -> None:
    assert ParserTable([SHORT, CHAT, GENERATE, VERTEX, FALLBACK]).select(path) is parser


def test_equal_claims_go_to_the_parser_configured_first() -> None:
    twin = Claiming("generate")
    assert ParserTable([SHORT, twin, FALLBACK]).select("/generate") is SHORT
    assert ParserTable([twin, SHORT, FALLBACK]).select("/generate") is twin


def test_parsers_after_a_fallback_are_unused_and_that_is_logged(caplog: Any) -> None:
    table = ParserTable([SHORT, FALLBACK, CHAT, Claiming()])
    assert table.select("/generate") is SHORT
    assert table.select("/v1/chat/completions") is FALLBACK
    assert table.select("/other") is FALLBACK
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "Claiming is unused" in caplog.text


def test_without_a_fallback_nothing_is_unused(caplog: pytest.LogCaptureFixture) -> None:
    ParserTable([SHORT, CHAT])
    assert not caplog.records


def test_a_path_without_a_parser_is_a_400_that_names_it() -> None:
    with pytest.raises(RefusedError, match="/v1/models") as refusal:
        ParserTable([CHAT]).select("/v1/models")
    assert refusal.value.status == 400


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text("\ud83d\ude00\\u\ufffdd83", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_members_are_sorted_and_compact_as_the_reference_writes_them() -> None:
    """These are the bytes of the reference picker's own hermetic case."""
    body = b'{"model": "my-model", "prompt": "P", "max_tokens": 100, "temperature": 0}'
    expected = b'{"max_tokens":100,"model":"my-model-12345","prompt":"P","temperature":0}'
    assert with_members(body, {"model": "my-model-12345"}) == expected


def test_other_values_keep_their_very_bytes() -> None:
    body = b'{"n":123456789012345678901234567890.10,"deep":{"b": 1,"a" :"\\u00e9"}}'
    assert with_members(body, {"model": 'a"b'}) == (
        b'{"deep":{"b": 1,"a" :"\\u00e9"},"model":"a\\"b","n":123456789012345678901234567890.10}'
    )


@examples(100)
@given(st.dictionaries(st.text(), values, max_size=5), st.text())
def test_every_body_differs_in_its_model_alone(members: dict[str, object], model: str) -> None:
    body = json.dumps(members)
    assert json.loads(with_members(body.encode(), {"model": model})) == {
        **json.loads(body),
        "model": model,
    }


def test_lone_surrogates_keep_their_escapes() -> None:
    raw = "\N{REPLACEMENT CHARACTER}ud83d".encode()
    body = (
        rb"""{"b" : "cut \ud83d", "\uDe00": 1, "a":["\\ud83d\ud83d\ude00", "\\\ude00"], """
        rb""""c":"\\","d":"%b"}""" % raw
    )
    rewritten = with_members(body, {"model": "m"})
    assert rewritten == (
        rb"""{"a":["\u005cud83d\ud83d\ude00", "\u005c\ude00"],"b":"cut \ud83d","c":"\u005c","""
        rb""""d":"\ufffdud83d","model":"m","\uDe00":1}"""
    )
    assert json.loads(rewritten) == {**json.loads(body), "model": "m"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":' * 10_000])
def test_a_body_other_than_a_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(RefusedError) as refusal:
        with_members(body, {"model": "m"})
    assert refusal.value.status == 400


def test_members_are_added_replaced_and_removed_alike() -> None:
    body = b'{"b": 1.0, "a": [1, 2], "c": null}'
    assert with_members(body, {"c": {"d": 1}, "e": "é"}, ["a", "x"]) == (
        '{"b":1.0,"c":{"d":1},"e":"é"}'.encode()
    )


def test_the_last_of_equal_members_is_used() -> None:
    """Readers of the body use the last one, too."""
    assert (
        with_members(b'{"model":"a","n":1,"model":"b","n":2}', {"model": "c"})
        == b'{"model":"c","n":2}'
    )


def test_changes_are_what_is_another_object() -> None:
    deep = {"x": 1}
    before = {"a": deep, "b": 1, "c": 2}
    assert changes(before, {"a": deep, "b": 3, "d": 4}) == ({"b": 3, "d": 4}, ["c"])


METRICS = EndpointMetrics(waiting_requests=3)
POOL = (
    Candidate(Endpoint("a", "10.0.0.1", 8000), METRICS),
    Candidate(Endpoint("a-rank-1", "10.0.0.1", 8001)),
    Candidate(Endpoint("b", "10.0.0.2", 8000)),
    Candidate(Endpoint("six", "2001:db8::1", 8000)),
    Candidate(Endpoint("named", "llm.example", 443)),
)


@pytest.mark.parametrize(
    ("hint", "names"),
    [
        (None, ["a", "a-rank-1", "b", "six", "named"]),
        (("LLM.Example:443",), ["named"]),
        ((), []),
        (("10.0.0.1",), ["a", "a-rank-1"]),
        (("10.0.0.1:8001",), ["a-rank-1"]),
        (("10.0.0.2:8000", "10.0.0.1:8000"), ["a", "b"]),
        ((" 10.0.0.2 ",), ["b"]),
        (("10.0.0.9:8000",), []),
        (("10.0.0.1:9999",), []),
        (("[2001:db8::1]:8000",), ["six"]),
        (("[2001:db8::1]",), ["six"]),
        (("2001:db8::1",), ["six"]),
        (("2001:DB8:0:0:0:0:0:1",), ["six"]),
        (("[2001:db8::1]:8001",), []),
        (("2001:db8::1]:8000", "[2001:db8::1", "[10.0.0.1]:8000", "[10.0.0.1]"), []),
        (("localhost", "localhost:8000", "::1]]", "10.0.0.1:8000:8001"), []),
        (("unknown", "10.0.0.2:8000"), ["b"]),
        (("10.0.0.1:", "10.0.0.1:http", ":8000", "", "10.0.0.1:99999999"), []),
    ],
)
def test_the_subset_hint_compares_ports_only_where_it_names_one(
    hint: tuple[str, ...] | None, names: list[str]
) -> None:
    found = candidates_for(POOL, hint, {}, LoadedCandidates())
    assert [candidate.endpoint.name for candidate in found] == names


def test_the_pickers_own_load_is_filled_in() -> None:
    found = candidates_for(
        POOL, ("10.0.0.1",), {"default/a": 2, "default/b": 7}, LoadedCandidates()
    )
    assert list(found) == [Candidate(POOL[0].endpoint, METRICS, 2), POOL[1]]


def test_an_idle_pool_is_passed_through_untouched() -> None:
    assert candidates_for(POOL, None, {}, LoadedCandidates()) is POOL


def test_attributes_and_last_metrics_come_along() -> None:
    known = Candidate(POOL[0].endpoint, None, 0, METRICS, {"x/y": 1})
    (found,) = candidates_for([known], None, {"default/a": 1}, LoadedCandidates())
    assert found == Candidate(POOL[0].endpoint, None, 1, METRICS, {"x/y": 1})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=30))
def test_cached_candidates_equal_new_ones(changes: list[tuple[int, int, bool]]) -> None:
    loaded, pool, counts = LoadedCandidates(), list(POOL), {}
    for index, count, is_scraped in changes:
        candidate = pool[index % len(pool)]
        if is_scraped:
            metrics = EndpointMetrics(waiting_requests=count)
            pool[index % len(pool)] = replace(candidate, metrics=metrics)
        elif count:
            counts[candidate.key] = count
        else:
            counts.pop(candidate.key, None)
        expected = [replace(one, inflight_requests=counts.get(one.key, 0)) for one in pool]
        assert loaded.of(pool, counts) == expected
        assert loaded.of(pool, counts) == expected


def test_endpoints_that_are_gone_are_forgotten() -> None:
    loaded = LoadedCandidates()
    for number in range(500):
        candidate = Candidate(Endpoint(f"w{number}", "10.0.0.1", 8000))
        loaded.of([candidate], {candidate.key: 1})
    assert len(loaded._made) < 100


ALIASED = (
    headers.FAIRNESS_ID,
    headers.OBJECTIVE,
    headers.MODEL_REWRITE,
    headers.SLO_TTFT_MS,
    headers.SLO_TPOT_MS,
)


@pytest.mark.parametrize("names", ALIASED, ids=lambda names: str(names[0]))
def test_the_new_name_wins_over_the_old_one(names: tuple[str, str]) -> None:
    new, old = names
    assert first_of({old: "old", new: "new"}, names) == "new"
    assert first_of({old: "old", new: ""}, names) == "old"
    assert first_of({old: "old"}, names) == "old"
    assert first_of({}, names) == ""


def test_both_names_of_everything_are_owned() -> None:
    assert {name for names in ALIASED for name in names} <= set(SYSTEM_OWNED)
    assert len(set(PICKER_OWNED)) == len(PICKER_OWNED)
    assert all(name == name.lower() for name in PICKER_OWNED)


def test_addresses_of_disaggregation_are_a_pickers_word_alone() -> None:
    """An endpoint would connect to these addresses; what it answers with is its own business."""
    assert set(DISAGGREGATION) == set(PICKER_OWNED) - set(SYSTEM_OWNED)


@pytest.mark.parametrize(
    "name", ["x-request-id", "content-length", "x-session-token", "traceparent", ":path"]
)
def test_headers_of_the_client_are_not_owned(name: str) -> None:
    assert name not in PICKER_OWNED
