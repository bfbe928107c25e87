"""The formulas of cache-aware-scorer, consistent-hashing-scorer and dynamo-cost-scorer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from struct import pack
from typing import Any

import pytest

from picker.framework.attributes import Attributes, EndpointLoad, InFlightLoad, inflight_load_key
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, InferenceRequest
from tests.support.picker.plugin_scenes import candidate, configured, request_for

APPROX = match_info_key("approx-prefix-cache-producer")


def prompt(num_tokens: int, first: int = 0, **fields: Any) -> InferenceRequest:
    tokens = pack(f"<{num_tokens}I", *range(first, first + num_tokens))
    return request_for(prompts=(tokens,), **fields)


def pool(*loads: int) -> list[Candidate]:
    return [candidate(name, inflight=load) for name, load in zip("abcdefgh", loads, strict=False)]


def matches(total: int, **blocks: int) -> Attributes:
    by_key = {f"default/{name}": count for name, count in blocks.items()}
    return Attributes({APPROX: PrefixCacheMatchInfo(total, 10, by_key)})


@pytest.mark.parametrize(
    ("parameters", "loads", "found", "expected"),
    [
        # Even: the longest match, above the threshold, whatever the load.
        ({}, (9, 0, 3), matches(10, a=4, b=3), [2 / 3, 1 / 3, 2 / 9]),
        # Of equal matches the one with less to do.
        ({}, (4, 2, 0), matches(10, a=5, b=5), [2 / 3, 2.5 / 3, 1 / 3]),
        # At the threshold, and without any match: the least load.
        ({}, (4, 2, 0), matches(10, a=3), [0, 1 / 6, 1 / 3]),
        ({"cacheThreshold": 0.2}, (4, 2, 0), matches(10, a=3), [2 / 3, 1 / 6, 1 / 3]),
        ({}, (4, 2, 0), Attributes(), [0, 1 / 6, 1 / 3]),
        ({"cacheThreshold": 0}, (1, 1), matches(0), [1 / 3, 1 / 3]),
        # Uneven by both thresholds, by the absolute one alone, by the relative one alone.
        ({}, (65, 0), matches(10, a=10), [0, 1 / 3]),
        ({}, (64, 0), matches(10, a=10), [2 / 3, 1 / 3]),
        ({}, (265, 200), matches(10, a=10), [2 / 3, 1 / 3]),
        ({"balanceAbsThreshold": 1}, (3, 1), matches(10, a=10), [0, 1 / 3]),
        ({"balanceAbsThreshold": 1}, (6, 4), matches(10, a=10), [2 / 3, 1 / 3]),
    ],
)
def test_cache_aware_weighs_match_and_load_as_sglang_router_does(
    parameters: dict[str, Any], loads: Sequence[int], found: Attributes, expected: Sequence[float]
) -> None:
    scorer = configured("cache-aware-scorer", parameters)
    assert scorer.score(prompt(100), pool(*loads), found) == pytest.approx(expected)


def test_cache_aware_excludes_an_endpoint_of_unknown_load() -> None:
    candidates = [candidate("a", known=False), candidate("b", inflight=3)]
    scorer = configured("cache-aware-scorer")
    assert scorer.score(prompt(100), candidates, matches(10, a=10)) == pytest.approx([0, 1 / 3])


def in_flight(found: Attributes, **tokens: int) -> Attributes:
    loads = {f"default/{name}": EndpointLoad(1, count) for name, count in tokens.items()}
    found[inflight_load_key()] = InFlightLoad(loads, {})
    return found


def in_use(name: str, blocks: int, inflight: int = 0) -> Candidate:
    return candidate(
        name,
        inflight=inflight,
        kv_cache_usage=blocks / 100,
        num_kv_blocks=100,
        block_size_tokens=10,
    )


def dynamo(
    candidates: Sequence[Candidate], found: Attributes, parameters: Mapping[str, Any]
) -> list[float]:
    scorer = configured("dynamo-cost-scorer", dict(parameters))
    return list(scorer.score(prompt(100), candidates, found))


def test_dynamo_cost_is_that_of_its_documentation() -> None:
    """The prompt has 10 blocks, of which 2, 5 and 8 are cached; 10, 5 and 9 are in use. The costs
    are 18, 10 and 11, and 10 more each for the blocks that the request takes itself.
    """
    found = in_flight(matches(10, a=2, b=5, c=8))
    candidates = [in_use("a", 10), in_use("b", 5), in_use("c", 9)]
    assert dynamo(candidates, found, {}) == pytest.approx([0, 1, 7 / 8])


def test_dynamo_cost_uses_the_mean_for_missing_blocks() -> None:
    gap = candidate("c")
    found = in_flight(matches(10))
    assert dynamo([in_use("a", 10), in_use("b", 4), gap], found, {}) == pytest.approx([0, 1, 0.5])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        # a: (50 + 100) / 10 − 10 + 10 = 15; b: 10 + 10 + 2 = 22; c: 3 + 10 + 10 = 23
        ({}, [1, 1 / 8, 0]),
        # a decays by 1 / (1 + 2 · 5 / 10) = 1/2: 15 − 5 + 10 = 20
        ({"overlapScoreCreditDecay": 2}, [1, 1 / 3, 0]),
        # a: 15 + 10 = 25
        ({"overlapScoreCredit": 0}, [0, 1, 2 / 3]),
        # a: 2 · 5 + 10 = 20; b: 2 · 10 + 12 = 32; c: 2 · 13 + 10 = 36
        ({"prefillLoadScale": 2}, [1, 1 / 4, 0]),
        # a: 15 + 4 · 2 = 23
        ({"decodeActiveRequestWeight": 4}, [0, 1, 0]),
    ],
)
def test_dynamo_cost_has_dynamos_settings(
    parameters: dict[str, Any], expected: Sequence[float]
) -> None:
    found = in_flight(matches(10, a=10), a=50, c=30)
    candidates = [in_use("a", 0, inflight=2), in_use("b", 2), in_use("c", 0)]
    assert dynamo(candidates, found, parameters) == pytest.approx(expected)


def test_dynamo_cost_decays_only_blocks_on_the_gpu() -> None:
    """The prompt has 10 blocks: 4 are on the GPU, and the others are worth 3 in a lower tier; 5 are
    in flight. 15 − 4 / (1 + 2 · 5 / 10) − 3 = 10, the cost of b, which is idle and empty.
    """
    found = in_flight(matches(10), a=50)
    tiers = {"default/a": {"gpu": 4, "cpu": 6}}
    found[APPROX] = PrefixCacheMatchInfo(10, 10, {"default/a": 7}, tiers)
    candidates = [in_use("a", 0), in_use("b", 0), in_use("c", 4)]
    scored = dynamo(candidates, found, {"overlapScoreCreditDecay": 2})
    assert scored == pytest.approx([1, 1, 0])


def test_dynamo_cost_without_findings_is_zero() -> None:
    assert dynamo(pool(1, 2), Attributes(), {}) == [0, 0]
    candidates = [candidate("a", known=False), in_use("b", 90)]
    assert dynamo(candidates, in_flight(matches(10, a=10)), {}) == [0, 1]


def first(scores: Sequence[float]) -> int:
    assert len(set(scores)) == len(scores)
    return max(range(len(scores)), key=scores.__getitem__)


def homes(names: str, num_keys: int = 2000) -> list[str]:
    scorer = configured("consistent-hashing-scorer")
    candidates = [candidate(name) for name in names]
    return [
        names[first(scorer.score(prompt(8, 8 * key), candidates, Attributes()))]
        for key in range(num_keys)
    ]


def test_consistent_hashing_spreads_keys_and_moves_few() -> None:
    """Each of n endpoints gets its share. When one leaves, only its keys move."""
    before, after = homes("abcdefgh"), homes("abcdefg")
    assert all(1 / 8 * 0.8 < n / 2000 < 1 / 8 * 1.2 for n in Counter(before).values())
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {"h"}
    assert len(moved) / 2000 < 1 / 8 + 0.02
    assert max(Counter(new for _, new in moved).values()) < len(moved) / 7 * 1.6


@pytest.mark.parametrize(
    ("loads", "factor", "expected"),
    [
        ((0, 0, 0), 1.0, [0, 1, 2]),  # ⌈1/3⌉ = 1
        ((1, 0, 0), 1.0, [1, 2, 0]),  # ⌈2/3⌉ = 1
        ((1, 0, 0), 1.6, [0, 1, 2]),  # ⌈1.6 · 2/3⌉ = 2
        ((4, 4, 1), 1.25, [0, 1, 2]),  # ⌈1.25 · 10/3⌉ = 5
        ((5, 4, 0), 1.25, [1, 2, 0]),
    ],
)
def test_consistent_hashing_skips_endpoints_at_the_bound(
    loads: Sequence[int], factor: float, expected: Sequence[int]
) -> None:
    """`loads` and `expected` are in the order that endpoints have for this key without load."""
    scorer = configured("consistent-hashing-scorer", {"loadFactor": factor})
    request, names = prompt(8), "abc"
    idle = scorer.score(request, [candidate(name) for name in names], Attributes())
    places = sorted(range(3), key=lambda index: -idle[index])
    assert sorted(idle) == [0.0, 0.5, 1.0]
    by_place = [candidate(names[index], inflight=loads[i]) for i, index in enumerate(places)]
    scores = scorer.score(request, by_place, Attributes())
    assert sorted(range(3), key=lambda index: -scores[index]) == list(expected)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
def test_consistent_hashing_never_exceeds_the_bound(factor: float) -> None:
    scorer = configured("consistent-hashing-scorer", {"loadFactor": factor})
    rng, loads = Random(5), dict.fromkeys("abcdefgh", 0)
    for _ in range(2000):
        names = rng.sample(sorted(loads), rng.randint(1, 8))
        busy = [name for name in names if loads[name]]
        if busy and rng.random() < 0.45:
            loads[rng.choice(busy)] -= 1
            continue
        candidates = [candidate(name, inflight=loads[name]) for name in names]
        request = prompt(8, 8 * min(rng.randrange(9), rng.randrange(9)))
        total = sum(loads[name] for name in names)
        picked = names[first(scorer.score(request, candidates, Attributes()))]
        assert loads[picked] + 1 <= -(-factor * (total + 1) // len(names))
        loads[picked] += 1


def test_a_key_is_the_header_or_the_beginning_of_the_prompt() -> None:
    scorer = configured("consistent-hashing-scorer", {"headerName": "X-Session", "prefixTokens": 4})

    def scores(request: InferenceRequest) -> Sequence[float]:
        return scorer.score(request, pool(*[0] * 8), Attributes())  # type: ignore[no-any-return]

    assert scores(prompt(4)) == scores(prompt(9))
    session = {"headers": {"x-session": "s"}}
    assert scores(prompt(4, **session)) == scores(prompt(4, 77, **session))
    others = [
        prompt(3),
        prompt(4, 1),
        prompt(4, salt="s"),
        prompt(4, model="n"),
        prompt(4, **session),
    ]
    assert all(scores(other) != scores(prompt(4)) for other in others)
    assert scores(request_for()) == [0.0] * 8
