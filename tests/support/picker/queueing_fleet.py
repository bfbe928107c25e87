"""Workers as queues, event by event, with the latency law of the simulator's linear model.

Between two events all steps take the same time, so none has to be simulated by itself: a day of
requests to a dozen workers takes a second or two.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from picker.planner.capacity import LatencyObjective, WorkerCapacity


@dataclass(slots=True)
class Ask:
    at: float
    prompt: int
    output: int
    first_at: float = 0.0
    ended_at: float = 0.0

    def is_within(self, objective: LatencyObjective) -> bool:
        ttft, itl = objective.ttft_seconds, objective.itl_seconds
        if ttft is not None and self.first_at - self.at > ttft:
            return False
        mean = (self.ended_at - self.first_at) / max(1, self.output - 1)
        return itl is None or mean <= itl


@dataclass(slots=True)
class _Worker:
    ready_at: float
    begun_at: float
    prompts: deque[Ask] = field(default_factory=deque)
    left: float = 0.0  # tokens of the first prompt
    decoding: list[tuple[float, int, Ask]] = field(default_factory=list)  # by the step of their end
    steps: float = 0.0  # so far
    now: float = 0.0
    version: int = 0
    is_leaving: bool = False

    @property
    def work(self) -> int:
        return len(self.prompts) * 4 + len(self.decoding)


class QueueingFleet:
    def __init__(self, worker: WorkerCapacity, startup_seconds: float, replicas: int) -> None:
        self._law, self._startup = worker, startup_seconds
        self._workers = [_Worker(0.0, 0.0) for _ in range(replicas)]
        self._events: list[tuple[float, int, _Worker, int]] = []
        self._order = count()
        self._unrouted: deque[Ask] = deque()
        self.now = 0.0
        self.replica_seconds = 0.0
        self.served: list[Ask] = []

    @property
    def replicas(self) -> int:
        return sum(not one.is_leaving for one in self._workers)

    @property
    def waiting(self) -> int:
        return len(self._unrouted) + sum(max(0, len(one.prompts) - 1) for one in self._workers)

    @property
    def running(self) -> int:
        return sum(len(one.decoding) + bool(one.prompts) for one in self._workers)

    def scale(self, replicas: int) -> None:
        staying = [one for one in self._workers if not one.is_leaving]
        for _ in range(replicas - len(staying)):
            self._workers.append(_Worker(self.now + self._startup, self.now))
        for one in staying[replicas:]:
            one.is_leaving = True
            self._retire(one)

    def arrive(self, ask: Ask) -> None:
        ready = [one for one in self._workers if one.ready_at <= self.now and not one.is_leaving]
        if not ready:
            self._unrouted.append(ask)
            return
        worker = min(ready, key=lambda one: one.work)
        self._advance(worker)
        worker.prompts.append(ask)
        if len(worker.prompts) == 1:
            worker.left = float(ask.prompt)
        self._expect(worker)

    def serve(self, asks: Iterable[Ask], until: float) -> None:
        for ask in asks:
            self.run_until(ask.at)
            self.arrive(ask)
        self.run_until(until)

    def run_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            at, _, worker, version = heapq.heappop(self._events)
            if version == worker.version:
                self.now = at
                self._advance(worker)
                self._settle(worker)
                self._expect(worker)
        self.now = until
        while self._unrouted and any(
            one.ready_at <= self.now and not one.is_leaving for one in self._workers
        ):
            self.arrive(self._unrouted.popleft())

    def _rates(self, worker: _Worker) -> tuple[float, float]:
        law, num = self._law, len(worker.decoding)
        seconds = law.step_overhead_seconds
        if num:
            seconds += law.decode_base_seconds + law.decode_per_sequence_seconds * num
        if not worker.prompts:
            return (1 / seconds if num else 0.0), 0.0
        chunk = min(law.max_batched_tokens, worker.prompts[0].prompt)
        seconds += chunk / law.prefill_tokens_per_second
        return 1 / seconds, chunk / seconds

    def _advance(self, worker: _Worker) -> None:
        steps, tokens = self._rates(worker)
        passed = self.now - worker.now
        worker.steps += steps * passed
        worker.left -= tokens * passed
        worker.now = self.now

    def _settle(self, worker: _Worker) -> None:
        slack = 1e-6
        if worker.prompts and worker.left <= slack * worker.prompts[0].prompt:
            ask = worker.prompts.popleft()
            ask.first_at = self.now
            if ask.output > 1:
                end = worker.steps + ask.output - 1
                heapq.heappush(worker.decoding, (end, next(self._order), ask))
            else:
                self._end(ask)
            if worker.prompts:
                worker.left = float(worker.prompts[0].prompt)
        while worker.decoding and worker.decoding[0][0] <= worker.steps + slack:
            self._end(heapq.heappop(worker.decoding)[2])
        self._retire(worker)

    def _end(self, ask: Ask) -> None:
        ask.ended_at = self.now
        self.served.append(ask)

    def _retire(self, worker: _Worker) -> None:
        """A retiring worker is paid for until its last request ends."""
        if worker.is_leaving and not worker.prompts and not worker.decoding:
            self._workers.remove(worker)
            self.replica_seconds += self.now - worker.begun_at

    def _expect(self, worker: _Worker) -> None:
        worker.version += 1
        steps, tokens = self._rates(worker)
        due = [worker.left / tokens] if worker.prompts else []
        due += [(worker.decoding[0][0] - worker.steps) / steps] if worker.decoding else []
        if due:
            at = self.now + max(0.0, min(due))
            event = (at, next(self._order), worker, worker.version)
            heapq.heappush(self._events, event)

    def total_replica_seconds(self) -> float:
        return self.replica_seconds + sum(self.now - one.begun_at for one in self._workers)
