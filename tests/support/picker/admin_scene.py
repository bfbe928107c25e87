"""A picker's HTTP port with made-up state behind it, the same in every run."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from picker.admin.routes import PoolPages
from picker.admin.server import AdminServer
from picker.admin.views import AboutView, ConfigView, HealthView
from picker.decisions.decision import Decision
from picker.decisions.showing import reasons
from picker.decisions.views import (
    CandidateView,
    FilterView,
    ProfileView,
    RecordSummary,
    RecordView,
    RefusalView,
    ScoreView,
)
from picker.flowcontrol.views import BandView, FlowView, QueuesView
from picker.framework.attributes import Attributes
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.prefix.match import PrefixCacheMatchInfo, match_info_key
from picker.telemetry.traffic import EndpointTraffic, Traffic
from picker.types import (
    Api,
    Endpoint,
    EndpointMetrics,
    InferenceRequest,
    ParsedBody,
    SchedulingResult,
    ServedTotals,
)

BEGAN = 1_800_000_000.0
SAMPLES = 120
QUEUES = QueuesView(
    is_on=True,
    detector="utilization-detector",
    saturation=0.83,
    stale_endpoints=1,
    queued_requests=14,
    queued_bytes=52_300,
    under_way=37,
    max_requests=5_000,
    max_bytes=1_000_000_000,
    dispatched_per_second=23.4,
    outcomes={"Dispatched": 18_211, "RejectedCapacity": 31, "EvictedTTL": 4},
    bands=(
        BandView(10, 2, 3_100, 1_000, 200_000_000, 1.0, (FlowView("interactive", 2, 3_100, 0.04),)),
        BandView(
            *(0, 12, 49_200, 1_000, 200_000_000, 0.9),
            (FlowView("batch-tenant", 9, 40_000, 2.7), FlowView("small-tenant", 3, 9_200, 0.9)),
        ),
    ),
)
CONFIG = ConfigView(
    source="/etc/pointsman/config.yaml",
    written="plugins:\n- type: queue-scorer\n",
    effective="plugins:\n- name: queue-scorer\n  type: queue-scorer\n",
    loaded_unix_seconds=BEGAN,
    warnings=("config.yaml:4: scorer 'queue-scorer' has the weight 0",),
    last_error="config.yaml:9: unknown plugin type 'queue-scorrer'; is it 'queue-scorer'?",
)


def summary(number: int, **changes: object) -> RecordSummary:
    values: dict[str, object] = {
        "request_id": f"8f14e45f-ceea-467f-a0f6-{number:012d}",
        "received_unix_seconds": BEGAN + number,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "fairness_id": "batch-tenant" if number % 3 else "interactive",
        "priority": 0 if number % 3 else 10,
        "outcome": "completed",
        "endpoint": f"default/worker-{number % 10 + 1}",
        "status": 200,
        "queue_seconds": 0.004 * (number % 4),
        "decision_seconds": 0.004 * (number % 4) + 0.00021,
        "ttft_seconds": 0.081,
        "seconds": 1.4,
    }
    return RecordSummary(**{**values, **changes})  # type: ignore[arg-type]


def _candidates() -> tuple[CandidateView, ...]:
    names = [f"default/worker-{index}" for index in (4, 7, 1, 9, 2, 3)]
    return tuple(
        CandidateView(
            endpoint=name,
            address=f"10.0.0.{index + 1}:8000",
            total=round(2.6 - 0.31 * max(0, index - 1), 3),
            scores=(
                ScoreView("queue-scorer", 1.0, 0.95 - index / 10, 0.95 - index / 10),
                ScoreView("kv-cache-utilization-scorer", 1.0, 0.8 - index / 20, 0.8 - index / 20),
                ScoreView("prefix-cache-scorer", 2.0, 0.4 - index / 30, 0.8 - index / 15),
            ),
            inflight_requests=index,
            waiting_requests=None if index == 5 else index,
            running_requests=None if index == 5 else 3 + index,
            kv_cache_usage=None if index == 5 else 0.1 * index,
            metrics_age_seconds=None if index == 5 else 0.021,
        )
        for index, name in enumerate(names)
    )


def explained(one: RecordSummary) -> RecordView:
    candidates = _candidates()
    removed = ("default/worker-5", "default/worker-6", "default/worker-8", "default/worker-10")
    profile = ProfileView(
        name="default",
        is_primary=True,
        picker="max-score-picker",
        picked=(candidates[0].endpoint,),
        num_candidates=10,
        num_scored=6,
        num_tied=2,
        filters=(FilterView("decode-filter", 10, 10), FilterView("healthy", 10, 6, removed)),
        candidates=candidates,
    )
    refusal = None
    if one.endpoint is None:
        refusal = RefusalView(429, "ResourceExhausted", "the queue is full", one.reason, 3)
    record = RecordView(
        summary=one,
        incoming_model="llama",
        target_model=one.model,
        objective="chat",
        rewritten_by="llama-canary",
        size_bytes=2_048,
        destination="10.0.0.1:8000",
        served_by="10.0.0.1:8000",
        refusal=refusal,
        prompt_tokens=640,
        cached_tokens=256,
        completion_tokens=96,
        matched_prefix_tokens=320,
        profiles=() if refusal else (profile,),
        stages={"prefill": "the prompt is shorter than one block"},
    )
    return replace(record, reasons=tuple(reasons(record)))


@dataclass
class MadeUpSource:
    queues_view: QueuesView = QUEUES
    records: dict[str, RecordView] = field(default_factory=dict)
    health_views: dict[str, HealthView] = field(default_factory=dict)
    config: ConfigView = CONFIG
    asked: list[object] = field(default_factory=list)
    counted: EndpointTraffic = field(default_factory=EndpointTraffic)
    counts_for: list[str] = field(default_factory=list)
    said_problem: str | None = None
    started_unix_seconds: float = BEGAN
    metrics: PickerMetrics = field(default_factory=PickerMetrics)
    datastore: Datastore = field(default_factory=Datastore)
    inflight: InflightLoad = field(default_factory=InflightLoad)

    def remember(self, *summaries: RecordSummary) -> None:
        for one in summaries:
            self.records[one.request_id] = explained(one)

    def about(self) -> AboutView:
        return AboutView("llama-pool", "1.2.3", self.started_unix_seconds)

    def queues(self) -> QueuesView:
        return self.queues_view

    def decisions(self, limit: int) -> Sequence[RecordSummary]:
        """Return all decisions, newest first: the server has to limit them itself."""
        self.asked.append(limit)
        return [one.summary for one in reversed(self.records.values())]

    def decision(self, request_id: str | None) -> RecordView | None:
        self.asked.append(request_id)
        if request_id is None:
            return next(reversed(self.records.values()), None)
        return self.records.get(request_id)

    def health(self) -> Mapping[str, HealthView]:
        return self.health_views

    def traffic(self) -> Traffic:
        return self.counted.sample(self.counts_for, 1.0)

    def problem(self) -> str | None:
        return self.said_problem

    def configuration(self) -> ConfigView:
        return self.config


@dataclass
class Scene:
    source: MadeUpSource = field(default_factory=MadeUpSource)
    url: str = ""

    def __post_init__(self) -> None:
        self.datastore, self.inflight = self.source.datastore, self.source.inflight
        self.pages = PoolPages(self.source)
        self.server = AdminServer.of_one(self.pages, lambda: True)

    def pool(self, *names: str) -> None:
        endpoints = [Endpoint(name, "10.0.0.1", 8000 + at) for at, name in enumerate(names)]
        self.datastore.set_endpoints(endpoints)
        self.source.counts_for = [one.key for one in endpoints]

    def load(
        self,
        name: str,
        running: int,
        waiting: int,
        cache: float,
        served: ServedTotals | None = None,
    ) -> None:
        at = time.monotonic()
        metrics = EndpointMetrics(waiting, running, cache, updated_at_seconds=at, served=served)
        self.datastore.update_metrics(f"default/{name}", metrics)

    def decide(self, name: str, prompt_tokens: int, cached_tokens: int) -> None:
        self.source.counted.decided(decision(name, prompt_tokens, cached_tokens))

    async def sample(self) -> None:
        self.pages.sample()


def decision(name: str, prompt_tokens: int, cached_tokens: int | None) -> Decision:
    attributes = Attributes()
    if cached_tokens is not None:
        matches = {f"default/{name}": cached_tokens // 16}
        found = PrefixCacheMatchInfo(math.ceil(prompt_tokens / 16), 16, matches)
        attributes[match_info_key("prefix")] = found
    request = InferenceRequest(
        request_id="r",
        headers={},
        body=ParsedBody(Api.COMPLETIONS),
        incoming_model="m",
        target_model="m",
        prompts=(bytes(4 * prompt_tokens),),
    )
    endpoint = Endpoint(name, "10.0.0.1", 8000)
    return Decision(
        number=0,
        received_at_seconds=0.0,
        request=request,
        result=SchedulingResult((endpoint,), "default"),
        attributes=attributes,
    )


async def busy_scene() -> Scene:
    """Ten workers, of which one is ejected, one is suspect, and one is unknown."""
    scene = Scene()
    names = [f"worker-{number}" for number in range(1, 11)]
    scene.pool(*names)
    scene.source.health_views = {
        "default/worker-6": HealthView("ejected", 5, 1, 1.4),
        "default/worker-8": HealthView("suspect", 2),
        "default/worker-10": HealthView("on-trial", 3, 1, 0.2),
    }
    for index in range(6):
        for _ in range(index):
            scene.inflight.acquire(f"default/{names[index]}")
    for second in range(SAMPLES):
        for at, name in enumerate(names[:9]):
            wave = math.sin(second / 9 + at)
            served = ServedTotals(
                second, 900 * second, (0.1, 0.5, 2), (9 * second, 3 * second, second, 0)
            )
            scene.load(name, round(6 + 4 * wave), max(0, round(3 * wave)), 0.5 + 0.4 * wave, served)
            if (second + at) % 4 == 0:
                scene.decide(name, 640, round(320 + 300 * wave))
        await scene.sample()
    scene.source.remember(*(summary(number) for number in range(34)))
    scene.source.remember(
        summary(34, outcome="refused", endpoint=None, status=429, reason="rejected-saturated"),
        summary(35, outcome="completed", status=500),
        summary(36, outcome="client-gone", status=None),
        summary(37, outcome="evicted", status=429, reason="evicted-priority"),
        summary(38, request_id="chosen"),
        summary(39, outcome="under-way", status=None, ttft_seconds=None, seconds=None),
    )
    return scene


@asynccontextmanager
async def serving(scene: Scene, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Scene]:
    port = await scene.server.start(host, port)
    scene.url = f"http://127.0.0.1:{port}"
    try:
        yield scene
    finally:
        await scene.server.stop()


@asynccontextmanager
async def other_task(work: Callable[[], object] = lambda: None) -> AsyncIterator[list[None]]:
    turns: list[None] = []

    async def run() -> None:
        while True:
            turns.append(None)
            work()
            await asyncio.sleep(0)

    running = asyncio.ensure_future(run())
    try:
        yield turns
    finally:
        running.cancel()
