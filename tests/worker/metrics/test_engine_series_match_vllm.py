"""Every series a plain vLLM 0.32 exposes, by name, type, labels and buckets."""

import pytest
from prometheus_client import Metric

BOTH = {"model_name", "engine"}
ONE_TWO_FIVE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40),
    80,
)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80, 160, 640, 2560),
)

# family → the extra label and its values (None: no extra label), and the values of the page.
GAUGES = {
    "num_requests_running": (None, [2]),
    "num_requests_waiting": (None, [3]),
    "num_requests_waiting_by_reason": (("reason", ["capacity", "deferred"]), [2, 1]),
    "num_requests_kv_fetch_by_stage": (
        ("stage", ["waiting_to_start", "in_progress", "completed_waiting"]),
        [0, 2, 1],
    ),
    "engine_sleep_state": (
        ("sleep_state", ["awake", "weights_offloaded", "discard_all"]),
        [1, 0, 0],
    ),
    "kv_cache_usage_perc": (None, [0.25]),
    "kv_offload_cpu_cache_usage_perc": (None, [0.75]),
}
COUNTERS = {
    "prefix_cache_queries": (None, [100]),
    "prefix_cache_hits": (None, [40]),
    "external_prefix_cache_queries": (None, [90]),
    "external_prefix_cache_hits": (None, [80]),
    "mm_cache_queries": (None, [0]),
    "mm_cache_hits": (None, [0]),
    "num_preemptions": (None, [5]),
    "prompt_tokens": (None, [600]),
    "prompt_tokens_by_source": (
        ("source", ["local_compute", "local_cache_hit", "external_kv_transfer"]),
        [400, 140, 60],
    ),
    "prompt_tokens_cached": (None, [200]),
    "prompt_tokens_cached_by_source": (
        ("source", ["device", "host", "p2p", "disk", "external_unspecified"]),
        [140, 30, 10, 20, 0],
    ),
    "generation_tokens": (None, [70]),
    "request_success": (
        ("finished_reason", ["stop", "length", "abort", "error", "repetition"]),
        [1, 0, 0, 0, 0],
    ),
    "kv_offload_store_bytes": (None, [3000]),
    "kv_offload_load_bytes": (None, [4000]),
    "kv_offload_stores_skipped": (None, [13]),
    "corrupted_requests": (None, [8]),
    "watermark_requests": (None, [0]),
    "spec_decode_num_drafts": (None, [10]),
    "spec_decode_num_draft_tokens": (None, [25]),
    "spec_decode_num_accepted_tokens": (None, [11]),
    "spec_decode_num_accepted_tokens_per_pos": (("position", ["0", "1", "2"]), [8, 3, 0]),
}
# family → buckets, number of observations, their sum.
HISTOGRAMS = {
    "iteration_tokens_total": (
        (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        1,
        12,
    ),
    "request_prompt_tokens": (ONE_TWO_FIVE, 1, 30),
    "request_generation_tokens": (ONE_TWO_FIVE, 1, 4),
    "request_max_num_generation_tokens": (ONE_TWO_FIVE, 1, 7),
    "request_params_max_tokens": (ONE_TWO_FIVE, 1, 16),
    "request_prefill_kv_computed_tokens": (ONE_TWO_FIVE, 1, 10),
    "request_params_n": ((1, 2, 5, 10, 20), 1, 2),
    "request_num_preemptions": ((1, 2, 3, 4, 5, 10, 20), 1, 1),
    "time_to_first_token_seconds": (FIRST_TOKEN, 1, 0.5),
    "sleep_mode_operation_duration_seconds": (FIRST_TOKEN, 1, 0.25),
    "inter_token_latency_seconds": (PER_TOKEN, 3, 0.06),
    "request_time_per_output_token_seconds": (PER_TOKEN, 1, 1),
    "e2e_request_latency_seconds": (LATENCY, 1, 6.5),
    "request_queue_time_seconds": (LATENCY, 1, 1),
    "request_inference_time_seconds": (LATENCY, 1, 5),
    "request_prefill_time_seconds": (LATENCY, 1, 2),
    "request_decode_time_seconds": (LATENCY, 1, 3),
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


def check(
    family: Metric, kind: str, extra: tuple[str, list[str]] | None, values: list[float]
) -> None:
    assert family.type == kind
    suffix = "_total" if kind == "counter" else ""
    assert {s.name for s in family.samples} == {family.name + suffix}
    labels = BOTH if extra is None else {*BOTH, extra[0]}
    assert all(set(s.labels) == labels for s in family.samples)
    assert [s.value for s in family.samples] == values
    if extra is not None:
        assert [s.labels[extra[0]] for s in family.samples] == extra[1]


@pytest.mark.parametrize("name", GAUGES)
def test_a_gauge_is_vllms(families: dict[str, Metric], name: str) -> None:
    check(families[f"vllm:{name}"], "gauge", *GAUGES[name])


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_is_vllms(families: dict[str, Metric], name: str) -> None:
    check(families[f"vllm:{name}"], "counter", *COUNTERS[name])


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_a_histogram_is_vllms(families: dict[str, Metric], name: str) -> None:
    family = families[f"vllm:{name}"]
    buckets, count, total = HISTOGRAMS[name]
    assert family.type == "histogram"
    bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert bounds == [*buckets, float("inf")]
    by_name = {s.name: s for s in family.samples if not s.name.endswith("_bucket")}
    assert by_name[f"vllm:{name}_count"].value == count
    assert by_name[f"vllm:{name}_sum"].value == pytest.approx(total)
    assert set(by_name[f"vllm:{name}_sum"].labels) == BOTH


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
    known = {*GAUGES, *COUNTERS, *HISTOGRAMS}
    known |= {"admission_rejections", "lora_requests_info", "cache_config_info"}
    assert {n.removeprefix("vllm:") for n in families if n.startswith("vllm:")} == known


def test_the_default_series_of_the_library_are_there(families: dict[str, Metric]) -> None:
    assert {"process_start_time_seconds", "process_resident_memory_bytes"} <= set(families)
    assert {"process_cpu_seconds", "process_open_fds", "process_max_fds"} <= set(families)
    assert {"python_info", "python_gc_objects_collected", "python_gc_collections"} <= set(families)
