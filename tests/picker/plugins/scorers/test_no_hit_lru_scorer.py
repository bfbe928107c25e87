"""no-hit-lru-scorer: cold prompts are spread."""

from picker.framework.attributes import Attributes
from picker.plugins.scorers.prefix_cache_scorers import NoHitLruParameters, NoHitLruScorer
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import Candidate, ProfileResult, SchedulingResult, ScoredEndpoint
from tests.support.picker.plugin_scenes import candidate, request_for

MATCH = match_info_key("approx-prefix-cache-producer")


def _found(**matches: int) -> Attributes:
    attributes = Attributes()
    blocks = {f"default/{name}": count for name, count in matches.items()}
    attributes[MATCH] = PrefixCacheMatchInfo(4, 64, blocks)
    return attributes


def _picked(*candidates: Candidate) -> ProfileResult:
    scored = tuple(ScoredEndpoint(candidate, 0.0) for candidate in candidates)
    return ProfileResult(scored[:1], scored)


POOL = [candidate(name) for name in "abc"]


def send(scorer: NoHitLruScorer, found: Attributes, **profiles: ProfileResult) -> None:
    primary = next(iter(profiles))
    endpoint = profiles[primary].picked[0].candidate.endpoint
    result = SchedulingResult((endpoint,), primary, profiles)
    scorer.pre_request(request_for(), result, found)


def test_cold_prompts_go_to_the_least_recently_used_endpoint() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters())
    request, cold = request_for(), _found()
    a, b, c = POOL
    assert list(scorer.score(request, POOL, cold)) == [1.0, 0.5, 0.0]
    send(scorer, cold, default=_picked(a, b, c))
    assert list(scorer.score(request, POOL, cold)) == [0.0, 1.0, 0.5]
    send(scorer, cold, default=_picked(c, a, b))
    assert list(scorer.score(request, POOL, cold)) == [0.5, 1.0, 0.0]
    send(scorer, cold, default=_picked(b, a, c))
    assert list(scorer.score(request, POOL, cold)) == [1.0, 0.0, 0.5]
    assert list(scorer.used) == ["default/a", "default/c", "default/b"]


def test_ranks_count_candidates_only() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters())
    a, b, c = POOL
    for first in POOL:
        send(scorer, _found(), default=_picked(first))
    assert list(scorer.score(request_for(), [c, b], _found())) == [0.0, 1.0]
    assert list(scorer.score(request_for(), [a], _found())) == [1.0]
    assert list(scorer.score(request_for(), [], _found())) == []


def test_a_hit_makes_all_scores_equal() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters())
    warm = _found(b=1)
    assert list(scorer.score(request_for(), POOL, warm)) == [0.5, 0.5, 0.5]
    send(scorer, warm, default=_picked(*POOL))
    assert list(scorer.used) == []
    assert list(scorer.score(request_for(), POOL[:1], warm)) == [1.0]
    send(scorer, warm, default=_picked(POOL[0]))
    assert list(scorer.used) == ["default/a"]


def test_without_a_finding_every_prompt_is_cold() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters(lru_size=2, prefix_plugin_name="ignored"))
    assert list(scorer.score(request_for(), POOL, Attributes())) == [1.0, 0.5, 0.0]
    assert list(scorer.score(request_for(), POOL, _found(a=0))) == [1.0, 0.5, 0.0]
    assert scorer.consumes == (MATCH,)


def test_the_prefill_endpoint_is_used_as_well() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters())
    a, b, c = POOL
    send(scorer, _found(), decode=_picked(b), prefill=_picked(a), encode=_picked(c))
    assert list(scorer.used) == ["default/b", "default/a"]


def test_the_order_is_bounded_and_forgets_removed_endpoints() -> None:
    scorer = NoHitLruScorer(NoHitLruParameters(lru_size=2))
    for one in POOL:
        send(scorer, _found(), default=_picked(one))
    assert list(scorer.used) == ["default/b", "default/c"]
    scorer.endpoint_removed("default/b")
    scorer.endpoint_removed("default/never")
    assert list(scorer.used) == ["default/c"]
