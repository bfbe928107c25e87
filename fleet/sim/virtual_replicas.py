"""Several pickers over one pool in virtual time, all made of the production cores.

Every replica has its own director, configuration and view of the pool, and tells the others what it
does by the production exchange; only the wires are left out, which here may lose messages, be late
or be cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Self

from fleet.sim.living_worker import LivingWorker, WorkerSettings
from picker.app.in_use import pipeline_of
from picker.config.build import BuildOptions, build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.errors import RefusedError
from picker.framework.interfaces import KvEventConsumer
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.exchange import ExchangeSettings, PeerExchange
from picker.peers.knowledge import Knowledge
from picker.peers.outbox import Cursor
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.headers import OBJECTIVE, REQUEST_ID
from picker.requestcontrol.pipeline import RequestContext, RequestPolicies
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest, ResponseHead
from worker.engine.cache_events import CacheEvent
from worker.engine.kv_events import EventEncoder

PORT = 8000
MODEL = "sim"
_FOLLOWS_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicasSettings:
    """`replicas` pickers over `workers`; `config` None is the built-in configuration, `objectives`
    gives names priorities. Without a picker (0) requests go to the workers in turn.

    With `shares` they tell each other what they do, every `interval_seconds`, over wires that take
    `delay_seconds` and lose the share `loss` of all messages.
    """

    replicas: int = 2
    shares: bool = True
    workers: int = 4
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    config: str | None = None
    objectives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    scrape_seconds: float = 0.05
    interval_seconds: float = 0.05
    delay_seconds: float = 0.001
    loss: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a prompt: by whom it was decided and served, what was found cached, seconds
    from its arrival to the first token and to the last, and the answer.
    """

    replica: int
    endpoint: str
    num_prompt: int
    num_cached: int
    arrived_seconds: float
    ttft_seconds: float
    seconds: float
    token_ids: Sequence[int]


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
        options = BuildOptions(Services(NoHttp(), hash_seed=seed), allow_experimental=True)
        self.assembly = build(loaded, builtin_plugins(), PickerMetrics(), lambda: 0.0, options)
        self.inflight, self.datastore = InflightLoad(), Datastore(self.assembly.observers)
        policies = RequestPolicies(objectives=Priorities(settings.objectives))
        context = RequestContext(self.datastore, self.inflight, rng, clock=_now, policies=policies)
        self.director = Director(pipeline_of(self.assembly), context)
        plugins = [one.plugin for one in self.assembly.instances.values()]
        self.kv_consumers = [one for one in plugins if isinstance(one, KvEventConsumer)]
        self.exchange: PeerExchange | None = None
        self.cursors: dict[bytes, Cursor] = {}  # by the replica that is told
        self.bytes_sent = self.messages_sent = 0
        if settings.shares:
            knowledge = Knowledge(self.datastore, self.inflight)
            settings_ = ExchangeSettings("simulation", seed)
            self.exchange = PeerExchange(
                settings_, knowledge, now_seconds, now_seconds, rng.randbytes(16)
            )
            self.exchange.use({name: one.plugin for name, one in self.assembly.instances.items()})


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
        addresses = [
            f"10.0.{index // 250}.{index % 250 + 1}:{PORT}" for index in range(settings.workers)
        ]
        self._workers = {
            address: LivingWorker(settings.worker, partial(self._cache_changed, index))
            for index, address in enumerate(addresses)
        }
        self._stack = AsyncExitStack()
        self._number = 0

    async def __aenter__(self) -> Self:
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(one.run()) for one in self._workers.values()]
        self.replicas = [self._begun() for _ in range(self._settings.replicas)]
        tasks.append(group.create_task(self._scrapes()))
        tasks.append(group.create_task(self._rounds()))
        self._stack.callback(lambda: [task.cancel() for task in tasks])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def restart(self, index: int) -> None:
        """A replica is killed and another one begins in its place, which knows nothing. What the
        killed one had under way goes on at the workers.
        """
        self.replicas[index] = self._begun()

    @property
    def loads(self) -> Sequence[int]:
        """Requests at each worker now, those that wait included."""
        return [one.num_requests for one in self._workers.values()]

    async def ask(
        self, replica: int, prompt: Sequence[int], num_output: int, objective: str = ""
    ) -> Served:
        """One request from its arrival to its end. Raises `RefusedError` as the picker does."""
        arrived = _now()
        self._number += 1
        name = f"request-{self._number}"
        if not self.replicas:
            return await self._in_turn(name, prompt, num_output)
        picker = self.replicas[replica]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_output}
        headers = {":path": "/v1/completions", REQUEST_ID: name}
        if objective:
            headers[OBJECTIVE[0]] = objective
        exchange = picker.director.begin()
        cause, status = FinishCause.CLIENT_GONE, None
        address: str | None = None
        cached, first, token_ids = 0, None, list[int]()
        try:
            decision = await exchange.route(RawRequest(headers, json.dumps(body).encode()))
            address = decision.destination.partition(",")[0]
            answering = self._workers[address].answer(name, list(prompt), num_output)
            async with aclosing(answering) as told:
                async for output in told:
                    cached = max(cached, output.num_cached_tokens)
                    token_ids += output.token_ids
                    if output.token_ids and first is None:
                        first = _now()
                        if decision.response is not None:
                            decision.response.head(ResponseHead(200, {}, served_by=address))
                            decision.response.body(b"{", is_last=False)
            cause, status = FinishCause.COMPLETED, 200
        except RefusedError as refusal:
            cause, status = FinishCause.REFUSED, refusal.status
            raise
        finally:
            exchange.finish(cause, status, address)
        waited = (_now() if first is None else first) - arrived
        took = _now() - arrived
        return Served(
            replica, address, len(prompt), cached, arrived, waited, took, tuple(token_ids)
        )

    async def _in_turn(self, name: str, prompt: Sequence[int], num_output: int) -> Served:
        arrived, addresses = _now(), list(self._workers)
        address = addresses[self._number % len(addresses)]
        cached, first, token_ids = 0, arrived, list[int]()
        answering = self._workers[address].answer(name, list(prompt), num_output)
        async with aclosing(answering) as told:
            async for output in told:
                cached = max(cached, output.num_cached_tokens)
                token_ids += output.token_ids
                if output.token_ids and first == arrived:
                    first = _now()
        waited, took = first - arrived, _now() - arrived
        return Served(0, address, len(prompt), cached, arrived, waited, took, tuple(token_ids))

    # What goes on beside the requests

    def _begun(self) -> VirtualReplica:
        replica = VirtualReplica(self._settings, self._rng, _now())
        replica.datastore.set_endpoints(self._endpoints())
        self._scrape(replica)
        return replica

    async def _scrapes(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scrape_seconds)
            for replica in self.replicas:
                self._scrape(replica)

    def _scrape(self, replica: VirtualReplica) -> None:
        cache = self._settings.worker.cache
        for endpoint, worker in zip(self._endpoints(), self._workers.values(), strict=True):
            stats = worker.stats
            metrics = EndpointMetrics(
                waiting_requests=stats.num_waiting,
                running_requests=stats.num_running,
                kv_cache_usage=stats.kv_cache_usage,
                block_size_tokens=cache.block_size,
                num_kv_blocks=cache.num_blocks,
                updated_at_seconds=_now(),
                interval_seconds=self._settings.scrape_seconds,
            )
            replica.datastore.update_metrics(endpoint.key, metrics)

    def _cache_changed(self, index: int, events: Sequence[CacheEvent]) -> None:
        endpoint = self._endpoints()[index]
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
            one.bytes_sent += len(message)
            one.messages_sent += 1
            if self._wire.random() >= self._settings.loss:
                # One after the other, as over a connection.
                arrives = self._settings.delay_seconds + one.messages_sent * _FOLLOWS_SECONDS
                asyncio.get_running_loop().call_later(arrives, _hear, other, one, message)

    def _endpoints(self) -> list[Endpoint]:
        addresses = [address.rpartition(":")[0] for address in self._workers]
        return [Endpoint(f"worker-{index + 1}", host, PORT) for index, host in enumerate(addresses)]


def _hear(replica: VirtualReplica, peer: VirtualReplica, message: bytes) -> None:
    if replica.exchange is not None and peer.exchange is not None:
        replica.exchange.receive(peer.exchange.replica_id, message, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
