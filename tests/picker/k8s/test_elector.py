"""Leader election as one replica decides it from the Leases it has read."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.k8s.elector import MAX_STATED_SECONDS, Elector, LeaseRecord, Step, Timings
from tests.depth import examples

TIMINGS = Timings(15.0, 10.0, 2.0)


@dataclass(slots=True)
class Asked:
    step: Step
    asked_at: float
    version: int
    answer: LeaseRecord | None = None
    conflict: bool = False
    processed: bool = False


@dataclass(slots=True)
class Replica:
    name: str
    rate: float
    offset: float
    elector: Elector
    version: int = 0
    asked: Asked | None = None


@dataclass
class ElectionWalk:
    """The Lease, the replicas, and writes whose replies are no longer awaited."""

    rates: list[float]
    now: float = 0.0
    record: LeaseRecord | None = None
    version: int = 0
    replicas: list[Replica] = field(default_factory=list)
    stray: list[tuple[Replica, Asked]] = field(default_factory=list)
    reigns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, rate in enumerate(self.rates):
            name = f"r{index}"
            replica = Replica(name, rate, index * 1000.0, Elector(name, TIMINGS))
            self.replicas.append(replica)

    def clock(self, replica: Replica) -> float:
        return self.now * replica.rate + replica.offset

    def leaders(self) -> list[str]:
        return [one.name for one in self.replicas if one.elector.is_leader(self.clock(one))]

    def check(self) -> None:
        found = self.leaders()
        assert len(found) <= 1, f"at {self.now}: {found}"
        if found and self.reigns[-1:] != found:
            self.reigns.extend(found)

    def pass_time(self, seconds: float) -> None:
        for _ in range(4):
            self.now += seconds / 4
            self.check()

    def ask(self, index: int) -> None:
        one = self.replicas[index % len(self.replicas)]
        if one.asked is None:
            step = one.elector.step(self.clock(one))
            one.asked = Asked(step, self.clock(one), one.version)
            if step is not Step.LOOK:
                one.elector.lost_track()

    def reach(self, index: int) -> None:
        one = self.replicas[index % len(self.replicas)]
        if one.asked is not None:
            self._process(one, one.asked)

    def reach_stray(self, index: int) -> None:
        if self.stray:
            self._process(*self.stray.pop(index % len(self.stray)))

    def answer(self, index: int) -> None:
        one = self.replicas[index % len(self.replicas)]
        asked = one.asked
        if asked is None or not asked.processed:
            return
        one.asked = None
        if asked.conflict:
            one.elector.lost_track()
        elif asked.step is Step.LOOK:
            if asked.answer is None:
                one.elector.saw_none(self.clock(one))
            else:
                one.elector.saw(asked.answer, self.clock(one))
                one.version = int(asked.answer.mark)
        elif asked.answer is not None:
            one.elector.wrote(asked.answer, asked.asked_at)
            one.version = int(asked.answer.mark)

    def give_up(self, index: int) -> None:
        one = self.replicas[index % len(self.replicas)]
        if one.asked is not None:
            if not one.asked.processed:
                self.stray.append((one, one.asked))
            one.asked = None

    def release(self, index: int) -> None:
        one = self.replicas[index % len(self.replicas)]
        self.give_up(index)
        one.elector.stand_down()
        if self.record is not None and self.record.holder == one.name:
            self._store("")
        one.name = f"{one.name}'"
        one.elector, one.version = Elector(one.name, TIMINGS), 0

    def touch(self) -> None:
        if self.record is not None:
            self._store(self.record.holder or "")

    def go_on(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            for index in range(len(self.replicas)):
                for _ in range(3):
                    self.ask(index)
                    self.reach(index)
                    self.answer(index)
            self.pass_time(TIMINGS.look_seconds / 2)

    def _process(self, one: Replica, asked: Asked) -> None:
        if asked.processed:
            return
        asked.processed = True
        if asked.step is Step.LOOK:
            asked.answer = self.record
        elif asked.step is Step.CREATE:
            asked.conflict = self.record is not None
        else:
            asked.conflict = self.record is None or asked.version != self.version
        if asked.step is not Step.LOOK and not asked.conflict:
            self._store(one.name)
            asked.answer = self.record

    def _store(self, holder: str) -> None:
        self.version += 1
        self.record = LeaseRecord(holder, str(self.version))


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


@pytest.fixture
def elector() -> Elector:
    return Elector("me", TIMINGS)


@examples(300)
@given(st.lists(st.floats(1.0, 1.49), min_size=2, max_size=4), st.lists(_MOVES, max_size=60))
def test_two_replicas_never_lead_together_and_finally_one_leads(
    rates: list[float], moves: list[tuple[str, int | float]]
) -> None:
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


def test_clocks_beyond_the_bound_make_two_leaders() -> None:
    """The walk detects a leader with a clock at half speed, which leads beside a second one."""
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


def test_a_leader_counts_from_its_request(elector: Elector) -> None:
    elector.wrote(LeaseRecord("me", "2"), asked_at=100.0)
    assert elector.is_leader(109.9)
    assert not elector.is_leader(110.0)
    elector.wrote(LeaseRecord("me", "3"), asked_at=105.0)
    assert elector.is_leader(114.0)
    elector.stand_down()
    assert not elector.is_leader(105.0)


def test_a_standby_counts_from_the_change_it_saw_last(elector: Elector) -> None:
    elector.saw(OTHERS, 100.0)
    elector.saw(OTHERS, 110.0)
    assert elector.step(114.9) is Step.LOOK
    assert elector.wait_seconds(114.9) == pytest.approx(0.1)
    assert elector.step(115.0) is Step.WRITE
    elector.saw(LeaseRecord("other", "2"), 115.0)
    assert elector.step(129.9) is Step.LOOK
    assert elector.step(130.0) is Step.WRITE


def test_a_released_lease_is_taken_at_once(elector: Elector) -> None:
    elector.saw(OTHERS, 100.0)
    elector.saw(LeaseRecord("", "2"), 100.5)
    assert elector.step(100.5) is Step.WRITE
    fresh = Elector("me", TIMINGS)
    assert fresh.step(0.0) is Step.LOOK
    fresh.saw_none(0.0)
    assert fresh.step(0.0) is Step.CREATE


def test_a_malformed_holder_is_waited_out(elector: Elector) -> None:
    """An unreadable Lease may have a holder."""
    elector.saw(LeaseRecord(None, "1"), 100.0)
    assert elector.step(114.0) is Step.LOOK
    assert elector.step(115.0) is Step.WRITE


def test_a_deleted_lease_is_waited_out_by_replicas_that_knew_its_holder(elector: Elector) -> None:
    """The holder may not know of the deletion yet; it creates the Lease again."""
    elector.saw(OTHERS, 100.0)
    for now in (101.0, 102.0):
        elector.saw_none(now)
        assert elector.step(now) is Step.LOOK
    assert elector.step(115.0) is Step.CREATE
    holder = Elector("me", TIMINGS)
    holder.wrote(LeaseRecord("me", "1"), 100.0)
    holder.lost_track()
    holder.saw_none(101.0)
    assert holder.step(101.0) is Step.CREATE
    assert holder.is_leader(101.0)


def test_longer_leases_of_others_are_respected_up_to_a_bound(elector: Elector) -> None:
    """A rollout to other timings has both kinds; an absurd duration never blocks for ever."""
    elector.saw(LeaseRecord("other", "1", stated_seconds=60.0), 0.0)
    assert elector.step(59.0) is Step.LOOK
    elector.saw(LeaseRecord("other", "2", stated_seconds=1e9), 0.0)
    assert elector.step(MAX_STATED_SECONDS) is Step.WRITE
    elector.saw(LeaseRecord("other", "3", stated_seconds=1.0), 0.0)
    assert elector.step(14.0) is Step.LOOK


def test_a_leader_that_sees_another_holder_stops_leading(elector: Elector) -> None:
    elector.wrote(LeaseRecord("me", "1"), 100.0)
    elector.saw(OTHERS, 101.0)
    assert not elector.is_leader(101.0)
    assert elector.holder == "other"
    assert not elector.holds
