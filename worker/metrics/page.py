"""The whole metrics page, with vLLM 0.32's names, labels and buckets, and our `pointsman:…`.

A picker scrapes every worker twenty times a second, so a scrape must cost next to nothing:
`prometheus_client` renders the same page in about two milliseconds.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from base.series import (
    AnySeries,
    Counter,
    Declaration,
    Histogram,
    Page,
    Summary,
    head_text,
    label_text,
)
from worker.metrics.engine_series import OWN_SERIES, VLLM_SERIES, EngineFamilies, position_series
from worker.types import EngineStats, FinishReason

LABELS = ("model_name", "engine")
Buckets: TypeAlias = tuple[float, ...]

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
N_BUCKETS = (1, 2, 5, 10, 20)
# Reasons that vLLM counts, and those that only this worker has.
_VLLM_REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens")
_OWN_REFUSALS = ("draining", "memory")

# They are asked for many times a second, and would hide other requests.
EXCLUDED_HANDLERS = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
# As prometheus-fastapi-instrumentator, which vLLM uses for these series.
_MANY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0,
    7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_ROUTE_BUCKETS = (0.1, 0.5, 1.0)
_REFRESH_SECONDS = 1.0  # reads of /proc are too slow for every scrape


def one_two_five(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `limit`."""
    buckets: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > limit:
                return tuple(buckets)
            buckets.append(step * decade)
        decade *= 10


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended sequence. Times are on one monotonic clock; None: the event never happened. Of a
    request with several sequences, only the last to end carries `n` and
    `max_num_generation_tokens`, the longest of them.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_preemptions: int
    arrival_seconds: float
    scheduled_seconds: float | None
    first_token_seconds: float | None
    last_token_seconds: float | None
    finished_seconds: float
    num_cached_tokens: int = 0
    kv_arrived_seconds: float | None = None
    n: int | None = None
    max_num_generation_tokens: int | None = None


class WorkerMetrics:
    """Every series of one worker. Lives on the event loop of the HTTP process."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        start_unix_seconds: float,
        num_speculative_tokens: int | None = None,
        max_loras: int = 0,
    ) -> None:
        """`start_unix_seconds` becomes `process_start_time_seconds`, by which scrapers recognise a
        restart. With `num_speculative_tokens` there is a series for each position of a draft.
        """
        self._names = (model_name, "0")  # vLLM numbers engines; here is one
        labels = label_text(zip(LABELS, self._names, strict=True))
        positions = (position_series(num_speculative_tokens),) if num_speculative_tokens else ()
        self._engine = EngineFamilies("vllm", (*VLLM_SERIES, *positions), labels)
        self._own = EngineFamilies("pointsman", OWN_SERIES, labels)
        self._constant = _constants(start_unix_seconds)
        self._adapters = AdapterInfo(max_loras, start_unix_seconds)
        self._cache_info = b""
        self._process = ProcessNumbers()
        self.http = HttpMetrics()
        self._series: list[AnySeries] = []
        self._declare_latencies()
        self._declare_sizes(max_model_len)
        self._declare_counters()
        self._page = Page(self._series)

    def _declare_latencies(self) -> None:
        def latency(
            name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS
        ) -> Histogram:
            return self._histogram(f"{name}_seconds", text, buckets)

        per_token = "Decode time per output token after the first."
        self._ttft = latency("time_to_first_token", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = latency("inter_token_latency", "Time between output steps.", ITL_BUCKETS)
        self._tpot = latency("request_time_per_output_token", per_token, ITL_BUCKETS)
        self._e2e = latency("e2e_request_latency", "Arrival to end.")
        self._queue = latency("request_queue_time", "Arrival to scheduling.")
        self._inference = latency("request_inference_time", "First scheduling to last token.")
        self._prefill = latency("request_prefill_time", "First scheduling to first token.")
        self._sleep = latency(
            "sleep_mode_operation_duration", "Time to fall asleep or to wake up.", TTFT_BUCKETS
        )
        self._decode = latency("request_decode_time", "First to last token.")

    def _declare_sizes(self, max_model_len: int) -> None:
        declare, sizes = self._histogram, one_two_five(max_model_len)
        self._iteration = declare("iteration_tokens_total", "Tokens per step.", ITERATION_BUCKETS)
        self._prompt_size = declare("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self._output_size = declare("request_generation_tokens", "Tokens generated.", sizes)
        text = "Tokens of a request's longest answer."
        self._max_output = declare("request_max_num_generation_tokens", text, sizes)
        self._max_tokens = declare("request_params_max_tokens", "max_tokens asked for.", sizes)
        text = "Prompt tokens that were not in the cache."
        self._computed = declare("request_prefill_kv_computed_tokens", text, sizes)
        self._n = declare("request_params_n", "Answers asked for.", N_BUCKETS)
        text = "Preemptions of a request."
        self._preemptions = declare("request_num_preemptions", text, PREEMPTION_BUCKETS)

    def _declare_counters(self) -> None:
        declare = self._counters
        reasons = [reason.value for reason in FinishReason]
        ended = Declaration(
            "vllm:request_success_total", "Requests ended, by reason.", (*LABELS, "finished_reason")
        )
        full = Declaration(
            "vllm:admission_rejections_total",
            "Requests refused because the queue was full.",
            (*LABELS[:1], "reason"),
        )
        other = Declaration(
            "pointsman:admission_rejections_total",
            "Requests refused for other reasons.",
            (*LABELS, "reason"),
        )
        errors = Declaration(
            "pointsman:internal_errors_total", "Unexpected errors.", (*LABELS, "where")
        )
        self._finished = declare(ended, reasons)
        self._refusals = declare(full, _VLLM_REFUSALS) | declare(other, _OWN_REFUSALS)
        self._errors = declare(errors, ("http",))

    def _histogram(self, name: str, text: str, buckets: Buckets) -> Histogram:
        series = Histogram(Declaration(f"vllm:{name}", text, LABELS), buckets)
        self._series.append(series)
        return series.labels(*self._names)

    def _counters(self, declaration: Declaration, values: Iterable[str]) -> dict[str, Counter]:
        """Declare a counter whose last label has these values, and no others, from the start."""
        series = Counter(declaration)
        self._series.append(series)
        names = self._names[: len(declaration.labels) - 1]
        return {value: series.labels(*names, value) for value in values}

    def set_cache_info(self, info: Mapping[str, str]) -> None:
        """Publish the shape of the KV cache (`block_size`, `num_gpu_blocks`, …) as labels."""
        name = "vllm:cache_config_info"
        labels = label_text({**info, "engine": "0"}.items())
        head = head_text(name, "gauge", "Information of the cache config.")
        self._cache_info = f"{head}{name}{{{labels}}} 1\n".encode()

    def step_done(self, num_tokens: int) -> None:
        self._iteration.observe(num_tokens)

    def sleep_done(self, seconds: float) -> None:
        self._sleep.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, times: int = 1) -> None:
        self._itl.observe_many(seconds, times)

    def refused(self, reason: str) -> None:
        self._refusals[reason].inc()

    def internal_error(self, where: str = "http") -> None:
        """Count an unexpected error, which was logged and answered with a 500."""
        self._errors[where].inc()

    def request_ended(self, record: RequestRecord) -> None:
        """Count an ended sequence; called exactly once for each that the engine received."""
        self._finished[record.reason.value].inc()
        self._e2e.observe(record.finished_seconds - record.arrival_seconds)
        self._prompt_size.observe(record.num_prompt_tokens)
        self._output_size.observe(record.num_generation_tokens)
        self._max_tokens.observe(record.max_tokens)
        self._preemptions.observe(record.num_preemptions)
        if record.n is not None:
            self._n.observe(record.n)
        if record.max_num_generation_tokens is not None:
            self._max_output.observe(record.max_num_generation_tokens)
        self._observe_stages(record)

    def _observe_stages(self, record: RequestRecord) -> None:
        scheduled, first = record.scheduled_seconds, record.first_token_seconds
        last = record.last_token_seconds
        if scheduled is not None:
            self._queue.observe(scheduled - record.arrival_seconds)
        if scheduled is None or first is None or last is None:
            return
        self._computed.observe(max(0, record.num_prompt_tokens - record.num_cached_tokens))
        self._prefill.observe(first - scheduled)
        self._inference.observe(last - scheduled)
        self._decode.observe(last - first)
        rest = record.num_generation_tokens - 1
        self._tpot.observe((last - first) / rest if rest > 0 else 0.0)

    def render(self, stats: EngineStats, now_seconds: float) -> bytes:
        """Write the page, with the gauges of `stats`; `now_seconds` is a monotonic clock."""
        return b"".join(
            (
                self._engine.render(stats),
                self._cache_info,
                self._own.render(stats),
                self._page.render().encode(),
                self.http.render(),
                self._adapters.render(stats, time.time()),
                self._constant,
                self._process.render(now_seconds),
            )
        )


def _constants(start_unix_seconds: float) -> bytes:
    return (
        head_text("process_start_time_seconds", "gauge", "Start of the process, unix time.")
        + f"process_start_time_seconds {start_unix_seconds!r}\n"
    ).encode()


class AdapterInfo:
    """Adapters loaded or waited for, as labels; the value is the time of the last change."""

    def __init__(self, max_loras: int, start_unix_seconds: float) -> None:
        self._max_loras = max_loras
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        # Without adapters, too: a picker that scores by them looks for the series.
        self._text = self._line(start_unix_seconds)

    def render(self, stats: EngineStats, now_unix_seconds: float) -> bytes:
        names = (stats.adapters.awaited, stats.adapters.loaded)
        if names != self._names:
            self._names = names
            self._text = self._line(now_unix_seconds)
        return self._text

    def _line(self, unix_seconds: float) -> bytes:
        name = "vllm:lora_requests_info"
        waiting, running = map(",".join, self._names)
        labels = {
            "max_lora": str(self._max_loras),
            "waiting_lora_adapters": waiting,
            "running_lora_adapters": running,
        }
        text = "Adapters that requests wait for, and those loaded; the value is unix time."
        line = f"{name}{{{label_text(labels.items())}}} {unix_seconds!r}\n"
        return (head_text(name, "gauge", text) + line).encode()


class HttpMetrics:
    """Owns the counts of HTTP exchanges. Label values are bounded: routes are the server's ("none"
    for the rest), unusual methods share one value, and statuses are reported by class.
    """

    def __init__(self) -> None:
        def declared(name: str, text: str, *labels: str) -> Declaration:
            return Declaration(f"http_{name}", text, labels)

        text = "Total number of requests by method, status and handler."
        self._totals = Counter(declared("requests_total", text, "handler", "method", "status"))
        text = "Content length of incoming requests."
        self._request_bytes = Summary(declared("request_size_bytes", text, "handler"))
        text = "Content length of outgoing responses."
        self._response_bytes = Summary(declared("response_size_bytes", text, "handler"))
        text = "Latency with many buckets but no API specific labels."
        name = "request_duration"
        self._all = Histogram(declared(f"{name}_highr_seconds", text), _MANY_BUCKETS)
        text = "Latency with few buckets by handler."
        by_route = declared(f"{name}_seconds", text, "handler", "method")
        self._by_route = Histogram(by_route, _ROUTE_BUCKETS)
        sizes = (self._request_bytes, self._response_bytes)
        self._page = Page((self._totals, *sizes, self._all, self._by_route))
        self._rendered: bytes | None = None
        # By route, method and class of statuses, so that counting needs one look-up.
        self._routes: dict[tuple[str, str, int], tuple[Counter, Summary, Summary, Histogram]] = {}

    def done(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Count one exchange, none of `EXCLUDED_HANDLERS`; `handler` "none": no route matched."""
        if handler in EXCLUDED_HANDLERS:
            return
        if method not in _METHODS:  # clients may invent methods, which must not become series
            method = "other"
        route = (handler, method, status // 100)
        counts = self._routes.get(route)
        if counts is None:
            counts = self._routes[route] = (
                self._totals.labels(handler, method, f"{status // 100}xx"),
                self._request_bytes.labels(handler),
                self._response_bytes.labels(handler),
                self._by_route.labels(handler, method),
            )
        total, requests, responses, durations = counts
        total.inc()
        requests.observe(request_bytes)
        responses.observe(response_bytes)
        durations.observe(seconds)
        self._all.observe(seconds)
        self._rendered = None

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error before its route was known."""
        self.done("none", "other", status, 0.0, 0, 0)

    def render(self) -> bytes:
        if self._rendered is None:
            self._rendered = self._page.render().encode()
        return self._rendered


class ProcessNumbers:
    """The default series of `prometheus_client` for a process, read at most once a second."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._read_at: float | None = None
        self._text = b""

    def render(self, now_seconds: float) -> bytes:
        """Return the text without the start time, which `_constants` writes on every platform."""
        if self._read_at is None or now_seconds - self._read_at >= _REFRESH_SECONDS:
            lines = generate_latest(self._registry).splitlines(keepends=True)
            self._text = b"".join(li for li in lines if b"process_start_time_seconds" not in li)
            self._read_at = now_seconds
        return self._text
