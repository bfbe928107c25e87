"""A page on which everything has happened once, and ways to read it."""

from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from worker.app import cache_info
from worker.config import EngineConfig
from worker.engine.messages import EngineReady
from worker.metrics.page import RequestRecord, WorkerMetrics
from worker.types import (
    EngineStats,
    FinishReason,
    PullStats,
    SchedulerCounters,
    SpeculationStats,
    TierStats,
    TransferStats,
)

STATS = EngineStats(
    num_running=2,
    num_waiting=3,
    kv_cache_usage=0.25,
    num_deferred=1,
    num_evictions=6,
    num_hash_collisions=7,
    num_event_batches_dropped=9,
    sleep_level=None,
    num_restarts=1,
    stalled_seconds=0.5,
    scheduler=SchedulerCounters(
        prefix_cache_queries=100,
        prefix_cache_hits=40,
        num_preemptions=5,
        prompt_tokens=600,
        prompt_tokens_cached=200,
        generation_tokens=70,
        num_steps=80,
        num_corrupted_requests=8,
        num_out_of_memory=3,
        external_cache_queries=90,
        external_cache_hits=80,
        prompt_tokens_external=60,
        prompt_tokens_host=30,
        prompt_tokens_disk=20,
    ),
    speculation=SpeculationStats(
        num_drafts=10,
        num_draft_tokens=25,
        num_accepted_tokens=11,
        num_accepted_by_position=(8, 3),
        num_drafter_failures=4,
        num_speculative_tokens=2.5,
    ),
    pulls=PullStats(num_fetching=2, num_fetched=1),
    transfers=TransferStats(num_failed=3, num_expired=2, bytes_sent=1000, bytes_received=2000),
    tiers=TierStats(
        host_blocks=12,
        host_usage=0.75,
        host_bytes_saved=3000,
        host_bytes_loaded=4000,
        num_host_saves_skipped=13,
        disk_blocks=14,
        disk_bytes_written=5000,
        disk_bytes_read=6000,
        num_disk_failures=15,
    ),
)


def record(**changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "reason": FinishReason.STOP,
        "num_prompt_tokens": 30,
        "num_generation_tokens": 4,
        "max_tokens": 16,
        "num_preemptions": 1,
        "arrival_seconds": 10.0,
        "scheduled_seconds": 11.0,
        "first_token_seconds": 13.0,
        "last_token_seconds": 16.0,
        "finished_seconds": 16.5,
        "num_cached_tokens": 20,
        "n": 2,
        "max_num_generation_tokens": 7,
    }
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def make_record() -> Callable[..., RequestRecord]:
    return record


@pytest.fixture
def page() -> bytes:
    metrics = WorkerMetrics("m", 1024, 123.5, num_speculative_tokens=3)
    metrics.set_cache_info(cache_info(EngineConfig("sim", None), EngineReady(100, 16, 800, 0.0)))
    metrics.request_ended(record())
    metrics.step_done(12)
    metrics.first_token(0.5)
    metrics.sleep_done(0.25)
    metrics.next_tokens(0.02, 3)
    metrics.refused("max_num_queued_reqs")
    metrics.refused("draining")
    metrics.internal_error()
    metrics.http.done("/v1/completions", "POST", 200, 0.2, 100, 1000)
    return metrics.render(STATS, 0.0)


@pytest.fixture
def families(page: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page.decode())}
