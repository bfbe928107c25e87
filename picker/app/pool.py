"""The parts of one pool: what is known of it, what decides its requests, and its numbers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

from picker.admin.history import INTERVAL_SECONDS
from picker.admin.metrics_page import RememberedCollector
from picker.admin.views import UNKNOWN, AboutView, ConfigView, HealthView
from picker.app.cluster import ClusterAccess, target_of
from picker.app.in_use import Outbound, config_in_use, pipeline_of, read_config
from picker.app.leadership import Leadership
from picker.app.peering import Peering, Work
from picker.app.plugin_tasks import PluginTasks, flush, listen_to_engines
from picker.app.shelves import Autoscaler, PoolSight, autoscaler
from picker.cli.options import Options, RecordFlags
from picker.config.build import Assembly
from picker.config.findings import Finding
from picker.config.load import LoadedConfig
from picker.config.pool_file import pool_contents
from picker.config.show import aligned, effective_lines
from picker.config.watch import ConfigWatch
from picker.decisions.decision import Watchers
from picker.decisions.ring import DecisionRing
from picker.decisions.steps import BoundPlugin
from picker.decisions.views import RecordSummary, RecordView
from picker.errors import ConfigError
from picker.flowcontrol.shell.controller import FlowController
from picker.flowcontrol.views import QueuesView
from picker.framework.interfaces import EndpointObserver, KvEventConsumer
from picker.k8s.discovery import KubernetesDiscovery
from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.breaker import EndpointState, OutlierSettings
from picker.outliers.burst_wait import BurstWait
from picker.outliers.detector import OutlierDetector
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings
from picker.pool.activity import Activity, WatchedSnapshots
from picker.pool.datastore import Datastore
from picker.pool.endpoints_file import FileDiscovery
from picker.pool.inflight import InflightLoad
from picker.pool.policies import RequestRules
from picker.pool.pool_source import PoolSource
from picker.recording.file import RecordingFile
from picker.recording.lines import FORMAT_VERSION, Header
from picker.recording.privacy import readable
from picker.recording.recorder import ConfigText, Recorder
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext, RequestPipeline, RequestPolicies
from picker.requestcontrol.responses import DecisionHeader
from picker.scrape.reading import StalenessLimits
from picker.scrape.scrape import MIN_TICK_SECONDS, Scraper, ScrapeSettings, polled
from picker.scrape.sources import describers
from picker.telemetry.health_metrics import HealthMetrics
from picker.telemetry.plugin_metrics import PluginCollector
from picker.telemetry.pool_metrics import PoolCollector
from picker.telemetry.request_metrics import RequestMetrics
from picker.telemetry.spans import RequestTracer
from picker.telemetry.traffic import EndpointTraffic, Traffic
from picker.types import Candidate

log = logging.getLogger(__name__)

MAX_NAMED = 5  # endpoints in a sentence


class ServedPool:
    """Owns every collaborator that only one pool has. An `AdminSource`."""

    def __init__(
        self,
        options: Options,
        outbound: Outbound,
        metrics: PickerMetrics,
        leadership: Leadership,
    ) -> None:
        """Opens no port. Raises `ConfigError`."""
        self._options, self._leadership = options, leadership
        name = options.pool_key or options.pool_name
        self._about = AboutView(name, version("pointsman"), time.time())
        self.metrics, self.inflight = metrics, InflightLoad()
        loaded, content = read_config(options)
        self._may_follow = partial(leadership.may_follow, loaded.config)
        self.config = config_in_use(options, loaded, outbound, metrics)
        assembly = self.config.assembly
        self._recording = recording_of(options, self.config.hash_seed, metrics)
        self.known = KnownPool(options, assembly, metrics, self.inflight, self._observers())
        self.datastore = self.known.datastore
        if self._recording is not None:
            self.datastore.subscribe(self._recording.recorder.endpoints_changed)
        self.detector, settling = self._outlier_detection()
        self._traffic, self._requests = EndpointTraffic(), RequestMetrics(metrics)
        self._autoscaler = self._autoscaler_of(options)
        count = options.explain.decision_records
        self.records = DecisionRing(count) if count else None
        context = self._context(outbound, settling)
        self.flow = self._flow_control(context)
        self.director = Director(pipeline_of(assembly), context)
        self._flushes = PluginTasks(flush)
        listen = partial(listen_to_engines, self.datastore, metrics.kv)
        self._kv_events = PluginTasks(listen)
        self.known.rules.subscribe(lambda rules: metrics.labels.pin_rewrites(rules.rewritten))
        self.datastore.follow_models(metrics.labels.add_served)
        metrics.register(PluginCollector(lambda: self.config.assembly, self.inflight, metrics))
        self._watch = self._config_watch(content)
        self._use(assembly)
        self.config.subscribe(self._use)
        self._effective: tuple[Assembly, str] | None = None
        self.peers: Peering | None = None
        if options.peers is not None:
            shared = (self.datastore, self.inflight, metrics)
            self.peers = Peering(options, options.peers, self.config, *shared)

    def _observers(self) -> tuple[EndpointObserver, ...]:
        return () if self._recording is None else (self._recording.recorder,)

    def _outlier_detection(self) -> tuple[OutlierDetector | None, BurstWait | None]:
        failures = self._options.endpoint_ejection_failures
        if failures == 0:
            return None, None
        settings = OutlierSettings(failures=failures)
        watcher = HealthMetrics(self.metrics, time.monotonic)
        settling = BurstWait(settings.burst_wait_seconds)
        detector = OutlierDetector(settings, watcher, Random(), settling.wake)
        self.datastore.subscribe(detector.pool_changed)
        return detector, settling

    def _context(self, outbound: Outbound, settling: BurstWait | None) -> RequestContext:
        options, rules, tracer = self._options, self.known.rules, outbound.tracing.tracer
        ring = () if self.records is None else (self.records,)
        scaler = self._autoscaler
        watchers = ring if scaler is None else (*ring, scaler.watcher)
        return RequestContext(
            self.known.snapshots,
            self.inflight,
            Random(),
            Watchers(self._traffic, self._requests, *watchers),
            policies=RequestPolicies(
                objectives=rules,
                rewrites=rules,
                tracer=None if tracer is None else RequestTracer(tracer),
                emit_endpoint_scores=options.emit_endpoint_scores,
                ignore_subset_hint=options.disable_endpoint_subset_filter,
            ),
            health=self.detector,
            settling=settling,
        )

    def _flow_control(self, context: RequestContext) -> FlowController:
        """It outlives configurations, and admits everything while these do not ask for it."""

        def pool() -> Sequence[Candidate]:
            """All endpoints that requests may go to, with what this picker has under way there."""
            known = context.datastore.snapshot().candidates
            loaded = candidates_for(known, None, context.inflight.counts, context.loaded)
            health = context.health
            return loaded if health is None else health.usable(loaded, context.clock())

        name = self._options.pool_key or self._options.pool_name
        flow = FlowController(None, pool, context.clock, self.metrics, name)
        rules = self.known.rules
        self.datastore.watch(flow.pool_changed)
        rules.subscribe(lambda known: flow.set_priorities(known.priorities))
        flow.set_priorities(rules.current.priorities)
        return flow

    def _use(self, assembly: Assembly) -> None:
        """Serve new requests with `assembly`; what waits, waits on by its flow control."""
        self.known.use(assembly)
        plugins = ((name, one.plugin) for name, one in assembly.instances.items())
        consumers = {name: one for name, one in plugins if isinstance(one, KvEventConsumer)}
        self._flushes.use(assembly.flushes)
        self._kv_events.use(consumers)
        self.flow.use(assembly.flow_control)
        pipeline = pipeline_of(assembly, self.flow)
        if self._recording is not None:
            pipeline = self._recording.recorded(assembly, pipeline)
        if self._options.explain.decision_header:
            heads = (*pipeline.response_heads, BoundPlugin(DecisionHeader()))
            pipeline = replace(pipeline, response_heads=heads)
        self.director.use(pipeline)

    def _autoscaler_of(self, options: Options) -> Autoscaler | None:
        if options.autoscale is None:
            return None
        cluster = options.kubernetes
        sight = PoolSight(
            options.pool_name,
            "" if cluster is None else cluster.pool_namespace,
            lambda: self.datastore.snapshot().candidates,
            lambda: self.waiting,
            self._leadership.is_leader,
            time.monotonic,
        )
        return autoscaler(options.autoscale, sight, cluster, self.metrics.autoscale)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """About the configuration that it began with."""
        return self.config.assembly.warnings

    @property
    def xds_name(self) -> str:
        """What proxies call the pool; "" without endpoint discovery."""
        return "" if self._options.xds is None else self._options.xds.cluster_name

    @property
    def unfinished(self) -> int:
        """How many requests are under way or wait."""
        return self.inflight.own_total + self.waiting

    @property
    def waiting(self) -> int:
        """How many requests wait to be admitted."""
        return self.flow.num_waiting

    @property
    def num_decisions(self) -> int:
        """How many requests were decided so far."""
        return self._requests.decisions

    def is_known(self) -> bool:
        """Whether its endpoints are."""
        return self.datastore.synced

    def load(self) -> None:
        """Find out for the first time which endpoints exist. Raises `ConfigError`."""
        self.known.load()
        if self._autoscaler is not None:
            self._autoscaler.load()
        if self.peers is not None:
            self.peers.load()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin everything that goes on beside the requests, until these are cancelled."""
        works = self.known.works(self._may_follow) | {"kv events": self._kv_events.run}
        if self._recording is not None:
            works["recording"] = self._recording.file.run
        if self.peers is not None:
            works |= self.peers.works
        if self._autoscaler is not None:
            works["autoscaling"] = self._autoscaler.run
        if self._watch is not None:
            works["configuration"] = self._watch.run
        self._flushing = group.create_task(self._flushes.run(), name="flushes")
        return [group.create_task(work(), name=name) for name, work in works.items()]

    def refuse_waiting(self) -> bool:
        """Refuse all that wait, and all that come; whether any waited."""
        waited = self.waiting > 0
        self.flow.shut_down()
        return waited

    async def close(self) -> None:
        """Hand over and write what was gathered, once no request is under way any more."""
        await self._flushes.end(self._flushing)
        if self._recording is not None:
            await self._recording.close()

    def queues(self) -> QueuesView:
        """Flow control now."""
        return self.flow.queues()

    def decisions(self, limit: int) -> Iterable[RecordSummary]:
        """The last requests, the newest first."""
        return () if self.records is None else self.records.last(limit)

    def decision(self, request_id: str | None) -> RecordView | None:
        """One request, the last one for None; None when it is not known any more."""
        return None if self.records is None else self.records.find(request_id)

    def health(self) -> Mapping[str, HealthView]:
        """How endpoints have answered, by key; one that is absent has done nothing wrong."""
        views = {} if self.detector is None else self.detector.views(time.monotonic())
        unknown = dict.fromkeys(self._silent(), UNKNOWN)
        return unknown | {
            key: HealthView(
                one.state.value, one.consecutive_failures, one.ejections, one.next_probe_seconds
            )
            for key, one in views.items()
            if key not in unknown or one.state is not EndpointState.HEALTHY
        }

    def _silent(self) -> list[str]:
        """The endpoints that have answered neither a scrape nor a request lately, or never."""
        detector, silent = self.detector, []
        for one in self.datastore.snapshot().candidates:
            if not self.datastore.is_answering(one):
                lost_at = 0.0 if one.last_metrics is None else one.last_metrics.updated_at_seconds
                if detector is None or detector.last_success(one.key) <= lost_at:
                    silent.append(one.key)
        return silent

    def _silence(self) -> str | None:
        """How many endpoints do not answer, in a sentence for people; None: all do."""
        if not (silent := self._silent()):
            return None
        names = ", ".join(silent[:MAX_NAMED]) + (", …" if len(silent) > MAX_NAMED else "")
        return f"{len(silent)} of {self.datastore.size} endpoints do not answer: {names}"

    def traffic(self) -> Traffic:
        """What was sent where lately; to be asked once a second."""
        keys = [candidate.key for candidate in self.datastore.snapshot().candidates]
        return self._traffic.sample(keys, INTERVAL_SECONDS)

    def about(self) -> AboutView:
        """The pool as flags name it, and this process."""
        return self._about

    def configuration(self) -> ConfigView:
        """The one in use, with its defaults and where each line is from."""
        assembly = self.config.assembly
        loaded = assembly.loaded
        if self._effective is None or self._effective[0] is not assembly:
            lines = aligned(effective_lines(loaded, assembly), with_origin=True)
            self._effective = assembly, lines  # made once: it takes several milliseconds
        return ConfigView(
            source=loaded.source.name,
            written=loaded.content.decode(errors="replace"),
            effective=self._effective[1],
            loaded_unix_seconds=self.config.since_unix_seconds,
            warnings=tuple(str(warning) for warning in assembly.warnings),
            last_error=None if self._watch is None else self._watch.problem,
            experimental=assembly.experimental,
        )

    def problem(self) -> str | None:
        """What is wrong with it or with what is known of it, for people; None: nothing."""
        old = self._leadership.problem() or self.known.problem()
        return "; ".join(filter(None, (old, self._silence()))) or None

    def _config_watch(self, content: bytes | None) -> ConfigWatch | None:
        path = self._options.config_file
        if path is None or content is None or not self._options.watch_config:
            return None

        async def apply(loaded: LoadedConfig) -> tuple[Finding, ...]:
            return self.config.apply(loaded)

        return ConfigWatch(path, content, apply, self.metrics, time.time)


class KnownPool:
    """Owns the datastore, the rules of requests, and what keeps both up to date.

    `observers` are notified of endpoints that left or restarted, as are those of the configuration.
    """

    def __init__(
        self,
        options: Options,
        assembly: Assembly,
        metrics: PickerMetrics,
        inflight: InflightLoad,
        observers: Iterable[EndpointObserver] = (),
    ) -> None:
        """Raises `ConfigError` when there is not exactly one source of endpoints."""
        self._observers = tuple(observers)
        self.datastore, self.rules = Datastore(), RequestRules()
        self.use(assembly)
        activity = Activity(inflight)
        self.snapshots = WatchedSnapshots(self.datastore, activity)
        self._access: ClusterAccess | None = None
        self._source = self._source_of(options, assembly, metrics)
        self._scraper = Scraper(
            self.datastore,
            polled(assembly.data_layer.bindings),
            metrics,
            ScrapeSettings(
                tick_seconds=max(MIN_TICK_SECONDS, options.refresh_metrics_interval_seconds),
                patience=StalenessLimits(seconds=options.metrics_staleness_threshold_seconds),
            ),
            Random(),
            activity,
        )
        gauges = PoolCollector(options.pool_name, self.datastore)
        interval = options.pool_gauges_interval_seconds
        metrics.register(RememberedCollector(gauges, interval, time.monotonic))

    def use(self, assembly: Assembly) -> None:
        """Go on with the plugins of another configuration."""
        described = tuple(describers(assembly.data_layer.bindings))
        self.datastore.use((*assembly.observers, *self._observers), described)

    def load(self) -> None:
        """Find out for the first time which endpoints exist. Raises `ConfigError`."""
        if self._access is not None:
            self._access.load()
        self._source.load()

    def problem(self) -> str | None:
        """Why what is known of the pool may be old, in a sentence for people; None: it is not."""
        return self._source.problem()

    def is_absent(self) -> bool:
        """Whether there is known to be no such pool."""
        return self._source.is_absent()

    def works(self, may_follow: Callable[[], Awaitable[None]]) -> dict[str, Work]:
        """What keeps up with the pool until cancelled, with its source after `may_follow`."""

        async def follow() -> None:
            await may_follow()
            await self._source.run()

        return {"scraper": self._scraper.run, "discovery": follow}

    def _source_of(
        self, options: Options, assembly: Assembly, metrics: PickerMetrics
    ) -> PoolSource:
        found = _endpoints_file(options, assembly)
        if found is not None:
            path, follows, routes_to_names = found
            read = partial(pool_contents, pool=options.pool_name)
            resolve = None if routes_to_names else addresses_of
            known = (self.datastore, self.rules, metrics)
            return FileDiscovery(path, *known, read, resolve, follows=follows)
        flags = options.kubernetes
        if flags is None:
            raise ConfigError(
                "no endpoints: give --endpoints-file FILE, or --pool-name NAME to follow an "
                "InferencePool, or --endpoint-selector SELECTOR to follow Pods without one"
            )
        self._access = ClusterAccess(flags)
        return KubernetesDiscovery(
            target_of(flags), self._access.open, self.datastore, self.rules, metrics
        )


def _endpoints_file(options: Options, assembly: Assembly) -> tuple[Path, bool, bool] | None:
    """The endpoints file, whether its changes are followed, and whether the proxy routes to the
    names in it; None: there is none.
    """
    path = options.endpoints_file
    configured = assembly.data_layer.discovery
    if path is not None and configured is not None:
        raise ConfigError(
            "endpoints come from --endpoints-file or from dataLayer.discovery, not both"
        )
    if path is not None:
        return path, True, False
    if configured is not None and isinstance(configured.plugin, FileDiscoverySettings):
        if options.kubernetes is not None and options.kubernetes.endpoint_selector:
            raise ConfigError(
                "endpoints come from --endpoint-selector or from dataLayer.discovery, not both"
            )
        settings = configured.plugin
        return Path(settings.path), settings.watch_file, settings.routes_to_names
    return None


def addresses_of(name: str) -> tuple[str, ...]:
    """The IPv4 addresses of a host name, sorted; those of IPv6 where it has no others. Blocks.

    Raises `OSError`.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    either = [
        sorted({str(address[0]) for family, *_, address in found if family == wanted})
        for wanted in (socket.AF_INET, socket.AF_INET6)
    ]
    return tuple(either[0] or either[1])


class PoolRecording:
    """Owns the file of a pool's recording, and what writes its decisions there."""

    def __init__(
        self, options: Options, flags: RecordFlags, hash_seed: int, metrics: PickerMetrics
    ) -> None:
        """Opens the file. Raises `ConfigError` for one that cannot be added to."""
        self._options, self._flags, self._hash_seed = options, flags, hash_seed
        self._in_use: Assembly | None = None
        self.file = RecordingFile(flags.path, flags.max_bytes, metrics.recording)
        self.recorder = Recorder(self.file, time.monotonic)
        prompts = "with prompts" if flags.keeps_prompts else "without prompts"
        log.info("decisions are recorded in %s, %s", flags.path, prompts)

    def recorded(self, assembly: Assembly, pipeline: RequestPipeline) -> RequestPipeline:
        """`pipeline` of `assembly`, which is in use from now on, with its decisions recorded."""
        if self._in_use is None:
            self.recorder.begin(self._header(assembly), tuple(assembly.profiles))
        elif self._in_use is not assembly:
            loaded = assembly.loaded
            text = loaded.content.decode()
            self.recorder.configured(ConfigText(loaded.source.name, text, tuple(assembly.profiles)))
        self._in_use = assembly
        return self.recorder.recorded(pipeline)

    async def close(self) -> None:
        """End the recording; what is recorded by then is written."""
        self.recorder.settle()
        await self.file.close(time.monotonic())

    def _header(self, assembly: Assembly) -> Header:
        loaded = assembly.loaded
        return Header(
            format_version=FORMAT_VERSION,
            picker_version=version("pointsman"),
            pool_name=readable(self._options.pool_name),
            config_name=readable(loaded.source.name),
            config=loaded.content.decode(),
            hash_seed=self._hash_seed,
            has_prompts=self._flags.keeps_prompts,
            started_at=time.monotonic(),
            started_at_unix=time.time(),
            allow_experimental_plugins=self._options.allow_experimental_plugins,
            strict_data_scope=self._options.strict_data_scope,
        )


def recording_of(options: Options, hash_seed: int, metrics: PickerMetrics) -> PoolRecording | None:
    """The recording that the options ask for, if any. Raises `ConfigError`."""
    flags = options.record
    return None if flags is None else PoolRecording(options, flags, hash_seed, metrics)
