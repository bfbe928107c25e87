"""Every series that a plain vLLM 0.32 exposes, as on a page of it: types, labels and buckets."""

from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[2] / "data" / "vllm_0.32_metrics.txt"
VLLMS = {family.name: family for family in text_string_to_metric_families(PAGE.read_text())}
BOTH = {"model_name", "engine"}
# Those of vLLM that only options turn on: the type and the extra labels.
OPTIONAL: dict[str, tuple[str, list[dict[str, str]]]] = {
    "num_requests_kv_fetch_by_stage": (
        "gauge",
        [{"stage": name} for name in ("waiting_to_start", "in_progress", "completed_waiting")],
    ),
    "kv_offload_cpu_cache_usage_perc": ("gauge", [{}]),
    "kv_offload_store_bytes": ("counter", [{}]),
    "kv_offload_load_bytes": ("counter", [{}]),
    "kv_offload_stores_skipped": ("counter", [{}]),
    "corrupted_requests": ("counter", [{}]),
    "watermark_requests": ("counter", [{}]),
    "spec_decode_num_drafts": ("counter", [{}]),
    "spec_decode_num_draft_tokens": ("counter", [{}]),
    "spec_decode_num_accepted_tokens": ("counter", [{}]),
    "spec_decode_num_accepted_tokens_per_pos": (
        "counter",
        [{"position": place} for place in ("0", "1", "2")],
    ),
}
# The values of the page.
VALUES = {
    "num_requests_running": [2],
    "num_requests_waiting": [3],
    "num_requests_waiting_by_reason": [2, 1],
    "num_requests_kv_fetch_by_stage": [0, 2, 1],
    "engine_sleep_state": [1, 0, 0],
    "kv_cache_usage_perc": [0.25],
    "kv_offload_cpu_cache_usage_perc": [0.75],
    "prefix_cache_queries": [100],
    "prefix_cache_hits": [40],
    "external_prefix_cache_queries": [90],
    "external_prefix_cache_hits": [80],
    "mm_cache_queries": [0],
    "mm_cache_hits": [0],
    "num_preemptions": [5],
    "prompt_tokens": [600],
    "prompt_tokens_by_source": [400, 140, 60],
    "prompt_tokens_cached": [200],
    "prompt_tokens_cached_by_source": [140, 30, 10, 20, 0],
    "generation_tokens": [70],
    "request_success": [1, 0, 0, 0, 0],
    "kv_offload_store_bytes": [3000],
    "kv_offload_load_bytes": [4000],
    "kv_offload_stores_skipped": [13],
    "corrupted_requests": [8],
    "watermark_requests": [0],
    "spec_decode_num_drafts": [10],
    "spec_decode_num_draft_tokens": [25],
    "spec_decode_num_accepted_tokens": [11],
    "spec_decode_num_accepted_tokens_per_pos": [8, 3, 0],
}
# The number of observations, and their sum.
HISTOGRAMS = {
    "iteration_tokens_total": (1, 12),
    "request_prompt_tokens": (1, 30),
    "request_generation_tokens": (1, 4),
    "request_max_num_generation_tokens": (1, 7),
    "request_params_max_tokens": (1, 16),
    "request_prefill_kv_computed_tokens": (1, 10),
    "request_params_n": (1, 2),
    "request_num_preemptions": (1, 1),
    "time_to_first_token_seconds": (1, 0.5),
    "sleep_mode_operation_duration_seconds": (1, 0.25),
    "inter_token_latency_seconds": (3, 0.06),
    "request_time_per_output_token_seconds": (1, 1),
    "e2e_request_latency_seconds": (1, 6.5),
    "request_queue_time_seconds": (1, 1),
    "request_inference_time_seconds": (1, 5),
    "request_prefill_time_seconds": (1, 2),
    "request_decode_time_seconds": (1, 3),
}
CACHE_LABELS = {
    *("block_size", "user_specified_block_size", "kv_cache_layout", "prefix_match_unit"),
    *("gpu_memory_utilization", "cache_dtype", "is_attention_free", "num_gpu_blocks_override"),
    *("sliding_window", "enable_prefix_caching", "prefix_caching_hash_algo"),
    *("prefix_cache_retention_interval", "num_gpu_blocks", "num_cpu_blocks"),
    *("effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    *("hash_block_size", "kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend"),
    *("mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded"),
    *("mamba_ssm_cache_dtype", "engine"),
}


def samples(family: Metric) -> list[tuple[str, dict[str, str]]]:
    assert all(s.labels.keys() >= BOTH for s in family.samples)
    extra = [{k: v for k, v in s.labels.items() if k not in BOTH} for s in family.samples]
    return [(s.name, labels) for s, labels in zip(family.samples, extra, strict=True)]


@pytest.mark.parametrize("name", VALUES)
def test_a_gauge_or_counter_is_vllms(families: dict[str, Metric], name: str) -> None:
    family, vllms = families[f"vllm:{name}"], VLLMS.get(f"vllm:{name}")
    if vllms is None:
        kind, labels = OPTIONAL[name]
        suffix = "_total" if kind == "counter" else ""
        assert (family.type, samples(family)) == (
            kind,
            [(family.name + suffix, each) for each in labels],
        )
    else:
        assert (family.type, samples(family)) == (vllms.type, samples(vllms))
    assert [s.value for s in family.samples] == VALUES[name]


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_a_histogram_is_vllms(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    # The duration of sleep is only on the page of an engine that has slept.
    like = name.replace("sleep_mode_operation_duration", "time_to_first_token")
    vllms = VLLMS[f"vllm:{like}"]
    bounds = [[s.labels.get("le") for s in one.samples] for one in (family, vllms)]
    assert (family.type, bounds[0]) == ("histogram", bounds[1])
    by_name = {s.name: s for s in family.samples if not s.name.endswith("_bucket")}
    sums, counts = by_name[f"vllm:{name}_sum"], by_name[f"vllm:{name}_count"]
    assert (counts.value, sums.value) == (HISTOGRAMS[name][0], pytest.approx(HISTOGRAMS[name][1]))
    assert set(sums.labels) == BOTH


def test_refusals_have_vllms_labels(families: dict[str, Metric]) -> None:
    vllm = families["vllm:admission_rejections"].samples
    assert [(s.labels, s.value) for s in vllm] == [
        ({"model_name": "m", "reason": "max_num_queued_reqs"}, 1),
        ({"model_name": "m", "reason": "max_num_queued_tokens"}, 0),
    ]
    own = families["pointsman:admission_rejections"].samples
    assert {s.labels["reason"]: s.value for s in own} == {"draining": 1, "memory": 0}


def test_the_lora_gauge_is_empty_without_adapters(families: dict[str, Metric]) -> None:
    """A picker that scores by adapters finds the series, with empty labels."""
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "max_lora": "0",
        "waiting_lora_adapters": "",
        "running_lora_adapters": "",
    }
    assert sample.value == 123.5


def test_the_cache_is_described_by_every_label(families: dict[str, Metric]) -> None:
    (sample,) = families["vllm:cache_config_info"].samples
    assert set(sample.labels) == CACHE_LABELS
    assert sample.value == 1
    shape = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
    assert [sample.labels[name] for name in shape] == ["16", "100", "1600", "2.0"]
    assert sample.labels["num_gpu_blocks_override"] == "None"


def test_other_series_have_the_prefix_of_this_project(families: dict[str, Metric]) -> None:
    own = {n.removeprefix("pointsman:"): f.samples for n, f in families.items() if "pointsm" in n}
    assert {name: sum(s.value for s in samples) for name, samples in own.items()} == {
        "engine_restarts": 1,
        "engine_stalled": 1,
        "engine_steps": 80,
        "engine_out_of_memory": 3,
        "prefix_cache_evictions": 6,
        "prefix_cache_hash_collisions": 7,
        "kv_event_batches_dropped": 9,
        "kv_transfer_sent_bytes": 1000,
        "kv_transfer_received_bytes": 2000,
        "kv_transfer_failures": 3,
        "kv_transfer_expired": 2,
        "kv_host_tier_blocks": 12,
        "kv_disk_tier_blocks": 14,
        "kv_disk_written_bytes": 5000,
        "kv_disk_read_bytes": 6000,
        "kv_disk_failures": 15,
        "spec_decode_draft_length": 2.5,
        "spec_decode_drafter_failures": 4,
        "admission_rejections": 1,
        "internal_errors": 1,
    }


def test_every_vllm_series_of_the_page_is_in_a_table_above(families: dict[str, Metric]) -> None:
    known = {*VALUES, *HISTOGRAMS}
    known |= {"admission_rejections", "lora_requests_info", "cache_config_info"}
    assert {n.removeprefix("vllm:") for n in families if n.startswith("vllm:")} == known


def test_the_default_series_of_the_library_are_there(families: dict[str, Metric]) -> None:
    assert {"process_start_time_seconds", "process_resident_memory_bytes"} <= set(families)
    assert {"process_cpu_seconds", "process_open_fds", "process_max_fds"} <= set(families)
    assert {"python_info", "python_gc_objects_collected", "python_gc_collections"} <= set(families)
