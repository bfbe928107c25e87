"""Pages with exemplars are scanned, and metrics are extracted from whatever a page may be."""

from typing import Any

from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import generate_latest

from picker.scrape.engines import ENGINES
from picker.scrape.exposition import greatest, scan
from picker.scrape.extract import extract
from picker.scrape.sources import ExtractError, Scrape
from picker.types import Endpoint, EndpointMetrics
from tests.fuzz.conftest import ForSeconds

ENGINE_LABELS = (
    *("engine", "dp_rank", "tp_rank", "block_size", "num_gpu_blocks", "max_lora"),
    *("running_lora_adapters", "request_type", "kv_cache_block_type"),
)
TEXT = st.text(alphabet=[*'ab0\\"\n{},=# \t}', "é", "☃"], max_size=10)
VALUES = st.one_of(
    st.sampled_from(["0", "NaN", "nan", "+Inf", "-Inf", "inf", "-0", "1e400", "5e-324", "0x1p3"]),
    st.floats().map(repr),
    st.integers(-(2**70), 2**70).map(str),
)


def exemplars(numbers: list[tuple[str, float]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    counter = Counter("requests", "Requests # 1.", ["model"], registry=registry)
    gauge = Gauge("load", "Load {x}.", ["model"], registry=registry)
    times = Histogram("times", "Times.", ["model"], registry=registry)
    for model, number in numbers:
        exemplar = {"trace": f'{model[:9]}"}} #'}
        counter.labels(model).inc(abs(number), exemplar)
        gauge.labels(model).set(number)
        times.labels(model).observe(number, exemplar)
    return registry


def test_exemplars_do_no_harm(for_seconds: ForSeconds) -> None:
    def check(numbers: list[tuple[str, float]]) -> None:
        registry = exemplars(numbers)
        page = generate_latest(registry)
        samples = [sample for family in registry.collect() for sample in family.samples]
        for name in ("requests_total", "load", "times_bucket", "times_count"):
            expected = [(one.labels, one.value) for one in samples if one.name == name]
            found = scan(page, [name]).get(name, ())
            assert [(dict(one.labels), one.value) for one in found] == expected
            best = greatest(page, name)
            assert (best.value if best else None) == max((v for _, v in expected), default=None)

    for_seconds(st.lists(st.tuples(TEXT, st.floats(-1e9, 1e9))), check)


@st.composite
def engine_pages(draw: st.DrawFn) -> tuple[str, bytes]:
    engine = draw(st.sampled_from(sorted(ENGINES)))
    names = [*ENGINES[engine].all_names, "vllm:lora_requests_info"]
    labels = st.dictionaries(
        st.sampled_from(ENGINE_LABELS),
        st.sampled_from(["0", "1", "16", "a,b", "waiting", "fraction", "٣", "9" * 30]),
        max_size=4,
    )
    lines = [
        name
        + "{"
        + ",".join(f'{key}="{text}"' for key, text in draw(labels).items())
        + "} "
        + draw(VALUES)
        for name in draw(st.lists(st.sampled_from(names), max_size=15))
    ]
    return engine, "\n".join(lines).encode()


def usable(metrics: EndpointMetrics) -> bool:
    counts: list[Any] = [metrics.waiting_requests, metrics.running_requests]
    usage = metrics.kv_cache_usage
    return (
        all(count is None or (isinstance(count, int) and count >= 0) for count in counts)
        and (usage is None or 0 <= usage <= 1)
        and any(signal is not None for signal in (*counts, usage))
        and (metrics.block_size_tokens is None or metrics.block_size_tokens > 0)
        and (metrics.num_kv_blocks is None or metrics.num_kv_blocks > 0)
    )


def test_metrics_of_any_page_are_usable(for_seconds: ForSeconds) -> None:
    def check(case: tuple[str, bytes]) -> None:
        engine, page = case
        for previous in (None, EndpointMetrics(1, 1, 0.5)):
            for rank in (None, 1):
                scrape = Scrape(page, Endpoint("w", "10.0.0.1", 1), 0.0, previous, rank)
                try:
                    findings = extract(scrape, ENGINES[engine])
                except ExtractError:
                    continue
                assert findings.metrics is not None
                assert usable(findings.metrics)

    for_seconds(engine_pages(), check)
