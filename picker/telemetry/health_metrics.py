"""Records ejections and returns of endpoints, in series and in the log."""

import logging
from collections.abc import Callable

from picker.metrics.label_caps import OVERFLOW, BoundedLabels
from picker.metrics.picker_metrics import PickerMetrics
from picker.outliers.detector import OutlierWatcher, ProbeResult

log = logging.getLogger(__name__)

MAX_LINES = 10
WINDOW_SECONDS = 10.0


class HealthMetrics(OutlierWatcher):
    """Logs only the first of many changes in a short time, and the number of the others."""

    def __init__(self, metrics: PickerMetrics, clock: Callable[[], float]) -> None:
        self._series = metrics.health
        self._labels = BoundedLabels()
        self._clock = clock
        self._window_since = clock()
        self._num_lines = 0
        for result in ProbeResult:
            self._series.probes_total.labels(result.value)

    def ejected(self, key: str, failures: int, wait_seconds: float) -> None:
        label = self._labels.admit(key)
        namespace, _, name = ("", "", OVERFLOW) if label == OVERFLOW else label.partition("/")
        self._series.ejections_total.labels(name, namespace).inc()
        if self._may_log():
            text = "endpoint %s is ejected after %d failures in a row; tried out in %.1f s"
            log.warning(text, key, failures, wait_seconds)

    def probed(self, key: str, result: ProbeResult) -> None:
        self._series.probes_total.labels(result.value).inc()

    def returned(self, key: str) -> None:
        if self._may_log():
            log.info("endpoint %s answers well and is used as before", key)

    def counted(self, num_ejected: int) -> None:
        self._series.ejected.set(num_ejected)

    def _may_log(self) -> bool:
        now = self._clock()
        if now - self._window_since >= WINDOW_SECONDS:
            if self._num_lines > MAX_LINES:
                text = "%d more changes of endpoints' health were not logged"
                log.warning(text, self._num_lines - MAX_LINES)
            self._window_since, self._num_lines = now, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES
