"""The names that each engine gives to its series: a table that configurations extend."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
DEFAULT_ENGINE = "vllm"
RESERVED_NAME = "default"
BLOCK_SIZE_LABEL = "block_size"
NUM_BLOCKS_LABEL = "num_gpu_blocks"
PROCESS_START = "process_start_time_seconds"

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(
    r"\s*(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)\s*(?P<operator>=~|!=|!~|=)\s*"
    r"""(?:"(?P<quoted>[^"]*)"|(?P<bare>[^",{}=]*?))\s*(?:,|$)""",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Series:
    """A series to read, with required labels; `old_names` are of earlier versions of the engine."""

    name: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    old_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """The series of one engine; None where the engine has none."""

    waiting: Series | None = None
    running: Series | None = None
    kv_usage: Series | None = None
    cache_info: Series | None = None  # with labels of the geometry, which is else in two gauges
    block_size_label: str = BLOCK_SIZE_LABEL
    num_blocks_label: str = NUM_BLOCKS_LABEL
    block_size: Series | None = None
    num_blocks: Series | None = None
    lora: Series | None = None
    ttft: Series | None = None
    generated: Series | None = None
    custom: tuple[tuple[str, Series], ...] = ()
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    all_names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # `names` are scanned on every page. `lora` is read in a cheaper way, `ttft` and `generated`
        # less often.
        series = (
            self.waiting,
            self.running,
            self.kv_usage,
            self.cache_info,
            self.block_size,
            self.num_blocks,
            *(one for _, one in self.custom),
        )
        names = dict.fromkeys(one.name for one in series if one is not None)
        object.__setattr__(self, "names", (*names, PROCESS_START))
        old = (name for one in series if one is not None for name in one.old_names)
        rare = (one.name for one in (self.lora, self.generated) if one is not None)
        buckets = () if self.ttft is None else (bucket_name(self.ttft),)
        every = dict.fromkeys((*self.names, *old, *rare, *buckets))
        object.__setattr__(self, "all_names", tuple(every))


def bucket_name(histogram: Series) -> str:
    return f"{histogram.name}_bucket"


def parse_series(text: str) -> Series | None:
    """Parse `name` or `name{label=value,…}`; an empty text is no series. Raises `ValueError`."""
    text = text.strip()
    if not text:
        return None
    name, brace, rest = text.partition("{")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{text}' is not a series; write name or name{{label=value}}")
    if not brace:
        return Series(name)
    if not rest.endswith("}"):
        raise ValueError(f"'{text}' lacks its closing brace")
    return Series(name, MappingProxyType(_matchers(text, rest[:-1])))


def _matchers(text: str, inside: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while inside[position:].strip():
        match = _LABEL.match(inside, position)
        if match is None:
            raise ValueError(f"'{text}': cannot read the labels from '{inside[position:]}'")
        if match["operator"] != "=":
            raise ValueError(f"'{text}': only '=' is supported, not '{match['operator']}'")
        labels[match["name"]] = match["bare"] if match["quoted"] is None else match["quoted"]
        position = match.end()
    return labels


def _triton_blocks(kind: str) -> Series:
    return Series("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": kind})


_VLLM = EngineSeries(
    waiting=Series("vllm:num_requests_waiting"),
    running=Series("vllm:num_requests_running"),
    kv_usage=Series("vllm:kv_cache_usage_perc", old_names=("vllm:gpu_cache_usage_perc",)),
    cache_info=Series("vllm:cache_config_info"),
    lora=Series("vllm:lora_requests_info"),
    ttft=Series("vllm:time_to_first_token_seconds"),
    generated=Series("vllm:generation_tokens_total"),
)

ENGINES: Mapping[str, EngineSeries] = MappingProxyType(
    {
        "vllm": _VLLM,
        "pointsman": _VLLM,  # our worker uses vLLM's names
        "sglang": EngineSeries(
            waiting=Series("sglang:num_queue_reqs"),
            running=Series("sglang:num_running_reqs"),
            kv_usage=Series("sglang:token_usage"),
            cache_info=Series("sglang:cache_config_info"),
            block_size_label="page_size",
            num_blocks_label="num_pages",
            ttft=Series("sglang:time_to_first_token_seconds"),
            generated=Series("sglang:generation_tokens_total"),
        ),
        "trtllm-serve": EngineSeries(
            waiting=Series("trtllm_num_requests_waiting"),
            running=Series("trtllm_num_requests_running"),
            kv_usage=Series("trtllm_kv_cache_utilization"),
            block_size=Series("trtllm_kv_cache_tokens_per_block"),
            num_blocks=Series("trtllm_kv_cache_max_blocks"),
            ttft=Series("trtllm_time_to_first_token_seconds"),
        ),
        "triton-tensorrt-llm": EngineSeries(
            waiting=Series("nv_trt_llm_request_metrics", {"request_type": "waiting"}),
            running=Series("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
            kv_usage=_triton_blocks("fraction"),
            block_size=_triton_blocks("tokens_per"),
            num_blocks=_triton_blocks("max"),
        ),
        "triton": EngineSeries(
            # The reference reads running requests from `nv_inference_exec_count`, which counts all
            # that ever ran and would drown the picker's own count.
            waiting=Series("nv_inference_pending_request_count")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The known engines, the labels that name an endpoint's engine, and the default."""

    engines: Mapping[str, EngineSeries] = field(default_factory=lambda: ENGINES)
    label_keys: tuple[str, ...] = ENGINE_LABELS
    default: str = DEFAULT_ENGINE

    def of(self, labels: Mapping[str, str]) -> EngineSeries:
        named: Iterable[str] = (labels[key] for key in self.label_keys if key in labels)
        return self.engines.get(next(iter(named), ""), self.engines[self.default])
