"""The load of candidates, and the conversion of loads into scores.

A load signal is the number from the last scrape or, if that is greater, the number of this picker's
own requests in flight beyond those that the scrape saw. So a burst between two scrapes spreads
although no scrape has seen it yet. None means "unknown": never scraped, or the scrape is stale.
Unknown is not idle; but while no candidate's load is known, only own in-flight counts can decide.

A page may lack one signal and have the others. An endpoint that only lacks a signal is not unknown:
when candidates are compared, it gets the mean of the endpoints that report the signal, and so
neither gains nor loses. Own requests remain the lower bound, and its other signals count as usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from picker.framework.attributes import EndpointLoad
from picker.types import Candidate, Candidates, EndpointMetrics

_inflight_of = attrgetter("inflight_requests")


def waiting_requests(candidate: Candidate) -> int | None:
    """Return `max(waiting, inflight − running)`; None if the page lacks the waiting requests."""
    metrics = candidate.metrics
    # A page may lack the queue alone; 0 would make its endpoint look idle.
    if metrics is None or metrics.waiting_requests is None:
        return None
    return max(
        metrics.waiting_requests, candidate.inflight_requests - (metrics.running_requests or 0)
    )


def running_requests(candidate: Candidate) -> int | None:
    """Return `max(running, inflight − waiting)`; None if the page lacks the running requests."""
    metrics = candidate.metrics
    if metrics is None or metrics.running_requests is None:
        return None
    return max(
        metrics.running_requests, candidate.inflight_requests - (metrics.waiting_requests or 0)
    )


def own_requests(candidate: Candidate, own: Mapping[str, EndpointLoad] | None) -> int:
    """Return the greater of this picker's two counts of its requests in flight at `candidate`.

    `own` includes stages that are not primary; the candidate's count includes requests that were
    sent under an earlier configuration, or without a body.
    """
    load = None if own is None else own.get(candidate.key)
    return (
        candidate.inflight_requests
        if load is None
        else max(candidate.inflight_requests, load.requests)
    )


def all_own_requests(candidates: Candidates, own: Mapping[str, EndpointLoad] | None) -> list[int]:
    # `own_requests`, inlined because there may be a thousand candidates.
    counts = list(map(_inflight_of, candidates))
    if not own:
        return counts
    return [
        count
        if (load := own.get(candidate.endpoint.key)) is None or load.requests < count
        else load.requests
        for candidate, count in zip(candidates, counts, strict=True)
    ]


def waiting_loads(candidates: Candidates) -> list[float | None]:
    """Return each candidate's queue: the mean if missing, own counts if no load is known."""
    # Inlined: a call for each of a thousand candidates would cost more than all else.
    loads: list[float | None] = [
        None
        if (metrics := candidate.metrics) is None
        or (waiting := metrics.waiting_requests) is None
        or (running := metrics.running_requests) is None
        else waiting
        if waiting > (beyond := candidate.inflight_requests - running)
        else beyond
        for candidate in candidates
    ]
    return _completed(candidates, 0) if None in loads else loads


def running_loads(candidates: Candidates) -> list[float | None]:
    # Inlined, as in `waiting_loads`.
    loads: list[float | None] = [
        None
        if (metrics := candidate.metrics) is None
        or (waiting := metrics.waiting_requests) is None
        or (running := metrics.running_requests) is None
        else running
        if running > (beyond := candidate.inflight_requests - waiting)
        else beyond
        for candidate in candidates
    ]
    return _completed(candidates, 1) if None in loads else loads


def kv_usages(candidates: Candidates) -> list[float | None]:
    """Return each candidate's KV usage: the mean if missing, None if its load is unknown."""
    usages = [
        None if (metrics := candidate.metrics) is None else metrics.kv_cache_usage
        for candidate in candidates
    ]
    if None not in usages:
        return usages
    return with_neutral(usages, [one.metrics is None for one in candidates])


def with_neutral(values: Sequence[float | None], unknown: Sequence[bool]) -> list[float | None]:
    """Return `values` with each None replaced by the mean, except where the load is `unknown`."""
    if None not in values:
        return list(values)
    mean = _mean(values)
    return [
        mean if value is None and not is_unknown else value
        for value, is_unknown in zip(values, unknown, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class MeanReport:
    """The mean of each signal over the pages that report it, 0 if no page does."""

    waiting: float
    running: float
    kv_cache_usage: float

    @classmethod
    def of(cls, candidates: Candidates) -> MeanReport:
        known = [one.metrics for one in candidates if one.metrics is not None]
        return cls(
            _mean([one.waiting_requests for one in known]) or 0.0,
            _mean([one.running_requests for one in known]) or 0.0,
            _mean([one.kv_cache_usage for one in known]) or 0.0,
        )

    def complete(self, metrics: EndpointMetrics) -> tuple[float, float, float]:
        """Return a page's waiting and running requests and KV usage; the means if missing."""
        waiting, running = metrics.waiting_requests, metrics.running_requests
        usage = metrics.kv_cache_usage
        return (
            self.waiting if waiting is None else waiting,
            self.running if running is None else running,
            self.kv_cache_usage if usage is None else usage,
        )


def _completed(candidates: Candidates, signal: int) -> list[float | None]:
    # Nothing is known of any candidate: own counts are the only difference between them.
    if all(candidate.metrics is None for candidate in candidates):
        return [candidate.inflight_requests for candidate in candidates]
    mean, loads = MeanReport.of(candidates), list[float | None]()
    for candidate in candidates:
        if candidate.metrics is None:
            loads.append(None)
            continue
        report = mean.complete(candidate.metrics)
        loads.append(max(report[signal], candidate.inflight_requests - report[1 - signal]))
    return loads


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def unknown_among_known(candidates: Candidates) -> list[bool]:
    """Return which loads are unknown while others are known: those must not look idle."""
    unknown = [candidate.metrics is None for candidate in candidates]
    return [False] * len(unknown) if all(unknown) else unknown


def with_headroom(threshold: float, headroom: float) -> float:
    """Return `threshold · (1 + headroom)`. Raises `ValueError` for an infinite limit."""
    try:
        limit = threshold * (1.0 + headroom)
    except OverflowError:
        limit = math.inf
    if math.isinf(limit):
        raise ValueError(f"headroom must leave a limit that is a number, got {headroom}")
    return limit


def least_first(values: Sequence[float | None]) -> list[float]:
    """Score each value: 1.0 for the least, 0.0 for the greatest, 1.0 for all if they are equal.

    None scores 0.0, like the worst, and is left out of the comparison.
    """
    known = [value for value in values if value is not None]
    greatest, least = max(known, default=0.0), min(known, default=0.0)
    span = greatest - least
    # The halves of two floats never overflow, and keep their order.
    if math.isinf(span):
        return least_first([None if value is None else value / 2 for value in values])
    if span == 0:
        return [0.0 if value is None else 1.0 for value in values]
    return [0.0 if value is None else (greatest - value) / span for value in values]
