"""Electors with clocks of their own at a model of an API server, one event at a time.

What a replica asks reaches the server later or never, and the answer the replica later or never;
in between anything may happen. That covers processes that stand still: nothing of theirs moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from picker.k8s.elector import Elector, LeaseRecord, Step, Timings

TIMINGS = Timings(15.0, 10.0, 2.0)


@dataclass(slots=True)
class Asked:
    """A request under way: of which version, and what was answered (None: nothing yet)."""

    step: Step
    asked_at: float
    version: int
    answer: LeaseRecord | None = None
    conflict: bool = False
    processed: bool = False


@dataclass(slots=True)
class Replica:
    """An elector, its clock (`rate` seconds a second), and what it has asked."""

    name: str
    rate: float
    offset: float
    elector: Elector
    version: int = 0
    asked: Asked | None = None


@dataclass
class ElectionWalk:
    """Owns the Lease, the replicas, and requests that nobody waits for any more."""

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
        """Its own time."""
        return self.now * replica.rate + replica.offset

    def leaders(self) -> list[str]:
        """Those who say that they lead, each by its own clock."""
        return [one.name for one in self.replicas if one.elector.is_leader(self.clock(one))]

    def check(self) -> None:
        """Two never lead."""
        found = self.leaders()
        assert len(found) <= 1, f"at {self.now}: {found}"
        if found and self.reigns[-1:] != found:
            self.reigns.extend(found)

    def pass_time(self, seconds: float) -> None:
        """Let it go by, looked at often."""
        for _ in range(4):
            self.now += seconds / 4
            self.check()

    def ask(self, index: int) -> None:
        """The next request of a replica that has none under way."""
        one = self.replicas[index % len(self.replicas)]
        if one.asked is None:
            step = one.elector.step(self.clock(one))
            one.asked = Asked(step, self.clock(one), one.version)
            if step is not Step.LOOK:
                one.elector.lost_track()

    def reach(self, index: int) -> None:
        """The server gets what a replica has asked."""
        one = self.replicas[index % len(self.replicas)]
        if one.asked is not None:
            self._process(one, one.asked)

    def reach_stray(self, index: int) -> None:
        """The server gets, late, what its sender has given up."""
        if self.stray:
            self._process(*self.stray.pop(index % len(self.stray)))

    def answer(self, index: int) -> None:
        """The answer comes to the replica."""
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
        """A replica waits no longer; its request may reach the server all the same."""
        one = self.replicas[index % len(self.replicas)]
        if one.asked is not None:
            if not one.asked.processed:
                self.stray.append((one, one.asked))
            one.asked = None

    def release(self, index: int) -> None:
        """A replica ends in order and starts again as another one."""
        one = self.replicas[index % len(self.replicas)]
        self.give_up(index)
        one.elector.stand_down()
        if self.record is not None and self.record.holder == one.name:
            self._store("")
        one.name = f"{one.name}'"
        one.elector, one.version = Elector(one.name, TIMINGS), 0

    def touch(self) -> None:
        """Somebody else writes the Lease without a change of its holder."""
        if self.record is not None:
            self._store(self.record.holder or "")

    def go_on(self, seconds: float) -> None:
        """All replicas live and the server answers at once, for so long by true time."""
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
