"""Recent traffic: requests to each endpoint, their outcomes, and the work that endpoints report.

All numbers are of one window, the last ten samples. The picker does not know how many tokens an
engine found in its cache, so prefix hits are those that the prefix index *expected* at the
endpoint.

Nor does it see first tokens. A client waits in the picker's queue and then at the endpoint, whose
histogram is scraped. The two waits are independent, because an endpoint does not know the earlier
one, so the times of clients are distributed as the sum of both: the endpoint's histogram shifted by
each wait, weighted by the share of requests with that wait. Waits are counted in buckets whose
edges are about a fifth apart; the mean of each is exact.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import lt, sub

import msgspec

from picker.decisions.decision import Decision
from picker.prefix.match import MATCH_INFO
from picker.types import FinishCause, Percentiles, ServedTotals

WINDOW_SAMPLES = 10
MIN_WAIT_SECONDS = 0.001  # shorter ones are the decision itself, and count as no wait
_BUCKETS_PER_DOUBLING = 4
_REFUSED = (FinishCause.REFUSED, FinishCause.EVICTED)


class Recent(msgspec.Struct, frozen=True):
    """The requests to an endpoint in the window, or since it was first seen. `prompt_tokens` are
    those of prompts that were looked up in a prefix index, `matched_tokens` those that were
    expected in the endpoint's cache.
    """

    requests_per_second: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    failures_per_second: float = 0.0

    @property
    def prefix_hit_share(self) -> float | None:
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else None


class PoolRecent(msgspec.Struct, frozen=True):
    """Requests to a pool in the window: all, refused or evicted ones, and failed ones."""

    requests_per_second: float = 0.0
    refusals_per_second: float = 0.0
    failures_per_second: float = 0.0


class Wait(msgspec.Struct, frozen=True):
    """A wait in the picker, and the share of the requests that left with that wait."""

    seconds: float
    share: float


NO_WAIT = (Wait(0.0, 1.0),)


class Traffic(msgspec.Struct, frozen=True):
    endpoints: Mapping[str, Recent] = {}
    pool: PoolRecent = PoolRecent()
    waits: Sequence[Wait] = NO_WAIT


class _Counts:
    __slots__ = ("before", "failed", "matched", "prompt", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt = self.matched = self.failed = self.refused = 0
        self.before = deque([self._totals()], maxlen=WINDOW_SAMPLES + 1)

    def _totals(self) -> tuple[int, ...]:
        return (self.requests, self.prompt, self.matched, self.failed, self.refused)

    def grown(self, interval_seconds: float) -> tuple[list[int], float]:
        """Return the growth of each total, and the seconds that it took."""
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
    """Counts decisions; `sample` is called once a second."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._pool = _Counts()
        self._waits_now = _Waits()
        self._waits = deque([self._waits_now], maxlen=WINDOW_SAMPLES)

    def decided(self, decision: Decision) -> None:
        self._pool.requests += 1
        waits = self._waits_now
        waits.count += 1
        if decision.decision_seconds >= MIN_WAIT_SECONDS:
            waits.add(decision.decision_seconds)
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
        cause, key = decision.cause, decision.endpoint_key
        if decision.refusal is not None or cause in _REFUSED:
            self._pool.refused += 1
            self._pool.requests += key is None  # otherwise it was decided first
        elif cause is FinishCause.RESET or (decision.response_status or 200) >= 500:
            self._pool.failed += 1
            if key is not None and key in self._counts:
                self._counts[key].failed += 1

    def sample(self, keys: Iterable[str], interval_seconds: float) -> Traffic:
        """Return the recent traffic of each of `keys`; drop the other endpoints."""
        before, self._counts = self._counts, {}
        for key in keys:
            self._counts[key] = before.get(key) or _Counts()
        recent = {key: counts.sample(interval_seconds) for key, counts in self._counts.items()}
        waits = _shares(self._waits)
        self._waits_now = _Waits()
        self._waits.append(self._waits_now)
        return Traffic(recent, self._pool.pool_sample(interval_seconds), waits)


class _Waits:
    __slots__ = ("count", "long")

    def __init__(self) -> None:
        self.count = 0
        self.long: dict[int, tuple[int, float]] = {}  # number and sum of each bucket

    def add(self, seconds: float) -> None:
        bucket = math.floor(_BUCKETS_PER_DOUBLING * math.log2(seconds))
        count, total = self.long.get(bucket, (0, 0.0))
        self.long[bucket] = count + 1, total + seconds


def _shares(samples: Iterable[_Waits]) -> Sequence[Wait]:
    whole, long = 0, dict[int, tuple[int, float]]()
    for sample in samples:
        whole += sample.count
        for bucket, (count, seconds) in sample.long.items():
            known = long.get(bucket, (0, 0.0))
            long[bucket] = known[0] + count, known[1] + seconds
    if not long:
        return NO_WAIT
    waits = [Wait(seconds / count, count / whole) for _, (count, seconds) in sorted(long.items())]
    none = whole - sum(count for count, _ in long.values())
    return [Wait(0.0, none / whole), *waits] if none else waits


def longest_wait(waits: Sequence[Wait], share: float) -> float:
    """Return the wait that at most this share of the requests exceeds."""
    upto = list(accumulate(one.share for one in waits))
    # The shares add up to 1 only within the error of floats.
    return waits[min(bisect_left(upto, share - 1e-9), len(waits) - 1)].seconds


class Served(msgspec.Struct, frozen=True):
    """The work that endpoints report; the pool's `ttft` includes the wait in the picker."""

    ttft: Percentiles | None = None
    tokens_per_second: float | None = None


class ServedWindow:
    """Owns the reports of endpoints at the last samples."""

    def __init__(self) -> None:
        self._before: dict[str, deque[ServedTotals]] = {}

    def sample(
        self, totals: Mapping[str, ServedTotals | None], waits: Sequence[Wait] = NO_WAIT
    ) -> tuple[dict[str, Served], Served]:
        """Return the sums for each endpoint and, with `waits`, the pool; drop absent endpoints."""
        before, self._before = self._before, {}
        each: dict[str, Served] = {}
        whole: Counter[float] = Counter()
        rates: list[float] = []
        for key, now in totals.items():
            if now is None:
                continue
            known = before.get(key)
            if known is None or _has_restarted(known[-1], now):
                known = deque(maxlen=WINDOW_SAMPLES + 1)
            self._before[key] = known
            known.append(now)
            grown, rate = _grown(known[0], now)
            whole.update(grown)
            rates += () if rate is None else (rate,)
            each[key] = Served(percentiles(grown), rate)
        ttft = percentiles_after(waits, whole)
        return each, Served(ttft, math.fsum(rates) if rates else None)


def _has_restarted(then: ServedTotals, now: ServedTotals) -> bool:
    fell = any(map(lt, now.ttft_counts, then.ttft_counts))
    lost = (now.generated_tokens or 0) < (then.generated_tokens or 0)
    return fell or lost or now.ttft_edges != then.ttft_edges


def _grown(then: ServedTotals, now: ServedTotals) -> tuple[dict[float, float], float | None]:
    """Return the new requests by the upper edge of their bucket, and the tokens per second."""
    edges = (*now.ttft_edges, math.inf)
    grown = dict(zip(edges, map(sub, now.ttft_counts, then.ttft_counts), strict=False))
    seconds = now.read_at_seconds - then.read_at_seconds
    if now.generated_tokens is None or then.generated_tokens is None or seconds <= 0:
        return grown, None
    return grown, (now.generated_tokens - then.generated_tokens) / seconds


def percentiles(buckets: Mapping[float, float]) -> Percentiles | None:
    """Interpolate percentiles of `buckets`: requests by upper edge, the last one infinite."""
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


def percentiles_after(waits: Sequence[Wait], buckets: Mapping[float, float]) -> Percentiles | None:
    """Compute `percentiles` of requests with earlier waits. Times are uniform within a bucket."""
    # The changes of the number of requests per second of latency; requests beyond the last edge
    # are at that edge.
    bends, jumps, below = defaultdict[float, float](float), defaultdict[float, float](float), 0.0
    for edge in sorted(buckets):
        count = buckets[edge]
        for wait in waits if count > 0 else ():
            some = count * wait.share
            if math.isinf(edge):
                jumps[below + wait.seconds] += some
            else:
                bends[below + wait.seconds] += some / (edge - below)
                bends[edge + wait.seconds] -= some / (edge - below)
        below = edge
    whole = sum(count for count in buckets.values() if count > 0)
    if not whole:
        return None
    ranks = deque(share * whole for share in (0.5, 0.95, 0.99))
    found, upto, slope, at = list[float](), 0.0, 0.0, 0.0
    for place in sorted(bends.keys() | jumps.keys()):
        reached = upto + slope * (place - at)
        while ranks and slope > 0 and ranks[0] <= reached + 1e-9 * whole:
            found.append(min(place, at + (ranks.popleft() - upto) / slope))
        upto, at, slope = reached + jumps[place], place, slope + bends[place]
        while ranks and ranks[0] <= upto + 1e-9 * whole:
            ranks.popleft()
            found.append(place)
    return Percentiles(*found, *[at] * len(ranks))


def expected_hits(decision: Decision, key: str) -> tuple[int, int]:
    """Return the tokens of a decision's prompt, and those expected in the cache of endpoint `key`.
    Both are 0 without a prefix index. Of several indexes the highest expectation counts.
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
