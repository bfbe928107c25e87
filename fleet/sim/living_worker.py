"""The production scheduler and cache on the simulator's executor and the event loop's clock."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fleet.sim.virtual_kv import Connect, VirtualKv
from worker.config import CacheConfig, SchedulerConfig
from worker.engine.cache.cache_events import CacheEvent
from worker.engine.core import EngineCore
from worker.engine.features.remote_kv import RemoteKv
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.pipeline import InlinePipeline
from worker.engine.scheduling.scheduler import Scheduler
from worker.sim.config import SimConfig
from worker.sim.runner import SimExecutor, SimLimits
from worker.types import EngineStats, KvSource, SamplingParams


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The speed and capacity of a simulated worker. With `overlaps` a step is scheduled when the
    previous one begins, as by an engine with asynchronous scheduling: a request waits one step
    longer. A prompt has `template_tokens` more than its text, and reaches the worker
    `overhead_seconds` after its client sent it.
    """

    sim: SimConfig = field(default_factory=SimConfig)
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(4096, 16))
    overlaps: bool = False
    template_tokens: int = 0
    overhead_seconds: float = 0.0


class WorkerGoneError(Exception): ...


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer. `gaps` are seconds between tokens, `exported` is where the prompt's KV is."""

    num_cached: int
    token_ids: Sequence[int]
    gaps: array[float]
    exported: KvSource | None = None


class LivingWorker:
    """Owns one engine, which works while `run` runs; requests may arrive at any time.

    `publish` gets the changes of its prefix cache, with each step's outputs, if the settings record
    them. With `connect`, KV moves between this worker and others.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        publish: Callable[[Sequence[CacheEvent]], None] = lambda _: None,
        connect: Connect | None = None,
    ) -> None:
        self._publish = publish
        limits = SimLimits(
            settings.cache.num_blocks, settings.cache.block_size, settings.limits.max_num_seqs
        )
        self._wakened = asyncio.Event()
        executor = SimExecutor(settings.sim, self._pass, limits, moves_kv=connect is not None)
        self._kv: VirtualKv | None = None
        remote: RemoteKv | None = None
        if connect is not None:
            self._kv = connect(executor.transfer_seconds, self._wakened.set)
            remote = RemoteKv(self._kv, executor.read_kv, settings.cache.block_size)
        self._scheduler = Scheduler(settings.cache, settings.limits, (), [remote])
        pipeline = InlinePipeline(executor, 2 if settings.overlaps else 1)
        self._core = EngineCore(self._scheduler, executor, self._now, pipeline=pipeline)
        self._step_seconds = 0.0
        self._listeners: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self.slowness = 1.0  # a factor on the time of steps
        self.is_dead = False

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    @property
    def num_requests(self) -> int:
        return len(self._listeners)

    async def run(self) -> None:
        while True:
            if not self._core.has_work or self._core.is_compiling:
                self._wakened.clear()
                await self._wakened.wait()
            outputs = self._core.step()
            seconds, self._step_seconds = self._step_seconds, 0.0
            await asyncio.sleep(seconds)  # the outputs of a step are known at its end
            if events := self._core.take_events():
                self._publish(events)
            for output in outputs.outputs if outputs is not None else ():
                listener = self._listeners.get(output.request_id)
                if listener is not None:
                    listener.put_nowait(output)

    async def answer(
        self,
        request_id: str,
        prompt: list[int],
        num_output: int,
        kv_source: KvSource | None = None,
        keeps_kv: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs; closing the generator aborts the request. Raises `WorkerGoneError`."""
        if self.is_dead:
            raise WorkerGoneError
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._listeners[request_id] = outputs
        params = SamplingParams(num_output, ignore_eos=True)
        self._core.add(
            AddRequest(
                request_id, prompt, params, self._now(), kv_source=kv_source, keeps_kv=keeps_kv
            )
        )
        self._wakened.set()
        try:
            while True:
                output = await outputs.get()
                if output is None:
                    raise WorkerGoneError
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._listeners[request_id]
            self._core.abort([request_id])
            self._wakened.set()

    async def serve(
        self,
        request_id: str,
        prompt: list[int],
        num_output: int,
        first: Callable[[], None],
        kv_source: KvSource | None = None,
        keeps_kv: bool = False,
    ) -> Answered:
        """Compute the whole answer; call `first` at its first token. Raises `WorkerGoneError`."""
        cached, token_ids, gaps, last = 0, list[int](), array("d"), 0.0
        exported: KvSource | None = None
        answer = self.answer(request_id, prompt, num_output, kv_source, keeps_kv)
        async with aclosing(answer) as outputs:
            async for output in outputs:
                cached = max(cached, output.num_cached_tokens)
                if output.kv_offer is not None:
                    exported = output.kv_offer.source
                if not output.token_ids:
                    continue
                if not token_ids:
                    first()
                else:
                    gaps.append(self._now() - last)
                token_ids += output.token_ids
                last = self._now()
        return Answered(cached, token_ids, gaps, exported)

    def die(self) -> None:
        self.is_dead = True
        if self._kv is not None:
            self._kv.close()
        for listener in self._listeners.values():
            listener.put_nowait(None)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the scheduler contradicts its blocks."""
        self._scheduler.check_integrity()

    def _pass(self, seconds: float, follows: bool) -> None:
        self._step_seconds += seconds * self.slowness

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
