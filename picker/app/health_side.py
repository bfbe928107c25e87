"""What a process remembers of its endpoints' health, and who keeps it up to date."""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random

from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.breaker import OutlierSettings
from picker.outliers.detector import EndpointHealthView, OutlierDetector
from picker.outliers.settling import NeverUnsure, Settling
from picker.pool.datastore import Datastore
from picker.requestcontrol.pipeline import EndpointHealth, NoHealthMemory
from picker.telemetry.health_metrics import HealthMetrics


class HealthSide:
    """Owns the memory; without `failures` there is none, and nothing is held against anyone."""

    def __init__(self, failures: int, metrics: PickerMetrics, datastore: Datastore) -> None:
        self._memory: OutlierDetector | None = None
        self.settling = Settling(NeverUnsure(), time.monotonic, 0.0)
        if failures > 0:
            watcher = HealthMetrics(metrics, time.monotonic)
            settings = OutlierSettings(failures=failures)
            self._memory = OutlierDetector(settings, watcher, Random(), self._wake)
            patience = settings.burst_wait_seconds
            self.settling = Settling(self._memory, time.monotonic, patience)
            datastore.subscribe(self._memory.pool_changed)

    @property
    def memory(self) -> EndpointHealth:
        """What requests ask and tell."""
        return NoHealthMemory() if self._memory is None else self._memory

    def _wake(self) -> None:
        self.settling.wake()

    def views(self) -> Mapping[str, EndpointHealthView]:
        """How endpoints have answered, by key; one that is absent has done nothing wrong."""
        return {} if self._memory is None else self._memory.views(time.monotonic())
