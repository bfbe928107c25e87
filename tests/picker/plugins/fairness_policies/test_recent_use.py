"""Recent use and fair shares, compared with sums over the whole history."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies._recent_use import FADING_SECONDS, MEMORY_SECONDS, RecentUse
from tests.depth import examples

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Account:
    def __init__(self) -> None:
        self.use = RecentUse()
        self.now = 0.0
        self.used: dict[str, list[tuple[float, float]]] = {}
        self.waiting: set[str] = set()

    def begin(self, flow: str, tokens: float) -> None:
        self.use.began(flow, WEIGHTS[flow], tokens, self.now)
        self.use.ended(flow, 0.0, self.now)
        self.used.setdefault(flow, []).append((self.now, tokens))

    def wait(self, flow: str) -> None:
        self.use.waits(flow, WEIGHTS[flow], self.now)
        self.used.setdefault(flow, [])
        self.waiting.add(flow)

    def per_weight(self, flow: str) -> float:
        fading = ((self.now - at) / FADING_SECONDS for at, _ in self.used[flow])
        faded = (math.exp(-one) for one in fading)
        used = zip(self.used[flow], faded, strict=True)
        return sum(tokens * left for (_, tokens), left in used) / WEIGHTS[flow]

    def share(self) -> float:
        weights = sum(WEIGHTS[flow] for flow in self.used)
        return sum(self.per_weight(flow) * WEIGHTS[flow] for flow in self.used) / weights


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 1000), st.floats(0.0, 3.0)),
        min_size=3,
        max_size=30,
    )
)
def test_the_selected_flow_is_within_its_share(steps: list[tuple[str, int, float]]) -> None:
    account = Account()
    for flow in WEIGHTS:
        account.wait(flow)
    for flow in WEIGHTS:
        account.begin(flow, 1)
    for flow, tokens, seconds in steps:
        account.now += seconds
        account.begin(flow, tokens)
        least = min(account.per_weight(one) for one in WEIGHTS)
        for first in WEIGHTS:
            found = account.use.within_share(first, account.now)
            assert found is not None
            if account.per_weight(first) <= account.share() * (1 - 1e-6):
                assert found == first
            elif account.per_weight(first) >= account.share() * (1 + 1e-6):
                assert account.per_weight(found) == pytest.approx(least)


def test_a_flow_that_is_alone_is_never_held_back() -> None:
    use = RecentUse()
    use.began("giant", 1.0, 1e3, 0.0)
    assert use.within_share("giant", 0.0) == "giant"
    use.ended("giant", 0.0, 0.0)
    use.waits("a", 1.0, 1.0)
    use.began("a", 1.0, 7.0, 1.0)
    assert use.within_share("a", MEMORY_SECONDS - 0.1) is None
    assert use.within_share("a", MEMORY_SECONDS) == "a"


def test_room_is_reserved_for_ten_seconds_after_the_end() -> None:
    use = RecentUse()
    use.began("calm", 1.0, 10.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 100.0, 0.0)
    assert use.within_share("flood", 60.0) is None
    use.ended("calm", 0.0, 60.0)
    assert use.within_share("flood", 69.9) is None
    assert use.within_share("flood", 70.0) == "flood"
    assert len(use) == 1


def test_a_new_flow_starts_with_its_share_used() -> None:
    use = RecentUse()
    for second in range(10):
        use.began("calm", 1.0, 100.0, second / 10)
    use.waits("flood", 1.0, 1.0)
    assert use.within_share("flood", 1.0) == "flood"
    use.began("flood", 1.0, 1.0, 1.0)
    assert use.within_share("flood", 1.0) is None


def test_a_flow_that_comes_while_others_wait_may_catch_up() -> None:
    use = RecentUse()
    use.began("other", 1.0, 100.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 1000.0, 0.0)
    use.waits("new", 1.0, 1.0)
    assert use.within_share("new", 1.0) == "new"
    for _ in range(5):
        use.began("new", 1.0, 50.0, 1.0)
        assert use.within_share("flood", 1.0) == "new"


def beside_a_flood(waited_seconds: float) -> RecentUse:
    """A calm flow that used 40 is next to a flood that was limited to 36 of a hundred."""
    use = RecentUse()
    use.waits("flood", 1.0, 0.0)
    use.began("calm", 1.0, 0.0, 0.0)
    use.waits("calm", 1.0, 10.0 - waited_seconds)
    use.began("calm", 1.0, 40.0, 10.0)
    use.began("flood", 1.0, 36.0, 10.0)
    use.reserved = 0.24
    return use


def test_reserved_capacity_counts_as_asked_by_waiting_flows() -> None:
    use = beside_a_flood(0.1)
    assert use.within_share("flood", 10.0) == "calm"
    use.stops_waiting("calm")
    assert use.within_share("flood", 10.0) is None
    use.reserved = 0.0
    assert use.within_share("flood", 10.0) == "flood"


def test_a_burst_of_a_flow_that_seldom_waits_is_no_flood() -> None:
    for used, is_calm in ((120.0, True), (200.0, False)):
        use = RecentUse()
        for flow, tokens in (("calm", 0.0), ("other", 80.0), ("calm", used)):
            use.began(flow, 1.0, tokens, 0.0)
        use.began("calm", 1.0, 0.0, 1.0)
        assert use.is_within_share("calm") is is_calm
    use = RecentUse()
    use.began("other", 1.0, 80.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 40.0, 0.0)
    use.began("flood", 1.0, 0.0, 1.0)
    assert not use.is_within_share("flood")


def test_a_flow_that_never_waited_is_calm_within_a_second() -> None:
    use = RecentUse()
    use.began("calm", 1.0, 10.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 10.0, 0.0)
    for flow in ("calm", "flood"):
        use.began(flow, 1.0, 0.0, 0.3)
        assert not use.seldom_waits(flow)
        use.began(flow, 1.0, 0.0, 0.9)
    assert use.seldom_waits("calm")
    assert not use.seldom_waits("flood")


def test_the_waiting_flow_with_the_least_use_may_go() -> None:
    use = beside_a_flood(9.0)
    assert use.within_share("calm", 10.0) == "flood"
    assert use.within_share("flood", 10.0) == "flood"


def test_invented_names_never_go_before_their_turn() -> None:
    use = RecentUse()
    use.began("calm", 1.0, 10.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 100.0, 0.0)
    for number in range(50):
        use.waits(f"new-{number}", 1.0, 0.0)
    assert use.within_share("flood", 1.0) is None
    assert use.within_share("new-7", 1.0) == "new-7"


def test_an_excessive_estimate_is_refunded() -> None:
    use = RecentUse()
    for flow in "ab":
        use.waits(flow, 1.0, 0.0)
    for flow, tokens in (("a", 1000.0), ("b", 100.0)):
        use.began(flow, 1.0, tokens, 0.0)
    assert use.within_share("a", 0.0) == "b"
    use.ended("a", -5000.0, 0.5)
    assert use.within_share("b", 0.5) == "a"
    use.forget("b")
    assert use.within_share("a", 0.5) == "a"


def test_a_long_life_does_not_overflow() -> None:
    account = Account()
    account.wait("a")
    account.wait("b")
    for second in range(2000):
        account.now = second * 2.0
        account.begin("a", 10)
        account.begin("b", 10)
    assert account.use.within_share("a", account.now) == "b"
    assert account.use.within_share("b", account.now) == "b"
