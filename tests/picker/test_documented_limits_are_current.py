"""The list of limits in docs/protocol.md says what the code says, and leaves out none."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(2\^)?([\d,]+(?:\.\d+)?)(?: (KiB|MiB|GiB))?")
UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CONSTANT = re.compile(r"^(_?(?:DEFAULT_)?(?:MAX|MOST)_[A-Z0-9_]+)(?:: Final)? = ", re.MULTILINE)
# What is named like a limit and bounds nothing that comes from outside or that has to wait.
NO_LIMITS = {
    # parts of a thread's time, the age of something computed, pauses
    *("app.model_choice.MAX_AGE_SECONDS", "flowcontrol.load_estimate.MAX_AGE_SECONDS"),
    "base.backoff.MAX_ASKED_SECONDS",
    *("k8s.discovery.MAX_SHARE", "scrape.scrape.MAX_SHARE", "xds.feed.MAX_SHARE"),
    # lines of the log and names in a line, and what is remembered not to log it twice
    *(
        "app.model_choice._MAX_WARNINGS",
        "app.served_pool.MAX_NAMED",
        "app.pool_choice._MAX_WARNINGS",
    ),
    *("peers.server.MAX_COMPLAINTS", "telemetry.health_metrics.MAX_LINES"),
    *("recording.replay._MAX_TOTALS_SHOWN", "xds.server.MAX_LINES"),
    *("xds.server._MAX_SHOWN", "xds.server._MAX_TEXT"),
    # values that are computed anew when they are not remembered
    *("extproc.wire.MAX_REMEMBERED", "plugins.parsers.http_parsers.MAX_REMEMBERED"),
    *("recording.requests.MAX_REMEMBERED", "recording.requests.MAX_REMEMBERED_LENGTH"),
    *("requestcontrol.pipeline.MAX_CACHED_PATHS", "rpc.http2.headers.MAX_REMEMBERED"),
    *("peers.inbox._MAX_MISSING", "scrape.exposition.MAX_REMEMBERED_BYTES"),
    # beyond it loads are added up less often
    "peers.exchange.MAX_LOADS_PER_MESSAGE",
    # what a type or a standard can hold
    *("config.decode.MAX_BYTES", "base.durations.MAX_SECONDS", "peers.wire._MAX_UINT32"),
    *("framework.label_selector._MAX_NAME", "framework.label_selector._MAX_PREFIX"),
    *("plugins.conformance._MAX_PORT_DIGITS", "pool.object_parts.MAX_PORT"),
    *("plugins.parsers._usage._MAX_COUNT", "plugins.parsers._usage._MAX_DIGITS"),
    *("plugins.producers.inflight_load_producer._MAX_OUTPUT", "rpc.http2.frames.MAX_FRAME_BYTES"),
    *("rpc.http2.frames.MAX_WINDOW_BYTES", "tokenization.prompt_stream._MAX_TOKEN"),
    *("contrib.latency._learner.MAX_READING_SECONDS", "contrib.program_aware._MAX_HALVINGS"),
    # flags that are refused
    *("cli.flags.MAX_LEASE_NAME", "cli.flags.MAX_LEASE_SECONDS"),
    # parts of formulas and algorithms
    "planner.capacity._MAX_SECONDS",
    *("prefix.block_hash._MAX_RUNS", "prefix.segment_table.MAX_ENTRIES_PER_BUCKET"),
    *("k8s.reflector._MAX_BARREN", "plugins.fairness_policies._burst_headroom.MAX_DEVIATIONS"),
    *(
        f"plugins.fairness_policies.{name}"
        for name in (
            "_burst_headroom.MAX_GAPS",
            "_recent_use._MAX_EXPONENT",
            "deficit_round_robin_fairness_policy.MAX_FACTOR",
        )
    ),
}


# What the page calls each limit.
ROWS = {
    "extproc.machine.request_phase.DEFAULT_MAX_BODY_BYTES": "one request body",
    "cli.options._DEFAULT_MAX_UNFINISHED_BODY_BYTES": ("all bodies that are still arriving"),
    "extproc.machine.request_phase.DEFAULT_MAX_HEADERS": "request headers",
    "extproc.machine.request_phase.DEFAULT_MAX_HEADER_BYTES": "bytes of request headers",
    "extproc.machine.messages.MAX_CHUNK_BYTES": "one piece of a body to the proxy",
    "extproc.server.OVERRIDE_TIMEOUT_SECONDS": "wait requested from the proxy",
    "plugins.producers.approx_prefix_cache_producer.MAX_PROMPTS": (
        "prompts of one request with a prefix"
    ),
    "contrib.burst.MAX_BLOCKS": "blocks that burst-prefix-cache-producer compares",
    "tokenization.multimodal.MAX_ITEMS_PER_TOKEN": "media items for each token of a prompt",
    "contrib.grpc_parsers.vllm.MAX_ITEMS": "media items of a gRPC request",
    "tokenization.image_size._MAX_JPEG_STEPS": "segments of a JPEG before its size",
    "tokenization.prompt_stream.MAX_MEDIA_TOKENS": "estimated tokens of media",
    "contrib.mm_embeddings.MAX_ITEM": "characters of a media item's id",
    "plugins.session_affinity.MAX_SESSION_ID": "characters of a session's id",
    "plugins.session_affinity.MAX_BINDINGS": "sessions bound to endpoints",
    "requestcontrol.admission.MAX_FAIRNESS_ID": "characters of a fairness id",
    "contrib.context_length.MAX_DIGITS": "digits of a token count in a label",
    "flowcontrol.waiting.MAX_OUTPUT_TOKENS": "output tokens that a request may announce",
    "plugins.parsers._form_bodies.MAX_DELIMITERS": "delimiters of a form, and lines like one",
    "plugins.parsers._form_bodies.MAX_HEADER_BYTES": "head of one part of a form",
    "plugins.parsers._form_bodies.MAX_FIELD_BYTES": "field `model` of a form",
    "plugins.parsers._usage.DEFAULT_LIMIT_BYTES": "JSON response whose usage is read",
    "plugins.parsers._usage.TAIL_BYTES": "end of a longer one",
    "contrib.grpc_parsers._frames.DEFAULT_LIMIT_BYTES": "one gRPC message of a response",
    "rpc.options.DEFAULT_MAX_MESSAGE_BYTES": "one gRPC message from the proxy",
    "rpc.http2.engine.MAX_CONCURRENT_STREAMS": "calls of one connection",
    "rpc.http2.engine.STREAM_WINDOW_BYTES": "window of one call",
    "rpc.http2.engine.CONNECTION_WINDOW_BYTES": "window of one connection",
    "rpc.http2.engine.MAX_HEADER_LIST_BYTES": "header list of a gRPC call",
    "rpc.http2.engine.MAX_CONTINUATIONS": "continuations of a header list",
    "rpc.call.MAX_UNREAD_BYTES": "unread messages of one call",
    "rpc.call.MAX_UNSENT_BYTES": "unsent replies of one call",
    "rpc.connection.ABORT_BYTES": "bytes that a proxy does not read",
    "rpc.server.BACKLOG": "connections not accepted yet",
    "rpc.connection.WASTE_PER_SECOND": (
        "calls cancelled within a second, and empty frames, on one connection"
    ),
    "rpc.connection.WASTE_BURST": "… in a burst",
    "rpc.connection.KEEPALIVE_SECONDS": "silence of a proxy that has calls",
    "rpc.framing.MAX_STATUS_TEXT_BYTES": "text of a gRPC status",
    "scrape.sources.MAX_PAGE_BYTES": "one metrics page or list of models",
    "scrape.page_reader.MAX_HEAD_BYTES": "head of its response",
    "scrape.page_reader.MAX_INTERIM_RESPONSES": "interim responses before it",
    "scrape.http_client.TIMEOUT_SECONDS": "time for one page",
    "scrape.extract.MAX_BUCKETS": "TTFT buckets on one page",
    "scrape.scrape.MIN_TICK_SECONDS": "least time between two scrapes",
    "scrape.scrape.ScrapeSettings.max_scrapes_per_second": "scrapes of a pool a second",
    "scrape.scrape.MAX_BACKOFF_SECONDS": "wait for an address that does not answer",
    "scrape.reading.StalenessLimits.failures": "failed scrapes until the load is unknown",
    "scrape.extract.MAX_COUNT": "a number on a page",
    "kvevents.listener.MAX_MESSAGE_BYTES": "one message of KV events",
    "kvevents.listener._MAX_UNREAD": "messages that wait during a replay",
    "prefix.kv_event_codec.MAX_EXTRA_KEYS": "extra keys of one block",
    "prefix.precise_index._MAX_LOOSE": "chains of an engine that end within a block",
    "prefix.precise_index._MAX_SHELVES": "tiers and groups of one engine",
    "kvevents.listener.ReplaySettings.total_seconds": "one replay",
    "kvevents.listener.ReplaySettings.idle_seconds": "silence during a replay",
    "kvevents.listener.ReplaySettings.max_concurrent": "replays at a time",
    "plugins.producers.approx_prefix_cache_producer.MAX_REPORTED_BLOCK_SIZE_TOKENS": (
        "block size that an endpoint reports"
    ),
    "plugins.producers.approx_prefix_cache_producer.MAX_REPORTED_CAPACITY": (
        "blocks of an endpoint in the approximate index"
    ),
    "base.http.MAX_BODY_BYTES": "answer of a tokenizer or a predictor",
    "contrib.latency._servers.HTTP_SECONDS": "latency predictions of a request",
    "contrib.latency._model.MAX_MODELS": "models whose latency is learned",
    "contrib.latency._learner.MAX_ANSWER_TOKENS": "output limit in predictions",
    "flowcontrol.settings.DEFAULT_BAND_REQUESTS": "requests in the queue of a band",
    "flowcontrol.settings.DEFAULT_BAND_BYTES": "bytes in the queue of a band",
    "flowcontrol.settings.DEFAULT_MEMORY_BYTES": "memory of all queued requests",
    "flowcontrol.settings.DEFAULT_TTL_SECONDS": "wait in the queue",
    "flowcontrol.queue.MAX_DYNAMIC_BANDS": "bands that are not configured",
    "flowcontrol.queue.MAX_IDLE_FLOWS": "idle flows of a band",
    "contrib.token_limits.MAX_BUCKETS": "tenants and models with used tokens",
    "contrib.token_limits.MAX_TENANT": "characters of a tenant in a token limit",
    "contrib.program_aware.MAX_PROGRAMS": "programs of program-aware-fairness",
    "flowcontrol.capacity.MAX_DISPLACED": "requests that one may displace",
    "flowcontrol.core.MAX_DISPATCHES_PER_PASS": "requests dispatched in one turn of the loop",
    "flowcontrol.reclaim.MAX_AT_ONCE": "evictions at once",
    "flowcontrol.outcomes.MAX_RETRY_SECONDS": "`retry-after`",
    "pool.endpoints_file.MAX_FILE_BYTES": "the endpoints file",
    "pool.endpoints_file.MAX_NAME_LENGTH": "a name in it",
    "pool.endpoints_file.MAX_LOOKUPS": "host names resolved at a time",
    "config.load.MAX_CONFIG_BYTES": "the configuration",
    "config.documents.MAX_VALUES": "values of it, through aliases",
    "config.findings.MAX_FINDINGS": "findings on one file",
    "planner.autoscale_file.MAX_BYTES": "the file of `--autoscale`",
    "cli.pools.MAX_POOLS": "pools of one picker",
    "k8s.client.MAX_BODY_BYTES": "a list of an API server",
    "k8s.client.MAX_LINE_BYTES": "one event of a watch",
    "pool.object_parts.MAX_TARGET_PORTS": "target ports of a pool",
    "k8s.objects.MAX_PROBLEMS": "logged problems of one object",
    "k8s.objects.MAX_LOGGED": "states of objects whose problems are logged once",
    "requestcontrol.prompt_heads.MAX_ADDRESSES": (
        "endpoints whose headers come with the first piece"
    ),
    "k8s.reviews.MAX_REMEMBERED": "bearer tokens remembered",
    "k8s.reviews.MAX_TOKEN_LETTERS": "characters of one",
    "k8s.reconcile.RULES_TIMEOUT_SECONDS": "wait for objectives and rewrites at the start",
    "k8s.elector.MAX_STATED_SECONDS": "time that a Lease may ask for",
    "base.backoff.MAX_SECONDS": "longest wait for the API server",
    "peers.wire.MAX_MESSAGE_BYTES": "one message of a replica",
    "peers.wire.MAX_LOADS": "loads in one message",
    "peers.inbox.InboxLimits.max_loads": "loads remembered of one replica",
    "peers.wire.MAX_NAME": "a name in it, and a session",
    "peers.wire.MAX_COUNT": "requests or tokens in flight at an endpoint",
    "peers.discovery.MAX_PEERS": "replicas called",
    "peers.server.MAX_CALLS": "calls of replicas to one pool",
    "peers.inbox.InboxLimits.max_peers": "replicas remembered",
    "peers.outbox.OutboxLimits.log_bytes": "news stored for a replica that is away",
    "peers.outbox.OutboxLimits.pending_bytes": "news between two messages",
    "peers.inbox.InboxLimits.silence_seconds": "silence until a replica's load expires",
    "xds.server.MAX_NAMES": "resources that an xDS client may name",
    "metrics.label_caps.MAX_NAMES": "names of models or tenants in [metrics](metrics.md)",
    "metrics.label_caps.MAX_NAME_CHARACTERS": "characters of such a name",
    "metrics.label_caps.MAX_LABEL_SETS": "label sets of one series",
    "metrics.label_caps.MAX_ROOM_BYTES": "bytes of clients' label values on the metrics page",
    "telemetry.plugin_metrics.MAX_ROWS": "rows by tenant of a plugin's series",
    "pool.datastore.MAX_MODELS": "remembered names of served models",
    "cli.options.ExplainFlags.decision_records": "decisions stored for `explain`",
    "admin.routes.DEFAULT_LIMIT": "… shown by `/decisions`",
    "admin.routes.MAX_LIMIT": "… at most",
    "decisions.packing.MAX_CANDIDATES": "stored candidates of one decision",
    "decisions.packing.MAX_REMOVED": "stored names of filtered endpoints",
    "decisions.decision.MAX_NAME": "characters of stored names",
    "decisions.decision.MAX_MESSAGE": "characters of a stored reason",
    "admin.history.SAMPLES": "samples of the history",
    "admin.history.MAX_SAMPLES": "… of all endpoints in one answer",
    "flowcontrol.shell.controller.MAX_FLOWS": "flows shown of a band",
    "cli.options.RecordFlags.max_bytes": "a recording",
    "recording.file.MAX_WAITING_BYTES": "lines of it that wait for the disk",
    "recording.lines.MAX_LINE_BYTES": "one line of it, replayed",
    "recording.requests.MAX_PROMPT_BYTES": "left-out bytes of prompts in one line",
}


@cache
def documented() -> dict[str, str]:
    page = (ROOT / "docs/protocol.md").read_text()
    section = page.partition("\n## Every limit\n")[2].partition("\n## ")[0]
    items = re.findall(r"^- (.+?): (.+?)(?=\n- |\n\n)", section, re.M | re.S)
    limits = {" ".join(what.split()): limit for what, limit in items}
    assert sorted(limits) == sorted(ROWS.values())
    return {place: limits[what] for place, what in ROWS.items() if is_there(place)}


def is_there(place: str) -> bool:
    """A shelf may have been removed."""
    room = place.partition(".")[0]
    return room == "base" or any((ROOT / "picker").glob(f"{room}*"))


def constants() -> Iterator[str]:
    for file in sorted([*(ROOT / "picker").rglob("*.py"), *(ROOT / "base").rglob("*.py")]):
        dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        module = dotted.removeprefix("picker.")
        for found in CONSTANT.finditer(file.read_text()):
            yield f"{module}.{found[1]}"


def value_at(place: str) -> float:
    path, name = place.rsplit(".", 1)
    path, _, holder = path.rpartition(".") if path.split(".")[-1][0].isupper() else (path, "", "")
    module = import_module(path if path.startswith("base.") else f"picker.{path}")
    if not holder:
        return float(getattr(module, name))
    fields = {field.name: field.default for field in dataclasses.fields(getattr(module, holder))}
    return float(fields[name])


@pytest.mark.parametrize("place", documented())
def test_a_documented_limit_is_that_of_the_code(place: str) -> None:
    found = NUMBER.match(documented()[place])
    assert found is not None
    number = float(found[2].replace(",", ""))
    assert value_at(place) == (2**number if found[1] else number * UNITS[found[3]])


def test_every_limit_of_the_code_is_documented() -> None:
    known = set(constants())
    assert known >= set(filter(is_there, NO_LIMITS))
    assert known - NO_LIMITS <= documented().keys()
