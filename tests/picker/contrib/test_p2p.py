"""p2p-source-producer: the engine gets the address of a peer that has more of the prompt."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from picker.contrib.p2p import HEADER, P2pSourceParameters, P2pSourceProducer
from picker.framework.attributes import Attributes
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, Candidates, Endpoint, EndpointMetrics, InferenceRequest
from tests.support.picker.plugin_scenes import decided, request_for


def endpoint(name: str, queue: int | None = 0) -> Candidate:
    metrics = None if queue is None else EndpointMetrics(waiting_requests=queue)
    return Candidate(Endpoint(name, "10.0.0.1", 8000 + ord(name)), metrics)


def header(
    request: InferenceRequest,
    candidates: Candidates,
    tiers: dict[str, dict[str, int]] | None,
    picked: dict[str, str],
    **parameters: Any,
) -> str | None:
    """Return the name of the endpoint in the header; `tiers` are in blocks of 16 tokens."""
    plugin = P2pSourceProducer("p2p", P2pSourceParameters(**parameters))
    attributes = Attributes()
    if tiers is not None:
        found = {f"default/{name}": counts for name, counts in tiers.items()}
        info = PrefixCacheMatchInfo(10, 16, {}, found)
        attributes[match_info_key("precise-prefix-cache-producer")] = info
    by_name = {one.endpoint.name: one for one in candidates}
    result = decided(**{profile: [by_name[name]] for profile, name in picked.items()})
    request = plugin.produce(request, candidates, attributes)
    headers = plugin.pre_request(request, result, attributes)
    if not headers:
        return None
    return chr(int(headers[HEADER].removeprefix("10.0.0.1:")) - 8000)


@pytest.mark.parametrize(
    ("tiers", "delta", "expected"),
    [
        ({"b": {"cpu": 3}}, 1, "b"),
        ({"a": {"cpu": 2}, "b": {"cpu": 3}}, 16, "b"),
        ({"a": {"cpu": 2}, "b": {"cpu": 3}}, 17, None),
        ({"a": {"cpu": 3}, "b": {"cpu": 3}}, 1, None),
        ({"b": {"gpu": 9}}, 1, None),  # no endpoint can copy from there
        ({"a": {"gpu": 9}, "b": {"cpu": 1}}, 1, "b"),
        ({"a": {"cpu": 9}, "b": {"cpu": 1}}, 1, None),
        ({}, 1, None),
        (None, 1, None),
    ],
)
def test_a_peer_must_have_enough_more_in_its_cpu_tier(
    tiers: dict[str, dict[str, int]] | None, delta: int, expected: str | None
) -> None:
    candidates = [endpoint("a"), endpoint("b")]
    chosen = header(
        request_for(), candidates, tiers, {"default": "a"}, min_cached_token_delta=delta
    )
    assert chosen == expected


@pytest.mark.parametrize(("profile", "expected"), [("prefill", "a"), ("other", "b")])
def test_the_endpoint_of_a_prefill_profile_computes(profile: str, expected: str) -> None:
    tiers = {"a": {"cpu": 4}, "b": {"cpu": 5}}
    picked = {"decode": "a", "prefill": "b"}
    chosen = header(
        request_for(), [endpoint("a"), endpoint("b")], tiers, picked, prefill_profile_name=profile
    )
    assert chosen == (None if expected == "a" else "b")


def test_a_missing_queue_is_the_mean_of_the_others() -> None:
    missing = Candidate(endpoint("d").endpoint, EndpointMetrics(waiting_requests=None))
    tiers = {name: {"cpu": 8} for name in "bcd"}
    body, rng = request_for().body, Random(2)
    requests = [InferenceRequest(rng.randbytes(8).hex(), {}, body, "m", "m") for _ in range(200)]
    others = [endpoint("a", 1), endpoint("b"), endpoint("c", 2)]
    drawn, expected = (
        [header(one, [*others, last], tiers, {"default": "a"}) for one in requests]
        for last in (missing, endpoint("d", 1))
    )
    assert drawn == expected


def test_peers_near_the_best_are_drawn_by_their_queues() -> None:
    queues = {"a": 0, "b": 0, "c": 3, "d": 0, "e": None}
    candidates = [endpoint(name, queue) for name, queue in queues.items()]
    tiers = {"b": {"cpu": 8}, "c": {"cpu": 7}, "d": {"cpu": 6}, "e": {"cpu": 8}}
    body, rng = request_for().body, Random(1)
    requests = [InferenceRequest(rng.randbytes(8).hex(), {}, body, "m", "m") for _ in range(2000)]
    drawn = [header(one, candidates, tiers, {"default": "a"}) for one in requests]
    assert drawn[:50] == [
        header(one, list(reversed(candidates)), tiers, {"default": "a"}) for one in requests[:50]
    ]
    counts = Counter(drawn)
    total = 1 + 1 / 4 + 1 / 5
    assert counts["b"] == pytest.approx(2000 / total, rel=0.1)
    assert counts["c"] == pytest.approx(2000 / 4 / total, rel=0.2)
    assert counts["e"] == pytest.approx(2000 / 5 / total, rel=0.2)
    assert set(counts) == {"b", "c", "e"}
