"""Samples of a scrape → `EndpointMetrics`, by a table of what each engine calls its series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from picker.datalayer.exposition import Sample, scan
from picker.errors import PickerError
from picker.types import EndpointMetrics

ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
DEFAULT_ENGINE = "vllm"
PROCESS_START = "process_start_time_seconds"


class ExtractError(PickerError):
    """A page from which no metrics can be made; the message names the series."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series to read: its name and the labels a sample must have."""

    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """What one engine calls what the picker reads; None where the engine says nothing.

    The KV cache's geometry is either in labels of an info series (`cache_info` with the two label
    names) or in two gauges of their own.
    """

    waiting: Series
    running: Series
    kv_usage: Series | None
    cache_info: Series | None = None
    block_size_label: str = ""
    num_blocks_label: str = ""
    block_size: Series | None = None
    num_blocks: Series | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct series names to look for, the process start time included."""
        series = (
            self.waiting,
            self.running,
            self.kv_usage,
            self.cache_info,
            self.block_size,
            self.num_blocks,
        )
        return (*{s.name: None for s in series if s is not None}, PROCESS_START)


def _triton_blocks(kind: str) -> Series:
    return Series("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": kind})


ENGINES: Mapping[str, EngineSeries] = MappingProxyType(
    {
        "vllm": EngineSeries(
            waiting=Series("vllm:num_requests_waiting"),
            running=Series("vllm:num_requests_running"),
            kv_usage=Series("vllm:kv_cache_usage_perc"),
            cache_info=Series("vllm:cache_config_info"),
            block_size_label="block_size",
            num_blocks_label="num_gpu_blocks",
        ),
        "sglang": EngineSeries(
            waiting=Series("sglang:num_queue_reqs"),
            running=Series("sglang:num_running_reqs"),
            kv_usage=Series("sglang:token_usage"),
            cache_info=Series("sglang:cache_config_info"),
            block_size_label="page_size",
            num_blocks_label="num_pages",
        ),
        "trtllm-serve": EngineSeries(
            waiting=Series("trtllm_num_requests_waiting"),
            running=Series("trtllm_num_requests_running"),
            kv_usage=Series("trtllm_kv_cache_utilization"),
            block_size=Series("trtllm_kv_cache_tokens_per_block"),
            num_blocks=Series("trtllm_kv_cache_max_blocks"),
        ),
        "triton-tensorrt-llm": EngineSeries(
            waiting=Series("nv_trt_llm_request_metrics", {"request_type": "waiting"}),
            running=Series("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
            kv_usage=_triton_blocks("fraction"),
            block_size=_triton_blocks("tokens_per"),
            num_blocks=_triton_blocks("max"),
        ),
        "triton": EngineSeries(
            waiting=Series("nv_inference_pending_request_count"),
            running=Series("nv_inference_exec_count"),
            kv_usage=None,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Extraction:
    """Metrics, and what was wrong with the page although they could be made."""

    metrics: EndpointMetrics
    problems: tuple[str, ...] = ()


def engine_of(labels: Mapping[str, str], default: str = DEFAULT_ENGINE) -> EngineSeries:
    """The table row for an endpoint: by its engine label, `default` when absent or unknown."""
    named = next((labels[label] for label in ENGINE_LABELS if label in labels), default)
    return ENGINES.get(named, ENGINES[default])


def extract(
    page: bytes, engine: EngineSeries, previous: EndpointMetrics | None, now_seconds: float
) -> Extraction:
    """Read one metrics page.

    A load series that is missing or unusable (NaN, infinite, negative) keeps its value from
    `previous` and is reported. Raises `ExtractError` when there is no previous value either, and
    when not one load series could be read: then the page says nothing about load at all.
    """
    samples = scan(page, engine.names)
    problems: list[str] = []
    readings = [
        _reading(samples, series, problems)
        for series in (engine.waiting, engine.running, engine.kv_usage)
    ]
    expected = 2 if engine.kv_usage is None else 3
    if problems and (previous is None or len(problems) == expected):
        raise ExtractError("; ".join(problems))
    # Without problems there is nothing to fill in, so the stand-in is never read.
    before = previous or EndpointMetrics()
    waiting, running, usage = readings
    block_size, num_blocks = _geometry(samples, engine)
    start = _best(samples, Series(PROCESS_START))
    return Extraction(
        EndpointMetrics(
            waiting_requests=before.waiting_requests if waiting is None else int(waiting),
            running_requests=before.running_requests if running is None else int(running),
            kv_cache_usage=before.kv_cache_usage if usage is None else min(usage, 1.0),
            block_size_tokens=block_size or before.block_size_tokens,
            num_kv_blocks=num_blocks or before.num_kv_blocks,
            process_start_time_seconds=(
                start.value
                if start is not None and _usable(start.value)
                else before.process_start_time_seconds
            ),
            updated_at_seconds=now_seconds,
        ),
        tuple(problems),
    )


def _reading(
    samples: Mapping[str, Sequence[Sample]], series: Series | None, problems: list[str]
) -> float | None:
    if series is None:
        return None
    sample = _best(samples, series)
    if sample is None:
        problems.append(f"series '{series.name}' is missing")
        return None
    if not _usable(sample.value):
        problems.append(f"series '{series.name}' has the unusable value {sample.value}")
        return None
    return sample.value


def _usable(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _best(samples: Mapping[str, Sequence[Sample]], series: Series) -> Sample | None:
    """The sample with the wanted labels and the latest timestamp; of equals the first."""
    best: Sample | None = None
    for sample in samples.get(series.name, ()):
        if any(sample.labels.get(name) != value for name, value in series.labels.items()):
            continue
        if best is None or (sample.timestamp_ms or 0) > (best.timestamp_ms or 0):
            best = sample
    return best


def _geometry(
    samples: Mapping[str, Sequence[Sample]], engine: EngineSeries
) -> tuple[int | None, int | None]:
    """Tokens per KV block and number of KV blocks, each None when the page does not say."""
    if engine.cache_info is not None:
        info = _best(samples, engine.cache_info)
        labels = {} if info is None else info.labels
        return (
            _count(labels.get(engine.block_size_label)),
            _count(labels.get(engine.num_blocks_label)),
        )
    return _gauge_count(samples, engine.block_size), _gauge_count(samples, engine.num_blocks)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def _gauge_count(samples: Mapping[str, Sequence[Sample]], series: Series | None) -> int | None:
    sample = None if series is None else _best(samples, series)
    if sample is None or not _usable(sample.value) or sample.value < 1:
        return None
    return int(sample.value)
