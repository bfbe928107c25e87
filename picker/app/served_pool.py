"""All that belongs to one pool: what is known of it, what decides its requests, and its numbers."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from picker.admin.pool_face import PoolFace
from picker.app.admin_source import ProcessAdmin
from picker.app.config_status import ConfigStatus, problem_of
from picker.app.leader_side import LeaderSide
from picker.app.peer_side import PeerSide
from picker.app.pool_side import PoolSide
from picker.app.recording_side import RecordingSide
from picker.app.request_side import (
    KnownPool,
    Outside,
    RequestSide,
    config_in_use,
    read_config,
)
from picker.cli.options import Options
from picker.config.findings import Finding
from picker.config.load import LoadedConfig
from picker.config.watch import ConfigWatch
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director


class ServedPool:
    """Owns every collaborator that only one pool has: `known` is what is known of it, `config` by
    what rules it is served, `requests` who decides.
    """

    def __init__(
        self, options: Options, outside: Outside, metrics: PickerMetrics, leader: LeaderSide
    ) -> None:
        """Build everything; opens no port. Raises `ConfigError`."""
        self._options, self._leader = options, leader
        self.metrics, self._inflight = metrics, InflightLoad()
        loaded, content = read_config(options)
        self._may_follow = partial(leader.may_follow, loaded.config)
        self.config = config_in_use(options, loaded, outside, metrics)
        self._watch = self._config_watch(content)
        self._recording = RecordingSide(options, self.config.hash_seed, metrics)
        self.known = PoolSide(
            options, self.config.assembly, metrics, self._inflight, (self._recording,)
        )
        datastore = self.known.datastore
        self._recording.follow(datastore)
        known = KnownPool(datastore, self.known.snapshots, self.known.rules)
        self.requests = RequestSide(options, self.config, outside, metrics, self._inflight, known)
        self.requests.record(self._recording, self.config.assembly)
        self.config.subscribe(self.known.use)
        self.config.subscribe(self.requests.use)
        self.peers = PeerSide(options, self.config, datastore, self._inflight, metrics)
        self.face = PoolFace(
            metrics,
            datastore,
            self._inflight,
            ProcessAdmin(
                self.requests,
                ConfigStatus(self.config, problem_of(self._watch)),
                self.problem,
            ),
        )

    @property
    def datastore(self) -> Datastore:
        """What is known of the pool."""
        return self.known.datastore

    @property
    def director(self) -> Director:
        """What decides its requests."""
        return self.requests.director

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """About the configuration that it began with."""
        return self.config.assembly.warnings

    @property
    def unfinished(self) -> int:
        """How many requests are under way or wait."""
        return self._inflight.own_total + self.requests.waiting

    @property
    def waiting(self) -> int:
        """How many requests wait to be let in."""
        return self.requests.waiting

    @property
    def decisions(self) -> int:
        """How many requests were decided so far."""
        return self.requests.decisions

    def is_known(self) -> bool:
        """Whether its endpoints are."""
        return self.known.datastore.synced

    def is_absent(self) -> bool:
        """Whether there is known to be no such pool."""
        return self.known.is_absent()

    def problem(self) -> str | None:
        """Why what is told of it may be old, in a sentence for people; None: it is current."""
        return self._leader.problem() or self.known.problem()

    def load(self) -> None:
        """Find out for the first time which endpoints exist. Raises `ConfigError`."""
        self.known.load()

    def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin everything that goes on beside the requests, until these are cancelled."""
        tasks = [*self.known.start(group, self._may_follow), *self.requests.start(group)]
        tasks += [*self._recording.start(group), *self.peers.start(group)]
        if self._watch is not None:
            tasks.append(group.create_task(self._watch.run(), name="configuration"))
        return tasks

    def refuse_waiting(self) -> bool:
        """Let nobody in any more; whether any waited, who has to be told."""
        return self.requests.refuse_waiting()

    async def close(self) -> None:
        """Hand over and write what was gathered, once no request is under way any more."""
        await self.requests.flush()
        await self._recording.close()

    def _config_watch(self, content: bytes | None) -> ConfigWatch | None:
        path = self._options.config_file
        if path is None or content is None or not self._options.watch_config:
            return None
        return ConfigWatch(path, content, self._apply, self.metrics, time.time)

    async def _apply(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        """Put another configuration to use. Raises `ConfigError`."""
        return self.config.apply(loaded)
