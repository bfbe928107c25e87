"""Several pickers over one pool in virtual time, all made of the production cores.

Every replica has its own director, configuration and view of the pool, and tells the others what it
does by the production exchange; only the wires are left out, which here may lose messages, be late
or be cut.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Self

import msgspec

from fleet.sim.fast_worker import FastWorker
from fleet.sim.living_worker import Answered, LivingWorker, WorkerGoneError, WorkerSettings
from fleet.sim.virtual_kv import Connect, VirtualKv
from picker.app.in_use import LoopClock, pipeline_of
from picker.config.build import BuildOptions, build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.errors import Code, RefusedError
from picker.flowcontrol.shell.controller import FlowController
from picker.framework.disaggregation import PREFILLER_HEADER, ROLE_LABEL
from picker.framework.interfaces import KvEventConsumer
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.outbox import Cursor
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
NOTICE_SECONDS = 2.0  # until a dead worker has left the pool, as by a readiness probe
_FOLLOWS_SECONDS = 1e-9
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_STREAM = MappingProxyType({"content-type": "text/event-stream"})
_LAST = b'data: {"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'


@dataclass(frozen=True, slots=True)
class ReplicasSettings:
    """`replicas` pickers over `workers`; `config` None is the built-in configuration, `objectives`
    gives names priorities. Without a picker (0) requests go to the workers in turn. Of the workers
    the first `prefill` only run prompts for the others; 0: every worker does both.

    With `shares` they tell each other what they do, every `interval_seconds`, over wires that take
    `delay_seconds` and lose the share `loss` of all messages.
    """

    replicas: int = 2
    shares: bool = True
    workers: int = 4
    prefill: int = 0
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    config: str | None = None
    objectives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    scrape_seconds: float = 0.05
    interval_seconds: float = 0.05
    delay_seconds: float = 0.001
    loss: float = 0.0
    seed: int = 0
    is_fast: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a prompt: by whom it was decided and served, what was found cached, seconds
    from its arrival to the first token and to the last, the answer, and the seconds between tokens.
    """

    replica: int
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
    """A worker and its task; `is_listed` while the pool has it."""

    endpoint: Endpoint
    worker: LivingWorker | FastWorker
    task: asyncio.Task[None]
    is_listed: bool = True


class Priorities:
    """An `ObjectiveSource` of fixed names."""

    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = priorities

    def priority(self, objective: str) -> int | None:
        return self._priorities.get(objective)


class VirtualReplica:
    """One picker. Owns its view of the pool and, with `shares`, its side of the exchange."""

    def __init__(self, settings: ReplicasSettings, rng: Random, now_seconds: float) -> None:
        config = settings.config
        loaded = default_config() if config is None else load_config(config.encode(), "simulation")
        seed = rng.getrandbits(64)
        services = Services(NoHttp(), hash_seed=seed, clock=LoopClock())
        options = BuildOptions(services, allow_experimental=True)
        self.assembly = build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0, options)
        self.inflight, self.datastore = InflightLoad(), Datastore(self.assembly.observers)
        policies = RequestPolicies(objectives=Priorities(settings.objectives))
        context = RequestContext(self.datastore, self.inflight, rng, clock=_now, policies=policies)
        self.gate: FlowController | None = None
        if self.assembly.flow_control is not None:
            flow = self.assembly.flow_control
            self.gate = FlowController(flow, self._candidates, _now, PickerMetrics())
            self.gate.set_priorities(settings.objectives.values())
        self.director = Director(pipeline_of(self.assembly, self.gate), context)
        plugins = [one.plugin for one in self.assembly.instances.values()]
        self.kv_consumers = [one for one in plugins if isinstance(one, KvEventConsumer)]
        self.exchange: PeerExchange | None = None
        self.cursors: dict[bytes, Cursor] = {}  # by the replica that is told
        self.messages_sent = 0
        if settings.shares:
            knowledge = Knowledge(self.datastore, self.inflight)
            settings_ = ExchangeSettings("simulation", seed)
            self.exchange = PeerExchange(
                settings_, knowledge, now_seconds, now_seconds, rng.randbytes(16)
            )
            self.exchange.use({name: one.plugin for name, one in self.assembly.instances.items()})

    def _candidates(self) -> Sequence[Candidate]:
        counts = self.inflight.counts
        return [
            Candidate(one.endpoint, one.metrics, counts.get(one.key, 0), one.last_metrics)
            for one in self.datastore.snapshot().candidates
        ]


class VirtualReplicas:
    """Owns the pickers and their workers; an asynchronous context manager in which they live."""

    def __init__(self, settings: ReplicasSettings) -> None:
        """Raises `ConfigError` for a configuration that cannot be used."""
        self._settings = settings
        self._rng = Random(settings.seed)
        self._wire = Random(settings.seed + 1)
        self.is_cut = False  # nothing passes between replicas
        self.replicas: list[VirtualReplica] = []
        self._encoder = EventEncoder(settings.worker.cache.block_size)
        self._members: dict[str, _Member] = {}  # by address, in order of their numbers
        self._connectors: dict[str, VirtualKv] = {}
        self._group: asyncio.TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._stop)
        self.add(self._settings.workers)
        self.replicas = [self._begun() for _ in range(self._settings.replicas)]
        self._tasks = [
            self._group.create_task(self._scrapes()),
            self._group.create_task(self._rounds()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def restart(self, index: int) -> None:
        """A replica is killed and another one begins in its place, which knows nothing. What the
        killed one had under way goes on at the workers.
        """
        self.replicas[index] = self._begun()

    @property
    def size(self) -> int:
        """Workers that ever were, numbered from 1."""
        return len(self._members)

    def add(self, count: int) -> None:
        """So many workers more, which have nothing cached."""
        if self._group is None:
            raise AssertionError("a fleet is entered first")
        for _ in range(count):
            index = len(self._members)
            host = f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}"
            endpoint = Endpoint(f"worker-{index + 1}", host, PORT, labels=self._labels(index))
            changed = partial(self._cache_changed, endpoint)
            connect: Connect | None = None
            if self._settings.prefill:
                connect = partial(VirtualKv, endpoint.name, self._connectors)
            worker: LivingWorker | FastWorker = (
                FastWorker(self._settings.worker, changed, _now, connect)
                if self._settings.is_fast
                else LivingWorker(self._settings.worker, changed, connect)
            )
            task = self._group.create_task(worker.run(), name=endpoint.name)
            self._members[endpoint.host_port] = _Member(endpoint, worker, task)
        self._pool_changed()

    def _labels(self, index: int) -> Mapping[str, str]:
        if not self._settings.prefill:
            return {}
        return {ROLE_LABEL: "prefill" if index < self._settings.prefill else "decode"}

    def kill(self, number: int) -> None:
        """A worker dies with all that it has under way. The pool has it for a while yet, in which
        the proxy finds it closed and goes to the next of the picker's endpoints, if there is one.
        """
        member = self._member(number)
        member.worker.die()
        member.task.cancel()
        asyncio.get_running_loop().call_later(NOTICE_SECONDS, self.drain, number)

    def drain(self, number: int) -> None:
        """A worker leaves the pool, and finishes what it has."""
        self._member(number).is_listed = False
        self._pool_changed()

    def slow(self, number: int, factor: float) -> None:
        """Steps of a worker take so many times as long from now on."""
        self._member(number).worker.slowness = factor

    async def ask(
        self,
        replica: int,
        prompt: Sequence[int],
        num_output: int,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> Served:
        """One request, with these headers besides its path and id, from its arrival to its end.
        Raises `RefusedError` as the picker does, or as a worker whose KV cache has no room for it,
        and `WorkerGoneError` when its worker dies, or all that the picker names are dead.
        """
        room = self._settings.worker.cache.num_blocks * self._settings.worker.cache.block_size
        if len(prompt) + num_output > room:
            raise RefusedError(Code.BAD_REQUEST, f"longer than the {room} tokens of a KV cache")
        self._number += 1
        name = f"request-{self._number}"
        picker = self.replicas[replica]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_output, "stream": True}
        headers = {":path": "/v1/completions", REQUEST_ID: name, **headers}
        exchange = picker.director.begin()
        cause, status = FinishCause.CLIENT_GONE, None
        address: str | None = None
        times = [_now()]
        try:
            decision = await exchange.route(RawRequest(headers, msgspec.json.encode(body)))
            await self._on_the_way()
            address = self._connected(decision.destination)
            kv_source = await self._prefilled(decision, name, prompt)
            response = decision.response

            def first() -> None:
                times.append(_now())
                if response is not None:
                    response.head(ResponseHead(200, _STREAM, served_by=address))
                    response.body(b"data: {}\n\n", is_last=False)

            worker = self._members[address].worker
            answered = await worker.serve(name, list(prompt), num_output, first, kv_source)
            if response is not None:
                response.body(_LAST % (len(prompt), len(answered.token_ids)), is_last=True)
            cause, status = FinishCause.COMPLETED, 200
        except RefusedError as refusal:
            cause, status = FinishCause.REFUSED, refusal.status
            raise
        except WorkerGoneError:
            # The proxy answers for an endpoint that said nothing, and cuts off one that did.
            cause = FinishCause.COMPLETED if len(times) == 1 else FinishCause.RESET
            status = 503
            raise
        finally:
            exchange.finish(cause, status, address)
        return _served(replica, address, len(prompt), times, answered)

    async def _on_the_way(self) -> None:
        if overhead := self._settings.worker.overhead_seconds:
            await asyncio.sleep(overhead)

    async def _prefilled(
        self, decision: RouteDecision, name: str, prompt: Sequence[int]
    ) -> KvSource | None:
        """What a sidecar does first: have the prompt run by the worker that the picker names. None:
        it names none, or that one dies.
        """
        address = dict(decision.set_headers).get(PREFILLER_HEADER)
        if address is None:
            return None
        await self._on_the_way()
        worker = self._members[address].worker
        try:
            answered = await worker.serve(name, list(prompt), 1, lambda: None, keeps_kv=True)
        except WorkerGoneError:
            return None
        return answered.kept

    def _connected(self, destination: str) -> str:
        """The first of the addresses where somebody listens."""
        for address in destination.split(","):
            if not self._members[address.strip()].worker.is_dead:
                return address.strip()
        raise WorkerGoneError

    def _member(self, number: int) -> _Member:
        return list(self._members.values())[number - 1]

    # What goes on beside the requests

    def _begun(self) -> VirtualReplica:
        replica = VirtualReplica(self._settings, self._rng, _now())
        replica.datastore.set_endpoints(self._endpoints())
        self._scrape(replica)
        return replica

    def _pool_changed(self) -> None:
        for replica in self.replicas:
            replica.datastore.set_endpoints(self._endpoints())
            self._scrape(replica)

    def _stop(self) -> None:
        for task in (*self._tasks, *(one.task for one in self._members.values())):
            task.cancel()

    async def _scrapes(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scrape_seconds)
            for replica in self.replicas:
                self._scrape(replica)

    def _scrape(self, replica: VirtualReplica) -> None:
        cache = self._settings.worker.cache
        for member in self._members.values():
            if not member.is_listed or member.worker.is_dead:
                continue
            stats = member.worker.stats
            metrics = EndpointMetrics(
                waiting_requests=stats.num_waiting,
                running_requests=stats.num_running,
                kv_cache_usage=stats.kv_cache_usage,
                block_size_tokens=cache.block_size,
                num_kv_blocks=cache.num_blocks,
                updated_at_seconds=_now(),
                interval_seconds=self._settings.scrape_seconds,
            )
            replica.datastore.update_metrics(member.endpoint.key, metrics)
        if replica.gate is not None:
            replica.gate.pool_changed()

    def _cache_changed(self, endpoint: Endpoint, events: Sequence[CacheEvent]) -> None:
        payload = self._encoder.encode(events, _now())
        for replica in self.replicas:
            for consumer in replica.kv_consumers:
                consumer.kv_events(endpoint.key, f"kv@{endpoint.host_port}@{MODEL}", payload)

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_seconds)
            for one in self.replicas:
                if one.exchange is not None:
                    one.exchange.tick(_now())
            for one in self.replicas:
                for other in self.replicas:
                    if one is not other and not self.is_cut:
                        self._tell(one, other)

    def _tell(self, one: VirtualReplica, other: VirtualReplica) -> None:
        """Have `one` tell `other` all that there is to tell now."""
        if one.exchange is None or other.exchange is None:
            return
        there, now = other.exchange.replica_id, _now()
        if there not in one.cursors:
            _, answer = other.exchange.greeted(one.exchange.hello(now), now)
            _, one.cursors[there] = one.exchange.welcomed(answer, now)
        while (message := one.exchange.next(one.cursors[there], now)) is not None:
            one.messages_sent += 1
            if self._wire.random() >= self._settings.loss:
                # One after the other, as over a connection.
                arrives = self._settings.delay_seconds + one.messages_sent * _FOLLOWS_SECONDS
                asyncio.get_running_loop().call_later(arrives, _hear, other, one, message)

    def _endpoints(self) -> list[Endpoint]:
        return [one.endpoint for one in self._members.values() if one.is_listed]


def _served(
    replica: int, address: str, num_prompt: int, times: Sequence[float], answered: Answered
) -> Served:
    """`times` are when it came and when its first token did."""
    arrived, first = times[0], times[-1]
    cached, token_ids, gaps = answered.num_cached, answered.token_ids, answered.gaps
    took = _now() - arrived
    return Served(
        replica, address, num_prompt, cached, arrived, first - arrived, took, token_ids, gaps
    )


def _hear(replica: VirtualReplica, peer: VirtualReplica, message: bytes) -> None:
    if replica.exchange is not None and peer.exchange is not None:
        replica.exchange.receive(peer.exchange.replica_id, message, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
