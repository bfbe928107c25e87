"""The plugins that learn from decisions, and their connection to the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from picker.framework.attributes import EndpointLoad
from picker.framework.replicas import SessionMemory, SharesLoads, SharesPlacements, SharesSessions
from picker.peers.outbox import Outbox
from picker.peers.seeds import fingerprint
from picker.peers.wire import PICKER, Batch, EndpointName, LoadKey
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad

_NOTHING: Mapping[str, EndpointLoad] = {}


@dataclass(slots=True)
class Learned:
    placements: int = 0
    bindings: int = 0
    other_seed: int = 0
    other_endpoint: int = 0  # not in this pool, or another server
    other_plugin: int = 0  # not in this configuration
    unusable: int = 0  # includes loads

    def add(self, other: Learned) -> None:
        self.placements += other.placements
        self.bindings += other.bindings
        self.other_seed += other.other_seed
        self.other_endpoint += other.other_endpoint
        self.other_plugin += other.other_plugin
        self.unusable += other.unusable


class Knowledge:
    """Connects the plugins of the configuration in use, and the in-flight counts, to an outbox."""

    def __init__(self, datastore: Datastore, inflight: InflightLoad) -> None:
        self._datastore, self._inflight = datastore, inflight
        self._outbox: Outbox | None = None
        self._placements: dict[str, SharesPlacements] = {}
        self._sessions: dict[str, SessionMemory] = {}
        self._loads: dict[str, SharesLoads] = {}
        self._elsewhere: Mapping[str, Mapping[str, EndpointLoad]] = {}
        self._fingerprints: dict[int, int] = {}  # by seed

    def connect(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._connect_plugins()

    def use(self, plugins: Mapping[str, object]) -> None:
        for placing in self._placements.values():
            placing.report_placements(None)
        for binding in self._sessions.values():
            binding.report_bindings(None)
        for loading in self._loads.values():
            loading.set_loads_elsewhere(_NOTHING)
        self._placements, self._sessions, self._loads = {}, {}, {}
        for name, plugin in plugins.items():
            if isinstance(plugin, SharesPlacements):
                self._placements[name] = plugin
            if isinstance(plugin, SharesLoads):
                self._loads[name] = plugin
            if isinstance(plugin, SharesSessions) and plugin.session_bindings is not None:
                self._sessions[name] = plugin.session_bindings
        self._connect_plugins()
        self.set_loads_elsewhere(self._elsewhere)

    def use_hash_seed(self, seed: int) -> None:
        for plugin in self._placements.values():
            plugin.use_hash_seed(seed)

    def fingerprints(self) -> Mapping[str, int]:
        """Return the fingerprints of the plugins' seeds, by plugin name."""
        found = {}
        for name, plugin in self._placements.items():
            seed = plugin.hash_seed
            if seed not in self._fingerprints:
                self._fingerprints[seed] = fingerprint(seed)
            found[name] = self._fingerprints[seed]
        return found

    def loads(self) -> dict[LoadKey, EndpointLoad]:
        counts = self._inflight.own_counts.items()
        loads: dict[LoadKey, EndpointLoad] = {
            (PICKER, key): EndpointLoad(count) for key, count in counts
        }
        for name, plugin in self._loads.items():
            for key, load in (plugin.own_loads or _NOTHING).items():
                loads[name, key] = load
        return loads

    def set_loads_elsewhere(self, loads: Mapping[str, Mapping[str, EndpointLoad]]) -> None:
        """Publish the summed loads of all peers, by plugin and endpoint."""
        self._elsewhere = loads
        counts = loads.get(PICKER, _NOTHING)
        self._inflight.set_others({key: load.requests for key, load in counts.items()})
        for name, plugin in self._loads.items():
            plugin.set_loads_elsewhere(loads.get(name, _NOTHING))

    def identify(self, key: str) -> EndpointName | None:
        """Return the current server behind an endpoint's key; None if it has left the pool."""
        known = self._datastore.get(key)
        if known is None:
            return None
        endpoint = known.endpoint
        return EndpointName(key, endpoint.host_port, endpoint.incarnation)

    def learn(self, batch: Batch, age_seconds: float, now_seconds: float) -> Learned:
        """Pass the entries of a batch that is `age_seconds` old to the plugins."""
        learned, own = Learned(), self.fingerprints()
        there: dict[EndpointName, bool] = {}
        for one in batch.placements:
            plugin = self._placements.get(one.plugin)
            if plugin is None:
                learned.other_plugin += 1
            elif batch.fingerprints.get(one.plugin) != own[one.plugin]:
                learned.other_seed += 1
            elif not self._is_there(one.endpoint, there) or not one.capacity:
                learned.other_endpoint += 1
            else:
                plugin.placed_elsewhere(one.endpoint.key, one.hashes, one.capacity)
                learned.placements += 1
        for bound in batch.bindings:
            bindings = self._sessions.get(bound.plugin)
            if bindings is None:
                learned.other_plugin += 1
            elif not self._is_there(bound.endpoint, there):
                learned.other_endpoint += 1
            else:
                key = bound.endpoint.key
                bindings.bound_elsewhere(bound.session, key, bound.moves, age_seconds, now_seconds)
                learned.bindings += 1
        return learned

    def _is_there(self, name: EndpointName, known: dict[EndpointName, bool]) -> bool:
        if name not in known:
            known[name] = self.identify(name.key) == name
        return known[name]

    def _connect_plugins(self) -> None:
        outbox = self._outbox
        if outbox is None:
            return
        for name, placing in self._placements.items():
            placing.report_placements(partial(outbox.placed, name))
        for name, binding in self._sessions.items():
            binding.report_bindings(partial(outbox.bound, name))
