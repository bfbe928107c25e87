"""Samples of a metrics page → the endpoint's load, by the names its engine gives them.

A page may describe several engines: the data-parallel ranks of one server, the models of a Triton.
Counts are then summed, KV usage is the unweighted mean, and the block size is the smallest. If each
rank is an endpoint, only its samples count. Tensor- and pipeline-parallel ranks repeat the same
requests; the greatest value counts. So the result never depends on the order of the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from picker.scrape.engines import PROCESS_START, EngineSeries, Series, bucket_name
from picker.scrape.exposition import PageSample, greatest, scan
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.types import EndpointMetrics, ServedTotals

RANK_LABELS = ("engine", "dp_rank")  # vLLM's and SGLang's name for a data-parallel rank
MODEL_LABELS = ("model_name", "model")  # most engines' name for a model, and Triton's
REPLICA_LABELS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
MAX_COUNT = 2**53  # beyond it floats skip whole numbers
MAX_BUCKETS = 2000  # of the times to first token on a page; decoding them takes 20 ms
SERVED_SECONDS = 0.9  # between two reads of served totals: once a second, for jittered scrapes

_PART_LABEL = "priority"
_Samples = Mapping[str, Sequence[PageSample]]


def extract(scrape: Scrape, engine: EngineSeries) -> Extraction:
    """Read one page. Raises `ExtractError` if the engine has load series and none is readable."""
    samples = scan(scrape.page, engine.names)
    problems: list[str] = []
    attributes = _custom(samples, engine, scrape.rank, problems)
    custom_problems = len(problems)
    loads = [one for one in (engine.waiting, engine.running, engine.kv_usage) if one is not None]
    if not loads:
        return Extraction(None, attributes, tuple(problems))
    for series in loads:
        _read_old_name(scrape.page, samples, series)
    waiting, running, usage = (
        _values(samples, one, scrape.rank, problems)
        for one in (engine.waiting, engine.running, engine.kv_usage)
    )
    if not (waiting or running or usage):
        raise ExtractError("; ".join(problems[custom_problems:]))
    # A page may omit values that do not change; the previous ones stay.
    before = scrape.previous or EndpointMetrics()
    block_size, num_blocks = _geometry(samples, engine, scrape.rank)
    active, adapters_waiting, max_adapters = _adapters(scrape.page, engine.lora, scrape.rank)
    start = _process_start(samples)
    metrics = EndpointMetrics(
        waiting_requests=int(sum(waiting)) if waiting else None,
        running_requests=int(sum(running)) if running else None,
        kv_cache_usage=_mean_share(usage) if usage else None,
        block_size_tokens=block_size or before.block_size_tokens,
        num_kv_blocks=num_blocks or before.num_kv_blocks,
        process_start_time_seconds=before.process_start_time_seconds if start is None else start,
        active_models=active,
        waiting_models=adapters_waiting,
        max_active_models=max_adapters,
        updated_at_seconds=scrape.now_seconds,
        interval_seconds=scrape.interval_seconds,
        served=_served(scrape, engine, before.served),
    )
    models = _served_models(samples, engine) | active | adapters_waiting
    return Extraction(metrics, attributes, tuple(problems), models)


def _read_old_name(page: bytes, samples: dict[str, tuple[PageSample, ...]], series: Series) -> None:
    if series.old_names and series.name not in samples:
        found = scan(page, series.old_names)
        # In reverse: of several old names the first one counts.
        samples.update(
            (series.name, found[name]) for name in series.old_names[::-1] if name in found
        )


def _served_models(samples: _Samples, engine: EngineSeries) -> frozenset[str]:
    found = () if engine.running is None else samples.get(engine.running.name, ())
    return frozenset(
        one.labels[label] for one in found for label in MODEL_LABELS if label in one.labels
    )


def _served(
    scrape: Scrape, engine: EngineSeries, before: ServedTotals | None
) -> ServedTotals | None:
    """Return the served totals; `before` while that is fresh, None for an engine without them."""
    now, ttft, generated = scrape.now_seconds, engine.ttft, engine.generated
    # Dozens of buckets double the cost of a scrape, and no decision reads them.
    if before is not None and now - before.read_at_seconds < SERVED_SECONDS:
        return before
    buckets = None if ttft is None else Series(bucket_name(ttft), ttft.labels)
    if buckets is not None and scrape.page.count(buckets.name.encode()) > MAX_BUCKETS:
        buckets = None
    names = [one.name for one in (buckets, generated) if one is not None]
    if not names:
        return None
    samples = scan(scrape.page, names)
    edges: dict[float, float] = {}
    if buckets is not None:
        for sample in _per_engine(samples, buckets, scrape.rank):
            edge = _edge(sample.labels.get("le", ""))
            if edge is not None and _usable(sample.value):
                edges[edge] = edges.get(edge, 0.0) + sample.value
    tokens = None
    if generated is not None and generated.name in samples:
        found = (sample.value for sample in _per_engine(samples, generated, scrape.rank))
        tokens = math.fsum(value for value in found if _usable(value))
    if not edges and tokens is None:
        return None
    ascending = sorted(edges)
    upto = [0.0, *(edges[edge] for edge in ascending)]
    return ServedTotals(
        now,
        tokens,
        tuple(ascending[:-1]),
        tuple(max(0.0, after - below) for below, after in pairwise(upto)),
    )


def _edge(text: str) -> float | None:
    """Return the upper edge of a bucket, which may be infinite; None for an invalid label."""
    try:
        edge = float(text)
    except ValueError:
        return None
    return None if math.isnan(edge) else edge


def _mean_share(values: Sequence[float]) -> float:
    if len(values) == 1:
        return min(values[0], 1.0)
    return sum(min(value, 1.0) for value in values) / len(values)


def _values(
    samples: _Samples, series: Series | None, rank: int | None, problems: list[str]
) -> list[float]:
    """Return the usable values of a series, one per engine; add the others to `problems`."""
    if series is None:
        return []
    found = [sample.value for sample in _per_engine(samples, series, rank)]
    if not found:
        problems.append(f"series '{series.name}' is missing")
        return found
    usable = [value for value in found if _usable(value)]
    if len(usable) < len(found):
        problems.append(_unusable(series, next(value for value in found if not _usable(value))))
    return usable


def _unusable(series: Series, value: float) -> str:
    """Describe the problem with a value, without the number, because each new text is logged."""
    if math.isfinite(value):
        kind = "negative" if value < 0 else "out of range"
    else:
        kind = "not a number" if math.isnan(value) else "infinite"
    return f"series '{series.name}' has an unusable value ({kind})"


def _usable(value: float) -> bool:
    return 0 <= value <= MAX_COUNT  # never true of NaN


def _per_engine(samples: _Samples, series: Series, rank: int | None) -> list[PageSample]:
    """Return one sample per engine (of the given rank only), in the order of the page."""
    matching: Sequence[PageSample] = samples.get(series.name, ())
    if series.labels:
        matching = [sample for sample in matching if _has(sample.labels, series.labels)]
    if rank is not None:
        matching = of_rank(matching, rank)
    if len(matching) < 2:
        return list(matching)
    matching = _without_parts(matching)
    best: dict[frozenset[tuple[str, str]], PageSample] = {}
    for sample in matching:
        engine = frozenset(pair for pair in sample.labels.items() if pair[0] not in REPLICA_LABELS)
        other = best.get(engine)
        if other is None or _supersedes(sample, other):
            best[engine] = sample
    return list(best.values())


def _without_parts(samples: Sequence[PageSample]) -> Sequence[PageSample]:
    """Omit samples that another one includes: SGLang reports a total with an empty priority."""
    if not any(sample.labels.get(_PART_LABEL) for sample in samples):
        return samples
    return [sample for sample in samples if not sample.labels.get(_PART_LABEL)] or samples


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in wanted.items())


def of_rank(samples: Sequence[PageSample], rank: int) -> Sequence[PageSample]:
    """Return the samples of one data-parallel rank; all of them where the page has no ranks."""
    ranked = [
        (next((sample.labels[name] for name in RANK_LABELS if name in sample.labels), None), sample)
        for sample in samples
    ]
    if all(label is None for label, _ in ranked):
        return samples
    return [sample for label, sample in ranked if label in (None, str(rank))]


def _supersedes(sample: PageSample, other: PageSample) -> bool:
    """Return whether `sample` is later, or at equal times greater, than `other`; NaN is least."""
    later, earlier = sample.timestamp_ms or 0, other.timestamp_ms or 0
    if later != earlier:
        return later > earlier
    return sample.value > other.value or math.isnan(other.value)


def _geometry(
    samples: _Samples, engine: EngineSeries, rank: int | None
) -> tuple[int | None, int | None]:
    """Return tokens per KV block and number of KV blocks; None where the page has none."""
    if engine.cache_info is not None:
        infos = _per_engine(samples, engine.cache_info, rank)
        sizes = [_count(info.labels.get(engine.block_size_label)) for info in infos]
        counts = [_count(info.labels.get(engine.num_blocks_label)) for info in infos]
    else:
        sizes = _gauge_counts(samples, engine.block_size, rank)
        counts = _gauge_counts(samples, engine.num_blocks, rank)
    known_sizes = [size for size in sizes if size is not None]
    known_counts = [count for count in counts if count is not None]
    return min(known_sizes, default=None), sum(known_counts) or None


def _count(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 15:
        return None
    return int(text) or None


def _gauge_counts(samples: _Samples, series: Series | None, rank: int | None) -> list[int | None]:
    if series is None:
        return []
    found = _per_engine(samples, series, rank)
    return [int(sample.value) or None for sample in found if _usable(sample.value)]


def _process_start(samples: _Samples) -> float | None:
    """Return the start of the youngest process of the page; each restart changes it."""
    starts = [sample.value for sample in samples.get(PROCESS_START, ()) if _usable(sample.value)]
    return max(starts, default=None)


def _adapters(
    page: bytes, series: Series | None, rank: int | None
) -> tuple[frozenset[str], frozenset[str], int | None]:
    """Return the running and waiting LoRA adapters, and the limit, from the latest sample."""
    # Engines write a new sample for every combination; the value is the time of writing.
    latest = None if series is None else greatest(page, series.name)
    if series is None or latest is None:
        return frozenset(), frozenset(), None
    if series.labels or any(name in latest.labels for name in RANK_LABELS):
        return _adapters_of_ranks(page, series, rank)
    return _adapters_in((latest,))


def _adapters_of_ranks(
    page: bytes, series: Series, rank: int | None
) -> tuple[frozenset[str], frozenset[str], int | None]:
    found = scan(page, (series.name,)).get(series.name, ())
    matching: Sequence[PageSample] = [one for one in found if _has(one.labels, series.labels)]
    if rank is not None:
        matching = of_rank(matching, rank)
    latest: dict[str, PageSample] = {}
    for sample in matching:
        engine = next((sample.labels[name] for name in RANK_LABELS if name in sample.labels), "")
        if engine not in latest or sample.value > latest[engine].value:
            latest[engine] = sample
    return _adapters_in(latest.values())


def _adapters_in(infos: Iterable[PageSample]) -> tuple[frozenset[str], frozenset[str], int | None]:
    running: set[str] = set()
    waiting: set[str] = set()
    limit: int | None = None
    for info in infos:
        running |= _names(info.labels.get("running_lora_adapters", ""))
        waiting |= _names(info.labels.get("waiting_lora_adapters", ""))
        found = _count(info.labels.get("max_lora"))
        if found is not None:
            limit = max(found, limit or 0)
    return frozenset(running), frozenset(waiting), limit


def _names(text: str) -> set[str]:
    return {name for word in text.split(",") if (name := word.strip())}


def _custom(
    samples: _Samples, engine: EngineSeries, rank: int | None, problems: list[str]
) -> dict[str, float]:
    """Return the custom numbers, each from the first sample with the latest timestamp."""
    attributes: dict[str, float] = {}
    for name, series in engine.custom:
        matching: Sequence[PageSample] = [
            one for one in samples.get(series.name, ()) if _has(one.labels, series.labels)
        ]
        if rank is not None:
            matching = of_rank(matching, rank)
        if not matching:
            problems.append(f"series '{series.name}' is missing")
            continue
        value = max(matching, key=lambda sample: sample.timestamp_ms or 0).value
        if math.isfinite(value):
            attributes[name] = value
        else:
            problems.append(_unusable(series, value))
    return attributes
