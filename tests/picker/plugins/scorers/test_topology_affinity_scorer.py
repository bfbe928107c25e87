"""topology-affinity-scorer: the nearer to the peer, the better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picker.framework.attributes import Attributes
from picker.framework.findings import PEER_ENDPOINT_KEY, Topology
from picker.plugins.scorers.topology_affinity_scorer import PLUGIN
from picker.types import Candidate, InferenceRequest


def test_the_score_is_that_of_the_nearest_shared_tier(
    configured: Callable[..., Any],
    placed: Callable[..., Candidate],
    request_for: Callable[..., InferenceRequest],
) -> None:
    """1.0, 0.2, 0.05, 0.02, and 0 for whoever shares nothing; without a peer 0 for everybody."""
    places = [
        Topology("h1", "r1", "z1", "g1"),
        Topology("h2", "r1", "z1", "g1"),
        Topology("h2", "r2", "z1", "g1"),
        Topology("h2", "r2", "z2", "g1"),
        Topology("h2", "r2", "z2", "g2"),
        Topology(),
    ]
    key = "Topology/topology-extractor"
    candidates = [placed(attributes={key: place}) for place in places] + [placed()]
    scorer, attributes = configured(PLUGIN), Attributes()
    assert list(scorer.score(request_for(), candidates, attributes)) == [0.0] * 7
    attributes.put(PEER_ENDPOINT_KEY, placed("peer", attributes={key: places[0]}))
    scores = list(scorer.score(request_for(), candidates, attributes))
    assert scores == [1.0, 0.2, 0.05, 0.02, 0.0, 0.0, 0.0]
    other = configured(PLUGIN, {"topologyProducerName": "other"})
    assert list(other.score(request_for(), candidates, attributes)) == [0.0] * 7
