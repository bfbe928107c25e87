"""Deciders: whether a stage of a request is worth an endpoint of its own."""

import pytest
from msgspec.structs import replace

from picker.framework.attributes import Attributes
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY, DisaggregationDecision
from picker.framework.interfaces import Decider, Flight
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.types import MultiModalFeature, ResponseProgress, SchedulingResult
from tests.support.picker.plugin_scenes import configured, placed, request_for

IMAGE = MultiModalFeature("image", "hash", 0, 10)
APPROXIMATE = "approx-prefix-cache-producer"


def matched(
    blocks: dict[str, int], block_size: int = 10, producer: str = APPROXIMATE
) -> Attributes:
    attributes = Attributes()
    by_key = {f"default/{name}": count for name, count in blocks.items()}
    info = PrefixCacheMatchInfo(10, block_size, by_key)
    attributes[match_info_key(producer)] = info
    return attributes


def test_the_always_decider_runs_every_stage() -> None:
    decider = configured("always-disagg-pd-decider")
    assert isinstance(decider, Decider)
    assert decider.should_run(request_for(), None, Attributes())


@pytest.mark.parametrize(
    ("features", "expected"),
    [((), False), (((),), False), (((), (IMAGE,)), True), (((IMAGE, IMAGE),), True)],
)
def test_the_multimodal_decider_runs_the_stage_for_any_item(
    features: tuple[tuple[MultiModalFeature, ...], ...], expected: bool
) -> None:
    decider = configured("always-disagg-multimodal-decider")
    assert isinstance(decider, Decider)
    request = request_for(features=features)
    assert decider.should_run(request, None, Attributes()) is expected
    parsed = replace(request_for(), body=replace(request_for().body, features=features))
    assert decider.should_run(parsed, None, Attributes()) is expected


@pytest.mark.parametrize(
    ("parameters", "tokens", "blocks", "expected"),
    [
        ({"nonCachedTokens": 50}, 100, {"w": 5}, True),
        ({"nonCachedTokens": 51}, 100, {"w": 5}, False),
        ({"nonCachedTokens": 50}, 100, {"w": 6}, False),
        ({"nonCachedTokens": 50}, 100, {"other": 9}, True),
        ({"nonCachedTokens": 50}, 100, {}, True),
        ({"nonCachedTokens": 100}, 100, {}, True),
        ({"nonCachedTokens": 101}, 100, {}, False),
        ({"nonCachedTokens": 1}, 95, {"w": 10}, False),
        ({"nonCachedTokens": 1}, 0, {}, False),
        ({"nonCachedTokens": 0}, 100, {}, False),
        ({}, 100, {}, False),
        ({"nonCachedTokens": 10, "promptTokens": 100}, 99, {}, False),
        ({"nonCachedTokens": 10, "promptTokens": 100}, 100, {}, True),
        ({"nonCachedTokens": 10, "promptTokens": 5}, 9, {}, False),
    ],
)
def test_the_prefix_decider_runs_the_stage_for_enough_uncached_tokens(
    parameters: dict[str, int], tokens: int, blocks: dict[str, int], expected: bool
) -> None:
    decider = configured("prefix-based-pd-decider", parameters)
    first = tokens // 3
    request = request_for(prompts=(bytes(4 * first), bytes(4 * (tokens - first))))
    assert decider.should_run(request, placed("w"), matched(blocks)) is expected


def test_the_prefix_decider_needs_an_endpoint_and_a_finding() -> None:
    decider = configured("prefix-based-pd-decider", {"nonCachedTokens": 1})
    request = request_for(prompts=(bytes(400),))
    assert not decider.should_run(request, None, matched({}))
    assert not decider.should_run(request, placed("w"), Attributes())
    precise = matched({}, producer="precise-prefix-cache-producer")
    assert not decider.should_run(request, placed("w"), precise)
    assert decider.should_run(request, placed("w"), matched({}))
    assert decider.consumes == (match_info_key(APPROXIMATE),)
    assert configured("prefix-based-pd-decider").consumes == ()


class Link:
    """A pool in virtual time: a token is computed in 12.5 µs, its KV taken in `token_seconds`."""

    def __init__(self, **token_seconds: float) -> None:
        self.decider = configured("latency-based-pd-decider", {"nonCachedTokens": 512})
        self.token_seconds = token_seconds

    def serve(self, tokens: int, name: str = "w", stream: bool = True) -> bool:
        """Serve one prompt of which nothing is cached; return True if it ran elsewhere."""
        parsed = request_for(prompts=(bytes(4 * tokens),), received_at_seconds=7.0)
        request = replace(parsed, body=replace(parsed.body, stream=stream))
        attributes, picked = matched({}), placed(name)
        runs: bool = self.decider.should_run(request, picked, attributes)
        decision = DisaggregationDecision.PREFILL_DECODE
        attributes[DISAGGREGATION_DECISION_KEY] = (
            decision if runs else DisaggregationDecision.DECODE_ONLY
        )
        seconds = 0.02 + tokens * (12.5e-6 + runs * self.token_seconds[name])
        flight = Flight(request, SchedulingResult((picked.endpoint,), "decode"), attributes)
        self.decider.response_progress(flight, ResponseProgress(7.0 + seconds, 9, is_first=True))
        self.decider.response_progress(flight, ResponseProgress(99.0, 99, is_last=True))
        return runs

    def serve_all(self, rounds: int, name: str = "w") -> list[bool]:
        """Serve a short and two long prompts in turns; return where the long ones ran."""
        ran = []
        for _ in range(rounds):
            assert not self.serve(300, name)
            ran += [self.serve(4096, name), self.serve(2048, name)]
        return ran


@pytest.mark.parametrize(("token_seconds", "runs"), [(100e-6, False), (5e-6, True)])
def test_the_latency_decider_learns_whether_kv_is_taken_faster_than_computed(
    token_seconds: float, runs: bool
) -> None:
    link = Link(w=token_seconds)
    assert all(link.serve_all(5)), "nothing is known: the threshold decides"
    assert link.serve_all(10).count(False) == 10, "every other one is computed to measure it"
    later = link.serve_all(100)
    assert later.count(not runs) in (4, 5), "one of 47 is a trial"
    assert link.serve_all(1) == [runs, runs]


def test_the_latency_decider_says_what_it_compares() -> None:
    link = Link(w=100e-6)
    link.serve_all(20)
    link.serve(4096)
    request, attributes = request_for(prompts=(bytes(4 * 4096),)), matched({})
    assert not link.decider.should_run(request, placed("w"), attributes)
    assert link.decider.why_not(request, placed("w"), attributes) == (
        "to take the KV of 4096 tokens lasts 0.410 s, to compute it 0.071 s"
    )
    short, attributes = request_for(prompts=(bytes(40),)), matched({})
    assert not link.decider.should_run(short, placed("w"), attributes)
    assert "fewer than 512" in link.decider.why_not(short, placed("w"), attributes)


def test_the_latency_decider_notices_a_faster_network() -> None:
    link = Link(w=100e-6)
    link.serve_all(100)
    link.token_seconds["w"] = 5e-6
    link.serve_all(1000)
    assert link.serve_all(10).count(True) >= 19


def test_the_latency_decider_knows_each_endpoint() -> None:
    """An endpoint without answers of its own is taken for an average one."""
    link = Link(slow=100e-6, fast=5e-6)
    for _ in range(50):
        link.serve_all(1, "slow")
        link.serve_all(1, "fast")
    assert link.serve_all(10, "slow").count(True) <= 1
    assert link.serve_all(10, "fast").count(False) <= 1
    link.decider.endpoint_removed("default/slow")
    assert "default/slow" not in link.decider._paths


def test_answers_whose_first_token_shows_nothing_teach_the_latency_decider_nothing() -> None:
    link = Link(w=100e-6)
    for _ in range(40):
        link.serve(300, stream=False)
        assert link.serve(4096, stream=False)
