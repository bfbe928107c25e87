"""The contract of scorers, for any candidates and findings."""

import math
from collections.abc import Mapping, Sequence
from struct import pack
from typing import Any

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
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, Endpoint, EndpointMetrics, InferenceRequest
from tests.support.picker.plugin_scenes import configured, request_for, required_texts

# Of the type that cannot do with texts.
PARAMETERS: Mapping[str, dict[str, Any]] = {
    "endpoint-attribute-scorer": {
        "attributeKey": "Util",
        "producer": "mine",
        "algorithm": {"type": "linear_higher_is_better"},
    }
}
PREFIX_PRODUCERS = [one.name for one in builtin_plugins() if MATCH_INFO in one.default_for]
NAMES = "abcdef"
counts = st.integers(0, 10**6)
shares = st.floats(0.0, 1.0)
anything = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(), st.floats())
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
def pools(draw: st.DrawFn, attributes: Sequence[str] = ("Util/mine",)) -> list[Candidate]:
    return [
        Candidate(
            Endpoint(name, "10.0.0.1", 8000, labels=draw(labels)),
            draw(st.none() | metrics),
            draw(st.integers(0, 50)),
            attributes=draw(st.dictionaries(st.sampled_from(attributes), anything)),
        )
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]


def _by_endpoint(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([f"default/{name}" for name in NAMES]), values)


@st.composite
def findings(draw: st.DrawFn) -> Attributes:
    attributes = Attributes()
    total = draw(st.integers(0, 40))
    for producer in (*PREFIX_PRODUCERS, "precise-prefix-cache-producer"):
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
    headers = {"pool": "x", "x-session-token": "?", "x-session-id": "s"}
    return request_for(headers=headers, prompts=(pack(f"<{tokens}I", *range(tokens)),))


def _scorer(name: str) -> Scorer:
    plugin = configured(name, PARAMETERS.get(name) or required_texts(name))
    assert isinstance(plugin, Scorer)
    return plugin


def check_scores(name: str, pool: list[Candidate], found: Attributes, tokens: int = 3) -> None:
    """Check that each candidate gets one score within zero and one."""
    scorer, request = _scorer(name), _request(tokens)
    scores = list(scorer.score(request, pool, found))
    assert len(scores) == len(pool)
    assert all(math.isfinite(score) and 0.0 <= score <= 1.0 for score in scores)
    assert list(scorer.score(request, pool, found)) == scores


def check_unknown_load(name: str, known: Sequence[EndpointMetrics], found: Attributes) -> None:
    """Check that unknown load never looks better than known load."""
    pool = [Candidate(Endpoint(str(i), "10.0.0.1", 8000), one) for i, one in enumerate(known)]
    stranger = Candidate(Endpoint("stranger", "10.0.0.2", 8000), None)
    *others, last = _scorer(name).score(_request(3), [*pool, stranger], found)
    assert last <= min(others)
