"""Who has used more than a fair share lately, against sums over everything that was used."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.plugins.fairness_policies._recent_use import FADING_SECONDS, MEMORY_SECONDS, RecentUse
from tests.depth import examples

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


class Account:
    """All that was ever used, and the same told to a `RecentUse`."""

    def __init__(self) -> None:
        self.use = RecentUse()
        self.now = 0.0
        self.used: dict[str, list[tuple[float, float]]] = {}
        self.waiting: set[str] = set()

    def begin(self, flow: str, tokens: float) -> None:
        """A request comes, goes at once, and is over at once."""
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
        """The fair one, for each weight."""
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
def test_whoever_may_go_is_within_a_fair_share(steps: list[tuple[str, int, float]]) -> None:
    """The one in turn if that is, else whoever used least; and somebody always is."""
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


def test_nobody_is_held_back_alone() -> None:
    """Whatever was used, once all others are forgotten."""
    use = RecentUse()
    use.began("giant", 1.0, 1e3, 0.0)
    assert use.within_share("giant", 0.0) == "giant"
    use.ended("giant", 0.0, 0.0)
    use.waits("a", 1.0, 1.0)
    use.began("a", 1.0, 7.0, 1.0)
    assert use.within_share("a", MEMORY_SECONDS - 0.1) is None
    assert use.within_share("a", MEMORY_SECONDS) == "a"


def test_room_is_kept_for_ten_seconds_after_the_end() -> None:
    """For somebody of whom nothing waits and who used less; not longer."""
    use = RecentUse()
    use.began("calm", 1.0, 10.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 100.0, 0.0)
    assert use.within_share("flood", 60.0) is None
    use.ended("calm", 0.0, 60.0)
    assert use.within_share("flood", 69.9) is None
    assert use.within_share("flood", 70.0) == "flood"
    assert len(use) == 1


def test_whoever_begins_has_not_saved_anything_up() -> None:
    """A flood is over its share with its first request."""
    use = RecentUse()
    for second in range(10):
        use.began("calm", 1.0, 100.0, second / 10)
    use.waits("flood", 1.0, 1.0)
    assert use.within_share("flood", 1.0) == "flood"
    use.began("flood", 1.0, 1.0, 1.0)
    assert use.within_share("flood", 1.0) is None


def test_whoever_comes_while_others_wait_may_catch_up() -> None:
    """It has used nothing yet, and goes before them once its first request has had its turn."""
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
    """A calm flow that used 40 beside a flood held to 36 of a hundred, for ten seconds."""
    use = RecentUse()
    use.waits("flood", 1.0, 0.0)
    use.began("calm", 1.0, 0.0, 0.0)
    use.waits("calm", 1.0, 10.0 - waited_seconds)
    use.began("calm", 1.0, 40.0, 10.0)
    use.began("flood", 1.0, 36.0, 10.0)
    use.reserved = 0.24
    return use


def test_what_is_reserved_counts_as_asked_by_those_who_wait() -> None:
    """Who is held back is not calm for having got less; whoever seldom waits goes first."""
    use = beside_a_flood(0.1)
    assert use.within_share("flood", 10.0) == "calm"
    use.stops_waiting("calm")
    assert use.within_share("flood", 10.0) is None
    use.reserved = 0.0
    assert use.within_share("flood", 10.0) == "flood"


def test_a_burst_of_somebody_who_seldom_waits_is_no_flood() -> None:
    """A quarter more than its share, in the three seconds that count; who waits has none of it."""
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


def test_whoever_never_waited_is_known_for_that_within_a_second() -> None:
    """And not for one that wants more because it is new; one that waited all the time is."""
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


def test_of_those_who_all_wait_whoever_used_less_may_go() -> None:
    """Whatever is kept free for others."""
    use = beside_a_flood(9.0)
    assert use.within_share("calm", 10.0) == "flood"
    assert use.within_share("flood", 10.0) == "flood"


def test_names_that_are_made_up_never_go_before_their_turn() -> None:
    """Though they have used nothing; in their turn they go."""
    use = RecentUse()
    use.began("calm", 1.0, 10.0, 0.0)
    use.waits("flood", 1.0, 0.0)
    use.began("flood", 1.0, 100.0, 0.0)
    for number in range(50):
        use.waits(f"new-{number}", 1.0, 0.0)
    assert use.within_share("flood", 1.0) is None
    assert use.within_share("new-7", 1.0) == "new-7"


def test_what_was_taken_for_too_much_is_handed_back() -> None:
    """A response may use less than its estimate; never less than nothing in all."""
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
    """What counts more and more is scaled anew in time."""
    account = Account()
    account.wait("a")
    account.wait("b")
    for second in range(2000):
        account.now = second * 2.0
        account.begin("a", 10)
        account.begin("b", 10)
    assert account.use.within_share("a", account.now) == "b"
    assert account.use.within_share("b", account.now) == "b"
