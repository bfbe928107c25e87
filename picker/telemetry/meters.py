"""The meters of some kinds of plugins: series about their findings in a decision.

A meter is called with each step of its plugin that did not fail, when the request leaves or is
over. It reads the decision, never the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from base.series import Counter, Histogram
from picker.decisions.decision import Decision
from picker.decisions.steps import Meter, Observed, PluginStep
from picker.errors import PickerError
from picker.framework.attributes import DataKey
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY
from picker.framework.interfaces import KvEventConsumer, ProducesData, RevisionGate
from picker.metrics.picker_metrics import KvSeries, PickerMetrics
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.types import BYTES_PER_TOKEN, Candidate, Endpoint, SchedulingResult

T = TypeVar("T")
PD_HANDLER = "pd-profile-handler"
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """Observes the best match of each request; `index` counts look-ups of engines' blocks."""

    key: DataKey[PrefixCacheMatchInfo]
    hit_ratio: Histogram
    hit_bytes: Histogram
    index: KvSeries | None = None

    def __call__(self, decision: Decision, step: PluginStep) -> Observed:
        info = None if decision.attributes is None else decision.attributes.get(self.key)
        if info is None or not info.total_blocks:
            return ()
        best = max(info.match_blocks.values(), default=0)
        if self.index is not None:
            self.index.lookup_requests_total.inc()
            self.index.lookup_hits_total.inc(best)
            self.index.max_pod_hit_count_total.inc(best)
            self.index.lookup_latency_seconds.observe(step.seconds)
        return (
            (self.hit_ratio, best / info.total_blocks),
            (self.hit_bytes, best * info.block_size_tokens * BYTES_PER_TOKEN),
        )


@dataclass(frozen=True, slots=True)
class DisaggregationDecisions:
    decisions: Counter
    metrics: PickerMetrics
    labels: tuple[str, str]

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        stages = found(decision, DISAGGREGATION_DECISION_KEY)
        if stages is not None:
            model = self.metrics.labels.model(decision.target_model) or UNKNOWN_MODEL
            self.decisions.labels(*self.labels, model, stages.value).inc()


@dataclass(slots=True)
class StrictSelections:
    """Counts requests whose header selected no candidate. Owns the last request's candidates."""

    gate: RevisionGate
    unmatched: Counter
    labels: tuple[str, str]
    last: Sequence[Candidate] = ()

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        before, after = step.said
        if after is None:  # it failed
            return
        self.last = before
        if before and not after and decision.request is not None:
            for selector in self.gate.unmatched_selectors(decision.request, before):
                self.unmatched.labels(*self.labels, selector).inc()

    def shares(self) -> Mapping[str, float]:
        """Return the probability of each revision, as of the last request."""
        return self.gate.revision_shares(self.last)


@dataclass(frozen=True, slots=True)
class SchedulingAttempts:
    metrics: PickerMetrics

    def __call__(self, decision: Decision, step: PluginStep) -> None:
        result, name = step.said, decision.target_model
        if isinstance(result, SchedulingResult):
            first = result.endpoints[0]
            model = self.metrics.labels.model(name, first.name)
            labels = ("success", model, first.name, first.namespace, str(first.port))
        elif isinstance(result, PickerError):
            labels = ("failure", self.metrics.labels.model(name), "", "", "")
        else:
            return
        self.metrics.scheduler_attempts_total.labels(*labels).inc()


@runtime_checkable
class Metered(Protocol):
    """A plugin that supplies its own meters, because only its type knows its findings."""

    def meter(
        self, point: str, labels: tuple[str, str], metrics: PickerMetrics
    ) -> Meter | None: ...


def meter_of(
    point: str, name: str, type_name: str, plugin: object, metrics: PickerMetrics
) -> Meter | None:
    """Return the plugin's meter at an extension point, if it has one besides its durations."""
    labels, series = (name, type_name), metrics.plugins
    if point == "Screener" and isinstance(plugin, RevisionGate):
        unmatched = series.disaggregatedset_strict_header_no_match_total
        return StrictSelections(plugin, unmatched, (type_name, name))
    if point == "DataProducer" and (matches := _key(plugin, MATCH_INFO)) is not None:
        index = metrics.kv if isinstance(plugin, KvEventConsumer) else None
        ratios = metrics.prefix_indexer_hit_ratio.labels(*labels)
        return PrefixMatches(
            matches, ratios, metrics.prefix_indexer_hit_bytes.labels(*labels), index
        )
    if point == "PreRequest" and _key(plugin, DISAGGREGATION_DECISION_KEY.data_type) is not None:
        is_older = type_name == PD_HANDLER
        decisions = series.pd_decision_total if is_older else series.disagg_decision_total
        return DisaggregationDecisions(decisions, metrics, labels)
    return plugin.meter(point, labels, metrics) if isinstance(plugin, Metered) else None


def _key(plugin: object, data_type: str) -> DataKey[Any] | None:
    keys = plugin.produces if isinstance(plugin, ProducesData) else ()
    return next((key for key in keys if key.data_type == data_type), None)


def found(decision: Decision, key: DataKey[T]) -> T | None:
    return None if decision.attributes is None else decision.attributes.get(key)


def picked_endpoint(decision: Decision) -> Endpoint | None:
    """Return the first endpoint that the primary profile picked."""
    result = decision.result
    profile = None if result is None else result.profiles.get(result.primary_profile)
    return profile.picked[0].candidate.endpoint if profile and profile.picked else None
