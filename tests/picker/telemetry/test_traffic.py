"""What was sent where lately."""

from __future__ import annotations

from admin_scene import decision
from msgspec.structs import replace

from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.telemetry.traffic import WINDOW_SAMPLES, EndpointTraffic, Recent, expected_hits


def test_rates_and_hits_are_those_of_the_last_ten_seconds() -> None:
    """Five requests in the first second, half of whose tokens were cached, are forgotten later."""
    traffic = EndpointTraffic()
    for _ in range(5):
        traffic.decided(decision("a", 64, 32))
    assert traffic.sample(["default/a"], 1.0) == {"default/a": Recent(5.0, 320, 160)}
    for _ in range(WINDOW_SAMPLES - 1):
        recent = traffic.sample(["default/a"], 1.0)
    assert recent == {"default/a": Recent(0.5, 320, 160)}
    assert recent["default/a"].prefix_hit_share == 0.5
    assert traffic.sample(["default/a"], 1.0) == {"default/a": Recent()}


def test_a_prompt_that_nobody_looked_up_says_nothing_about_hits() -> None:
    """Without a prefix index the share is unknown, not 0."""
    traffic = EndpointTraffic()
    traffic.decided(decision("a", 64, None))
    recent = traffic.sample(["default/a"], 1.0)["default/a"]
    assert recent == Recent(1.0)
    assert recent.prefix_hit_share is None


def test_endpoints_that_left_are_forgotten() -> None:
    """What is sent to one after that counts from nothing."""
    traffic = EndpointTraffic()
    traffic.decided(decision("a", 64, 64))
    assert traffic.sample(["default/b"], 1.0) == {"default/b": Recent()}
    assert traffic.sample(["default/a"], 1.0) == {"default/a": Recent()}


def test_a_request_that_may_go_anywhere_counts_nowhere() -> None:
    """A request without a body has no result."""
    traffic = EndpointTraffic()
    traffic.decided(replace(decision("a", 64, 64), result=None))
    assert traffic.sample(["default/a"], 1.0)["default/a"].requests_per_second == 0


def test_the_last_block_of_a_prompt_is_not_counted_beyond_its_end() -> None:
    """A prompt of 20 tokens that is cached completely is cached to 100 %."""
    assert expected_hits(decision("a", 20, 32), "default/a") == (20, 20)
    assert expected_hits(decision("a", 20, 16), "default/a") == (20, 16)
    assert expected_hits(decision("a", 20, 16), "default/b") == (20, 0)


def test_of_several_indexes_the_one_that_expects_most_counts() -> None:
    """Each knows something else: one guesses, another was told by the engines."""
    one = decision("a", 64, 16)
    assert one.attributes is not None
    more = PrefixCacheMatchInfo(2, 32, {"default/a": 1})
    one.attributes.put(match_info_key("other"), more)
    assert expected_hits(one, "default/a") == (64, 32)
