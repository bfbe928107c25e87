"""Decisions are counted by what they were about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from picker.framework.attributes import Attributes
from picker.metrics.label_caps import MAX_LABEL_SETS
from picker.metrics.picker_metrics import PickerMetrics
from picker.telemetry.timed import TimedScheduler
from picker.types import Api, Candidate, Endpoint, InferenceRequest, ParsedBody, SchedulingResult

POOL = [Candidate(Endpoint("a", "10.0.0.1", 8000))]


@dataclass
class First:
    """A scheduler that takes the first candidate."""

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """It."""
        return SchedulingResult((candidates[0].endpoint,), "default")


def test_a_decision_is_counted_under_its_model_whatever_else_clients_combine() -> None:
    """The cap on combinations of models and tenants has nothing to do with it."""
    metrics = PickerMetrics()
    for number in range(MAX_LABEL_SETS):
        metrics.request_labels("m", "m", f"f{number % 900}", number // 900)
    request = InferenceRequest("r", {}, ParsedBody(Api.COMPLETIONS), "m", "m")
    scheduler = TimedScheduler(First(), metrics, lambda: 0.0)  # type: ignore[arg-type]
    scheduler.schedule(request, POOL, Attributes(), Random(1))
    labels = ("success", "m", "a", "default", "8000")
    assert dict(metrics.scheduler_attempts_total.numbers()) == {labels: 1.0}
