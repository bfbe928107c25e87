"""Gauges and counters of the engine, each a function of one snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worker.metrics.families import head_text


class EngineNumbers(Protocol):
    """What the engine tells about itself; `engine.messages.EngineStats` is one."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_deferred(self) -> int: ...
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
    def prompt_tokens_cached(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def num_hash_collisions(self) -> int: ...
    @property
    def num_corrupted_requests(self) -> int: ...
    @property
    def num_event_batches_dropped(self) -> int: ...
    @property
    def sleep_level(self) -> int | None: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def stalled_seconds(self) -> float: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def num_accepted_by_position(self) -> tuple[int, ...]: ...
    @property
    def num_drafter_failures(self) -> int: ...
    @property
    def num_speculative_tokens(self) -> float: ...


Read = Callable[[EngineNumbers], float]


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """One family. Each of `samples` is a label with its value ("" for none) and how to read it."""

    name: str
    kind: str
    documentation: str
    samples: tuple[tuple[str, Read], ...]


def _zero(_: EngineNumbers) -> float:
    return 0


def _gauge(name: str, text: str, read: Read) -> EngineSeries:
    return EngineSeries(name, "gauge", text, (("", read),))


def _counter(name: str, text: str, read: Read) -> EngineSeries:
    return EngineSeries(f"{name}_total", "counter", text, (("", read),))


VLLM_SERIES = (
    _gauge("vllm:num_requests_running", "Requests in the running batch.", lambda n: n.num_running),
    _gauge(
        "vllm:num_requests_waiting", "Requests waiting to be scheduled.", lambda n: n.num_waiting
    ),
    EngineSeries(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Requests waiting for room, or held back on purpose.",
        (
            ('reason="capacity"', lambda n: n.num_waiting - n.num_deferred),
            ('reason="deferred"', lambda n: n.num_deferred),
        ),
    ),
    EngineSeries(
        "vllm:num_requests_kv_fetch_by_stage",
        "gauge",
        "Requests that take their KV from elsewhere, by how far they are.",
        (
            ('stage="waiting_to_start"', _zero),
            ('stage="in_progress"', _zero),
            ('stage="completed_waiting"', _zero),
        ),
    ),
    EngineSeries(
        "vllm:engine_sleep_state",
        "gauge",
        "Which of the states the engine is in.",
        (
            ('sleep_state="awake"', lambda n: int(n.sleep_level is None)),
            ('sleep_state="weights_offloaded"', lambda n: int(n.sleep_level == 1)),
            ('sleep_state="discard_all"', lambda n: int(n.sleep_level == 2)),
        ),
    ),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "KV cache in use by live requests, 0 to 1.",
        lambda n: n.kv_cache_usage,
    ),
    _counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda n: n.prefix_cache_queries,
    ),
    _counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda n: n.prefix_cache_hits,
    ),
    _counter("vllm:external_prefix_cache_queries", "Prompt tokens asked of other workers.", _zero),
    _counter("vllm:external_prefix_cache_hits", "Prompt tokens found at other workers.", _zero),
    _counter("vllm:mm_cache_queries", "Items looked up in the multi-modal cache.", _zero),
    _counter("vllm:mm_cache_hits", "Items found in the multi-modal cache.", _zero),
    _counter(
        "vllm:num_preemptions",
        "Requests preempted to free their blocks.",
        lambda n: n.num_preemptions,
    ),
    _counter(
        "vllm:prompt_tokens",
        "Prompt tokens prefilled, cached ones included.",
        lambda n: n.prompt_tokens,
    ),
    EngineSeries(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "Prompt tokens, by where their KV came from.",
        (
            ('source="local_compute"', lambda n: n.prompt_tokens - n.prompt_tokens_cached),
            ('source="local_cache_hit"', lambda n: n.prompt_tokens_cached),
            ('source="external_kv_transfer"', _zero),
        ),
    ),
    _counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens that were not computed.",
        lambda n: n.prompt_tokens_cached,
    ),
    EngineSeries(
        "vllm:prompt_tokens_cached_by_source_total",
        "counter",
        "Prompt tokens that were not computed, by the memory their KV was in.",
        (
            ('source="device"', lambda n: n.prompt_tokens_cached),
            ('source="host"', _zero),
            ('source="p2p"', _zero),
            ('source="disk"', _zero),
            ('source="external_unspecified"', _zero),
        ),
    ),
    _counter("vllm:generation_tokens", "Tokens generated.", lambda n: n.generation_tokens),
    _counter(
        "vllm:corrupted_requests",
        "Requests whose logits were not numbers.",
        lambda n: n.num_corrupted_requests,
    ),
    _counter("vllm:watermark_requests", "Not counted; vLLM has it optionally.", _zero),
    _counter(
        "vllm:spec_decode_num_drafts",
        "Runs of drafts verified: one for each sequence and step.",
        lambda n: n.num_drafts,
    ),
    _counter(
        "vllm:spec_decode_num_draft_tokens",
        "Drafted tokens verified.",
        lambda n: n.num_draft_tokens,
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens accepted.",
        lambda n: n.num_accepted_tokens,
    ),
)
OWN_SERIES = (
    _counter(
        "pointsman:engine_restarts",
        "Engines started in place of one that was lost.",
        lambda n: n.num_restarts,
    ),
    _gauge(
        "pointsman:engine_stalled",
        "1 while a step runs beyond its time budget.",
        lambda n: int(n.stalled_seconds > 0),
    ),
    _counter("pointsman:engine_steps", "Steps of the engine.", lambda n: n.num_steps),
    _counter(
        "pointsman:prefix_cache_evictions",
        "Cached blocks whose contents were given up for others.",
        lambda n: n.num_evictions,
    ),
    _counter(
        "pointsman:prefix_cache_hash_collisions",
        "Lookups that met a block of the same hash and other contents.",
        lambda n: n.num_hash_collisions,
    ),
    _counter(
        "pointsman:kv_event_batches_dropped",
        "Batches of KV events that were not sent because nobody took them in time.",
        lambda n: n.num_event_batches_dropped,
    ),
    _gauge(
        "pointsman:spec_decode_draft_length",
        "Drafts verified per decoding sequence in the last step; 0 while nothing decodes.",
        lambda n: n.num_speculative_tokens,
    ),
    _counter(
        "pointsman:spec_decode_drafter_failures",
        "Times that a drafter failed, or proposed what is no token.",
        lambda n: n.num_drafter_failures,
    ),
)


def position_series(num_speculative_tokens: int) -> EngineSeries:
    """Accepted tokens by their place in a run of at most so many drafts."""

    def read(position: int) -> Read:
        def accepted(numbers: EngineNumbers) -> float:
            counts = numbers.num_accepted_by_position
            return counts[position] if position < len(counts) else 0

        return accepted

    return EngineSeries(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Drafted tokens accepted, by their place in the run.",
        tuple((f'position="{i}"', read(i)) for i in range(num_speculative_tokens)),
    )


class EngineFamilies:
    """Renders series from a snapshot, through one prepared template."""

    def __init__(self, series: tuple[EngineSeries, ...], labels: str) -> None:
        lines: list[str] = []
        for family in series:
            lines.append(head_text(family.name, family.kind, family.documentation))
            lines += [_line(family.name, labels, extra) for extra, _ in family.samples]
        self._template = "".join(lines)
        self._reads = tuple(read for family in series for _, read in family.samples)

    def render(self, numbers: EngineNumbers) -> bytes:
        """The text of every family."""
        return (self._template % tuple([read(numbers) for read in self._reads])).encode()


def _line(name: str, labels: str, extra: str) -> str:
    both = f"{labels},{extra}" if extra else labels
    return f"{name}{{{both}}} ".replace("%", "%%") + "%r\n"
