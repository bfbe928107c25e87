"""The stages of an ended request as spans within its own, with vLLM's attributes."""

from collections.abc import Sequence

from base.tracing import RequestTrace, Traced
from worker.metrics.page import RequestRecord

TRACED = Traced("worker", "pointsman-worker", "llm_request")


def add_stages(trace: RequestTrace, request_id: str, records: Sequence[RequestRecord]) -> None:
    """Add queue, KV transfer, prefill and decode of each sequence, and attributes of the first."""
    trace.set("gen_ai.request.id", request_id)
    for one in records:
        trace.stage("queue", one.arrival_seconds, one.scheduled_seconds, one.finished_seconds)
        trace.stage("kv_transfer", one.arrival_seconds, one.kv_arrived_seconds)
        trace.stage("prefill", one.scheduled_seconds, one.first_token_seconds, one.finished_seconds)
        if one.num_generation_tokens > 1:
            trace.stage("decode", one.first_token_seconds, one.last_token_seconds)
    for one in records[:1]:
        trace.set("gen_ai.request.max_tokens", one.max_tokens)
        trace.set("gen_ai.request.n", len(records))
        trace.set("gen_ai.usage.prompt_tokens", one.num_prompt_tokens)
        trace.set("gen_ai.usage.cached_tokens", one.num_cached_tokens)
        trace.set("gen_ai.usage.completion_tokens", sum(r.num_generation_tokens for r in records))
        trace.set("gen_ai.response.finish_reason", one.reason.value)
        arrival, scheduled = one.arrival_seconds, one.scheduled_seconds
        first, last = one.first_token_seconds, one.last_token_seconds
        trace.latency("e2e", arrival, one.finished_seconds)
        trace.latency("time_in_queue", arrival, scheduled)
        trace.latency("time_to_first_token", arrival, first)
        trace.latency("time_in_model_prefill", scheduled, first)
        trace.latency("time_in_model_decode", first, last)
        trace.latency("time_in_model_inference", scheduled, last)
