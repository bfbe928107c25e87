"""Who leads, as one replica decides it from what it has seen."""

from __future__ import annotations

import pytest
from election_walk import TIMINGS, ElectionWalk
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.k8s.elector import MAX_STATED_SECONDS, Elector, LeaseRecord, Step

OTHERS = LeaseRecord("other", "1", stated_seconds=15.0)
_INDEX = st.integers(0, 3)
_MOVES = st.one_of(
    st.tuples(
        st.sampled_from(["ask", "reach", "answer", "give_up", "release", "reach_stray"]), _INDEX
    ),
    st.tuples(st.just("touch")),
    st.tuples(st.just("go_on"), st.sampled_from([0.5, 2.0, 20.0])),
    st.tuples(
        st.just("pass_time"), st.sampled_from([0.01, 0.5, 2.0, 4.9, 5.1, 9.9, 10.1, 14.9, 15.1])
    ),
)


def _elector() -> Elector:
    return Elector("me", TIMINGS)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(1.0, 1.49), min_size=2, max_size=4), st.lists(_MOVES, max_size=60))
def test_two_never_lead_and_in_the_end_one_does(
    rates: list[float], moves: list[tuple[str, int | float]]
) -> None:
    """Whatever is late, lost, conflicting or standing still, with clocks of different rates; and
    once all goes well a lease's time is enough.
    """
    walk = ElectionWalk(rates)
    for name, *arguments in moves:
        getattr(walk, name)(*arguments)
        walk.check()
    walk.stray.clear()
    for index in range(len(walk.replicas)):
        walk.give_up(index)
    walk.stray.clear()
    walk.go_on(TIMINGS.lease_seconds + 2 * TIMINGS.look_seconds)
    assert len(walk.leaders()) == 1
    reigns = len(walk.reigns)
    walk.go_on(30.0)
    assert len(walk.reigns) == reigns, "a leader that renews stays"


def test_clocks_that_differ_too_much_are_why_there_is_a_bound() -> None:
    """A leader whose clock is twice as slow leads on while another one takes over: the walk can
    tell.
    """
    walk = ElectionWalk([1.0, 2.0])
    for move in (walk.ask, walk.reach, walk.answer) * 2:
        move(0)
    for move in (walk.ask, walk.reach, walk.answer):
        move(1)
    walk.now += 8.0
    for move in (walk.ask, walk.reach, walk.answer):
        move(1)
    with pytest.raises(AssertionError, match="r0"):
        walk.check()


def test_a_leader_counts_from_when_it_asked() -> None:
    """An answer that comes late proves nothing about now."""
    elector = _elector()
    elector.wrote(LeaseRecord("me", "2"), asked_at=100.0)
    assert elector.is_leader(109.9)
    assert not elector.is_leader(110.0)
    elector.wrote(LeaseRecord("me", "3"), asked_at=105.0)
    assert elector.is_leader(114.0)
    elector.stand_down()
    assert not elector.is_leader(105.0)


def test_a_standby_counts_from_when_it_heard_of_a_change() -> None:
    """Looks that find nothing new do not begin the time anew; one that does begins it."""
    elector = _elector()
    elector.saw(OTHERS, 100.0)
    elector.saw(OTHERS, 110.0)
    assert elector.step(114.9) is Step.LOOK
    assert elector.wait_seconds(114.9) == pytest.approx(0.1)
    assert elector.step(115.0) is Step.WRITE
    elector.saw(LeaseRecord("other", "2"), 115.0)
    assert elector.step(129.9) is Step.LOOK
    assert elector.step(130.0) is Step.WRITE


def test_what_is_released_is_taken_at_once() -> None:
    """Nobody holds it any more; neither does anybody hold one that never was."""
    elector = _elector()
    elector.saw(OTHERS, 100.0)
    elector.saw(LeaseRecord("", "2"), 100.5)
    assert elector.step(100.5) is Step.WRITE
    fresh = _elector()
    assert fresh.step(0.0) is Step.LOOK
    fresh.saw_none(0.0)
    assert fresh.step(0.0) is Step.CREATE


def test_a_malformed_holder_is_waited_out() -> None:
    """Somebody may lead, nobody knows who."""
    elector = _elector()
    elector.saw(LeaseRecord(None, "1"), 100.0)
    assert elector.step(114.0) is Step.LOOK
    assert elector.step(115.0) is Step.WRITE


def test_a_lease_that_goes_is_waited_out_by_who_knew_its_holder() -> None:
    """Who held it does not know yet. The holder itself makes it again."""
    elector = _elector()
    elector.saw(OTHERS, 100.0)
    for now in (101.0, 102.0):
        elector.saw_none(now)
        assert elector.step(now) is Step.LOOK
    assert elector.step(115.0) is Step.CREATE
    holder = _elector()
    holder.wrote(LeaseRecord("me", "1"), 100.0)
    holder.lost_track()
    holder.saw_none(101.0)
    assert holder.step(101.0) is Step.CREATE
    assert holder.is_leader(101.0)


def test_longer_leases_of_others_are_respected_within_reason() -> None:
    """A rollout to other timings has both kinds; nonsense blocks nobody for ever."""
    elector = _elector()
    elector.saw(LeaseRecord("other", "1", stated_seconds=60.0), 0.0)
    assert elector.step(59.0) is Step.LOOK
    elector.saw(LeaseRecord("other", "2", stated_seconds=1e9), 0.0)
    assert elector.step(MAX_STATED_SECONDS) is Step.WRITE
    elector.saw(LeaseRecord("other", "3", stated_seconds=1.0), 0.0)
    assert elector.step(14.0) is Step.LOOK


def test_who_sees_another_holder_leads_no_more() -> None:
    """Whatever its own time says."""
    elector = _elector()
    elector.wrote(LeaseRecord("me", "1"), 100.0)
    elector.saw(OTHERS, 101.0)
    assert not elector.is_leader(101.0)
    assert elector.holder == "other"
    assert not elector.holds
