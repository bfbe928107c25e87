"""A fleet in virtual time, made of the production code without its network."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Self, TypeVar

import msgspec

from fleet.sim.fast_worker import FastWorker
from fleet.sim.flags import Event
from fleet.sim.living_worker import Answered, LivingWorker, WorkerGoneError, WorkerSettings
from fleet.sim.virtual_kv import Connect, VirtualKv
from picker.app.in_use import LoopClock
from picker.config.build import BuildOptions, build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.errors import Code, RefusedError
from picker.flowcontrol.shell.controller import FlowController
from picker.framework.disaggregation import PREFILLER_HEADER, ROLE_LABEL
from picker.framework.interfaces import KvEventConsumer
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.headers import REQUEST_ID
from picker.requestcontrol.pipeline import RequestContext, RequestPolicies
from picker.types import (
    Candidate,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    RawRequest,
    ResponseHead,
    RouteDecision,
)
from worker.engine.cache.cache_events import CacheEvent
from worker.engine.process.kv_events import EventEncoder
from worker.types import KvSource

PORT = 8000
MODEL = "sim"
SCRAPE_SECONDS = 0.05
NOTICE_SECONDS = 2.0  # until a dead worker has left the pool, as by a readiness probe
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_STREAM = MappingProxyType({"content-type": "text/event-stream"})
_LAST = b'data: {"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
T = TypeVar("T", bound="VirtualPicker")


@dataclass(frozen=True, slots=True)
class Simulation:
    """Everything but the load. The first `prefill` workers only run prompts for the others. With
    `shows_bodies` the picker sees the first piece of each response, and the last with its usage;
    those between would change nothing. Headers come with the first token, as from our workers.
    """

    workers: int = 4
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    config: str | None = None
    is_fast: bool = False
    seed: int = 0
    events: Sequence[Event] = ()
    objectives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prefill: int = 0
    shows_bodies: bool = True


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    endpoint: str
    num_prompt: int
    num_cached: int
    arrived_seconds: float
    ttft_seconds: float
    seconds: float
    token_ids: Sequence[int]
    gaps: array[float]


@dataclass(slots=True)
class _Member:
    endpoint: Endpoint
    worker: LivingWorker | FastWorker
    task: asyncio.Task[None]
    is_listed: bool = True


class Priorities:
    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = priorities

    def priority(self, objective: str) -> int | None:
        return self._priorities.get(objective)


class VirtualPicker:
    def __init__(self, simulation: Simulation, rng: Random) -> None:
        config = simulation.config
        loaded = default_config() if config is None else load_config(config.encode(), "simulation")
        # One seed has to give one outcome, block hashes included.
        self.seed = rng.getrandbits(64)
        services = Services(NoHttp(), hash_seed=self.seed, clock=LoopClock())
        options = BuildOptions(services, allow_experimental=True)
        self.assembly = build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0, options)
        self.inflight, self.datastore = InflightLoad(), Datastore(self.assembly.observers)
        policies = RequestPolicies(objectives=Priorities(simulation.objectives))
        context = RequestContext(self.datastore, self.inflight, rng, clock=now, policies=policies)
        self.gate: FlowController | None = None
        if self.assembly.flow_control is not None:
            flow = self.assembly.flow_control
            self.gate = FlowController(flow, self._candidates, now, PickerMetrics())
            self.gate.set_priorities(simulation.objectives.values())
        self.director = Director(self.assembly.gated(self.gate), context)
        plugins = [one.plugin for one in self.assembly.instances.values()]
        self.kv_consumers = [one for one in plugins if isinstance(one, KvEventConsumer)]

    def _candidates(self) -> Sequence[Candidate]:
        counts = self.inflight.counts
        return [
            Candidate(one.endpoint, one.metrics, counts.get(one.key, 0), one.last_metrics)
            for one in self.datastore.snapshot().candidates
        ]


class VirtualFleet:
    """An asynchronous context manager in which workers and picker live. Raises `ConfigError`."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        # A list, because a test bench runs several that exchange their state.
        self.pickers: list[VirtualPicker] = []
        self._rng = Random(simulation.seed)
        self._encoder = EventEncoder(simulation.worker.cache.block_size)
        self._members: dict[str, _Member] = {}  # by address, in order of their numbers
        self._connectors: dict[str, VirtualKv] = {}
        self._group: asyncio.TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._number = 0
        self._scraping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._stop)
        self.add(self.simulation.workers)
        self.pickers = [self._new_picker()]
        self._scraping = self._group.create_task(self._scrapes())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def size(self) -> int:
        return len(self._members)

    def add(self, count: int) -> None:
        if self._group is None:
            raise AssertionError("a fleet is entered first")
        for _ in range(count):
            index = len(self._members)
            host = f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}"
            endpoint = Endpoint(f"worker-{index + 1}", host, PORT, labels=self._labels(index))
            changed = partial(self._cache_changed, endpoint)
            connect: Connect | None = None
            if self.simulation.prefill:
                connect = partial(VirtualKv, endpoint.name, self._connectors)
            worker: LivingWorker | FastWorker = (
                FastWorker(self.simulation.worker, changed, now, connect)
                if self.simulation.is_fast
                else LivingWorker(self.simulation.worker, changed, connect)
            )
            task = self._group.create_task(worker.run(), name=endpoint.name)
            self._members[endpoint.host_port] = _Member(endpoint, worker, task)
        self._pool_changed()

    def _labels(self, index: int) -> Mapping[str, str]:
        if not self.simulation.prefill:
            return {}
        return {ROLE_LABEL: "prefill" if index < self.simulation.prefill else "decode"}

    def kill(self, number: int) -> None:
        """Kill a worker with everything it has in flight. It stays in the pool for
        `NOTICE_SECONDS`, during which the proxy finds its port closed and tries the picker's next
        endpoint.
        """
        member = self._member(number)
        member.worker.die()
        member.task.cancel()
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self.drain, number)

    def drain(self, number: int) -> None:
        """Take a worker out of the pool; it finishes its requests."""
        self._member(number).is_listed = False
        self._pool_changed()

    def slow(self, number: int, factor: float) -> None:
        self._member(number).worker.slowness = factor

    async def ask(
        self,
        prompt: Sequence[int],
        num_output: int,
        headers: Mapping[str, str] = _NO_HEADERS,
        picker: int = 0,
    ) -> ServedPrompt:
        """Serve one request. Raises `RefusedError`, and `WorkerGoneError` when its worker dies."""
        room = self.simulation.worker.cache.num_blocks * self.simulation.worker.cache.block_size
        if len(prompt) + num_output > room:
            raise RefusedError(Code.BAD_REQUEST, f"longer than the {room} tokens of a KV cache")
        self._number += 1
        name = f"request-{self._number}"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_output, "stream": True}
        headers = {":path": "/v1/completions", REQUEST_ID: name, **headers}
        exchange = self.pickers[picker].director.begin()
        cause, status = FinishCause.CLIENT_GONE, None
        address: str | None = None
        times, shows_bodies = [now()], self.simulation.shows_bodies
        try:
            decision = await exchange.route(RawRequest(headers, msgspec.json.encode(body)))
            await self._proxy_overhead()
            address = self._connected(decision.destination)
            kv_source = await self._prefilled(decision, name, prompt)
            response = decision.response

            def first() -> None:
                times.append(now())
                if response is not None:
                    head = ResponseHead(
                        200,
                        _STREAM,
                        address,
                        shows_body=shows_bodies,
                        shows_first_piece=shows_bodies,
                    )
                    response.head(head)
                if response is not None and shows_bodies:
                    response.body(b"data: {}\n\n", is_last=False)

            worker = self._members[address].worker
            answered = await worker.serve(name, list(prompt), num_output, first, kv_source)
            if response is not None and shows_bodies:
                response.body(_LAST % (len(prompt), len(answered.token_ids)), is_last=True)
            cause, status = FinishCause.COMPLETED, 200
        except RefusedError as refusal:
            cause, status = FinishCause.REFUSED, refusal.status
            raise
        except WorkerGoneError:
            # The proxy answers for an endpoint that sent nothing, and cuts off one that did.
            cause = FinishCause.COMPLETED if len(times) == 1 else FinishCause.RESET
            status = 503
            raise
        finally:
            exchange.finish(cause, status, address)
        return _served(address, len(prompt), times, answered)

    async def _proxy_overhead(self) -> None:
        if overhead := self.simulation.worker.overhead_seconds:
            await asyncio.sleep(overhead)

    async def _prefilled(
        self, decision: RouteDecision, name: str, prompt: Sequence[int]
    ) -> KvSource | None:
        """Run the prompt as a sidecar does, if the picker names a prefill worker that is alive."""
        address = dict(decision.set_headers).get(PREFILLER_HEADER)
        if address is None:
            return None
        await self._proxy_overhead()
        worker = self._members[address].worker
        try:
            answered = await worker.serve(name, list(prompt), 1, lambda: None, keeps_kv=True)
        except WorkerGoneError:
            return None
        return answered.exported

    def _connected(self, destination: str) -> str:
        for address in destination.split(","):
            if not self._members[address.strip()].worker.is_dead:
                return address.strip()
        raise WorkerGoneError

    def _member(self, number: int) -> _Member:
        return list(self._members.values())[number - 1]

    def _new_picker(self) -> VirtualPicker:
        return self._started(VirtualPicker(self.simulation, self._rng))

    def _started(self, picker: T) -> T:
        picker.datastore.set_endpoints(self._endpoints())
        self._scrape(picker)
        return picker

    def _pool_changed(self) -> None:
        for picker in self.pickers:
            self._started(picker)

    def _stop(self) -> None:
        tasks = [one.task for one in self._members.values()]
        for task in tasks if self._scraping is None else (self._scraping, *tasks):
            task.cancel()

    async def _scrapes(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_SECONDS)
            for picker in self.pickers:
                self._scrape(picker)

    def _scrape(self, picker: VirtualPicker) -> None:
        cache = self.simulation.worker.cache
        for member in self._members.values():
            # A dead worker answers no scrape: its last numbers grow old.
            if not member.is_listed or member.worker.is_dead:
                continue
            stats = member.worker.stats
            metrics = EndpointMetrics(
                waiting_requests=stats.num_waiting,
                running_requests=stats.num_running,
                kv_cache_usage=stats.kv_cache_usage,
                block_size_tokens=cache.block_size,
                num_kv_blocks=cache.num_blocks,
                updated_at_seconds=now(),
                interval_seconds=SCRAPE_SECONDS,
            )
            picker.datastore.update_metrics(member.endpoint.key, metrics)
        if picker.gate is not None:
            picker.gate.pool_changed()

    def _cache_changed(self, endpoint: Endpoint, events: Sequence[CacheEvent]) -> None:
        payload = self._encoder.encode(events, now())
        for picker in self.pickers:
            for consumer in picker.kv_consumers:
                consumer.kv_events(endpoint.key, f"kv@{endpoint.host_port}@{MODEL}", payload)

    def _endpoints(self) -> list[Endpoint]:
        return [one.endpoint for one in self._members.values() if one.is_listed]


def _served(
    address: str, num_prompt: int, times: Sequence[float], answered: Answered
) -> ServedPrompt:
    arrived, first = times[0], times[-1]
    cached, token_ids, gaps = answered.num_cached, answered.token_ids, answered.gaps
    took = now() - arrived
    return ServedPrompt(
        address, num_prompt, cached, arrived, first - arrived, took, token_ids, gaps
    )


def now() -> float:
    return asyncio.get_running_loop().time()
