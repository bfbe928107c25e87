"""Metrics pages of the engines become endpoint metrics, or a reason why not."""

from __future__ import annotations

import pytest

from picker.datalayer.extract import ENGINES, ExtractError, engine_of, extract
from picker.types import EndpointMetrics

VLLM = b"""\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2048"} 1.0
process_start_time_seconds 1.7e+09
"""
PREVIOUS = EndpointMetrics(9, 8, 0.7, 32, 100, 5.0, 1.0)


def without(page: bytes, name: bytes) -> bytes:
    return b"\n".join(line for line in page.split(b"\n") if not line.startswith(name))


def test_a_vllm_page_is_read_completely() -> None:
    """Every field has its series."""
    extraction = extract(VLLM, ENGINES["vllm"], None, 42.0)
    assert extraction.problems == ()
    assert extraction.metrics == EndpointMetrics(
        waiting_requests=3,
        running_requests=5,
        kv_cache_usage=0.25,
        block_size_tokens=16,
        num_kv_blocks=2048,
        process_start_time_seconds=1.7e9,
        updated_at_seconds=42.0,
    )


@pytest.mark.parametrize(
    ("engine", "page"),
    [
        (
            "sglang",
            b"sglang:num_queue_reqs 1\nsglang:num_running_reqs 2\nsglang:token_usage 0.5\n"
            b'sglang:cache_config_info{page_size="64",num_pages="10"} 1\n',
        ),
        (
            "trtllm-serve",
            b"trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\n"
            b"trtllm_kv_cache_utilization 0.5\ntrtllm_kv_cache_tokens_per_block 64\n"
            b"trtllm_kv_cache_max_blocks 10\n",
        ),
        (
            "triton-tensorrt-llm",
            b'nv_trt_llm_request_metrics{request_type="max"} 99\n'
            b'nv_trt_llm_request_metrics{request_type="waiting"} 1\n'
            b'nv_trt_llm_request_metrics{request_type="scheduled"} 2\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 10\n',
        ),
    ],
)
def test_other_engines_are_read_by_their_row(engine: str, page: bytes) -> None:
    """Same numbers, other names."""
    metrics = extract(page, ENGINES[engine], None, 0.0).metrics
    assert metrics == EndpointMetrics(1, 2, 0.5, 64, 10)


def test_an_engine_without_kv_usage_needs_none() -> None:
    """Plain Triton reports no KV cache."""
    page = b"nv_inference_pending_request_count 4\nnv_inference_exec_count 1\n"
    assert extract(page, ENGINES["triton"], None, 0.0).metrics == EndpointMetrics(4, 1)


def test_a_missing_series_keeps_its_previous_value_and_is_reported() -> None:
    """One lost series does not lose the others."""
    page = without(VLLM, b"vllm:num_requests_waiting")
    extraction = extract(page, ENGINES["vllm"], PREVIOUS, 2.0)
    assert extraction.metrics.waiting_requests == 9
    assert extraction.metrics.running_requests == 5
    assert extraction.problems == ("series 'vllm:num_requests_waiting' is missing",)


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf"])
def test_an_unusable_value_counts_as_missing(value: bytes) -> None:
    """A load is a finite number from zero up."""
    page = VLLM.replace(b'perc{engine="0",model_name="m"} 0.25', b"perc " + value)
    with pytest.raises(ExtractError, match="kv_cache_usage_perc' has the unusable value"):
        extract(page, ENGINES["vllm"], None, 0.0)
    assert extract(page, ENGINES["vllm"], PREVIOUS, 0.0).metrics.kv_cache_usage == 0.7


def test_a_page_without_any_load_is_no_metrics_page() -> None:
    """Even previous values do not make up for a page of something else."""
    with pytest.raises(ExtractError, match="num_requests_running' is missing"):
        extract(b"<html>hello</html>", ENGINES["vllm"], PREVIOUS, 0.0)


def test_geometry_and_start_time_may_be_absent_or_nonsense() -> None:
    """What is not a positive number is not known; what was known stays."""
    page = VLLM.replace(b'"2048"', b'"None"').replace(b"1.7e+09", b"NaN")
    fresh = extract(page, ENGINES["vllm"], None, 0.0).metrics
    assert (fresh.block_size_tokens, fresh.num_kv_blocks) == (16, None)
    assert fresh.process_start_time_seconds is None
    kept = extract(page, ENGINES["vllm"], PREVIOUS, 0.0).metrics
    assert (kept.num_kv_blocks, kept.process_start_time_seconds) == (100, 5.0)


def test_the_latest_timestamp_wins_and_of_equals_the_first() -> None:
    """Several label sets of one series."""
    page = VLLM + b'vllm:num_requests_waiting{engine="1"} 7\n'
    assert extract(page, ENGINES["vllm"], None, 0.0).metrics.waiting_requests == 3
    page = VLLM + b'vllm:num_requests_waiting{engine="1"} 7 1700000000000\n'
    assert extract(page, ENGINES["vllm"], None, 0.0).metrics.waiting_requests == 7


def test_usage_above_one_is_a_full_cache() -> None:
    """Rounding in an engine must not make a negative score."""
    page = VLLM.replace(b" 0.25", b" 1.02")
    assert extract(page, ENGINES["vllm"], None, 0.0).metrics.kv_cache_usage == 1.0


def test_the_engine_comes_from_a_label_new_name_first() -> None:
    """Unknown or absent labels mean the default engine."""
    new, old = "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"
    assert engine_of({new: "sglang", old: "triton"}) is ENGINES["sglang"]
    assert engine_of({old: "triton"}) is ENGINES["triton"]
    assert engine_of({}) is ENGINES["vllm"]
    assert engine_of({new: "else"}, default="sglang") is ENGINES["sglang"]
