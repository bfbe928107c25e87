"""Reports the series of flow control; the label `priority` is the priority of a request's band."""

from collections import Counter as Tally
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from base.series import Counter, Gauge, Histogram
from picker.flowcontrol.band import Band
from picker.flowcontrol.outcomes import FlowOutcome
from picker.flowcontrol.reclaim import Revocation
from picker.flowcontrol.saturation import PoolLoad
from picker.flowcontrol.settings import FlowControlSettings
from picker.flowcontrol.waiting import Labels
from picker.framework.flow import JudgesStaleness, QueuedRequest
from picker.metrics.label_caps import MAX_LABEL_SETS, OVERFLOW
from picker.metrics.picker_metrics import PickerMetrics

EFFECTIVE = "effective"
CONFIRMED = "confirmed"
TIMED_OUT = "timed_out"


class Readings(Protocol):
    def pool_load(self) -> PoolLoad: ...

    def num_stale(self) -> int: ...

    def queued(self) -> tuple[int, int]: ...

    def pending_reclaim(self) -> float: ...


class FlowReporter:
    """Owns the label sets of flow control, and counts its outcomes."""

    def __init__(self, metrics: PickerMetrics, pool_name: str, readings: Readings) -> None:
        self._metrics = metrics
        self._series = metrics.flow
        self._pool = pool_name
        self._readings = readings
        self._ends: dict[tuple[Labels, FlowOutcome], tuple[Histogram, Counter]] = {}
        self._models: dict[tuple[str, str], set[tuple[str, str]]] = {}  # by fairness id, priority
        self._detector: str | None = None
        self._stages: frozenset[str] = frozenset()
        self._bands: dict[str, Band] = {}
        self.outcomes: Tally[FlowOutcome] = Tally()

    def labels(self, item: QueuedRequest, priority: int) -> Labels:
        request = item.request
        return self._metrics.labels.of(
            request.incoming_model, request.target_model, item.flow, priority
        )

    def ended(self, labels: Labels, outcome: FlowOutcome, queue_seconds: float) -> None:
        self.outcomes[outcome] += 1
        ends = self._ends.get((labels, outcome)) or self._ends_of(labels, outcome)
        ends[0].observe(queue_seconds)
        ends[1].inc()

    def enqueued(self, labels: Labels, outcome: FlowOutcome, seconds: float) -> None:
        """Report the time to enqueue a request, or to answer it without a wait."""
        _, _, fairness_id, priority = self._metrics.labels.ending(labels, outcome.value)
        times = self._series.request_enqueue_duration_seconds
        times.labels(fairness_id, priority, outcome.value).observe(seconds)

    def waits(self, labels: Labels, item: QueuedRequest, times: int = 1) -> None:
        """Count a waiting request; `times` is -1 for one that no longer waits."""
        where = self._where(labels)
        self._series.queue_size.labels(*where).inc(times)
        self._series.queue_bytes.labels(*where).inc(times * item.size_bytes)

    def forgotten(self, priority: int, flow: str) -> None:
        fairness_id = self._metrics.labels.tenant(flow)
        key = (fairness_id, str(priority))
        # Other tenants share these series.
        if fairness_id == OVERFLOW:
            return
        series = self._series
        for model, target in self._models.pop(key, ()):
            labels = (model, target, *key)
            where = self._where(labels, is_reported=False)
            series.queue_size.remove(*where)
            series.queue_bytes.remove(*where)
            for outcome in FlowOutcome:
                self._ends.pop((labels, outcome), None)
                series.request_queue_duration_seconds.remove(
                    *key, outcome.value, self._pool, model, target
                )
                series.request_enqueue_duration_seconds.remove(*key, outcome.value)

    def cycled(self, seconds: float) -> None:
        self._series.dispatch_cycle_duration_seconds.observe(seconds)

    def revoked(self, revocation: Revocation) -> None:
        priority = str(revocation.priority)
        issued = self._series.revocations_issued_total.labels(priority, self._pool)
        issued.inc(len(revocation.victims))
        self._series.reclaim_target.labels(self._pool).set(revocation.target)

    def confirmed(self, seconds: float) -> None:
        self._series.revocations_total.labels(CONFIRMED, self._pool).inc()
        self._series.revocation_confirmation_seconds.labels(self._pool).observe(seconds)

    def timed_out(self, count: int) -> None:
        if count:
            self._series.revocations_total.labels(TIMED_OUT, self._pool).inc(count)

    def use(self, settings: FlowControlSettings | None) -> None:
        """Declare the gauges of these settings; None leaves only the counters."""
        series, readings = self._series, self._readings
        series.pending_reclaim.labels(self._pool).set_function(readings.pending_reclaim)
        self._report_caps(settings)
        if self._detector is not None:
            series.stale_endpoints.remove(self._detector)
            self._detector = None
        if settings is None:
            self.bands(())
            self._report_stages(frozenset())
            return
        self.stages(())
        if isinstance(settings.detector, JudgesStaleness):
            self._detector = settings.detector_name
            series.stale_endpoints.labels(self._detector).set_function(readings.num_stale)

    def stages(self, stages: Iterable[str]) -> None:
        current = frozenset((*stages, EFFECTIVE))
        if current != self._stages:
            self._report_stages(current)

    def bands(self, bands: Iterable[Band]) -> None:
        current = {str(band.priority): band for band in bands}
        gauges = self._series.capacity_utilization_requests, self._series.capacity_utilization_bytes
        for priority in self._bands.keys() - current.keys():
            for gauge in gauges:
                gauge.remove(priority, self._pool)
        for priority, band in current.items():
            if self._bands.get(priority) is not band:
                _watch_band(band, *(gauge.labels(priority, self._pool) for gauge in gauges))
        self._bands = current

    def _report_caps(self, settings: FlowControlSettings | None) -> None:
        series = self._series
        caps = (None, None) if settings is None else (settings.max_requests, settings.max_bytes)
        gauges = (
            series.global_capacity_utilization_requests,
            series.global_capacity_utilization_bytes,
        )
        for place, (gauge, cap) in enumerate(zip(gauges, caps, strict=True)):
            gauge.remove(self._pool)
            if cap is not None:
                gauge.labels(self._pool).set_function(partial(self._used, place, cap))

    def _used(self, place: int, cap: int) -> float:
        return _part(self._readings.queued()[place], cap)

    def _report_stages(self, current: frozenset[str]) -> None:
        gauge = self._series.pool_saturation
        for stage in self._stages - current:
            gauge.remove(self._pool, stage)
        for stage in current - self._stages:
            gauge.labels(self._pool, stage).set_function(partial(self._saturation, stage))
        self._stages = current

    def _saturation(self, stage: str) -> float:
        load = self._readings.pool_load()
        return load.effective if stage == EFFECTIVE else load.stages.get(stage, 0.0)

    def _ends_of(self, labels: Labels, outcome: FlowOutcome) -> tuple[Histogram, Counter]:
        if len(self._ends) >= MAX_LABEL_SETS:
            self._ends.clear()
        self._where(labels)
        durations, totals = self._series.request_queue_duration_seconds, self._series.requests_total
        value = outcome.value
        model, target, fairness_id, priority = self._metrics.labels.ending(labels, value)
        ends = self._ends[labels, outcome] = (
            durations.labels(fairness_id, priority, value, self._pool, model, target),
            totals.labels(value, labels[3], self._pool),
        )
        return ends

    def _where(self, labels: Labels, is_reported: bool = True) -> tuple[str, ...]:
        model, target, fairness_id, priority = labels
        if is_reported:
            self._models.setdefault((fairness_id, priority), set()).add((model, target))
        return fairness_id, priority, self._pool, model, target


def _part(used: int, cap: int) -> float:
    return used / cap if cap > 0 else 1.0


def _watch_band(band: Band, requests: Gauge, sizes: Gauge) -> None:
    """Report how full the band is; its caps are read at each scrape because they may change."""
    requests.set_function(lambda: _part(band.num_requests, band.settings.max_requests))
    sizes.set_function(lambda: _part(band.num_bytes, band.settings.max_bytes))
