"""The service of a number of workers, predicted from the latency of one.

A step of a worker takes the time of the simulator's linear model:

    seconds = step_overhead + chunk / prefill_tokens_per_second
              + decode_base + decode_per_sequence · B    (if any sequence decodes)

for a chunk of prompt tokens and B decoding sequences. With `r` requests per second at each worker,
of P uncached prompt tokens and O output tokens, prompts take the share u = r·P /
prefill_tokens_per_second of its time, and B = r·(O - 1)·step (Little's law), which gives

    step = (step_overhead + decode_base) / (1 - u - decode_per_sequence · r · (O - 1))

A denominator of 0 or less means overload. The mean time between the tokens of a request is `step`;
its spread is that of B (negative binomial, evened out over the replicas, because the picker sends
requests to the least loaded one), of the output length, and of the prompts that join in that time.

The time to the first token is that of an M/G/n queue of prompts: the wait exceeds t with the
probability `C(n, a) · exp(-2 (n - a) t / ((1 + cv²) S))`, where S is the time of one prompt among
the decoding steps, a = rate · S, and C is Erlang's formula (Allen and Cunneen's correction for
sizes of the squared coefficient of variation cv²); its own log-normal time and half a step follow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from functools import cache
from statistics import NormalDist
from typing import Annotated, Final

import msgspec
from msgspec import structs

from picker.framework.registry import NonNegativeFloat, PositiveFloat, PositiveInt

_NORMAL: Final = NormalDist()
_RESOLUTION_SECONDS: Final = 1e-4
_MAX_SECONDS: Final = 1e6


def _deviates(num: int) -> tuple[float, ...]:
    return tuple(_NORMAL.inv_cdf((i + 0.5) / num) for i in range(num))


_PROMPT_DEVIATES: Final = _deviates(40)
_OUTPUT_DEVIATES: Final = _deviates(12)
_STEP_DEVIATES: Final = _deviates(3)
_MIN_VARIATION: Final = 1e-6  # in place of 0, for logarithms
_HALF_ROOT: Final = math.sqrt(0.5)


class Stage(Enum):
    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerCapacity(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """One worker of the simulator's linear model; `kv_tokens` None: the KV cache sets no limit."""

    prefill_tokens_per_second: PositiveFloat
    decode_base_seconds: PositiveFloat
    decode_per_sequence_seconds: NonNegativeFloat
    step_overhead_seconds: NonNegativeFloat = 0.0
    max_batched_tokens: PositiveInt = 2048
    max_sequences: PositiveInt = 256
    kv_tokens: PositiveInt | None = None

    def slowed(self, factor: float) -> WorkerCapacity:
        return structs.replace(
            self,
            prefill_tokens_per_second=self.prefill_tokens_per_second / factor,
            decode_base_seconds=self.decode_base_seconds * factor,
            decode_per_sequence_seconds=self.decode_per_sequence_seconds * factor,
            step_overhead_seconds=self.step_overhead_seconds * factor,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second to all workers, mean tokens, and squared coefficients of variation."""

    rate: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0
    prompt_variation: float = 1.0
    output_variation: float = 1.0


class LatencyObjective(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """Bounds that at least `share` of the requests must keep; None means no bound."""

    ttft_seconds: PositiveFloat | None = None
    itl_seconds: PositiveFloat | None = None
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.99


@dataclass(frozen=True, slots=True)
class Prediction:
    """The share of requests within the objective; latencies at its `share` (inf if overloaded)."""

    replicas: int
    within: float
    ttft_seconds: float
    itl_seconds: float
    running: float
    busy: float


def predict(
    load: Load, replicas: int, worker: WorkerCapacity, objective: LatencyObjective, stage: Stage
) -> Prediction:
    """Predict the latencies of `replicas` (at least 1) under `load`."""
    pool = _Pool(load, replicas, worker, stage)
    if pool.is_overloaded:
        return Prediction(replicas, 0.0, math.inf, math.inf, math.inf, 1.0)
    return Prediction(
        replicas,
        pool.within(objective),
        pool.prompts.quantile(objective.share) if stage is not Stage.DECODE else 0.0,
        pool.tokens.quantile(objective.share) if stage is not Stage.PREFILL else 0.0,
        pool.running,
        1 - pool.slack,
    )


def replicas_for(
    load: Load, worker: WorkerCapacity, objective: LatencyObjective, stage: Stage, limit: int
) -> tuple[int, float]:
    """Return the fewest replicas for the objective, at most `limit`, and the share within it."""

    @cache
    def within(replicas: int) -> float:
        pool = _Pool(load, replicas, worker, stage)
        return 0.0 if pool.is_overloaded else pool.within(objective)

    found = bisect_left(range(1, limit), True, key=lambda n: within(n) >= objective.share) + 1
    return found, within(found)


class _Pool:
    """The steady state of `replicas`; under overload only `slack` is defined."""

    def __init__(self, load: Load, replicas: int, worker: WorkerCapacity, stage: Stage) -> None:
        self._load, self._worker, self._stage = load, worker, stage
        rate = load.rate / replicas
        fresh = 0.0 if stage is Stage.DECODE else max(0.0, load.prompt_tokens - load.cached_tokens)
        tokens = 0.0 if stage is Stage.PREFILL else max(0.0, load.output_tokens - 1)
        slope = worker.decode_per_sequence_seconds
        self.prompt_seconds = fresh / worker.prefill_tokens_per_second
        self.slack = 1 - rate * self.prompt_seconds - slope * rate * tokens
        self.is_overloaded = self.slack <= 0
        if self.is_overloaded:
            return
        base = worker.step_overhead_seconds + (worker.decode_base_seconds if tokens else 0.0)
        step = base / self.slack
        self.running = rate * tokens * step
        # Negative binomial, because more sequences take longer; evened out over the replicas.
        self.running_spread = math.sqrt(self.running / self.slack / replicas)
        decode = base + slope * self.running
        chunks = max(1.0, fresh / worker.max_batched_tokens)
        variation = load.prompt_variation
        self.prompts = _FirstTokens(
            replicas, load.rate, self.prompt_seconds + chunks * decode, variation, step / 2
        )
        self.is_overloaded = self.prompts.is_overloaded
        if self.is_overloaded:
            return
        # A request that is alone at its worker still counts as running.
        middle = base + slope * max(1.0, self.running)
        spread = slope * self.running_spread
        self.tokens = _NextTokens(
            (middle, spread),
            _points(tokens, load.output_variation, _OUTPUT_DEVIATES),
            (rate * step, self.prompts.waits),
            (self.prompt_seconds, variation),
        )

    def within(self, objective: LatencyObjective) -> float:
        share = 1.0
        if self._stage is not Stage.DECODE and objective.ttft_seconds is not None:
            share *= self.prompts.within(objective.ttft_seconds)
        if self._stage is Stage.PREFILL:
            return share
        if objective.itl_seconds is not None:
            share *= self.tokens.within(objective.itl_seconds)
        return share if self._has_room(objective.share) else 0.0

    def _has_room(self, share: float) -> bool:
        """Return whether the sequences of the busiest worker fit."""
        worker, load = self._worker, self._load
        running = self.running + _NORMAL.inv_cdf(share) * self.running_spread
        context = load.prompt_tokens + load.output_tokens / 2
        fits = worker.kv_tokens is None or running * context <= worker.kv_tokens
        return fits and running <= worker.max_sequences


def _log_normal(mean: float, variation: float) -> tuple[float, float]:
    """Return the mean and deviation of the logarithm of a number with this mean and variation."""
    square = math.log1p(variation)
    return math.log(mean) - square / 2, math.sqrt(square)


def _points(mean: float, variation: float, deviates: tuple[float, ...]) -> list[float]:
    """Return equally probable values of a log-normal number, in ascending order."""
    if mean <= 0:
        return [0.0]
    middle, deviation = _log_normal(mean, variation)
    return [math.exp(middle + deviation * z) for z in deviates]


class _Latency(ABC):
    is_overloaded = False

    @abstractmethod
    def within(self, seconds: float) -> float:
        """Return the share of requests with at most this latency."""

    def quantile(self, share: float) -> float:
        """Return the latency that this share of requests stays within, by bisection to 0.1 ms."""
        if self.is_overloaded:
            return math.inf
        low, high = 0.0, _RESOLUTION_SECONDS
        while self.within(high) < share:
            if high > _MAX_SECONDS:
                return math.inf
            low, high = high, 2 * high
        while high - low > _RESOLUTION_SECONDS:
            middle = (low + high) / 2
            low, high = (low, middle) if self.within(middle) >= share else (middle, high)
        return high


class _FirstTokens(_Latency):
    """Time to first token: prompts of `seconds` queue for `replicas`, then `rest_seconds` pass."""

    def __init__(
        self, replicas: int, rate: float, seconds: float, variation: float, rest_seconds: float
    ) -> None:
        offered = rate * seconds
        self.is_overloaded = offered >= replicas
        if self.is_overloaded:
            return
        own = _points(seconds, variation, _PROMPT_DEVIATES)
        self._own = [one + rest_seconds for one in own]
        self.waits = erlang_c(replicas, offered)
        slowness = (1 + variation) * seconds / 2
        self._decay = (replicas - offered) / slowness if slowness else math.inf

    def within(self, seconds: float) -> float:
        late = sum(self._waits_longer(seconds - own) for own in self._own)
        return 1 - late / len(self._own)

    def _waits_longer(self, seconds: float) -> float:
        return 1.0 if seconds < 0 else self.waits * math.exp(-self._decay * seconds)


class _NextTokens(_Latency):
    """The mean time between the tokens of an answer: decode steps and prompts that join.

    The number of joining prompts is Poisson; the sum of k log-normal prompt times is approximated
    by a log-normal number of equal mean and variance (Fenton and Wilkinson).
    """

    def __init__(
        self,
        step: tuple[float, float],
        answers: list[float],
        joining: tuple[float, float],
        prompt: tuple[float, float],
    ) -> None:
        """`answers` are points of the distribution of output tokens after the first."""
        middle, spread = step
        each, behind = joining
        seconds, variation = prompt
        self._steps = [max(0.0, middle + spread * z) for z in _STEP_DEVIATES]
        self._answers = [
            (tokens, *_poisson(each * tokens + behind if seconds else 0.0)) for tokens in answers
        ]
        # For the sum of k = 1, 2, … prompts: the mean of the logarithm, the scale of its deviation.
        end = max(first + len(chances) for _, first, chances in self._answers)
        sums = (_log_normal(k * seconds, max(variation, _MIN_VARIATION) / k) for k in range(1, end))
        self._sums = [(middle, _HALF_ROOT / deviation) for middle, deviation in sums]

    def within(self, seconds: float) -> float:
        found = 0.0
        for step in self._steps:
            for tokens, first, chances in self._answers:
                left = (seconds - step) * tokens
                if left <= 0:
                    found += float(seconds >= step)
                    continue
                log = math.log(left)
                if not first:
                    found += chances[0]  # no prompt joins
                some = chances[1:] if not first else chances
                sums = self._sums[max(0, first - 1) :]
                found += 0.5 * sum(
                    chance * (1 + math.erf((log - middle) * scale))
                    for chance, (middle, scale) in zip(some, sums, strict=False)
                )
        return found / len(self._steps) / len(self._answers)


def _poisson(mean: float) -> tuple[int, list[float]]:
    """Return the first number with a relevant probability, and the probabilities from there on."""
    first = max(0, int(mean - 4 * math.sqrt(mean)))
    last = int(mean + 4 * math.sqrt(mean)) + 2
    if not mean:
        return 0, [1.0]
    chance = math.exp(first * math.log(mean) - mean - math.lgamma(first + 1))
    chances = [chance]
    for k in range(first + 1, last + 1):
        chance *= mean / k
        chances.append(chance)
    known = sum(chances)  # without the tails
    return first, [one / known for one in chances]


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability of waiting with `offered` < `servers` erlangs."""
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))
