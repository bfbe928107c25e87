"""HTTP exchanges are counted as prometheus-fastapi-instrumentator counts them."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from worker.metrics.page import EXCLUDED_HANDLERS, HttpMetrics

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
