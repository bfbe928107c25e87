"""Scores by formulas of one line, as tables."""

from collections.abc import Mapping
from struct import pack
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from picker.framework.attributes import (
    PEER_ENDPOINT_KEY,
    Attributes,
    EndpointLoad,
    InFlightLoad,
    Topology,
    inflight_load_key,
)
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Api, Candidate, Endpoint, EndpointMetrics, InferenceRequest, ParsedBody
from tests.support.picker.plugin_scenes import configured, scores

REQUEST = InferenceRequest("r", {}, ParsedBody(Api.RAW, "a"), "a", "a")
APPROX = match_info_key("approx-prefix-cache-producer")


def c(
    name: str = "a",
    inflight: int = 0,
    labels: Mapping[str, str] | None = None,
    known: Mapping[str, Any] | None = None,
    **metrics: Any,
) -> Candidate:
    endpoint = Endpoint(name, "10.0.0.1", 8000, labels=labels or {})
    return Candidate(endpoint, EndpointMetrics(**metrics), inflight, attributes=known or {})


def unknown(name: str = "u", inflight: int = 0) -> Candidate:
    return replace(c(name, inflight), metrics=None)


QUEUE, RUNS, CACHE = (
    f"{name}-scorer" for name in ("queue", "running-requests-size", "kv-cache-utilization")
)


def load(
    inflight: int = 0, waiting: int | None = 0, running: int | None = 0, usage: float | None = 0.0
) -> Candidate:
    metrics = {"waiting_requests": waiting, "running_requests": running, "kv_cache_usage": usage}
    return c(inflight=inflight, **metrics)


WAITING = [load(waiting=n) for n in (10, 5, 0)]
RUNNING = [load(running=n) for n in (10, 5, 0)]
UNSCRAPED = [unknown(inflight=n) for n in (4, 0, 2)]


@pytest.mark.parametrize(
    ("name", "candidates", "expected"),
    [
        (QUEUE, WAITING, [0.0, 0.5, 1.0]),
        (QUEUE, [load(), load()], [1.0, 1.0]),
        (QUEUE, [load(waiting=7)], [1.0]),
        # A burst between two scrapes spreads; what the scrape saw running is not counted twice.
        (QUEUE, [load(4), load(4, running=2), load(4, running=4)], [0.0, 0.5, 1.0]),
        # The picker's own count is a lower bound only: other pickers send requests too.
        (QUEUE, [load(1, waiting=8), load()], [0.0, 1.0]),
        (QUEUE, [unknown(inflight=50), load(), load()], [0.0, 1.0, 1.0]),
        (QUEUE, [load(waiting=4), unknown(), load()], [0.0, 0.0, 1.0]),
        (QUEUE, UNSCRAPED, [0.0, 1.0, 0.5]),
        (RUNS, RUNNING, [0.0, 0.5, 1.0]),
        (RUNS, [load(), load()], [1.0, 1.0]),
        (RUNS, [load(4), load(4, waiting=4)], [0.0, 1.0]),
        (RUNS, [unknown(), load(running=9)], [0.0, 1.0]),
        (RUNS, UNSCRAPED, [0.0, 1.0, 0.5]),
        (CACHE, [load(), load(usage=0.75), load(usage=1.0), unknown()], [1.0, 0.25, 0.0, 0.0]),
        # A signal that one page lacks is the mean of the others, not 0, and not the worst.
        (QUEUE, [load(waiting=None), load(waiting=60), load(), unknown()], [0.5, 0.0, 1.0, 0.0]),
        (QUEUE, [load(usage=None, waiting=60), load()], [0.0, 1.0]),
        # Own requests beyond what runs there remain the lower bound.
        (QUEUE, [load(12, waiting=None, running=2), load(waiting=5), load()], [0.0, 0.5, 1.0]),
        (QUEUE, [load(waiting=None), load(waiting=None)], [1.0, 1.0]),
        (RUNS, [load(running=8), load(running=None), load(running=2)], [0.0, 0.5, 1.0]),
        # The running part of 6 in flight is unknown: the mean of the others, so that nothing waits.
        (QUEUE, [load(6, running=None), load(running=6), load(waiting=2)], [0.0, 1.0, 1 / 3]),
        (
            CACHE,
            [load(usage=None), load(usage=0.9), load(usage=0.1), unknown()],
            [0.5, 0.1, 0.9, 0.0],
        ),
        (CACHE, [load(usage=None), unknown()], [0.0, 0.0]),
    ],
)
def test_load_is_compared(name: str, candidates: list[Candidate], expected: list[float]) -> None:
    assert scores(name, candidates) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("threshold", "candidates", "expected"),
    [
        (10, [c(waiting_requests=n) for n in (2, 0, 15)], [0.4, 0.5, 0.0]),
        (128, [c(waiting_requests=n) for n in (64, 128)], [0.25, 0.0]),
        (0, [c(waiting_requests=64)], [0.25]),
        (-5, [c(waiting_requests=64)], [0.25]),
        (10, [c(inflight=4), unknown()], [0.3, 0.0]),
        (10, [unknown(inflight=5), unknown()], [0.25, 0.5]),
        (10, [c(waiting_requests=None), c(waiting_requests=8), c()], [0.3, 0.1, 0.5]),
    ],
)
def test_load_aware_falls_to_zero_at_the_threshold(
    threshold: int, candidates: list[Candidate], expected: list[float]
) -> None:
    said = scores("load-aware-scorer", candidates, parameters={"threshold": threshold})
    assert said == pytest.approx(expected)


@pytest.mark.parametrize(
    ("active", "waiting", "limit", "expected"),
    [
        ("ab", "", 2, 1.0),
        ("a", "a", 1, 1.0),
        ("b", "", 2, 0.8),
        ("b", "a", 3, 0.8),
        ("", "", 1, 0.8),
        ("b", "a", 2, 0.6),
        ("b", "c", 2, 0.0),
        ("", "", 0, 0.0),
        ("", "", None, 0.5),
        ("b", "", None, 0.0),
        ("", "a", None, 0.6),
    ],
)
def test_lora_affinity(active: str, waiting: str, limit: int | None, expected: float) -> None:
    one = c(
        active_models=frozenset(active), waiting_models=frozenset(waiting), max_active_models=limit
    )
    assert scores("lora-affinity-scorer", [one, unknown()]) == [expected, 0.0]


def _load(*counts: int) -> Attributes:
    loads = {f"default/{name}": EndpointLoad(n) for name, n in zip("abc", counts, strict=False)}
    return Attributes({inflight_load_key(): InFlightLoad(loads, {})})


@pytest.mark.parametrize(
    ("parameters", "candidates", "attributes", "expected"),
    [
        ({}, [c("a"), c("b"), c("c")], _load(4, 1, 0), [0.0, 0.75, 1.0]),
        ({}, [c("a"), c("b")], _load(0, 0), [1.0, 1.0]),
        ({}, [c("a"), c("b")], _load(3, 3), [0.0, 0.0]),
        ({"idleThreshold": 2}, [c("a"), c("b"), c("c")], _load(4, 2, 1), [0.0, 1.0, 1.0]),
        ({"maxBusyScore": 0.5}, [c("a"), c("b"), c("c")], _load(4, 1, 0), [0.0, 0.375, 1.0]),
        ({"maxBusyScore": 0.0, "requestTimeout": "2m"}, [c("a"), c("b")], _load(4, 0), [0.0, 1.0]),
        ({}, [c("a", 4), c("b", 1)], Attributes(), [0.0, 0.75]),
        ({}, [c("a", 4), c("b", 1)], _load(1, 2), [0.0, 0.5]),
        ({}, [unknown("a"), unknown("b")], _load(2, 1), [0.0, 0.5]),
        ({}, [unknown("a"), c("b")], _load(0, 0), [0.0, 1.0]),
    ],
)
def test_active_requests(
    parameters: dict[str, Any],
    candidates: list[Candidate],
    attributes: Attributes,
    expected: list[float],
) -> None:
    """score = (max − count) / max · maxBusyScore; idle endpoints have 1."""
    assert scores("active-request-scorer", candidates, attributes, parameters) == expected


@pytest.mark.parametrize(
    ("candidates", "load", "expected"),
    [
        (
            [c(name) for name in "abcd"],
            InFlightLoad(
                {"default/a": EndpointLoad(1, 400), "default/c": EndpointLoad(1, 5000)},
                {"default/b": 50, "default/d": 0},
                default_uncached_tokens=100,
            ),
            [0.5, 0.95, 0.0, 1.0],
        ),
        ([c()], None, [0.0]),
        ([unknown("a"), c("b")], InFlightLoad({}, {}), [0.0, 1.0]),
        ([unknown("a")], InFlightLoad({}, {}), [1.0]),
    ],
)
def test_token_load(
    candidates: list[Candidate], load: InFlightLoad | None, expected: list[float]
) -> None:
    attributes = Attributes({} if load is None else {inflight_load_key(): load})
    said = scores("token-load-scorer", candidates, attributes, {"queueThresholdTokens": 1000})
    assert said == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weight", "scale", "block", "match", "total", "expected"),
    [
        (0.0, 8192, 64, 5, 10, 0.5),
        (0.0, 8192, 64, 10, 10, 1.0),
        (0.5, 100, 1, 5, 10, 0.25125),
        (0.5, 100, 1, 50, 100, 0.375),
        (1.0, 100, 64, 5, 10, 1.0),
        (0.0, 8192, 64, 0, 0, 0.0),
    ],
)
def test_prefix_cache(
    weight: float, scale: int, block: int, match: int, total: int, expected: float
) -> None:
    """score = w · min(1, match · B / scale)² + (1 − w) · match / total"""
    info = PrefixCacheMatchInfo(total, block, {"default/a": match} if match else {})
    parameters = {"matchLengthWeight": weight, "matchLengthScaleTokens": scale}
    candidates = [c("a"), c("b")]
    said = scores("prefix-cache-scorer", candidates, Attributes({APPROX: info}), parameters)
    assert said == [pytest.approx(expected), 0.0]
    other = {**parameters, "prefixMatchInfoProducerName": "other"}
    assert scores("prefix-cache-scorer", candidates, Attributes({APPROX: info}), other) == [
        0.0,
        0.0,
    ]


TOPOLOGY = "Topology/topology-extractor"
PLACES = [
    Topology("h1", "r1", "z1", "g1"),
    Topology("h2", "r1", "z1", "g1"),
    Topology("h2", "r2", "z1", "g1"),
    Topology("h2", "r2", "z2", "g1"),
    Topology("h2", "r2", "z2", "g2"),
    Topology(),
]
PEER = Attributes({PEER_ENDPOINT_KEY: c("peer", known={TOPOLOGY: PLACES[0]})})


@pytest.mark.parametrize(
    ("attributes", "parameters", "expected"),
    [
        (PEER, {}, [1.0, 0.2, 0.05, 0.02, 0.0, 0.0, 0.0]),
        (Attributes(), {}, [0.0] * 7),
        (PEER, {"topologyProducerName": "other"}, [0.0] * 7),
    ],
)
def test_topology_affinity(
    attributes: Attributes, parameters: dict[str, str], expected: list[float]
) -> None:
    candidates = [*(c(known={TOPOLOGY: place}) for place in PLACES), c()]
    assert scores("topology-affinity-scorer", candidates, attributes, parameters) == expected


LOWER, HIGHER = "linear_lower_is_better", "linear_higher_is_better"


@pytest.mark.parametrize(
    ("kind", "normalization", "values", "expected"),
    [
        (LOWER, {}, [2, 6, 10], [1.0, 0.5, 0.0]),
        (HIGHER, {}, [2, 6, 10], [0.0, 0.5, 1.0]),
        (LOWER, {}, [4, 4, None], [1.0, 1.0, 1.0]),
        (HIGHER, {"adaptiveRange": {}}, [4, 4, None], [1.0, 1.0, 1.0]),
        (HIGHER, {}, [None, 1, 3, 3], [2 / 3, 0.0, 1.0, 1.0]),
        (LOWER, {"fixedRange": {"min": 0, "max": 10}}, [None, 2, 4], [0.7, 0.8, 0.6]),
        (LOWER, {"fixedRange": {"min": 0, "max": 10}}, [-1, 2.5, 11], [1.0, 0.75, 0.0]),
        (HIGHER, {"fixedRange": {"min": 5, "max": 10}}, [0, 7.5, 12], [0.0, 0.5, 1.0]),
        (LOWER, {"fixedRange": {"min": 0, "max": 1}}, [None], [0.0]),
    ],
)
def test_endpoint_attribute(
    kind: str, normalization: dict[str, Any], values: list[float | None], expected: list[float]
) -> None:
    key = "Util/my-extractor"
    candidates = [c(known={} if value is None else {key: value}) for value in values]
    parameters = {
        "attributeKey": "Util",
        "producer": "my-extractor",
        "algorithm": {"type": kind, "normalization": normalization},
    }
    said = scores("endpoint-attribute-scorer", candidates, None, parameters)
    assert said == pytest.approx(expected)


def test_endpoint_attribute_knows_the_core_metrics() -> None:
    parameters = {"attributeKey": "WaitingQueueSize", "algorithm": {"type": LOWER}}
    candidates = [c(waiting_requests=4), c(), unknown(), c(waiting_requests=None)]
    said = scores("endpoint-attribute-scorer", candidates, None, parameters)
    assert said == [0.0, 1.0, 0.0, 0.5]


def test_the_precise_scorer_scores_its_own_matches() -> None:
    scorer = configured("precise-prefix-cache-scorer")
    event = ["BlockStored", [1], None, list(range(16)), 16]
    scorer.kv_events("default/a", "kv@a@a", msgspec.msgpack.encode([1.0, [event]]))
    attributes, candidates = Attributes(), [c("a"), c("b")]
    prompts = (pack("<32I", *range(32)),)
    request = scorer.produce(replace(REQUEST, prompts=prompts), candidates, attributes)
    assert scorer.score(request, candidates, attributes) == [0.5, 0.0]
