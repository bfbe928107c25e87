"""The contract of every scorer, for any candidates and findings."""

import math
from collections.abc import Mapping
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.config.catalog import builtin_plugins
from picker.framework.attributes import (
    Attributes,
    EncoderMatch,
    EndpointLoad,
    InFlightLoad,
    LatencyPrediction,
    encoder_matches_key,
    inflight_load_key,
    latency_predictions_key,
)
from picker.framework.interfaces import Scorer
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Api,
    Candidate,
    Candidates,
    Endpoint,
    EndpointMetrics,
    InferenceRequest,
    ParsedBody,
)
from tests.depth import examples
from tests.support.picker.plugin_scenes import configured

TYPES = [one.name for one in builtin_plugins() if one.name.endswith("-scorer")]
TYPES.append("context-length-aware")
# Of those that cannot do without any.
PARAMETERS: Mapping[str, dict[str, Any]] = {
    "endpoint-attribute-scorer": {
        "attributeKey": "Util",
        "producer": "dcgm-extractor",
        "algorithm": {"type": "linear_higher_is_better"},
    },
    "header-label-affinity-scorer": {"headerName": "x-pool", "labelKey": "pool"},
}
PREFIX_PRODUCERS = (
    "approx-prefix-cache-producer",
    "precise-prefix-cache-producer",
    "multicluster-approx-prefix-cache-producer",
)
NAMES = "abcdef"
counts = st.integers(0, 10**6)
shares = st.floats(0.0, 1.0)
anything = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.floats())
attribute_names = st.sampled_from(
    [
        "Util/dcgm-extractor",
        "llm-d.ai/multicluster-queue-size/multicluster-metrics-extractor",
        "llm-d.ai/multicluster-kv-cache-utilization/multicluster-metrics-extractor",
    ]
)
models = st.frozensets(st.sampled_from(["m", "n", "o"]))
metrics = st.builds(
    EndpointMetrics,
    waiting_requests=counts,
    running_requests=counts,
    kv_cache_usage=shares,
    active_models=models,
    waiting_models=models,
    max_active_models=st.none() | st.integers(0, 4),
)
labels = st.dictionaries(
    st.sampled_from(["llm-d.ai/context-length-range", "pool"]),
    st.sampled_from(["", "0-20", "100-50", "7-7", "0-1000000", "x"]),
)


@st.composite
def pools(draw: st.DrawFn) -> list[Candidate]:
    return [
        Candidate(
            Endpoint(name, "10.0.0.1", 8000, labels=draw(labels)),
            draw(st.none() | metrics),
            draw(st.integers(0, 50)),
            attributes=draw(st.dictionaries(attribute_names, anything)),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]


def _by_endpoint(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([f"default/{name}" for name in NAMES]), values)


@st.composite
def findings(draw: st.DrawFn) -> Attributes:
    attributes = Attributes()
    total = draw(st.integers(0, 40))
    for producer in PREFIX_PRODUCERS:
        if draw(st.booleans()):
            blocks = draw(_by_endpoint(st.integers(0, total)))
            attributes[match_info_key(producer)] = PrefixCacheMatchInfo(total, 64, blocks)
    if draw(st.booleans()):
        loads = draw(_by_endpoint(st.builds(EndpointLoad, counts, counts)))
        uncached = draw(_by_endpoint(counts))
        attributes[inflight_load_key()] = InFlightLoad(loads, uncached, draw(counts))
    if draw(st.booleans()):
        prediction = st.builds(
            LatencyPrediction,
            st.floats(),
            st.floats(),
            st.floats(),
            st.floats(),
            st.booleans(),
            st.integers(0, 2),
        )
        attributes[latency_predictions_key()] = draw(_by_endpoint(prediction))
    if draw(st.booleans()):
        requested = draw(st.integers(0, 5))
        matched = draw(_by_endpoint(st.integers(0, requested).map(float)))
        attributes[encoder_matches_key()] = EncoderMatch(float(requested), matched)
    return attributes


def _request(tokens: int) -> InferenceRequest:
    prompts = (pack(f"<{tokens}I", *range(tokens)),)
    headers = {"x-pool": "x", "x-session-token": "?", "x-session-id": "s"}
    body = ParsedBody(Api.COMPLETIONS, "m")
    return InferenceRequest("r", headers, body, "m", "m", prompts=prompts)


def _make(name: str) -> Scorer:
    plugin = configured(name, PARAMETERS.get(name))
    assert isinstance(plugin, Scorer)
    return plugin


def _scores(
    scorer: Scorer, request: InferenceRequest, pool: Candidates, found: Attributes
) -> list[float]:
    return list(scorer.score(request, pool, found))


@pytest.mark.parametrize("name", sorted(TYPES))
@examples(60)
@given(pool=pools(), found=findings(), tokens=st.integers(0, 40))
def test_each_candidate_gets_one_score_within_zero_and_one(
    name: str, pool: list[Candidate], found: Attributes, tokens: int
) -> None:
    scorer, request = _make(name), _request(tokens)
    scores = _scores(scorer, request, pool, found)
    assert len(scores) == len(pool)
    assert all(math.isfinite(score) and 0.0 <= score <= 1.0 for score in scores)
    assert _scores(scorer, request, pool, found) == scores


@pytest.mark.parametrize(
    "name",
    [
        "queue-scorer",
        "running-requests-size-scorer",
        "kv-cache-utilization-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
        "active-request-scorer",
        "token-load-scorer",
        "latency-scorer",
        "cache-aware-scorer",
        "consistent-hashing-scorer",
        "dynamo-cost-scorer",
    ],
)
@examples(60)
@given(known=st.lists(metrics, min_size=1, max_size=4), found=findings())
def test_unknown_load_never_looks_better_than_known_load(
    name: str, known: list[EndpointMetrics], found: Attributes
) -> None:
    pool = [
        Candidate(Endpoint(str(index), "10.0.0.1", 8000), one) for index, one in enumerate(known)
    ]
    stranger = Candidate(Endpoint("stranger", "10.0.0.2", 8000), None)
    *others, last = _scores(_make(name), _request(3), [*pool, stranger], found)
    assert last <= min(others)
