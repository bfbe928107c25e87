"""Endpoints, objectives and rewrites from a Kubernetes cluster.

Separate reflectors follow the pool, its Pods, the objectives and the rewrites. One task applies
their views, so a burst of changes costs little more than one, and deadlines need no event. While
the API server is unreachable, the picker serves from the last known state, and reports that.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final, Generic, TypeAlias, TypeVar

from picker.framework.label_selector import LabelSelector
from picker.k8s.api import (
    LEGACY_OBJECTIVES,
    LEGACY_POOLS,
    LEGACY_REWRITES,
    OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    ApiError,
    ApiResource,
    KubernetesApi,
    Selection,
    UnreachableError,
)
from picker.k8s.object_map import Decode, ObjectKey
from picker.k8s.objects import ObjectReader, Pool, PoolName
from picker.k8s.pods import PodRecord
from picker.k8s.pool_view import PoolShape
from picker.k8s.reconcile import PoolReconciler
from picker.k8s.reflector import Pace, Reflector, Subject, check_api_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import RequestRules

log = logging.getLogger(__name__)

R = TypeVar("R")
GATHER_SECONDS: Final = 0.02  # the minimum between two changes of endpoints
# Events of Pods, objectives and rewrites within this time are applied together, and so are
# deadlines: under constant changes, waking up costs most.
NEWS_SECONDS: Final = 0.1
MAX_SHARE: Final = 0.3  # of the loop's time that applying changes may take
ASK_AGAIN_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 1.0
_PACE: Final = Pace(gather_seconds=NEWS_SECONDS)

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[KubernetesApi]]


@dataclass(frozen=True, slots=True)
class WatchedPool:
    """The InferencePool to follow, or with `pods` the Pods to follow under its name."""

    pool: PoolName
    pods: PoolShape | None = None


def selected_pods(selector: str, ports: tuple[int, ...]) -> PoolShape:
    """Return the Pods to follow without an InferencePool. Raises `ValueError`."""
    return PoolShape(selector, LabelSelector.parse(selector).matches, ports)


@dataclass(slots=True)
class _PodWatch:
    """The Pods of one selector; `news` is a view to apply, and `changed` the keys that differ."""

    reflector: Reflector[PodRecord]
    task: asyncio.Task[None]
    news: Mapping[ObjectKey, PodRecord] | None = None
    changed: dict[ObjectKey, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """An optional kind, in its current and in its deprecated group."""

    current: ApiResource
    legacy: ApiResource


OBJECTIVE_KIND: Final = Kind(OBJECTIVES, LEGACY_OBJECTIVES)
REWRITE_KIND: Final = Kind(REWRITES, LEGACY_REWRITES)


async def installed(api: KubernetesApi, kind: Kind) -> ApiResource | None:
    """Return the resource to follow, if the server knows one. Raises like `KubernetesApi`."""
    for one in (kind.current, kind.legacy):
        if await api.has(one):
            return one
    await check_api_server(api)
    return None


class KindFollower(Generic[R]):
    """Follows a kind in the group that the server knows; calls `use` with all records on change."""

    def __init__(
        self,
        kind: Kind,
        reflect: Callable[[ApiResource], Reflector[R]],
        use: Callable[[Iterable[R]], None],
    ) -> None:
        self._kind, self._reflect, self._use = kind, reflect, use
        self._reflector: Reflector[R] | None = None
        self._failure: str | None = None

    def problem(self) -> str | None:
        """Return why the records may be outdated; None if they are not, or the kind is missing."""
        if self._failure is not None:
            return self._failure
        reflector = self._reflector
        return reflector.problem() if reflector is not None and reflector.installed else None

    async def run(self, api: KubernetesApi) -> None:
        following: ApiResource | None = None
        is_first, was_missing = True, False
        async with asyncio.TaskGroup() as group:
            task: asyncio.Task[None] | None = None
            while True:
                try:
                    found = await installed(api, self._kind)
                except (ApiError, UnreachableError) as error:
                    # A reflector reports the same problem by itself.
                    plural = self._kind.current.plural
                    self._failure = f"{plural}: {error}" if self._reflector is None else None
                    await asyncio.sleep(RETRY_SECONDS if is_first else ASK_AGAIN_SECONDS)
                    continue
                self._failure = None
                # An API server that starts may not know its kinds yet: the second miss counts.
                is_missing = following is not None and found not in (following, self._kind.current)
                if is_missing and not was_missing:
                    found = following
                was_missing = is_missing
                _log_change(self._kind, following, found, is_first=is_first)
                if is_first or found != following:
                    if task is not None:
                        task.cancel()
                        await asyncio.wait({task})  # does not swallow a cancellation of this task
                    task = self._begin(group, found)
                following, is_first = found, False
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _begin(
        self, group: asyncio.TaskGroup, found: ApiResource | None
    ) -> asyncio.Task[None] | None:
        if found is None:
            self._reflector = None
            self._use(())
            return None
        reflector = self._reflector = self._reflect(found)
        reflector.subscribe(lambda view, _: self._use(view.values()))
        return group.create_task(reflector.run(), name=f"reflector {found.qualified}")


def _log_change(
    kind: Kind, before: ApiResource | None, now: ApiResource | None, *, is_first: bool
) -> None:
    if now == before and not is_first:
        return
    plural = kind.current.plural
    if now is None:
        log.warning(
            "the cluster knows no %s, so none are followed; install the definitions in crds/ to "
            "use them",
            plural,
        )
    elif now == kind.legacy:
        log.warning(
            "%s of %s are followed, which is deprecated: use %s",
            plural,
            now.api_version,
            kind.current.api_version,
        )
    elif not is_first:
        log.info("%s of %s are followed", plural, now.api_version)


class KubernetesDiscovery:
    """The `PoolSource` of a cluster. `connect` connects to its API server."""

    def __init__(
        self,
        target: WatchedPool,
        connect: Connect,
        datastore: Datastore,
        rules: RequestRules,
        metrics: PickerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target, self._connect, self._clock = target, connect, clock
        self._series, self._rng = metrics.kubernetes, Random()
        self._reader = ObjectReader(target.pool, metrics.discovery_errors_total.inc)
        self._reconciler = PoolReconciler(target.pool, datastore, rules)
        self._changed = asyncio.Event()
        self._pool: Reflector[Pool] | None = None
        self._pods: dict[str, _PodWatch] = {}
        self._policies: list[KindFollower[Any]] = []

    def load(self) -> None:
        """Do nothing: `run` asks the server."""

    def problem(self) -> str | None:
        return next(self._problems(), None)

    def is_absent(self) -> bool:
        """Return whether it is known that there is no such pool, or no valid one."""
        pool = self._pool
        return pool is not None and pool.synced and not pool.view

    async def run(self) -> None:
        async with self._connect() as api, asyncio.TaskGroup() as group:
            selected = self._target.pods
            if selected is None:
                self._follow_pool(api, group)
            else:
                self._reconciler.use_pool(selected, self._clock())
                # Known at once: no object can refer to Pods without an InferencePool.
                self._reconciler.use_objectives(())
                self._reconciler.use_rewrites(())
            await self._apply_changes(api, group)

    # What is followed

    def _follow_pool(self, api: KubernetesApi, group: asyncio.TaskGroup) -> None:
        pool = self._target.pool
        resource = LEGACY_POOLS if pool.group == LEGACY_POOLS.group else POOLS
        selection = Selection(pool.namespace, field_selector=f"metadata.name={pool.name}")
        reflector = self._reflector(api, resource, selection, self._reader.read_pool, Pace())
        reflector.subscribe(self._pool_changed)
        self._pool = reflector
        group.create_task(reflector.run(), name="reflector pool")
        objectives = self._follower(
            api, OBJECTIVE_KIND, self._reader.read_objective, self._reconciler.use_objectives
        )
        rewrites = self._follower(
            api, REWRITE_KIND, self._reader.read_rewrite, self._reconciler.use_rewrites
        )
        self._policies = [objectives, rewrites]
        group.create_task(objectives.run(api), name="objectives")
        group.create_task(rewrites.run(api), name="rewrites")

    def _follower(
        self, api: KubernetesApi, kind: Kind, decode: Decode[R], use: Callable[[Iterable[R]], None]
    ) -> KindFollower[R]:
        def changed(records: Iterable[R]) -> None:
            use(records)
            self._changed.set()

        everything = Selection(self._target.pool.namespace)
        reflect = partial(self._reflector, api, selection=everything, decode=decode)
        return KindFollower(kind, reflect, changed)

    def _reflector(
        self,
        api: KubernetesApi,
        resource: ApiResource,
        selection: Selection,
        decode: Decode[R],
        pace: Pace = _PACE,
    ) -> Reflector[R]:
        return Reflector(
            api,
            Subject(resource, selection, decode),
            rng=self._rng,
            clock=self._clock,
            series=self._series,
            pace=pace,
        )

    def _watch_wanted_pods(self, api: KubernetesApi, group: asyncio.TaskGroup) -> None:
        wanted = self._reconciler.selectors
        for selector in [one for one in self._pods if one not in wanted]:
            self._pods.pop(selector).task.cancel()
        for selector in wanted:
            if selector not in self._pods:
                self._pods[selector] = self._pod_watch(api, group, selector)

    def _pod_watch(self, api: KubernetesApi, group: asyncio.TaskGroup, selector: str) -> _PodWatch:
        selection = Selection(self._target.pool.namespace, label_selector=selector)
        reflector = self._reflector(api, PODS, selection, self._reader.read_pod)
        task = group.create_task(reflector.run(), name=f"reflector pods {selector}")
        watch = _PodWatch(reflector, task)

        def take(view: Mapping[ObjectKey, PodRecord], changed: Collection[ObjectKey]) -> None:
            watch.news = view
            watch.changed.update(dict.fromkeys(changed))
            self._changed.set()

        reflector.subscribe(take)
        return watch

    # Events

    def _pool_changed(self, view: Mapping[ObjectKey, Pool], _: Collection[ObjectKey]) -> None:
        pool = next(iter(view.values()), None)
        wanted = None
        if pool is not None:
            wanted = PoolShape(pool.label_selector, pool.selects, pool.target_ports)
        elif self._pool is not None and not self._pool.malformed:
            log.warning("there is no %s", self._called)
        self._reconciler.use_pool(wanted, self._clock())
        for watch in self._pods.values():
            # A pool that was gone for a moment has lost its Pods, while their watch continues.
            if watch.reflector.synced:
                watch.news = watch.reflector.view
        self._changed.set()

    async def _apply_changes(self, api: KubernetesApi, group: asyncio.TaskGroup) -> None:
        """Apply new views and deadlines until cancelled."""
        while True:
            # Before the views are read, so that a change meanwhile is not missed.
            self._changed.clear()
            began = self._clock()
            for selector, watch in self._pods.items():
                if watch.news is not None:
                    self._reconciler.use_pods(selector, watch.news, watch.changed, began)
                    watch.news, watch.changed = None, {}
            stale = [one for one, watch in self._pods.items() if watch.reflector.problem()]
            due = self._reconciler.apply(began, stale)
            self._watch_wanted_pods(api, group)
            spent = self._clock() - began
            await asyncio.sleep(max(GATHER_SECONDS, spent / MAX_SHARE))
            with suppress(TimeoutError):
                if due is not None:
                    due = max(due, began + NEWS_SECONDS) - self._clock()
                async with asyncio.timeout(due):
                    await self._changed.wait()

    # What is wrong

    def _problems(self) -> Iterator[str]:
        pool = self._pool
        followed: list[Reflector[Any] | KindFollower[Any]] = [] if pool is None else [pool]
        followed += [watch.reflector for watch in self._pods.values()]
        for one in (*followed, *self._policies):
            problem = one.problem()
            if problem is not None:
                yield problem
        if pool is None:
            return
        for why in pool.malformed.values():
            yield f"{self._called} is not followed: {why}"
        if pool.synced and pool.installed and not pool.view and not pool.malformed:
            yield f"there is no {self._called}"

    @property
    def _called(self) -> str:
        pool = self._target.pool
        return f"InferencePool {pool} of {pool.group}"
