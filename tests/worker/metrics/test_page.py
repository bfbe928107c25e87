"""The metrics page as Prometheus reads it, dashboards of vLLM look for it, and HTTP fills it."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from picker.scrape.engines import ENGINES
from picker.scrape.exposition import scan
from picker.scrape.extract import extract
from picker.scrape.sources import Scrape
from picker.types import Endpoint
from worker.metrics.page import EXCLUDED_HANDLERS, HttpMetrics, RequestRecord, WorkerMetrics
from worker.types import AdapterStats, EngineStats, FinishReason, SchedulerCounters

Make = Callable[..., RequestRecord]


def page(of: WorkerMetrics, stats: EngineStats | None = None) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    text = of.render(stats or EngineStats(), 0.0).decode()
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", family.name
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = ",".join(f"{k}={v}" for k, v in rest.items())
            assert key not in found.setdefault(sample.name, {}), sample
            found[sample.name][key] = sample.value
    return found


def test_loaded_and_awaited_adapters_are_labels() -> None:
    subject = WorkerMetrics("m", 64, 123.5, max_loras=2)
    (first,) = page(subject)["vllm:lora_requests_info"].items()
    assert first == ("max_lora=2,waiting_lora_adapters=,running_lora_adapters=", 123.5)
    stats = EngineStats(adapters=AdapterStats(("sql", "chat"), ("code",)))
    ((labels, value),) = page(subject, stats)["vllm:lora_requests_info"].items()
    assert labels == "max_lora=2,waiting_lora_adapters=code,running_lora_adapters=sql,chat"
    assert value > 123.5
    assert page(subject, stats)["vllm:lora_requests_info"] == {labels: value}


def test_the_engines_numbers_are_those_of_the_snapshot() -> None:
    stats = EngineStats(
        2, 3, 0.25, scheduler=SchedulerCounters(100, 40, 5, prompt_tokens=600, generation_tokens=70)
    )
    found = page(WorkerMetrics("m", 8192, 123.5), stats)
    assert {
        name: found[f"vllm:{name}"][""]
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "num_preemptions_total",
            "prompt_tokens_total",
            "generation_tokens_total",
        )
    } == {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "num_preemptions_total": 5,
        "prompt_tokens_total": 600,
        "generation_tokens_total": 70,
    }
    assert found["process_start_time_seconds"][""] == 123.5


def test_an_ended_request_is_counted_by_reason_and_stage(make_record: Make) -> None:
    subject = WorkerMetrics("m", 8192, 0.0)
    subject.request_ended(make_record())
    found = page(subject)
    sums = {
        name: found[f"vllm:{name}_sum"][""]
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_max_tokens",
            "request_num_preemptions",
        )
    }
    assert list(sums.values()) == [6.5, 1, 2, 3, 5, 1, 30, 4, 16, 1]
    assert found["vllm:request_success_total"] == {
        "finished_reason=stop": 1,
        "finished_reason=length": 0,
        "finished_reason=abort": 0,
        "finished_reason=error": 0,
        "finished_reason=repetition": 0,
    }


def test_a_request_that_never_ran_has_no_stages(make_record: Make) -> None:
    subject = WorkerMetrics("m", 8192, 0.0)
    subject.request_ended(
        make_record(
            reason=FinishReason.ABORT,
            scheduled_seconds=None,
            first_token_seconds=None,
            last_token_seconds=None,
        )
    )
    found = page(subject)
    assert found["vllm:e2e_request_latency_seconds_count"][""] == 1
    assert found["vllm:request_queue_time_seconds_count"][""] == 0
    assert found["vllm:request_prefill_time_seconds_count"][""] == 0


def test_sizes_have_buckets_up_to_the_context() -> None:
    found = page(WorkerMetrics("m", 300, 0.0))["vllm:request_prompt_tokens_bucket"]
    assert list(found) == [
        f"le={b}" for b in ("1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf")
    ]


def test_positions_of_drafts_have_series_from_the_start_with_speculation_alone() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    counted = page(WorkerMetrics("m", 64, 0.0, num_speculative_tokens=2))[name]
    assert counted == {"position=0": 0, "position=1": 0}
    assert name not in page(WorkerMetrics("m", 64, 0.0))


def test_names_are_escaped_and_the_cache_is_described() -> None:
    subject = WorkerMetrics('a"b\\c%d', 64, 0.0)
    subject.set_cache_info({"block_size": "16", "num_gpu_blocks": "100"})
    text = subject.render(EngineStats(), 0.0).decode()
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    assert next(s for s in samples if "running" in s.name).labels["model_name"] == 'a"b\\c%d'
    (info,) = [s for s in samples if s.name == "vllm:cache_config_info"]
    assert info.labels == {"block_size": "16", "num_gpu_blocks": "100", "engine": "0"}


def test_steps_tokens_and_refusals_are_observed() -> None:
    subject = WorkerMetrics("m", 64, 0.0)
    subject.step_done(12)
    subject.first_token(0.5)
    subject.next_tokens(0.02)
    subject.refused("draining")
    subject.internal_error()
    found = page(subject)
    assert found["vllm:iteration_tokens_total_sum"][""] == 12
    assert found["vllm:time_to_first_token_seconds_sum"][""] == 0.5
    assert found["vllm:inter_token_latency_seconds_sum"][""] == 0.02
    assert found["pointsman:admission_rejections_total"]["reason=draining"] == 1
    assert found["pointsman:internal_errors_total"]["where=http"] == 1


def test_the_process_is_read_at_most_once_a_second() -> None:
    subject = WorkerMetrics("m", 64, 0.0)

    def process_lines(now: float) -> list[bytes]:
        page = subject.render(EngineStats(), now)
        return [line for line in page.splitlines() if line.startswith(b"process_cpu")]

    first = process_lines(0.0)
    sum(range(2_000_000))
    assert process_lines(0.9) == first
    assert subject.render(EngineStats(), 5.0).count(b"process_start_time_seconds ") == 3


DONE = [
    ("/v1/completions", "POST", 200, 0.2, 100, 1000),
    ("/v1/completions", "POST", 400, 0.05, 10, 90),
    ("/v1/completions", "POST", 204, 3.0, 0, 0),
    ("/v1/models", "GET", 200, 0.001, 0, 300),
    ("none", "GET", 404, 0.001, 0, 50),
]


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
        if not s.name.endswith("_created")
    }


def test_the_page_equals_that_of_the_library() -> None:
    registry = CollectorRegistry()
    total = Counter("http_requests", "", ["method", "status", "handler"], registry=registry)
    request_size = Summary("http_request_size_bytes", "", ["handler"], registry=registry)
    response_size = Summary("http_response_size_bytes", "", ["handler"], registry=registry)
    many = (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5),
        *(10, 30, 60),
    )
    name = "http_request_duration"
    precise = Histogram(f"{name}_highr_seconds", "", registry=registry, buckets=many)
    labels = ["handler", "method"]
    by_route = Histogram(f"{name}_seconds", "", labels, registry=registry, buckets=(0.1, 0.5, 1))
    subject = HttpMetrics()
    for handler, method, status, seconds, request_bytes, response_bytes in DONE:
        subject.done(handler, method, status, seconds, request_bytes, response_bytes)
        subject.render()
        total.labels(method, f"{status // 100}xx", handler).inc()
        request_size.labels(handler).observe(request_bytes)
        response_size.labels(handler).observe(response_bytes)
        precise.observe(seconds)
        by_route.labels(handler, method).observe(seconds)
    assert samples(subject.render()) == samples(generate_latest(registry))


def test_probes_and_scrapes_are_not_counted() -> None:
    """They come many times a second and would hide other requests."""
    subject = HttpMetrics()
    for handler in EXCLUDED_HANDLERS:
        subject.done(handler, "GET", 200, 0.1, 0, 0)
    assert subject.render() == HttpMetrics().render()


def test_methods_cannot_add_series_without_bound() -> None:
    subject = HttpMetrics()
    for number in range(50):
        subject.done("none", f"M{number}", 405, 0.1, 0, 0)
    totals = [key for key in samples(subject.render()) if key[0] == "http_requests_total"]
    assert len(totals) == 1


# What a stock endpoint picker reads of a vLLM endpoint.
PICKER_SERIES = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
)


def test_a_stock_picker_finds_every_series(page: bytes) -> None:
    """Without a type before the sample some scrapers read 0."""
    found = scan(page, PICKER_SERIES)
    assert set(found) == set(PICKER_SERIES)
    assert all(len(samples) == 1 for samples in found.values())
    for name in PICKER_SERIES:
        assert page.index(f"# TYPE {name} gauge".encode()) < page.index(f"\n{name}{{".encode())
    (lora,) = found["vllm:lora_requests_info"]
    assert (lora.labels["max_lora"], lora.value) == ("0", 123.5)


def test_our_picker_reads_load_and_geometry(page: bytes) -> None:
    scrape = Scrape(page, Endpoint("w0", "127.0.0.1", 8000), now_seconds=7.0)
    findings = extract(scrape, ENGINES["vllm"])
    assert findings.problems == ()
    metrics = findings.metrics
    assert (metrics.waiting_requests, metrics.running_requests) == (3, 2)
    assert metrics.kv_cache_usage == 0.25
    assert (metrics.block_size_tokens, metrics.num_kv_blocks) == (16, 100)
    assert metrics.process_start_time_seconds == 123.5
