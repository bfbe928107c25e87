"""An ended request has a span for each stage that it reached."""

import pytest

from base.tracing import RequestTrace
from tests.support.picker.span_notes import Notes
from worker.api.generate.stages import add_stages
from worker.metrics.page import RequestRecord
from worker.types import FinishReason


def record(
    *times: float | None, arrived: float | None = None, num_tokens: int = 5
) -> RequestRecord:
    scheduled, first, last = times
    return RequestRecord(
        FinishReason.LENGTH, 30, num_tokens, 8, 0, 1.0, scheduled, first, last, 9.0, 20, arrived
    )


@pytest.mark.parametrize(
    ("ended", "stages"),
    [
        (record(2.0, 3.0, 5.0), ["queue", "prefill", "decode"]),
        (record(2.0, 3.0, 5.0, arrived=1.5), ["queue", "kv_transfer", "prefill", "decode"]),
        (record(2.0, 3.0, 3.0, num_tokens=1), ["queue", "prefill"]),
        (record(2.0, 3.0, 3.0, num_tokens=2), ["queue", "prefill", "decode"]),
        (record(2.0, 2.0, 2.0, arrived=1.0), ["queue", "kv_transfer", "prefill", "decode"]),
        (record(2.0, None, None, num_tokens=0), ["queue", "prefill"]),
        (record(None, None, None, num_tokens=0), ["queue"]),
    ],
)
def test_a_stage_that_was_not_reached_has_no_span(ended: RequestRecord, stages: list[str]) -> None:
    notes = Notes()
    add_stages(RequestTrace(notes, []), "cmpl-1", [ended])
    (request,) = notes.requests
    assert [part.name for part in request.parts] == stages
    assert all(part.ends == 1 for part in request.parts)


def test_the_request_has_the_attributes_of_vllm() -> None:
    notes = Notes()
    add_stages(RequestTrace(notes, []), "cmpl-1", [record(2.0, 4.0, 8.0)] * 2)
    said = notes.requests[0].said
    assert said["gen_ai.request.id"] == "cmpl-1"
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (30, 10)
    latencies = {
        "time_in_queue": 1.0,
        "time_to_first_token": 3.0,
        "time_in_model_prefill": 2.0,
        "time_in_model_decode": 4.0,
        "time_in_model_inference": 6.0,
        "e2e": 8.0,
    }
    assert {name: said[f"gen_ai.latency.{name}"] for name in latencies} == latencies
