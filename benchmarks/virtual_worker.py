"""A worker in virtual time: the production scheduler and cache on the simulator's executor, with a
clock that jumps over the waiting. Single-threaded, no I/O: the same requests give the same answers
at the same times on every machine.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from worker.config import CacheConfig, SchedulerConfig, SimConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduler import Scheduler
from worker.executor.sim.runner import SimExecutor, SimLimits
from worker.types import EngineStats, FinishReason


@dataclass(slots=True)
class Served:
    """What became of one request; times are virtual seconds."""

    request_id: str
    arrival_seconds: float
    num_prompt: int
    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float | None = None
    finished_seconds: float | None = None
    reason: FinishReason | None = None
    num_cached: int = 0
    num_preemptions: int = 0


class VirtualWorker:
    """Owns one engine and its clock. Requests are submitted in order of arrival, then `run`."""

    def __init__(
        self,
        sim: SimConfig,
        limits: SchedulerConfig,
        cache: CacheConfig,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.now_seconds = 0.0
        self.busy_seconds = 0.0
        self.num_steps = 0
        self._scheduler = Scheduler(cache, limits, eos_token_ids)
        sizes = SimLimits(cache.num_blocks, cache.block_size, limits.max_num_seqs)
        self._executor = SimExecutor(sim, self._pass, sizes)
        self._core = EngineCore(self._scheduler, self._executor, lambda: self.now_seconds)
        self._coming: deque[AddRequest] = deque()
        self._served: dict[str, Served] = {}

    @property
    def stats(self) -> EngineStats:
        """The engine's own counters."""
        return self._scheduler.stats()

    def submit(self, request: AddRequest) -> None:
        """A request that arrives at its `arrival_seconds`, not before the one submitted last."""
        if self._coming and request.arrival_seconds < self._coming[-1].arrival_seconds:
            raise ValueError("requests must be submitted in order of arrival")
        self._coming.append(request)

    def run(self, until_seconds: float | None = None) -> list[Served]:
        """Go on until everything is served, or until that time; returns what ended, in order."""
        ended: list[Served] = []
        while until_seconds is None or self.now_seconds < until_seconds:
            if not self._core.has_work:
                if not self._coming:
                    break
                self.now_seconds = max(self.now_seconds, self._coming[0].arrival_seconds)
            self._let_in()
            outputs = self._core.step()
            told = outputs.outputs if outputs is not None else []
            ended += [self._served.pop(one.request_id) for one in told if self._take(one)]
        return ended

    def _pass(self, seconds: float, follows: bool) -> None:
        self.now_seconds += seconds
        self.busy_seconds += seconds
        self.num_steps += 1

    def _let_in(self) -> None:
        while self._coming and self._coming[0].arrival_seconds <= self.now_seconds:
            request = self._coming.popleft()
            self._served[request.request_id] = Served(
                request.request_id, request.arrival_seconds, len(request.prompt_token_ids)
            )
            self._core.add(request)

    def _take(self, output: RequestOutput) -> bool:
        """Keep what is told of a request; whether that was the last of it."""
        served = self._served[output.request_id]
        if output.token_ids:
            served.token_ids += output.token_ids
            if served.first_token_seconds is None:
                served.first_token_seconds = self.now_seconds
        if output.finish_reason is None:
            return False
        served.finished_seconds = self.now_seconds
        served.reason = output.finish_reason
        served.num_cached = output.num_cached_tokens
        served.num_preemptions = output.num_preemptions
        return True
