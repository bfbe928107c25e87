"""Every request leaves one record with its exact decision."""

import gc
import weakref
from typing import Any

import pytest

from picker.decisions.decision import MAX_NAME, Decision
from picker.decisions.ring import DecisionRing
from picker.decisions.views import RecordView
from picker.errors import Code, DropReason, RefusedError
from picker.types import (
    Api,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    RawRequest,
    ResponseHead,
)
from tests.support.picker.configured_requests import PROMPT, Routing, routing

UNIX = 1_800_000_000.0
CONFIG = """
plugins:
- {type: by-label-selector, parameters: {matchLabels: {tier: fast}}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: by-label-selector}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
POOL = [
    Endpoint(name, f"10.0.0.{index}", 8000, labels={"tier": tier})
    for index, (name, tier) in enumerate((("a", "fast"), ("b", "fast"), ("c", "slow")), 1)
]


class Scene:
    def __init__(self, config: str = CONFIG, capacity: int = 100) -> None:
        self.records = DecisionRing(capacity, self._now, lambda: UNIX + self._now())
        self.at_work: Routing = routing(config, POOL, watchers=(self.records,))

    def _now(self) -> float:
        return self.at_work.now.seconds

    async def completed(self, body: Any = PROMPT, request_id: str = "r") -> RecordView:
        exchange, _ = await self.at_work.route(body, x_request_id=request_id)
        exchange.finish(FinishCause.COMPLETED, 200)
        return self.records.find(request_id)

    def load(self, name: str, **metrics: float) -> None:
        known = EndpointMetrics(updated_at_seconds=self._now(), **metrics)  # type: ignore[arg-type]
        self.at_work.datastore.update_metrics(f"default/{name}", known)

    async def refused(self, raw: RawRequest) -> RefusedError:
        exchange = self.at_work.director.begin()
        with pytest.raises(RefusedError) as refusal:
            await exchange.route(raw)
        exchange.finish(FinishCause.REFUSED, refusal.value.status)
        return refusal.value


def raw(body: bytes | None, request_id: str = "r", **headers: str) -> RawRequest:
    return RawRequest({":path": "/v1/completions", "x-request-id": request_id, **headers}, body)


async def test_a_record_has_filters_scores_loads_and_ages() -> None:
    scene = Scene()
    scene.load("a", waiting_requests=4, running_requests=1, kv_cache_usage=0.5)
    scene.at_work.now.seconds += 0.25
    scene.load("b", waiting_requests=0, running_requests=7, kv_cache_usage=0.25)
    scene.at_work.now.seconds += 0.5
    exchange, _ = await scene.at_work.route()
    scene.at_work.now.seconds += 60
    exchange.finish(FinishCause.COMPLETED, 200, "10.0.0.2:8000")
    record = scene.records.find("r")
    (profile,) = record.profiles
    assert profile.is_primary is True
    assert profile.picked == ("b",)
    assert profile.picker == "max-score-picker"
    (narrowed,) = profile.filters
    assert (narrowed.before, narrowed.after, narrowed.removed) == (3, 2, ("c",))
    best, second = profile.candidates
    assert [(one.scorer, one.weight, one.raw, one.weighted) for one in best.scores] == [
        ("queue-scorer", 2.0, 1.0, 2.0),
        ("kv-cache-utilization-scorer", 1.0, 0.75, 0.75),
        ("prefix-cache-scorer", 3.0, 0.0, 0.0),
    ]
    assert (best.total, second.total) == (2.75, 0.5)
    assert (best.waiting_requests, best.running_requests, best.kv_cache_usage) == (0, 7, 0.25)
    assert (best.metrics_age_seconds, second.metrics_age_seconds) == (0.5, 0.75)
    assert (record.served_by, record.summary.endpoint) == ("10.0.0.2:8000", "b")
    assert (record.summary.outcome, record.summary.status) == ("completed", 200)
    assert record.summary.received_unix_seconds == UNIX + 100.75
    assert record.summary.seconds == 60


async def test_a_record_has_the_prompt_tokens_expected_in_the_cache() -> None:
    """The prompt's length is the limit, since the last block may be partial."""
    for prompt, expected in (("a long prompt " * 40, 140), ("1234" * 17, 17)):
        scene = Scene()
        for request_id in ("first", "second"):
            body = {"model": "m", "prompt": prompt}
            exchange, decision = await scene.at_work.route(body, x_request_id=request_id)
            scene.at_work.answer(exchange, decision, b"data: [DONE]\n\n")
        assert scene.records.find("first").matched_prefix_tokens == 0
        assert scene.records.find("second").matched_prefix_tokens == expected


async def test_the_endpoints_count_of_tokens_limits_the_expected_ones() -> None:
    """The picker estimates tokens by characters; the response has the exact number."""
    scene = Scene()
    long = {"model": "m", "prompt": "forty characters that are nine tokens. " * 40}
    for request_id in ("first", "second"):
        exchange, decision = await scene.at_work.route(long, x_request_id=request_id)
        if request_id == "second":
            assert scene.records.find("second").matched_prefix_tokens > 300
        usage = b'{"usage":{"prompt_tokens":297,"completion_tokens":1}}'
        decision.response.head(ResponseHead(200, {"content-type": "application/json"}))
        decision.response.body(usage, True)
        exchange.finish(FinishCause.COMPLETED, 200)
    after = scene.records.find("second")
    assert (after.prompt_tokens, after.matched_prefix_tokens) == (297, 297)


async def test_a_request_under_way_has_a_record() -> None:
    scene = Scene()
    exchange, _ = await scene.at_work.route()
    scene.at_work.now.seconds += 3
    record = scene.records.find(None)
    assert (record.summary.outcome, record.summary.seconds) == ("under-way", 3)
    assert record.profiles[0].picked
    exchange.finish(FinishCause.CLIENT_GONE)
    assert [one.outcome for one in scene.records.last(10)] == ["client-gone"]


def test_a_waiting_request_has_a_record() -> None:
    scene = Scene()
    decision = Decision(7, 99.0, request_id="w", fairness_id="t")
    scene.records.waits(decision)
    (waiting,) = scene.records.last(5)
    assert (waiting.outcome, waiting.queue_seconds, waiting.fairness_id) == ("waiting", 1.0, "t")
    decision.cause, decision.response_status = FinishCause.REFUSED, 429
    decision.refusal = RefusedError(Code.RESOURCE_EXHAUSTED, "full", DropReason.TTL_EXPIRED, 3)
    scene.records.finished(decision)
    decision.condense()
    record = scene.records.find("w")
    assert scene.records.size == 1
    assert record.refusal.reason == "rejected-ttl-expired"
    assert record.refusal.retry_after_seconds == 3


async def test_requests_in_all_states_are_listed_by_arrival() -> None:
    scene = Scene()
    await scene.completed(request_id="over")
    scene.at_work.now.seconds += 1
    scene.records.waits(Decision(7, scene.at_work.now.seconds, request_id="waits"))
    scene.at_work.now.seconds += 1
    await scene.at_work.route(x_request_id="under way")
    scene.at_work.now.seconds += 1
    listed = list(scene.records.last(10))
    assert [one.request_id for one in listed] == ["under way", "waits", "over"]
    assert [one.received_unix_seconds - UNIX for one in listed] == [102.0, 101.0, 100.0]
    assert list(scene.records.last(2)) == listed[:2]
    for one in listed:
        found = scene.records.find(one.request_id)
        assert found.summary == one


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"{", {"x-llm-d-model-name-rewrite": "n"}, "BadRequest"),
        (b'{"model": "m", "prompt": "x"}', {"prefer": "if-available"}, "PreconditionFailed"),
    ],
)
async def test_a_refused_request_leaves_its_reason(
    body: bytes, headers: dict[str, str], code: str
) -> None:
    scene = Scene()
    refusal = await scene.refused(raw(body, **headers))
    record = scene.records.find("r")
    assert (record.refusal.code, record.refusal.message) == (code, refusal.message)
    assert (record.refusal.status, record.summary.status) == (refusal.status, refusal.status)
    assert record.summary.outcome == "refused"


async def test_a_record_names_the_filters_that_left_no_endpoint() -> None:
    scene = Scene(CONFIG.replace("tier: fast", "tier: golden"))
    await scene.refused(raw(b'{"model": "m", "prompt": "x"}'))
    record = scene.records.find("r")
    (profile,) = record.profiles
    assert [(one.filter, one.before, one.after) for one in profile.filters] == [
        ("by-label-selector", 3, 0)
    ]
    assert profile.filters[0].removed == ("a", "b", "c")
    assert (profile.picked, profile.candidates) == ((), ())
    assert record.summary.reason == "rejected-saturated"


def test_a_request_that_was_never_read_leaves_its_status() -> None:
    """Its body was too large, for instance, so the director never refused it."""
    scene = Scene()
    scene.at_work.director.begin().finish(FinishCause.REFUSED, 413)
    (line,) = scene.records.last(1)
    assert (line.status, line.reason) == (413, "PayloadTooLarge")


def test_the_proxys_own_responses_leave_no_record() -> None:
    """Rejected clients would push out the records of routed requests."""
    scene = Scene()
    scene.at_work.director.begin().finish(FinishCause.SKIPPED, 401)
    assert scene.records.size == 0


async def test_a_request_without_a_body_leaves_its_endpoint() -> None:
    scene = Scene()
    exchange = scene.at_work.director.begin()
    decision = await exchange.route(raw(None))
    under_way = scene.records.find("r")
    exchange.finish(FinishCause.COMPLETED, 200)
    record = scene.records.find("r")
    assert (record.destination, record.profiles) == (decision.destination, ())
    assert record.summary.endpoint in ("a", "b", "c")
    assert under_way.summary.endpoint == record.summary.endpoint


async def test_the_newest_request_of_an_id_is_found() -> None:
    scene = Scene()
    first, _ = await scene.at_work.route()
    scene.at_work.now.seconds += 1
    second, _ = await scene.at_work.route({**PROMPT, "model": "newer"})
    second.finish(FinishCause.COMPLETED, 200)
    first.finish(FinishCause.COMPLETED, 200)
    record = scene.records.find("r")
    assert record.incoming_model == "newer"
    assert len(list(scene.records.last(10))) == 2


async def test_a_request_is_found_by_the_id_that_the_picker_gave_it() -> None:
    scene = Scene()
    exchange = scene.at_work.director.begin()
    decision = await exchange.route(
        RawRequest({":path": "/v1/completions"}, b'{"model": "m", "prompt": "x"}')
    )
    given = dict(decision.set_headers)["x-request-id"]
    exchange.finish(FinishCause.COMPLETED, 200)
    assert scene.records.find(given) is not None


async def test_the_ring_drops_the_oldest_record() -> None:
    scene = Scene(capacity=5)
    for number in range(12):
        await scene.completed(request_id=f"r{number}")
        scene.at_work.now.seconds += 1
    assert [one.request_id for one in scene.records.last(3)] == ["r11", "r10", "r9"]
    assert scene.records.size == 5
    assert scene.records.find("r6") is None
    assert scene.records.find("r7") is not None


async def test_names_of_clients_are_truncated() -> None:
    scene = Scene()
    long = "x" * 5000
    record = await scene.completed({**PROMPT, "model": long}, long)
    assert len(record.incoming_model) == len(record.summary.request_id) == MAX_NAME


STAGES = """
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: prefix-based-pd-decider, encode: always-disagg-multimodal-decider}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 100}}
- {type: always-disagg-multimodal-decider}
- {type: queue-scorer}
- {type: by-label-selector, parameters: {matchLabels: {tier: golden}}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: queue-scorer}]}
- {name: prefill, plugins: [{pluginRef: by-label-selector}]}
- {name: encode, plugins: [{pluginRef: queue-scorer}]}
"""


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("hi", "prefix-based-pd-decider said no: the prompt has 1 tokens, fewer than 100"),
        ("tell me a story " * 100, "no endpoint was found for it"),
    ],
)
async def test_a_record_has_the_reasons_of_skipped_stages(prompt: str, why: str) -> None:
    record = await Scene(STAGES).completed({"model": "m", "prompt": prompt})
    no_media = "always-disagg-multimodal-decider said no: the request has no image, video or audio"
    assert record.stages == {"encode": no_media, "prefill": why}
    assert [one.name for one in record.profiles if one.is_primary] == ["decode"]


async def test_a_record_references_no_prompt_and_no_refusal() -> None:
    scene = Scene()

    class Watched(dict[str, object]): ...

    payload = Watched(prompt="x")
    gone = weakref.ref(payload)
    refusal = RefusedError(Code.INTERNAL, "no")
    refused = weakref.ref(refusal)
    body = ParsedBody(Api.COMPLETIONS, payload=payload)
    request = InferenceRequest("p", {"authorization": "Bearer s3cret"}, body, "m", "m")
    decision = Decision(3, 0.0, request_id="p", request=request, refusal=refusal)
    scene.records.decided(decision)
    decision.cause = FinishCause.REFUSED
    scene.records.finished(decision)
    decision.condense()
    del payload, body, request, decision, refusal
    gc.collect()
    assert scene.records.find("p") is not None
    assert gone() is None
    assert refused() is None


async def test_scores_are_freed_after_the_watchers_have_read_them() -> None:
    """Scores are most of a decision, which exists for as long as its request."""
    counts, decisions = [], []

    class Listener:
        def decided(self, decision: Decision) -> None:
            decisions.append(decision)
            counts.append(sum(one.bound.point == "Scorer" for one in decision.steps))

    at_work = routing(CONFIG, POOL, watchers=(Listener(),))
    await at_work.route()
    assert counts == [3]
    assert [one.steps for one in decisions] == [[]]
