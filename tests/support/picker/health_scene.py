"""A memory of endpoints' health with a pool, a clock, and a recording watcher."""

from dataclasses import dataclass, field
from random import Random

from picker.outliers.breaker import Answer, EndpointState, OutlierSettings
from picker.outliers.detector import (
    Attempt,
    EndpointHealthView,
    OutlierDetector,
    OutlierWatcher,
    ProbeResult,
)
from picker.pool.datastore import EndpointChanges
from picker.types import Candidate, Endpoint, FinishCause


def endpoint(number: int) -> Endpoint:
    return Endpoint(f"pod-{number}", f"10.0.0.{number + 1}", 8000)


@dataclass
class RecordingWatcher(OutlierWatcher):
    ejections: list[tuple[str, int]] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)
    returned_keys: list[str] = field(default_factory=list)
    num_ejected: int = 0

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        self.ejections.append((key, failures))

    def probed(self, key: str, result: ProbeResult) -> None:
        self.probes.append(result)

    def returned(self, key: str) -> None:
        self.returned_keys.append(key)

    def counted(self, num_ejected: int) -> None:
        self.num_ejected = num_ejected


class Scene:
    def __init__(
        self, size: int, settings: OutlierSettings | None = None, rng: Random | None = None
    ) -> None:
        self.now = 0.0
        self.watcher = RecordingWatcher()
        self.memory = OutlierDetector(settings, self.watcher, rng)
        self.pool = [endpoint(number) for number in range(size)]
        self.memory.pool_changed(EndpointChanges(tuple(self.pool), ()))

    def candidates(self, *numbers: int) -> list[Candidate]:
        return [Candidate(self.pool[n]) for n in numbers or range(len(self.pool))]

    def usable(self, *numbers: int) -> list[int]:
        usable = self.memory.usable(self.candidates(*numbers), self.now)
        return [self.pool.index(one.endpoint) for one in usable]

    def probe(self, *numbers: int) -> int | None:
        due = self.memory.probe(self.candidates(*numbers), self.now)
        return None if due is None else self.pool.index(due.endpoint)

    def send(self, number: int, is_bodyless: bool = False) -> Attempt:
        return self.memory.left(self.pool[number], self.now, is_bodyless)

    def answers(
        self, number: int, status: int, served_by: str | None = None, is_bodyless: bool = False
    ) -> None:
        attempt, answer = self.send(number, is_bodyless), Answer(status, served_by)
        attempt.responded(answer, self.now)
        attempt.ended(FinishCause.COMPLETED, answer, self.now)

    def view(self, number: int) -> EndpointHealthView:
        clean = EndpointHealthView(EndpointState.HEALTHY, 0, 0)
        return self.memory.views(self.now).get(self.pool[number].key, clean)

    def state(self, number: int) -> EndpointState:
        return self.view(number).state
