"""The worker's `/metrics`: vLLM's series, rendered from a snapshot in tens of microseconds.

A picker scrapes every worker twenty times a second, so a scrape must cost next to nothing: gauges
and counters fill one prepared template, a histogram keeps its text until it is observed again, and
the process's own numbers are read at most once a second. (`prometheus_client` renders the same page
in about two milliseconds; it is the oracle of the tests instead.)

Every series is declared here, once. Names, labels and buckets are those of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from worker.metrics.families import Histogram, LabelledCounter, head_text, label_text
from worker.metrics.http import HttpMetrics
from worker.metrics.process import ProcessNumbers
from worker.metrics.record import RequestRecord
from worker.types import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


class EngineNumbers(Protocol):
    """What the engine tells about itself; `engine.messages.EngineStats` is one."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def prefix_cache_queries(self) -> int: ...
    @property
    def prefix_cache_hits(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...


# series, type, help; filled from `EngineNumbers` in this order by `_engine_values`.
_ENGINE_SERIES = (
    ("vllm:num_requests_running", "gauge", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "gauge", "Requests waiting to be scheduled."),
    ("vllm:kv_cache_usage_perc", "gauge", "KV cache in use by live requests, 0 to 1."),
    ("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache."),
    ("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache."),
    ("vllm:num_preemptions_total", "counter", "Requests preempted to free their blocks."),
    ("vllm:prompt_tokens_total", "counter", "Prompt tokens prefilled, cached ones included."),
    ("vllm:generation_tokens_total", "counter", "Tokens generated."),
)


def _engine_values(numbers: EngineNumbers) -> tuple[float, ...]:
    return (
        numbers.num_running,
        numbers.num_waiting,
        numbers.kv_cache_usage,
        numbers.prefix_cache_queries,
        numbers.prefix_cache_hits,
        numbers.num_preemptions,
        numbers.prompt_tokens,
        numbers.generation_tokens,
    )


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    buckets: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > limit:
                return tuple(buckets)
            buckets.append(step * decade)
        decade *= 10


class WorkerMetrics:
    """Every series of one worker. Lives on the event loop of the HTTP process."""

    def __init__(self, model_name: str, max_model_len: int, start_unix_seconds: float) -> None:
        """`start_unix_seconds` becomes `process_start_time_seconds`, by which scrapers tell a
        restarted worker from one whose counters stand still.
        """
        self._labels = label_text({"model_name": model_name, "engine": "0"})
        self._engine_template = "".join(
            f"{head_text(name, kind, text)}{name}{{{self._labels}}} ".replace("%", "%%") + "%r\n"
            for name, kind, text in _ENGINE_SERIES
        )
        self._constant = (
            head_text("process_start_time_seconds", "gauge", "Start of the process, unix time.")
            + f"process_start_time_seconds {start_unix_seconds!r}\n"
        ).encode()
        self._cache_info = b""
        self._process = ProcessNumbers()
        self._http = HttpMetrics()
        self._declare_latencies()
        self._declare_sizes(max_model_len)
        self._finished = self._counter(
            "vllm:request_success_total",
            "Requests ended, by reason.",
            "finished_reason",
            tuple(reason.value for reason in FinishReason),
        )
        self._rejections = self._counter(
            "vllm:admission_rejections_total",
            "Requests refused before they were queued.",
            "reason",
            ("max_num_queued_reqs", "max_num_queued_tokens", "draining", "memory"),
        )
        self._errors = self._counter(
            "pointsman:internal_errors_total", "Unexpected errors.", "where", ("http",)
        )
        self._families: tuple[Callable[[], bytes], ...] = (
            *(h.render for h in vars(self).values() if isinstance(h, Histogram)),
            self._finished.render,
            self._rejections.render,
            self._errors.render,
            self._http.render,
        )

    def _declare_latencies(self) -> None:
        def latency(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, _LATENCY_BUCKETS, self._labels)

        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival to first token.",
            _TTFT_BUCKETS,
            self._labels,
        )
        self._itl = Histogram(
            "vllm:inter_token_latency_seconds",
            "Time between output steps of a request.",
            _ITL_BUCKETS,
            self._labels,
        )
        self._tpot = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Decode time per output token after the first.",
            _ITL_BUCKETS,
            self._labels,
        )
        self._e2e = latency("e2e_request_latency", "Arrival to end.")
        self._queue = latency("request_queue_time", "Arrival to first scheduling.")
        self._inference = latency("request_inference_time", "First scheduling to last token.")
        self._prefill = latency("request_prefill_time", "First scheduling to first token.")
        self._decode = latency("request_decode_time", "First to last token.")

    def _declare_sizes(self, max_model_len: int) -> None:
        sizes = _one_two_five(max_model_len)

        def size(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, buckets, self._labels)

        self._iteration = size("iteration_tokens_total", "Tokens per step.", _ITERATION_BUCKETS)
        self._prompt_size = size("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self._output_size = size("request_generation_tokens", "Tokens generated.", sizes)
        self._max_tokens = size("request_params_max_tokens", "max_tokens asked for.", sizes)
        self._preemptions = size(
            "request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS
        )

    def _counter(
        self, name: str, text: str, label: str, values: tuple[str, ...]
    ) -> LabelledCounter:
        return LabelledCounter(name, text, self._labels, label, values)

    def set_cache_info(self, info: Mapping[str, str]) -> None:
        """Publish the shape of the KV cache (`block_size`, `num_gpu_blocks`, …) as labels."""
        name = "vllm:cache_config_info"
        labels = label_text({**info, "engine": "0"})
        head = head_text(name, "gauge", "Information of the cache config.")
        self._cache_info = f"{head}{name}{{{labels}}} 1\n".encode()

    def step_done(self, num_tokens: int) -> None:
        """One engine step ran `num_tokens` tokens."""
        self._iteration.observe(num_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """A request got more tokens `seconds` after the ones before."""
        self._itl.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was refused at the door, for one of the declared reasons."""
        self._rejections.add(reason)

    def internal_error(self) -> None:
        """An unexpected error was answered with a 500."""
        self._errors.add("http")

    def request_ended(self, record: RequestRecord) -> None:
        """A request ended; called exactly once for each request the engine was given."""
        self._finished.add(record.reason.value)
        self._e2e.observe(record.finished_seconds - record.arrival_seconds)
        self._prompt_size.observe(record.num_prompt_tokens)
        self._output_size.observe(record.num_generation_tokens)
        self._max_tokens.observe(record.max_tokens)
        self._preemptions.observe(record.num_preemptions)
        scheduled, first = record.scheduled_seconds, record.first_token_seconds
        last = record.last_token_seconds
        if scheduled is not None:
            self._queue.observe(scheduled - record.arrival_seconds)
        if scheduled is None or first is None or last is None:
            return
        self._prefill.observe(first - scheduled)
        self._inference.observe(last - scheduled)
        self._decode.observe(last - first)
        rest = record.num_generation_tokens - 1
        self._tpot.observe((last - first) / rest if rest > 0 else 0.0)

    def http_done(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """An HTTP exchange ended. `handler` is the route's path, "none" when no route matched."""
        self._http.done(handler, method, status, seconds, request_bytes, response_bytes)

    def render(self, numbers: EngineNumbers, now_seconds: float) -> bytes:
        """The whole page, gauges as of `numbers`; `now_seconds` is a monotonic clock."""
        engine = self._engine_template % _engine_values(numbers)
        families = [render() for render in self._families]
        process = self._process.render(now_seconds)
        return b"".join((engine.encode(), self._cache_info, *families, self._constant, process))
