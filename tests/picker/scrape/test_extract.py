"""Metrics pages of the engines become endpoint metrics or an error with a reason."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from picker.scrape.engines import ENGINES, EngineSeries, EngineTable, Series, parse_series
from picker.scrape.extract import MAX_BUCKETS, extract
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.types import Endpoint, EndpointMetrics, ServedTotals

REAL_PAGE = Path(__file__).parents[2] / "data/vllm_0.32_metrics.txt"
VLLM = b"""\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="2048"} 1.0
process_start_time_seconds 1.7e+09
"""
PREVIOUS = EndpointMetrics(9, 8, 0.7, 32, 100, 5.0, updated_at_seconds=1.0)
ENDPOINT = Endpoint("w", "10.0.0.1", 8000)


def read(
    page: bytes,
    engine: EngineSeries = ENGINES["vllm"],
    previous: EndpointMetrics | None = None,
    rank: int | None = None,
) -> Extraction:
    return extract(Scrape(page, ENDPOINT, 42.0, previous, rank, 0.05), engine)


def load(
    page: bytes,
    engine: EngineSeries = ENGINES["vllm"],
    previous: EndpointMetrics | None = None,
    rank: int | None = None,
) -> EndpointMetrics:
    metrics = read(page, engine, previous, rank).metrics
    assert metrics is not None
    return metrics


def without(page: bytes, name: bytes) -> bytes:
    return b"\n".join(line for line in page.split(b"\n") if not line.startswith(name))


def test_the_page_of_a_real_engine_is_read() -> None:
    """The page is that of an idle vLLM 0.32, also under the name of our own worker."""
    for engine in ("vllm", "pointsman"):
        findings = read(REAL_PAGE.read_bytes(), ENGINES[engine])
        assert findings.problems == ()
        assert replace(findings.metrics, served=None) == EndpointMetrics(
            waiting_requests=0,
            running_requests=0,
            kv_cache_usage=0.0,
            block_size_tokens=128,
            num_kv_blocks=364,
            process_start_time_seconds=1.79529687005e9,
            updated_at_seconds=42.0,
            interval_seconds=0.05,
        )


@pytest.mark.parametrize("value", [b"1e300", b"1e400", b"9007199254740994", b"-1e-300"])
def test_an_absurd_number_counts_as_missing(value: bytes) -> None:
    page = VLLM.replace(b" 3.0\n", b" %b\n" % value).replace(b"1.7e+09", value)
    findings = read(page, previous=PREVIOUS)
    assert findings.metrics.waiting_requests is None
    assert findings.metrics.process_start_time_seconds == PREVIOUS.process_start_time_seconds
    assert findings.metrics.running_requests == 5
    assert len(findings.problems) == 1


def test_a_tiny_count_is_zero() -> None:
    tiny = [line.rpartition(b" ")[0] + b" 1e-300" for line in VLLM.splitlines()]
    metrics = load(b"\n".join(tiny))
    assert (metrics.waiting_requests, metrics.running_requests) == (0, 0)
    assert metrics.kv_cache_usage == metrics.process_start_time_seconds == 1e-300


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [
        (b"0", b"0", (32, 100)),
        (b"000", b"-1", (32, 100)),
        (b"None", b"None", (32, 100)),
        (b"1" * 5000, b"1e3", (32, 100)),
        (b"\xd9\xa3", b'\\"5', (32, 100)),
        (b"1000000000", b"7", (10**9, 7)),
    ],
)
def test_an_invalid_geometry_keeps_the_last_one(
    size: bytes, count: bytes, expected: tuple[int, int]
) -> None:
    page = VLLM.replace(b'"16"', b'"%b"' % size).replace(b'"2048"', b'"%b"' % count)
    metrics = load(page, previous=PREVIOUS)
    assert (metrics.block_size_tokens, metrics.num_kv_blocks) == expected


def test_a_page_of_the_largest_size_is_read() -> None:
    line = 'vllm:num_requests_waiting{{engine="{}\\\\"}} 1\n'
    many = "".join(line.format(number) for number in range(20_000)).encode()
    assert load(without(VLLM, b"vllm:num_requests_waiting") + many).waiting_requests == 20_000


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
    metrics = load(page, ENGINES[engine])
    assert (metrics.waiting_requests, metrics.running_requests) == (1, 2)
    assert (metrics.kv_cache_usage, metrics.block_size_tokens) == (0.5, 64)
    assert metrics.num_kv_blocks == 10


def test_an_engine_without_kv_usage_needs_none() -> None:
    """Plain Triton reports no KV cache; its total of executions is not a load."""
    page = (
        b'nv_inference_pending_request_count{model="a"} 3\n'
        b'nv_inference_pending_request_count{model="b"} 1\nnv_inference_exec_count 1000000\n'
    )
    metrics = load(page, ENGINES["triton"])
    assert (metrics.waiting_requests, metrics.running_requests) == (4, None)
    assert (metrics.kv_cache_usage, metrics.num_kv_blocks) == (None, None)


def test_a_total_and_its_parts_are_counted_once() -> None:
    page = "".join(
        f'sglang:{name}{{dp_rank="{rank}",priority="{priority}",tp_rank="0"}} {value}\n'
        for name in ("num_queue_reqs", "num_running_reqs")
        for rank, priority, value in ((0, "", 3), (0, "1", 3), (1, "", 3))
    )
    metrics = load(page.encode() + b"sglang:token_usage 0.5\n", ENGINES["sglang"])
    assert metrics.waiting_requests == metrics.running_requests == 6


@pytest.mark.parametrize("previous", [None, PREVIOUS])
@pytest.mark.parametrize(
    ("missing", "known"),
    [
        ((b"vllm:num_requests_waiting",), (None, 5, 0.25)),
        ((b"vllm:num_requests_running",), (3, None, 0.25)),
        ((b"vllm:kv_cache_usage_perc",), (3, 5, None)),
        ((b"vllm:kv_cache_usage_perc", b"vllm:num_requests_waiting"), (None, 5, None)),
    ],
)
def test_a_missing_series_is_reported_and_only_its_value_unknown(
    missing: tuple[bytes, ...], known: tuple[float | None, ...], previous: EndpointMetrics | None
) -> None:
    page = VLLM
    for name in missing:
        page = without(page, name)
    findings = read(page, previous=previous)
    metrics = findings.metrics
    loads = (metrics.waiting_requests, metrics.running_requests, metrics.kv_cache_usage)
    assert loads == known
    assert sorted(findings.problems) == sorted(
        f"series '{name.decode()}' is missing" for name in missing
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"NaN", "not a number"),
        (b"-1", "negative"),
        (b"-2.5", "negative"),
        (b"+Inf", "infinite"),
        (b"1e300", "out of range"),
    ],
)
def test_an_unusable_value_counts_as_missing(value: bytes, kind: str) -> None:
    page = VLLM.replace(b'perc{engine="0",model_name="m"} 0.25', b"perc " + value)
    findings = read(page, previous=PREVIOUS)
    assert findings.metrics.kv_cache_usage is None
    assert findings.metrics.waiting_requests == 3
    assert findings.problems == (
        f"series 'vllm:kv_cache_usage_perc' has an unusable value ({kind})",
    )


def test_the_old_name_of_a_series_is_read_if_the_new_one_is_missing() -> None:
    """vLLM before 0.10 has the old name; in a version with both names they are equal."""
    old = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc").replace(b" 0.25", b" 0.75")
    findings = read(old)
    assert (findings.metrics.kv_cache_usage, findings.problems) == (0.75, ())
    assert load(old + VLLM).kv_cache_usage == 0.25


def test_a_page_without_any_load_is_an_error() -> None:
    with pytest.raises(ExtractError, match="num_requests_running' is missing"):
        read(b"<html>hello</html>", previous=PREVIOUS)


def test_an_absent_geometry_or_start_time_keeps_the_last_one() -> None:
    page = VLLM.replace(b'"2048"', b'"None"').replace(b"1.7e+09", b"NaN")
    fresh = load(page)
    assert (fresh.block_size_tokens, fresh.num_kv_blocks) == (16, None)
    assert fresh.process_start_time_seconds is None
    found = load(page, previous=PREVIOUS)
    assert (found.num_kv_blocks, found.process_start_time_seconds) == (100, 5.0)


def test_usage_above_one_is_a_full_cache() -> None:
    """Rounding in an engine must not cause a negative score."""
    assert load(VLLM.replace(b" 0.25", b" 1.02")).kv_cache_usage == 1.0


TWO_RANKS = (
    VLLM
    + b"""\
vllm:num_requests_waiting{engine="1",model_name="m"} 7
vllm:num_requests_running{engine="1",model_name="m"} 1
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="1000"} 1.0
"""
)


@pytest.mark.parametrize("page", [TWO_RANKS, b"\n".join(reversed(TWO_RANKS.split(b"\n")))])
def test_several_engines_of_a_page_are_combined(page: bytes) -> None:
    metrics = load(page)
    assert (metrics.waiting_requests, metrics.running_requests) == (10, 6)
    assert metrics.kv_cache_usage == 0.5
    assert (metrics.block_size_tokens, metrics.num_kv_blocks) == (16, 3048)


def test_the_endpoint_of_one_rank_reads_its_own_samples() -> None:
    metrics = load(TWO_RANKS, rank=1)
    assert (metrics.waiting_requests, metrics.running_requests) == (7, 1)
    assert (metrics.kv_cache_usage, metrics.block_size_tokens) == (0.75, 32)
    with pytest.raises(ExtractError, match="is missing"):
        read(TWO_RANKS, rank=2)


def test_a_page_without_ranks_counts_for_each_rank() -> None:
    assert load(VLLM.replace(b'engine="0",', b""), rank=1).waiting_requests == 3


def test_parallel_ranks_of_one_engine_are_not_counted_twice() -> None:
    """Every tensor-parallel rank of an SGLang sees the same queue."""
    names = (b"sglang:num_queue_reqs", b"sglang:num_running_reqs", b"sglang:token_usage")
    page = b"".join(
        b'%s{dp_rank="%d",tp_rank="%d"} %s\n' % (name, dp, tp, value)
        for name, value in zip(names, (b"4", b"2", b"0.5"), strict=True)
        for dp in (0, 1)
        for tp in (0, 1)
    )
    metrics = load(page, ENGINES["sglang"])
    assert (metrics.waiting_requests, metrics.running_requests) == (8, 4)
    assert load(page, ENGINES["sglang"], rank=1).waiting_requests == 4


def test_an_engine_with_an_unusable_value_is_skipped_and_reported() -> None:
    page = TWO_RANKS.replace(b"} 7", b"} NaN")
    findings = read(page, previous=PREVIOUS)
    assert findings.metrics.waiting_requests == 3
    assert findings.problems == (
        "series 'vllm:num_requests_waiting' has an unusable value (not a number)",
    )


def test_the_latest_of_equal_samples_counts() -> None:
    page = VLLM + b'vllm:num_requests_waiting{engine="0",model_name="m"} 8 1700000000000\n'
    assert load(page).waiting_requests == 8
    assert load(VLLM.replace(b"waiting{", b"waiting{ ") + page).waiting_requests == 8


LORA = (
    VLLM
    + b"""\
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 100.5
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b",waiting_lora_adapters="c"} 200.25
vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 150.0
vllm:lora_requests_info{max_lora="9",running_lora_adapters="x",waiting_lora_adapters=""} NaN
"""
)


def test_the_sample_with_the_greatest_value_names_the_adapters() -> None:
    """The value is the time of writing; old combinations stay on the page."""
    metrics = load(LORA)
    assert metrics.active_models == {"a", "b"}
    assert metrics.waiting_models == {"c"}
    assert metrics.max_active_models == 4


def test_a_page_without_adapters_is_complete() -> None:
    previous = load(LORA)
    findings = read(VLLM, previous=previous)
    assert findings.problems == ()
    assert findings.metrics.active_models == frozenset()
    assert findings.metrics.max_active_models is None


def test_the_adapters_of_several_engines_are_combined() -> None:
    name = b"vllm:lora_requests_info"
    page = VLLM + b"".join(
        b'%s{engine="%d",max_lora="2",running_lora_adapters="%s",waiting_lora_adapters=""} %d\n'
        % (name, engine, adapters, value)
        for engine, adapters, value in [(0, b"a", 1), (0, b"b", 2), (1, b"c", 1), (1, b"d", 0)]
    )
    assert load(page).active_models == {"b", "c"}
    assert load(page).max_active_models == 2
    assert load(page, rank=0).active_models == {"b"}


def test_a_label_names_the_engine() -> None:
    new, old = "llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"
    table = EngineTable()
    assert table.of({new: "sglang", old: "triton"}) is ENGINES["sglang"]
    assert table.of({old: "triton"}) is ENGINES["triton"]
    assert table.of({}) is ENGINES["vllm"]
    assert EngineTable(default="sglang").of({new: "else"}) is ENGINES["sglang"]


@pytest.mark.parametrize(
    ("text", "series"),
    [
        ("", None),
        ("  ", None),
        ("a:b_c", Series("a:b_c")),
        ("a{}", Series("a")),
        ("a{x=1}", Series("a", {"x": "1"})),
        ('a { x = "1, {2}" , y=b-c, }', Series("a", {"x": "1, {2}", "y": "b-c"})),
        ("a{x=}", Series("a", {"x": ""})),
    ],
)
def test_a_spec_names_a_series_and_its_labels(text: str, series: Series | None) -> None:
    assert parse_series(text) == series


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a b", "is not a series"),
        ("{x=1}", "is not a series"),
        ("a{x=1", "lacks its closing brace"),
        ("a{x=~1}", "only '=' is supported, not '=~'"),
        ('a{x!="1"}', "only '=' is supported, not '!='"),
        ("a{x}", "cannot read the labels from 'x'"),
        ("a{x=1 y=2}", "cannot read"),
        ('a{x="1}', "cannot read"),
    ],
)
def test_an_invalid_spec_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_series(text)


def test_custom_numbers_become_attributes() -> None:
    engine = EngineSeries(
        waiting=Series("w"), custom=(("A/x", Series("c", {"kind": "b"})), ("B/x", Series("none")))
    )
    page = b'w 1\nc{kind="a"} 5\nc{kind="b",n="1"} -2.5\nc{kind="b",n="2"} 9\n'
    findings = read(page, engine)
    assert findings.attributes == {"A/x": -2.5}
    assert findings.problems == ("series 'none' is missing",)
    assert read(page.replace(b"-2.5", b"NaN"), engine).attributes == {}


def test_the_load_of_an_engine_without_load_series_is_unknown() -> None:
    findings = read(b"c 4\n", EngineSeries(custom=(("A/x", Series("c")),)))
    assert (findings.metrics, findings.attributes) == (None, {"A/x": 4.0})


SERVED = (
    VLLM
    + b"""\
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 9.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0"} 5.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.1"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="1.0"} NaN
vllm:generation_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="1"} 20.0
"""
)


def test_served_requests_and_tokens_are_summed_over_engines() -> None:
    metrics = load(SERVED)
    assert metrics.served == ServedTotals(42.0, 120.0, (0.1, 1.0), (3.0, 2.0, 8.0))
    assert load(SERVED, rank=0).served == ServedTotals(42.0, 100.0, (0.1, 1.0), (2.0, 3.0, 4.0))
    assert load(VLLM).served is None


@pytest.mark.parametrize("engines", [MAX_BUCKETS // 3 + 1, MAX_BUCKETS])
def test_more_buckets_than_the_limit_are_not_read(engines: int) -> None:
    bucket = b'vllm:time_to_first_token_seconds_bucket{engine="%d",le="%b"} 2.0\n'
    edges = (b"0.1", b"1.0", b"+Inf")
    many = b"".join(bucket % (number, edge) for number in range(engines) for edge in edges)
    served = load(VLLM + many + b"vllm:generation_tokens_total 9.0\n").served
    assert served == ServedTotals(42.0, 9.0)


def test_served_totals_are_read_once_a_second() -> None:
    before = load(SERVED)
    fresh = replace(before, served=replace(before.served, read_at_seconds=41.5))
    assert load(VLLM, previous=fresh).served is fresh.served
    old = replace(before, served=replace(before.served, read_at_seconds=41.0))
    assert load(SERVED, previous=old).served == before.served
    real = load(REAL_PAGE.read_bytes()).served
    assert real is not None
    assert len(real.ttft_counts) == len(real.ttft_edges) + 1 > 15
