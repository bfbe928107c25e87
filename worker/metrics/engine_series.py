"""Gauges and counters of the engine, each a function of one snapshot."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from base.series import head_text
from worker.types import EngineStats

Read = Callable[[EngineStats], float]


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """One family of series. A sample has a label's value ("" for none) and a reading function."""

    name: str
    kind: str
    documentation: str
    samples: tuple[tuple[str, Read], ...]


def _gauge(name: str, text: str, read: str | Read) -> EngineSeries:
    read = attrgetter(read) if isinstance(read, str) else read
    return EngineSeries(name, "gauge", text, (("", read),))


def _counter(name: str, text: str, read: str | Read | None = None) -> EngineSeries:
    """Return a counter. `read` None: it is the scheduler's counter of this name."""
    read = read or f"scheduler.{name}"
    return _counters(name, text, (("", attrgetter(read) if isinstance(read, str) else read),))


def _counters(name: str, text: str, samples: tuple[tuple[str, Read], ...]) -> EngineSeries:
    return EngineSeries(f"{name}_total", "counter", text, samples)


VLLM_SERIES = (
    _gauge("num_requests_running", "Requests in the running batch.", "num_running"),
    _gauge("num_requests_waiting", "Requests waiting to be scheduled.", "num_waiting"),
    EngineSeries(
        "num_requests_waiting_by_reason",
        "gauge",
        "Requests waiting for room, or held back on purpose.",
        (
            ('reason="capacity"', lambda n: n.num_waiting - n.num_deferred),
            ('reason="deferred"', lambda n: n.num_deferred),
        ),
    ),
    EngineSeries(
        "num_requests_kv_fetch_by_stage",
        "gauge",
        "Requests that fetch their KV from elsewhere, by stage.",
        (
            ('stage="waiting_to_start"', lambda _: 0),
            ('stage="in_progress"', lambda n: n.pulls.num_fetching),
            ('stage="completed_waiting"', lambda n: n.pulls.num_fetched),
        ),
    ),
    EngineSeries(
        "engine_sleep_state",
        "gauge",
        "1 for the state that the engine is in.",
        (
            ('sleep_state="awake"', lambda n: int(n.sleep_level is None)),
            ('sleep_state="weights_offloaded"', lambda n: int(n.sleep_level == 1)),
            ('sleep_state="discard_all"', lambda n: int(n.sleep_level == 2)),
        ),
    ),
    _gauge("kv_cache_usage_perc", "KV cache in use by live requests, 0 to 1.", "kv_cache_usage"),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    _counter(
        "external_prefix_cache_queries",
        "Prompt tokens asked of other workers.",
        "scheduler.external_cache_queries",
    ),
    _counter(
        "external_prefix_cache_hits",
        "Prompt tokens whose KV came from other workers.",
        "scheduler.external_cache_hits",
    ),
    # vLLM's page has these two with any model, also one without images.
    _counter("mm_cache_queries", "Items looked up in the multi-modal cache.", lambda _: 0),
    _counter("mm_cache_hits", "Items found in the multi-modal cache.", lambda _: 0),
    _counter("num_preemptions", "Requests preempted to free their blocks."),
    _counter("prompt_tokens", "Prompt tokens prefilled, cached ones included."),
    _counters(
        "prompt_tokens_by_source",
        "Prompt tokens, by where their KV came from.",
        (
            (
                'source="local_compute"',
                lambda n: n.scheduler.prompt_tokens - n.scheduler.prompt_tokens_cached,
            ),
            (
                'source="local_cache_hit"',
                lambda n: n.scheduler.prompt_tokens_cached - n.scheduler.prompt_tokens_external,
            ),
            ('source="external_kv_transfer"', lambda n: n.scheduler.prompt_tokens_external),
        ),
    ),
    _counter("prompt_tokens_cached", "Prompt tokens that were not computed."),
    _counters(
        "prompt_tokens_cached_by_source",
        "Prompt tokens that were not computed, by the memory that held their KV.",
        (
            (
                'source="device"',
                lambda n: n.scheduler.prompt_tokens_cached - n.scheduler.prompt_tokens_external,
            ),
            ('source="host"', lambda n: n.scheduler.prompt_tokens_host),
            (
                'source="p2p"',
                lambda n: (
                    n.scheduler.prompt_tokens_external
                    - n.scheduler.prompt_tokens_host
                    - n.scheduler.prompt_tokens_disk
                ),
            ),
            ('source="disk"', lambda n: n.scheduler.prompt_tokens_disk),
            ('source="external_unspecified"', lambda _: 0),
        ),
    ),
    _counter("generation_tokens", "Tokens generated."),
    _counter(
        "corrupted_requests",
        "Requests whose logits were not numbers.",
        "scheduler.num_corrupted_requests",
    ),
    _counter("watermark_requests", "Not counted; vLLM has it optionally.", lambda _: 0),
    _counter(
        "spec_decode_num_drafts",
        "Runs of drafts verified: one for each sequence and step.",
        "speculation.num_drafts",
    ),
    _counter(
        "spec_decode_num_draft_tokens", "Drafted tokens verified.", "speculation.num_draft_tokens"
    ),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Drafted tokens accepted.",
        "speculation.num_accepted_tokens",
    ),
    _counter(
        "kv_offload_store_bytes", "Evicted KV copied to host memory.", "tiers.host_bytes_saved"
    ),
    _counter("kv_offload_load_bytes", "KV loaded from host memory.", "tiers.host_bytes_loaded"),
    _counter(
        "kv_offload_stores_skipped",
        "Evicted blocks for which host memory had no room.",
        "tiers.num_host_saves_skipped",
    ),
    _gauge(
        "kv_offload_cpu_cache_usage_perc",
        "Share of the host memory for KV that is in use, 0 to 1.",
        "tiers.host_usage",
    ),
)
OWN_SERIES = (
    _gauge("kv_host_tier_blocks", "Blocks of KV in host memory.", "tiers.host_blocks"),
    _gauge("kv_disk_tier_blocks", "Blocks of KV on disk.", "tiers.disk_blocks"),
    _counter("kv_disk_written_bytes", "KV written to disk.", "tiers.disk_bytes_written"),
    _counter("kv_disk_read_bytes", "KV read from disk.", "tiers.disk_bytes_read"),
    _counter(
        "kv_disk_failures",
        "Files of KV that could not be written, read or deleted in time, or were damaged.",
        "tiers.num_disk_failures",
    ),
    _counter("engine_restarts", "Engines started in place of one that was lost.", "num_restarts"),
    _gauge(
        "engine_stalled",
        "1 while a step runs beyond its time budget.",
        lambda n: int(n.stalled_seconds > 0),
    ),
    _counter("engine_steps", "Steps of the engine.", "scheduler.num_steps"),
    _counter(
        "engine_out_of_memory",
        "Steps undone because the device had too little memory for them.",
        "scheduler.num_out_of_memory",
    ),
    _counter("kv_transfer_sent_bytes", "KV sent to other workers.", "transfers.bytes_sent"),
    _counter(
        "kv_transfer_received_bytes", "KV taken from other workers.", "transfers.bytes_received"
    ),
    _counter(
        "kv_transfer_failures",
        "Transfers of KV that failed, so that prompts were computed.",
        "transfers.num_failed",
    ),
    _counter(
        "kv_transfer_expired",
        "Prompts whose KV was exported for another worker, which did not fetch it.",
        "transfers.num_expired",
    ),
    _counter(
        "prefix_cache_evictions",
        "Cached blocks whose contents were evicted for others.",
        "num_evictions",
    ),
    _counter(
        "prefix_cache_hash_collisions",
        "Lookups that met a block of the same hash and other contents.",
        "num_hash_collisions",
    ),
    _counter(
        "kv_event_batches_dropped",
        "Batches of KV events that were dropped because no subscriber read them in time.",
        "num_event_batches_dropped",
    ),
    _gauge(
        "spec_decode_draft_length",
        "Drafts verified per decoding sequence in the last step; 0 while nothing decodes.",
        "speculation.num_speculative_tokens",
    ),
    _counter(
        "spec_decode_drafter_failures",
        "Failures of a drafter, invalid tokens included.",
        "speculation.num_drafter_failures",
    ),
)


def position_series(num_speculative_tokens: int) -> EngineSeries:
    def accepted(position: int) -> Read:
        # There are no counts before the first draft.
        return lambda n: sum(n.speculation.num_accepted_by_position[position : position + 1])

    return _counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by position in the run.",
        tuple((f'position="{i}"', accepted(i)) for i in range(num_speculative_tokens)),
    )


class EngineFamilies:
    """Renders series of one name prefix from a snapshot, through one prepared template."""

    def __init__(self, prefix: str, series: tuple[EngineSeries, ...], labels: str) -> None:
        lines: list[str] = []
        for family in series:
            name = f"{prefix}:{family.name}"
            lines.append(head_text(name, family.kind, family.documentation))
            for extra, _ in family.samples:
                both = f"{labels},{extra}" if extra else labels
                lines.append(f"{name}{{{both}}} ".replace("%", "%%") + "%r\n")
        self._template = "".join(lines)
        self._reads = tuple(read for family in series for _, read in family.samples)

    def render(self, stats: EngineStats) -> bytes:
        return (self._template % tuple([read(stats) for read in self._reads])).encode()
