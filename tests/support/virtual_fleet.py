"""A fleet in virtual time, made of the production cores: the picker's director with its whole
configuration, flow control included, and the workers' schedulers and caches.

Only the wires between them are left out: no proxy, no ext_proc, no sockets. On an event loop whose
clock jumps over the waiting, minutes of a fleet take seconds, and one seed gives one outcome.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Self

from fleet.sim.living_worker import LivingWorker, WorkerSettings
from fleet.sim.virtual_replicas import Priorities
from picker.app.in_use import pipeline_of
from picker.config.build import build, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.decisions.decision import Watchers
from picker.errors import RefusedError
from picker.flowcontrol.shell.controller import FlowController
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.headers import FAIRNESS_ID, OBJECTIVE, REQUEST_ID
from picker.requestcontrol.pipeline import EndpointHealth, RequestContext, RequestPolicies
from picker.types import (
    Candidate,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    RawRequest,
    ResponseHead,
    RouteDecision,
)

PORT = 8000
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What a virtual fleet is. `config` None is the picker's built-in configuration; `objectives`
    gives names priorities. A picker that does not scrape knows its own counts alone.
    """

    workers: int = 4
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    config: str | None = None
    objectives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    scrape_seconds: float = 0.05
    stale_after_seconds: float = 2.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a completion: whose it is, how long, and how much it wants."""

    tenant: str
    num_prompt: int = 64
    num_output: int = 16
    objective: str = ""


@dataclass(slots=True)
class Answer:
    """What became of a call; virtual seconds from its arrival. `ttft_seconds` None: no token."""

    call: Call
    arrived_seconds: float
    status: int = 0
    reason: str | None = None
    retry_after_seconds: int | None = None
    endpoint: str | None = None
    routed_seconds: float | None = None
    ttft_seconds: float | None = None
    seconds: float = 0.0
    num_tokens: int = 0


class VirtualFleet:
    """Owns a picker and its workers; an asynchronous context manager in which they live."""

    def __init__(
        self,
        settings: FleetSettings,
        health: EndpointHealth | None = None,
        watchers: Sequence[object] = (),
    ) -> None:
        """Raises `ConfigError` for a configuration that cannot be used."""
        self._settings = settings
        self._rng = Random(settings.seed)
        self.health = health
        self.metrics = PickerMetrics()
        self.inflight = InflightLoad()
        self.scrapes = True
        self.failing: set[str] = set()  # endpoints that answer 500
        config = settings.config
        loaded = default_config() if config is None else load_config(config.encode(), "simulation")
        assembly = build(loaded, builtin_plugins(), self.metrics, lambda: 0.0)
        self.datastore = Datastore(assembly.observers)
        self._workers = {
            f"10.0.{index // 250}.{index % 250 + 1}:{PORT}": LivingWorker(settings.worker)
            for index in range(settings.workers)
        }
        self.gate = FlowController(assembly.flow_control, self._candidates, self._now, self.metrics)
        self.gate.set_priorities(settings.objectives.values())
        self.director = Director(
            pipeline_of(assembly, self.gate),
            RequestContext(
                self.datastore,
                self.inflight,
                self._rng,
                Watchers(*watchers),
                self._now,
                RequestPolicies(objectives=Priorities(settings.objectives)),
                health=self.health,
            ),
        )
        self._stack = AsyncExitStack()
        self._number = 0
        self.received: dict[str, list[float]] = {key: [] for key in self.endpoint_keys}

    @property
    def endpoint_keys(self) -> Sequence[str]:
        """The workers' keys, in order."""
        return [endpoint.key for endpoint in self._endpoints()]

    async def __aenter__(self) -> Self:
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(one.run()) for one in self._workers.values()]
        self.datastore.set_endpoints(self._endpoints())
        self._scrape()
        tasks.append(group.create_task(self._scrapes()))
        self.gate.pool_changed()
        self._stack.callback(lambda: [task.cancel() for task in tasks])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, call: Call) -> Answer:
        """One request from its arrival to its end."""
        answer = Answer(call, self._now())
        self._number += 1
        name = f"{call.tenant}-{self._number}"
        raw, prompt = self._request(call, name)
        exchange = self.director.begin()
        cause, status = FinishCause.CLIENT_GONE, None
        try:
            decision = await exchange.route(raw)
            answer.routed_seconds = self._now() - answer.arrived_seconds
            status = await self._serve(decision, answer, name, prompt)
            cause = FinishCause.COMPLETED
        except RefusedError as refusal:
            cause, status = FinishCause.REFUSED, refusal.status
            answer.reason = refusal.drop_reason.value if refusal.drop_reason else None
            answer.retry_after_seconds = refusal.retry_after_seconds
        finally:
            answer.status, answer.seconds = status or 499, self._now() - answer.arrived_seconds
            exchange.finish(cause, status, answer.endpoint)
        return answer

    async def _serve(
        self, decision: RouteDecision, answer: Answer, name: str, prompt: list[int]
    ) -> int:
        address = decision.destination.partition(",")[0]
        answer.endpoint = address
        key = self._key(address)
        self.received[key].append(self._now())
        tap = decision.response
        if key in self.failing:
            if tap is not None:
                tap.head(ResponseHead(500, served_by=address))
                tap.body(b"", is_last=True)
            return 500
        call = answer.call
        async with aclosing(self._workers[address].answer(name, prompt, call.num_output)) as told:
            async for output in told:
                if output.token_ids and answer.ttft_seconds is None:
                    answer.ttft_seconds = self._now() - answer.arrived_seconds
                    if tap is not None:
                        head = {"content-type": "application/json"}
                        tap.head(ResponseHead(200, head, served_by=address))
                answer.num_tokens += len(output.token_ids)
        if tap is not None:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": answer.num_tokens}
            tap.body(json.dumps({"usage": usage}).encode(), is_last=True)
        return 200

    def _request(self, call: Call, name: str) -> tuple[RawRequest, list[int]]:
        """A request as the picker sees it, and its prompt as the worker does."""
        words = [self._rng.randrange(256, 1280) for _ in range(call.num_prompt)]
        text = "".join(f"{word:0{BYTES_PER_TOKEN}d}" for word in words)
        body = {"model": "sim", "prompt": text, "max_tokens": call.num_output}
        headers = {":path": "/v1/completions", REQUEST_ID: name, FAIRNESS_ID[0]: call.tenant}
        if call.objective:
            headers[OBJECTIVE[0]] = call.objective
        return RawRequest(headers, json.dumps(body).encode()), words

    async def _scrapes(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scrape_seconds)
            if self.scrapes:
                self._scrape()
            else:
                self._age()
            self.gate.pool_changed()

    def _scrape(self) -> None:
        for endpoint, worker in zip(self._endpoints(), self._workers.values(), strict=True):
            stats = worker.stats
            metrics = EndpointMetrics(
                waiting_requests=stats.num_waiting,
                running_requests=stats.num_running,
                kv_cache_usage=stats.kv_cache_usage,
                updated_at_seconds=self._now(),
                interval_seconds=self._settings.scrape_seconds,
            )
            self.datastore.update_metrics(endpoint.key, metrics)

    def _age(self) -> None:
        for one in self.datastore.snapshot().candidates:
            metrics = one.metrics
            if metrics is None:
                continue
            if self._now() - metrics.updated_at_seconds > self._settings.stale_after_seconds:
                self.datastore.mark_stale(one.key)

    def _endpoints(self) -> list[Endpoint]:
        addresses = [address.rpartition(":")[0] for address in self._workers]
        return [Endpoint(f"worker-{index + 1}", host, PORT) for index, host in enumerate(addresses)]

    def _key(self, address: str) -> str:
        return f"default/worker-{list(self._workers).index(address) + 1}"

    def _candidates(self) -> Sequence[Candidate]:
        counts = self.inflight.counts
        return [
            Candidate(one.endpoint, one.metrics, counts.get(one.key, 0), one.last_metrics)
            for one in self.datastore.snapshot().candidates
        ]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
