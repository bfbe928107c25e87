"""What holds for the affinity scorers, whatever candidates, findings and headers they are given."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.framework.attributes import Attributes
from picker.framework.findings import PEER_ENDPOINT_KEY, Topology
from picker.framework.registry import PluginType
from picker.plugins.scorers import (
    header_label_affinity_scorer,
    session_affinity_scorer,
    topology_affinity_scorer,
)
from picker.types import Api, Candidate, Endpoint, InferenceRequest, ParsedBody

SCORERS: list[tuple[PluginType[Any], dict[str, Any]]] = [
    (header_label_affinity_scorer.PLUGIN, {"headerName": "x-zone", "labelKey": "zone"}),
    (session_affinity_scorer.PLUGIN, {}),
    (session_affinity_scorer.PLUGIN, {"strategy": "session_id"}),
    (topology_affinity_scorer.PLUGIN, {}),
]
words = st.sampled_from(["", "a", "b", "é"])
topologies = st.builds(Topology, words, words, words, words)
known = st.dictionaries(
    st.just("Topology/topology-extractor"), topologies | words | st.floats() | st.none()
)
labels = st.dictionaries(st.just("zone"), words)
candidate_lists = st.lists(st.tuples(labels, known), max_size=5).map(
    lambda rows: [
        Candidate(Endpoint(f"e{index}", "10.0.0.1", 8000, labels=each), attributes=attributes)
        for index, (each, attributes) in enumerate(rows)
    ]
)
requests = st.dictionaries(
    st.sampled_from(["x-zone", "x-session-token", "x-session-id"]),
    words | st.text(max_size=12) | st.just("ZGVmYXVsdC9lMQ=="),
).map(lambda headers: InferenceRequest("r", headers, ParsedBody(Api.RAW), "m", "m"))


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    SCORERS,
    ids=[f"{plugin.name}-{index}" for index, (plugin, _) in enumerate(SCORERS)],
)
@settings(max_examples=60, deadline=None)
@given(candidate_lists, requests, st.none() | known)
def test_there_is_one_finite_score_in_0_1_for_each_candidate(
    plugin: PluginType[Any],
    parameters: dict[str, Any],
    candidates: list[Candidate],
    request_: InferenceRequest,
    peer: dict[str, Any] | None,
) -> None:
    """And never an exception."""
    scorer: Any = plugin.make(plugin.name, msgspec.convert(parameters, plugin.parameters))
    attributes = Attributes()
    if peer is not None:
        attributes.put(PEER_ENDPOINT_KEY, Candidate(Endpoint("p", "10.0.0.9", 1), attributes=peer))
    scores = list(scorer.score(request_, candidates, attributes))
    assert len(scores) == len(candidates)
    assert all(math.isfinite(score) and 0.0 <= score <= 1.0 for score in scores)
