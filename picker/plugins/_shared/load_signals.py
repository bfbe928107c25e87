"""What is known of candidates' load, and how loads become scores.

A load signal is what the last scrape reported, but at least what this picker itself has under way
there beyond what that scrape saw. So a burst that arrives between two scrapes spreads although no
scrape has seen it yet. None stands for "unknown": never scraped, or scrapes went stale. Unknown is
not idle; but while no candidate's load is known, own in-flight counts are all there is, and decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from picker.framework.attributes import EndpointLoad
from picker.types import Candidate, Candidates


def waiting_requests(candidate: Candidate) -> int | None:
    """Requests waiting there: `max(waiting, inflight − running)`."""
    metrics = candidate.metrics
    if metrics is None:
        return None
    return max(metrics.waiting_requests, candidate.inflight_requests - metrics.running_requests)


def running_requests(candidate: Candidate) -> int | None:
    """Requests running there: `max(running, inflight − waiting)`."""
    metrics = candidate.metrics
    if metrics is None:
        return None
    return max(metrics.running_requests, candidate.inflight_requests - metrics.waiting_requests)


def own_requests(candidate: Candidate, own: Mapping[str, EndpointLoad] | None) -> int:
    """Requests that this picker has under way there: the greater of its two counts.

    `own` also counts the stages that are not primary; the candidate's own count also knows of
    requests that left under an earlier configuration, or without a body.
    """
    load = None if own is None else own.get(candidate.key)
    return (
        candidate.inflight_requests
        if load is None
        else max(candidate.inflight_requests, load.requests)
    )


def all_own_requests(candidates: Candidates, own: Mapping[str, EndpointLoad] | None) -> list[int]:
    """`own_requests` of each, computed in place as well."""
    counts = [candidate.inflight_requests for candidate in candidates]
    if not own:
        return counts
    return [
        count
        if (load := own.get(candidate.endpoint.key)) is None or load.requests < count
        else load.requests
        for candidate, count in zip(candidates, counts, strict=True)
    ]


def waiting_loads(candidates: Candidates) -> list[int | None]:
    """`waiting_requests` of each; own in-flight counts when it is unknown for all of them.

    Computed in place: a call for each of a thousand candidates would cost more than all else.
    """
    return _or_inflight(
        candidates,
        [
            None
            if (metrics := candidate.metrics) is None
            else waiting
            if (waiting := metrics.waiting_requests)
            > (beyond := candidate.inflight_requests - metrics.running_requests)
            else beyond
            for candidate in candidates
        ],
    )


def running_loads(candidates: Candidates) -> list[int | None]:
    """`running_requests` of each, as `waiting_loads`."""
    return _or_inflight(
        candidates,
        [
            None
            if (metrics := candidate.metrics) is None
            else running
            if (running := metrics.running_requests)
            > (beyond := candidate.inflight_requests - metrics.waiting_requests)
            else beyond
            for candidate in candidates
        ],
    )


def _or_inflight(candidates: Candidates, values: list[int | None]) -> list[int | None]:
    if values.count(None) < len(values):
        return values
    return [candidate.inflight_requests for candidate in candidates]


def unknown_among_known(candidates: Candidates) -> list[bool]:
    """Which candidates' load is unknown while another's is known: those must not look idle."""
    unknown = [candidate.metrics is None for candidate in candidates]
    return [False] * len(unknown) if all(unknown) else unknown


def with_headroom(threshold: float, headroom: float) -> float:
    """`threshold · (1 + headroom)`, the limit that a burst may reach.

    `headroom` is not negative. Raises `ValueError` for a limit that no float can hold.
    """
    try:
        limit = threshold * (1.0 + headroom)
    except OverflowError:
        limit = math.inf
    if math.isinf(limit):
        raise ValueError(f"headroom must leave a limit that is a number, got {headroom}")
    return limit


def least_first(values: Sequence[float | None]) -> list[float]:
    """A score per value, relative to the others: the least 1.0, the greatest 0.0, all equal 1.0.

    None scores 0.0, like the worst, and does not take part in the comparison.
    """
    known = [value for value in values if value is not None]
    greatest, least = max(known, default=0.0), min(known, default=0.0)
    span = greatest - least
    if math.isinf(span):
        return least_first([None if value is None else value / 2 for value in values])
    if span == 0:
        return [0.0 if value is None else 1.0 for value in values]
    return [0.0 if value is None else (greatest - value) / span for value in values]
