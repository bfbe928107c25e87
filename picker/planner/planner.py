"""The decision of one interval: the next number of replicas of a group of workers.

`slo` forecasts the rate at the time when new replicas will have started, by Holt's level and trend.
The level moves slowly, because a minute of requests is a small sample; a count more than three
standard deviations of a Poisson number away resets it. One standard deviation of the forecast's
error and the waiting requests, to be served in an interval, are added to it. `thresholds` follows
the load-based planner of Dynamo (its `docs/architecture/load_planner.md`). Both results stay within
the bounds, and fall only to the maximum that any of the last `patience_intervals` wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Final

import msgspec

from picker.framework.registry import NonNegativeFloat, Share
from picker.planner.capacity import LatencyObjective, Load, Stage, WorkerCapacity, replicas_for

LEVEL_GAIN: Final = 0.2
TREND_GAIN: Final = 0.05
SHAPE_GAIN: Final = 0.1  # of the mean request
SURPRISE_DEVIATIONS: Final = 3.0
GRACE_INTERVALS: Final = 3
_SHAPE: Final = tuple(one.name for one in fields(Load) if one.name != "rate")
SLOWNESS: Final = (0.5, 4.0)
SLOWNESS_GAIN: Final = 0.1


class Mode(Enum):
    SLO = "slo"
    THRESHOLDS = "thresholds"


class Thresholds(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True
):
    """The limits of waiting requests per replica (prefill) and of KV cache use (others)."""

    queue_up: NonNegativeFloat = 5.0
    queue_down: NonNegativeFloat = 0.2
    kv_up: Share = 0.9
    kv_down: Share = 0.5


NO_OBJECTIVE: Final = LatencyObjective()
DYNAMO_THRESHOLDS: Final = Thresholds()


@dataclass(frozen=True, slots=True)
class Scaling:
    """The settings of one group; without a `worker` only thresholds are possible."""

    mode: Mode
    stage: Stage
    worker: WorkerCapacity | None = None
    objective: LatencyObjective = NO_OBJECTIVE
    thresholds: Thresholds = DYNAMO_THRESHOLDS
    interval_seconds: float = 60.0
    startup_seconds: float = 60.0
    min_replicas: int = 1
    max_replicas: int = 8
    max_step: int | None = None
    patience_intervals: int = 5


@dataclass(frozen=True, slots=True)
class Sums:
    """The count, sum and sum of squares (0: unknown) of some numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Sums:
        known = tuple(values)
        return cls(len(known), sum(known), sum(value * value for value in known))

    def plus(self, value: float) -> Sums:
        return Sums(self.count + 1, self.total + value, self.squares + value * value)

    def merged(self, other: Sums) -> Sums:
        count, total = self.count + other.count, self.total + other.total
        return Sums(count, total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variation(self) -> float:
        if not self.total or not self.squares:
            return 1.0
        return max(0.0, self.squares * self.count / self.total**2 - 1)


NO_SUMS: Final = Sums()


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval. Values are means over it, except for sums and for values at its end."""

    seconds: float
    arrivals: int  # includes refused requests
    replicas: int
    ready: int  # at the end
    cached: Sums = NO_SUMS  # prompt tokens, and those that are in no cache
    fresh: Sums = NO_SUMS
    output: Sums = NO_SUMS
    waiting: int = 0  # at the end
    mean_waiting: float = 0.0
    running: float = 0.0
    kv_usage: float = 0.0
    itl_seconds: float | None = None  # None: nothing measures it
    is_whole: bool = True  # else the metrics of some worker were missing
    hears_all: bool = True  # else there are requests of replicas that are not reached


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted replicas, and the reason; `rate` is the forecast, None without one."""

    replicas: int
    reason: str
    rate: float | None = None


class Planner:
    def __init__(self, scaling: Scaling) -> None:
        """Raises `ValueError` for `slo` without a worker's capacity."""
        if scaling.mode is Mode.SLO and scaling.worker is None:
            raise ValueError("mode slo needs the capacity of a worker")
        self._scaling = scaling
        self._rate = RateForecast()
        self._shape: Load | None = None
        self._slowness = 1.0
        self._wanted: deque[int] = deque(maxlen=max(1, scaling.patience_intervals))
        self._idle_intervals = 0
        self._grace = 0

    def next(self, seen: Observation) -> Plan:
        """Return the plan after an interval; called once for each interval, in order."""
        # Of some replicas, fewer requests than forecast say nothing about all of them.
        if seen.hears_all or seen.arrivals / seen.seconds > self._rate.at(0):
            self._rate.add(seen.arrivals, seen.seconds)
        self._shape = _mixed(self._shape, seen)
        idle = seen.is_whole and not (seen.arrivals or seen.waiting or seen.running)
        self._idle_intervals = self._idle_intervals + 1 if idle else 0
        plan = self._by_slo(seen) if self._scaling.mode is Mode.SLO else self._by_thresholds(seen)
        return self._bounded(plan, seen)

    def _by_slo(self, seen: Observation) -> Plan:
        scaling = self._scaling
        if self._shape is None or scaling.worker is None:
            return Plan(seen.replicas, "no request has arrived yet")
        ahead = (scaling.startup_seconds + seen.seconds) / seen.seconds
        backlog = max(0, seen.waiting - seen.replicas)
        rate = self._rate.at(ahead) + self._rate.error + backlog / seen.seconds
        load = replace(self._shape, rate=rate)
        self._correct(seen)
        worker = scaling.worker.slowed(self._slowness)
        limit = max(1, scaling.max_replicas)
        found, within = replicas_for(load, worker, scaling.objective, scaling.stage, limit)
        why = f"{rate:.3g} requests/s forecast, {within:.2%} within the objective"
        if not load.output_tokens and scaling.stage is not Stage.PREFILL:
            why += "; the length of answers is unknown"
        if within < scaling.objective.share:
            why += f": more than maxReplicas ({limit}) would be needed"
        return Plan(found, why, rate)

    def _correct(self, seen: Observation) -> None:
        """Correct the model by comparing the measured time between tokens with its step."""
        worker = self._scaling.worker
        if seen.itl_seconds is None or worker is None or not seen.running or not seen.replicas:
            return
        each = seen.running / seen.replicas
        step = worker.step_overhead_seconds + worker.decode_base_seconds
        step += worker.decode_per_sequence_seconds * max(1.0, each)
        share = seen.fresh.total / worker.prefill_tokens_per_second / seen.seconds / seen.replicas
        if self._scaling.stage is Stage.BOTH:
            step /= max(0.1, 1 - share)
        if step > 0:
            measured = min(max(seen.itl_seconds / step, SLOWNESS[0]), SLOWNESS[1])
            self._slowness += SLOWNESS_GAIN * (measured - self._slowness)

    def _by_thresholds(self, seen: Observation) -> Plan:
        limits, now = self._scaling.thresholds, seen.replicas
        if self._scaling.stage is Stage.PREFILL:
            value, up, down = seen.mean_waiting / max(1, now), limits.queue_up, limits.queue_down
            load = f"{value:.3g} requests wait at each replica"
        else:
            value, up, down = seen.kv_usage, limits.kv_up, limits.kv_down
            load = f"{value:.0%} of the KV cache is in use"
        if seen.ready < now:
            return Plan(now, f"{now - seen.ready} replicas have yet to start")
        self._grace = max(0, self._grace - 1)
        if not seen.is_whole:
            return Plan(now, "metrics of workers are missing")
        if value > up:
            self._grace = GRACE_INTERVALS
            return Plan(now + 1, f"{load}, more than {up:g}")
        if value < down and not self._grace:
            return Plan(now - 1, f"{load}, less than {down:g}")
        return Plan(now, load)

    def _bounded(self, plan: Plan, seen: Observation) -> Plan:
        scaling, now = self._scaling, seen.replicas
        wanted, reason = plan.replicas, plan.reason
        is_idle = self._idle_intervals >= scaling.patience_intervals
        if is_idle:
            wanted, reason = 0, "no request arrived"
        elif not self._idle_intervals:
            wanted = max(1, wanted)
        if wanted < now and not seen.hears_all:
            is_idle, wanted = False, now
            reason += "; none is removed while a replica of the picker is not reached"
        self._wanted.append(wanted)
        if wanted < now and not is_idle:
            is_known = len(self._wanted) == scaling.patience_intervals
            recent = min(now, max(self._wanted)) if is_known else now
            if recent > wanted:
                reason += f"; stays at {recent}, as wanted recently"
            wanted = recent
        if scaling.max_step is not None:
            wanted = min(max(wanted, now - scaling.max_step), now + scaling.max_step)
        wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
        return Plan(wanted, reason, plan.rate)


class RateForecast:
    """Owns the level (requests per second) and the trend (per interval) of the arrival rate."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0
        self.error = 0.0  # standard deviation of the level

    def add(self, arrivals: int, seconds: float) -> None:
        rate = arrivals / seconds
        if self._level is None:
            self._level, self.error = rate, math.sqrt(arrivals) / seconds
            return
        expected = max(0.0, self._level + self._trend)
        deviation = math.sqrt(max(1.0, expected * seconds)) / seconds
        if abs(rate - expected) > SURPRISE_DEVIATIONS * deviation:
            self._level, self._trend = rate, 0.0
            self.error = deviation
            return
        level = expected + LEVEL_GAIN * (rate - expected)
        self._trend += TREND_GAIN * (level - self._level - self._trend)
        self._level = level
        self.error += LEVEL_GAIN * (
            deviation * math.sqrt(LEVEL_GAIN / (2 - LEVEL_GAIN)) - self.error
        )

    def at(self, intervals: float) -> float:
        """Return the rate forecast for `intervals` after the last one."""
        if self._level is None:
            return 0.0
        return max(0.0, self._level + intervals * self._trend)


def _mixed(before: Load | None, seen: Observation) -> Load | None:
    """Update the mean request with the requests of an interval; None until there has been one."""
    if not seen.fresh.count:
        return before
    fresh, cached, output = seen.fresh, seen.cached, seen.output
    now = (fresh.mean + cached.mean, output.mean, cached.mean, fresh.variation, output.variation)
    if before is None:
        return Load(0.0, *now)
    known = Load(0.0, *now)
    mixed = {
        name: getattr(before, name) + SHAPE_GAIN * (getattr(known, name) - getattr(before, name))
        for name in _SHAPE
    }
    if not output.count or not before.output_tokens:
        answers = known if output.count else before
        mixed["output_tokens"] = answers.output_tokens
        mixed["output_variation"] = answers.output_variation
    return Load(0.0, **mixed)
