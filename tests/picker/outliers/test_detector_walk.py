"""Invariants of the detector for any order of events."""

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from picker.outliers.breaker import Answer, EndpointState, OutlierSettings
from picker.outliers.detector import Attempt
from picker.pool.datastore import EndpointChanges
from picker.types import FinishCause
from tests.depth import examples
from tests.support.picker.health_scene import Scene

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
