"""What a process does to decide requests: the configuration's plugins, and the director."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import MappingProxyType

from picker.admin.history import INTERVAL_SECONDS
from picker.admin.traffic import EndpointTraffic, Recent
from picker.app.flow_side import FlowSide
from picker.app.flushing import Flushes
from picker.app.health_side import HealthSide
from picker.app.in_use import BuildContext, ConfigInUse, pipeline_of
from picker.app.json_client import JsonClient
from picker.app.kv_listening import KvListening
from picker.app.recording_side import RecordingSide
from picker.cli.options import Options
from picker.config.build import Assembly, BuildOptions, default_config
from picker.config.catalog import builtin_plugins
from picker.config.load import LoadedConfig, load_config
from picker.config.watch import read_config_file
from picker.decisions.decision_header import DecisionHeader
from picker.decisions.records import DecisionRecords
from picker.errors import ConfigError
from picker.flowcontrol.views import QueuesView
from picker.framework.services import Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.peers.seeds import seed_of_secret
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RequestRules
from picker.requestcontrol.director import Director, RequestPolicies
from picker.requestcontrol.observer import Observers
from picker.requestcontrol.pipeline import SnapshotSource, Surroundings
from picker.telemetry.plugin_metrics import PluginCollector
from picker.telemetry.request_metrics import RequestMetrics
from picker.telemetry.tracing import Tracing, build_tracing

MIN_SECRET_BYTES = 16
FLUSH_SECONDS = 2.0  # for plugins to hand over what they have gathered, at the end


@dataclass(frozen=True, slots=True)
class Outside:
    """How what decides speaks to other servers: it asks them, and sends them its traces."""

    http: JsonClient
    tracing: Tracing

    async def open(self, stack: AsyncExitStack) -> None:
        """Be able to speak, until `stack` is closed."""
        stack.callback(self.tracing.close)
        await stack.enter_async_context(self.http)


@dataclass(frozen=True, slots=True)
class KnownPool:
    """What a process knows of its pool.

    `datastore` says when endpoints come and go, `snapshots` is what decisions look at, `rules` are
    the objectives and rewrites of requests.
    """

    datastore: Datastore
    snapshots: SnapshotSource
    rules: RequestRules


class LoopClock:
    """The event loop's time, for plugins that wait."""

    def now(self) -> float:
        """As the loop tells it."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Let the loop do other things meanwhile."""
        await asyncio.sleep(seconds)


class RequestSide:
    """Owns what decides, and what goes on beside the decisions for the plugins' sake.

    `records` remember the requests; None: nobody wants that.
    """

    def __init__(
        self,
        options: Options,
        config: ConfigInUse,
        outside: Outside,
        metrics: PickerMetrics,
        inflight: InflightLoad,
        pool: KnownPool,
    ) -> None:
        """Starts nothing."""
        self._flushes = Flushes(time.monotonic, time.time)
        self._flushing: asyncio.Task[None] | None = None
        self._kv_listening = KvListening(pool.datastore, metrics.kv)
        self._requests = RequestMetrics(metrics)
        self._recording: RecordingSide | None = None
        self.health = HealthSide(options.endpoint_ejection_failures, metrics, pool.datastore)
        policies = RequestPolicies(
            objectives=pool.rules,
            rewrites=pool.rules,
            tracer=outside.tracing.tracer,
            emit_endpoint_scores=options.emit_endpoint_scores,
            ignore_subset_hint=options.disable_endpoint_subset_filter,
        )
        count = options.explain.decision_records
        self.records = DecisionRecords(count) if count else None
        self._tells_clients = options.explain.decision_header
        self._traffic, self._datastore = EndpointTraffic(), pool.datastore
        others = () if self.records is None else (self.records,)
        observer = Observers((self._requests, self._traffic, *others))
        around = Surroundings(
            pool.snapshots,
            inflight,
            Random(),
            observer,
            policies=policies,
            health=self.health.memory,
            settling=self.health.settling,
        )
        name = options.pool_key or options.pool_name
        self._flow = FlowSide(around, pool.datastore, pool.rules, metrics, name)
        around = replace(around, freed=self._flow.freed)
        self.director = Director(pipeline_of(config.assembly), around)
        pool.rules.subscribe(lambda rules: metrics.pin_models(rules.models))
        metrics.register(PluginCollector(lambda: config.assembly, inflight, metrics))
        self.use(config.assembly)

    @property
    def decisions(self) -> int:
        """How many requests were decided so far."""
        return self._requests.decisions

    @property
    def waiting(self) -> int:
        """How many requests wait to be let in."""
        return self._flow.waiting

    def recent_traffic(self) -> dict[str, Recent]:
        """What was sent to the endpoints of the pool lately; to be asked once a second."""
        keys = [candidate.key for candidate in self._datastore.snapshot().candidates]
        return self._traffic.sample(keys, INTERVAL_SECONDS)

    def queues(self) -> QueuesView:
        """What people are shown of those that wait."""
        return self._flow.queues()

    def refuse_waiting(self) -> bool:
        """Let nobody in any more; whether any waited, who has to be told."""
        return self._flow.refuse_waiting()

    def use(self, assembly: Assembly) -> None:
        """Serve new requests with `assembly`."""
        self._flushes.use(assembly.flushes)
        self._kv_listening.use({name: one.plugin for name, one in assembly.instances.items()})
        self._flow.use(assembly)
        pipeline = pipeline_of(assembly, self._flow.gate)
        if self._recording is not None:
            pipeline = self._recording.pipeline(assembly, pipeline)
        if self._tells_clients:
            heads = (*pipeline.response_heads, DecisionHeader())
            pipeline = replace(pipeline, response_heads=heads)
        self.director.use(pipeline)

    def record(self, recording: RecordingSide, assembly: Assembly) -> None:
        """Have all decisions recorded, of which `assembly` makes the first."""
        self._recording = recording
        self.use(assembly)

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Serve the plugins until these are cancelled, and flush them until `flush`."""
        self._flushing = group.create_task(self._flushes.run(), name="flushes")
        return [group.create_task(self._kv_listening.run(), name="kv events")]

    async def flush(self) -> None:
        """Let plugins hand over what they have gathered, for the last time."""
        self._flushes.stop()
        if self._flushing is not None:
            await asyncio.wait([self._flushing], timeout=FLUSH_SECONDS)
            self._flushing.cancel()


def speaking_to_others(options: Options) -> Outside:
    """Raises `ConfigError` when requests cannot be traced as asked for."""
    return Outside(JsonClient(), build_tracing(options.tracing, os.environ))


def config_in_use(
    options: Options, loaded: LoadedConfig, outside: Outside, metrics: PickerMetrics
) -> ConfigInUse:
    """The objects that `loaded` asks for. Raises `ConfigError`."""
    seed = configured_hash_seed(options.hash_seed_file)
    building = BuildOptions(
        services=Services(
            http=outside.http,
            environment=MappingProxyType(dict(os.environ)),
            hash_seed=secrets.randbits(64) if seed is None else seed,
            clock=LoopClock(),
        ),
        allow_experimental=options.allow_experimental_plugins,
        strict_data_scope=options.strict_data_scope,
        tracer=outside.tracing.tracer if options.tracing else None,
    )
    return ConfigInUse(loaded, BuildContext(builtin_plugins(), metrics, building))


def read_config(options: Options) -> tuple[LoadedConfig, bytes | None]:
    """The configuration that the options name, else the built-in one, and what its file held.

    Raises `ConfigError`.
    """
    if options.config_file is not None and options.config_text is not None:
        raise ConfigError("--config-file and --config-text exclude each other")
    if options.config_text is not None:
        content = options.config_text.encode(errors="surrogatepass")
        return load_config(content, "--config-text"), None
    if options.config_file is None:
        return default_config(), None
    content = read_config_file(options.config_file, "--config-file")
    return load_config(content, str(options.config_file)), content


def configured_hash_seed(path: Path | None) -> int | None:
    """The seed that a secret file stands for; None without a file. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        text = f"--hash-seed-file: cannot read {path}: {error.strerror or error}"
        raise ConfigError(text) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--hash-seed-file: {path} has {len(secret)} bytes; a secret has {MIN_SECRET_BYTES} "
            "and more"
        )
    return seed_of_secret(secret)
