"""Many endpoints under load, and random walks: the cost of a bad endpoint, and invariants."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.outliers.breaker import Answer, EndpointState, OutlierSettings
from picker.outliers.detector import Attempt
from picker.pool.datastore import EndpointChanges
from picker.types import FinishCause
from tests.depth import examples, worlds
from tests.support.picker.health_scene import Scene

Status = Callable[[int, float], int]  # of an endpoint's answers, by its number and the time


@dataclass(frozen=True)
class Load:
    per_second: float = 200.0
    fastest_seconds: float = 0.005
    slowest_seconds: float = 0.3


@dataclass
class Loop:
    size: int
    rng: Random
    status: Status
    load: Load = Load()
    settings: OutlierSettings | None = None
    scene: Scene = field(init=False)
    received: list[list[float]] = field(init=False)
    statuses: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scene = Scene(self.size, self.settings, self.rng)
        self.received = [[] for _ in range(self.size)]

    def run(self, seconds: float) -> None:
        order, answers = count(), list[tuple[float, int, int, Attempt]]()
        arrival = 0.0
        while arrival < seconds or answers:
            arrival += self.rng.expovariate(self.load.per_second)
            while answers and (answers[0][0] <= arrival or arrival >= seconds):
                self._answered(*heapq.heappop(answers))
            if arrival < seconds:
                self.scene.now = arrival
                number, attempt = self._decided()
                took = self.rng.uniform(self.load.fastest_seconds, self.load.slowest_seconds)
                heapq.heappush(answers, (arrival + took, next(order), number, attempt))

    def _decided(self) -> tuple[int, Attempt]:
        due = self.scene.probe()
        number = self.rng.choice(self.scene.usable()) if due is None else due
        self.received[number].append(self.scene.now)
        return number, self.scene.send(number)

    def _answered(self, at: float, _: int, number: int, attempt: Attempt) -> None:
        self.scene.now = at
        answer = Answer(self.status(number, at))
        self.statuses.append((at, answer.status or 0))
        attempt.responded(answer, at)
        attempt.ended(FinishCause.COMPLETED, answer, at)
        self.scene.memory.check_integrity()


LOADS = st.builds(
    Load,
    per_second=st.sampled_from((20.0, 100.0, 400.0)),
    fastest_seconds=st.just(0.001),
    slowest_seconds=st.sampled_from((0.002, 0.1, 0.6)),
)
RANDOM = st.randoms(use_true_random=False)


@examples(25)
@given(LOADS, st.integers(2, 12), RANDOM)
def test_an_endpoint_that_fails_everything_gets_little(load: Load, size: int, rng: Any) -> None:
    loop = Loop(size, Random(rng.random()), lambda n, _: 500 if n == 0 else 200, load)
    for number in range(1, size):
        loop.scene.answers(number, 200)
    loop.run(10.0)
    bad = loop.received[0]
    assert loop.scene.watcher.ejections == [("default/pod-0", 3)]
    assert len(bad) >= 5  # it was tried out
    assert all(after - before >= 1.0 for before, after in pairwise(bad[2:]))
    assert sum(status == 500 for _, status in loop.statuses) == len(bad)


@examples(25)
@given(LOADS, st.floats(2.0, 20.0), RANDOM)
def test_an_endpoint_that_recovers_is_back_within_ten_seconds(
    load: Load, healed_at: float, rng: Any
) -> None:
    def status(number: int, at: float) -> int:
        return 500 if number == 0 and 0.5 <= at < healed_at else 200

    loop = Loop(4, Random(rng.random()), status, load)
    loop.run(healed_at + 11.0)
    assert loop.scene.state(0) is EndpointState.HEALTHY
    recent = [sum(at >= healed_at + 10.0 for at in each) for each in loop.received]
    assert recent[0] >= 0.5 * sum(recent) / 4 - 3


@examples(10)
@given(RANDOM)
def test_an_endpoint_that_turns_bad_gets_no_more_than_it_had(rng: Any) -> None:
    load = Load(per_second=400.0, slowest_seconds=0.2)
    loop = Loop(4, Random(rng.random()), lambda n, at: 500 if n == 0 and at >= 5.0 else 200, load)
    loop.run(8.0)
    first_failure = min(at for at, status in loop.statuses if status == 500)
    later = [at for at in loop.received[0] if at > first_failure]
    assert len(later) <= 3 + 2  # as many as eject it, and its probes


@pytest.mark.parametrize("seed", range(worlds(4)))
def test_random_errors_do_not_eject(seed: int) -> None:
    draws = Random(seed)
    loop = Loop(4, Random(seed + 6), lambda n, _: 500 if n == 0 and draws.random() < 0.03 else 200)
    loop.run(20.0)
    assert loop.scene.watcher.ejections == []
    share = len(loop.received[0]) / sum(map(len, loop.received))
    assert share >= 0.2


def test_one_that_flaps_is_sent_little() -> None:
    loop = Loop(4, Random(7), lambda n, at: 500 if n == 0 and int(at) % 4 >= 2 else 200)
    loop.run(60.0)
    late = [sum(at >= 20.0 for at in each) for each in loop.received]
    assert late[0] <= 0.5 * sum(late) / 4
    others = late[1:]
    assert max(others) <= 1.2 * min(others)


def test_a_pool_of_nothing_but_failures_is_used_all_the_same() -> None:
    loop = Loop(3, Random(8), lambda n, at: 200 if n == 2 and at >= 5.0 else 500)
    loop.run(10.0)
    ended = [status for at, status in loop.statuses if at >= 6.0]
    assert sum(status == 200 for status in ended) >= 0.97 * len(ended)


STATUSES = (200, 200, 404, 500, 500, 503, None)
STEPS = ("decide", "decide", "decide", "answer", "answer", "end", "wait", "long", "forget", "leave")


class Walk:
    def __init__(self, size: int, failures: int, rng: Random) -> None:
        self.rng = rng
        self.settings = OutlierSettings(failures=failures)
        self.scene = Scene(size, self.settings, rng)
        self.open: list[tuple[int, Attempt]] = []
        self.probes: dict[int, float] = {}

    def decide(self) -> None:
        scene = self.scene
        due = scene.probe()
        if due is not None:
            assert scene.state(due) is EndpointState.EJECTED
            last = self.probes.get(due)
            assert last is None or scene.now - last >= 1.0
            self.probes[due] = scene.now
            self.open.append((due, scene.send(due)))
            return
        usable = scene.usable()
        assert usable
        free = [n for n in range(len(scene.pool)) if not self.is_held(n)]
        assert usable == free if free else True
        number = self.rng.choice(usable)
        self.open.append((number, scene.send(number)))

    def is_held(self, number: int) -> bool:
        record = self.scene.memory._breakers.get(self.scene.pool[number].key)
        return record is not None and record.is_held_back(True)

    def answer(self) -> None:
        if self.open:
            number, attempt = self.rng.choice(self.open)
            other = self.rng.choice(self.scene.pool).host_port
            served_by = self.rng.choice((None, None, self.scene.pool[number].host_port, other))
            attempt.responded(Answer(self.rng.choice(STATUSES), served_by), self.scene.now)

    def end(self) -> None:
        if self.open:
            _, attempt = self.open.pop(self.rng.randrange(len(self.open)))
            cause = self.rng.choice(list(FinishCause))
            attempt.ended(cause, Answer(self.rng.choice(STATUSES)), self.scene.now)

    def wait(self) -> None:
        self.scene.now += self.rng.choice((0.0, 0.1, 0.5))

    def long(self) -> None:
        self.scene.now += self.rng.choice((1.0, 3.0, 11.0, 40.0))

    def forget(self) -> None:
        number = self.rng.randrange(len(self.scene.pool))
        self.scene.memory.pool_changed(EndpointChanges(restarted=(self.scene.pool[number].key,)))
        self.probes.pop(number, None)

    def leave(self) -> None:
        number = self.rng.randrange(len(self.scene.pool))
        one = (self.scene.pool[number],)
        self.scene.memory.pool_changed(EndpointChanges((), one))
        self.scene.memory.pool_changed(EndpointChanges(one, ()))
        self.probes.pop(number, None)


@examples(150)
@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_walk_contradicts_itself(size: int, failures: int, rng: Any) -> None:
    walk = Walk(size, failures, rng)
    for _ in range(rng.randint(1, 120)):
        getattr(walk, rng.choice(STEPS))()
        walk.scene.memory.check_integrity()
    while walk.open:
        walk.end()
        walk.scene.memory.check_integrity()
    records = walk.scene.memory._breakers.values()
    assert all(record.under_way == 0 for record in records)
    assert walk.scene.watcher.num_ejected == sum(
        record.state is EndpointState.EJECTED for record in records
    )
