"""What the picker sent where lately, what became of it, and what endpoints say that they served.

Nobody tells the picker how many tokens an engine really found in its cache, unless responses pass
through it. So prefix hits are what the configuration's prefix index *expected* at the endpoint that
was picked: right as long as the index is, and there before the engine has begun.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import lt, sub

import msgspec

from picker.decisions.decision import Decision
from picker.prefix.match import MATCH_INFO
from picker.types import FinishCause, Percentiles, ServedTotals

WINDOW_SAMPLES = 10
SERVED_SAMPLES = 30  # percentiles want more requests than rates do
_REFUSED = (FinishCause.REFUSED, FinishCause.EVICTED)


class Recent(msgspec.Struct, frozen=True):
    """What was sent to an endpoint over the last ten samples, or since it was first seen, and how
    many of the requests that ended meanwhile failed there.

    Of the prompts that were looked up in a prefix index: their tokens, and how many of these were
    expected in its cache.
    """

    requests_per_second: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    failures_per_second: float = 0.0

    @property
    def prefix_hit_share(self) -> float | None:
        """In [0, 1]; None when no prompt was looked up."""
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else None


class PoolRecent(msgspec.Struct, frozen=True):
    """Requests to a pool over the last ten samples: all that were decided or refused, those that
    were refused (or evicted in favour of others), and those that failed at an endpoint.
    """

    requests_per_second: float = 0.0
    refusals_per_second: float = 0.0
    failures_per_second: float = 0.0


class Traffic(msgspec.Struct, frozen=True):
    """What was sent lately: to each endpoint, by key, and to the pool."""

    endpoints: Mapping[str, Recent] = {}
    pool: PoolRecent = PoolRecent()


class _Counts:
    """Owns what was sent to one endpoint, or to all: totals, and what they were at the last
    samples.
    """

    __slots__ = ("before", "failed", "matched", "prompt", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.matched = self.failed = self.refused = 0
        self.before = deque([self._totals()], maxlen=WINDOW_SAMPLES + 1)

    def _totals(self) -> tuple[int, ...]:
        return (self.requests, self.prompt, self.matched, self.failed, self.refused)

    def grown(self, interval_seconds: float) -> tuple[list[int], float]:
        """By how much each total grew, and in how many seconds."""
        self.before.append(self._totals())
        grown = [now - then for now, then in zip(self._totals(), self.before[0], strict=True)]
        return grown, (len(self.before) - 1) * interval_seconds

    def sample(self, interval_seconds: float) -> Recent:
        (requests, prompt, matched, failed, _), seconds = self.grown(interval_seconds)
        return Recent(requests / seconds, prompt, matched, failed / seconds)

    def pool_sample(self, interval_seconds: float) -> PoolRecent:
        (requests, _, _, failed, refused), seconds = self.grown(interval_seconds)
        return PoolRecent(requests / seconds, refused / seconds, failed / seconds)


class EndpointTraffic:
    """Watches decisions and counts, and is looked at once a second by `sample`."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._pool = _Counts()

    def decided(self, decision: Decision) -> None:
        """Count a request for the endpoint that it is meant for."""
        self._pool.requests += 1
        if decision.result is None:
            return  # any endpoint will do
        key = decision.result.endpoints[0].key
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
        counts.requests += 1
        prompt, matched = expected_hits(decision, key)
        counts.prompt += prompt
        counts.matched += matched

    def finished(self, decision: Decision) -> None:
        """Count what ended without an answer that anybody wanted."""
        cause, key = decision.cause, decision.endpoint_key
        if decision.refusal is not None or cause in _REFUSED:
            self._pool.refused += 1
            self._pool.requests += key is None  # else it was decided first
        elif cause is FinishCause.RESET or (decision.response_status or 200) >= 500:
            self._pool.failed += 1
            if key is not None and key in self._counts:
                self._counts[key].failed += 1

    def sample(self, keys: Iterable[str], interval_seconds: float) -> Traffic:
        """What was sent to each of `keys` lately; the other endpoints are forgotten.

        `interval_seconds` is what lies between two calls.
        """
        before, self._counts = self._counts, {}
        for key in keys:
            self._counts[key] = before.get(key) or _Counts()
        recent = {key: counts.sample(interval_seconds) for key, counts in self._counts.items()}
        return Traffic(recent, self._pool.pool_sample(interval_seconds))


class Served(msgspec.Struct, frozen=True):
    """What endpoints say that they served over the last thirty samples; None: they do not say, or
    no request got its first token.
    """

    ttft: Percentiles | None = None
    tokens_per_second: float | None = None


class ServedWindow:
    """Owns what endpoints had served at the last samples."""

    def __init__(self) -> None:
        self._before: dict[str, deque[ServedTotals]] = {}

    def sample(self, totals: Mapping[str, ServedTotals | None]) -> tuple[dict[str, Served], Served]:
        """Of each endpoint and of all together; those that are absent are forgotten.

        An endpoint whose counts fell has restarted, and counts from there.
        """
        before, self._before = self._before, {}
        each: dict[str, Served] = {}
        whole: Counter[float] = Counter()
        rates: list[float] = []
        for key, now in totals.items():
            if now is None:
                continue
            known = before.get(key)
            if known is None or _has_restarted(known[-1], now):
                known = deque(maxlen=SERVED_SAMPLES + 1)
            self._before[key] = known
            known.append(now)
            grown, rate = _grown(known[0], now)
            whole.update(grown)
            rates += () if rate is None else (rate,)
            each[key] = Served(percentiles(grown), rate)
        return each, Served(percentiles(whole), math.fsum(rates) if rates else None)


def _has_restarted(then: ServedTotals, now: ServedTotals) -> bool:
    fell = any(map(lt, now.ttft_counts, then.ttft_counts))
    lost = (now.generated_tokens or 0) < (then.generated_tokens or 0)
    return fell or lost or now.ttft_edges != then.ttft_edges


def _grown(then: ServedTotals, now: ServedTotals) -> tuple[dict[float, float], float | None]:
    """Requests by the upper edge of their bucket, and tokens a second."""
    edges = (*now.ttft_edges, math.inf)
    grown = dict(zip(edges, map(sub, now.ttft_counts, then.ttft_counts), strict=False))
    seconds = now.read_at_seconds - then.read_at_seconds
    if now.generated_tokens is None or then.generated_tokens is None or seconds <= 0:
        return grown, None
    return grown, (now.generated_tokens - then.generated_tokens) / seconds


def percentiles(buckets: Mapping[float, float]) -> Percentiles | None:
    """Of requests by the upper edges of their buckets, of which the last is infinite."""
    edges = sorted(buckets)
    upto = list(accumulate(buckets[edge] for edge in edges))
    if not upto or upto[-1] <= 0:
        return None
    return Percentiles(*(_quantile(share * upto[-1], edges, upto) for share in (0.5, 0.95, 0.99)))


def _quantile(rank: float, edges: Sequence[float], upto: Sequence[float]) -> float:
    at = bisect_left(upto, rank)
    below = edges[at - 1] if at else 0.0
    if math.isinf(edges[at]):
        return below
    before = upto[at - 1] if at else 0.0
    return below + (edges[at] - below) * (rank - before) / (upto[at] - before)


def expected_hits(decision: Decision, key: str) -> tuple[int, int]:
    """The tokens of a decision's prompt, and how many of them were expected at endpoint `key`.

    Both are 0 when no prefix index was asked. Of several indexes the one counts that expects most.
    """
    if decision.attributes is None or decision.request is None:
        return 0, 0
    matched = whole = 0
    is_known = False
    for data_key, found in decision.attributes.items():
        if data_key.data_type == MATCH_INFO:
            is_known = True
            matched = max(matched, found.match_blocks.get(key, 0) * found.block_size_tokens)
            whole = max(whole, found.total_blocks * found.block_size_tokens)
    if not is_known:
        return 0, 0
    prompt = decision.request.num_tokens or whole
    return prompt, min(matched, prompt)
