"""A pool under load in virtual time: arrivals, answers after a while, and the health memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from health_scene import Scene

from picker.outliers.breaker import Answer, OutlierSettings
from picker.outliers.detector import Attempt
from picker.types import FinishCause

Status = Callable[[int, float], int]  # of an endpoint's answers, by its number and the time


@dataclass(frozen=True)
class Load:
    """How requests come: so many a second, each answered within these seconds."""

    per_second: float = 200.0
    fastest_seconds: float = 0.005
    slowest_seconds: float = 0.3


@dataclass
class Loop:
    """Runs a pool. `received` is when each endpoint was sent something."""

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
        """Requests for so long, all of them answered."""
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
