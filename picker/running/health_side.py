"""What a process remembers of its endpoints' health, and who keeps it up to date."""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random

from picker.admin.health_metrics import HealthMetrics
from picker.datalayer.datastore import Datastore
from picker.datalayer.health import HealthMemory, RememberedHealth
from picker.datalayer.health_record import HealthSettings
from picker.metrics import PickerMetrics
from picker.requestcontrol.pipeline import EndpointHealth, NoHealthMemory


class HealthSide:
    """Owns the memory; without `failures` there is none, and nothing is held against anyone."""

    def __init__(self, failures: int, metrics: PickerMetrics, datastore: Datastore) -> None:
        self._memory: HealthMemory | None = None
        if failures > 0:
            watcher = HealthMetrics(metrics, time.monotonic)
            self._memory = HealthMemory(HealthSettings(failures=failures), watcher, Random())
            datastore.subscribe(self._memory.pool_changed)
            datastore.observe(self._memory)

    @property
    def memory(self) -> EndpointHealth:
        """What requests ask and tell."""
        return NoHealthMemory() if self._memory is None else self._memory

    def views(self) -> Mapping[str, RememberedHealth]:
        """How endpoints have answered, by key; one that is absent has done nothing wrong."""
        return {} if self._memory is None else self._memory.views(time.monotonic())
