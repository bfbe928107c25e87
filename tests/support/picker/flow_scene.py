"""A pool, policies and requests for tests of flow control, as small as possible."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from picker.errors import DropReason, RefusedError
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.flowcontrol.shell.controller import FlowController
from picker.flowcontrol.waiting import FlowTicket
from picker.framework.flow import QueuedRequest, Rank
from picker.metrics.picker_metrics import PickerMetrics
from picker.types import Api, Candidate, Endpoint, FinishCause, InferenceRequest, ParsedBody, Usage

BODY = ParsedBody(Api.COMPLETIONS, "m")


class Fcfs:
    def rank(self, item: QueuedRequest) -> Rank:
        return (item.enqueued_at_seconds,)


class FirstOfAll:
    def __init__(self) -> None:
        self.heads: dict[str, tuple[Rank, int]] = {}
        self.calls: list[tuple[Any, ...]] = []

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        self.calls.append(("head", flow, None if head is None else head.sequence))
        if head is None:
            self.heads.pop(flow, None)
        else:
            self.heads[flow] = (rank, head.sequence)

    def select(self, now_seconds: float) -> str | None:
        return min(self.heads, key=self.heads.__getitem__, default=None)

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        self.calls.append(("dispatched", item.flow, item.sequence))

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        self.calls.append(("completed", item.flow, item.sequence, usage))

    def forget(self, flow: str) -> None:
        self.calls.append(("forget", flow))


class GlobalStrict:
    def __init__(self) -> None:
        self.bands: dict[int, FirstOfAll] = {}

    def for_band(self, priority: int) -> FirstOfAll:
        band = self.bands[priority] = FirstOfAll()
        return band


class FirstOfEqual(FirstOfAll):
    def weight(self, flow: str) -> float:
        return 2.0 if flow == "b" else 1.0


class Sharing:
    def for_band(self, priority: int) -> FirstOfEqual:
        return FirstOfEqual()


class Sheddable:
    """Requests of negative priority are evictable: the lowest first, then the newest."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        return item.request.priority < 0

    def rank(self, item: QueuedRequest, dispatched_at_seconds: float) -> Rank:
        return (item.request.priority, -dispatched_at_seconds)


@dataclass
class Ceilings:
    by_priority: Mapping[int, float] = field(default_factory=dict)
    default: float = 1.0
    asked: int = 0

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        self.asked += 1
        return [self.by_priority.get(priority, self.default) for priority in priorities]


@dataclass
class Slots:
    slots: int = 1
    asked: int = 0
    settle_seconds: float = 0.01

    def saturation(self, candidates: Any, attributes: Any, now_seconds: float) -> float:
        self.asked += 1
        under_way = sum(candidate.inflight_requests for candidate in candidates)
        return under_way / (self.slots * len(candidates))


class Pool:
    def __init__(self, size: int, labels: Mapping[str, str] | None = None) -> None:
        self.endpoints = [endpoint(i, labels) for i in range(size)]
        self.under_way: Counter[str] = Counter()

    def __call__(self) -> Sequence[Candidate]:
        return [
            Candidate(one, None, self.under_way[one.key] if self.under_way else 0)
            for one in self.endpoints
        ]


def endpoint(index: int, labels: Mapping[str, str] | None = None) -> Endpoint:
    return Endpoint(f"e{index}", "10.0.0.1", 8000 + index, labels=labels or {})


def band(**values: Any) -> BandSettings:
    return BandSettings(**{"fairness": GlobalStrict(), "ordering": Fcfs(), **values})


def flow_settings(**values: Any) -> FlowControlSettings:
    of_bands = {key: values.pop(key) for key in ("request_ttl_seconds",) if key in values}
    chosen = {
        "default_band": band(**of_bands),
        "default_negative_band": band(**of_bands),
        "usage_limits": Ceilings(),
        "detector": Slots(),
        "detector_name": "slots",
    }
    return FlowControlSettings(**{**chosen, **values})


def inference_request(
    name: str = "r",
    fairness_id: str = "t",
    priority: int = 0,
    size_bytes: int = 100,
    held_bytes: int = 0,
) -> InferenceRequest:
    return InferenceRequest(
        name,
        {},
        BODY,
        "m",
        "m",
        size_bytes,
        held_bytes=held_bytes,
        priority=priority,
        fairness_id=fairness_id,
    )


@dataclass
class Client:
    request: InferenceRequest
    task: asyncio.Task[None] | None = None
    ticket: FlowTicket | None = None
    refusal: RefusedError | None = None
    settled_at: float | None = None
    endpoint_key: str | None = None
    is_over: bool = False
    evicted: list[DropReason] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        return self.task is not None and not self.task.done()


class Scene:
    def __init__(self, pool: Pool | None = None, **values: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = pool or Pool(1)
        self.metrics = PickerMetrics()
        self.metrics.labels.add_served(["m"])
        self.settings = flow_settings(**values)
        self.gate = FlowController(
            self.settings, self.pool, self.loop.time, self.metrics, pool_name="pool"
        )
        self.clients: list[Client] = []
        self.order: list[Client] = []  # as they were let in

    async def arrive(self, *args: Any, leaves: bool = True, **values: Any) -> Client:
        client = Client(inference_request(*args, **values))
        self.clients.append(client)
        client.task = asyncio.create_task(self._live(client, leaves))
        await settle()
        return client

    async def _live(self, client: Client, leaves: bool) -> None:
        try:
            client.ticket = await self.gate.admit(client.request, client.evicted.append)
        except RefusedError as refusal:
            client.refusal = refusal
        else:
            self.order.append(client)
            self.let_in(client)
            if leaves:
                self.leave(client)
        finally:
            client.settled_at = self.loop.time()

    def let_in(self, client: Client) -> None:
        """Subclasses override this to act on a dispatched request."""

    def leave(self, client: Client) -> None:
        if not self.pool.endpoints or client.ticket is None:
            return
        keys = [one.key for one in self.pool.endpoints]
        client.endpoint_key = min(keys, key=lambda key: self.pool.under_way[key])
        self.pool.under_way[client.endpoint_key] += 1
        client.ticket.left(client.endpoint_key)

    def close(self, client: Client, usage: Usage | None = None) -> None:
        if client.ticket is None or client.is_over:
            return
        client.is_over = True
        if client.endpoint_key is not None:
            self.pool.under_way[client.endpoint_key] -= 1
        client.ticket.closed(FinishCause.COMPLETED, usage)

    async def done(self, client: Client, usage: Usage | None = None) -> None:
        self.close(client, usage)
        await settle()

    async def resize(self, size: int) -> None:
        self.pool.endpoints = [endpoint(index) for index in range(size)]
        self.gate.pool_changed()
        await settle()

    def gauge(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"llm_d_epp_flow_control_{name}", labels)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def with_settings(settings: FlowControlSettings, **values: Any) -> FlowControlSettings:
    return replace(settings, **values)
