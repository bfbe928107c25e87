"""One pool: the parts that know its endpoints, decide on its requests, and report on both."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from random import Random

from picker.admin.history import INTERVAL_SECONDS
from picker.admin.views import UNKNOWN, AboutView, ConfigView, HealthView
from picker.app.cluster import Leadership
from picker.app.in_use import Outbound, config_in_use, read_config
from picker.app.known_pool import KnownPool
from picker.app.peering import Peering
from picker.app.plugin_tasks import PluginTasks, flush, listen_to_engines
from picker.app.shelves import Autoscaler, PoolSight, autoscaler
from picker.cli.options import Options
from picker.config.build import Assembly
from picker.config.show import aligned, effective_lines
from picker.config.watch import ConfigWatch
from picker.decisions.decision import Watchers
from picker.decisions.ring import DecisionRing
from picker.decisions.steps import BoundPlugin
from picker.decisions.views import RecordSummary, RecordView
from picker.flowcontrol.shell.controller import FlowController
from picker.flowcontrol.views import QueuesView
from picker.framework.interfaces import KvEventConsumer
from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.breaker import EndpointState, OutlierSettings
from picker.outliers.burst_wait import BurstWait
from picker.outliers.detector import OutlierDetector
from picker.pool.inflight import InflightLoad
from picker.recording.file import RecordingFile
from picker.recording.lines import FORMAT_VERSION, Header
from picker.recording.recorder import Recorder
from picker.recording.requests import readable
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext, RequestPolicies
from picker.requestcontrol.responses import DecisionHeader
from picker.telemetry.health_metrics import HealthMetrics
from picker.telemetry.plugin_metrics import PluginCollector
from picker.telemetry.request_metrics import RequestMetrics
from picker.telemetry.spans import RequestTracer
from picker.telemetry.traffic import EndpointTraffic, Traffic
from picker.types import Candidate

log = logging.getLogger(__name__)

MAX_NAMED = 5  # endpoints in a sentence


class ServedPool:
    """Owns the parts that each pool has for itself. It is an `AdminSource`."""

    def __init__(
        self, options: Options, outbound: Outbound, metrics: PickerMetrics, leadership: Leadership
    ) -> None:
        """Prepare the pool without opening a port. Raise `ConfigError`."""
        self._options, self._leadership = options, leadership
        name = options.pool_key or options.pool_name
        self._about = AboutView(name, version("pointsman"), time.time())
        self.metrics, self.inflight = metrics, InflightLoad()
        loaded, content = read_config(options)
        self._may_follow = partial(leadership.may_follow, loaded.config)
        self.config = config_in_use(options, loaded, outbound, metrics)
        assembly = self.config.assembly
        self._record_file, self._recorder = self._recording()
        observers = () if self._recorder is None else (self._recorder,)
        self.known = KnownPool(options, assembly, metrics, self.inflight, observers)
        self.datastore = self.known.datastore
        if self._recorder is not None:
            self.datastore.subscribe(self._recorder.endpoints_changed)
        self.detector, burst_wait = self._outlier_detection()
        self._traffic, self._requests = EndpointTraffic(), RequestMetrics(metrics)
        self._autoscaler = self._autoscaler_of(options)
        count = options.explain.decision_records
        self.records = DecisionRing(count) if count else None
        context = self._context(outbound, burst_wait)
        self.flow = self._flow_control(context)
        self.director = Director(assembly.pipeline, context)
        self._flushes = PluginTasks(flush)
        listen = partial(listen_to_engines, self.datastore, metrics.kv)
        self._kv_events = PluginTasks(listen)
        self.known.rules.subscribe(lambda rules: metrics.labels.pin_rewrites(rules.rewritten))
        self.datastore.follow_models(metrics.labels.add_served)
        metrics.register(PluginCollector(lambda: self.config.assembly, self.inflight, metrics))
        self._watch: ConfigWatch | None = None
        path = options.config_file
        if path is not None and content is not None and options.watch_config:
            self._watch = ConfigWatch(path, content, self.config.apply, metrics, time.time)
        # After all parts exist: it hands the assembly to each of them.
        self._use(assembly)
        self.config.subscribe(self._use)
        self._effective: tuple[Assembly, str] | None = None
        self.peers: Peering | None = None
        if options.peers is not None:
            parts = (self.datastore, self.inflight, metrics)
            scaler = self._autoscaler
            shared = {} if scaler is None else {"--autoscale": scaler.shared}
            self.peers = Peering(options, options.peers, self.config, *parts, shared)

    def _recording(self) -> tuple[RecordingFile | None, Recorder | None]:
        options, flags, now = self._options, self._options.record, time.monotonic()
        if flags is None:
            return None, None
        header = Header(
            format_version=FORMAT_VERSION,
            picker_version=version("pointsman"),
            pool_name=readable(options.pool_name),
            config_name="",
            config="",
            hash_seed=self.config.hash_seed,
            has_prompts=flags.keeps_prompts,
            started_at=now,
            started_at_unix=time.time(),
            allow_experimental_plugins=options.allow_experimental_plugins,
            strict_data_scope=options.strict_data_scope,
        )
        file = RecordingFile(flags.path, flags.max_bytes, self.metrics.recording)
        prompts = "with prompts" if flags.keeps_prompts else "without prompts"
        log.info("decisions are recorded in %s, %s", flags.path, prompts)
        return file, Recorder(file, time.monotonic, header)

    def _outlier_detection(self) -> tuple[OutlierDetector | None, BurstWait | None]:
        failures = self._options.endpoint_ejection_failures
        if failures == 0:
            return None, None
        settings = OutlierSettings(failures=failures)
        watcher = HealthMetrics(self.metrics, time.monotonic)
        burst_wait = BurstWait(settings.burst_wait_seconds)
        detector = OutlierDetector(settings, watcher, Random(), burst_wait.wake)
        self.datastore.subscribe(detector.pool_changed)
        return detector, burst_wait

    def _context(self, outbound: Outbound, burst_wait: BurstWait | None) -> RequestContext:
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
            burst_wait=burst_wait,
        )

    def _flow_control(self, context: RequestContext) -> FlowController:
        """Create flow control for all configurations; it admits everything while none uses it."""

        def pool() -> Sequence[Candidate]:
            known = context.datastore.snapshot().candidates
            # Without a subset: saturation is that of the whole pool.
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
        """Serve new requests with `assembly`; waiting requests then follow its flow control."""
        self.known.use(assembly)
        plugins = ((name, one.plugin) for name, one in assembly.instances.items())
        consumers = {name: one for name, one in plugins if isinstance(one, KvEventConsumer)}
        self._flushes.use(assembly.flushes)
        self._kv_events.use(consumers)
        # Flow control outlives the configuration: waiting requests must not be lost.
        self.flow.use(assembly.flow_control)
        pipeline = assembly.gated(self.flow)
        if self._recorder is not None:
            pipeline = self._recorder.recorded(assembly, pipeline)
        if self._options.explain.decision_header:
            heads = (*pipeline.response_heads, BoundPlugin(DecisionHeader()))
            pipeline = replace(pipeline, response_heads=heads)
        self.director.use(pipeline)

    def _autoscaler_of(self, options: Options) -> Autoscaler | None:
        if options.autoscale is None:
            return None
        cluster, name = options.kubernetes, options.pool_key or options.pool_name
        sight = PoolSight(
            name,
            options.pool_keys or (name,),
            "" if cluster is None else cluster.pool_namespace,
            lambda: self.datastore.snapshot().candidates,
            lambda: self.waiting,
            self._leadership.is_leader,
            lambda: 0 if self.peers is None else self.peers.num_peers,
            time.monotonic,
        )
        return autoscaler(options.autoscale, sight, cluster, self.metrics.autoscale)

    @property
    def xds_name(self) -> str:
        return "" if self._options.xds is None else self._options.xds.cluster_name

    @property
    def unfinished(self) -> int:
        return self.inflight.own_total + self.waiting

    @property
    def waiting(self) -> int:
        return self.flow.num_waiting

    @property
    def num_decisions(self) -> int:
        return self._requests.decisions

    def is_known(self) -> bool:
        return self.datastore.synced

    def load(self) -> None:
        self.known.load()
        if self._autoscaler is not None:
            self._autoscaler.load()
        if self.peers is not None:
            self.peers.load()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        works = self.known.works(self._may_follow) | {"kv events": self._kv_events.run}
        if self._record_file is not None:
            works["recording"] = self._record_file.run
        if self.peers is not None:
            works |= self.peers.works
        if self._autoscaler is not None:
            works["autoscaling"] = self._autoscaler.run
        if self._watch is not None:
            works["configuration"] = self._watch.run
        self._flushing = group.create_task(self._flushes.run(), name="flushes")
        return [group.create_task(work(), name=name) for name, work in works.items()]

    def refuse_waiting(self) -> bool:
        """Refuse waiting and new requests; return whether any waited."""
        waited = self.waiting > 0
        self.flow.shut_down()
        return waited

    async def close(self) -> None:
        """Flush plugins and the recording, once no request is under way."""
        # Plugins first: their last flush may still need the other parts.
        await self._flushes.end(self._flushing)
        if self._recorder is not None and self._record_file is not None:
            self._recorder.flush()
            await self._record_file.close(time.monotonic())

    def queues(self) -> QueuesView:
        return self.flow.queues()

    def decisions(self, limit: int) -> Iterable[RecordSummary]:
        return () if self.records is None else self.records.last(limit)

    def decision(self, request_id: str | None) -> RecordView | None:
        return None if self.records is None else self.records.find(request_id)

    def health(self) -> Mapping[str, HealthView]:
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
        detector, silent = self.detector, []
        for one in self.datastore.snapshot().candidates:
            if not self.datastore.is_answering(one):
                # Scrapes may fail alone: an answer to a request since then counts.
                lost_at = 0.0 if one.last_metrics is None else one.last_metrics.updated_at_seconds
                if detector is None or detector.last_success(one.key) <= lost_at:
                    silent.append(one.key)
        return silent

    def traffic(self) -> Traffic:
        keys = [candidate.key for candidate in self.datastore.snapshot().candidates]
        return self._traffic.sample(keys, INTERVAL_SECONDS)

    def about(self) -> AboutView:
        return self._about

    def configuration(self) -> ConfigView:
        assembly = self.config.assembly
        loaded = assembly.loaded
        if self._effective is None or self._effective[0] is not assembly:
            lines = aligned(effective_lines(loaded, assembly), with_origin=True)
            self._effective = assembly, lines  # cached: it takes several milliseconds
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
        problems = [self._leadership.problem() or self.known.problem()]
        if silent := self._silent():
            # Probes show the sentence in a line of an event.
            names = ", ".join(silent[:MAX_NAMED]) + (", …" if len(silent) > MAX_NAMED else "")
            text = f"{len(silent)} of {self.datastore.size} endpoints do not answer: {names}"
            problems.append(text)
        return "; ".join(filter(None, problems)) or None
