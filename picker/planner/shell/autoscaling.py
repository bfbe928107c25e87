"""The autoscaling loop: plan the replicas of a pool at each interval, and write them."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from base.series import Gauge
from picker.app.cluster import ClusterAccess
from picker.app.shelves import PoolSight
from picker.cli.options import KubernetesFlags
from picker.errors import ConfigError
from picker.k8s.api import KubernetesApi
from picker.metrics.picker_metrics import AutoscaleSeries
from picker.planner.autoscale_file import ScaledGroup, groups_of, read_autoscale_file
from picker.planner.load_window import LoadWindow
from picker.planner.planner import NO_SUMS, Observation, Plan, Planner, Sums
from picker.planner.shared_load import SharedLoad
from picker.planner.shell.scale import DeploymentScale, ScaleError, replicas_of
from picker.types import Candidate

log = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 1.0


class ApiAccess(Protocol):
    def load(self) -> None:
        """Find credentials. Raises `ConfigError`."""

    def open(self) -> AbstractAsyncContextManager[KubernetesApi]:
        """Return a connection as a context manager; called after `load`."""


class Autoscaling:
    """Owns the planners of the groups; standbys plan nothing, because they receive no requests.

    Of several replicas that receive requests, each plans with the load of all, and the first one
    writes and reports; a planner that takes over knows the intervals before.
    """

    def __init__(
        self,
        groups: Sequence[ScaledGroup],
        sight: PoolSight,
        access: ApiAccess | None,
        series: AutoscaleSeries,
        shared: SharedLoad,
    ) -> None:
        self._sight, self._access = sight, access
        self.watcher = LoadWindow()
        self.shared = shared
        self._seen = LoadWindow()  # by all replicas, since the last plan
        self._hears_all = True
        self._groups = [_Group(group, sight, series) for group in groups]
        self._interval = groups[0].scaling.interval_seconds

    def load(self) -> None:
        if self._access is not None:
            self._access.load()

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            api = None
            if self._access is not None:
                api = await stack.enter_async_context(self._access.open())
            begun = self._sight.clock()
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                self._sample()
                seconds = self._sight.clock() - begun
                if seconds >= self._interval or self._must_wake():
                    begun += seconds
                    await self._plan(api, seconds)

    def _sample(self) -> None:
        sight, workers = self._sight, self._sight.endpoints()
        for group in self._groups:
            group.sample(workers)
        own = self.watcher.take()
        self._seen = self._seen.plus(self.shared.exchange(own, sight.waiting(), sight.is_leader()))
        # A replica that is reached and reports nothing may be of another version.
        self._hears_all &= sight.num_peers() == self.shared.num_others

    def _must_wake(self) -> bool:
        """Return whether requests wait for a group without workers."""
        is_wanted = self._seen.arrivals > 0 or self._waiting > 0
        return is_wanted and any(group.replicas == 0 for group in self._groups)

    @property
    def _waiting(self) -> int:
        return self._sight.waiting() + self.shared.waiting_elsewhere

    async def _plan(self, api: KubernetesApi | None, seconds: float) -> None:
        seen, hears_all = self._seen, self._hears_all
        self._seen, self._hears_all = LoadWindow(), True
        if not self._sight.is_leader():
            for group in self._groups:
                group.stand_by()
            return
        interval = _Interval(seen, seconds, self._waiting, hears_all)
        for group in self._groups:
            if self.shared.is_first:
                await group.plan(api, interval)
            else:
                await group.follow(api, interval)


@dataclass(frozen=True, slots=True)
class _Interval:
    seen: LoadWindow
    seconds: float
    waiting: int  # in the picker
    hears_all: bool


@dataclass(slots=True)
class _Samples:
    waiting: Sums = NO_SUMS
    running: Sums = NO_SUMS
    kv_usage: Sums = NO_SUMS
    last_waiting: int = 0
    is_whole: bool = True  # the queue and the running requests of every worker were known
    tokens: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # first and last totals, by endpoint


class _Group:
    def __init__(self, group: ScaledGroup, sight: PoolSight, series: AutoscaleSeries) -> None:
        self._group, self._sight, self._series = group, sight, series
        self._planner = Planner(group.scaling)
        self._labels = (group.name, sight.name)
        self._samples = _Samples()
        self._problem = ""
        self.replicas: int | None = None  # requested
        self._ready = 0
        self._scale: DeploymentScale | None = None
        if group.deployment:
            namespace = group.namespace or sight.namespace
            self._scale = DeploymentScale(namespace, group.deployment)

    def sample(self, workers: Sequence[Candidate]) -> None:
        mine = [one.metrics for one in workers if self._group.has(one.endpoint)]
        known, seen = [one for one in mine if one is not None], self._samples
        waiting = [one.waiting_requests for one in known if one.waiting_requests is not None]
        running = [one.running_requests for one in known if one.running_requests is not None]
        usages = [one.kv_cache_usage for one in known if one.kv_cache_usage is not None]
        seen.last_waiting = sum(waiting)
        seen.waiting = seen.waiting.plus(seen.last_waiting)
        seen.running = seen.running.plus(sum(running))
        # A worker without metrics must not count as idle.
        seen.is_whole &= len(waiting) == len(running) == len(mine)
        if usages:
            seen.kv_usage = seen.kv_usage.plus(sum(usages) / len(usages))
        for one in workers:
            totals = None if one.metrics is None else one.metrics.served
            tokens = None if totals is None else totals.generated_tokens
            if tokens is not None and self._group.has(one.endpoint):
                first, last = seen.tokens.get(one.key, (tokens, tokens))
                seen.tokens[one.key] = (tokens if tokens < last else first, tokens)

    def stand_by(self) -> None:
        """Discard an interval in which another replica of the picker planned."""
        self._begin()
        self._planner = Planner(self._group.scaling)
        self._report_nothing()

    async def follow(self, api: KubernetesApi | None, interval: _Interval) -> None:
        """Plan for the case that this replica is the next one to write."""
        await self._read(api)
        plan, _ = self._next(interval)
        if self._scale is None:
            self.replicas = plan.replicas
        self._report_nothing()

    def _next(self, interval: _Interval) -> tuple[Plan, Observation]:
        seen = self._observation(interval)
        self._begin()
        return self._planner.next(seen), seen

    async def plan(self, api: KubernetesApi | None, interval: _Interval) -> None:
        known = await self._read(api)
        plan, seen = self._next(interval)
        wanted, current, cost = self._gauges()
        wanted.labels(*self._labels).set(plan.replicas)
        current.labels(*self._labels).set(seen.replicas)
        cost.labels(*self._labels).set(plan.replicas * self._group.cost_per_replica_hour)
        if plan.replicas == seen.replicas:
            if known is not None:
                self._count_success()
            return
        self.replicas = seen.replicas if known is not None else plan.replicas
        text = "group %s: %d replicas wanted, %d now: %s"
        log.info(text, self._group.name, plan.replicas, seen.replicas, plan.reason)
        if api is not None and self._scale is not None and known is not None:
            try:
                await self._scale.write(api, known, plan.replicas)
            except ScaleError as error:
                self._failed(error)
            else:
                self.replicas = plan.replicas
                self._count_success()

    async def _read(self, api: KubernetesApi | None) -> dict[str, Any] | None:
        """Set `replicas` (to at least the ready ones without a scale); return the scale or None."""
        self._ready = sum(self._group.has(one.endpoint) for one in self._sight.endpoints())
        self.replicas = max(self._ready, self.replicas or 0)
        if api is None or self._scale is None:
            return None
        try:
            found = await self._scale.read(api)
        except ScaleError as error:
            self._failed(error)
            return None
        self.replicas = replicas_of(found)
        return found

    def _observation(self, interval: _Interval) -> Observation:
        """Return what was observed in the interval.

        Output tokens and the time between them come from responses, else from the workers' counters
        (the time then by Little's law).
        """
        samples, taken, seconds = self._samples, interval.seen, interval.seconds
        running = samples.running.mean
        generated = sum(last - first for first, last in samples.tokens.values())
        output, gaps = taken.output, taken.gaps
        itl = gaps.mean if gaps.count else None
        if not output.count and generated and taken.arrivals:
            output = Sums(taken.arrivals, generated)
        if itl is None and generated:
            itl = running * seconds / generated
        return Observation(
            seconds=seconds,
            arrivals=taken.arrivals,
            replicas=self.replicas or 0,
            ready=self._ready,
            cached=taken.cached,
            fresh=taken.fresh,
            output=output,
            waiting=interval.waiting + samples.last_waiting,
            mean_waiting=samples.waiting.mean,
            running=running,
            kv_usage=samples.kv_usage.mean,
            itl_seconds=itl,
            is_whole=samples.is_whole,
            hears_all=interval.hears_all,
        )

    def _begin(self) -> None:
        there = {one.key for one in self._sight.endpoints()}
        seen = self._samples.tokens
        tokens = {key: (last, last) for key, (_, last) in seen.items() if key in there}
        self._samples = _Samples(tokens=tokens)

    def _report_nothing(self) -> None:
        for gauge in self._gauges():
            gauge.remove(*self._labels)

    def _gauges(self) -> tuple[Gauge, Gauge, Gauge]:
        series = self._series
        return series.wanted_replicas, series.current_replicas, series.wanted_cost_per_hour

    def _count_success(self) -> None:
        self._problem = ""
        self._series.writes_total.labels(*self._labels, "ok").inc()

    def _failed(self, error: ScaleError) -> None:
        self._series.writes_total.labels(*self._labels, error.result).inc()
        if str(error) != self._problem:
            self._problem = str(error)
            log.warning("%s", error)


def read_groups(path: Path) -> tuple[ScaledGroup, ...]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--autoscale {path}: {error.strerror}") from error
    return read_autoscale_file(content, str(path))


def access_for(
    groups: Sequence[ScaledGroup], flags: KubernetesFlags | None, path: Path
) -> ClusterAccess | None:
    """Return the access to the groups' Deployments, if there are any. Raises `ConfigError`."""
    named = [one.deployment for one in groups if one.deployment]
    if not named:
        return None
    if flags is None:
        raise ConfigError(
            f"{path}: deployment {named[0]} is in a cluster, and the pool is not: give "
            "--pool-name, --pool or --endpoint-selector without --endpoints-file, or take "
            "`deployment` away"
        )
    return ClusterAccess(flags)


def build(
    path: Path, sight: PoolSight, cluster: KubernetesFlags | None, series: AutoscaleSeries
) -> Autoscaling | None:
    """Build the autoscaling of a pool; None if the file of `--autoscale` has no group of it.

    Raises `ConfigError`.
    """
    groups = groups_of(sight.name, sight.pools, read_groups(path), str(path))
    if not groups:
        return None
    # The longest-running replica is the first.
    shared = SharedLoad(f"{time.time_ns():020d}-{secrets.token_hex(8)}")
    return Autoscaling(groups, sight, access_for(groups, cluster, path), series, shared)
