"""The contract of every filter, for any candidates, findings and headers."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import (
    PEER_ENDPOINT_KEY,
    Attributes,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    Topology,
    inflight_load_key,
    latency_predictions_key,
)
from picker.framework.interfaces import Filter
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Api, Candidate, Endpoint, EndpointMetrics, InferenceRequest, ParsedBody
from tests.depth import examples
from tests.support.picker.plugin_scenes import configured, required_texts, types_of

FILTERS: list[tuple[str, dict[str, Any]]] = [
    *((name, required_texts(name)) for name in types_of(Filter)),
    ("by-label", {"label": "llm-d.ai/role", "validValues": ["decode"]}),
    ("by-label-selector", {"matchLabels": {"llm-d.ai/role": "decode"}}),
    (
        "endpoint-attribute-filter",
        {
            "attribute": "WaitingQueueSize",
            "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 3}},
        },
    ),
    (
        "label-selector-filter",
        {"matchExpressions": [{"key": "llm-d.ai/role", "operator": "NotIn", "values": ["both"]}]},
    ),
    ("prefix-cache-affinity-filter", {"explorationProbability": 0.3}),
    ("prefix-cache-affinity-filter", {"ttftSource": "latencyPredictor"}),
    ("session-affinity-filter", {"strategy": "session_id"}),
    ("topology-affinity-filter", {"minAffinity": "zone"}),
    (
        "utilization-filter",
        {
            "conditions": [
                {"metric": "kv-cache-utilization", "maxValue": 0.5},
                {"metric": "active-requests", "maxValue": 3},
            ]
        },
    ),
]
# It answers in the order of a header, which conformance asks for.
REORDERS = {"header-based-testing-filter"}

numbers = st.floats(allow_nan=True, allow_infinity=True)
words = st.sampled_from(["", "a", "b", "decode", "prefill", "both", "é"])
metrics = st.builds(
    EndpointMetrics,
    waiting_requests=st.integers(0, 9),
    running_requests=st.integers(0, 9),
    kv_cache_usage=st.floats(0, 1),
)
topologies = st.builds(Topology, words, words, words, words)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    return [
        Candidate(
            Endpoint(
                f"e{index}",
                draw(st.sampled_from(["10.0.0.1", "fd00::1", "a-name"])),
                8000 + index,
                labels=draw(st.dictionaries(st.just("llm-d.ai/role"), words)),
            ),
            draw(st.none() | metrics),
            draw(st.integers(0, 5)),
            attributes=draw(
                st.dictionaries(
                    st.sampled_from(
                        ["Topology/topology-extractor", "WaitingQueueSize/core-metrics-extractor"]
                    ),
                    topologies | numbers | words,
                )
            ),
        )
        for index in range(draw(st.integers(0, 5)))
    ]


@st.composite
def findings(draw: st.DrawFn) -> Attributes:
    attributes = Attributes()
    keys = st.sampled_from([f"default/e{index}" for index in range(7)])
    if draw(st.booleans()):
        matches = draw(st.dictionaries(keys, st.integers(0, 4)))
        info = PrefixCacheMatchInfo(draw(st.integers(0, 4)), 64, matches)
        attributes[match_info_key("approx-prefix-cache-producer")] = info
    if draw(st.booleans()):
        loads = st.builds(EndpointLoad, st.integers(0, 9), st.integers(0, 10**9))
        load = InFlightLoad(draw(st.dictionaries(keys, loads)), {})
        attributes[inflight_load_key()] = load
    if draw(st.booleans()):
        predictions = st.builds(
            LatencyPrediction, numbers, numbers, numbers, numbers, st.booleans()
        )
        attributes[latency_predictions_key()] = draw(st.dictionaries(keys, predictions))
    if draw(st.booleans()):
        known = {"Topology/topology-extractor": draw(topologies)}
        attributes[PEER_ENDPOINT_KEY] = Candidate(Endpoint("p", "10.0.0.9", 1), attributes=known)
    return attributes


requests = st.dictionaries(
    st.sampled_from(["x-session-token", "x-session-id", "test-epp-endpoint-selection"]),
    st.text(max_size=12) | st.sampled_from(["10.0.0.1", "[fd00::1]:8001", "ZGVmYXVsdC9lMQ=="]),
).map(lambda headers: InferenceRequest("r", headers, ParsedBody(Api.RAW), "m", "m"))


@pytest.mark.parametrize(
    ("type_name", "parameters"),
    FILTERS,
    ids=[f"{name}-{index}" for index, (name, _) in enumerate(FILTERS)],
)
@examples(30)
@given(candidate_lists(), findings(), requests, st.integers(0, 9))
def test_a_filter_passes_candidates_in_their_order_and_never_raises(
    type_name: str,
    parameters: dict[str, Any],
    candidates: list[Candidate],
    attributes: Attributes,
    request_: InferenceRequest,
    seed: int,
) -> None:
    narrow = configured(type_name, parameters)
    given_ = tuple(candidates)
    passed = list(narrow.filter(request_, candidates, attributes, Random(seed)))
    assert tuple(candidates) == given_
    places = [index for one in passed for index, other in enumerate(given_) if other is one]
    assert len(places) == len(passed)
    assert max(Counter(places).values(), default=1) == 1
    if type_name not in REORDERS:
        assert places == sorted(places)
    again = narrow.filter(request_, candidates, attributes, Random(seed))
    assert list(again) == passed
