"""expected-cost-scorer: the order of costs, and what answers teach."""

from random import Random
from struct import pack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.framework.attributes import Attributes, EndpointLoad, InFlightLoad, inflight_load_key
from picker.framework.interfaces import Flight
from picker.plugins.scorers.expected_cost_scorer import ExpectedCostScorer
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import (
    Api,
    Candidate,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    ResponseProgress,
    Usage,
)
from tests.depth import examples
from tests.support.picker.plugin_scenes import candidate, configured, decided

TOKENS = 6400
BLOCK = 64


def _scorer() -> ExpectedCostScorer:
    scorer = configured("expected-cost-scorer")
    assert isinstance(scorer, ExpectedCostScorer)
    return scorer


def _request(limit: int | None = 200, stream: bool = True) -> InferenceRequest:
    body = ParsedBody(Api.COMPLETIONS, "m", stream=stream, max_output_tokens=limit)
    prompts = (pack(f"<{TOKENS}I", *range(TOKENS)),)
    return InferenceRequest("r", {}, body, "m", "m", prompts=prompts, received_at_seconds=100.0)


def _found(match: dict[str, int] | None = None, unread: dict[str, int] | None = None) -> Attributes:
    """Findings by names of endpoints: matched blocks, and tokens of prompts in flight."""
    attributes = Attributes()
    blocks = {f"default/{name}": count for name, count in (match or {}).items()}
    attributes[match_info_key("approx-prefix-cache-producer")] = PrefixCacheMatchInfo(
        TOKENS // BLOCK, BLOCK, blocks
    )
    loads = {f"default/{name}": EndpointLoad(1, tokens) for name, tokens in (unread or {}).items()}
    attributes[inflight_load_key()] = InFlightLoad(loads, {}, TOKENS)
    return attributes


def _scores(
    candidates: list[Candidate],
    attributes: Attributes | None = None,
    scorer: ExpectedCostScorer | None = None,
) -> list[float]:
    found = attributes or Attributes()
    return list((scorer or _scorer()).score(_request(), candidates, found))


def _serve(
    scorer: ExpectedCostScorer,
    name: str,
    ttft: float,
    times: int = 1,
    usage: Usage | None = Usage(TOKENS, 100),  # noqa: B008  (frozen)
    **loads: Any,
) -> None:
    """Let streamed answers of `name` begin after `ttft` seconds each."""
    for _ in range(times):
        attributes, request = _found(unread=loads.get("unread")), _request()
        result = decided(default=[candidate(name, waiting_requests=loads.get("waiting", 0))])
        scorer.pre_request(request, result, attributes)
        flight = Flight(request, result, attributes)
        scorer.response_progress(flight, ResponseProgress(100.0 + ttft, 10, is_first=True))
        scorer.response_progress(flight, ResponseProgress(150.0, 20))
        scorer.request_ended(flight, FinishCause.COMPLETED, usage, 200.0)


@pytest.mark.parametrize(
    ("better", "worse", "attributes"),
    [
        (candidate("a"), candidate("b"), _found({"a": 50, "b": 49})),
        (candidate("a"), candidate("b"), _found(unread={"a": 640, "b": 704})),
        (candidate("a"), candidate("b"), _found(unread={"b": 64})),
        (candidate("a", running_requests=3), candidate("b", running_requests=4), _found()),
        (candidate("a", waiting_requests=3), candidate("b", waiting_requests=4), _found()),
        (candidate("a", inflight=8), candidate("b", inflight=9), _found()),
        (candidate("a", kv_cache_usage=0.5), candidate("b", kv_cache_usage=0.6), _found()),
    ],
    ids=["uncached", "unread", "idle", "running", "waiting", "in flight", "KV cache"],
)
def test_less_work_scores_higher(
    better: Candidate, worse: Candidate, attributes: Attributes
) -> None:
    best, second = _scores([better, worse], attributes)
    assert best == 1.0
    assert 0.0 < second < 1.0


def test_a_cached_prefix_is_left_when_too_many_run_there() -> None:
    def winner(running: int) -> int:
        pool = [candidate("holder", running_requests=running), candidate("empty")]
        first, second = _scores(pool, _found({"holder": 100}))
        return 0 if first > second else 1

    assert [winner(running) for running in (0, 10, 100)] == [0, 0, 1]


@pytest.mark.parametrize(("limit", "winner"), [(8, 0), (2000, 1)])
def test_short_answers_go_to_the_cached_prefix_and_long_ones_to_the_idle_endpoint(
    limit: int, winner: int
) -> None:
    """For an answer of 8 tokens, reading 512 of them is most of its time."""
    body = ParsedBody(Api.COMPLETIONS, "m", max_output_tokens=limit)
    request = InferenceRequest("r", {}, body, "m", "m", prompts=(pack("<576I", *range(576)),))
    attributes = Attributes()
    attributes[match_info_key("approx-prefix-cache-producer")] = PrefixCacheMatchInfo(
        9, BLOCK, {"default/a": 8}
    )
    attributes[inflight_load_key()] = InFlightLoad({}, {}, 576)
    candidates = [candidate("a", running_requests=3), candidate("b", running_requests=0)]
    scores = _scorer().score(request, candidates, attributes)
    assert scores[winner] == 1.0 > scores[1 - winner]


def test_a_full_cache_is_no_reason_against_an_endpoint_that_holds_the_whole_prompt() -> None:
    pool = [candidate("a", kv_cache_usage=1.0), candidate("b", kv_cache_usage=0.0)]
    assert _scores(pool, _found({"a": 100}))[0] == 1.0


indexes = st.integers(0, 40)


@examples(60)
@given(
    st.lists(
        st.tuples(indexes, indexes, st.floats(0.0, 1.0), st.integers(0, 100), indexes),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_scores_depend_on_no_order(rows: list[tuple[Any, ...]], rng: Random) -> None:
    pool = [
        candidate(str(at), running_requests=r, waiting_requests=w, kv_cache_usage=u)
        for at, (r, w, u, _, _) in enumerate(rows)
    ]
    found = _found(
        {str(at): row[3] for at, row in enumerate(rows)},
        {str(at): row[4] * 100 for at, row in enumerate(rows)},
    )
    before = dict(zip([one.key for one in pool], _scores(pool, found), strict=True))
    rng.shuffle(pool)
    assert dict(zip([one.key for one in pool], _scores(pool, found), strict=True)) == before
    assert max(before.values()) == 1.0


@pytest.mark.parametrize("count", [1, 2, 200])
def test_equal_endpoints_score_equally(count: int) -> None:
    pool = [candidate(str(at), running_requests=7, kv_cache_usage=0.4) for at in range(count)]
    assert _scores(pool, _found()) == [1.0] * count


def test_without_findings_requests_and_the_cache_decide() -> None:
    pool = [candidate("a", running_requests=9), candidate("b", running_requests=1)]
    first, second = _scores(pool)
    assert first < second == 1.0


def test_an_endpoint_of_unknown_load_scores_nothing_beside_others() -> None:
    pool = [candidate("a", running_requests=90), candidate("b", known=False)]
    assert _scores(pool, _found()) == [1.0, 0.0]


def test_own_requests_decide_while_no_load_is_known() -> None:
    pool = [candidate("a", known=False, inflight=3), candidate("b", known=False)]
    first, second = _scores(pool, _found())
    assert 0.0 < first < second == 1.0


def test_a_missing_signal_neither_gains_nor_loses() -> None:
    pool = [candidate(name, kv_cache_usage=usage) for name, usage in (("a", 0.2), ("b", None))]
    pool.append(candidate("c", kv_cache_usage=0.8))
    full, middle, empty = (_scores(pool, _found())[at] for at in (2, 1, 0))
    assert full < middle < empty


def test_an_endpoint_that_takes_longer_for_the_same_work_gets_less() -> None:
    scorer = _scorer()
    _serve(scorer, "fast", 0.3, times=50)
    _serve(scorer, "slow", 0.9, times=50)
    pool = [candidate("fast", running_requests=12), candidate("slow", running_requests=8)]
    first, second = _scores(pool, _found(), scorer)
    assert first == 1.0 > second
    scorer.endpoint_removed("default/slow")
    scorer.endpoint_removed("default/fast")
    first, second = _scores(pool, _found(), scorer)
    assert first < second == 1.0


def test_one_slow_answer_changes_little() -> None:
    scorer = _scorer()
    _serve(scorer, "a", 0.3, times=50)
    _serve(scorer, "b", 3.0)
    assert _scores([candidate("a"), candidate("b")], _found(), scorer)[1] > 0.5


@pytest.mark.parametrize("load", [{"waiting": 1}, {"unread": {"slow": 77}}, {"usage": None}])
def test_an_answer_that_waited_for_others_or_failed_says_nothing_about_speed(
    load: dict[str, Any],
) -> None:
    scorer = _scorer()
    _serve(scorer, "fast", 0.3, times=50)
    _serve(scorer, "slow", 9.0, times=50, **load)
    scores = _scores([candidate("fast"), candidate("slow")], _found(), scorer)
    assert scores == pytest.approx([1.0, 1.0])


def test_a_prompt_delays_others_less_where_answers_are_long() -> None:
    def holder_score(completion_tokens: int) -> float:
        scorer = _scorer()
        _serve(scorer, "x", 0.3, usage=Usage(TOKENS, completion_tokens))
        pool = [candidate(name, running_requests=10) for name in ("holder", "other")]
        return _scores(pool, _found({"holder": 100}), scorer)[1]

    assert holder_score(1000) > holder_score(10)
