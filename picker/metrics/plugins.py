"""The series that only plugins of certain types feed; counted by the wrappers around them.

Gauges of what is true at the moment of a scrape are not here: `admin.plugin_metrics` computes them.
"""

from __future__ import annotations

from picker.metrics.buckets import PREDICTED_TPOT_SECONDS, PREDICTION_SECONDS, RATIOS, SECONDS
from picker.metrics.declarations import MODEL_LABELS, SCHEDULER_PREFIX, Declarations, objective
from picker.metrics.label_caps import BoundedLabels
from picker.metrics.series import AnySeries, Counter, Histogram, Twin

PLUGIN = ("plugin_name", "plugin_type")
DECISION = ("model_name", "decision_type")
MAX_MODALITIES = 16  # some clients name them
PREDICTION = (*PLUGIN, *MODEL_LABELS)


class PluginSeries(Declarations):
    """Owns them; `declared` is where they are told from."""

    def __init__(self, declared: list[AnySeries]) -> None:
        super().__init__(declared)
        self._declare_disaggregation()
        self._declare_encoder_caches()
        self._declare_predictions()

    def _declare_disaggregation(self) -> None:
        self.disagg_decision_total = self._decisions("disagg_decision_total")
        self.pd_decision_total = self._decisions("pd_decision_total")
        self.disaggregatedset_strict_header_no_match_total = self._counter(
            "disaggregatedset_strict_header_no_match_total",
            "Requests whose strict header selected no endpoint.",
            ("plugin_type", "plugin_name", "selector"),
        )

    def _declare_encoder_caches(self) -> None:
        self.modality_labels = BoundedLabels(MAX_MODALITIES)
        labels = ("plugin_type", "plugin_name", "modality")
        self.encoder_cache_queries_total = self._counter(
            "encoder_cache_queries_total", "Multi-modal items of requests that left.", labels
        )
        self.encoder_cache_hits_total = self._counter(
            "encoder_cache_hits_total",
            "Those that their endpoint is believed to have encoded before.",
            (*labels, "pod"),
        )
        self.encoder_cache_hit_ratio = self._histogram(
            "encoder_cache_hit_ratio",
            "Share of a request's items that its endpoint is believed to have encoded.",
            RATIOS,
            labels[:2],
        )

    def _declare_predictions(self) -> None:
        kinds = (*MODEL_LABELS, "type")
        self.inference_request_metric = self._gauge(
            "inference_request_metric",
            "Latencies of the last request, predicted and measured; 1 for one that was too long.",
            (*PREDICTION, "type"),
            objective("inference_request_metric", kinds),
        )
        self.request_slo_violation_total = self._counter(
            "request_slo_violation_total",
            "Requests that took longer than they asked for.",
            (*PREDICTION, "type"),
            objective("request_slo_violation_total", kinds),
        )
        self.request_predicted_ttft_seconds = self._predicted(
            "request_predicted_ttft_seconds", "Predicted time to the first token.", SECONDS
        )
        self.request_predicted_tpot_seconds = self._predicted(
            "request_predicted_tpot_seconds",
            "Predicted time per token after it.",
            PREDICTED_TPOT_SECONDS,
        )
        text = "Time that the prediction took."
        self.request_ttft_prediction_duration_seconds = self._predicted(
            "request_ttft_prediction_duration_seconds", text, PREDICTION_SECONDS
        )
        self.request_tpot_prediction_duration_seconds = self._predicted(
            "request_tpot_prediction_duration_seconds", text, PREDICTION_SECONDS
        )

    def _decisions(self, name: str) -> Counter:
        return self._counter(
            name,
            "Requests by the stages that got an endpoint of their own.",
            (*PLUGIN, *DECISION),
            (Twin(SCHEDULER_PREFIX + name, DECISION),),
        )

    def _predicted(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(name, text, buckets, PREDICTION, objective(name, MODEL_LABELS))
