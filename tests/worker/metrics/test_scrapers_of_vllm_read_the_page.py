"""Scrapers of vLLM can read the worker's page."""

from picker.scrape.engines import ENGINES
from picker.scrape.exposition import scan
from picker.scrape.extract import extract
from picker.scrape.sources import Scrape
from picker.types import Endpoint

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
    assert metrics is not None
    assert (metrics.waiting_requests, metrics.running_requests) == (3, 2)
    assert metrics.kv_cache_usage == 0.25
    assert (metrics.block_size_tokens, metrics.num_kv_blocks) == (16, 100)
    assert metrics.process_start_time_seconds == 123.5
