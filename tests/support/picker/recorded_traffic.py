"""Recorded mixed traffic through whole configurations; the clock only advances between steps."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.load import load_config
from picker.errors import RefusedError
from picker.framework.attributes import MODELS_ATTRIBUTE, ServedModel
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.detector import OutlierDetector
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.recording.lines import FORMAT_VERSION, Header, read_recording
from picker.recording.recorder import Recorder
from picker.recording.replay import OtherConfig, Redecided, Replay
from picker.recording.requests import Digests
from picker.requestcontrol.director import Director, Exchange
from picker.requestcontrol.pipeline import RequestContext
from picker.scrape.sources import describers
from picker.types import (
    Candidate,
    Endpoint,
    EndpointMetrics,
    FinishCause,
    RawRequest,
    ResponseHead,
    RouteDecision,
)

HASH_SEED = 4711
# A blend whose weights tests change.
BLEND = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: active-request-scorer, parameters: {idleThreshold: 8}}
- {type: prefix-cache-scorer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: active-request-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
ROLES = ("prefill", "decode", "both", "encode", "encode-prefill-decode", "")
ADAPTERS = tuple(f"lora-{letter}" for letter in "abcde")
USAGE = b'data: {"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11}}\n\n'


@dataclass
class ListSink:
    lines: list[bytes] = field(default_factory=list)
    is_open: bool = True
    is_broken: bool = False
    lost: int = 0

    def begin_anew(self) -> int:
        self.is_broken, lost, self.lost = False, self.lost, 0
        return lost

    def write(self, line: bytes, now_seconds: float) -> None:
        if self.is_broken:
            self.lost += 1
        else:
            self.lines.append(line)

    def lose(self, why: str, now_seconds: float) -> None:
        self.is_broken = True
        self.lost += 1

    def write_to(self, path: Path) -> Path:
        path.write_bytes(b"".join(self.lines))
        return path


@dataclass
class UnderWay:
    exchange: Exchange
    decision: RouteDecision


class MoodyHealth(OutlierDetector):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.held = {"some"}
        self._moods = Random(seed)

    def is_unsure(self, now_seconds: float) -> bool:
        return False

    def usable(self, candidates: Sequence[Candidate], now_seconds: float) -> Sequence[Candidate]:
        usable = [one for one in candidates if self._moods.random() < 0.8]
        return usable or candidates

    def probe(self, candidates: Sequence[Candidate], now_seconds: float) -> Candidate | None:
        return self._moods.choice(candidates) if self._moods.random() < 0.3 else None


class Traffic:
    def __init__(
        self,
        configs: Sequence[str],
        seed: int,
        endpoints: int = 6,
        *,
        prompts: bool = True,
        health: MoodyHealth | None = None,
    ) -> None:
        """`configs` are texts; all but the first are reloads."""
        self.draw, self.now = Random(seed), 1000.0
        self.sink = ListSink()
        header = Header(
            format_version=FORMAT_VERSION,
            picker_version="test",
            pool_name="pool",
            config_name="",
            config="",
            hash_seed=HASH_SEED,
            has_prompts=prompts,
            started_at=self.now,
            started_at_unix=0.0,
            allow_experimental_plugins=True,
        )
        self.recorder = Recorder(self.sink, lambda: self.now, header, Digests(b"key"))
        self.metrics = PickerMetrics()
        self.configs = list(configs)
        self.datastore, self.inflight = Datastore(), InflightLoad()
        self.datastore.subscribe(self.recorder.endpoints_changed)
        self.assembly = self._built("first.yaml", self.configs[0], {})
        self._observe()
        around = RequestContext(
            self.datastore, self.inflight, Random(seed + 1), clock=lambda: self.now, health=health
        )
        self.director = Director(
            self.recorder.recorded(self.assembly, self.assembly.pipeline), around
        )
        self.names = [f"pod-{number}" for number in range(endpoints)]
        self.starts = dict.fromkeys(self.names, 1.0)
        self.present = list(self.names)
        self.under_way: list[UnderWay] = []
        self.refused = 0
        self.pool_changes()

    def _built(self, name: str, text: str, before: Mapping[str, Any]) -> Assembly:
        options = BuildOptions(
            Services(NoHttp(), hash_seed=HASH_SEED), allow_experimental=True, before=before
        )
        loaded = load_config(text.encode(), name)
        return build(loaded, builtin_plugins(), self.metrics, lambda: 0.0, options)

    def _observe(self) -> None:
        described = describers(self.assembly.data_layer.bindings)
        self.datastore.use((*self.assembly.observers, self.recorder), described)

    # Events

    def reload(self, text: str) -> None:
        self.assembly = self._built("next.yaml", text, self.assembly.instances)
        self._observe()
        self.director.use(self.recorder.recorded(self.assembly, self.assembly.pipeline))

    def pool_changes(self) -> None:
        self.datastore.set_endpoints([self._endpoint(name) for name in self.present])
        for name in self.present:
            self.scraped(name)

    def scraped(self, name: str) -> None:
        draw, key = self.draw, f"default/{name}"
        adapters = frozenset(draw.sample(ADAPTERS, 2))
        metrics = EndpointMetrics(
            waiting_requests=draw.randrange(8),
            running_requests=draw.randrange(16),
            kv_cache_usage=draw.random(),
            block_size_tokens=16,
            num_kv_blocks=4096,
            process_start_time_seconds=self.starts[name],
            active_models=adapters,
            max_active_models=3,
            updated_at_seconds=self.now,
            interval_seconds=0.05,
        )
        models = (
            ServedModel("base"),
            *(ServedModel(one, parent="base") for one in sorted(adapters)),
        )
        self.datastore.update_metrics(key, metrics, {MODELS_ATTRIBUTE: models})

    def restarts(self, name: str) -> None:
        self.starts[name] += 1.0
        if name in self.present:
            self.scraped(name)

    async def request(self) -> None:
        exchange = self.director.begin()
        try:
            decision = await exchange.route(self._raw())
        except RefusedError:
            self.refused += 1
            exchange.finish(FinishCause.REFUSED, 429)
            return
        self.under_way.append(UnderWay(exchange, decision))

    def ends(self) -> None:
        if not self.under_way:
            return
        one = self.under_way.pop(self.draw.randrange(len(self.under_way)))
        tap = one.decision.response
        if tap is None or self.draw.random() < 0.2:
            one.exchange.finish(FinishCause.CLIENT_GONE)
            return
        tap.head(ResponseHead(200, {"content-type": "text/event-stream"}))
        tap.body(b"data: {}\n\n", False)
        self.now += self.draw.random() / 50
        tap.body(USAGE, True)
        one.exchange.finish(FinishCause.COMPLETED, 200)

    async def run(self, requests: int) -> None:
        reloads = {(number + 1) * requests // len(self.configs): text
                   for number, text in enumerate(self.configs[1:])}  # fmt: skip
        for number in range(requests):
            self.now += self.draw.expovariate(100.0)
            if number in reloads:
                self.reload(reloads[number])
            if self.draw.random() < 0.5:
                self.scraped(self.draw.choice(self.present))
            self._unrest()
            await self.request()
            while self.under_way and self.draw.random() < 0.55:
                self.ends()
        self.recorder.flush()

    def _unrest(self) -> None:
        chance = self.draw.random()
        if chance < 0.01:
            self.restarts(self.draw.choice(self.names))
        elif chance < 0.02 and len(self.present) > 3:
            self.present.remove(self.draw.choice(self.present))
            self.pool_changes()
        elif chance < 0.04:
            missing = [name for name in self.names if name not in self.present]
            self.present += missing[:1]
            self.pool_changes()
        elif chance < 0.05:
            self.datastore.mark_stale(f"default/{self.draw.choice(self.present)}")

    def _endpoint(self, name: str) -> Endpoint:
        number = self.names.index(name)
        labels = {
            "llm-d.ai/role": ROLES[number % len(ROLES)],
            "zone": "ab"[number % 2],
            "tier": "gold" if number % 3 else "iron",
            "kubernetes.io/hostname": f"host-{number // 2}",
            "app": "llm",
        }
        return Endpoint(name, f"10.0.0.{number + 1}", 8000, labels=labels)

    def _raw(self) -> RawRequest:
        draw = self.draw
        model = draw.choice(("base", "base", *ADAPTERS))
        topic = draw.choice(("ships", "shoes", "sealing wax", "cabbages", "kings"))
        text = f"You are an expert on {topic}. " * draw.choice((2, 20, 60))
        text += str(draw.randrange(40)) * draw.randrange(200)
        body = {"model": model, "prompt": text, "stream": draw.random() < 0.5}
        if draw.random() < 0.3:
            body["max_tokens"] = draw.randrange(1, 500)
        if draw.random() < 0.2:
            body["cache_salt"] = draw.choice(("pepper", "salt"))
        headers = {":path": "/v1/completions?key=canary-of-query", ":method": "POST"}
        headers["authorization"] = f"Bearer canary-{draw.randrange(9)}"
        headers["cookie"] = f"sid=canary-{draw.randrange(9)}"
        headers["x-api-key"] = "canary-of-api"
        for name, values in (
            ("x-request-id", [f"r{draw.randrange(10**6)}"]),
            ("x-session-id", [f"session-{number}" for number in range(9)]),
            ("x-tier", ["gold", "iron", "lead"]),
            ("x-profile", ["fast", "slow"]),
            ("x-llm-d-inference-fairness-id", ["tenant-1", "tenant-2"]),
            ("x-session-token", ["ZGVmYXVsdC9wb2QtMQ==", "nonsense-canary"]),
            ("x-slo-ttft-ms", ["100", "400"]),
            ("prefer", ["if-available"]),
        ):
            if draw.random() < (0.05 if name == "prefer" else 0.5):
                headers[name] = draw.choice(values)
        hint = None
        if draw.random() < 0.2:
            hint = [f"10.0.0.{draw.randrange(1, 9)}" for _ in range(4)]
        return RawRequest(headers, json.dumps(body).encode(), hint)


def record(traffic: Traffic, requests: int, path: Path) -> Path:
    asyncio.run(traffic.run(requests))
    return traffic.sink.write_to(path)


@dataclass
class Replayed:
    decisions: list[Redecided]
    notes: Mapping[str, int]
    runs: int

    @property
    def different(self) -> list[Redecided]:
        return [one for one in self.decisions if not one.is_identical]


def replayed(path: Path, other: str | None = None) -> Replayed:
    config = None if other is None else OtherConfig(other.encode(), "other.yaml", True)
    replay = Replay(str(path), config)
    decisions = list(replay.decisions(read_recording(path)))
    return Replayed(decisions, replay.notes, replay.runs)
