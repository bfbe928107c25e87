"""The stages of an ended request as spans within its own, with vLLM's attributes."""

from collections.abc import Iterable, Sequence

from base.tracing import RequestTrace, Traced
from worker.metrics.page import RequestRecord

TRACED = Traced("worker", "pointsman-worker", "llm_request")


def add_stages(trace: RequestTrace, request_id: str, records: Sequence[RequestRecord]) -> None:
    """Add queue, KV transfer, prefill and decode of each sequence, and attributes of the first."""
    trace.set("gen_ai.request.id", request_id)
    for record in records:
        for name, began, ended in _stages(record):
            trace.stage(name, began, ended)
    if not records:
        return
    first = records[0]
    trace.set("gen_ai.request.max_tokens", first.max_tokens)
    trace.set("gen_ai.request.n", len(records))
    trace.set("gen_ai.usage.prompt_tokens", first.num_prompt_tokens)
    trace.set("gen_ai.usage.cached_tokens", first.num_cached_tokens)
    generated = sum(record.num_generation_tokens for record in records)
    trace.set("gen_ai.usage.completion_tokens", generated)
    trace.set("gen_ai.response.finish_reason", first.reason.value)
    trace.set("gen_ai.latency.e2e", first.finished_seconds - first.arrival_seconds)
    if first.scheduled_seconds is None or first.first_token_seconds is None:
        return
    last = first.last_token_seconds or first.first_token_seconds
    trace.set("gen_ai.latency.time_in_queue", first.scheduled_seconds - first.arrival_seconds)
    trace.set(
        "gen_ai.latency.time_to_first_token", first.first_token_seconds - first.arrival_seconds
    )
    prefill = first.first_token_seconds - first.scheduled_seconds
    trace.set("gen_ai.latency.time_in_model_prefill", prefill)
    trace.set("gen_ai.latency.time_in_model_decode", last - first.first_token_seconds)
    trace.set("gen_ai.latency.time_in_model_inference", last - first.scheduled_seconds)


def _stages(record: RequestRecord) -> Iterable[tuple[str, float, float]]:
    arrival, scheduled = record.arrival_seconds, record.scheduled_seconds
    first, last = record.first_token_seconds, record.last_token_seconds
    yield "queue", arrival, record.finished_seconds if scheduled is None else scheduled
    if record.kv_arrived_seconds is not None:
        yield "kv_transfer", arrival, record.kv_arrived_seconds
    if scheduled is not None:
        yield "prefill", scheduled, record.finished_seconds if first is None else first
    if first is not None and last is not None and last > first:
        yield "decode", first, last
