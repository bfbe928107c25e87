"""expected-cost-scorer: prefer the endpoint where a request costs least, itself and others.

    score = least cost of all candidates / cost

Theory of operation. The unit of all terms is a token: the time in which an endpoint reads one token
of a prompt. The cost is the time that the request and those beside it lose, for each token of an
answer:

    cost = s · ((U + P) · F + (R + 1) · U / n + D + 2 · K · R) + M · U · u / (1 − u)

    U   tokens of this prompt that are not cached there          (the prefix producer's match)
    P   tokens of prompts that were sent there and are not read  (the inflight-load-producer's)
    R   requests running and waiting there, own ones at least
    u   share of its KV cache in use
    n   tokens of an answer: a moving mean of those whose usage was seen; before the first, this
        client's limit, else 256
    s   the slowness of the endpoint: 1 on average, see below

First token: the request waits until its own and all earlier prompts are read, U + P. F = 1/40 is
the ratio of two usual objectives, 50 ms from token to token and 2 s to the first one. Reading:
while its prompt is read, R answers and its own stand still, for (R + 1) · U in all, over n tokens
each; so a cached prefix decides more where answers are short. Decoding: a step
takes D without a sequence and K for each, so that one more delays the R others by K each, and they
delay it by K · R. Memory: as u / (1 − u) grows the queue for a resource of which the share u is in
use, and what is not cached there takes U of it.

K = 2.5 and D = 164 are 0.12 and 8 ms at 20,480 prompt tokens a second: Qwen3-32B on two H100
(docs/simulator.md). M = 0.02 was found in simulation: docs/decisions/0060. Only their ratios count,
so an engine that is faster in all respects has the same order.

Slowness. Endpoints may run on different GPUs. When a streamed answer has ended, the time to its
first token is added to the seconds of its endpoint, and U + D + K · R as of its departure to the
work, both after a decay of 1 %. s is seconds / work of the endpoint over that of all endpoints. The
work of 20 mean answers, at the mean pace, is added to both, so that an endpoint with few answers
counts as average. Answers that found a queue or another prompt unread do not count: they measure
waiting, not speed. Without observed answers s is 1.

An endpoint whose load is unknown scores 0.0 beside others whose load is known. While no load is
known, own requests in flight are R, and u is 0. Where a page lacks a signal, own requests stand for
the requests, and the mean of the others for u.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from picker.framework.attributes import Attributes, DataKey, EndpointLoad, inflight_load_key
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType
from picker.plugins._shared.load_signals import kv_usages
from picker.prefix.match import match_info_key
from picker.types import (
    Candidate,
    Candidates,
    FinishCause,
    InferenceRequest,
    ResponseProgress,
    SchedulingResult,
    Usage,
)

FIRST_TOKEN = 1 / 40
STEP_TOKENS = 164.0
SEQUENCE_TOKENS = 2.5
MEMORY = 0.02
FULLEST = 0.99  # the price of memory is finite
ASSUMED_ANSWER_TOKENS = 256.0
DECAY = 0.99
PRIOR_ANSWERS = 20.0
_NO_MATCH: Mapping[str, int] = MappingProxyType({})
_NO_LOADS: Mapping[str, EndpointLoad] = MappingProxyType({})


class ExpectedCostParameters(Parameters, frozen=True):
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    in_flight_load_producer_name: str = "inflight-load-producer"


class _Departure(msgspec.Struct, gc=False):
    """The endpoint of one request, its work until the first token, None if others' prompts are
    read before, and the time of the first token, once it came.
    """

    key: str
    work: float | None
    first_at_seconds: float | None = None


class _Pace(msgspec.Struct, gc=False):
    """The seconds, the work and the number of past answers, decaying sums."""

    seconds: float = 0.0
    work: float = 0.0
    answers: float = 0.0

    def add(self, other: "_Pace", sign: float = 1.0) -> None:
        self.seconds += sign * other.seconds
        self.work += sign * other.work
        self.answers += sign * other.answers


class ExpectedCostScorer:
    """Owns what was learned from answers: their mean length, and the pace of each endpoint."""

    def __init__(self, name: str, parameters: ExpectedCostParameters) -> None:
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._load_key = inflight_load_key(parameters.in_flight_load_producer_name)
        self._departure_key: DataKey[_Departure] = DataKey("Departure", name)
        self.consumes = (self._match_key, self._load_key)
        self._answer_tokens: float | None = None
        self._paces: dict[str, _Pace] = {}
        self._pool = _Pace()
        self._slowness: dict[str, float] = {}

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        info, load = attributes.get(self._match_key), attributes.get(self._load_key)
        matched = _NO_MATCH if info is None else info.match_blocks
        size = 0 if info is None else info.block_size_tokens
        loads = _NO_LOADS if load is None else load.by_endpoint
        # The same number of tokens, already counted.
        tokens = request.num_tokens if load is None else load.default_uncached_tokens
        answer = self._answer_tokens or request.body.max_output_tokens or ASSUMED_ANSWER_TOKENS
        slowness, usages = self._slowness, kv_usages(candidates)
        is_blind = all(candidate.metrics is None for candidate in candidates)
        costs: list[float] = []
        # Inlined: a call for each of hundreds of candidates would cost more than all else.
        for candidate, usage in zip(candidates, usages, strict=True):
            key, metrics, requests = (
                candidate.endpoint.key,
                candidate.metrics,
                candidate.inflight_requests,
            )
            if metrics is not None:
                seen = (metrics.running_requests or 0) + (metrics.waiting_requests or 0)
                if seen > requests:
                    requests = seen
            elif not is_blind:
                costs.append(0.0)
                continue
            uncached = tokens
            if key in matched:
                uncached = tokens - matched[key] * size
                if uncached < 0:
                    uncached = 0
            unread = loads[key].tokens if key in loads else 0
            cost = (
                (uncached + unread) * FIRST_TOKEN
                + (requests + 1) * uncached / answer
                + requests * 2.0 * SEQUENCE_TOKENS
                + STEP_TOKENS
            )
            if slowness:
                cost *= slowness.get(key, 1.0)
            if usage:
                if usage > FULLEST:
                    usage = FULLEST
                cost += MEMORY * uncached * usage / (1.0 - usage)
            costs.append(cost)
        least = min(filter(None, costs), default=0.0)
        return [least / cost if cost else 0.0 for cost in costs]

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Note the endpoint, and the work until the first token of a streamed answer."""
        primary = result.profiles.get(result.primary_profile)
        if primary is None or not primary.picked:
            return
        candidate, load = primary.picked[0].candidate, attributes.get(self._load_key)
        key = candidate.endpoint.key
        work: float | None = None
        queued = 0 if candidate.metrics is None else candidate.metrics.waiting_requests
        if request.body.stream and load is not None and not queued:
            tokens = load.uncached_tokens.get(key, load.default_uncached_tokens)
            unread = load.by_endpoint.get(key)
            # The producer may have counted this prompt already.
            if unread is None or unread.tokens in (0, tokens):
                work = tokens + STEP_TOKENS + SEQUENCE_TOKENS * _requests(candidate)
        attributes[self._departure_key] = _Departure(key, work)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        if progress.is_first:
            departure = flight.attributes.get(self._departure_key)
            if departure is not None:
                departure.first_at_seconds = progress.now_seconds

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        """Learn from an answer whose usage is known."""
        departure = flight.attributes.get(self._departure_key)
        if departure is None or usage is None or usage.completion_tokens < 1:
            return
        mean = self._answer_tokens or usage.completion_tokens
        self._answer_tokens = mean * DECAY + usage.completion_tokens * (1.0 - DECAY)
        first, work = departure.first_at_seconds, departure.work
        if first is not None and work is not None:
            seconds = max(0.0, first - flight.request.received_at_seconds)
            self._learn(departure.key, seconds, work)

    def _learn(self, key: str, seconds: float, work: float) -> None:
        pool, pace = self._pool, self._paces.setdefault(key, _Pace())
        pool.add(pace, -1.0)
        pace.seconds = pace.seconds * DECAY + seconds
        pace.work = pace.work * DECAY + work
        pace.answers = pace.answers * DECAY + 1.0
        pool.add(pace)
        if pool.seconds > 0.0:
            prior = PRIOR_ANSWERS * pool.work / pool.answers
            expected = pool.seconds / pool.work
            self._slowness[key] = (pace.seconds / expected + prior) / (pace.work + prior)

    def endpoint_removed(self, key: str) -> None:
        self._slowness.pop(key, None)
        if (pace := self._paces.pop(key, None)) is not None:
            self._pool.add(pace, -1.0)


def _requests(candidate: Candidate) -> int:
    metrics = candidate.metrics
    if metrics is None:
        return candidate.inflight_requests
    seen = (metrics.running_requests or 0) + (metrics.waiting_requests or 0)
    return max(seen, candidate.inflight_requests)


PLUGIN = PluginType("expected-cost-scorer", ExpectedCostScorer)
